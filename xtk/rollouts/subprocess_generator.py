"""A generator in a separate process, for engines that claim memory, threads, devices or process groups."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.rollouts import GENERATORS, generator_ipc
from xtk.rollouts.engine_weight_files import save_weights
from xtk.rollouts.generator_interface import Completion, GenerationRequest, GeneratorConfig, SamplingConfig
from xtk.subprocesses import block_sigint, environment_without_launcher_variables
from xtk.writable_cache_folders import SHARED_MEMORY, shared_memory_is_writable

SHUTDOWN_SECONDS = 10.0
WEIGHTS_FOLDER_PREFIX = "xtk-weights-"


class SubprocessGenerator:
    """A generator in a subprocess, called through a pipe. The subprocess ends with the thread that started it.

    Args:
        config: the model; its options must be JSON values, except for `adapter` (a path).
        backend: a key of `GENERATORS`.
        environment: environment variables of the subprocess, such as `CUDA_VISIBLE_DEVICES`.

    Raises:
        XtkError: the backend cannot open the model.
    """

    def __init__(
        self, config: GeneratorConfig, backend: str = "vllm", environment: Mapping[str, str] | None = None
    ) -> None:
        load_registered(GENERATORS, backend, "backend")
        _remove_stale_weights_folders()
        self._name, self._folder = f"{config.name}, run by {backend}", config.folder
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        variables = {**environment_without_launcher_variables(), "PYTHONPATH": paths, **(environment or {})}
        self._pipe, theirs = Pipe()
        with theirs, block_sigint():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "xtk.rollouts.generator_worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout is for the results of the parent
                env=variables,
                pass_fds=[theirs.fileno()],
            )
        try:
            words, _ = self._request({"backend": backend, "request": generator_ipc.serialize_config(config)})
        except BaseException:
            self.close()
            raise
        self._context: int | None = words["context"]

    @classmethod
    def open(cls, config: GeneratorConfig) -> Self:
        """Start vLLM in a separate process."""
        return cls(config)

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion together; None if unknown."""
        return self._context

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order.

        Raises:
            XtkError: the backend fails, or the process has ended.
        """
        words, arrays = self._request(
            {"do": "write", "sampling": asdict(sampling)}, generator_ipc.serialize_requests(requests)
        )
        return generator_ipc.deserialize_completions(words["finishes"], arrays)

    def update_weights(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Load new weights.

        Args:
            weights: a folder, or pairs of name and tensor, which pass through a temporary folder in memory.

        Raises:
            XtkError: as `generate`.
        """
        if isinstance(weights, str | Path):
            self._request({"do": "update", "folder": str(Path(weights).resolve())})
            return
        tensors = dict(weights)
        with _folder_for(sum(weight.nbytes for weight in tensors.values())) as folder:
            save_weights(tensors.items(), folder)
            shutil.copy(self._folder / "config.json", folder)
            self._request({"do": "update", "folder": str(folder)})

    def sleep(self) -> None:
        """Free device memory, as far as the backend can."""
        self._request({"do": "sleep"})

    def wake_up(self) -> None:
        """Take the device memory again."""
        self._request({"do": "wake"})

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        for stop in (None, self.process.terminate, self.process.kill):
            if stop is not None:
                stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SHUTDOWN_SECONDS)
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(
        self, words: dict[str, Any], arrays: generator_ipc.Arrays | None = None
    ) -> tuple[Any, generator_ipc.Arrays]:
        if self._pipe.closed:
            raise XtkError(
                "the generation process is closed already, so it cannot generate",
                where=self._name,
                hint="create a new SubprocessGenerator",
            )
        try:
            generator_ipc.send_message(self._pipe, words, arrays)
            response, found = generator_ipc.receive_message(self._pipe)
        except (EOFError, OSError):
            raise self._ended() from None
        if "error" in response:
            raise generator_ipc.deserialize_error(response)
        return response, found

    def _ended(self) -> XtkError:
        """Return an error for a process that ended without sending one."""
        try:
            code = self.process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return XtkError(
                "the generation process stopped responding and was killed",
                where=self._name,
                hint="see its output above, then run the same command again",
            )
        if code >= 0:
            return XtkError(
                f"the generation process ended with exit code {code}",
                where=self._name,
                hint="see its output above for the cause",
            )
        killed = "check whether the machine ran out of memory" if -code == signal.SIGKILL else "see its output above"
        return XtkError(
            f"the generation process was killed by {signal.Signals(-code).name}", where=self._name, hint=killed
        )


@contextlib.contextmanager
def _folder_for(size: int) -> Iterator[Path]:
    """Yield a temporary folder for `size` bytes, in shared memory if twice as many are free, and remove it."""
    place = tempfile.gettempdir()
    if shared_memory_is_writable() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size:
        place = str(SHARED_MEMORY)
    with tempfile.TemporaryDirectory(prefix=f"{WEIGHTS_FOLDER_PREFIX}{os.getpid()}-", dir=place) as folder:
        yield Path(folder)


def _remove_stale_weights_folders() -> None:
    """Remove folders in shared memory that killed processes left during a weight update."""
    for folder in SHARED_MEMORY.glob(f"{WEIGHTS_FOLDER_PREFIX}*"):
        process = folder.name.removeprefix(WEIGHTS_FOLDER_PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
