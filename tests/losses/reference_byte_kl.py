"""Reference implementation of byte-kl: tokens are byte strings, sums go over whole vocabularies, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.cells.loss_cells import MIN_REMAINDER
from xtk.losses.interface import LossInputs

# A remainder up to this is only the rounding error of a full distribution.
ROUNDING_REMAINDER = 1e-6

Probability = Any  # float for the teacher, Tensor for the student


def _x_log_ratio(x: float, y: Tensor) -> Tensor:
    """Return `x ln(x / y)`, 0 if x is 0."""
    return x * (math.log(x) - y.log()) if x > 0 else torch.zeros((), dtype=torch.float64)


# Each cell's contribution: `p` is the teacher's probability, `q` the student's.
CELL_DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "forward-kl": _x_log_ratio,
    "reverse-kl": lambda p, q: q * (q.log() - math.log(max(p, 1e-37))),
    "jsd": lambda p, q, beta=0.5, scale=1.0: (
        scale
        * (beta * _x_log_ratio(p, beta * p + (1 - beta) * q) + (1 - beta) * q * (q / (beta * p + (1 - beta) * q)).log())
    ),
    "skew-forward-kl": lambda p, q, skew=0.1: _x_log_ratio(p, skew * p + (1 - skew) * q),
    "skew-reverse-kl": lambda p, q, skew=0.1: q * (q / (skew * q + (1 - skew) * p)).log(),
    "tvd": lambda p, q: (p - q).abs() / 2,
}


@dataclass(frozen=True)
class ReferenceDivergence:
    """A divergence of `CELL_DIVERGENCES` at a temperature."""

    name: str = "forward-kl"
    temperature: float = 1.0
    options: Mapping[str, float] = field(default_factory=dict)

    def __call__(
        self, teacher_probs: list[float], student_probs: list[Tensor], teacher_remainder: float | None = None
    ) -> Tensor:
        """Return the divergence over cells and the remainder; `teacher_remainder` overrides the teacher's."""
        t_remainder = 1 - sum(teacher_probs)
        t_remainder = t_remainder if t_remainder > MIN_REMAINDER else 0.0
        t_remainder = t_remainder if teacher_remainder is None else teacher_remainder
        s_remainder = (1 - sum(student_probs, torch.zeros((), dtype=torch.float64))).clamp_min(1e-12)
        power = 1 / self.temperature
        p, q = [t**power for t in (*teacher_probs, t_remainder)], [s**power for s in (*student_probs, s_remainder)]
        p, q = [t / sum(p) for t in p] if power != 1 else p, [s / sum(q) for s in q] if power != 1 else q
        p[-1] = max(p[-1], MIN_REMAINDER) if self.name == "reverse-kl" else p[-1]
        cell_values = [CELL_DIVERGENCES[self.name](t, s, **self.options) for t, s in zip(p, q, strict=True)]
        return sum(cell_values, torch.zeros((), dtype=torch.float64)) / power**2


FORWARD_KL = ReferenceDivergence()


def support_at(teacher_logprobs: TeacherLogprobs, index: int, *, exact: bool = False) -> list[tuple[int, float]]:
    """Return `(id, log-probability)` pairs of one position; with `exact`, without the sampled tokens."""
    first, stop = teacher_logprobs.offsets[index : index + 2].tolist()
    if exact and teacher_logprobs.exact_counts is not None:
        stop = first + int(teacher_logprobs.exact_counts[index])
    entries = slice(first, stop)
    return list(zip(teacher_logprobs.ids[entries].tolist(), teacher_logprobs.logprobs[entries].tolist(), strict=True))


def has_full_support(teacher_logprobs: TeacherLogprobs, index: int) -> bool:
    """Return whether the exact tokens of a position are its full distribution."""
    return teacher_logprobs.remainder_mass[index] <= ROUNDING_REMAINDER and len(
        support_at(teacher_logprobs, index)
    ) == len(support_at(teacher_logprobs, index, exact=True))


@dataclass(frozen=True)
class ReferenceVocabulary:
    """One model's vocabulary: bytes of tokens, cells of tokens and of byte strings (-1: none), possible tokens."""

    spellings: list[bytes]
    cells: list[int]
    cell_of_piece: Callable[[bytes], int]
    possible_tokens: Sequence[int] | None = None

    def suffix_cell(self, token: int, prefix_length: int) -> int:
        """Return the cell of the bytes of a token after its first `prefix_length`."""
        return self.cell_of_piece(self.spellings[token][prefix_length:]) if prefix_length else self.cells[token]


@dataclass(frozen=True)
class OffsetContext:
    """One model's predictions at a byte offset: at the previous token boundary, and here if a token ends here.

    Attributes:
        token: the token that contains the byte before the offset.
        prefix: its bytes before the offset; empty: no prediction at the previous boundary.
        previous_probs: {token: probability} at the previous boundary.
        probs: the same at the offset; None inside of a token.
    """

    token: int
    prefix: bytes
    previous_probs: Mapping[int, Probability] | None
    probs: Mapping[int, Probability] | None


