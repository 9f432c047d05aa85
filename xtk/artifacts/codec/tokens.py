"""A document's tokens as bits: the rank of each, and by how much its bytes differ from what the vocabulary says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.artifacts.codec.coder import LOWEST, WORD_BITS, Index, after, fact_of, put, slot_of, start
from xtk.artifacts.codec.contexts import AFTER, LENGTH, TOKEN, TOKEN_FAMILIES, starts_of
from xtk.artifacts.codec.frequencies import Slots, pack_frequencies, slots_of, unpack_frequencies
from xtk.artifacts.codec.numbers import FIRST, RAW_BITS, SPECIAL, SYMBOLS, zigzag
from xtk.artifacts.codec.streams import Writer, words_of
from xtk.errors import Damaged

STARTS = starts_of(TOKEN_FAMILIES)


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
        lengths = ends.astype(np.int64)
        lengths[1:] -= ends[:-1]
        lengths -= token_bytes[ids]
        out = np.empty(2 * len(ids), np.int64)
        token_records(STARTS, ranks[ids], zigzag(lengths), out)
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

    def __init__(self, tables: bytes | memoryview, order: NDArray[np.int32], token_bytes: NDArray[np.int32]) -> None:
        self._order, self._token_bytes = order, token_bytes
        contexts = int(STARTS[-1])
        self._slots = slots_of(unpack_frequencies(tables, contexts), np.zeros((contexts, SYMBOLS), np.int64))

    def tokens(self, packed: bytes | memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document of `length` tokens.

        Raises:
            Damaged: the bytes are not what was written.
        """
        ids, ends, whole = read_tokens(
            np.frombuffer(packed, np.uint8), self._slots, STARTS, self._order, self._token_bytes, length
        )
        if not whole:
            raise Damaged("corrupt data: the tokens cannot be decoded")
        return ids, ends


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def token_records(
    starts: NDArray[np.int64], ranks: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """Turn the tokens of a document into records; return how many they are.

    Args:
        starts: of the families of contexts.
        ranks: [T].
        lengths: [T], by how many bytes each is longer than its token in the vocabulary, zigzag.
        out: [2 T], filled.
    """
    size = before = 0
    for token in range(len(ranks)):
        size = put(out, size, starts[TOKEN] + before, ranks[token])
        before = min(out[size - 1] & 63, AFTER - 1)
        size = put(out, size, starts[LENGTH], lengths[token])
    return size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def read_tokens(
    stream: NDArray[np.uint8],
    slots: Slots,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
    token_bytes: NDArray[np.int32],
    length: int,
) -> tuple[Any, Any, bool]:
    """Read the stream of a document's tokens.

    Args:
        stream: its bytes.
        slots: of all contexts.
        starts: of the families of contexts.
        order: [U], ids by rank.
        token_bytes: [U], how many bytes each token of the vocabulary has.
        length: T.

    Returns:
        ids int32 [T], byte ends int32 [T], and whether the stream is whole.
    """
    symbols, facts = slots
    words = words_of(stream, 0, len(stream))
    state, left = start(words)
    ids, ends = np.empty(length, np.int32), np.empty(length, np.int32)
    before: Any = np.int64(0)
    end: Any = np.int64(0)
    for token in range(length):
        for family in (TOKEN, LENGTH):
            # `take` and `take_raw`, written out: numba counts references to the arrays of a call each time.
            context = starts[family] + (before if family == TOKEN else 0)
            symbol = np.int64(symbols[slot_of(context, state)])
            state = after(state, np.int64(facts[fact_of(context, symbol)]))
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            bits = RAW_BITS[Index(symbol)]
            number = FIRST[Index(symbol)] + (state & ((1 << bits) - 1))
            state >>= bits
            if state < LOWEST and left > 0:
                left -= 1
                state = state << WORD_BITS | np.int64(words[Index(left)])
            if symbol >= SPECIAL or (family == TOKEN and number >= len(order)):
                return ids, ends, False
            if family == TOKEN:
                before, ids[token] = min(symbol, AFTER - 1), order[Index(number)]
            else:
                end += token_bytes[Index(ids[token])] + (number >> 1 ^ -(number & 1))
        ends[token] = end
    return ids, ends, state == 0 and left == 0
