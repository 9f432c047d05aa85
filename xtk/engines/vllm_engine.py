"""Offline vLLM engine, in this process or in workers that it starts."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xtk import terminal
from xtk.engines.backend import BackendConfig, check_not_reserved, parse_engine_options
from xtk.errors import XtkError
from xtk.name_registry import nearest_name

# Engine options that xtk sets, with the xtk option to use instead; None: there is none.
RESERVED_OPTIONS: dict[str, str | None] = {
    "dtype": "--dtype (in distill: --rollout-dtype)",
    "trust_remote_code": "--trust-remote-code",
    "max_logprobs": None,
    "logprobs_mode": None,
    "skip_tokenizer_init": None,
    "seed": None,
}


def import_vllm() -> Any:
    """Return the vllm module."""
    # vLLM writes its log to stdout, which xtk uses for results, unless this is set before the import.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Tokenizers and Arrow have started threads; a fork would copy their locks but not the threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        import vllm
    except ImportError as failure:
        raise XtkError(
            f"the backend vllm needs the package vllm, which cannot be imported: {failure}",
            hint="run pip install '.[vllm]' in xtk's repository, or use the backend server with a running vLLM server",
        ) from None
    return vllm


class VllmEngine:
    """A `vllm.LLM` whose workers end with this process.

    Args:
        config: the model. Option `engine`: arguments of `vllm.LLM` from the user, a mapping or `name=value` words.
        command: the xtk command, for messages.
        reserved: arguments that the user cannot set in addition to `RESERVED_OPTIONS`, as there.
        settings: arguments of `vllm.LLM` from the caller; those of the user replace them.
    """

    def __init__(
        self, config: BackendConfig, command: str, reserved: Mapping[str, str | None], settings: Mapping[str, Any]
    ) -> None:
        engine = parse_engine_options(config.options.get("engine") or {})
        check_not_reserved(engine, {**RESERVED_OPTIONS, **reserved})
        own = {
            "model": str(config.model.folder),
            "dtype": config.model.dtype,
            "trust_remote_code": config.model.trust_remote_code,
            "seed": 0,
            "logprobs_mode": "raw_logprobs",
        }
        vllm = import_vllm()
        self.name = config.model.name
        others = set(multiprocessing.active_children())
        terminal.note(f"{command}: starting vLLM (set VLLM_LOGGING_LEVEL=INFO to see its log)")
        try:
            with _preserve_random_state():
                self.llm = vllm.LLM(**{**own, **settings, **engine})
        except Exception as failure:  # vLLM and torch raise dozens of types; all mean that the model cannot be run
            raise self.error("vLLM cannot run this model", failure) from failure
        self._guard = _guard([child.pid for child in multiprocessing.active_children() if child not in others])
        atexit.register(self.close)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V of the model's logits."""
        return int(self.llm.llm_engine.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of a prompt with its completion."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    def generate(self, prompts: Sequence[dict[str, Any]], sampling_params: Sequence[Any], action: str) -> list[Any]:
        """Return vLLM's outputs for prompts, in order."""
        try:
            return list(self.llm.generate(list(prompts), list(sampling_params), use_tqdm=False))
        except Exception as failure:
            raise self.error(f"vLLM cannot {action}", failure) from failure

    def close(self) -> None:
        """Stop the engine and free its memory."""
        atexit.unregister(self.close)
        # vLLM has no public API for this. Otherwise Python waits at exit for the engine, which waits for work.
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def error(self, message: str, cause: Exception) -> XtkError:
        """Return an XtkError for an exception of vLLM, with a hint for known causes."""
        text = " ".join(str(cause).split())
        hint = None
        if "unexpected keyword argument" in text:
            from vllm.engine.arg_utils import EngineArgs

            option = text.rpartition("argument")[2].strip(" '\"")
            near = nearest_name(option, [known.replace("_", "-") for known in EngineArgs.__dataclass_fields__])
            text = f"vLLM has no engine argument {option!r}"
            hint = f"did you mean --engine {near.replace('-', '_')}=...?" if near else f"remove --engine {option}"
        elif "out of memory" in text.lower() or "Engine" in text + type(cause).__name__:
            hint = (
                "see vLLM's log above for the cause; if memory is short, use --engine max_model_len=4096 (at least a "
                "prompt and its completion), gpu_memory_utilization=0.8 (less on the GPU of a student; of a --teacher: "
                "engine.gpu_memory_utilization) or a smaller --batch-tokens"
            )
        return XtkError(f"{message}: {type(cause).__name__}: {text[:500]}", where=self.name, hint=hint)


@contextlib.contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore this process's random states on exit: vLLM seeds Python, NumPy and torch when it starts."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


def _guard(processes: list[int | None]) -> subprocess.Popen[bytes] | None:
    """Start a shell that kills processes when this process ends, for any reason.

    vLLM's engine survives a killed parent, idle, and keeps its GPU memory, so that the command could not be run again.
    The shell waits for end of file on its stdin, which comes when the kernel closes this process's files.
    """
    if not processes:
        return None
    script = 'read -r _; kill "$@" 2>/dev/null'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *map(str, processes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not reach the shell
    )
