"""The one place that owns stdout and stderr.

stdout carries results only. Whatever libraries print there is sent to stderr instead,
also when they write to the file descriptor itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from types import TracebackType
from typing import Any, TextIO

from xtk.errors import XtkError

SECONDS_BETWEEN_LINES = 10.0
# Control characters but for newline and tab (a terminal obeys them), marks that turn the direction of text around
# (a line then shows something else than it holds), line separators, and halves of characters.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class _Terminal:
    """What the process knows about its terminal; one per process."""

    def __init__(self) -> None:
        self.quiet = False
        self.main_process = True
        self.results: TextIO | None = None


_terminal = _Terminal()


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped (`\x1b`), so that a terminal shows and never obeys them.

    Newlines and tabs stay. All that xtk prints goes through this, except for results that another program reads.
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def redirect_stdout_to_stderr() -> None:
    """Keep stdout for results: anything else that is written to it lands on stderr from now on."""
    if _terminal.results is None:
        sys.stdout.flush()
        _terminal.results = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")  # paths are bytes
        os.dup2(2, 1)


def restore_stdout() -> None:
    """Give stdout back, for child processes that own it themselves (a launcher's workers)."""
    if _terminal.results is not None:
        _terminal.results.flush()
        os.dup2(_terminal.results.fileno(), 1)
        _terminal.results = None


def set_quiet(quiet: bool) -> None:
    """Print no progress and no notes; errors and results stay."""
    _terminal.quiet = quiet


def is_quiet() -> bool:
    """Say whether notes are dropped."""
    return _terminal.quiet


def set_main_process(is_main: bool) -> None:
    """Let only the first process of a multi-process run print."""
    _terminal.main_process = is_main


def result_line(line: str) -> None:
    """Write one line of results to stdout, control characters spelled out."""
    _write_result(printable(line))


def result_line_unescaped(line: str) -> None:
    """Write a line that another program reads (a path, a command) to stdout: unchanged, but not to a terminal."""
    _write_result(printable(line) if result_stream().isatty() else line)


def _write_result(line: str) -> None:
    if not _terminal.main_process:
        return
    try:
        result_stream().write(line + "\n")
        result_stream().flush()
    except BrokenPipeError:  # the reader has gone, as in `xtk align ... | head`: end as Unix filters do
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as wrong:
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())  # what is left of the line goes nowhere
        raise XtkError(f"the result cannot be written: {wrong.strerror}", where="stdout") from None


def result_json(record: dict[str, Any]) -> None:
    """Write one JSON object on a line of stdout; control characters in it are escaped as JSON has them."""
    text = json.dumps(record, ensure_ascii=False)
    result_line(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def result_artifact(record: dict[str, Any], *, as_json: bool) -> None:
    """Tell what was written: its path, or with `--json` its path, kind and figures.

    A path that a line cannot hold, one with a line break say, is printed as JSON all the same.
    """
    path = str(record["path"])
    if as_json:
        result_json(record)
    elif path.splitlines() != [path] or path.strip() != path or path.startswith("{"):
        result_json({"path": path})
    else:
        result_line_unescaped(path)


def result_stream() -> TextIO:
    """Return the stream of results, for libraries that write to one."""
    return _terminal.results or sys.stdout


def stdout_is_terminal() -> bool:
    """Say whether stdout is a terminal (and may be coloured)."""
    return result_stream().isatty() and "NO_COLOR" not in os.environ


def note(message: str) -> None:
    """Tell something on stderr, from the first process only; `--quiet` drops it."""
    if _terminal.main_process and not _terminal.quiet:
        sys.stderr.write(printable(message) + "\n")
        sys.stderr.flush()


def error(failure: XtkError) -> None:
    """Print an error: what, where, what next."""
    rank = os.environ.get("RANK", "0")
    who = "xtk" if rank == "0" else f"xtk (process {rank})"
    sys.stderr.write(printable(f"{who}: {failure}\n"))
    sys.stderr.flush()


def format_duration(seconds: float) -> str:
    """Spell a duration: 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Progress of one job: a bar on a terminal, a plain line now and then elsewhere.

    Args:
        label: what is being done.
        total: how much there is of it; None where nobody knows.
        unit: of what.
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

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                console=Console(stderr=True),
                transient=True,
            )
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

    def advance(self, amount: int, detail: str = "") -> None:
        """Count `amount` more, and show `detail` (rates, losses) beside it."""
        self.done += amount
        if not self._shown:
            return
        now = time.monotonic()
        elapsed = now - self._started
        text = detail
        if self.total is not None:
            left = elapsed / max(self.done - self._first, 1) * (self.total - self.done)
            text = f"{detail}  {format_duration(left)} left" if detail else f"{format_duration(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, detail=text)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            of_total = "" if self.total is None else f"/{self.total:,}"
            note(f"{self.label}: {self.done:,}{of_total} {self.unit}  {text}")


def piped_lines() -> list[str]:
    """Read the lines, but for empty ones, that come through the pipe.

    Raises:
        XtkError: nothing came, or stdin is a keyboard.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise XtkError("'-' reads what another command prints, and nothing is piped in", hint="xtk ... | xtk ... -")
    # Paths are bytes, and come out of the pipe as they went in.
    piped = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    lines = [line.rstrip("\r") for line in piped.split("\n") if line.strip()]
    if not lines:
        raise XtkError(
            "nothing came through the pipe: the command before it seems to have failed",
            where="stdin",
            hint="look at its messages above, or run it alone",
        )
    return lines


def piped_records() -> list[dict[str, Any]]:
    """Read what the command before the pipe printed: paths, or JSON lines with a `path`.

    Raises:
        XtkError: nothing came, stdin is a keyboard, or a line is JSON without a path.
    """
    return [_parse_piped_record(line) for line in piped_lines()]


def _parse_piped_record(line: str) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        return {"path": line.strip()}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as wrong:
        raise XtkError(f"a line that came through the pipe is no JSON: {wrong}", where="stdin") from None
    if not isinstance(record, dict) or not isinstance(record.get("path"), str):
        raise XtkError("a JSON line that came through the pipe has no path", where="stdin")
    return record


def path_argument(value: str) -> str:
    """Return a path given on the command line, where `-` stands for the one that comes through the pipe."""
    if value != "-":
        return value
    records = piped_records()
    if len(records) > 1:
        raise XtkError(f"one path was expected through the pipe, {len(records)} came", where="stdin")
    return str(records[0]["path"])
