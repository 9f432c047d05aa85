"""Command-line options that only one backend supports: engine options, servers, an adapter."""

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
    """Return the `backend_options` of a `BackendConfig`.

    Args:
        backend: a key of `BACKENDS`.
        engine: `name=value` options of --engine.
        servers: addresses.
        concurrency: requests in flight on all servers together.
        adapter: folder of a PEFT adapter, if the teacher is one.
        num_processes: processes that open the teacher.

    Raises:
        XtkError: an option does not fit the backend.
    """
    if engine and backend == "server":
        raise XtkError(
            "--engine needs --backend transformers or vllm",
            hint="remove --engine and set the options of the engine when you start the server",
        )
    if servers and backend != "server":
        raise XtkError("--server needs --backend server", hint="add --backend server, or remove --server")
    if adapter and backend != "transformers":
        raise XtkError(
            f"--backend {backend} does not support adapters",
            where=str(adapter),
            hint="use --backend transformers, or merge the adapter into its base model (PEFT: merge_and_unload)",
        )
    given: dict[str, Any] = {"engine": parse_engine_options(engine)} if engine or backend == "vllm" else {}
    if num_processes > 1 and given.get("engine", {}).get("tp_size", 1) != 1:
        raise XtkError("--num-processes cannot be combined with --engine tp_size", hint="remove one of these options")
    if backend == "server":
        return {"servers": list(servers), "concurrency": concurrency}
    return {**given, **({"adapter": adapter} if adapter else {})}
