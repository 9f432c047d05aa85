"""What a backend is told beside what xtk says itself: `--engine name=value`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtk.errors import XtkError


def engine_options(words: Sequence[str]) -> dict[str, Any]:
    """Read `name=value` words, values as in YAML: numbers, true, "text", {"a": 1}.

    Raises:
        XtkError: a word has no "=", or comes twice.
    """
    import yaml

    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name:
            raise XtkError(f"--engine {word!r} is no name=value", hint="--engine tensor_parallel_size=4")
        if name in options:
            raise XtkError(f"--engine {name} is given twice")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as wrong:
            raise XtkError(f"--engine {name}: {value!r} is no value: {wrong}") from None
    return options


def backend_options(
    backend: str,
    engine: Sequence[str],
    servers: Sequence[str],
    concurrency: int,
    adapter: Path | None,
    num_processes: int = 1,
) -> dict[str, Any]:
    """Return what only the backend knows.

    Args:
        backend: a key of `BACKENDS`.
        engine: `name=value` words.
        servers: addresses.
        concurrency: requests in flight on all servers.
        adapter: a folder of peft's, if the teacher is one.
        num_processes: that open the teacher each.

    Raises:
        XtkError: an option of another backend.
    """
    if engine and backend == "server":
        raise XtkError("--engine is for --backend transformers or vllm; a server has its own")
    if servers and backend != "server":
        raise XtkError(f"--server is for --backend server, not {backend}")
    if adapter and backend != "transformers":
        raise XtkError(
            "only --backend transformers reads adapters",
            where=str(adapter),
            hint="merge it into its model (peft: merge_and_unload), and save that",
        )
    given: dict[str, Any] = {"engine": engine_options(engine)} if engine or backend == "vllm" else {}
    if num_processes > 1 and given.get("engine", {}).get("tp_size", 1) != 1:
        raise XtkError("--num-processes and --engine tp_size do not go together", hint="one or the other")
    if backend == "server":
        return {"servers": list(servers), "concurrency": concurrency}
    return {**given, **({"adapter": adapter} if adapter else {})}


def refuse_reserved(engine: Mapping[str, Any], reserved: Mapping[str, str | None]) -> None:
    """Refuse options that xtk says itself.

    Args:
        engine: the options.
        reserved: their names, and where a user says them; None: nowhere.

    Raises:
        XtkError: tells where.
    """
    for name in engine:
        if name in reserved:
            instead = reserved[name]
            raise XtkError(f"--engine {name} is set by xtk" + (f": use {instead}" if instead else ""))
