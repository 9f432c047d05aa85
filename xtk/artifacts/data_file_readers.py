"""Readers that yield the records of data files: JSON Lines, JSON arrays, CSV, Parquet, Arrow, text."""

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

from xtk.artifacts.record_to_document import OPT_IN_FIELDS, RECORD_FIELDS, TEXT_FIELDS, Record
from xtk.artifacts.safe_artifact_files import check_file_name, read_regular_file
from xtk.errors import XtkError
from xtk.name_registry import nearest_name
from xtk.options.shared import MAX_DOCUMENT_BYTES
from xtk.untrusted_json import check_depth, parse_json

READ_BYTES = 1 << 18  # chunk size
BATCH_ROWS = 1000
DEFAULT_SPLIT = "train"  # of a dataset with several splits
_URL_PREFIX = re.compile(r"^\w+://")
# UTF-32 first: its mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UTF_8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STATE_FILE, _SPLITS_FILE = "state.json", "dataset_dict.json"  # of `datasets.save_to_disk`
_ARROW_FILE = re.compile(r"[\w.-]+\.arrow")
_MAX_STATE_BYTES = 1 << 24


@dataclass(frozen=True)
class RecordReadOptions:
    """Options for reading data files.

    Attributes:
        columns: {field: column} for fields with another column name.
        max_record_bytes: maximum size of a record in its file.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    max_record_bytes: int = MAX_DOCUMENT_BYTES

    def too_large_error(self, where: str) -> XtkError:
        """Return the error for a record above `max_record_bytes`."""
        return XtkError(
            f"this document is larger than --max-document-bytes ({self.max_record_bytes:,})",
            where=where,
            hint="split the document, or use a larger --max-document-bytes",
        )


RecordReader = Callable[[str, RecordReadOptions], Iterator[Record]]


def read_records(name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of a local or remote file.

    Raises:
        XtkError: the extension is unknown, the content does not match it, the file is truncated or not UTF-8, or a
            record is larger than `options.max_record_bytes`.
    """
    kind = file_extension(name)
    if kind not in FORMATS:
        raise unsupported_format_error(name)
    return _with_read_errors(name, FORMATS[kind](name, options))


def unsupported_format_error(name: str) -> XtkError:
    """Return the error for a data file whose extension is not one of FORMATS."""
    kind = file_extension(name)
    return XtkError(
        f"data files {f'that end in {kind}' if kind else 'without an extension'} are not supported",
        where=name,
        hint=f"use a file that ends in {', '.join(FORMATS)}; .gz, .zst or .xz may follow",
    )


def file_extension(name: str) -> str:
    """Return the extension that selects the format of a file, without that of a compression."""
    plain = name.removesuffix(".gz").removesuffix(".zst").removesuffix(".xz")
    return Path(plain).suffix.lower()


def _with_read_errors(name: str, records: Iterator[Record]) -> Iterator[Record]:
    """Yield the records; convert errors of the readers into an XtkError that names the file."""
    try:
        yield from records
    except XtkError:
        raise
    except Exception as wrong:
        local = not _URL_PREFIX.match(name)
        if isinstance(wrong, OSError) and wrong.errno and local:  # of the operating system: no such file, no permission
            raise
        known = ValueError | EOFError | OSError | OverflowError | MemoryError | zlib.error | lzma.LZMAError | csv.Error
        # pyarrow is imported only for its formats; some of its errors are TypeErrors and KeyErrors.
        if local and not isinstance(wrong, known) and type(wrong).__module__ != "pyarrow.lib":
            raise
        reason = next(iter(str(wrong).splitlines()), "") or type(wrong).__name__
        hint = "check that the file is complete and that its extension matches its format"
        raise XtkError(
            f"this data file cannot be read completely: {reason}",
            where=name,
            hint=hint if local else f"check the network and the address; {hint}",
        ) from None


