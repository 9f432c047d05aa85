"""Reading of JSON Lines and JSON arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
from xtk.untrusted_json import parse_json


def read_json_records(stream: Any, first: str, name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of JSON Lines, or of a JSON array or one object over several lines, read as a whole."""
    if not is_json_array(first) and not (file_extension(name) == ".json" and _is_incomplete_object(first)):
        for number, line in read_lines(stream, name, options):
            if line.strip():
                yield parse_json_record(line, f"{name}, line {number}")
        return
    text = decode_utf8(*strip_byte_order_mark(stream.read(), name), name)
    content = parse_json(text, what="this file", where=name, refuse_duplicate_keys=True)
    is_large = len(text.encode()) > options.max_record_bytes
    for number, value in enumerate(content if isinstance(content, list) else [content]):
        where = f"{name}, document {number}"
        written = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") if is_large else b""
        if len(written) > options.max_record_bytes:
            raise options.too_large_error(where)
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
