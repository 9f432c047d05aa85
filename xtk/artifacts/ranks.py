"""The vocabulary by frequency, a file beside the shards of a cache: what comes often has a small number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.errors import Damaged


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
        """The file: an Arrow file of two columns, `id` in the order of ranks and the `length` of each."""
        batch = pa.record_batch({"id": pa.array(self.order), "length": pa.array(self.lengths[self.order])})
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
            Damaged: its content is not the one that its name tells.
        """
        if name_of(content) != file:
            raise Damaged("the ranks of this cache were altered: their checksum does not fit", where=where)
        batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
        order, lengths = (batch.column(name).to_numpy() for name in ("id", "length"))
        by_id = np.zeros(len(order), np.int32)
        by_id[order] = lengths
        return cls(order.copy(), by_id)  # Arrow's own memory is read-only, for which numba would compile anew


# Gives the ranks of a file that a shard's header names.
FindRanks = Callable[[str], Ranks]


def name_of(content: bytes) -> str:
    """Return the name of a file of ranks."""
    return f"ranks-{hashlib.sha256(content).hexdigest()[:16]}.arrow"
