"""Graceful stop: after a signal or a time limit, all processes finish the current step and stop together."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from xtk.errors import Terminated
from xtk.parallel import process_group

# Slurm sends the second before a time limit (--signal=USR1@120).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler signals launcher and workers, and the launcher forwards it: repeats within seconds are one request.
REPEATED_SIGNAL_SECONDS = 5.0
NO_STOP, TIME_IS_UP = 0, 1


def exit_resumable_on_signal() -> None:
    """Make SIGTERM and SIGUSR1 end this process at once, with the exit code of a run that can be resumed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated(os.EX_TEMPFAIL)

    for number in STOP_SIGNALS:
        signal.signal(number, end)


class StopListener:
    """Records stop signals inside of a `with` block.

    The first signal is stored until `reason` is called; a later second one ends the process at once. The deadline is a
    time of `time.monotonic()`.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self._deadline = deadline
        self._signal, self._received_at = NO_STOP, math.inf
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopListener:
        with contextlib.suppress(ValueError):  # only the main thread can set signal handlers
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

    def reason(self, *, by_signals: bool = False) -> str:
        """Return why all processes stop now, "" if they continue (collective).

        `by_signals`: ignore the time limit, which is checked only after a step so that each start makes progress.
        """
        time_is_up = not by_signals and time.monotonic() >= self._deadline
        here = self._signal or (TIME_IS_UP if time_is_up else NO_STOP)
        highest = process_group.all_reduce_max(here)
        if highest == NO_STOP:
            return ""
        return "--max-seconds is over" if highest == TIME_IS_UP else signal.Signals(highest).name
