"""Vocabularies sorted by bytes, with the partition's cells of all tokens and of all their suffixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xtk.numba_kernel import numba_kernel
from xtk.projection.methods.byte_partition import partition_vocabularies
from xtk.projection.special_tokens import MATCH_BY_ROLE, SpecialTokenMatching, match_special_tokens
from xtk.projection.vocabulary_array import VocabularyArray
from xtk.projection.vocabulary_pair import VocabularyPair
from xtk.text.tokenizer import Tokenizer

# Version of cached partitions; increase it when the algorithm changes.
ALGORITHM_VERSION = 6


class SortedVocabulary(NamedTuple):
    """A vocabulary sorted by the tokens' bytes, so that tokens with a common prefix are adjacent."""

    token_ids: NDArray[np.int32]  # [n], tokens with bytes, sorted by them; of equal ones byte fallback last, then by id
    sorted_indices: NDArray[np.int32]  # [V], the index of each token in `token_ids`; -1: it has no bytes
    token_bytes: NDArray[np.uint8]  # uint8, the concatenated bytes, in sorted order
    byte_offsets: NDArray[np.int64]  # [n+1], bytes of token i: `token_bytes[byte_offsets[i]:byte_offsets[i + 1]]`
    token_cells: NDArray[np.int32]  # [V], the cell of each token; -1: none
    # [len(token_bytes)], at `byte_offsets[i] + k` the cell of token i without k bytes; -1: no tokenization.
    suffix_cells: NDArray[np.int32]


class PrefixContinuations(NamedTuple):
    """The tokens of a vocabulary by their prefixes, and for each prefix sorted by the cell of the suffix."""

    # [len(token_bytes) + 2]: entries of tokens longer than a prefix of k bytes, whose first token in sorted order is
    # `low`, begin at `offsets[byte_offsets[low] + k]` and end where the next ones begin; the empty prefix is at 0.
    offsets: NDArray[np.int64]
    cells: NDArray[np.int32]  # [len(token_bytes)], ascending within a prefix
    sorted_indices: NDArray[np.int32]  # [len(token_bytes)], ascending within a prefix and cell


class LongestPrefixes(NamedTuple):
    """The longest student token that each teacher token, and each of its suffixes, begins with.

    A cell is a student token, or the student's special tokens of one role. Student tokens with equal bytes are in one
    cell. If the teacher has several with these bytes too, they are matched one to one: ordinary tokens before byte
    fallback, then in the order of their ids.
    """

    teacher: SortedVocabulary  # the teacher's vocabulary, with cells of these student tokens; -1: there is none
    student_cells: NDArray[np.int32]  # [V], the cell of each student token; -1: none
    cell_token_offsets: NDArray[np.int32]  # [cells + 1]
    # int32, the student's tokens of cell c are `cell_tokens[cell_token_offsets[c]:cell_token_offsets[c + 1]]`.
    cell_tokens: NDArray[np.int32]
    # [U], for each teacher token that no student token equals, the index in byte order of the shortest such token that
    # it begins with, itself or another one; -1 for all others.
    event_heads: NDArray[np.int32]


@dataclass(frozen=True)
class BytePartition:
    """The partition of two vocabularies, with indices for the tokens after a given byte prefix."""

    student: SortedVocabulary  # the student's vocabulary
    teacher: SortedVocabulary  # the teacher's vocabulary
    continuations: PrefixContinuations  # the student's tokens by prefix
    cell_token_offsets: NDArray[np.int32]  # [cells + 1]
    # int32, the student's tokens of cell c are `cell_tokens[cell_token_offsets[c]:cell_token_offsets[c + 1]]`.
    cell_tokens: NDArray[np.int32]

    @classmethod
    def from_vocabularies(cls, student: SortedVocabulary, teacher: SortedVocabulary) -> BytePartition:
        """Return the partition of two sorted vocabularies."""
        count = 1 + max(
            int(cells.max(initial=-1)) for side in (student, teacher) for cells in (side.token_cells, side.suffix_cells)
        )
        offsets, members = _cell_members(student.token_cells, count)
        return cls(student, teacher, sort_continuations(student, count), offsets, members)

    def with_stop_tokens(self, student_stops: NDArray[np.int32], teacher_stops: NDArray[np.int32]) -> BytePartition:
        """Return the partition in which the first stop tokens of both sides have one cell, and the others none.

        The student's tokens of this cell are all its stop tokens: their probabilities are added up.
        """
        count = len(self.cell_token_offsets) - 1
        cells = []
        for side, stops in ((self.student, student_stops), (self.teacher, teacher_stops)):
            of_side = side.token_cells.copy()
            of_side[stops], of_side[stops[0]] = -1, count
            cells.append(of_side)
        offsets, members = _cell_members(cells[0], count + 1)
        offsets[-1] += len(student_stops) - 1
        members = np.append(members[:-1], student_stops)
        student, teacher = self.student._replace(token_cells=cells[0]), self.teacher._replace(token_cells=cells[1])
        return BytePartition(student, teacher, self.continuations, offsets, members)

    def paired_token(self, student: int, teacher: int) -> int:
        """Return a teacher token of a student token's cell: the given one if possible, else the first.

        If the student token has no cell, it is the given one if that has none either; else -1.
        """
        own, theirs = (
            int(side.token_cells[token]) if token < len(side.token_cells) else -1
            for side, token in ((self.student, student), (self.teacher, teacher))
        )
        if own == theirs:
            return teacher
        same = np.flatnonzero(self.teacher.token_cells == own) if own >= 0 else np.zeros(0, np.int64)
        return int(same[0]) if len(same) else -1

    @cached_property
    def shared_token_ids(self) -> VocabularyArray:
        """The student's `token_ids`, for losses."""
        return VocabularyArray(self.student.token_ids)

    @cached_property
    def shared_cell_tokens(self) -> VocabularyArray:
        """`cell_tokens`, for losses."""
        return VocabularyArray(self.cell_tokens)

    @cached_property
    def num_teacher_tokens(self) -> NDArray[np.int64]:
        """int64 [cells], the number of the teacher's tokens in each cell."""
        cells = self.teacher.token_cells
        return np.bincount(cells[cells >= 0], minlength=len(self.cell_token_offsets) - 1)

    @cached_property
    def longest_prefixes(self) -> LongestPrefixes:
        """The longest student token that each teacher token, and each of its suffixes, begins with."""
        return find_longest_prefixes(self.student, self.teacher)


