"""Encoding and decoding of a document's tokens: frequency ranks, and differences from the usual byte lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.codec.ans_entropy_coder import (
    MIN_STATE,
    Index,
    append_number,
    append_word,
    initial_state,
    next_state,
    raw_bits_to_number,
    slot_index,
    symbol_info_index,
)
from xtk.cache.codec.entropy_coded_streams import StreamEncoder, bytes_to_words
from xtk.cache.codec.integer_coding import NUM_SYMBOLS, NUMBER_LIMIT, SPECIAL_SYMBOL, zigzag
from xtk.cache.codec.symbol_frequencies import (
    DecodingTables,
    make_decoding_tables,
    pack_frequencies,
    unpack_frequencies,
)
from xtk.cache.codec.symbol_probability_contexts import (
    LENGTH,
    NUM_TOKEN_CONTEXTS,
    TOKEN,
    TOKEN_FAMILIES,
    first_contexts,
)
from xtk.errors import XtkError
from xtk.files.arrow_validation import corrupt_shard_error
from xtk.numba_kernel import numba_kernel

FIRST_CONTEXTS = first_contexts(TOKEN_FAMILIES)


def pack_tokens(
    # ids int32 [T] and byte ends int32 [T] of each document
    documents: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    ids_by_frequency: NDArray[np.int32],  # int32 [U], all ids, the most frequent first
    token_bytes: NDArray[np.int32],  # int32 [U], usual byte length of each token; 0 if unknown
) -> tuple[bytes, list[bytes]]:
    """Return the codec tables of a shard, and the encoded tokens of each of its documents."""
    ranks = np.empty(len(ids_by_frequency), np.int64)
    ranks[ids_by_frequency] = np.arange(len(ids_by_frequency))
    records = []
    for ids, ends in documents:
        lengths = ends.astype(np.int64)
        lengths[1:] -= ends[:-1]
        lengths -= token_bytes[ids]
        if (numbers := zigzag(lengths)).max(initial=0) >= NUMBER_LIMIT:
            raise XtkError(
                f"a document has {NUMBER_LIMIT // 2:,} bytes or more that belong to no token of the teacher, such as a "
                "prompt that a teacher_prompt replaces",
                hint="use --precision float32, or shorten the text",
            )
        out = np.empty(2 * len(ids), np.int64)
        encode_tokens(FIRST_CONTEXTS, ranks[ids], numbers, out)
        records.append(out)
    writer = StreamEncoder(records, int(FIRST_CONTEXTS[-1]))
    return pack_frequencies(writer.frequencies), [writer.encode(part) for part in records]


class TokenDecoder:
    """Decodes the tokens of the documents of a shard."""

    def __init__(
        self,
        tables: bytes | memoryview,
        ids_by_frequency: NDArray[np.int32],  # int32 [U], as for `pack_tokens`
        token_bytes: NDArray[np.int32],  # int32 [U], as for `pack_tokens`
    ) -> None:
        self._order, self._token_bytes = ids_by_frequency, token_bytes
        contexts = int(FIRST_CONTEXTS[-1])
        self._slots = make_decoding_tables(
            unpack_frequencies(tables, contexts), np.zeros((contexts, NUM_SYMBOLS), np.int64)
        )

    def decode(self, packed: bytes | memoryview, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and byte ends of a document of `length` tokens."""
        ids, ends, whole = decode_tokens(
            np.frombuffer(packed, np.uint8), self._slots, FIRST_CONTEXTS, self._order, self._token_bytes, length
        )
        if not whole:
            raise corrupt_shard_error("its tokens cannot be decoded")
        return ids, ends


@numba_kernel
def encode_tokens(
    starts: NDArray[np.int64],
    ranks: NDArray[np.int64],  # [T]
    lengths: NDArray[np.int64],  # [T], byte length of each token minus that of its vocabulary entry, zigzag
    out: NDArray[np.int64],  # [2 T], filled
) -> int:
    """Convert the tokens of a document into records; return the number of records."""
    size = before = 0
    for token in range(len(ranks)):
        size = append_number(out, size, starts[TOKEN] + before, ranks[token])
        before = min(out[size - 1] & 63, NUM_TOKEN_CONTEXTS - 1)
        size = append_number(out, size, starts[LENGTH], lengths[token])
    return size


@numba_kernel
def decode_tokens(
    stream: NDArray[np.uint8],
    slots: DecodingTables,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],  # [U], ids by frequency rank
    token_bytes: NDArray[np.int32],  # [U], byte length of each vocabulary entry
    length: int,
) -> tuple[Any, Any, bool]:
    """Decode a document's tokens: ids int32 [T], byte ends int32 [T], and whether the stream is valid."""
    symbols, symbol_info = slots
    words = bytes_to_words(stream, 0, len(stream))
    state, left = initial_state(words)
    ids, ends = np.empty(length, np.int32), np.empty(length, np.int32)
    before: Any = np.int64(0)
    end: Any = np.int64(0)
    for token in range(length):
        for family in (TOKEN, LENGTH):
            context = starts[family] + (before if family == TOKEN else 0)
            symbol = np.int64(symbols[slot_index(context, state)])
            state = next_state(state, np.int64(symbol_info[symbol_info_index(context, symbol)]))
            if state < MIN_STATE:
                state, left = append_word(state, left, words[Index(left)])
            number, state = raw_bits_to_number(symbol, state)
            if state < MIN_STATE:
                state, left = append_word(state, left, words[Index(left)])
            if symbol >= SPECIAL_SYMBOL or (family == TOKEN and number >= len(order)):
                return ids, ends, False
            if family == TOKEN:
                before, ids[token] = min(symbol, NUM_TOKEN_CONTEXTS - 1), order[Index(number)]
            else:
                end += token_bytes[Index(ids[token])] + (number >> 1 ^ -(number & 1))
        ends[token] = end
    return ids, ends, state == 0 and left == 0
