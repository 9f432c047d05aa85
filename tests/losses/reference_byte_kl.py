"""byte-kl once more, written for reading: tokens are byte strings, every sum goes over a whole vocabulary, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xtk.losses.loss_cells import MIN_REMAINDER
from xtk.losses.loss_interface import LossInputs
from xtk.tokens.teacher_logprobs import TeacherLogprobs

# A tail that is no more than what rounding leaves of a whole distribution.
SMALLEST_TAIL = 1e-6

Number = Any  # a float of the teacher, a tensor of the student


def _x_ln(x: float, y: Tensor) -> Tensor:
    """`x ln(x / y)`, 0 for nothing."""
    return x * (math.log(x) - y.log()) if x > 0 else torch.zeros((), dtype=torch.float64)


# What a cell adds: `p` is the teacher's probability, `q` the student's.
OF_A_CELL: dict[str, Callable[..., Tensor]] = {
    "forward-kl": _x_ln,
    "reverse-kl": lambda p, q: q * (q.log() - math.log(max(p, 1e-37))),
    "jsd": lambda p, q, beta=0.5, scale=1.0: (
        scale * (beta * _x_ln(p, beta * p + (1 - beta) * q) + (1 - beta) * q * (q / (beta * p + (1 - beta) * q)).log())
    ),
    "skew-forward-kl": lambda p, q, skew=0.1: _x_ln(p, skew * p + (1 - skew) * q),
    "skew-reverse-kl": lambda p, q, skew=0.1: q * (q / (skew * q + (1 - skew) * p)).log(),
    "tvd": lambda p, q: (p - q).abs() / 2,
}


@dataclass(frozen=True)
class Distance:
    """A divergence of the table, at a temperature."""

    name: str = "forward-kl"
    temperature: float = 1.0
    options: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, teacher: list[float], student: list[Tensor], rest: float | None = None) -> Tensor:
        """Between two distributions over cells and the other cell, of which the teacher has `rest`."""
        t_rest = 1 - sum(teacher)
        t_rest = t_rest if t_rest > MIN_REMAINDER else 0.0
        t_rest = t_rest if rest is None else rest
        s_rest = (1 - sum(student, torch.zeros((), dtype=torch.float64))).clamp_min(1e-12)
        power = 1 / self.temperature
        p, q = [t**power for t in (*teacher, t_rest)], [s**power for s in (*student, s_rest)]
        p, q = [t / sum(p) for t in p] if power != 1 else p, [s / sum(q) for s in q] if power != 1 else q
        p[-1] = max(p[-1], MIN_REMAINDER) if self.name == "reverse-kl" else p[-1]
        cells = [OF_A_CELL[self.name](t, s, **self.options) for t, s in zip(p, q, strict=True)]
        return sum(cells, torch.zeros((), dtype=torch.float64)) / power**2


kl_with_other = Distance()


def said_at(signal: TeacherLogprobs, at: int, *, exact: bool = False) -> list[tuple[int, float]]:
    """Ids and log-probabilities of one position; those alone that are exact."""
    first, stop = signal.offsets[at : at + 2].tolist()
    if exact and signal.exact_counts is not None:
        stop = first + int(signal.exact_counts[at])
    kept = slice(first, stop)
    return list(zip(signal.ids[kept].tolist(), signal.logprobs[kept].tolist(), strict=True))


def tells_all(signal: TeacherLogprobs, at: int) -> bool:
    """Whether what is exact of a position is all of the distribution."""
    return signal.remainder_mass[at] <= SMALLEST_TAIL and len(said_at(signal, at)) == len(
        said_at(signal, at, exact=True)
    )


@dataclass(frozen=True)
class Words:
    """One side: what its tokens spell, the cells of tokens and of pieces (-1: none), and which tokens can be at all."""

    spellings: list[bytes]
    cells: list[int]
    cell_of_piece: Callable[[bytes], int]
    possible: Sequence[int] | None = None

    def left_of(self, token: int, cut: int) -> int:
        """The cell of what is left of a token behind its first bytes."""
        return self.cell_of_piece(self.spellings[token][cut:]) if cut else self.cells[token]


@dataclass(frozen=True)
class Place:
    """One side at a byte offset: what its last boundary says, and what it says here if a token ends here.

    Attributes:
        token: that holds the byte before the offset.
        spelled: the bytes of it that lie before the offset; empty: nothing is known of the boundary before.
        past: {token: probability} at the boundary before.
        here: the same at the offset; None inside of a token.
    """

    token: int
    spelled: bytes
    past: Mapping[int, Number] | None
    here: Mapping[int, Number] | None


def what_comes_next(
    words: Words, place: Place, counts: Callable[[int], bool]
) -> tuple[dict[int, Number], Number, Number]:
    """Return {cell: probability}, what of it is in no cell, and a, by Bayes' rule on the bytes that are spelled.

    Args:
        words: the side.
        place: where it stands.
        counts: whether a token of the boundary before is an alternative to the one that stands there.
    """
    cells: dict[int, Number] = {}
    lost: Number = 0.0
    if place.past is None:
        ended, runs_past, a = 1.0, 0.0, 1.0
    else:
        r = place.spelled
        fits = {w: p for w, p in place.past.items() if words.spellings[w].startswith(r) and counts(w)}
        ended = sum(p for w, p in fits.items() if words.spellings[w] == r)
        runs_past = sum(p for w, p in fits.items() if words.spellings[w] != r)
        a = ended / (ended + runs_past)
        for w, p in fits.items():
            if words.spellings[w] != r:
                cell = words.left_of(w, len(r))
                share = p / (ended + runs_past)
                if cell < 0:
                    lost = lost + share
                else:
                    cells[cell] = cells.get(cell, 0.0) + share
    if place.here is not None:
        for w, p in place.here.items():
            cell = words.cells[w]
            if cell < 0:
                lost = lost + a * p
            else:
                cells[cell] = cells.get(cell, 0.0) + a * p
    return cells, lost, a


def plain_byte_kl(
    example: LossInputs, student: Words, teacher: Words, probs_NV: Tensor, distance: Distance = kl_with_other
) -> list[Tensor]:
    """The divergence at each boundary of either side."""
    return [
        _at(*item, student, teacher, example, probs_NV, distance) for item in plain_items(example, student, teacher)
    ]


def plain_items(example: LossInputs, student: Words, teacher: Words) -> list[tuple[tuple[int, int, bool], ...]]:
    """Where the sides are compared: for each of both `(position, cut, boundary)`.

    At a boundary the token at `position` begins here. Otherwise it began `cut` bytes before.
    """
    items = []
    for s0, s1, t0, t1 in example.spans.tolist():
        ours = [student.spellings[token] for token in example.student_ids[s0:s1]]
        theirs = [teacher.spellings[token] for token in example.teacher_ids[t0:t1]]
        alike = b"".join(ours) == b"".join(theirs) and (all([*ours, *theirs]) or s1 - s0 == t1 - t0 == 1)
        first, other = student.cells[example.student_ids[s0]], teacher.cells[example.teacher_ids[t0]]
        if alike or first == other >= 0:
            items.append(((s0, 0, True), (t0, 0, True)))
        if alike:
            for u in range(1, len(b"".join(ours))):
                places = (_place(ours, s0, u), _place(theirs, t0, u))
                if places[0][2] or places[1][2]:
                    items.append(places)
    return [item for item in items if _is_known(item, example)]


def _place(spellings: list[bytes], first: int, u: int) -> tuple[int, int, bool]:
    start = 0
    for number, spelling in enumerate(spellings):
        if start == u:
            return first + number, 0, True
        if u < start + len(spelling):
            return first + number, u - start, False
        start += len(spelling)
    raise AssertionError(u)


def _is_known(item: tuple[tuple[int, int, bool], ...], example: LossInputs) -> bool:
    signal = example.teacher_logprobs
    assert signal is not None
    predicted = {int(row) + 1 for row in example.positions}, set(signal.positions.tolist())
    if not all(position in known for (position, _, _), known in zip(item, predicted, strict=True)):
        return False
    both = all(boundary for _, _, boundary in item)
    # Where one side stands inside of a token, the other has to know what it said before.
    return both or all(
        position - 1 in known for (position, _, boundary), known in zip(item, predicted, strict=True) if boundary
    )


def _at(
    ours: tuple[int, int, bool],
    theirs: tuple[int, int, bool],
    student: Words,
    teacher: Words,
    example: LossInputs,
    probs_NV: Tensor,
    distance: Distance,
) -> Tensor:
    signal = example.teacher_logprobs
    assert signal is not None
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    index_of = {int(position): n for n, position in enumerate(signal.positions)}

    def student_says(position: int, _: bytes = b"") -> Mapping[int, Number] | None:
        if position not in row_of:
            return None
        probs = probs_NV[row_of[position]]
        return {w: probs[w] for w in student.possible or range(len(student.spellings))}

    def teacher_says(position: int, beginning: bytes = b"") -> Mapping[int, Number] | None:
        if position not in index_of:
            return None
        said = said_at(signal, index_of[position], exact=bool(beginning))
        # Only ratios of what begins alike are asked for, and the likeliest of it may be e^-1000.
        highest = max(logprob for w, logprob in said if teacher.spellings[w].startswith(beginning)) if beginning else 0
        return {w: math.exp(min(logprob - highest, 0)) for w, logprob in said}

    s = _placed(ours, example.student_ids, student, student_says)
    t = _placed(theirs, example.teacher_ids, teacher, teacher_says)
    if s.past is None or t.past is None:  # nobody looks back where one cannot
        s, t = Place(s.token, b"", None, s.here), Place(t.token, b"", None, t.here)

    # A teacher that says nothing exact of its tail cannot count the tokens in it. Then only those of the student count
    # that, from where both have begun a token on, are in a cell that the teacher names.
    def all_count(_: int) -> bool:
        return True

    counted = all_count
    before = theirs[0] - 1 if theirs[2] else theirs[0]
    if t.past is not None and not tells_all(signal, index_of[before]):
        common = min(len(s.spelled), len(t.spelled))
        ours_since, theirs_since = len(s.spelled) - common, len(t.spelled) - common
        named = {
            teacher.left_of(w, theirs_since)
            for w in t.past
            if teacher.spellings[w][:theirs_since] == t.spelled[:theirs_since]
            and (theirs_since == 0 or len(teacher.spellings[w]) > theirs_since)
        }
        named |= {student.left_of(s.token, ours_since)}
        named -= {-1}

        def named_counts(w: int) -> bool:
            if w == s.token:
                return True
            return len(student.spellings[w]) > ours_since and student.left_of(w, ours_since) in named

        counted = named_counts

    p, _, _ = what_comes_next(teacher, t, all_count)
    named_here = None
    if t.here is not None and signal.remainder_mass[index_of[theirs[0]]] > SMALLEST_TAIL:
        named_here = {teacher.cells[w] for w in t.here}
    here = s.here
    if here is not None and named_here is not None:  # what the teacher says nothing of here is in the other cell
        here = {w: q for w, q in here.items() if student.cells[w] in named_here}
    q, _, _ = what_comes_next(student, Place(s.token, s.spelled, s.past, here), counted)
    cells = [cell for cell in p if p[cell] > 0 and cell in q]
    of_past = [w for w in s.past or {} if counted(w) and student.spellings[w].startswith(s.spelled)]
    further = any(student.left_of(w, len(s.spelled)) not in cells for w in of_past if s.spelled != student.spellings[w])
    elsewhere = any(w not in here or student.cells[w] not in cells for w in s.here or {})
    ended_inside = s.here is None and any(student.spellings[w] == s.spelled for w in of_past)
    if not (further or elsewhere or ended_inside):
        # Nothing of the student can be in the other cell: it is compared within the cells.
        p = {cell: p[cell] / sum(p[cell] for cell in cells) for cell in cells}
    return distance([p[cell] for cell in cells], [q[cell] for cell in cells])


def _placed(
    place: tuple[int, int, bool], ids: Any, words: Words, says: Callable[..., Mapping[int, Number] | None]
) -> Place:
    position, cut, boundary = place
    if not boundary:
        token = int(ids[position])
        return Place(token, words.spellings[token][:cut], says(position, words.spellings[token][:cut]), None)
    token = int(ids[position - 1])
    spelled = words.spellings[token]
    return Place(token, spelled, says(position - 1, spelled) if spelled else None, says(position))
