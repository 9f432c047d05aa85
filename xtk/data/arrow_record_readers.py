"""Readers of Arrow and Parquet files, and of datasets of the library `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow.parquet

from xtk.data.arrow_row_conversion import RowConverter
from xtk.data.data_file_readers import check_header
from xtk.data.record_to_document import Record
from xtk.data.text_streams import RecordReadOptions, open_stream
from xtk.files.arrow_validation import validate_batches

BATCH_ROWS = 1000


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
