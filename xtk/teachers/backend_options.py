"""What only the backend knows: options of an engine, addresses of servers, an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtk.engines.engine_options import parse_engine_options
from xtk.errors import XtkError


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
    given: dict[str, Any] = {"engine": parse_engine_options(engine)} if engine or backend == "vllm" else {}
    if num_processes > 1 and given.get("engine", {}).get("tp_size", 1) != 1:
        raise XtkError("--num-processes and --engine tp_size do not go together", hint="one or the other")
    if backend == "server":
        return {"servers": list(servers), "concurrency": concurrency}
    return {**given, **({"adapter": adapter} if adapter else {})}
