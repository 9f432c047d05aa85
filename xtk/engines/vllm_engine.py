"""vLLM in this process, or in workers that it starts."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xtk import terminal
from xtk.errors import XtkError
from xtk.registry import nearest_name


def import_vllm() -> Any:
    """Return the module.

    Raises:
        XtkError: it is not installed.
    """
    # vLLM writes its log to stdout, which carries xtk's results, unless it is told otherwise before it is imported.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Tokenizers and Arrow have threads by now; a fork would take over their locks, and not them.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        import vllm
    except ImportError as wrong:
        raise XtkError(
            f"--backend vllm needs vLLM, which cannot be imported: {wrong}",
            hint="pip install 'xtk[vllm]'; or --backend server, for a server that runs elsewhere",
        ) from None
    return vllm


class VllmEngine:
    """`vllm.LLM`, whose workers do not outlive this process.

    Args:
        settings: its arguments.
        name: of the model, for messages.
        who: starts it, for messages.

    Attributes:
        llm: the `vllm.LLM`.

    Raises:
        XtkError: vLLM is not installed, or cannot run this model.
    """

    def __init__(self, settings: dict[str, Any], name: str, command: str) -> None:
        vllm = import_vllm()
        self.name = name
        others = set(multiprocessing.active_children())
        terminal.note(f"{command}: vLLM starts; VLLM_LOGGING_LEVEL=INFO tells what it does")
        try:
            with _preserve_random_state():
                self.llm = vllm.LLM(**settings)
        except Exception as wrong:  # vLLM and torch raise dozens; to the user all mean that it cannot be run
            raise self.error("vLLM cannot run this model", wrong) from wrong
        self._guard = _guard([child.pid for child in multiprocessing.active_children() if child not in others])
        atexit.register(self.close)

    @property
    def vocab_size(self) -> int:
        """V, the columns of its distributions."""
        return int(self.llm.llm_engine.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and what follows it at most."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    def generate(self, prompts: Sequence[dict[str, Any]], sampling_params: Sequence[Any], action: str) -> list[Any]:
        """Return vLLM's outputs of some prompts, in order.

        Raises:
            XtkError: it fails; `what` says at what.
        """
        try:
            return list(self.llm.generate(list(prompts), list(sampling_params), use_tqdm=False))
        except Exception as wrong:
            raise self.error(f"vLLM cannot {action}", wrong) from wrong

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        atexit.unregister(self.close)
        # vLLM has no public way. Left alone, Python waits at its end for the engine, which waits for work.
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None

    def error(self, message: str, cause: Exception) -> XtkError:
        """Return what is to be told of vLLM's error."""
        text = " ".join(str(cause).split())
        hint = None
        if "unexpected keyword argument" in text:
            from vllm.engine.arg_utils import EngineArgs

            option = text.rpartition("argument")[2].strip(" '\"")
            near = nearest_name(option, [known.replace("_", "-") for known in EngineArgs.__dataclass_fields__])
            text = f"it has no engine option {option!r}"
            hint = f"did you mean --engine {near.replace('-', '_')}=...?" if near else None
        elif "does not use offset" in text:  # vLLM 0.32: it turns back a generator that a CPU's has no way to
            hint = (
                "on a CPU vLLM cannot draw with seeds where a prompt is read in parts: the engine's option "
                "max_num_batched_tokens=N, as many as the prompts of a batch have"
            )
        elif "_lib_fn_wrapper" in text:  # Numba's, which vLLM 0.32 on a CPU finds where it looks for its kernels
            hint = "unset VLLM_ENABLE_V1_MULTIPROCESSING: with 0, vLLM cannot start in a process that imported Numba"
        elif "out of memory" in text.lower() or "Engine" in text + type(cause).__name__:
            hint = (
                "the cause is above; where it is memory: --engine gpu_memory_utilization=0.8, a smaller --batch-tokens"
            )
        return XtkError(f"{message}: {type(cause).__name__}: {text[:500]}", where=self.name, hint=hint)


@contextlib.contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Leave the draws of this process as they were: vLLM seeds Python, NumPy and torch where it starts."""
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
    """Start a shell that takes processes down when this one ends, however it ends.

    vLLM's engine outlives a parent that was killed, idle and with its GPUs' memory, so that the same command could not
    go on. The shell waits for the end of its input, which comes when the kernel closes this process's files.
    """
    if not processes:
        return None
    script = 'read -r _; kill "$@" 2>/dev/null'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *map(str, processes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process
    )
