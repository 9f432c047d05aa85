"""Files of data as records: JSON lines, JSON arrays, CSV, Parquet, Arrow, text."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.artifacts.dataset_records import OPT_IN_FIELDS, RECORD_FIELDS, TEXT_FIELDS, Record
from xtk.artifacts.safe_file_access import check_file_name, read_regular_file
from xtk.errors import XtkError
from xtk.registry import nearest_name
from xtk.safe_json import check_depth, parse_json

MAX_DOCUMENT_BYTES = 16_000_000
READ_BYTES = 1 << 18  # bytes that are read at once
BATCH_ROWS = 1000
DEFAULT_SPLIT = "train"  # of a data set that has several, where none is named
_URL_PREFIX = re.compile(r"^\w+://")
# Of UTF-32 first: it begins as UTF-16 does.
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UTF_8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STATE_FILE, _SPLITS_FILE = "state.json", "dataset_dict.json"  # of `datasets.save_to_disk`
_ARROW_FILE = re.compile(r"[\w.-]+\.arrow")
_MAX_STATE_BYTES = 1 << 24


@dataclass(frozen=True)
class RecordReadOptions:
    """How files are read.

    Attributes:
        columns: {field: column} where a field has another name.
        max_record_bytes: the most that a record may have, as its file has it.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    max_record_bytes: int = MAX_DOCUMENT_BYTES

    def too_large_error(self, where: str) -> XtkError:
        """Return the error for a record above `max_record_bytes`."""
        return XtkError(
            f"this document is larger than --max-document-bytes ({self.max_record_bytes:,})",
            where=where,
            hint="split it; or a larger --max-document-bytes, if memory allows",
        )


RecordReader = Callable[[str, RecordReadOptions], Iterator[Record]]


def read_records(name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of a file, a remote one too.

    Raises:
        XtkError: its ending is of no known format, or its content of another one; it is cut short, not UTF-8, or has
            a record above `reading.max_bytes`.
    """
    kind = file_extension(name)
    if kind not in FORMATS:
        raise XtkError(
            f"data ending in {kind or 'nothing'} cannot be read", where=name, hint=f"one of {', '.join(FORMATS)}"
        )
    return _with_read_errors(name, FORMATS[kind](name, options))


def file_extension(name: str) -> str:
    """Return the ending that tells the format of a file, past those of compression."""
    plain = name.removesuffix(".gz").removesuffix(".zst").removesuffix(".xz")
    return Path(plain).suffix.lower()


def _with_read_errors(name: str, records: Iterator[Record]) -> Iterator[Record]:
    """Pass records on; a file that is cut short or of another format is refused by its name."""
    try:
        yield from records
    except XtkError:
        raise
    except Exception as wrong:
        local = not _URL_PREFIX.match(name)
        if isinstance(wrong, OSError) and wrong.errno and local:  # the system's: no such file, no permission
            raise
        known = ValueError | EOFError | OSError | OverflowError | MemoryError | zlib.error | lzma.LZMAError | csv.Error
        # pyarrow is imported only where its formats are read; some of its errors are TypeErrors and KeyErrors.
        if local and not isinstance(wrong, known) and type(wrong).__module__ != "pyarrow.lib":
            raise
        reason = next(iter(str(wrong).splitlines()), "") or type(wrong).__name__
        hint = "look whether it is whole, and whether its ending tells its format"
        raise XtkError(
            f"this data cannot be read to its end: {reason}",
            where=name,
            hint=hint if local else f"check the network and the address; {hint}",
        ) from None


@contextlib.contextmanager
def _open_stream(name: str, compression: str | None = "infer") -> Iterator[Any]:
    import fsspec

    if compression == "infer" and name.endswith(".zst"):
        # pyarrow's: fsspec reads zstd only where the package zstandard is installed, and else passes the bytes on.
        import pyarrow

        with fsspec.open(name, "rb") as raw, pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd") as stream:
            yield stream
        return
    if compression == "infer" and name.endswith(".xz"):
        with fsspec.open(name, "rb") as raw:
            yield io.BufferedReader(_XzReader(raw), io.DEFAULT_BUFFER_SIZE)
        return
    with fsspec.open(name, "rb", compression=compression) as stream:
        yield stream


class _XzReader(io.RawIOBase):
    """The content of an .xz file of one or several streams. Python's lzma ignores what follows the first stream."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._decompressor = lzma.LZMADecompressor()
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decompressor.eof:  # padding between streams is zeros
                self._input = self._decompressor.unused_data.lstrip(b"\0")
                while not self._input and (block := self._raw.read(io.DEFAULT_BUFFER_SIZE)):
                    self._input = block.lstrip(b"\0")
                if not self._input:
                    return 0
                self._decompressor = lzma.LZMADecompressor()
            elif self._decompressor.needs_input and not self._input:
                self._input = self._raw.read(io.DEFAULT_BUFFER_SIZE)
                if not self._input:
                    raise EOFError("the file is cut short")
            found = self._decompressor.decompress(self._input, len(buffer))
            self._input = b""
            if found:
                buffer[: len(found)] = found
                return len(found)


# Text.


def read_lines(stream: Any, name: str, options: RecordReadOptions) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text with their numbers, from 1 on. Lines end at line feeds alone, and keep them.

    Args:
        stream: of bytes.
        name: for messages.
        options: its limit is that of a line.

    Raises:
        XtkError: a line above the limit, or bytes that are not UTF-8, with their offset in the text.
    """
    offset, number, rest = 0, 0, b""
    first = True
    while True:
        chunk = stream.read(READ_BYTES)
        if first:
            chunk, offset = _strip_byte_order_mark(chunk, name)
            first = False
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            if len(line) > options.max_record_bytes:
                raise options.too_large_error(f"{name}, line {number}")
            yield number, _decode_utf8(line + b"\n", offset, name)
            offset += len(line) + 1
        if len(rest) > options.max_record_bytes:
            raise options.too_large_error(f"{name}, line {number + 1}")
        if not chunk:
            break
    if rest:
        yield number + 1, _decode_utf8(rest, offset, name)


def read_text(stream: Any, name: str, options: RecordReadOptions) -> str:
    """Return a text as it is, but for the mark of UTF-8 in front of it.

    Raises:
        XtkError: as `read_lines`, with a limit for the whole.
    """
    parts, size = [], 0
    while chunk := stream.read(READ_BYTES):
        parts.append(chunk)
        size += len(chunk)
        if size > options.max_record_bytes:
            raise options.too_large_error(name)
    return _decode_utf8(*_strip_byte_order_mark(b"".join(parts), name), name)


def _strip_byte_order_mark(raw: bytes, name: str) -> tuple[bytes, int]:
    """Return the beginning of a text without a byte order mark, and how many bytes that mark has."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            raise XtkError(
                f"this text is {encoding}, and data is UTF-8", where=name, hint=f"iconv -f {encoding} -t UTF-8"
            )
    size = len(_UTF_8_BYTE_ORDER_MARK) if raw.startswith(_UTF_8_BYTE_ORDER_MARK) else 0
    return raw[size:], size


