"""Numba kernels of byte-kl: the cells of both models' distributions over the next bytes; they release the GIL.

The tests contain a slow, readable reference implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.losses.kernels.prefix_alternatives_numba import (
    BoundaryScratch,
    group_prefix_tokens,
    make_scratch,
    sort_runs_by_group,
)
from xtk.losses.kernels.sampled_support_correction import (
    TeacherArrays,
    known_probability,
    negentropy,
    remainder_correction,
    sampled_log_correction,
)
from xtk.losses.kernels.token_boundaries_numba import (
    BOUNDARY_BYTES,
    BOUNDARY_TOKEN,
    NEXT_DISTRIBUTION,
    NONE,
    PREVIOUS_DISTRIBUTION,
    STUDENT_COLUMNS,
    TEACHER_COLUMNS,
    prefix_range,
)
from xtk.numba_kernel import numba_kernel
from xtk.projection.vocabulary_byte_partition import PrefixContinuations, SortedVocabulary

# Up to this many tokens with the same prefix per cell, a linear scan is faster than a binary search.
LINEAR_SCAN_LIMIT = 50


@numba_kernel
def fill_byte_cells(
    student: SortedVocabulary,
    teacher: SortedVocabulary,
    after: PrefixContinuations,
    member_offsets: NDArray[np.int32],
    teacher_members: NDArray[np.int64],
    support: TeacherArrays,
    items: NDArray[np.int64],
    scan_limit: int = LINEAR_SCAN_LIMIT,
) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]:
    """Return the cells of all items as flat arrays, for `items` as `find_boundaries` returns them.

    They are cell_offsets, entry_offsets, teacher_probs, first_members as in `NextByteCells`, for the next-token rows;
    run_offsets, firsts, stops for the previous rows; corrections and sampled_probs as in `LossCells`. `member_offsets`
    and `teacher_members`: `cell_token_offsets` and `num_teacher_tokens` of `BytePartition`. The result does not depend
    on `scan_limit`, the limit of linear scans in tokens per cell.
    """
    cells_of_both, width = len(member_offsets) - 1, len(student.token_cells)
    scratch = make_scratch(cells_of_both, len(student.token_ids), support)
    runs, ends = np.empty((len(student.token_ids) + 1, 3), np.int32), np.empty(cells_of_both + 2, np.int64)
    cell_offsets, corrections = np.zeros(len(items) + 1, np.int64), np.zeros(len(items), np.float64)
    entry_offsets, run_offsets = np.zeros(1024, np.int64), np.zeros(1024, np.int64)
    probs, first_members = np.empty(1024, np.float32), np.empty(1024, np.int64)
    sampled_probs = np.empty(1024, np.float32)
    firsts, stops = np.empty(1024, np.int32), np.empty(1024, np.int32)
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    slots, item_cells, item_probs = scratch.slots, scratch.cells, scratch.probs
    exact_probs, is_at_boundary = scratch.exact_probs, scratch.is_at_boundary
    cells = entries = groups = written = 0
    for number in range(len(items)):
        ours, theirs = items[number, STUDENT_COLUMNS:TEACHER_COLUMNS], items[number, TEACHER_COLUMNS:]
        row, position = ours[NEXT_DISTRIBUTION], theirs[NEXT_DISTRIBUTION]
        num_cells, weight = fill_teacher_cells(teacher, support, theirs, number, scratch)
        count = group_prefix_tokens(
            student, teacher, after, support, ours, theirs, num_cells, number, scratch, runs, scan_limit
        )
        # If the teacher's next-token distribution has a remainder, cells that it does not list belong to the remainder.
        is_complete = position == NONE or support.remainder_mass[position] <= MIN_REMAINDER
        has_samples = position != NONE and support.exact_stops[position] < support.offsets[position + 1]
        run_offsets, probs, sampled_probs = (
            ensure_capacity(run_offsets, groups + num_cells + 3),
            ensure_capacity(probs, cells + num_cells),
            ensure_capacity(sampled_probs, cells + num_cells),
        )
        firsts, stops = ensure_capacity(firsts, written + count), ensure_capacity(stops, written + count)
        entry_offsets, first_members = (
            ensure_capacity(entry_offsets, cells + num_cells + 2),
            ensure_capacity(first_members, cells + num_cells),
        )
        sort_runs_by_group(runs[:count], num_cells + 2, ends, firsts[written:], stops[written:])
        run_offsets[groups + 1], run_offsets[groups + 2] = written + ends[0], written + ends[1]
        groups, first_cell = groups + 2, cells
        for slot in range(num_cells):
            cell = item_cells[slot]
            if row != NONE and (is_complete or is_at_boundary[slot]):
                entries += member_offsets[cell + 1] - member_offsets[cell]
            if entries == entry_offsets[cells] and ends[slot + 2] == ends[slot + 1]:
                if has_samples:
                    slots[cell] = NONE
                continue  # the student cannot reach this cell
            kept_slot = cells - first_cell  # at most `slot`
            item_probs[kept_slot], exact_probs[kept_slot] = item_probs[slot], exact_probs[slot]
            first_members[cells] = member_offsets[cell]
            if has_samples:
                slots[cell] = kept_slot
            cells, groups = cells + 1, groups + 1
            entry_offsets[cells] = entries
            run_offsets[groups] = written + ends[slot + 2]
        written += count
        kept = item_probs[: cells - first_cell]
        elsewhere = ends[0] > 0 if row == NONE else entries - entry_offsets[first_cell] < width
        scratch.sampled_probs[: len(kept)] = 0.0
        if ends[1] == ends[0] and not elsewhere:
            weight /= normalize_cells(scratch, len(kept))  # the student cannot have a remainder here
        elif row != NONE and has_samples:  # inside of a token, the student's remainder has more than its tail
            fill_sampled_probs(teacher, support, position, weight, number, scratch, teacher_members)
        probs[first_cell:cells], sampled_probs[first_cell:cells] = kept, scratch.sampled_probs[: len(kept)]
        if has_samples:
            corrections[number] = boundary_correction(
                teacher, support, position, weight, number, scratch, kept, row != NONE
            )
        cell_offsets[number + 1] = cells
    return (
        cell_offsets, entry_offsets[: cells + 1], probs[:cells], first_members[:cells],
        run_offsets[: groups + 1], firsts[:written], stops[:written], corrections, sampled_probs[:cells],
    )  # fmt: skip


@numba_kernel
def fill_teacher_cells(
    side: SortedVocabulary, support: TeacherArrays, place: NDArray[np.int64], number: int, scratch: BoundaryScratch
) -> tuple[int, float]:
    """Write the teacher's next-byte distribution at one item into the scratch memory.

    Returns the number of cells, and the weight E / (E + M) of the teacher's next-token distribution.
    """
    # Arrays of a tuple are read once: in a loop, each access would count references, which costs more than the rest.
    ids, logprobs, exact_stops = support.ids, support.logprobs, support.exact_stops
    token_cells, cell_owner, slots, cells = side.token_cells, scratch.cell_owner, scratch.slots, scratch.cells
    probs, exact_probs, is_at_boundary = scratch.probs, scratch.exact_probs, scratch.is_at_boundary
    count, weight, previous, following = 0, 1.0, place[PREVIOUS_DISTRIBUTION], place[NEXT_DISTRIBUTION]
    if previous != NONE:
        low, longer, high = prefix_range(side, place[BOUNDARY_TOKEN], place[BOUNDARY_BYTES])
        sorted_indices, prefix_slots, prefix_indices = side.sorted_indices, scratch.prefix_slots, scratch.prefix_indices
        alike = 0  # support entries with this prefix
        for slot in range(support.offsets[previous], exact_stops[previous]):
            rank = sorted_indices[ids[slot]] if ids[slot] < len(sorted_indices) else NONE
            if low <= rank < high:
                prefix_slots[alike], prefix_indices[alike] = slot, rank
                alike += 1
        highest = -np.inf  # the largest may be e^-1000, so scale by it
        for slot in prefix_slots[:alike]:
            highest = max(highest, logprobs[slot])
        ended = runs_past = 0.0
        for entry in range(alike):
            mass = np.exp(logprobs[prefix_slots[entry]] - highest)
            if prefix_indices[entry] < longer:
                ended += mass
            else:
                runs_past += mass
        weight = ended / (ended + runs_past)
        for entry in range(alike):
            if prefix_indices[entry] >= longer:
                cell = side.suffix_cells[side.byte_offsets[prefix_indices[entry]] + place[BOUNDARY_BYTES]]
                mass = np.exp(logprobs[prefix_slots[entry]] - highest) / (ended + runs_past)
                if cell == NONE or mass <= 0:
                    continue
                if cell_owner[cell] != number:
                    cell_owner[cell], slots[cell], cells[count] = number, count, cell
                    probs[count], exact_probs[count], is_at_boundary[count] = 0.0, 0.0, False
                    count += 1
                probs[slots[cell]] += mass
                exact_probs[slots[cell]] += mass
    if following != NONE:
        for slot in range(support.offsets[following], support.offsets[following + 1]):
            cell = token_cells[ids[slot]] if ids[slot] < len(token_cells) else NONE
            mass = weight * np.exp(np.float64(logprobs[slot]))
            if cell == NONE or mass <= 0:
                continue
            if cell_owner[cell] != number:
                cell_owner[cell], slots[cell], cells[count] = number, count, cell
                probs[count] = exact_probs[count] = 0.0
                count += 1
            probs[slots[cell]] += mass
            if slot < exact_stops[following]:
                exact_probs[slots[cell]] += mass
            is_at_boundary[slots[cell]] = True
    return count, weight


@numba_kernel
def fill_sampled_probs(
    side: SortedVocabulary,
    support: TeacherArrays,
    position: int,
    weight: float,
    number: int,
    scratch: BoundaryScratch,
    teacher_members: NDArray[np.int64],
) -> None:
    """Write the `sampled_probs` of an item's cells; those of cells without a sampled token stay 0.

    Of the student's probability of a cell, each of its m tokens of the teacher represents 1 / m: so a sampled token
    counts as a cell of m times its probability, and the expectation over samples is the student's probability.
    """
    ids, logprobs, token_cells = support.ids, support.logprobs, side.token_cells
    owners, slots, exact_probs, sampled_probs = (
        scratch.cell_owner,
        scratch.slots,
        scratch.exact_probs,
        scratch.sampled_probs,
    )
    first, stop = support.exact_stops[position], support.offsets[position + 1]
    for step in range(2):  # the sums of w / (m t), then the masses of the cells divided by them
        for entry in range(first, stop):
            cell = token_cells[ids[entry]] if ids[entry] < len(token_cells) else NONE
            if cell == NONE or owners[cell] != number or slots[cell] < 0:
                continue
            known, slot = known_probability(support, entry), slots[cell]
            if exact_probs[slot] > 0:
                sampled_probs[slot] = -exact_probs[slot] if known > 0 else 0.0
            elif step == 0 and known > 0:
                sampled_probs[slot] -= np.exp(np.float64(logprobs[entry])) / (teacher_members[cell] * known)
            elif step == 1 and sampled_probs[slot] < 0:  # once per cell; the sign marks it as done
                sampled_probs[slot] = scratch.probs[slot] / -sampled_probs[slot]


@numba_kernel
def boundary_correction(
    teacher: SortedVocabulary,
    support: TeacherArrays,
    here: int,
    weight: float,
    number: int,
    scratch: BoundaryScratch,
    kept: NDArray[np.float32],
    both: bool,
) -> Any:
    """Return the sampling correction of an item, in nats; `both`: it is a boundary of both models."""
    remainder = 1.0 - kept.sum()  # before `sampling_correction` overwrites the probabilities
    correction, outside = sampling_correction(teacher, support, here, weight, number, scratch)
    if both:
        outside -= scratch.exact_probs[: len(kept)].sum()
        correction += remainder_correction(remainder, outside)
    return correction


@numba_kernel
def sampling_correction(
    side: SortedVocabulary, support: TeacherArrays, position: int, weight: float, number: int, scratch: BoundaryScratch
) -> tuple[float, float]:
    """Return the sampling correction of one item's cells, without the remainder, in nats; and 1 minus the sampled mass.

    `position`: of the teacher's next-token distribution. `slots` are below 0 for cells that the student cannot reach;
    `probs` are overwritten.
    """
    correction, outside = 0.0, 1.0
    surprisal = support.mean_surprisals[position]
    mean_logprob = np.log(weight) - surprisal if weight > 0 else 0.0
    mean_prob = weight * np.exp(-max(surprisal, 0.0))
    ids, logprobs, token_cells = support.ids, support.logprobs, side.token_cells
    owners, slots, probs, exact_probs = scratch.cell_owner, scratch.slots, scratch.probs, scratch.exact_probs
    for entry in range(support.exact_stops[position], support.offsets[position + 1]):
        cell = token_cells[ids[entry]] if ids[entry] < len(token_cells) else NONE
        if cell == NONE or owners[cell] != number or slots[cell] < 0:
            continue
        slot, mass = slots[cell], weight * np.exp(np.float64(logprobs[entry]))
        if scratch.sampled_probs[slot] > 0:  # 0, if the token is alone in its cell
            known = weight * known_probability(support, entry)
            correction += mass * np.log(known / scratch.sampled_probs[slot])
            outside -= known
            continue
        correction += mass * sampled_log_correction(exact_probs[slot], mean_logprob, mean_prob)
        if probs[slot] >= 0:  # once per cell; the sign marks it as done
            correction += negentropy(exact_probs[slot]) - negentropy(probs[slot])
            probs[slot] = -1.0
        outside -= mean_prob
    return correction, outside


@numba_kernel
def normalize_cells(scratch: BoundaryScratch, count: int) -> Any:
    """Divide the teacher's probabilities of the first cells of an item by their sum, and return the sum."""
    total = scratch.probs[:count].sum()
    scratch.probs[:count] /= total
    scratch.exact_probs[:count] /= total
    return total


@numba_kernel
def num_members(member_offsets: NDArray[np.int64], cells: NDArray[np.int64]) -> Any:
    """Return the number of student tokens in some cells."""
    total = 0
    for cell in cells:
        total += member_offsets[cell + 1] - member_offsets[cell]
    return total


@numba_kernel
def ensure_capacity(values: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the array itself, or a longer copy, with capacity for `size` values."""
    if size <= len(values):
        return values
    longer = np.empty(2 * size, values.dtype)
    longer[: len(values)] = values
    return longer
