"""Ending before the end: signals and a time limit are heeded after the step that runs, by all processes alike."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from xtk.errors import Terminated
from xtk.training import distributed

# Slurm sends the second before a time limit (--signal=USR1@120).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler signals a launcher and its workers, and the launcher hands it on: within seconds that is one asking.
REPEATED_SIGNAL_SECONDS = 5.0
NO_STOP, TIME_IS_UP = 0, 1


def exit_resumable_on_signal() -> None:
    """Let a signal end this process at once, with the exit code of a run that goes on when it is started again."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(os.EX_TEMPFAIL)

    for number in STOP_SIGNALS:
        signal.signal(number, end)


class StopListener:
    """Catches signals while it is open.

    The first signal is kept until somebody asks for it; another one, later, ends the process at once.

    Args:
        deadline: of `time.monotonic()`.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self._deadline = deadline
        self._signal, self._received_at = NO_STOP, math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopListener:
        with contextlib.suppress(ValueError):  # signals are the main thread's business
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal == NO_STOP:
            self._signal, self._received_at = number, now
        elif now - self._received_at > REPEATED_SIGNAL_SECONDS:
            raise Terminated(128 + number)

    def reason(self, device: torch.device, *, by_signals: bool = False) -> str:
        """Return why all processes stop now, "" if they go on; every process has to call it.

        Args:
            device: on which processes meet.
            by_signals: heed these alone. A time limit is for after a step, so that each start takes one at least.
        """
        time_is_up = not by_signals and time.monotonic() >= self._deadline
        here = self._signal or (TIME_IS_UP if time_is_up else NO_STOP)
        highest = distributed.all_reduce_max(here, device)
        if highest == NO_STOP:
            return ""
        return "--max-seconds are over" if highest == TIME_IS_UP else signal.Signals(highest).name