@contextlib.contextmanager
def _open_stream(name: str, compression: str | None = "infer") -> Iterator[Any]:
    import fsspec

    if compression == "infer" and name.endswith(".zst"):
        # With pyarrow: without the package zstandard, fsspec returns the compressed bytes.
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
    """Decompressed content of an .xz file with one or more streams; Python's lzma ignores all but the first."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._decompressor = lzma.LZMADecompressor()
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._decompressor.eof:  # streams may be padded with zeros
                self._input = self._decompressor.unused_data.lstrip(b"\0")
                while not self._input and (block := self._raw.read(io.DEFAULT_BUFFER_SIZE)):
                    self._input = block.lstrip(b"\0")
                if not self._input:
                    return 0
                self._decompressor = lzma.LZMADecompressor()
            elif self._decompressor.needs_input and not self._input:
                self._input = self._raw.read(io.DEFAULT_BUFFER_SIZE)
                if not self._input:
                    raise EOFError("the .xz file is truncated")
            found = self._decompressor.decompress(self._input, len(buffer))
            self._input = b""
            if found:
                buffer[: len(found)] = found
                return len(found)


# Text.


def read_lines(stream: Any, name: str, options: RecordReadOptions) -> Iterator[tuple[int, str]]:
    """Yield the line numbers, from 1, and lines of a text. Lines end only at line feeds, which they keep.

    Args:
        stream: of bytes.
        name: for messages.
        options: `max_record_bytes` limits each line.

    Raises:
        XtkError: a line is too long, or not UTF-8.
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
    """Return a whole text without its byte order mark.

    Raises:
        XtkError: the text is larger than `max_record_bytes`, or not UTF-8.
    """
    parts, size = [], 0
    while chunk := stream.read(READ_BYTES):
        parts.append(chunk)
        size += len(chunk)
        if size > options.max_record_bytes:
            raise options.too_large_error(name)
    return _decode_utf8(*_strip_byte_order_mark(b"".join(parts), name), name)


def _strip_byte_order_mark(raw: bytes, name: str) -> tuple[bytes, int]:
    """Return the beginning of a text without a byte order mark, and the number of bytes of the mark."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            raise XtkError(
                f"this file is encoded in {encoding}; data must be UTF-8",
                where=name,
                hint=f"convert it: iconv -f {encoding} -t UTF-8 FILE",
            )
    size = len(_UTF_8_BYTE_ORDER_MARK) if raw.startswith(_UTF_8_BYTE_ORDER_MARK) else 0
    return raw[size:], size


def _decode_utf8(raw: bytes, offset: int, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as wrong:
        at = offset + wrong.start
        raise XtkError(
            f"this data file is not UTF-8: byte {raw[wrong.start]:#04x} at offset {at:,}",
            where=name,
            hint="convert it from its encoding, for example: iconv -f LATIN1 -t UTF-8 FILE",
        ) from None


def _read_text(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    with _open_stream(name) as stream:
        text = read_text(stream, name, reading)
    if text:
        yield {"text": text}


# JSON.


def _read_json(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Read JSON Lines, a JSON array, or concatenated JSON objects that may span several lines."""
    with _open_stream(name) as stream:
        first = first_nonempty_line(stream)
    with _open_stream(name) as stream:
        yield from read_json_records(stream, first, name, reading)


