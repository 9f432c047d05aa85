"""Base class of backends of teachers and of generation: what a backend supports, its configuration and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from xtk.errors import XtkError
from xtk.models.resolver import ModelRef
from xtk.name_registry import load_registered
from xtk.options.spec_parsing import parse_pair
from xtk.text.tokenizer import Tokenizer

SHARED_DEVICE_PART = 0.3  # of the device's memory, for vLLM's weights and cache; vLLM's own default is 0.92


@dataclass(frozen=True)
class BackendConfig:
    """Configuration for opening a model with a backend."""

    model: ModelRef
    tokenizer: Tokenizer
    batch_tokens: int = 8192  # maximum tokens computed at once, padding included
    options: Mapping[str, Any] = field(default_factory=dict)  # of one backend, by name


class Backend:
    """A backend. A subclass sets what differs."""

    uses_servers: ClassVar[bool] = False  # the model runs on given servers; its weights are not read on this machine
    has_engine_options: ClassVar[bool] = False  # it accepts options of an engine
    supports_adapters: ClassVar[bool] = False  # the model may be a PEFT adapter of another one
    runs_loaded_model: ClassVar[bool] = False  # it can run a loaded transformers model, such as the one in training

    @classmethod
    def needs_subprocess(cls, engine: Mapping[str, Any]) -> bool:
        """Return whether it needs a subprocess during training, since it cannot release memory or devices itself."""
        return False


def engine_beside_student(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options with a limit of its memory, unless they have one: the student is on the same device."""
    has_limit = engine.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"}
    return dict(engine) if has_limit else {**engine, "gpu_memory_utilization": SHARED_DEVICE_PART}


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
    """Refuse options that do not apply to a backend; `prefix`: of the options on the command line."""
    kind: type[Backend] = load_registered(backends, backend, "backend")
    for name, values, ability in (("engine", engine, "has_engine_options"), ("server", servers, "uses_servers")):
        if values and not getattr(kind, ability):
            able = backends_with(backends, attrgetter(ability))
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
    """Return the options of one backend, by name, from the command line."""
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
    return {"engine": given} if (given := parse_engine_options(engine)) else {}


def parse_engine_options(words: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return engine options from `name=value` words, with YAML values: numbers, true, "text", {"a": 1}.

    A mapping is returned as a dict, unchanged.
    """
    import yaml

    if isinstance(words, Mapping):
        return dict(words)
    options: dict[str, Any] = {}
    for word in words:
        name, value = parse_pair(word.removeprefix("--"), f"--engine {word}")
        if name in options:
            raise XtkError(f"--engine {name} is given twice", hint="remove one of them")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as failure:
            raise XtkError(
                f"--engine {name}: {value!r} is not valid YAML: {failure}",
                hint='use a number, true, false, text, or {"key": value}',
            ) from None
    return options


def check_not_reserved(engine: Mapping[str, Any], reserved: Mapping[str, str | None]) -> None:
    """Refuse engine options that xtk sets; `reserved`: {name: the xtk option to use instead; None: there is none}."""
    for name in engine:
        if name in reserved:
            instead = reserved[name]
            hint = f"use {instead}" if instead else f"remove {name}"
            raise XtkError(f"the engine option {name} is not allowed: xtk sets this argument", hint=hint)
