"""The vocabulary order of a cache: all token ids by frequency, a file in the folder of the shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.artifacts.arrow_files import check_columns, only_batch
from xtk.errors import Damaged

SCHEMA = pa.schema([("id", pa.int32()), ("num_bytes", pa.int32())])


@dataclass(frozen=True)
class Ranks:
    """All ids, those that come most often in the cached documents first, and how many bytes each spells.

    Attributes:
        order: int32 [U], a permutation.
        lengths: int32 [U], of each id the bytes that the vocabulary says; 0 for what spells nothing.
    """

    order: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @classmethod
    def of(cls, counts: NDArray[np.int64], lengths: NDArray[np.int32]) -> Ranks:
        """Rank ids by how often they come; of equals the lower one first.

        Args:
            counts: [U].
            lengths: [tokens], at most U; ids above spell nothing.
        """
        padded = np.zeros(len(counts), np.int32)
        padded[: len(lengths)] = lengths
        return cls(np.argsort(-counts, kind="stable").astype(np.int32), padded)

    @cached_property
    def content(self) -> bytes:
        """The file: an Arrow file with two columns, `id` from the most frequent on and the `num_bytes` of each."""
        batch = pa.record_batch({"id": pa.array(self.order), "num_bytes": pa.array(self.lengths[self.order])})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue().to_pybytes())

    @cached_property
    def file(self) -> str:
        """Its name, which is made of its content."""
        return name_of(self.content)

    @classmethod
    def read(cls, file: str, content: bytes, where: str) -> Ranks:
        """Read a file.

        Raises:
            Damaged: its content does not match the checksum in its name, or is not an order of ids.
        """
        if name_of(content) != file:
            raise Damaged("the vocabulary order of this cache does not match the checksum in its name", where=where)
        batch, _ = only_batch(content, where, full=True)
        check_columns(batch, SCHEMA, where)
        order, lengths = (batch.column(name).to_numpy() for name in SCHEMA.names)
        if not np.array_equal(np.sort(order), np.arange(len(order))) or (lengths < 0).any():
            raise Damaged("the vocabulary order of this cache is not an order of all token ids", where=where)
        by_id = np.zeros(len(order), np.int32)
        by_id[order] = lengths
        return cls(order.copy(), by_id)  # Arrow's own memory is read-only, for which numba would compile anew


# Returns the vocabulary order of a file that the header of a shard names.
FindRanks = Callable[[str], Ranks]


def name_of(content: bytes) -> str:
    """Return the name of a vocabulary order file."""
    return f"vocabulary-order-{hashlib.sha256(content).hexdigest()[:16]}.arrow"
