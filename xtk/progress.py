"""Progress of a command on stderr: a line that is redrawn on a terminal, a line every 10 seconds elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from xtk import terminal
from xtk.terminal import format_duration

SECONDS_BETWEEN_LINES = 10.0
# The time left is estimated from the last steps (calls of `advance`): the first ones load, compile and warm up.
STEPS_BEFORE_ESTIMATE, STEPS_OF_ESTIMATE = 10, 30
BAR_WIDTH = 10


class Progress:
    """Progress of one job.

    Args:
        total: number of units; None if unknown.
        done: units that an earlier run finished.
    """

    def __init__(self, label: str, total: int | None, unit: str, *, done: int = 0) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self._first, self._num_steps, self._detail = done, 0, ""
        self.get_detail: Callable[[], str] = lambda: self._detail  # of each print; a caller may replace it
        self._started = self._last_line = time.monotonic()
        self._last_steps: deque[tuple[float, int]] = deque(maxlen=STEPS_OF_ESTIMATE)  # (time, done after the step)
        self._shown = terminal.shows_notes()

    def __enter__(self) -> Progress:
        if self._shown:
            _printer.open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            _printer.close(self)
        if self._shown and kind is None and self.done > self._first:
            seconds = time.monotonic() - self._started
            unit = self.unit.removesuffix("s") if self.done == 1 else self.unit
            terminal.note(f"{self.label}: {self.done:,} {unit} in {format_duration(seconds)}")

    def advance_with_rate(self, amount: int) -> None:
        """Add `amount` finished units, and show how many there are per second."""
        rate = self._units_per_second()
        self.advance(amount, "" if rate is None else f"{rate:,.0f} {self.unit}/s")

    def advance(self, amount: int, detail: str = "") -> None:
        """Add `amount` finished units, and show `detail` (rates, losses; two spaces between them) after them."""
        self.done, self._detail, self._num_steps = self.done + amount, detail, self._num_steps + 1
        self._last_steps.append((time.monotonic(), self.done))
        if self._shown:
            _printer.print_if_due(self)

    def line(self, width: int | None = None) -> str:
        """Return what is printed: done, total, unit, time left, detail; what does not fit `width` columns is left out.

        Without an estimate of the time left it has the time since the start.
        """
        of_total = "" if self.total is None else f"/{self.total:,}"
        text = f"{self.done:,}{of_total} {self.unit}  {self._time()}"
        for part in self.get_detail().split("  "):
            if width is not None and len(text) + len(part) + 2 > width:
                break
            text += f"  {part}" if part else ""
        return text

    def is_due(self) -> bool:
        """Return whether the last line was printed long ago; from then on, count from now."""
        is_due = time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES
        self._last_line = time.monotonic() if is_due else self._last_line
        return is_due

    def _time(self) -> str:
        now, rate = time.monotonic(), self._units_per_second()
        if self.total is None or not rate:
            return f"{format_duration(now - self._started)} so far"
        seconds = (self.total - self.done) / rate - (now - self._last_steps[-1][0])
        return f"{format_duration(max(seconds, 0))} left"

    def _units_per_second(self) -> float | None:
        if self._num_steps < STEPS_BEFORE_ESTIMATE:
            return None
        (began, before), (ended, after) = self._last_steps[0], self._last_steps[-1]
        return (after - before) / max(ended - began, 1e-3)


class _Printer:
    """Prints the open jobs: on a terminal continually, elsewhere when they advance and from a thread when they do not.

    Between the jobs of a command, the thread prints which phase of the command runs, so that no command is silent.
    """

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []  # (text, start), innermost last
        self._jobs: list[Progress] = []
        self._live: Any = None  # the display of a terminal
        self._thread: threading.Thread | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()

    def open(self, job: Progress) -> None:
        """Start to print a job; it is printed instead of those that are open."""
        self._jobs.append(job)
        if self._live is None and _stderr_is_terminal():
            self._live = _open_display(self._jobs)
        self.start_thread()

    def close(self, job: Progress) -> None:
        """Stop printing a job."""
        self._jobs.remove(job)
        if not self._jobs and self._live is not None:
            self._live.stop()
            self._live = None
        self.stop_thread_if_idle()

    def print_if_due(self, job: Progress) -> None:
        """Print the line of a job, unless a terminal shows it anyway or one was printed within 10 seconds."""
        with self._lock:
            if self._live is None and job.is_due():
                terminal.note(f"{job.label}: {job.line()}")

    def start_thread(self) -> None:
        """Start the thread that prints in the meantime."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._print_regularly, name="xtk-progress", daemon=True)
            self._thread.start()

    def stop_thread_if_idle(self) -> None:
        """End the thread if nothing is open."""
        if self._thread is not None and not self._jobs and not self.phases:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _print_regularly(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread decides what it blocks
        while not self._stop.wait(0.25):
            jobs, phases = self._jobs[-1:], self.phases[-1:]
            if jobs:
                self.print_if_due(jobs[0])
            elif phases and phases[0][0] and self._silent_seconds() >= SECONDS_BETWEEN_LINES:
                text, started = phases[0]
                terminal.note(f"{text}, {format_duration(time.monotonic() - started)} so far", also_if_muted=True)

    def _silent_seconds(self) -> float:
        """Return how long this command has printed nothing."""
        return min(terminal.seconds_since_output(), time.monotonic() - self.phases[0][1])


_printer = _Printer()


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Print `text` every 10 seconds while nothing else is printed; "": subprocesses print.

    In the API, which no command has opened, nothing is printed.
    """
    _printer.phases.append((text, time.monotonic()))
    try:
        yield
    finally:
        _printer.phases.pop()
        _printer.stop_thread_if_idle()


@contextlib.contextmanager
def command_phase(arguments: list[str]) -> Iterator[None]:
    """Print that a command runs every 10 seconds, while nothing else is printed."""
    is_shown = os.environ.get("RANK", "0") == "0" and {"-q", "--quiet"}.isdisjoint(arguments)
    with phase(f"{arguments[0] if arguments else 'xtk'}: running" if is_shown else ""):
        _printer.start_thread()
        yield


def _stderr_is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _open_display(jobs: list[Progress]) -> Any:
    """Start to draw jobs at the bottom of the terminal, and return the display."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    full, empty, marks = ("=", "-", "|/-\\") if console.options.ascii_only else ("━", "─", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")

    def draw() -> Group:
        return Group(*[draw_job(job) for job in list(jobs)])

    def draw_job(job: Progress) -> Text:
        mark = marks[int(time.monotonic() * 4) % len(marks)]
        text = Text(f"{mark} {job.label} ", no_wrap=True, overflow="ellipsis")
        if job.total and console.width >= 60:
            filled = min(BAR_WIDTH, BAR_WIDTH * job.done // job.total)
            text.append(full * filled, "cyan").append(empty * (BAR_WIDTH - filled), "dim").append(" ")
        return text.append(job.line(console.width - len(text)))

    live = Live(console=console, get_renderable=draw, refresh_per_second=4, transient=True)
    live.start()
    return live
