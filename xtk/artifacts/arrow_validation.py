"""Arrow IPC data from outside: parsed, and validated in full before any value of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from xtk.errors import CorruptError


def validate_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches after validating every offset, index and string in them.

    pyarrow trusts the offsets of a file: reading a value through one that is negative or too large reads foreign
    memory, or ends the process.

    Raises:
        pyarrow.ArrowInvalid: a batch is not valid.
    """
    for batch in batches:
        batch.validate(full=True)
        yield batch


def read_single_batch(content: Any, where: str, *, full: bool) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
    """Return the one record batch of an Arrow IPC file, validated, and its custom metadata.

    Args:
        content: of the file: bytes or a pyarrow buffer; the batch refers to its memory.
        where: the file, for the error.
        full: validate every offset and string, which reads all of the file; else only that all buffers are as large
            as the columns state, and the caller checks offsets.

    Raises:
        Damaged: it is not such a file.
    """
    try:
        file = pa.ipc.open_file(pa.BufferReader(content))
        if file.num_record_batches != 1:
            raise CorruptError(
                f"this Arrow file has {file.num_record_batches} record batches instead of 1", where=where
            )
        found = file.get_batch_with_custom_metadata(0)
        found.batch.validate(full=full)
    except (pa.ArrowException, ValueError, OSError, MemoryError, OverflowError) as wrong:
        raise CorruptError(f"this file is not a valid Arrow file: {_first_line(wrong)}", where=where) from None
    return found.batch, dict(found.custom_metadata or {})


def check_columns(batch: pa.RecordBatch, schema: pa.Schema, where: str, nullable: frozenset[str] = frozenset()) -> None:
    """Compare the columns of a batch with a schema.

    Args:
        batch: validated.
        schema: the columns that it should have, in order; metadata is not compared.
        where: the file, for the error.
        nullable: columns that may contain nulls.

    Raises:
        Damaged: it has other columns or types, or a null in another column.
    """
    if not batch.schema.remove_metadata().equals(schema.remove_metadata()):
        raise CorruptError("this Arrow file does not have the columns of its kind", where=where)
    for field, column in zip(schema, batch.columns, strict=True):
        if field.name not in nullable and _has_nulls(column):
            raise CorruptError(f"the column {field.name} contains nulls", where=where)


def _has_nulls(column: pa.Array) -> bool:
    if column.null_count:
        return True
    if pa.types.is_list(column.type):
        return _has_nulls(column.values)
    if pa.types.is_struct(column.type):
        return any(_has_nulls(column.field(number)) for number in range(column.type.num_fields))
    return False


def _first_line(wrong: BaseException) -> str:
    return (str(wrong) or type(wrong).__name__).splitlines()[0][:200]
