"""Reading and validation of Arrow IPC files from untrusted sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from xtk.errors import CorruptError

RESTORE_HINT = "copy the file again, or move it away and run the same xtk cache-teacher command again"


def corrupt_shard_error(why: str) -> CorruptError:
    """Return the error for a shard with invalid content; the caller that knows the shard adds its name."""
    return CorruptError(f"this shard of a teacher cache is corrupt: {why}", hint=RESTORE_HINT)


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
        content: bytes or pyarrow buffer of the file; the batch refers to this memory.
        full: validate every offset and string, which reads the whole file. If false, only buffer sizes are checked,
            and the caller has to check offsets.
    """
    try:
        file = pa.ipc.open_file(pa.BufferReader(content))
        if file.num_record_batches != 1:
            raise CorruptError(
                f"this file was not written by xtk: it has {file.num_record_batches} Arrow record batches instead of 1",
                where=where,
                hint=RESTORE_HINT,
            )
        batch_with_metadata = file.get_batch_with_custom_metadata(0)
        batch_with_metadata.batch.validate(full=full)
    except (pa.ArrowException, ValueError, OSError, MemoryError, OverflowError) as failure:
        raise CorruptError(
            f"this file is not a valid Arrow file: {_first_line(failure)}", where=where, hint=RESTORE_HINT
        ) from None
    return batch_with_metadata.batch, dict(batch_with_metadata.custom_metadata or {})


def check_columns(batch: pa.RecordBatch, schema: pa.Schema, where: str, nullable: frozenset[str] = frozenset()) -> None:
    """Check that a batch has the columns of a schema, in order, and no nulls where they are not expected."""
    if not batch.schema.remove_metadata().equals(schema.remove_metadata()):
        different = sorted({*map(str, batch.schema.remove_metadata())} ^ {*map(str, schema)})[:4]
        raise CorruptError(
            f"this Arrow file has other columns or column types than xtk writes: {', '.join(different)}",
            where=where,
            hint=RESTORE_HINT,
        )
    for field, column in zip(schema, batch.columns, strict=True):
        if field.name not in nullable and _has_nulls(column):
            raise CorruptError(
                f"the column {field.name} of this Arrow file contains nulls", where=where, hint=RESTORE_HINT
            )


def _has_nulls(column: pa.Array) -> bool:
    if column.null_count:
        return True
    if pa.types.is_list(column.type):
        return _has_nulls(column.values)
    if pa.types.is_struct(column.type):
        return any(_has_nulls(column.field(number)) for number in range(column.type.num_fields))
    return False


def _first_line(failure: BaseException) -> str:
    return (str(failure) or type(failure).__name__).splitlines()[0][:200]
