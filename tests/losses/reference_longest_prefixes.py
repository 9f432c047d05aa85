"""A slow reference of bpm and escd: tokens are byte strings, loops over both vocabularies, float64."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from reference_byte_kl import Distance, Words, kl_with_other, plain_items, said_at
from torch import Tensor

from xtk.losses.loss_interface import LossInputs

Key = Hashable  # a student token, or the number of the cell of special ones


def key_of(student: Words, teacher: Words, token: int) -> Key | None:
    """What a token of the student is compared as: the first of equal ones, except for the teacher's equal ones."""
    if token >= len(student.spellings):
        return None
    if spelling := student.spellings[token]:
        alike = [v for v, other in enumerate(student.spellings) if other == spelling]
        number = alike.index(token)
        return token if number < teacher.spellings.count(spelling) else alike[0]
    return ("special", student.cells[token]) if student.cells[token] >= 0 else None


def longest_prefix(student: Words, piece: bytes) -> int | None:
    """The longest student token that begins a string, the first of equal ones."""
    fits = [v for v, spelling in enumerate(student.spellings) if spelling and piece.startswith(spelling)]
    return max(fits, key=lambda v: (len(student.spellings[v]), -v), default=None)


def key_of_teacher(student: Words, teacher: Words, token: int, cut: int = 0) -> Key | None:
    """The student token in whose cell a teacher token counts, without its first bytes."""
    if token >= len(teacher.spellings):
        return None
    if piece := teacher.spellings[token][cut:]:
        alike = [v for v, other in enumerate(student.spellings) if other == piece]
        number = teacher.spellings[:token].count(piece)
        return alike[number] if cut == 0 and number < len(alike) else longest_prefix(student, piece)
    special = {student.cells[v] for v, spelling in enumerate(student.spellings) if not spelling}
    return ("special", teacher.cells[token]) if teacher.cells[token] in special - {-1} else None


def plain_bpm(
    example: LossInputs, student: Words, teacher: Words, probs_NV: Tensor, distance: Distance = kl_with_other
) -> list[Tensor]:
    """The divergence at each token of the student."""
    return [
        plain_bpm_item(item, example, student, teacher, probs_NV, distance)
        for item in plain_items(example, student, teacher)
        if item[0][2]
    ]


def plain_escd(
    example: LossInputs, student: Words, teacher: Words, probs_NV: Tensor, distance: Distance = kl_with_other
) -> list[Tensor]:
    """At each token of the student: bpm at a boundary of both, and what must complete a token after the one before."""
    items = [item for item in plain_items(example, student, teacher) if item[0][2]]
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    at_boundary = {item[0][0]: item[1][0] for item in items if item[1][2]}
    values = []
    for item in items:
        s, nothing = item[0][0], torch.zeros((), dtype=torch.float64)
        root = plain_bpm_item(item, example, student, teacher, probs_NV, distance) if item[1][2] else nothing
        sets = plain_event_sets(example, student, teacher, s - 1, at_boundary[s - 1]) if s - 1 in at_boundary else []
        probs = probs_NV[row_of[s]]
        values.append(root - sum((mass * probs[tokens].sum().log() for mass, tokens in sets), nothing))
    return values


def plain_event_sets(
    example: LossInputs, student: Words, teacher: Words, s: int, t: int
) -> list[tuple[float, list[int]]]:
    """The mass of each event set that the student's token at `s` begins, and the tokens that go on with it."""
    signal = example.teacher_logprobs
    begun = student.spellings[int(example.student_ids[s])]
    apart = sorted({*teacher.spellings} - {*student.spellings, b""}, key=len)
    masses: dict[bytes, float] = {}
    for u, logprob in said_at(signal, {int(position): n for n, position in enumerate(signal.positions)}[t]):
        if u < len(teacher.spellings) and teacher.spellings[u] in apart:
            shortest = next(spelling for spelling in apart if teacher.spellings[u].startswith(spelling))
            masses[shortest] = masses.get(shortest, 0.0) + math.exp(logprob)
    sets = []
    for shortest, mass in masses.items():
        if begun and shortest.startswith(begun) and shortest != begun:
            left = shortest[len(begun) :]
            tokens = [v for v, spelling in enumerate(student.spellings) if spelling.startswith(left)]
            sets += [(mass, tokens)] if tokens else []
    return sets


def plain_bpm_item(
    item: tuple[tuple[int, int, bool], ...],
    example: LossInputs,
    student: Words,
    teacher: Words,
    probs_NV: Tensor,
    distance: Distance,
) -> Tensor:
    signal = example.teacher_logprobs
    index_of = {int(position): n for n, position in enumerate(signal.positions)}
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    (s, _, _), (t, cut, at_boundary) = item
    token = int(example.teacher_ids[t])
    begun = teacher.spellings[token][:cut]
    said = [(u, logprob) for u, logprob in said_at(signal, index_of[t], exact=not at_boundary)
            if teacher.spellings[u : u + 1] and teacher.spellings[u].startswith(begun)]  # fmt: skip
    highest = 0.0 if at_boundary else max(logprob for _, logprob in said)
    mass = 1.0 if at_boundary else sum(math.exp(logprob - highest) for _, logprob in said)
    p: dict[Key, float] = {}
    for u, logprob in said:
        key = key_of_teacher(student, teacher, u, cut)
        if key is not None and (at_boundary or teacher.spellings[u] != begun):
            p[key] = p.get(key, 0.0) + math.exp(logprob - highest) / mass
    own = int(example.student_ids[s])
    spanning = spanning_probability(example, student, teacher, own, t, cut)
    if spanning > 0:
        held = key_of_teacher(student, teacher, token, cut)
        if held is not None:
            left = p[held] - spanning
            p[held] = left if left > 1e-6 * spanning else 0.0
        p[key_of(student, teacher, own)] = p.get(key_of(student, teacher, own), 0.0) + spanning
    probs = probs_NV[row_of[s]]
    members = {key: [v for v in range(len(probs)) if key_of(student, teacher, v) == key] for key in p if p[key] > 0}
    if sum(map(len, members.values())) == len(probs):
        p = {key: p[key] / sum(p[key] for key in members) for key in members}
    return distance([p[key] for key in members], [probs[members[key]].sum() for key in members])


def spanning_probability(example: LossInputs, student: Words, teacher: Words, own: int, t: int, cut: int) -> float:
    """The teacher's probability of a student token that ends in a later token of the teacher."""
    signal = example.teacher_logprobs
    index_of = {int(position): n for n, position in enumerate(signal.positions)}
    left = student.spellings[own]
    if len(left) <= len(teacher.spellings[int(example.teacher_ids[t])]) - cut:
        return 0.0
    total = 0.0
    while left:
        if t not in index_of:
            return 0.0
        token = int(example.teacher_ids[t])
        piece = teacher.spellings[token][cut:]
        if not piece or left[: len(piece)] != piece[: len(left)]:
            return 0.0
        exact = said_at(signal, index_of[t], exact=True)

        def log_mass(beginning: bytes, exact: list[tuple[int, float]] = exact) -> float:
            fits = [logprob for u, logprob in exact if teacher.spellings[u].startswith(beginning)]
            return float(torch.logsumexp(torch.tensor(fits, dtype=torch.float64), 0))

        if len(left) < len(piece):
            total += log_mass(teacher.spellings[token][: cut + len(left)])
        else:
            total += float(signal.observed_logprobs[index_of[t]])
        if cut:
            total -= log_mass(teacher.spellings[token][:cut])
        left, t, cut = left[len(piece) :], t + 1, 0
    return math.exp(total)
