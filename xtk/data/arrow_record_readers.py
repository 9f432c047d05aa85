"""Readers of Arrow and Parquet files and of datasets of the library `datasets`, as the records of JSON Lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow.parquet

from xtk import terminal
from xtk.data.data_file_readers import check_header
from xtk.data.record_to_document import TEXT_FIELDS, Record
from xtk.data.text_streams import RecordReadOptions, open_stream
from xtk.files.arrow_validation import validate_batches
from xtk.text.chat.parts import REASONING_KEYS
from xtk.untrusted_json import parse_json

BATCH_ROWS = 1000
JSON_TYPE = "arrow.json"  # that of `datasets.Json`, and of JSON columns of Parquet
_CHAT_FIELDS = ("messages", "tools", "prompt", "completion", "teacher_prompt")
_TEXT_KEYS = {"content", "value", "text", *REASONING_KEYS}  # of messages, and of the parts of a content
_ARGUMENT_KEYS = {"arguments", "parameters"}  # of tool calls
_PART_KEYS = {"role", "from", "type"}  # of messages and of the parts of a content: each has one of them

_Converter = Callable[[Any], Any]


def read_parquet(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Yield the rows of a Parquet file."""
    with open_stream(name, None) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        check_header(table.schema_arrow.names, name)
        yield from _batch_records(table.iter_batches(BATCH_ROWS), name, reading)


def read_arrow(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Yield the rows of an Arrow file or stream."""
    with open_stream(name, None) as stream:
        try:
            batches: Iterable[Any] = pyarrow.ipc.open_stream(stream)  # the format of `datasets`
        except pyarrow.ArrowInvalid:
            stream.seek(0)
            table = pyarrow.ipc.open_file(stream)
            batches = map(table.get_batch, range(table.num_record_batches))
        yield from _batch_records(batches, name, reading)


def read_dataset(dataset: Any, name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset` as they are stored, like those of its files."""
    tables = dataset.with_format("arrow").iter(BATCH_ROWS)
    yield from _batch_records((batch for table in tables for batch in table.to_batches()), name, reading)


def _batch_records(batches: Iterable[Any], name: str, reading: RecordReadOptions) -> Iterator[Record]:
    converter: RowConverter | None = None
    for batch in validate_batches(batches):
        if converter is None:
            check_header(batch.schema.names, name)
            converter = RowConverter(batch.schema, name, reading.columns)
        for rows in _limited_slices(batch, name, reading):
            yield from converter.records(rows.to_pylist())


def _limited_slices(batch: Any, name: str, reading: RecordReadOptions) -> Iterator[Any]:
    """Yield a batch, or its single rows if it is larger than the limit of one."""
    if batch.nbytes <= reading.max_record_bytes:
        yield batch
        return
    for number in range(len(batch)):
        row = batch.slice(number, 1)
        if row.nbytes > reading.max_record_bytes:
            raise reading.too_large_error(name)
        yield row


class RowConverter:
    """Converts the rows of tables with one schema.

    Values of the type arrow.json are decoded. In conversations and tools, null keys of structs are dropped: all rows of
    a struct have the same keys, so that a table adds those of other rows. Maps become objects.

    Args:
        name: source of the rows, for messages.
        columns: {field: column} for fields with another column name.
    """

    def __init__(self, schema: Any, name: str, columns: Mapping[str, str]) -> None:
        self._name, self._num_rows, self._has_noted_nulls = name, 0, False
        self._text_columns = {columns.get(field, field) for field in TEXT_FIELDS}
        self._chat_columns = {columns.get(field, field) for field in _CHAT_FIELDS}
        self._tools_column = columns.get("tools", "tools")
        converters = {field.name: self._converter(field.type, (field.name,)) for field in schema}
        self._converters = {column: convert for column, convert in converters.items() if convert is not None}

    def records(self, rows: list[dict[str, Any]]) -> Iterator[Record]:
        """Yield the next rows, as from `to_pylist`, as records."""
        for row in rows:
            for column, convert in self._converters.items():
                row[column] = convert(row[column])
            yield row
            self._num_rows += 1

    @property
    def _where(self) -> str:
        return f"{self._name}, document {self._num_rows}"

    def _converter(self, kind: Any, path: tuple[str, ...]) -> _Converter | None:
        """Return the conversion of values of a type, None: unchanged; `path`: column and keys, "" for list elements."""
        types = pyarrow.types
        if getattr(kind, "extension_name", "") == JSON_TYPE:
            return self._json_converter(path)
        if types.is_map(kind):
            return _skip_null(_map_converter(self._converter(kind.item_type, (*path, ""))))
        if types.is_struct(kind):
            return _skip_null(self._struct_converter(kind, path))
        if hasattr(kind, "value_field"):  # all types of lists
            element = self._converter(kind.value_type, (*path, ""))
            return element and _skip_null(lambda values: [element(value) for value in values])
        return None

    def _struct_converter(self, kind: Any, path: tuple[str, ...]) -> _Converter | None:
        converters = {field.name: self._converter(field.type, (*path, field.name)) for field in kind}
        inner = {key: convert for key, convert in converters.items() if convert is not None}
        has_aligned_keys = path[0] in self._chat_columns
        is_noted = has_aligned_keys and (path[0] == self._tools_column or not _ARGUMENT_KEYS.isdisjoint(path[1:]))

        def convert(value: dict[str, Any]) -> dict[str, Any]:
            for key, convert_inner in inner.items():
                value[key] = convert_inner(value[key])
            if not has_aligned_keys or None not in value.values():
                return value
            if is_noted and not self._has_noted_nulls:
                self._note_dropped_nulls()
            return {key: part for key, part in value.items() if part is not None}

        return convert if inner or has_aligned_keys else None

    def _json_converter(self, path: tuple[str, ...]) -> _Converter:
        is_text = path[-1] in (self._text_columns if len(path) == 1 else _TEXT_KEYS)
        is_text = is_text and (len(path) == 1 or path[0] in self._chat_columns)
        name = ".".join(key for key in path if key)

        def convert(text: str | None) -> Any:
            if text is None:
                return None
            what = f"a value of the column {name}, whose type is {JSON_TYPE},"
            value = parse_json(text, what=what, where=self._where, refuse_duplicate_keys=True)
            # `datasets` stores a text that is valid JSON, such as 17 or {}, without quotation marks.
            return text if is_text and not (value is None or isinstance(value, str) or _is_parts(value)) else value

        return convert

    def _note_dropped_nulls(self) -> None:
        """Print where a table has the first null key of arguments or schemas."""
        self._has_noted_nulls = True
        terminal.note_once(
            f"{self._name}: null keys in tool calls and tools are read as missing keys, from document "
            f"{self._num_rows:,} on, because tables add them; to keep nulls that you wrote, store these columns as "
            "JSON text"
        )


def _is_parts(value: Any) -> bool:
    """Return whether a JSON value is a list of messages, or of the parts of a content."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, dict) and not _PART_KEYS.isdisjoint(part) for part in value)
    )


def _map_converter(convert_item: _Converter | None) -> _Converter:
    if convert_item is None:
        return dict
    return lambda pairs: {key: convert_item(item) for key, item in pairs}


def _skip_null(convert: _Converter | None) -> _Converter | None:
    """Return a conversion that keeps None."""
    return convert and (lambda value: None if value is None else convert(value))
