"""Both vocabularies in the order of their bytes; the cells of their tokens, and of what is left of one that is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xtk.projection.methods.partition import partition_vocabularies
from xtk.projection.special_tokens import MATCH_BY_ROLE, SpecialTokenMatching, match_special_tokens
from xtk.projection.vocabulary_pair import VocabularyPair
from xtk.tokens.tokenizer import Tokenizer

# What is kept of one was made by these rules; a change of them is another number.
ALGORITHM_VERSION = 1


class SortedVocabulary(NamedTuple):
    """One vocabulary in the order of its tokens' bytes: tokens that begin alike follow each other.

    Attributes:
        token_ids: int32 [n], the tokens that spell something, by their bytes, equal ones by their ids.
        sorted_indices: int32 [V], where each token stands in that order; -1: it spells nothing.
        token_bytes: uint8, the bytes of all of them, in that order.
        byte_offsets: int64 [n+1], those of token `order[i]` are `pool[starts[i]:starts[i + 1]]`.
        token_cells: int32 [V], the cell of each token; -1: none.
        suffix_cells: int32, as long as the pool: at `starts[i] + k` the cell of what is left of token `order[i]`
            behind its
            first k bytes; -1: the other side cannot spell it.
    """

    token_ids: NDArray[np.int32]
    sorted_indices: NDArray[np.int32]
    token_bytes: NDArray[np.uint8]
    byte_offsets: NDArray[np.int64]
    token_cells: NDArray[np.int32]
    suffix_cells: NDArray[np.int32]


class PrefixContinuations(NamedTuple):
    """The tokens of a vocabulary by the bytes that they begin with, and among those by the cell of what they have left.

    Attributes:
        offsets: int64 [pool + 2]: of the tokens that begin with the first `k` bytes of token `order[low]`, and go on,
            `low` being the lowest of them or their beginning itself, the entries begin at `firsts[starts[low] + k]`,
            and end where the next ones begin. Those of all tokens are at 0.
        cells: int32, as long as the pool, rising in such a stretch.
        sorted_indices: int32, as long as the pool, rising in such a stretch among equal cells.
    """

    offsets: NDArray[np.int64]
    cells: NDArray[np.int32]
    sorted_indices: NDArray[np.int32]


@dataclass(frozen=True)
class BytePartition:
    """The partition of two vocabularies, ready to be asked what comes after some bytes.

    Attributes:
        student: its vocabulary.
        teacher: likewise.
        continuations: of the student.
        cell_token_offsets: int64 [cells + 1].
        cell_tokens: int32, the student's tokens of cell c are `members[member_offsets[c]:member_offsets[c + 1]]`.
    """

    student: SortedVocabulary
    teacher: SortedVocabulary
    continuations: PrefixContinuations
    cell_token_offsets: NDArray[np.int64]
    cell_tokens: NDArray[np.int32]

    @classmethod
    def from_vocabularies(cls, student: SortedVocabulary, teacher: SortedVocabulary) -> BytePartition:
        """Put two sides of one partition together."""
        count = 1 + max(
            int(cells.max(initial=-1)) for side in (student, teacher) for cells in (side.token_cells, side.suffix_cells)
        )
        members = np.argsort(student.token_cells, kind="stable").astype(np.int32)
        members = members[student.token_cells[members] >= 0]
        sizes = np.bincount(student.token_cells[members], minlength=count)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        return cls(student, teacher, sort_continuations(student, count), offsets, members)


def sort_continuations(vocabulary: SortedVocabulary, num_cells: int) -> PrefixContinuations:
    """Sort the tokens of a vocabulary, once for each of their beginnings.

    Args:
        vocabulary: the vocabulary.
        num_cells: how many there are.
    """
    lengths = np.diff(vocabulary.byte_offsets)
    beginnings = np.empty(len(vocabulary.token_bytes), np.int64)
    _number_prefixes(vocabulary, np.zeros(int(lengths.max(initial=0)) + 1, np.int64), beginnings)
    by_cell = np.argsort(beginnings * (num_cells + 1) + vocabulary.suffix_cells + 1, kind="stable")
    ranks = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    firsts = np.searchsorted(beginnings[by_cell], np.arange(len(vocabulary.token_bytes) + 2))
    return PrefixContinuations(firsts, vocabulary.suffix_cells[by_cell], ranks[by_cell])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _number_prefixes(side: SortedVocabulary, lows: NDArray[np.int64], beginnings: NDArray[np.int64]) -> None:
    """Write at `starts[i] + k` the number of the first k bytes of token `order[i]`: `starts[low] + k`.

    Args:
        side: the vocabulary.
        lows: [longest + 1], scratch memory: the first token that begins with as many bytes of the token at hand.
        beginnings: as long as the pool, filled.
    """
    for rank in range(len(side.token_ids)):
        start, stop = side.byte_offsets[rank], side.byte_offsets[rank + 1]
        alike = 0
        if rank:
            before = side.byte_offsets[rank - 1]
            while (
                alike < min(stop - start, start - before)
                and side.token_bytes[start + alike] == side.token_bytes[before + alike]
            ):
                alike += 1
        lows[alike + 1 : stop - start + 1] = rank
        for size in range(stop - start):
            beginnings[start + size] = side.byte_offsets[lows[size]] + size


def build_byte_partition(
    student: Tokenizer, teacher: Tokenizer, special_tokens: SpecialTokenMatching = MATCH_BY_ROLE
) -> BytePartition:
    """Sort both vocabularies, and find the cells of their tokens and of all that is left of a token when it is cut.

    A piece of a token belongs to the cell of the first token with which the other side spells it.

    Args:
        student: whose tokens are looked for.
        teacher: whose tokens are compared with them.
        special_tokens: how special tokens are matched, as in build_projection.
    """
    pair = VocabularyPair(student, teacher)
    student_cells, teacher_cells = partition_vocabularies(pair, *match_special_tokens(student, teacher, special_tokens))
    return BytePartition.from_vocabularies(
        _sort_tokenizer_vocabulary(student, teacher, student_cells, teacher_cells),
        _sort_tokenizer_vocabulary(teacher, student, teacher_cells, student_cells),
    )


def _sort_tokenizer_vocabulary(
    own: Tokenizer, other: Tokenizer, own_cells: NDArray[np.int32], other_cells: NDArray[np.int32]
) -> SortedVocabulary:
    # A piece that is a token of either side has that token's cell already. The others are spelled.
    table = {piece: int(own_cells[token]) for piece, token in own.vocabulary.token_of_bytes.items()}
    table.update({piece: int(other_cells[token]) for piece, token in other.vocabulary.token_of_bytes.items()})

    def cells_of(pieces: Sequence[bytes]) -> list[int]:
        unknown = [piece for piece in dict.fromkeys(pieces) if piece not in table]
        for piece, ids in zip(unknown, other.encode_bytes(unknown), strict=True):
            table[piece] = -1 if ids is None else int(other_cells[ids[0]])
        return list(map(table.__getitem__, pieces))

    return sort_vocabulary(own.vocabulary.bytes_by_id, own_cells, cells_of)


def sort_vocabulary(
    bytes_by_id: Sequence[bytes], token_cells: NDArray[np.int32], find_cells: Callable[[Sequence[bytes]], Sequence[int]]
) -> SortedVocabulary:
    """Sort a vocabulary by its bytes.

    Args:
        bytes_by_id: what each token spells; nothing for control tokens. Ids above are padding.
        token_cells: int32 [V].
        find_cells: returns the cells of pieces of tokens, -1 for none.
    """
    order = sorted((token for token, spelling in enumerate(bytes_by_id) if spelling), key=bytes_by_id.__getitem__)
    ordered = [bytes_by_id[token] for token in order]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(spelling) for spelling in ordered])]).astype(
        np.int64
    )
    ranks = np.full(len(token_cells), -1, np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    pieces = [spelling[cut:] for spelling in ordered for cut in range(len(spelling))]
    cells = np.array(find_cells(pieces), np.int32)
    cells[starts[:-1]] = token_cells[order]
    return SortedVocabulary(
        token_ids=np.array(order, np.int32),
        sorted_indices=ranks,
        token_bytes=np.frombuffer(b"".join(ordered), np.uint8),
        byte_offsets=starts,
        token_cells=token_cells,
        suffix_cells=cells,
    )
