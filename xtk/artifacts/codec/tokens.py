"""A document's tokens as bits: the rank of each, and by how much its bytes differ from what the vocabulary says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.codec import contexts as families
from xtk.artifacts.codec import kernels
from xtk.artifacts.codec.frequencies import pack_frequencies, slots_of, unpack_frequencies
from xtk.artifacts.codec.numbers import SYMBOLS, zigzag
from xtk.artifacts.codec.streams import Writer, words_of
from xtk.errors import Damaged

STARTS = families.starts_of(families.TOKEN_FAMILIES)


def pack_tokens(
    documents: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    order: NDArray[np.int32],
    token_bytes: NDArray[np.int32],
) -> tuple[bytes, list[bytes]]:
    """Return the tables of a shard, and the bytes of the tokens of each of its documents.

    Args:
        documents: ids int32 [T] and byte ends int32 [T] of each.
        order: int32 [U], all ids, those that come most often first.
        token_bytes: int32 [U], how many bytes each token has, mostly; zeros where that is not known.
    """
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    records = []
    for ids, ends in documents:
        lengths = np.diff(ends.astype(np.int64), prepend=0) - token_bytes[ids]
        out = np.empty(2 * len(ids), np.int64)
        kernels.token_records(STARTS, ranks[ids], zigzag(lengths), out)
        records.append(out)
    writer = Writer(records, int(STARTS[-1]))
    return pack_frequencies(writer.frequencies), [writer.stream(part) for part in records]


class TokenReader:
    """Reads the tokens of the documents of a shard.

    Args:
        tables: of the shard.
        order: int32 [U], as for `pack_tokens`.
        token_bytes: int32 [U], likewise.

    Raises:
        Damaged: the tables are not what was written.
    """

    def __init__(
        self, tables: bytes | memoryview, order: NDArray[np.int32], token_bytes: NDArray[np.int32]
    ) -> None:
        self._order, self._token_bytes = order, token_bytes
        contexts = int(STARTS[-1])
        self._slots = slots_of(unpack_frequencies(tables, contexts), np.zeros((contexts, SYMBOLS), np.int64))

    def tokens(self, packed: bytes | memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document of `length` tokens.

        Raises:
            Damaged: the bytes are not what was written.
        """
        ids, ends, whole = kernels.read_tokens(
            words_of(packed), self._slots, STARTS, self._order, self._token_bytes, length
        )
        if not whole:
            raise Damaged("a row of this cache is altered: its tokens cannot be read")
        return ids, ends
