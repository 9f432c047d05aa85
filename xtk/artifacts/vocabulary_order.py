"""The vocabulary order of a cache: all token ids by frequency, a file in the folder of the shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.artifacts.arrow_validation import check_columns, read_single_batch
from xtk.errors import CorruptError

VOCABULARY_ORDER_SCHEMA = pa.schema([("id", pa.int32()), ("num_bytes", pa.int32())])


@dataclass(frozen=True)
class VocabularyOrder:
    """All ids, those that come most often in the cached documents first, and how many bytes each spells.

    Attributes:
        ids_by_frequency: int32 [U], a permutation.
        token_bytes: int32 [U], of each id the bytes that the vocabulary says; 0 for what spells nothing.
    """

    ids_by_frequency: NDArray[np.int32]
    token_bytes: NDArray[np.int32]

    @classmethod
    def from_counts(cls, counts: NDArray[np.int64], token_bytes: NDArray[np.int32]) -> VocabularyOrder:
        """Rank ids by how often they come; of equals the lower one first.

        Args:
            counts: [U].
            token_bytes: [tokens], at most U; ids above spell nothing.
        """
        padded = np.zeros(len(counts), np.int32)
        padded[: len(token_bytes)] = token_bytes
        return cls(np.argsort(-counts, kind="stable").astype(np.int32), padded)

    @cached_property
    def file_content(self) -> bytes:
        """The file: an Arrow file with two columns, `id` from the most frequent on and the `num_bytes` of each."""
        batch = pa.record_batch(
            {"id": pa.array(self.ids_by_frequency), "num_bytes": pa.array(self.token_bytes[self.ids_by_frequency])}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue().to_pybytes())

    @cached_property
    def file_name(self) -> str:
        """Its name, which is made of its content."""
        return vocabulary_order_file_name(self.file_content)

    @classmethod
    def from_file_content(cls, file: str, content: bytes, where: str) -> VocabularyOrder:
        """Read a file.

        Raises:
            Damaged: its content does not match the checksum in its name, or is not an order of ids.
        """
        if vocabulary_order_file_name(content) != file:
            raise CorruptError(
                "the vocabulary order of this cache does not match the checksum in its name", where=where
            )
        batch, _ = read_single_batch(content, where, full=True)
        check_columns(batch, VOCABULARY_ORDER_SCHEMA, where)
        order, lengths = (batch.column(name).to_numpy() for name in VOCABULARY_ORDER_SCHEMA.names)
        if not np.array_equal(np.sort(order), np.arange(len(order))) or (lengths < 0).any():
            raise CorruptError("the vocabulary order of this cache is not an order of all token ids", where=where)
        by_id = np.zeros(len(order), np.int32)
        by_id[order] = lengths
        return cls(order.copy(), by_id)  # Arrow's own memory is read-only, for which numba would compile anew


# Returns the vocabulary order of a file that the header of a shard names.
VocabularyOrderLoader = Callable[[str], VocabularyOrder]


def vocabulary_order_file_name(content: bytes) -> str:
    """Return the name of a vocabulary order file."""
    return f"vocabulary-order-{hashlib.sha256(content).hexdigest()[:16]}.arrow"