def _decode_utf8(raw: bytes, offset: int, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as wrong:
        at = offset + wrong.start
        raise XtkError(
            f"this text is not UTF-8: byte {raw[wrong.start]:#04x} at offset {at:,}",
            where=name,
            hint="iconv -f LATIN1 -t UTF-8, with the encoding that it has",
        ) from None


def _read_text(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    with _open_stream(name) as stream:
        text = read_text(stream, name, reading)
    if text:
        yield {"text": text}


# JSON.


def _read_json(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Read JSON lines; or objects one after the other, in an array or not, over as many lines as they like."""
    with _open_stream(name) as stream:
        first = first_nonempty_line(stream)
    with _open_stream(name) as stream:
        yield from read_json_records(stream, first, name, reading)


def read_json_records(stream: Any, first: str, name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of JSON lines, or of an array.

    Args:
        stream: of bytes, at its beginning.
        first: its first line that is not empty.
        name: for messages.
        options: its limit is that of a record.

    Raises:
        XtkError: it is not JSON, or a record is not an object, or above the limit.
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
    """Return the first line of a text that is not empty, or the beginning of a long one."""
    text: str = stream.read(READ_BYTES).removeprefix(_UTF_8_BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip()
    return text.partition("\n")[0]


def is_json_array(line: str) -> bool:
    """Say whether a text that begins with this line is a JSON array of objects, or an empty one."""
    return re.match(r"\s*\[\s*([{\]]|$)", line) is not None


def _is_incomplete_object(line: str) -> bool:
    """Say whether an object begins in a line and goes on in the next."""
    try:
        json.loads(line)
    except RecursionError:
        return False
    except ValueError:
        return line.startswith("{")
    return False


def parse_json_record(line: str, where: str) -> Record:
    """Return the object that a line holds.

    Raises:
        XtkError: it is not JSON, nested too deeply, or not an object.
    """
    return _checked_record(parse_json(line, what="this line", where=where), where)


def _checked_record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise XtkError('a document is a JSON object such as {"text": "..."}', where=where)
    return value


def _decode_chunks(parts: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode bytes part by part."""
    offset, rest = 0, b""
    for number, part in enumerate(parts):
        if number == 0:
            part, offset = _strip_byte_order_mark(part, name)
        whole = rest + part
        # A character that goes on in the next part: up to three bytes, from the last one that begins a character.
        cut = next((at for at in range(1, min(3, len(whole)) + 1) if whole[-at] >= 0xC0), 0)
        text, rest = (whole[:-cut], whole[-cut:]) if cut else (whole, b"")
        yield _decode_utf8(text, offset, name)
        offset += len(text)
    yield _decode_utf8(rest, offset, name)


class _JsonBuffer:
    """A text that is read part by part, and taken from its beginning."""

    def __init__(self, parts: Iterator[str]) -> None:
        self._parts, self._text, self._at = parts, "", 0
        self.line = 1

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._advance(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def skip(self) -> None:
        """Take one character."""
        self._at += 1

    def read_value(self, where: str, reading: RecordReadOptions) -> Any:
        """Take a JSON value.

        Raises:
            XtkError: there is none, or it is nested too deeply, or longer than the limit.
        """
        while True:
            held = len(self._text) - self._at
            try:
                value, stop = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                return parse_json(self._text[self._at :], what="this document", where=where)  # which refuses it
            except ValueError as wrong:
                cut = getattr(wrong, "pos", 0) > len(self._text) - 100 or "Unterminated" in str(wrong)
                if cut and held > reading.max_record_bytes:
                    raise reading.too_large_error(where) from None
                # More may mend it: two parts are enough where the mistake is not at the end.
                if held > max(reading.max_record_bytes, 2 * READ_BYTES) or not self._read_more():
                    reason = (
                        f"{wrong.msg} (line {self.line}" if isinstance(wrong, json.JSONDecodeError) else f"{wrong} ("
                    )
                    raise XtkError(f"this is not JSON: {reason})", where=where) from None
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
        """Read as much again as is held, so that a long value is not tried too often."""
        held = self._text[self._at :]
        parts = list(itertools.islice(self._parts, 1 + len(held) // READ_BYTES))
        self._text, self._at = held + "".join(parts), 0
        return bool(parts)


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def _json_values(text: _JsonBuffer, name: str, reading: RecordReadOptions) -> Iterator[tuple[Any, str]]:
    """Yield the values of an array, or of a text of values one after the other, and where each begins."""
    array = text.peek() == "["
    if array:
        text.skip()
    first = True
    while letter := text.peek():
        where = f"{name}, line {text.line}"
        if array and letter == "]":
            text.skip()
            if text.peek():
                raise XtkError("there is more text after the end of this JSON array", where=where)
            return
        if array and not first:
            if letter != ",":
                raise XtkError("this JSON array has no comma between two documents", where=where)
            text.skip()
            text.peek()
            where = f"{name}, line {text.line}"
        yield text.read_value(where, reading), where
        first = False
    if array:
        raise XtkError("this JSON array has no end", where=name, hint="look whether the file is whole")


# CSV.


def _read_csv(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Read rows under a header, as RFC 4180 has them: fields in quotes may hold commas, quotes (twice) and newlines."""
    csv.field_size_limit(reading.max_record_bytes)
    texts = {reading.columns.get(name, name) for name in TEXT_FIELDS}
    parsed = {reading.columns.get(name, name) for name in (*RECORD_FIELDS, *OPT_IN_FIELDS)} - texts
    teachers = reading.columns.get("teacher_prompt", "teacher_prompt")
    with _open_stream(name) as stream:
        lines = _LimitedLines(read_lines(stream, name, reading), name, reading)
        rows = csv.reader(lines, delimiter="\t" if file_extension(name) == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            first, lines.size = lines.number + 1, 0
            try:
                row = next(rows, None)
            except csv.Error as wrong:
                if "field limit" in str(wrong):
                    raise reading.too_large_error(f"{name}, line {first}") from None
                raise XtkError(f"this row is not CSV: {wrong}", where=f"{name}, line {first}") from None
            if row is None:
                return
            if not row:
                continue
            if header is None:
                header = _check_header(row, name)
                continue
            if len(row) != len(header):
                raise XtkError(
                    f"this row has {len(row):,} fields, and the header has {len(header):,}",
                    where=f"{name}, line {first}",
                    hint="a field with a comma, a quote or a newline stands in double quotes",
                )
            record = dict(zip(header, row, strict=True))
            yield {
                column: _parse_csv_field(value)
                if column in parsed
                else None
                if column == teachers and not value
                else value
                for column, value in record.items()
            }


class _LimitedLines:
    """Lines for the parser of CSV, which takes as many as a row has: counted, and limited by the row."""

    def __init__(self, lines: Iterator[tuple[int, str]], name: str, reading: RecordReadOptions) -> None:
        self._lines, self._name, self._reading = lines, name, reading
        self.number = self.size = 0

    def __iter__(self) -> _LimitedLines:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        self.size += len(line)
        if self.size > self._reading.max_record_bytes:
            raise self._reading.too_large_error(f"{self._name}, the row that ends after line {self.number}")
        return line


def _check_header(row: list[str], name: str) -> list[str]:
    repeated = sorted(column for column, times in Counter(row).items() if times > 1)
    if repeated:
        raise XtkError(f"this file has two columns called {repeated[0]!r}", where=name, hint="rename or drop one")
    return row


def _parse_csv_field(value: str) -> Any:
    """Return what a field holds that is not text: JSON, or nothing."""
    if not value.strip():
        return None
    try:
        return parse_json(value, what="", where="")
    except XtkError:
        return value  # the field's own check refuses it


# Arrow.


def _read_parquet(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    import pyarrow.parquet

    from xtk.artifacts.arrow_validation import validate_batches

    with _open_stream(name, None) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        _check_header(table.schema_arrow.names, name)
        for batch in validate_batches(table.iter_batches(BATCH_ROWS)):
            yield from _batch_records(batch, name, reading)


def _read_arrow(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    import pyarrow

    from xtk.artifacts.arrow_validation import validate_batches

    with _open_stream(name, None) as stream:
        try:
            batches: Iterable[Any] = pyarrow.ipc.open_stream(stream)  # what `datasets` writes
        except pyarrow.ArrowInvalid:
            stream.seek(0)
            table = pyarrow.ipc.open_file(stream)
            batches = map(table.get_batch, range(table.num_record_batches))
        for batch in validate_batches(batches):
            _check_header(batch.schema.names, name)
            yield from _batch_records(batch, name, reading)


def _batch_records(batch: Any, name: str, reading: RecordReadOptions) -> Iterator[Record]:
    if batch.nbytes > reading.max_record_bytes:
        for number in range(len(batch)):
            row = batch.slice(number, 1)
            if row.nbytes > reading.max_record_bytes:
                raise reading.too_large_error(name)
            yield from row.to_pylist()
    else:
        yield from batch.to_pylist()


# Folders of `datasets.save_to_disk`.


def saved_dataset_files(folder: Path, split: str) -> list[Path] | None:
    """Return the files of a folder of `datasets.save_to_disk`, in their order; None of another folder.

    Args:
        folder: as `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote it.
        split: which of a DatasetDict; "": `train`.

    Raises:
        XtkError: there is no such split, or what the folder states is damaged.
    """
    if (folder / _SPLITS_FILE).is_file():
        splits = _read_json_file(folder, _SPLITS_FILE).get("splits")
        names = splits if isinstance(splits, list) and all(isinstance(name, str) for name in splits) else []
        chosen = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in names else names[0] if len(names) == 1 else "")
        if chosen not in names:
            near = nearest_name(chosen, names)
            raise XtkError(
                f"this data set has no split {chosen or DEFAULT_SPLIT!r}" + (f"; did you mean {near}?" if near else ""),
                where=str(folder),
                hint=f"{folder}:SPLIT, one of {', '.join(names)}",
            )
        return saved_dataset_files(
            folder / check_file_name(chosen, [re.compile(r"[\w.-]+")], where=str(folder / _SPLITS_FILE)), ""
        )
    if not (folder / _STATE_FILE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    if split:
        raise XtkError(f"this data set has one split, and is asked for {split!r}", where=str(folder))
    state = _read_json_file(folder, _STATE_FILE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise XtkError(
            "this data set keeps a selection apart from its rows", where=str(folder),
            hint="dataset.flatten_indices().save_to_disk(...)",
        )  # fmt: skip
    listed = state.get("_data_files")
    files = [one.get("filename") if isinstance(one, dict) else one for one in listed if one] if listed else []
    return [folder / check_file_name(file, [_ARROW_FILE], where=str(folder / _STATE_FILE)) for file in files]


def _read_json_file(folder: Path, name: str) -> dict[str, Any]:
    where = str(folder / name)
    content = parse_json(
        _decode_utf8(read_regular_file(folder, name, _MAX_STATE_BYTES), 0, where), what="this file", where=where
    )
    return content if isinstance(content, dict) else {}


FORMATS: dict[str, RecordReader] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
