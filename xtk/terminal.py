"""Printing: results to stdout; notes, progress and errors to stderr.

Output of libraries to stdout is redirected to stderr, also at the level of file descriptors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO

from xtk.errors import XtkError

SECONDS_BETWEEN_LINES = 10.0
_PIPE_HINT = "pipe an xtk command that prints the path of its output, or give the path instead of -"
# Control characters other than newline and tab, marks that change the direction of text (a line would then display
# something else than it contains), line separators, and lone surrogates.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class _Terminal:
    """Output state of this process."""

    def __init__(self) -> None:
        self.quiet = False
        self.main_process = True
        self.results: TextIO | None = None
        self.noted: set[str] = set()


_terminal = _Terminal()


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped (`\x1b`), so that a terminal does not interpret them.

    Newlines and tabs are kept. All output of xtk is escaped, except for results that another program reads.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def redirect_stdout_to_stderr() -> None:
    """Keep stdout for results; from now on, other output to stdout goes to stderr."""
    if _terminal.results is None:
        sys.stdout.flush()
        _terminal.results = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")  # paths are bytes
        os.dup2(2, 1)


def restore_stdout() -> None:
    """Undo `redirect_stdout_to_stderr`, for child processes that redirect stdout themselves."""
    if _terminal.results is not None:
        _terminal.results.flush()
        os.dup2(_terminal.results.fileno(), 1)
        _terminal.results = None


def set_quiet(quiet: bool) -> None:
    """Suppress progress and notes; errors and results are still printed."""
    _terminal.quiet = quiet


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress and notes of a part of a command."""
    before, _terminal.quiet = _terminal.quiet, True
    try:
        yield
    finally:
        _terminal.quiet = before


def is_quiet() -> bool:
    """Return whether notes are suppressed."""
    return _terminal.quiet


def set_main_process(is_main: bool) -> None:
    """Let only the first process of a multi-process run print."""
    _terminal.main_process = is_main


def result_line(line: str) -> None:
    """Write one line of results to stdout, with control characters escaped."""
    _write_result(printable(line))


def result_line_unescaped(line: str) -> None:
    """Write a line that another program reads (a path, a command) to stdout; escape it only on a terminal."""
    _write_result(printable(line) if result_stream().isatty() else line)


