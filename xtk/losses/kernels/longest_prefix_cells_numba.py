"""Numba kernels of bpm and escd: the teacher's probability of each student token, by byte prefixes.

They release the GIL. The tests contain a slow, readable reference implementation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.losses.kernels.byte_kl_numba import (
    boundary_correction,
    ensure_capacity,
    fill_teacher_cells,
    normalize_cells,
    num_members,
)
from xtk.losses.kernels.prefix_alternatives_numba import BoundaryScratch, make_scratch
from xtk.losses.kernels.sampled_support_correction import TeacherArrays
from xtk.losses.kernels.token_boundaries_numba import (
    BOUNDARY_BYTES,
    NEXT_DISTRIBUTION,
    NONE,
    PREVIOUS_DISTRIBUTION,
    STUDENT_COLUMNS,
    TEACHER_COLUMNS,
    TokenPath,
    byte_length,
    prefix_range,
    sorted_index,
)
from xtk.numba_kernel import numba_kernel
from xtk.projection.vocabulary_byte_partition import LongestPrefixes, SortedVocabulary

# What is left of a cell's probability after a part of it moved to another cell, if it is only a rounding error.
MOVE_ROUNDING = 1e-6


@numba_kernel
def fill_longest_prefix_cells(
    student: SortedVocabulary,
    prefixes: LongestPrefixes,
    support: TeacherArrays,
    observed_logprobs: NDArray[np.float32],
    path: TokenPath,
    items: NDArray[np.int64],
    student_tokens: NDArray[np.int32],
    teacher_indices: NDArray[np.int64],
    with_inside: bool,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return cell_offsets, entry_offsets, teacher_probs, rows, tokens and corrections of all items, as in `LossCells`.

    Args:
        observed_logprobs: float32 [P], log-probabilities of the teacher's own tokens.
        items: int64 [I, 8], boundaries of the student, as `find_boundaries` returns them.
        student_tokens: int32 [I], the student's token after each.
        teacher_indices: int64 [I], the index of the teacher's token that begins there, or that it is inside of.
        with_inside: whether items inside of a teacher token have cells.
    """
    teacher, width = prefixes.teacher, len(student.token_cells)
    member_offsets, members = prefixes.cell_token_offsets, prefixes.cell_tokens
    scratch = make_scratch(len(member_offsets) - 1, 0, support)
    cell_offsets, corrections = np.zeros(len(items) + 1, np.int64), np.zeros(len(items), np.float64)
    entry_offsets, probs = np.zeros(1024, np.int64), np.empty(1024, np.float32)
    rows, tokens = np.empty(1024, np.int32), np.empty(1024, np.int32)
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    slots, item_cells, item_probs, exact_probs = scratch.slots, scratch.cells, scratch.probs, scratch.exact_probs
    cells = entries = 0
    for number in range(len(items)):
        row, theirs = items[number, STUDENT_COLUMNS + NEXT_DISTRIBUTION], items[number, TEACHER_COLUMNS:].copy()
        position = theirs[NEXT_DISTRIBUTION]
        cell_offsets[number + 1] = cells
        if position == NONE and not with_inside:
            continue
        if position != NONE:
            theirs[PREVIOUS_DISTRIBUTION] = NONE  # what was spelled before does not count
        num_cells, weight = fill_teacher_cells(teacher, support, theirs, number, scratch)
        num_cells = _move_spanning_mass(
            student, prefixes, support, observed_logprobs, path, theirs,
            (student_tokens[number], teacher_indices[number], number), num_cells, scratch,
        )  # fmt: skip
        entry_offsets, probs = (
            ensure_capacity(entry_offsets, cells + num_cells + 1),
            ensure_capacity(probs, cells + num_cells),
        )
        most = entries + num_members(member_offsets, item_cells[:num_cells])  # once for the item, as in byte-kl
        rows, tokens = ensure_capacity(rows, most), ensure_capacity(tokens, most)
        first_cell = cells
        for slot in range(num_cells):
            cell = item_cells[slot]
            if item_probs[slot] <= 0:
                slots[cell] = NONE
                continue
            kept = cells - first_cell  # at most `slot`
            item_probs[kept], exact_probs[kept], slots[cell] = item_probs[slot], exact_probs[slot], kept
            for member in range(member_offsets[cell], member_offsets[cell + 1]):
                rows[entries], tokens[entries] = row, members[member]
                entries += 1
            cells += 1
            entry_offsets[cells] = entries
        kept_probs = item_probs[: cells - first_cell]
        if cells > first_cell and entries - entry_offsets[first_cell] == width:
            weight /= normalize_cells(scratch, len(kept_probs))  # the student cannot have a remainder here
        probs[first_cell:cells] = kept_probs
        corrections[number] = boundary_correction(teacher, support, position, weight, number, scratch, kept_probs, True)
        cell_offsets[number + 1] = cells
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells], rows[:entries], tokens[:entries], corrections,
    )  # fmt: skip


