"""A writer in a process of its own: for engines that bind memory, threads, devices or process groups."""

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

from xtk.cache_directories import SHARED_MEMORY, shared_memory_is_writable
from xtk.errors import XtkError
from xtk.registry import load_registered
from xtk.rollouts import GENERATORS, generator_ipc
from xtk.rollouts.generator_interface import Completion, GenerationRequest, GeneratorConfig, SamplingConfig
from xtk.rollouts.weight_sync import save_weights
from xtk.subprocesses import block_sigint, environment_without_launcher_variables

SHUTDOWN_SECONDS = 10.0
WEIGHTS_FOLDER_PREFIX = "xtk-weights-"


class SubprocessGenerator:
    """A writer, asked through a pipe. Its process ends with the thread that made it, however that ends.

    Args:
        request: the model; its options are what JSON can hold, and an `adapter`.
        backend: a key of `WRITERS`.
        environment: variables of its process: `CUDA_VISIBLE_DEVICES` for devices of its own, say.

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
        surroundings = {**environment_without_launcher_variables(), "PYTHONPATH": paths, **(environment or {})}
        self._pipe, theirs = Pipe()
        with theirs, block_sigint():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "xtk.rollouts.generator_worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # results are this process's alone
                env=surroundings,
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
        """Start vLLM in a process of its own."""
        return cls(config)

    @property
    def context_length(self) -> int | None:
        """The most tokens of prompt and completion together; None: it does not say."""
        return self._context

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return a completion of each, in order.

        Raises:
            XtkError: what went wrong there, or that the process has ended.
        """
        words, arrays = self._request(
            {"do": "write", "sampling": asdict(sampling)}, generator_ipc.serialize_requests(requests)
        )
        return generator_ipc.deserialize_completions(words["finishes"], arrays)

    def update_weights(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Take new weights.

        Args:
            weights: a folder, or pairs of a name and a tensor, which go through a folder in memory that is removed.

        Raises:
            XtkError: as `write`.
        """
        if isinstance(weights, str | Path):
            self._request({"do": "update", "folder": str(Path(weights).resolve())})
            return
        whole = dict(weights)
        with _folder_for(sum(weight.nbytes for weight in whole.values())) as folder:
            save_weights(whole.items(), folder)
            shutil.copy(self._folder / "config.json", folder)
            self._request({"do": "update", "folder": str(folder)})

    def sleep(self) -> None:
        """Leave the device to others, as far as the backend can."""
        self._request({"do": "rest"})

    def wake_up(self) -> None:
        """Come back to it."""
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
            raise XtkError("the process that writes was ended", where=self._name)
        try:
            generator_ipc.send_message(self._pipe, words, arrays)
            answer, found = generator_ipc.receive_message(self._pipe)
        except (EOFError, OSError):
            raise self._ended() from None
        if "error" in answer:
            raise generator_ipc.deserialize_error(answer)
        return answer, found

    def _ended(self) -> XtkError:
        """Return what is to be told of a process that ended and did not say why."""
        try:
            code = self.process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return XtkError("the process that writes stopped answering", where=self._name)
        if code >= 0:
            return XtkError(
                f"the process that writes ended with exit code {code}",
                where=self._name,
                hint="what it said stands above",
            )
        killed = "memory may have run out" if -code == signal.SIGKILL else None
        return XtkError(
            f"the process that writes was killed by {signal.Signals(-code).name}", where=self._name, hint=killed
        )


@contextlib.contextmanager
def _folder_for(size: int) -> Iterator[Path]:
    """Make a folder for so many bytes, in memory where there is room for twice as many, and remove it."""
    place = tempfile.gettempdir()
    if shared_memory_is_writable() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size:
        place = str(SHARED_MEMORY)
    with tempfile.TemporaryDirectory(prefix=f"{WEIGHTS_FOLDER_PREFIX}{os.getpid()}-", dir=place) as folder:
        yield Path(folder)


def _remove_stale_weights_folders() -> None:
    """Remove the folders in memory of processes that were killed while they handed weights over."""
    for folder in SHARED_MEMORY.glob(f"{WEIGHTS_FOLDER_PREFIX}*"):
        process = folder.name.removeprefix(WEIGHTS_FOLDER_PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
