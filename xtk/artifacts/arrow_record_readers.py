"""Readers of Arrow and Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow.parquet

from xtk.artifacts.arrow_validation import validate_batches
from xtk.artifacts.data_file_readers import check_header
from xtk.artifacts.record_to_document import Record
from xtk.artifacts.text_streams import RecordReadOptions, open_stream

BATCH_ROWS = 1000


def read_parquet(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Yield the rows of a Parquet file."""
    with open_stream(name, None) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        check_header(table.schema_arrow.names, name)
        for batch in validate_batches(table.iter_batches(BATCH_ROWS)):
            yield from _batch_records(batch, name, reading)


def read_arrow(name: str, reading: RecordReadOptions) -> Iterator[Record]:
    """Yield the rows of an Arrow file or stream."""
    with open_stream(name, None) as stream:
        try:
            batches: Iterable[Any] = pyarrow.ipc.open_stream(stream)  # the format of `datasets`
        except pyarrow.ArrowInvalid:
            stream.seek(0)
            table = pyarrow.ipc.open_file(stream)
            batches = map(table.get_batch, range(table.num_record_batches))
        for batch in validate_batches(batches):
            check_header(batch.schema.names, name)
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