def next_cell_probs(
    vocabulary: ReferenceVocabulary, context: OffsetContext, is_alternative: Callable[[int], bool]
) -> tuple[dict[int, Probability], Probability, Probability]:
    """Return {cell: probability}, the probability in no cell, and a, by Bayes' rule on the bytes of the prefix.

    Args:
        vocabulary: of the model.
        context: its predictions at the offset.
        is_alternative: whether a token at the previous boundary is an alternative to the observed one.
    """
    cell_probs: dict[int, Probability] = {}
    unmapped: Probability = 0.0
    if context.previous_probs is None:
        ended, longer, a = 1.0, 0.0, 1.0
    else:
        r = context.prefix
        matching = {
            token: p
            for token, p in context.previous_probs.items()
            if vocabulary.spellings[token].startswith(r) and is_alternative(token)
        }
        ended = sum(p for token, p in matching.items() if vocabulary.spellings[token] == r)
        longer = sum(p for token, p in matching.items() if vocabulary.spellings[token] != r)
        a = ended / (ended + longer)
        for token, p in matching.items():
            if vocabulary.spellings[token] != r:
                cell = vocabulary.suffix_cell(token, len(r))
                share = p / (ended + longer)
                if cell < 0:
                    unmapped = unmapped + share
                else:
                    cell_probs[cell] = cell_probs.get(cell, 0.0) + share
    if context.probs is not None:
        for token, p in context.probs.items():
            cell = vocabulary.cells[token]
            if cell < 0:
                unmapped = unmapped + a * p
            else:
                cell_probs[cell] = cell_probs.get(cell, 0.0) + a * p
    return cell_probs, unmapped, a


def reference_byte_kl(
    example: LossInputs,
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    probs_NV: Tensor,
    divergence: ReferenceDivergence = FORWARD_KL,
) -> list[Tensor]:
    """Return the divergence at each token boundary of either model."""
    return [
        _item_divergence(*item, student, teacher, example, probs_NV, divergence)
        for item in reference_items(example, student, teacher)
    ]


def reference_items(
    example: LossInputs, student: ReferenceVocabulary, teacher: ReferenceVocabulary
) -> list[tuple[tuple[int, int, bool], ...]]:
    """Return the compared offsets: `(position, prefix_length, boundary)` of the student and of the teacher.

    At a boundary the token at `position` begins here. Otherwise it began `prefix_length` bytes before.
    """
    items = []
    for s0, s1, t0, t1 in example.spans.tolist():
        student_spellings = [student.spellings[token] for token in example.student_ids[s0:s1]]
        teacher_spellings = [teacher.spellings[token] for token in example.teacher_ids[t0:t1]]
        equal_bytes = b"".join(student_spellings) == b"".join(teacher_spellings) and (
            all([*student_spellings, *teacher_spellings]) or s1 - s0 == t1 - t0 == 1
        )
        student_cell, teacher_cell = student.cells[example.student_ids[s0]], teacher.cells[example.teacher_ids[t0]]
        if equal_bytes or student_cell == teacher_cell >= 0:
            items.append(((s0, 0, True), (t0, 0, True)))
        if equal_bytes:
            for offset in range(1, len(b"".join(student_spellings))):
                locations = (_locate(student_spellings, s0, offset), _locate(teacher_spellings, t0, offset))
                if locations[0][2] or locations[1][2]:
                    items.append(locations)
    return [item for item in items if _is_predicted(item, example)]


def _locate(spellings: list[bytes], first_position: int, offset: int) -> tuple[int, int, bool]:
    start = 0
    for index, spelling in enumerate(spellings):
        if start == offset:
            return first_position + index, 0, True
        if offset < start + len(spelling):
            return first_position + index, offset - start, False
        start += len(spelling)
    raise AssertionError(offset)


def _is_predicted(item: tuple[tuple[int, int, bool], ...], example: LossInputs) -> bool:
    teacher_logprobs = example.teacher_logprobs
    assert teacher_logprobs is not None
    predicted = {int(row) + 1 for row in example.positions}, set(teacher_logprobs.positions.tolist())
    if not all(position in positions for (position, _, _), positions in zip(item, predicted, strict=True)):
        return False
    both_boundaries = all(boundary for _, _, boundary in item)
    # Where one model is inside of a token, the other needs its prediction at the previous position.
    return both_boundaries or all(
        position - 1 in positions
        for (position, _, boundary), positions in zip(item, predicted, strict=True)
        if boundary
    )


