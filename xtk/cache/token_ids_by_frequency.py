"""The vocabulary order of a cache: a file with all token ids sorted by frequency in the cached documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.errors import CorruptError
from xtk.files.arrow_validation import check_columns, read_single_batch

VOCABULARY_ORDER_SCHEMA = pa.schema([("id", pa.int32()), ("num_bytes", pa.int32())])


@dataclass(frozen=True)
class VocabularyOrder:
    """All U token ids, the most frequent in the cached documents first, and their lengths in bytes."""

    ids_by_frequency: NDArray[np.int32]  # [U], a permutation
    token_bytes: NDArray[np.int32]  # [U], bytes of text of each id, indexed by id; 0 for special tokens and unused ids

    @classmethod
    def from_counts(cls, counts: NDArray[np.int64], token_bytes: NDArray[np.int32]) -> VocabularyOrder:
        """Return the order by decreasing count [U], ties by increasing id; `token_bytes` may be shorter."""
        padded = np.zeros(len(counts), np.int32)
        padded[: len(token_bytes)] = token_bytes
        return cls(np.argsort(-counts, kind="stable").astype(np.int32), padded)

    @cached_property
    def file_content(self) -> bytes:
        """The Arrow file: columns `id`, the most frequent first, and `num_bytes` of each id."""
        batch = pa.record_batch(
            {"id": pa.array(self.ids_by_frequency), "num_bytes": pa.array(self.token_bytes[self.ids_by_frequency])}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue().to_pybytes())

    @cached_property
    def file_name(self) -> str:
        """The file name, derived from a checksum of the content."""
        return vocabulary_order_file_name(self.file_content)

    @classmethod
    def from_file_content(cls, file: str, content: bytes, where: str) -> VocabularyOrder:
        """Return the vocabulary order in the content of a file."""
        if vocabulary_order_file_name(content) != file:
            raise CorruptError(
                "this file of a teacher cache does not match the checksum in its name",
                where=where,
                hint="copy the file again, or make the cache again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
            )
        batch, _ = read_single_batch(content, where, full=True)
        check_columns(batch, VOCABULARY_ORDER_SCHEMA, where)
        order, lengths = (batch.column(name).to_numpy() for name in VOCABULARY_ORDER_SCHEMA.names)
        if not np.array_equal(np.sort(order), np.arange(len(order))) or (lengths < 0).any():
            raise CorruptError(
                "the file of token ids by frequency must list every token id exactly once",
                where=where,
                hint="copy the file again, or make the cache again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
            )
        by_id = np.zeros(len(order), np.int32)
        by_id[order] = lengths
        return cls(order.copy(), by_id)  # Arrow's memory is read-only; numba would compile another version for it


# Returns the vocabulary order in a file that the header of a shard names.
VocabularyOrderLoader = Callable[[str], VocabularyOrder]


def vocabulary_order_file_name(content: bytes) -> str:
    """Return the name of a vocabulary order file."""
    return f"vocabulary-order-{hashlib.sha256(content).hexdigest()[:16]}.arrow"
