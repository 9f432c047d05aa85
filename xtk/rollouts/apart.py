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

from xtk.caches import SHARED_MEMORY, shared_memory_is_writable
from xtk.children import environment_without_launcher, without_interrupts
from xtk.errors import XtkError
from xtk.lookup import lookup
from xtk.rollouts import WRITERS, messages
from xtk.rollouts.weights import save_weights
from xtk.rollouts.writer import Ask, Completion, Sampling, WriterRequest

SECONDS_TO_END = 10.0
PREFIX = "xtk-weights-"


class Apart:
    """A writer, asked through a pipe. Its process ends with the thread that made it, however that ends.

    Args:
        request: the model; its options are what JSON can hold, and an `adapter`.
        backend: a key of `WRITERS`.
        environment: variables of its process: `CUDA_VISIBLE_DEVICES` for devices of its own, say.

    Raises:
        XtkError: the backend cannot open the model.
    """

    def __init__(
        self, request: WriterRequest, backend: str = "vllm", environment: Mapping[str, str] | None = None
    ) -> None:
        lookup(WRITERS, backend, "backend")
        _remove_what_others_left()
        self._name, self._folder = f"{request.name}, run by {backend}", request.folder
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        surroundings = {**environment_without_launcher(), "PYTHONPATH": paths, **(environment or {})}
        self._pipe, theirs = Pipe()
        with theirs, without_interrupts():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "xtk.rollouts.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # results are this process's alone
                env=surroundings,
                pass_fds=[theirs.fileno()],
            )
        try:
            words, _ = self._ask({"backend": backend, "request": messages.words_of_request(request)})
        except BaseException:
            self.close()
            raise
        self._context: int | None = words["context"]

    @classmethod
    def open(cls, request: WriterRequest) -> Self:
        """Start vLLM in a process of its own."""
        return cls(request)

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and completion together; None: it does not say."""
        return self._context

    def write(self, asks: Sequence[Ask], sampling: Sampling) -> list[Completion]:
        """Return a completion of each, in order.

        Raises:
            XtkError: what went wrong there, or that the process has ended.
        """
        words, arrays = self._ask({"do": "write", "sampling": asdict(sampling)}, messages.arrays_of_asks(asks))
        return messages.completions_of(words["finishes"], arrays)

    def update(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Take new weights.

        Args:
            weights: a folder, or pairs of a name and a tensor, which go through a folder in memory that is removed.

        Raises:
            XtkError: as `write`.
        """
        if isinstance(weights, str | Path):
            self._ask({"do": "update", "folder": str(Path(weights).resolve())})
            return
        whole = dict(weights)
        with _folder_for(sum(weight.nbytes for weight in whole.values())) as folder:
            save_weights(whole.items(), folder)
            shutil.copy(self._folder / "config.json", folder)
            self._ask({"do": "update", "folder": str(folder)})

    def rest(self) -> None:
        """Leave the device to others, as far as the backend can."""
        self._ask({"do": "rest"})

    def wake(self) -> None:
        """Come back to it."""
        self._ask({"do": "wake"})

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        for stop in (None, self.process.terminate, self.process.kill):
            if stop is not None:
                stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SECONDS_TO_END)
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, words: dict[str, Any], arrays: messages.Arrays | None = None) -> tuple[Any, messages.Arrays]:
        if self._pipe.closed:
            raise XtkError("the process that writes was ended", where=self._name)
        try:
            messages.send(self._pipe, words, arrays)
            answer, found = messages.receive(self._pipe)
        except (EOFError, OSError):
            raise self._ended() from None
        if "error" in answer:
            raise messages.error_of(answer)
        return answer, found

    def _ended(self) -> XtkError:
        """Return what is to be told of a process that ended and did not say why."""
        try:
            code = self.process.wait(SECONDS_TO_END)
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
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=place) as folder:
        yield Path(folder)


def _remove_what_others_left() -> None:
    """Remove the folders in memory of processes that were killed while they handed weights over."""
    for folder in SHARED_MEMORY.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if process.isdecimal() and not Path(f"/proc/{process}").exists():
            shutil.rmtree(folder, ignore_errors=True)