def read_json_records(stream: Any, first: str, name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of JSON Lines, of a JSON array, or of concatenated JSON objects.

    Args:
        stream: of bytes, at its beginning.
        first: its first non-empty line.
        name: for messages.
        options: `max_record_bytes` limits each record.

    Raises:
        XtkError: not JSON, or a record is not an object or too large.
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
    text: str = stream.read(READ_BYTES).removeprefix(_UTF_8_BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip()
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
    """Return the JSON object in a line.

    Raises:
        XtkError: not JSON, nested too deeply, or not an object.
    """
    return _checked_record(parse_json(line, what="this line of the data", where=where), where)


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
            part, offset = _strip_byte_order_mark(part, name)
        whole = rest + part
        # A character that continues in the next chunk: up to three bytes, from the last start byte of a character.
        cut = next((at for at in range(1, min(3, len(whole)) + 1) if whole[-at] >= 0xC0), 0)
        text, rest = (whole[:-cut], whole[-cut:]) if cut else (whole, b"")
        yield _decode_utf8(text, offset, name)
        offset += len(text)
    yield _decode_utf8(rest, offset, name)


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
        """Parse and return the next JSON value.

        Raises:
            XtkError: not JSON, nested too deeply, or larger than the limit.
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
                # The value may be incomplete: read more, unless the error is not near the end of two chunks.
                if held > max(reading.max_record_bytes, 2 * READ_BYTES) or not self._read_more():
                    reason = (
                        f"{wrong.msg} (line {self.line}" if isinstance(wrong, json.JSONDecodeError) else f"{wrong} ("
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


_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


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


# CSV.


def _read_csv(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Read rows with a header (RFC 4180): quoted fields may contain commas, doubled quotes and newlines."""
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
                raise XtkError(
                    f"this row is not valid CSV: {wrong}",
                    where=f"{name}, line {first}",
                    hint='put fields with a comma, a quote or a newline in double quotes, and write inner quotes as ""',
                ) from None
            if row is None:
                return
            if not row:
                continue
            if header is None:
                header = _check_header(row, name)
                continue
            if len(row) != len(header):
                raise XtkError(
                    f"this row has {len(row):,} fields; must have {len(header):,}, like the header",
                    where=f"{name}, line {first}",
                    hint="put fields with a comma, a quote or a newline in double quotes",
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
    """Lines for the CSV parser, which may read several per row: counts them and limits the size of a row."""

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
        raise XtkError(
            f"this file has two columns named {repeated[0]!r}", where=name, hint="rename or remove one of these columns"
        )
    return row


def _parse_csv_field(value: str) -> Any:
    """Return the JSON value of a field that is not text; None for an empty field."""
    if not value.strip():
        return None
    try:
        return parse_json(value, what="", where="")
    except XtkError:
        return value  # the check of the field refuses it


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
            batches: Iterable[Any] = pyarrow.ipc.open_stream(stream)  # the format of `datasets`
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
    """Return the files of a folder of `datasets.save_to_disk`, in order; None for any other folder.

    Args:
        folder: written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`.
        split: split of a DatasetDict; "": `train`, or the only one.

    Raises:
        XtkError: the split does not exist, or a metadata file is corrupt.
    """
    if (folder / _SPLITS_FILE).is_file():
        splits = _read_json_file(folder, _SPLITS_FILE).get("splits")
        names = splits if isinstance(splits, list) and all(isinstance(name, str) for name in splits) else []
        chosen = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in names else names[0] if len(names) == 1 else "")
        if chosen not in names:
            near = nearest_name(chosen, names)
            raise XtkError(
                f"this saved dataset has no split {chosen or DEFAULT_SPLIT!r}"
                + (f"; did you mean {near}?" if near else ""),
                where=str(folder),
                hint=f"use {folder}:SPLIT, with one of the splits {', '.join(names)}",
            )
        return saved_dataset_files(
            folder / check_file_name(chosen, [re.compile(r"[\w.-]+")], where=str(folder / _SPLITS_FILE)), ""
        )
    if not (folder / _STATE_FILE).is_file() or not (folder / "dataset_info.json").is_file():
        return None
    if split:
        raise XtkError(
            f"this dataset was saved without splits, so that {split!r} cannot be selected",
            where=str(folder),
            hint=f"remove :{split} and use {folder}",
        )
    state = _read_json_file(folder, _STATE_FILE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise XtkError(
            "this dataset was saved with an indices mapping (from select, filter or shuffle), which is not supported",
            where=str(folder), hint="save it again: dataset.flatten_indices().save_to_disk(...)",
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