def _item_divergence(
    student_location: tuple[int, int, bool],
    teacher_location: tuple[int, int, bool],
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    example: LossInputs,
    probs_NV: Tensor,
    divergence: ReferenceDivergence,
) -> Tensor:
    teacher_logprobs = example.teacher_logprobs
    assert teacher_logprobs is not None
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    index_of = {int(position): n for n, position in enumerate(teacher_logprobs.positions)}

    def student_probs_at(position: int, _: bytes = b"") -> Mapping[int, Probability] | None:
        if position not in row_of:
            return None
        probs = probs_NV[row_of[position]]
        return {token: probs[token] for token in student.possible_tokens or range(len(student.spellings))}

    def teacher_probs_at(position: int, prefix: bytes = b"") -> Mapping[int, Probability] | None:
        if position not in index_of:
            return None
        support = support_at(teacher_logprobs, index_of[position], exact=bool(prefix))
        # Only ratios of tokens with the same first bytes are needed; the most likely one may have probability e^-1000.
        highest = (
            max(logprob for token, logprob in support if teacher.spellings[token].startswith(prefix)) if prefix else 0
        )
        return {token: math.exp(min(logprob - highest, 0)) for token, logprob in support}

    s = _context_at(student_location, example.student_ids, student, student_probs_at)
    t = _context_at(teacher_location, example.teacher_ids, teacher, teacher_probs_at)
    # Without both previous predictions, neither is used.
    if s.previous_probs is None or t.previous_probs is None:
        s, t = OffsetContext(s.token, b"", None, s.probs), OffsetContext(t.token, b"", None, t.probs)

    # Tokens in the teacher's remainder have no exact probability. Then the student's alternatives are only those
    # whose bytes after the later one of both previous boundaries are in a cell that the teacher lists.
    def accept_all(_: int) -> bool:
        return True

    is_alternative = accept_all
    previous_position = teacher_location[0] - 1 if teacher_location[2] else teacher_location[0]
    if t.previous_probs is not None and not has_full_support(teacher_logprobs, index_of[previous_position]):
        shared_length = min(len(s.prefix), len(t.prefix))
        student_skipped, teacher_skipped = len(s.prefix) - shared_length, len(t.prefix) - shared_length
        listed_cells = {
            teacher.suffix_cell(token, teacher_skipped)
            for token in t.previous_probs
            if teacher.spellings[token][:teacher_skipped] == t.prefix[:teacher_skipped]
            and (teacher_skipped == 0 or len(teacher.spellings[token]) > teacher_skipped)
        }
        listed_cells |= {student.suffix_cell(s.token, student_skipped)}
        listed_cells -= {-1}

        def is_in_listed_cell(token: int) -> bool:
            if token == s.token:
                return True
            return (
                len(student.spellings[token]) > student_skipped
                and student.suffix_cell(token, student_skipped) in listed_cells
            )

        is_alternative = is_in_listed_cell

    p, _, _ = next_cell_probs(teacher, t, accept_all)
    listed_here = None
    if t.probs is not None and teacher_logprobs.remainder_mass[index_of[teacher_location[0]]] > ROUNDING_REMAINDER:
        listed_here = {teacher.cells[token] for token in t.probs}
    current_probs = s.probs
    # Cells that the teacher does not list here are in the remainder.
    if current_probs is not None and listed_here is not None:
        current_probs = {token: q for token, q in current_probs.items() if student.cells[token] in listed_here}
    q, _, _ = next_cell_probs(
        student, OffsetContext(s.token, s.prefix, s.previous_probs, current_probs), is_alternative
    )
    cells = [cell for cell in p if p[cell] > 0 and cell in q]
    alternatives = [
        token
        for token in s.previous_probs or {}
        if is_alternative(token) and student.spellings[token].startswith(s.prefix)
    ]
    longer_in_remainder = any(
        student.suffix_cell(token, len(s.prefix)) not in cells
        for token in alternatives
        if s.prefix != student.spellings[token]
    )
    current_in_remainder = any(
        token not in current_probs or student.cells[token] not in cells for token in s.probs or {}
    )
    ended_in_remainder = s.probs is None and any(student.spellings[token] == s.prefix for token in alternatives)
    if not (longer_in_remainder or current_in_remainder or ended_in_remainder):
        # The student can have no remainder: the teacher is normalized over the cells.
        p = {cell: p[cell] / sum(p[cell] for cell in cells) for cell in cells}
    return divergence([p[cell] for cell in cells], [q[cell] for cell in cells])


def _context_at(
    location: tuple[int, int, bool],
    ids: Any,
    vocabulary: ReferenceVocabulary,
    probs_at: Callable[..., Mapping[int, Probability] | None],
) -> OffsetContext:
    position, prefix_length, boundary = location
    if not boundary:
        token = int(ids[position])
        return OffsetContext(
            token,
            vocabulary.spellings[token][:prefix_length],
            probs_at(position, vocabulary.spellings[token][:prefix_length]),
            None,
        )
    token = int(ids[position - 1])
    prefix = vocabulary.spellings[token]
    return OffsetContext(token, prefix, probs_at(position - 1, prefix) if prefix else None, probs_at(position))
