"""Reading of JSON Lines, JSON arrays and concatenated JSON objects."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from xtk.data.record_to_document import Record
from xtk.data.text_streams import (
    READ_BYTES,
    UTF_8_BYTE_ORDER_MARK,
    RecordReadOptions,
    decode_utf8,
    file_extension,
    read_lines,
    strip_byte_order_mark,
)
from xtk.errors import XtkError
from xtk.untrusted_json import (
    UNIQUE_KEY_DECODER,
    DuplicateKeyError,
    check_depth,
    duplicate_key_error,
    parse_json,
)

_SPACE = re.compile(r"[ \t\r\n]*")


def read_json_records(stream: Any, first: str, name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of JSON Lines, of a JSON array, or of concatenated JSON objects.

    Args:
        stream: of bytes, at its beginning.
        options: `max_record_bytes` limits each record.
    """
    lines = read_lines(stream, name, options)
    if not is_json_array(first) and not (file_extension(name) == ".json" and _is_incomplete_object(first)):
        for number, line in lines:
            if line.strip():
                yield parse_json_record(line, f"{name}, line {number}")
        return
    parts = iter(lambda: stream.read(READ_BYTES), b"")
    for value, where in _json_values(_JsonBuffer(_decode_chunks(parts, name)), name, options):
        yield _checked_record(value, where)


def first_nonempty_line(stream: Any) -> str:
    """Return the first non-empty line of a text, or the first READ_BYTES of a long one."""
    text: str = stream.read(READ_BYTES).removeprefix(UTF_8_BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip()
    return text.partition("\n")[0]


def is_json_array(line: str) -> bool:
    """Return whether a text that begins with this line is a JSON array of objects or an empty array."""
    return re.match(r"\s*\[\s*([{\]]|$)", line) is not None


def _is_incomplete_object(line: str) -> bool:
    """Return whether a JSON object begins in this line and does not end in it."""
    try:
        json.loads(line)
    except RecursionError:
        return False
    except ValueError:
        return line.startswith("{")
    return False


def parse_json_record(line: str, where: str) -> Record:
    """Return the JSON object in a line."""
    what = "this line of the data"
    return _checked_record(parse_json(line, what=what, where=where, refuse_duplicate_keys=True), where)


def _checked_record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise XtkError(
            "this document is not a JSON object", where=where, hint='write it as an object such as {"text": "..."}'
        )
    return value


def _decode_chunks(parts: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode chunks of UTF-8 bytes."""
    offset, rest = 0, b""
    for number, part in enumerate(parts):
        if number == 0:
            part, offset = strip_byte_order_mark(part, name)
        whole = rest + part
        # A character that continues in the next chunk: up to three bytes, from the last start byte of a character.
        cut = next((at for at in range(1, min(3, len(whole)) + 1) if whole[-at] >= 0xC0), 0)
        text, rest = (whole[:-cut], whole[-cut:]) if cut else (whole, b"")
        yield decode_utf8(text, offset, name)
        offset += len(text)
    yield decode_utf8(rest, offset, name)


class _JsonBuffer:
    """A text that is read in chunks and parsed value by value."""

    def __init__(self, parts: Iterator[str]) -> None:
        self._parts, self._text, self._at = parts, "", 0
        self.line = 1

    def peek(self) -> str:
        """Return the next character that is not whitespace; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._advance(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def skip(self) -> None:
        """Skip one character."""
        self._at += 1

    def read_value(self, where: str, reading: RecordReadOptions) -> Any:
        """Parse and return the next JSON value."""
        while True:
            held = len(self._text) - self._at
            try:
                value, stop = UNIQUE_KEY_DECODER.raw_decode(self._text, self._at)
            except DuplicateKeyError as duplicate:
                raise duplicate_key_error(duplicate, "this document", where) from None
            except RecursionError:
                return parse_json(self._text[self._at :], what="this document", where=where)  # which refuses it
            except ValueError as failure:
                cut = getattr(failure, "pos", 0) > len(self._text) - 100 or "Unterminated" in str(failure)
                if cut and held > reading.max_record_bytes:
                    raise reading.too_large_error(where) from None
                # The value may be incomplete: read more, unless the error is not near the end of two chunks.
                if held > max(reading.max_record_bytes, 2 * READ_BYTES) or not self._read_more():
                    reason = (
                        f"{failure.msg} (line {self.line}"
                        if isinstance(failure, json.JSONDecodeError)
                        else f"{failure} ("
                    )
                    raise XtkError(
                        f"this document is not valid JSON: {reason})",
                        where=where,
                        hint="correct the JSON, or write one JSON object per line (.jsonl)",
                    ) from None
                continue
            break
        if stop - self._at > reading.max_record_bytes:
            raise reading.too_large_error(where)
        brackets = self._text.count("[", self._at, stop) + self._text.count("{", self._at, stop)
        check_depth(value, brackets, what="this document", where=where)
        self._advance(stop)
        return value

    def _advance(self, stop: int) -> None:
        self.line += self._text.count("\n", self._at, stop)
        self._at = stop

    def _read_more(self) -> bool:
        """Double the buffered text, so that a long value is parsed only a few times; return False at the end."""
        held = self._text[self._at :]
        parts = list(itertools.islice(self._parts, 1 + len(held) // READ_BYTES))
        self._text, self._at = held + "".join(parts), 0
        return bool(parts)


def _json_values(text: _JsonBuffer, name: str, reading: RecordReadOptions) -> Iterator[tuple[Any, str]]:
    """Yield the values of an array or of concatenated values, and the file and line where each begins."""
    array = text.peek() == "["
    if array:
        text.skip()
    first = True
    while letter := text.peek():
        where = f"{name}, line {text.line}"
        if array and letter == "]":
            text.skip()
            if text.peek():
                raise XtkError(
                    "there is text after the closing ] of this JSON array",
                    where=where,
                    hint="remove this text, or write one JSON object per line (.jsonl)",
                )
            return
        if array and not first:
            if letter != ",":
                raise XtkError(
                    "a comma is missing between two documents of this JSON array",
                    where=where,
                    hint="add the comma, or write one JSON object per line (.jsonl)",
                )
            text.skip()
            text.peek()
            where = f"{name}, line {text.line}"
        yield text.read_value(where, reading), where
        first = False
    if array:
        raise XtkError(
            "the closing ] of this JSON array is missing",
            where=name,
            hint="add ] at the end, or copy the file again if it is truncated",
        )