def _write_result(line: str) -> None:
    if not _terminal.main_process:
        return
    try:
        result_stream().write(line + "\n")
        result_stream().flush()
    except BrokenPipeError:  # the reader has ended, as in `xtk align ... | head`: exit as Unix filters do
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())  # discards the rest of the line
        hint = "check the disk space or the program that reads the output"
        what = f"the result cannot be written: {failure.strerror}"
        raise XtkError(what, where="standard output", hint=hint) from None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def result_json(record: dict[str, Any]) -> None:
    """Write one JSON object as a line of stdout, with control characters in JSON escapes; NaN and infinity as null."""
    text = json.dumps(_without_nan(record), ensure_ascii=False)
    result_line(_CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def result_artifact(record: dict[str, Any], *, as_json: bool) -> None:
    """Print an artifact's path, or with `--json` its whole record.

    A path that does not fit on a line, such as one with a line break, is printed as JSON in any case.
    """
    path = str(record["path"])
    if as_json:
        result_json(record)
    elif path.splitlines() != [path] or path.strip() != path or path.startswith("{"):
        result_json({"path": path})
    else:
        result_line_unescaped(path)


def result_stream() -> TextIO:
    """Return the stream of results, for libraries that write to a stream."""
    return _terminal.results or sys.stdout


def stdout_is_terminal() -> bool:
    """Return whether stdout is a terminal that may show colors."""
    return result_stream().isatty() and "NO_COLOR" not in os.environ


def note(message: str) -> None:
    """Print a message to stderr from the first process only; `--quiet` suppresses it."""
    if _terminal.main_process and not _terminal.quiet:
        sys.stderr.write(printable(message) + "\n")
        sys.stderr.flush()


def note_once(message: str) -> None:
    """Print a message as `note` does, unless this process printed it before."""
    if message not in _terminal.noted:
        _terminal.noted.add(message)
        note(message)


def error(failure: XtkError) -> None:
    """Print an error to stderr: what, where, next step."""
    rank = os.environ.get("RANK", "0")
    prefix = "xtk" if rank == "0" else f"xtk (process {rank})"
    sys.stderr.write(printable(f"{prefix}: {failure}\n"))
    sys.stderr.flush()


def format_duration(seconds: float) -> str:
    """Return a duration as text: 42s, 3m05s, 2h07m."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


class Progress:
    """Progress of one job: a bar on a terminal, a line every 10 seconds elsewhere.

    Args:
        total: number of units; None if unknown.
        done: units that an earlier run finished.
    """

    def __init__(self, label: str, total: int | None, unit: str, *, done: int = 0) -> None:
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self._first = done
        self._started = self._last_line = time.monotonic()
        self._shown = _terminal.main_process and not _terminal.quiet
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            detail = TextColumn("{task.fields[detail]}")
            self._bar = Bar(*columns, detail, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, completed=self.done, detail="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._shown and kind is None and self.done > self._first:
            seconds = time.monotonic() - self._started
            note(f"{self.label}: {self.done:,} {self.unit} in {format_duration(seconds)}")

    def advance_with_rate(self, amount: int) -> None:
        """Add `amount` finished units, and show how many there are per second."""
        rate = (self.done + amount - self._first) / max(time.monotonic() - self._started, 1e-3)
        self.advance(amount, f"{rate:,.0f} {self.unit}/s")

    def advance(self, amount: int, detail: str = "") -> None:
        """Add `amount` finished units, and show `detail` (rates, losses) after them."""
        self.done += amount
        if not self._shown:
            return
        now = time.monotonic()
        elapsed = now - self._started
        text = detail
        if self.total is not None:
            left = elapsed / max(self.done - self._first, 1) * (self.total - self.done)
            text = f"{detail}  {format_duration(left)} left".lstrip()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, detail=text)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            of_total = "" if self.total is None else f"/{self.total:,}"
            note(f"{self.label}: {self.done:,}{of_total} {self.unit}  {text}")


def piped_lines() -> list[str]:
    """Return the non-empty lines of stdin."""
    if sys.stdin is None or sys.stdin.isatty():
        raise XtkError(
            "the argument - reads standard input, but no command writes to it",
            hint="use xtk ... | xtk ... -, or give a path instead of -",
        )
    # Paths are bytes and must not change in the pipe.
    piped = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    lines = [line.rstrip("\r") for line in piped.split("\n") if line.strip()]
    if not lines:
        raise XtkError(
            "standard input is empty: the command before the | probably failed",
            where="argument -",
            hint="read the messages of that command above, or run it alone",
        )
    return lines


def piped_records() -> list[dict[str, Any]]:
    """Return the records that the previous command printed: paths, or JSON lines with a `path`."""
    return [_parse_piped_record(line) for line in piped_lines()]


def _parse_piped_record(line: str) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"path": line.strip()}
    record: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("path"), str):
        what = "a line of standard input is neither a path nor a JSON object with a path"
        raise XtkError(what, where="argument -", hint=_PIPE_HINT)
    return record


def path_arguments(value: str) -> list[str]:
    """Return a path of the command line; for `-`, the paths that the previous command printed."""
    return [value] if value != "-" else [str(record["path"]) for record in piped_records()]


def path_argument(value: str) -> str:
    """Return a path of the command line; for `-`, the path that the previous command printed."""
    paths = path_arguments(value)
    if len(paths) > 1:
        hint = "pipe a command that prints one path, or give the path itself"
        what = f"standard input has {len(paths)} paths, but the argument - takes one"
        raise XtkError(what, where="argument -", hint=hint)
    return paths[0]
