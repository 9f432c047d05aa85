"""Readers that yield the records of data files: JSON Lines, JSON arrays, CSV, Parquet, Arrow, text."""

from __future__ import annotations

import csv
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from xtk.data.json_record_reader import first_nonempty_line, read_json_records
from xtk.data.record_to_document import OPT_IN_FIELDS, RECORD_FIELDS, TEXT_FIELDS, Record
from xtk.data.text_streams import RecordReadOptions, file_extension, open_stream, read_lines, read_text
from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.untrusted_json import parse_json

_URL_PREFIX = re.compile(r"^\w+://")


def read_records(name: str, options: RecordReadOptions) -> Iterator[Record]:
    """Yield the records of a local or remote file."""
    kind = file_extension(name)
    if kind not in FORMATS:
        raise unsupported_format_error(name)
    return _with_read_errors(name, load_registered(FORMATS, kind, "format")(name, options))


def unsupported_format_error(name: str) -> XtkError:
    """Return the error for a data file whose extension is not one of FORMATS."""
    kind = file_extension(name)
    return XtkError(
        f"data files {f'that end in {kind}' if kind else 'without an extension'} are not supported",
        where=name,
        hint=f"use a file that ends in {', '.join(FORMATS)}; .gz or .zst may follow",
    )


def _with_read_errors(name: str, records: Iterator[Record]) -> Iterator[Record]:
    """Yield the records; convert errors of the readers into an XtkError that names the file."""
    try:
        yield from records
    except XtkError:
        raise
    except Exception as failure:
        local = not _URL_PREFIX.match(name)
        if (
            isinstance(failure, OSError) and failure.errno and local
        ):  # of the operating system: no such file, no permission
            raise
        known = ValueError | EOFError | OSError | OverflowError | MemoryError | zlib.error | csv.Error
        # pyarrow is imported only for its formats; some of its errors are TypeErrors and KeyErrors.
        if local and not isinstance(failure, known) and type(failure).__module__ != "pyarrow.lib":
            raise
        reason = next(iter(str(failure).splitlines()), "") or type(failure).__name__
        hint = "check that the file is complete and that its extension matches its format"
        raise XtkError(
            f"this data file cannot be read completely: {reason}",
            where=name,
            hint=hint if local else f"check the network and the address; {hint}",
        ) from None


def read_text_record(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Yield the one document of a text file; nothing if it is empty."""
    with open_stream(name) as stream:
        text = read_text(stream, name, reading)
    if text:
        yield {"text": text}


def read_json(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Read JSON Lines, a JSON array, or one JSON object."""
    with open_stream(name) as stream:
        first = first_nonempty_line(stream)
    with open_stream(name) as stream:
        yield from read_json_records(stream, first, name, reading)


def read_csv(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Read rows with a header (RFC 4180): quoted fields may contain commas, doubled quotes and newlines."""
    csv.field_size_limit(reading.max_record_bytes)
    texts = {reading.columns.get(name, name) for name in TEXT_FIELDS}
    parsed = {reading.columns.get(name, name) for name in (*RECORD_FIELDS, *OPT_IN_FIELDS)} - texts
    teachers = reading.columns.get("teacher_prompt", "teacher_prompt")
    with open_stream(name) as stream:
        lines = _LimitedLines(read_lines(stream, name, reading), name, reading)
        rows = csv.reader(lines, delimiter="\t" if file_extension(name) == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            first, lines.size = lines.number + 1, 0
            try:
                row = next(rows, None)
            except csv.Error as failure:
                if "field limit" in str(failure):
                    raise reading.too_large_error(f"{name}, line {first}") from None
                raise XtkError(
                    f"this row is not valid CSV: {failure}",
                    where=f"{name}, line {first}",
                    hint='put fields with a comma, a quote or a newline in double quotes, and write inner quotes as ""',
                ) from None
            if row is None:
                return
            if not row:
                continue
            if header is None:
                header = check_header(row, name)
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


def check_header(row: list[str], name: str) -> list[str]:
    """Return the column names of a file, none of which may occur twice."""
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
        return parse_json(value, what="", where="", refuse_duplicate_keys=True)
    except XtkError:
        return value  # the check of the field refuses it


FORMATS = {
    ".jsonl": "xtk.data.data_file_readers:read_json",
    ".json": "xtk.data.data_file_readers:read_json",
    ".csv": "xtk.data.data_file_readers:read_csv",
    ".tsv": "xtk.data.data_file_readers:read_csv",
    ".parquet": "xtk.data.arrow_record_readers:read_parquet",
    ".arrow": "xtk.data.arrow_record_readers:read_arrow",
    ".txt": "xtk.data.data_file_readers:read_text_record",
}
DATASET_READERS = {"datasets": "xtk.data.arrow_record_readers:read_dataset"}  # imported on use, as pyarrow is
