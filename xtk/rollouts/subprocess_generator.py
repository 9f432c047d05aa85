"""A generator in a separate process, for engines that claim memory, threads, devices or process groups."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from xtk.engines.backend import BackendConfig
from xtk.engines.worker_process import WorkerError, WorkerKind, WorkerProcess, stop_workers
from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.rollouts import GENERATORS
from xtk.rollouts.generator_interface import Completion, GenerationRequest, Generator, SamplingConfig
from xtk.subprocesses import environment_without_launcher_variables
from xtk.writable_cache_folders import SHARED_MEMORY, shared_memory_is_writable

SHUTDOWN_SECONDS = 10.0
WEIGHTS_FOLDER_PREFIX = "xtk-weights-"
GENERATION_WORKER = WorkerKind(
    main="xtk.rollouts.subprocess_generator:serve_generator",
    process="the generation process",
    exit_hint="see its output above for the cause",
    signal_hint="see its output above",
    memory_hint="check whether the machine ran out of memory",
)


class SubprocessGenerator(Generator):
    """A generator in a subprocess, called through a pipe. The subprocess ends with the thread that started it."""

    def __init__(
        self, config: BackendConfig, backend: str = "vllm", environment: Mapping[str, str] | None = None
    ) -> None:
        load_registered(GENERATORS, backend, "backend")  # refuses an unknown name before a process is started
        _remove_stale_weights_folders()
        self._name = f"{config.model.name}, run by {backend}"
        variables = {**environment_without_launcher_variables(), **(environment or {})}
        self._worker = WorkerProcess(GENERATION_WORKER, self._name, variables)
        self.process = self._worker.process
        try:
            self._worker.send((backend, config))
            self._context: int | None = self._worker.receive()
        except BaseException:
            self.close()
            raise

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion together; None if unknown."""
        return self._context

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""
        completions: list[Completion] = self._call("generate", list(requests), sampling)
        return completions

    def update_weights(self, folder: Path) -> None:
        """Load weights from a folder."""
        self._call("update_weights", folder.resolve())

    def sleep(self) -> None:
        """Free device memory, as far as the backend can."""
        self._call("sleep")

    def wake_up(self) -> None:
        """Take the device memory again."""
        self._call("wake_up")

    def close(self) -> None:
        """End the process."""
        stop_workers([self._worker], SHUTDOWN_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the generator in the subprocess."""
        if self._worker.pipe.closed:
            raise XtkError(
                "the generation process is closed already, so it cannot generate",
                where=self._name,
                hint="create a new SubprocessGenerator",
            )
        self._worker.send((method, arguments))
        return self._worker.receive()


def serve_generator(pipe: Connection) -> None:
    """Open a backend and call its methods as the parent requests; after an error, the process continues."""
    backend, config = pipe.recv()
    generator = load_registered(GENERATORS, backend, "backend").open(config)
    pipe.send(generator.context_length)
    while True:
        method, arguments = pipe.recv()
        try:
            reply = getattr(generator, method)(*arguments)
        except Exception as failure:
            reply = WorkerError.from_exception(failure, GENERATION_WORKER.process)
        pipe.send(reply)


def folder_in_shared_memory(size: int) -> tempfile.TemporaryDirectory[str] | None:
    """Return a temporary folder in shared memory for `size` bytes; None: fewer than twice as many are free.

    If this process is killed, the next `SubprocessGenerator` of the machine removes it.
    """
    if not SHARED_MEMORY.is_dir() or not shared_memory_is_writable():
        return None
    if shutil.disk_usage(SHARED_MEMORY).free <= 2 * size:
        return None
    return tempfile.TemporaryDirectory(prefix=f"{WEIGHTS_FOLDER_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY)


def _remove_stale_weights_folders() -> None:
    """Remove folders in shared memory that killed processes left during a weight update."""
    for folder in SHARED_MEMORY.glob(f"{WEIGHTS_FOLDER_PREFIX}*"):
        process = folder.name.removeprefix(WEIGHTS_FOLDER_PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