@numba_kernel
def _move_spanning_mass(
    student: SortedVocabulary,
    prefixes: LongestPrefixes,
    support: TeacherArrays,
    observed_logprobs: NDArray[np.float32],
    path: TokenPath,
    place: NDArray[np.int64],
    item: tuple[int, int, int],
    num_cells: int,
    scratch: BoundaryScratch,
) -> int:
    """Move the probability of a student token that spans a teacher boundary to its cell, out of the one that held it.

    `place`: the item's columns of the teacher. `item`: the student's token, the index of the teacher's token, and the
    item's number. The cells in `scratch` are changed; their number is returned.
    """
    token, at, number = item
    cut = place[BOUNDARY_BYTES] if place[NEXT_DISTRIBUTION] == NONE else 0
    if token >= len(student.sorted_indices) or prefixes.student_cells[token] == NONE:
        return num_cells
    teacher, own = prefixes.teacher, path.ids[at]
    mass = spanning_probability(student, teacher, support, observed_logprobs, path, token, at, cut)
    if mass <= 0:
        return num_cells
    source = teacher.token_cells[own]
    if cut > 0:
        source = teacher.suffix_cells[teacher.byte_offsets[sorted_index(teacher, own)] + cut]
    if source != NONE and scratch.cell_owner[source] == number:
        slot = scratch.slots[source]
        mass = min(mass, scratch.exact_probs[slot])
        for values in (scratch.probs, scratch.exact_probs):
            left = values[slot] - mass
            values[slot] = left if left > MOVE_ROUNDING * mass else 0.0
    target = prefixes.student_cells[token]
    if scratch.cell_owner[target] != number:
        scratch.cell_owner[target], scratch.slots[target], scratch.cells[num_cells] = number, num_cells, target
        scratch.probs[num_cells] = scratch.exact_probs[num_cells] = 0.0
        num_cells += 1
    scratch.probs[scratch.slots[target]] += mass
    scratch.exact_probs[scratch.slots[target]] += mass
    return num_cells


@numba_kernel
def spanning_probability(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    support: TeacherArrays,
    observed_logprobs: NDArray[np.float32],
    path: TokenPath,
    token: int,
    at: int,
    cut: int,
) -> float:
    """Return the probability of a student token that goes on after the end of the teacher's token, whose index is `at`.

    It is the product of the probabilities of the teacher's own tokens, and of the mass of the tokens that begin with
    the bytes that are left in the last one. It is 0 for a token that ends in the first of them or with it. `cut`: the
    number of bytes of the teacher's token before the student's.
    """
    left, total = byte_length(student, token), 0.0
    if left <= byte_length(teacher, path.ids[at]) - cut:
        return 0.0
    byte = student.byte_offsets[sorted_index(student, token)]
    while left > 0:
        position = path.distribution_indices[at] if at < len(path.ids) else NONE
        length = byte_length(teacher, path.ids[at]) - cut if position != NONE else 0
        if length <= 0:
            return 0.0
        start = teacher.byte_offsets[sorted_index(teacher, path.ids[at])] + cut
        for number in range(min(left, length)):
            if student.token_bytes[byte + number] != teacher.token_bytes[start + number]:
                return 0.0
        if left < length:  # it ends inside of this token
            total += listed_prefix_logprob(teacher, support, position, path.ids[at], left)
        else:
            total += observed_logprobs[position]
        if cut > 0:
            total -= listed_prefix_logprob(teacher, support, position, path.ids[at], cut)
        at, cut, byte, left = at + 1, 0, byte + length, left - length
    return math.exp(total)


@numba_kernel
def listed_prefix_logprob(
    side: SortedVocabulary, support: TeacherArrays, position: int, token: int, size: int
) -> float:
    """Return the log of the exact probabilities of the tokens that begin with the first `size` bytes of a token."""
    low, _, high = prefix_range(side, token, size)
    highest, total = -np.inf, 0.0
    for slot in range(support.offsets[position], support.exact_stops[position]):
        if low <= sorted_index(side, support.ids[slot]) < high:
            highest = max(highest, np.float64(support.logprobs[slot]))
    for slot in range(support.offsets[position], support.exact_stops[position]):
        if low <= sorted_index(side, support.ids[slot]) < high:
            total += math.exp(support.logprobs[slot] - highest)
    return highest + math.log(total) if total > 0 else -np.inf
