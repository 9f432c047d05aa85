"""Printing: results to stdout; notes and errors to stderr.

Output of libraries to stdout is redirected to stderr, also at the level of file descriptors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from xtk.errors import XtkError

_PIPE_HINT = "pipe an xtk command that prints the path of its output, or give the path instead of -"
# Control characters other than newline and tab, marks that change the direction of text (a line would then display
# something else than it contains), line separators, and lone surrogates.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# SGR codes of ECMA-48.
STYLES = {"bold": "1", "dim": "2", "error": "1;31", "first_span": "30;106", "second_span": "30;103", "unaligned": "31"}


class _Terminal:
    """Output state of this process."""

    def __init__(self) -> None:
        self.quiet = self.muted = False
        self.last_output = time.monotonic()
        self.main_process = True
        self.results: TextIO | None = None
        self.noted: set[str] = set()


_terminal = _Terminal()


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped (`\x1b`), so that a terminal does not interpret them.

    Newlines and tabs are kept. All output of xtk is escaped, except for results that another program reads.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return a text in a style of `STYLES`, if a stream is a terminal that may show colors."""
    shows_colors = stream.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if shows_colors and text else text


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
    before, _terminal.muted = _terminal.muted, True
    try:
        yield
    finally:
        _terminal.muted = before


def is_quiet() -> bool:
    """Return whether `--quiet` suppresses notes."""
    return _terminal.quiet


def shows_notes() -> bool:
    """Return whether this process prints notes and progress now."""
    return _terminal.main_process and not _terminal.quiet and not _terminal.muted


def seconds_since_output() -> float:
    """Return how long ago this process printed a note or a result."""
    return time.monotonic() - _terminal.last_output


def set_main_process(is_main: bool) -> None:
    """Let only the first process of a multi-process run print."""
    _terminal.main_process = is_main


def result_line(line: str) -> None:
    """Write one line of results to stdout, with control characters escaped."""
    _write_result(printable(line))


def result_heading(title: str) -> None:
    """Write a heading of results: bold on a terminal."""
    _write_result(styled(printable(title), "bold", result_stream()))


def result_styled(parts: Iterable[tuple[str, str]]) -> None:
    """Write a line of results from (text, style); the styles show only on a terminal."""
    stream = result_stream()
    _write_result("".join(styled(printable(text), style, stream) for text, style in parts).rstrip())


def result_line_unescaped(line: str) -> None:
    """Write a line that another program reads (a path, a command) to stdout; escape it only on a terminal."""
    _write_result(printable(line) if result_stream().isatty() else line)


def _write_result(line: str) -> None:
    if not _terminal.main_process:
        return
    _terminal.last_output = time.monotonic()
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


def stdout_width() -> int | None:
    """Return the number of columns of the terminal that shows the results; None if another program reads them."""
    return shutil.get_terminal_size().columns if result_stream().isatty() else None


def note(message: str, *, also_if_muted: bool = False) -> None:
    """Print a message to stderr from the first process only; `--quiet` suppresses it, and so does `quiet`."""
    if shows_notes() or (also_if_muted and _terminal.main_process and not _terminal.quiet):
        _terminal.last_output = time.monotonic()
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
    what, *rest = printable(str(failure)).split("\n")
    lines = [f"{styled(f'{prefix}:', 'error', sys.stderr)} {styled(what, 'bold', sys.stderr)}"]
    for line in rest:
        label = re.match(r"  (where: |try:   )", line)
        lines.append(styled(label[0], "dim", sys.stderr) + line[label.end() :] if label else line)
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def format_duration(seconds: float) -> str:
    """Return a duration as text: 42s, 3m05s, 2h07m."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


def count(number: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: 1 document, 2,000 documents; `plural`: if it does not only add an s."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def format_bytes(count: int) -> str:
    """Return a size as text: 812 B, 2.3 MiB, 1.0 GiB."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:,.0f} B" if units[0] == "B" else f"{size:,.1f} {units[0]}"


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
