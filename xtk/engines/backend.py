"""Base class of backends of teachers and of generation: what a backend supports, its configuration and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from xtk.engines.engine_options import parse_engine_options
from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BackendConfig:
    """Configuration for opening a model with a backend.

    Attributes:
        folder: local model folder; tokenizer and configuration are enough for a backend that uses servers.
        name: name of the model in messages.
        tokenizer: the model's.
        dtype: of weights and computation, a value of `--dtype`.
        batch_tokens: maximum tokens computed at once, padding included.
        trust_remote_code: allow model code from the model's folder.
        options: options of one backend, by name.
    """

    folder: Path
    name: str
    tokenizer: Tokenizer
    dtype: str = "float32"
    batch_tokens: int = 8192
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Backend:
    """A backend. A subclass sets what differs.

    Attributes:
        uses_servers: the model runs on servers at given addresses; its weights are not read on this machine.
        has_engine_options: it accepts options of an engine.
        supports_adapters: the model may be a PEFT adapter of another one.
        runs_loaded_model: it runs a transformers model, and can use a loaded one, such as the one in training.
    """

    uses_servers: ClassVar[bool] = False
    has_engine_options: ClassVar[bool] = False
    supports_adapters: ClassVar[bool] = False
    runs_loaded_model: ClassVar[bool] = False

    @classmethod
    def needs_subprocess(cls, engine: Mapping[str, Any]) -> bool:
        """Return whether it needs a subprocess during training, since it cannot release memory or devices itself."""
        return False


def backends_with(backends: Mapping[str, str], condition: Callable[[type[Backend]], bool]) -> str:
    """Return the names of the backends of a table that meet a condition: `transformers or vllm`."""
    return " or ".join(name for name in backends if condition(load_registered(backends, name, "backend")))


def check_backend_options(
    backends: Mapping[str, str],
    backend: str,
    *,
    engine: Sequence[str] | Mapping[str, Any] = (),
    servers: Sequence[str] = (),
    prefix: str = "--",
) -> None:
    """Refuse options that do not apply to a backend.

    Args:
        prefix: of the options on the command line.
    """
    kind: type[Backend] = load_registered(backends, backend, "backend")
    checks: list[tuple[str, object, Callable[[type[Backend]], bool]]] = [
        ("engine", engine, lambda one: one.has_engine_options),
        ("server", servers, lambda one: one.uses_servers),
    ]
    for name, values, applies in checks:
        if values and not applies(kind):
            able = backends_with(backends, applies)
            hint = f"add {prefix}backend {able.split(' or ')[0]}, or remove {prefix}{name}"
            if kind.uses_servers:
                hint = f"remove {prefix}{name} and set the options of the engine when you start the server"
            raise XtkError(f"{prefix}{name} needs {prefix}backend {able}", hint=hint)


def backend_options(
    backends: Mapping[str, str],
    backend: str,
    *,
    engine: Sequence[str] = (),
    servers: Sequence[str] = (),
    concurrency: int = 1,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Return the options of one backend, by name, from the command line.

    Args:
        engine: `name=value` options of --engine.
        concurrency: requests in flight on all servers together.
        adapter: folder of a PEFT adapter, if the model is one.
    """
    check_backend_options(backends, backend, engine=engine, servers=servers)
    kind: type[Backend] = load_registered(backends, backend, "backend")
    if adapter and not kind.supports_adapters:
        able = backends_with(backends, lambda one: one.supports_adapters)
        raise XtkError(
            f"--backend {backend} does not support adapters",
            where=str(adapter),
            hint=f"use --backend {able}, or merge the adapter into its base model (PEFT: merge_and_unload)",
        )
    if kind.uses_servers:
        return {"servers": list(servers), "concurrency": concurrency}
    given = {"engine": parse_engine_options(engine), "adapter": adapter}
    return {name: value for name, value in given.items() if value}