def _cell_members(token_cells: NDArray[np.int32], count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return int32 [count + 1] and int32, the offsets of the tokens of each cell, and these tokens."""
    members = np.argsort(token_cells, kind="stable").astype(np.int32)
    members = members[token_cells[members] >= 0]
    sizes = np.bincount(token_cells[members], minlength=count)
    return np.append(0, np.cumsum(sizes)).astype(np.int32), members


def find_longest_prefixes(student: SortedVocabulary, teacher: SortedVocabulary) -> LongestPrefixes:
    """Return the longest student token that each teacher token, and each of its suffixes, begins with.

    Special tokens have no bytes: those of a cell of the partition, which are of one role, are one cell.
    """
    suffix_cells = np.empty(len(teacher.token_bytes), np.int32)
    _find_longest_tokens(student, teacher, suffix_cells)
    own, theirs = (np.diff(side.byte_offsets) for side in (student, teacher))
    repeated, repeated_theirs = _count_equal_before(student), _count_equal_before(teacher)
    ranks = np.arange(len(own), dtype=np.int32)
    firsts = suffix_cells[teacher.byte_offsets[:-1]]
    is_equal = (firsts >= 0) & (own[firsts] == theirs) if len(own) else firsts >= 0
    num_equal = np.bincount(firsts[is_equal], minlength=len(own))
    matched = firsts + repeated_theirs
    is_matched = is_equal & (matched < len(own))
    is_matched[is_matched] = (ranks - repeated)[matched[is_matched]] == firsts[is_matched]
    cells = np.full(len(student.token_cells), -1, np.int32)
    cells[student.token_ids] = np.where(repeated < num_equal[ranks - repeated], ranks, ranks - repeated)
    is_special = (student.sorted_indices < 0) & (student.token_cells >= 0)
    roles, of_special = np.unique(student.token_cells[is_special], return_inverse=True)
    cells[is_special] = len(own) + of_special
    of_teacher = np.full(len(teacher.token_cells), -1, np.int32)
    of_teacher[teacher.token_ids] = np.where(is_matched, matched, firsts)
    others = np.flatnonzero((teacher.sorted_indices < 0) & np.isin(teacher.token_cells, roles))
    of_teacher[others] = len(own) + np.searchsorted(roles, teacher.token_cells[others])
    offsets, members = _cell_members(cells, len(own) + len(roles))
    side = teacher._replace(token_cells=of_teacher, suffix_cells=suffix_cells)
    heads = np.full(len(teacher.token_cells), -1, np.int32)
    heads[teacher.token_ids] = _find_event_heads(teacher, is_equal)
    return LongestPrefixes(side, cells, offsets, members, heads)


@numba_kernel
def _find_event_heads(side: SortedVocabulary, is_equal: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return int32 [n], in byte order, the shortest token without an equal one that each such token begins with.

    `is_equal`: bool [n], whether the other vocabulary has an equal token; -1 is returned for these.
    """
    heads = np.full(len(is_equal), -1, np.int32)
    head = -1  # the last one that was found: tokens that begin with it follow it
    for rank in range(len(is_equal)):
        if is_equal[rank]:
            continue
        start, begins = side.byte_offsets[rank], head >= 0
        if begins:
            first, stop = side.byte_offsets[head], side.byte_offsets[head + 1]
            begins = stop - first <= side.byte_offsets[rank + 1] - start
            for byte in range(stop - first if begins else 0):
                if side.token_bytes[first + byte] != side.token_bytes[start + byte]:
                    begins = False
                    break
        if not begins:
            head = rank
        heads[rank] = head
    return heads


@numba_kernel
def _count_equal_before(side: SortedVocabulary) -> NDArray[np.int32]:
    """Return int32 [n], for each token in byte order the number of tokens before it with equal bytes."""
    counts = np.zeros(len(side.token_ids), np.int32)
    for rank in range(1, len(counts)):
        before, start, stop = side.byte_offsets[rank - 1], side.byte_offsets[rank], side.byte_offsets[rank + 1]
        equal = stop - start == start - before
        for byte in range(stop - start):
            if not equal:
                break
            equal = side.token_bytes[before + byte] == side.token_bytes[start + byte]
        counts[rank] = counts[rank - 1] + 1 if equal else 0
    return counts


@numba_kernel
def _find_longest_tokens(student: SortedVocabulary, teacher: SortedVocabulary, longest: NDArray[np.int32]) -> None:
    """Write at `byte_offsets[i] + k` the longest student token that token i without its first k bytes begins with.

    `longest`: [teacher's bytes], first index in byte order of a token with these bytes; -1: there is none.
    """
    token_bytes, offsets, read = student.token_bytes, student.byte_offsets, teacher.token_bytes
    for token in range(len(teacher.token_ids)):
        stop = teacher.byte_offsets[token + 1]
        for start in range(teacher.byte_offsets[token], stop):
            longest[start] = -1
            low, high = 0, len(student.token_ids)  # the student tokens that begin with the bytes so far
            for size in range(stop - start):
                low = first_with_byte(token_bytes, offsets, low, high, size, np.int64(read[start + size]))
                high = first_with_byte(token_bytes, offsets, low, high, size, np.int64(read[start + size]) + 1)
                if low == high:
                    break
                if offsets[low + 1] - offsets[low] == size + 1:
                    longest[start] = low


@numba_kernel
def first_with_byte(
    token_bytes: NDArray[np.uint8], offsets: NDArray[np.int64], low: int, high: int, size: int, least: int
) -> int:
    """Return the first token in `[low, high)` that is longer than `size` and whose byte there is at least `least`.

    The tokens begin with the same `size` bytes.
    """
    while low < high:
        middle = (low + high) // 2
        at = offsets[middle] + size
        if at == offsets[middle + 1] or token_bytes[at] < least:
            low = middle + 1
        else:
            high = middle
    return low


def sort_continuations(vocabulary: SortedVocabulary, num_cells: int) -> PrefixContinuations:
    """Return the tokens of a vocabulary, sorted for each of their prefixes."""
    lengths = np.diff(vocabulary.byte_offsets)
    beginnings = np.empty(len(vocabulary.token_bytes), np.int64)
    _number_prefixes(vocabulary, np.zeros(int(lengths.max(initial=0)) + 1, np.int64), beginnings)
    by_cell = np.argsort(beginnings * (num_cells + 1) + vocabulary.suffix_cells + 1, kind="stable")
    ranks = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    firsts = np.searchsorted(beginnings[by_cell], np.arange(len(vocabulary.token_bytes) + 2))
    return PrefixContinuations(firsts, vocabulary.suffix_cells[by_cell], ranks[by_cell])


@numba_kernel
def _number_prefixes(side: SortedVocabulary, lows: NDArray[np.int64], beginnings: NDArray[np.int64]) -> None:
    """Write at `byte_offsets[i] + k` the number of the k-byte prefix of token i: `byte_offsets[low] + k`.

    `lows`: [longest + 1], scratch memory: the first token with each prefix length of the current token.
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
    """Return the partition of two tokenizers' vocabularies; `special_tokens` as in `build_projection`.

    A suffix is in the cell of the first token of its tokenization by the other side.
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
    # A suffix that is a token of either side has that token's cell. The others are tokenized.
    table = {piece: int(own_cells[token]) for piece, token in own.vocabulary.token_of_bytes.items()}
    table.update({piece: int(other_cells[token]) for piece, token in other.vocabulary.token_of_bytes.items()})

    def cells_of(pieces: Sequence[bytes]) -> list[int]:
        unknown = [piece for piece in dict.fromkeys(pieces) if piece not in table]
        for piece, ids in zip(unknown, other.encode_bytes(unknown), strict=True):
            table[piece] = -1 if ids is None else int(other_cells[ids[0]])
        return list(map(table.__getitem__, pieces))

    return sort_vocabulary(own.vocabulary.bytes_by_id, own_cells, cells_of, own.vocabulary.byte_fallback_mask)


def sort_vocabulary(
    bytes_by_id: Sequence[bytes],
    token_cells: NDArray[np.int32],
    find_cells: Callable[[Sequence[bytes]], Sequence[int]],
    byte_fallback_mask: Sequence[bool] | NDArray[np.bool_] = (),
) -> SortedVocabulary:
    """Return a vocabulary sorted by bytes; of tokens with the same bytes, ordinary ones come before byte fallback.

    `bytes_by_id`: b"" for special tokens; ids above are padding. `find_cells`: returns the cells of suffixes, -1 for
    none. `byte_fallback_mask`: [tokens]; empty: there are none.
    """
    is_fallback = list(byte_fallback_mask) or [False] * len(bytes_by_id)
    order = sorted(
        (token for token, spelling in enumerate(bytes_by_id) if spelling),
        key=lambda token: (bytes_by_id[token], is_fallback[token]),
    )
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
