"""Reference implementation of bpm and escd: tokens are byte strings, loops over both vocabularies, float64."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from reference_byte_kl import FORWARD_KL, ReferenceDivergence, ReferenceVocabulary, reference_items, support_at
from torch import Tensor

from xtk.losses.interface import LossInputs

Key = Hashable  # a student token, or the cell of special tokens


def student_key(student: ReferenceVocabulary, teacher: ReferenceVocabulary, token: int) -> Key | None:
    """Return the key of a student token: itself if paired with an equal teacher token, else the first of equal ones."""
    if token >= len(student.spellings):
        return None
    if spelling := student.spellings[token]:
        equal_tokens = [v for v, other in enumerate(student.spellings) if other == spelling]
        index = equal_tokens.index(token)
        return token if index < teacher.spellings.count(spelling) else equal_tokens[0]
    return ("special", student.cells[token]) if student.cells[token] >= 0 else None


def longest_prefix(student: ReferenceVocabulary, piece: bytes) -> int | None:
    """Return the longest student token that is a prefix of a byte string, the first of equal ones."""
    prefixes = [v for v, spelling in enumerate(student.spellings) if spelling and piece.startswith(spelling)]
    return max(prefixes, key=lambda v: (len(student.spellings[v]), -v), default=None)


def teacher_key(
    student: ReferenceVocabulary, teacher: ReferenceVocabulary, token: int, prefix_length: int = 0
) -> Key | None:
    """Return the key of a teacher token without its first `prefix_length` bytes."""
    if token >= len(teacher.spellings):
        return None
    if piece := teacher.spellings[token][prefix_length:]:
        equal_tokens = [v for v, other in enumerate(student.spellings) if other == piece]
        index = teacher.spellings[:token].count(piece)
        return (
            equal_tokens[index] if prefix_length == 0 and index < len(equal_tokens) else longest_prefix(student, piece)
        )
    special_cells = {student.cells[v] for v, spelling in enumerate(student.spellings) if not spelling}
    return ("special", teacher.cells[token]) if teacher.cells[token] in special_cells - {-1} else None


def reference_bpm(
    example: LossInputs,
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    probs_NV: Tensor,
    divergence: ReferenceDivergence = FORWARD_KL,
) -> list[Tensor]:
    """Return the divergence at each student token."""
    return [
        reference_bpm_item(item, example, student, teacher, probs_NV, divergence)
        for item in reference_items(example, student, teacher)
        if item[0][2]
    ]


def reference_escd(
    example: LossInputs,
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    probs_NV: Tensor,
    divergence: ReferenceDivergence = FORWARD_KL,
) -> list[Tensor]:
    """Return at each student token: bpm if at a shared boundary, plus the event-set term of the previous token."""
    items = [item for item in reference_items(example, student, teacher) if item[0][2]]
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    shared_boundaries = {item[0][0]: item[1][0] for item in items if item[1][2]}
    values = []
    for item in items:
        student_position, zero = item[0][0], torch.zeros((), dtype=torch.float64)
        root_term = reference_bpm_item(item, example, student, teacher, probs_NV, divergence) if item[1][2] else zero
        event_sets = (
            reference_event_sets(
                example, student, teacher, student_position - 1, shared_boundaries[student_position - 1]
            )
            if student_position - 1 in shared_boundaries
            else []
        )
        probs = probs_NV[row_of[student_position]]
        values.append(root_term - sum((mass * probs[tokens].sum().log() for mass, tokens in event_sets), zero))
    return values


def reference_event_sets(
    example: LossInputs,
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    student_position: int,
    teacher_position: int,
) -> list[tuple[float, list[int]]]:
    """Return the mass of each event set that the student token begins, and the student tokens that continue it."""
    teacher_logprobs = example.teacher_logprobs
    prefix = student.spellings[int(example.student_ids[student_position])]
    teacher_only = sorted({*teacher.spellings} - {*student.spellings, b""}, key=len)
    masses: dict[bytes, float] = {}
    for u, logprob in support_at(
        teacher_logprobs, {int(position): n for n, position in enumerate(teacher_logprobs.positions)}[teacher_position]
    ):
        if u < len(teacher.spellings) and teacher.spellings[u] in teacher_only:
            shortest = next(spelling for spelling in teacher_only if teacher.spellings[u].startswith(spelling))
            masses[shortest] = masses.get(shortest, 0.0) + math.exp(logprob)
    event_sets = []
    for shortest, mass in masses.items():
        if prefix and shortest.startswith(prefix) and shortest != prefix:
            suffix = shortest[len(prefix) :]
            tokens = [v for v, spelling in enumerate(student.spellings) if spelling.startswith(suffix)]
            event_sets += [(mass, tokens)] if tokens else []
    return event_sets


def reference_bpm_item(
    item: tuple[tuple[int, int, bool], ...],
    example: LossInputs,
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    probs_NV: Tensor,
    divergence: ReferenceDivergence,
) -> Tensor:
    teacher_logprobs = example.teacher_logprobs
    index_of = {int(position): n for n, position in enumerate(teacher_logprobs.positions)}
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    (student_position, _, _), (teacher_position, prefix_length, at_boundary) = item
    teacher_token = int(example.teacher_ids[teacher_position])
    prefix = teacher.spellings[teacher_token][:prefix_length]
    support = [(u, logprob)
               for u, logprob in support_at(teacher_logprobs, index_of[teacher_position], exact=not at_boundary)
               if teacher.spellings[u : u + 1] and teacher.spellings[u].startswith(prefix)]  # fmt: skip
    highest = 0.0 if at_boundary else max(logprob for _, logprob in support)
    mass = 1.0 if at_boundary else sum(math.exp(logprob - highest) for _, logprob in support)
    p: dict[Key, float] = {}
    for u, logprob in support:
        key = teacher_key(student, teacher, u, prefix_length)
        if key is not None and (at_boundary or teacher.spellings[u] != prefix):
            p[key] = p.get(key, 0.0) + math.exp(logprob - highest) / mass
    student_token = int(example.student_ids[student_position])
    spanning = spanning_probability(example, student, teacher, student_token, teacher_position, prefix_length)
    if spanning > 0:
        first_key = teacher_key(student, teacher, teacher_token, prefix_length)
        if first_key is not None:
            remaining = p[first_key] - spanning
            p[first_key] = remaining if remaining > 1e-6 * spanning else 0.0
        p[student_key(student, teacher, student_token)] = (
            p.get(student_key(student, teacher, student_token), 0.0) + spanning
        )
    probs = probs_NV[row_of[student_position]]
    members = {
        key: [v for v in range(len(probs)) if student_key(student, teacher, v) == key] for key in p if p[key] > 0
    }
    if sum(map(len, members.values())) == len(probs):
        p = {key: p[key] / sum(p[key] for key in members) for key in members}
    return divergence([p[key] for key in members], [probs[members[key]].sum() for key in members])


def spanning_probability(
    example: LossInputs,
    student: ReferenceVocabulary,
    teacher: ReferenceVocabulary,
    student_token: int,
    teacher_position: int,
    prefix_length: int,
) -> float:
    """Return the teacher's probability of a student token that ends in a later teacher token; 0 for others."""
    teacher_logprobs = example.teacher_logprobs
    index_of = {int(position): n for n, position in enumerate(teacher_logprobs.positions)}
    remaining = student.spellings[student_token]
    if len(remaining) <= len(teacher.spellings[int(example.teacher_ids[teacher_position])]) - prefix_length:
        return 0.0
    log_prob = 0.0
    while remaining:
        if teacher_position not in index_of:
            return 0.0
        teacher_token = int(example.teacher_ids[teacher_position])
        piece = teacher.spellings[teacher_token][prefix_length:]
        if not piece or remaining[: len(piece)] != piece[: len(remaining)]:
            return 0.0
        exact = support_at(teacher_logprobs, index_of[teacher_position], exact=True)

        def log_mass(prefix: bytes, exact: list[tuple[int, float]] = exact) -> float:
            matching = [logprob for u, logprob in exact if teacher.spellings[u].startswith(prefix)]
            return float(torch.logsumexp(torch.tensor(matching, dtype=torch.float64), 0))

        if len(remaining) < len(piece):
            log_prob += log_mass(teacher.spellings[teacher_token][: prefix_length + len(remaining)])
        else:
            log_prob += float(teacher_logprobs.observed_logprobs[index_of[teacher_position]])
        if prefix_length:
            log_prob -= log_mass(teacher.spellings[teacher_token][:prefix_length])
        remaining, teacher_position, prefix_length = remaining[len(piece) :], teacher_position + 1, 0
    return math.exp(log_prob)
