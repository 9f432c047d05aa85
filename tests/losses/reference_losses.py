"""Every loss once more, written for reading: dense W, full probabilities, explicit loops, float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from reference_byte_kl import OF_A_CELL, Distance, Words, kl_with_other, plain_byte_kl, said_at
from reference_longest_prefixes import plain_bpm, plain_escd
from small_vocabularies import draw_spellings, draw_tokens, next_bytes_of, partition_of
from torch import Tensor

from xtk.losses.clipped_surrogate import ClippedSurrogateCells
from xtk.losses.event_set_completion import EventSetCells
from xtk.losses.loss_cells import MIN_REMAINDER, LossCells
from xtk.losses.loss_interface import LossInputs
from xtk.losses.next_byte_cells import NextByteCells
from xtk.losses.shared_vocabulary_cells import CandidateUnitCells, SharedVocabularyCells
from xtk.losses.sorted_probs import SortedProbCells
from xtk.losses.span_probability_products import SpanProductCells
from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_byte_partition import BytePartition
from xtk.tokens.teacher_logprobs import TeacherLogprobs

REVERSE_KL = Distance("reverse-kl")


def predicted_spans(example: LossInputs) -> list[tuple[list[int], list[int]]]:
    """The spans of which both models predict every token: (student tokens, teacher tokens)."""
    signal = example.teacher_logprobs
    assert signal is not None
    of_student, of_teacher = {int(row) + 1 for row in example.positions}, set(signal.positions.tolist())
    spans = [(list(range(s0, s1)), list(range(t0, t1))) for s0, s1, t0, t1 in example.spans.tolist()]
    return [(s, t) for s, t in spans if of_student.issuperset(s) and of_teacher.issuperset(t)]


def _projected(
    example: LossInputs, W: Tensor, probs_NV: Tensor, student: list[int], teacher: list[int], distance: Distance
) -> Tensor:
    signal = example.teacher_logprobs
    assert signal is not None
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    index_of = {int(position): n for n, position in enumerate(signal.positions)}
    support: set[int] = set()
    t = [0.0] * W.shape[1]
    for position in teacher:
        at = index_of[position]
        for token, logprob in said_at(signal, at):
            t[token] += math.exp(logprob) / len(teacher)
            support.add(token)
    y = sum((probs_NV[row_of[token]] @ W for token in student), torch.zeros(W.shape[1], dtype=torch.float64))
    reached = sorted(token for token in support if W[:, token].sum() > 0)
    of_teacher = [t[token] for token in reached]
    if sum(of_teacher) > 1e-30 and all(len(dict(said_at(signal, index_of[one]))) == W.shape[1] for one in teacher):
        of_teacher = [one / sum(of_teacher) for one in of_teacher]  # nothing is in the support but cannot be reached
    return distance(of_teacher, [y[token] / len(student) for token in reached])


def plain_sum_of_cells(cells: LossCells, probs_NV: Tensor, distance: Distance = kl_with_other) -> Tensor:
    """What a loss is, given its cells: explicit loops over items, cells, entries."""
    total = torch.zeros((), dtype=torch.float64)
    for item in range(cells.num_items):
        numbers = range(cells.cell_offsets[item], cells.cell_offsets[item + 1])
        here = [_of_entries(cells, cell, probs_NV) for cell in numbers]
        teacher = [float(cells.teacher_probs[cell]) for cell in numbers]
        before = torch.ones((), dtype=torch.float64)
        if isinstance(cells, SpanProductCells):
            links = int(cells.num_prefix_tokens[item])
            before = math.prod(here[:links], start=before)
            here, teacher = (
                [(before * one) ** (1 / cells.temperature) for one in here[links:]],
                teacher[links:],
            )
        rest = float(cells.remainder_probs[item])
        if isinstance(cells, SharedVocabularyCells):
            total = total + _of_shared_tokens(cells, item, here, teacher, probs_NV, distance)
            continue
        if isinstance(cells, ClippedSurrogateCells):
            of_item = float(cells.sampling_logprobs[item]), float(cells.advantages[item])
            total = total + surrogate(here[0], *of_item, cells.min_ratio, cells.max_ratio)
        elif teacher:
            total = total + cells.factor * distance(teacher, _looking_back(cells, item, here, probs_NV), rest)
        if isinstance(cells, EventSetCells):
            for number in range(cells.set_offsets[item], cells.set_offsets[item + 1]):
                tokens = cells.sorted_token_ids[cells.firsts[number] : cells.stops[number]]
                of_set = probs_NV[cells.first_rows[item]][tokens.long()].sum()
                total = total - float(cells.set_masses[number]) * of_set.log()
        if isinstance(cells, SortedProbCells):
            total = total + _of_ranks(cells, item, before, probs_NV)
    return total


def _of_shared_tokens(
    cells: SharedVocabularyCells, item: int, here: list[Tensor], teacher: list[float], probs_NV: Tensor,
    distance: Distance,
) -> Tensor:  # fmt: skip
    numbers = range(cells.cell_offsets[item], cells.cell_offsets[item + 1])
    said = {int(cells.tokens[cells.entry_offsets[cell]]): p for cell, p in zip(numbers, teacher, strict=True)}
    units = []
    if isinstance(cells, CandidateUnitCells):
        for unit in range(cells.unit_offsets[item], cells.unit_offsets[item + 1]):
            tokens = range(cells.unit_token_offsets[unit], cells.unit_token_offsets[unit + 1])
            logs = [probs_NV[cells.unit_rows[at], cells.unit_tokens[at]].log() for at in tokens]
            units.append((float(cells.unit_probs[unit]), (sum(logs) / len(logs)).exp()))
    shared = set(cells.paired_tokens.tolist())
    probs = probs_NV[cells.first_rows[item]]
    return _over_shared(said, float(cells.remainder_probs[item]), shared, probs, cells.top_k, distance, units, 1.0)


def surrogate(probability: Tensor, logprob: float, advantage: float, low: float, high: float) -> Tensor:
    """PPO, as it is published, but for ratios above e^20."""
    ratio = probability * math.exp(-logprob)
    if ratio > math.exp(20):
        ratio = ratio.detach() * 0 + math.exp(20)
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def _of_ranks(ranks: SortedProbCells, item: int, before: Tensor, probs_NV: Tensor) -> Tensor:
    t = ranks.rank_probs[ranks.rank_offsets[item] : ranks.rank_offsets[item + 1]].tolist()
    unranked = set() if ranks.excluded_tokens is None else set(ranks.excluded_tokens.tolist())
    kept = [token for token in range(probs_NV.shape[1]) if token not in unranked]
    s = list((before * probs_NV[ranks.rank_rows[item]][kept]).sort(descending=True).values)
    rest = sum(s[len(t) :], torch.zeros((), dtype=torch.float64))
    outside = (rest - float(ranks.max_remainder[item])).relu() + (float(ranks.min_remainder[item]) - rest).relu()
    return ranks.rank_weight * (by_rank(t, s[: len(t)]) + outside)


def by_rank(teacher: Sequence[float], student: Sequence[Tensor]) -> Tensor:
    """Both falling, one after the other, the shorter with zeros behind."""
    pairs = itertools.zip_longest(teacher, student, fillvalue=0.0)
    return sum((torch.as_tensor(t - s).abs() for t, s in pairs), torch.zeros((), dtype=torch.float64))


def _of_entries(cells: LossCells, cell: int, probs_NV: Tensor) -> Tensor:
    entries = range(cells.entry_offsets[cell], cells.entry_offsets[cell + 1])
    return sum(
        (probs_NV[cells.rows[e], cells.tokens[e]] * math.exp(cells.log_weights[e]) for e in entries),
        torch.zeros((), dtype=torch.float64),
    )


def _looking_back(cells: LossCells, item: int, here: list[Tensor], probs_NV: Tensor) -> list[Tensor]:
    """Bayes' rule on the bytes that are spelled, for losses that know it."""
    if not isinstance(cells, NextByteCells) or cells.previous_rows[item] < 0:
        return here
    probs = probs_NV[cells.previous_rows[item]]
    first = cells.cell_offsets[item] + 2 * item
    ended, further, *gone_on = (
        sum(
            (probs[cells.sorted_token_ids[cells.firsts[run] : cells.stops[run]]].sum() for run in range(*group)),
            torch.tensor(0.0),
        )
        for group in itertools.pairwise(cells.run_offsets[first : first + len(here) + 3].tolist())
    )
    everything = ended + further + sum(gone_on)
    assert not (cells.is_inside_token[item] and sum(here) > 0)
    return [(ended * one + other) / everything for one, other in zip(here, gone_on, strict=True)]


@dataclass(frozen=True)
class Case:
    """A document in both tokenisations, W, what tokens spell, and a student cut before its head."""

    example: LossInputs
    projection: SparseProjection
    words: tuple[Words, Words]
    states: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @cached_property
    def next_bytes(self) -> BytePartition:
        return next_bytes_of(*self.words)

    @property
    def dense(self) -> Tensor:
        """W [V, U]."""
        projection = self.projection
        W = torch.zeros(projection.student_width, projection.teacher_width, dtype=torch.float64)
        W[projection.entry_rows, projection.teacher_ids] = torch.from_numpy(projection.weights).double()
        return W


def plain_ce(case: Case, probs_NV: Tensor) -> list[Tensor]:
    example = case.example
    return [-probs_NV[n, int(example.student_ids[row + 1])].log() for n, row in enumerate(example.positions)]


def plain_p_kl(case: Case, probs_NV: Tensor, distance: Distance = kl_with_other) -> list[Tensor]:
    spans = predicted_spans(case.example)
    return [_projected(case.example, case.dense, probs_NV, s, t, distance) for s, t in spans]


def plain_boundary_kl(case: Case, probs_NV: Tensor, distance: Distance = kl_with_other) -> list[Tensor]:
    spans = predicted_spans(case.example)
    return [_projected(case.example, case.dense, probs_NV, s[:1], t[:1], distance) for s, t in spans]


def plain_alm(
    case: Case, probs_NV: Tensor, distance: Distance = kl_with_other, temperature: float = 100.0
) -> list[Tensor]:
    example = case.example
    rows, positions = _numbers(example)
    items = []
    for s, t in predicted_spans(example):
        ours = sum(probs_NV[rows[at], int(example.student_ids[at])].log() for at in s)
        theirs = sum(float(example.teacher_logprobs.observed_logprobs[positions[at]]) for at in t)
        q, p = (ours / temperature).exp(), math.exp(theirs / temperature)
        items.append(temperature * distance([p], [q], 1 - p))
    return items


def plain_policy_gradient(
    case: Case,
    probs_NV: Tensor,
    clip: float = 5.0,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    teacher: float = 1.0,
    reward: float = 1.0,
    credit: str = "span",
) -> list[Tensor]:
    example = case.example
    rows, positions = _numbers(example)
    items = []
    for s, t in predicted_spans(example):
        old = sum(float(example.sampling_logprobs[rows[at]]) for at in s)
        if math.isnan(old):
            continue
        theirs = sum(float(example.teacher_logprobs.observed_logprobs[positions[at]]) for at in t)
        of_document = reward * float(example.advantages[rows[s[0]]])
        if credit == "dpca":
            for at in s:
                log_p = float(example.sampling_logprobs[rows[at]])
                advantage = teacher * min(max((theirs / old - 1) * log_p, -clip), clip) + of_document
                of_token = probs_NV[rows[at], int(example.student_ids[at])]
                items.append(surrogate(of_token, log_p, advantage, 1 - epsilon, 1 + epsilon_high))
            continue
        advantage = teacher * min(max(theirs - old, -clip), clip) + of_document
        ours = math.prod(probs_NV[rows[at], int(example.student_ids[at])] for at in s)
        items.append(surrogate(ours, old, advantage, 1 - epsilon, 1 + epsilon_high))
    return items


def plain_uld(case: Case, probs_NV: Tensor) -> list[Tensor]:
    example = case.example
    rows, positions = _numbers(example)
    items = []
    for s, t in predicted_spans(example):
        likeliest, behind, tail = _ranked(example, positions[t[0]], 1.0, {})
        student = list(probs_NV[rows[s[0]]].sort(descending=True).values)
        rest = sum(student[len(likeliest) :], torch.zeros((), dtype=torch.float64))
        items.append(by_rank(likeliest, student[: len(likeliest)]) + (rest - behind - tail).abs())
    return items


def _shared_at(example: LossInputs, at: int, partners: dict[int, int]) -> tuple[dict[int, float], float]:
    """The teacher's probabilities of shared tokens at one position, by the student's token, and its tail."""
    signal = example.teacher_logprobs
    said = {partners[u]: math.exp(logprob) for u, logprob in said_at(signal, at, exact=True) if u in partners}
    tail = float(signal.remainder_mass[at])
    return said, tail if tail > MIN_REMAINDER else 0.0


def _over_shared(
    said: dict[int, float], tail: float, shared: set[int], probs: Tensor, top_k: int, distance: Distance,
    units: Sequence[tuple[float, Tensor]] = (),
    whole: float = 0.0,
) -> Tensor:  # fmt: skip
    """Both sides over candidates: shared tokens, units; what is shared and not said is the rest."""
    rest = sum((probs[v] for v in sorted(shared - set(said))), torch.zeros((), dtype=torch.float64))
    p, q = [*said.values(), *(one for one, _ in units)], [*(probs[v] for v in said), *(one for _, one in units)]
    whole, of_student = whole or sum(p) + tail, sum(q, rest)
    p, q = [one / whole for one in p] if whole > 0 else p, [one / of_student for one in q]
    tail = tail / whole if whole > 0 else 1.0
    if top_k and distance.name != "forward-kl":
        kept = sorted(range(len(q)), key=lambda at: -float(q[at].detach()))[:top_k]
        tail += sum(p) - sum(p[at] for at in kept)
        p, q = [p[at] for at in kept], [q[at] for at in kept]
    return distance(p, q, tail)


def plain_strict(case: Case, probs_NV: Tensor, distance: Distance = REVERSE_KL, top_k: int = 16) -> list[Tensor]:
    partners = plain_pairs(case.dense)
    rows, positions = _numbers(case.example)
    return [
        _over_shared(*_shared_at(case.example, positions[t[0]], partners), set(partners.values()),
                     probs_NV[rows[s[0]]], top_k, distance)
        for s, t in predicted_spans(case.example) if len(s) == len(t) == 1
    ]  # fmt: skip


def plain_simct(case: Case, probs_NV: Tensor, distance: Distance = REVERSE_KL) -> list[Tensor]:
    example, partners, items = case.example, plain_pairs(case.dense), []
    rows, positions = _numbers(example)
    for s, t in predicted_spans(example):
        units = []
        if not (len(s) == len(t) == 1 and partners.get(int(example.teacher_ids[t[0]])) == example.student_ids[s[0]]):
            theirs = [float(example.teacher_logprobs.observed_logprobs[positions[at]]) for at in t]
            ours = [probs_NV[rows[at], int(example.student_ids[at])].log() for at in s]
            units = [(math.exp(sum(theirs) / len(t)), (sum(ours) / len(s)).exp())]
        said = _shared_at(example, positions[t[0]], partners)
        items.append(_over_shared(*said, set(partners.values()), probs_NV[rows[s[0]]], 0, distance, units))
    return items


def plain_merged(
    case: Case,
    probs_NV: Tensor,
    distance: Distance = kl_with_other,
    weights: tuple[float, float] | None = None,
    published: bool = False,
) -> list[Tensor]:
    """gold and h-kl; without weights those of gold."""
    example, partners = case.example, plain_pairs(case.dense)
    rows, positions = _numbers(example)
    common, uncommon = weights or (len(partners) / case.dense.shape[1], 1 - len(partners) / case.dense.shape[1])
    items = []
    for s, t in predicted_spans(example):
        ours = math.prod(probs_NV[rows[at], int(example.student_ids[at])] for at in s[:-1])
        theirs = math.exp(sum(float(example.teacher_logprobs.observed_logprobs[positions[at]]) for at in t[:-1]))
        student, last = ours * probs_NV[rows[s[-1]]], positions[t[-1]]
        named = [token for token, _ in said_at(example.teacher_logprobs, last) if token in partners]
        p = [
            theirs * math.exp(logprob)
            for token, logprob in said_at(example.teacher_logprobs, last)
            if token in partners
        ]
        q = [student[partners[token]] for token in named]
        likeliest, behind, tail = _ranked(example, last, theirs, partners)
        left = [token for token in range(len(student)) if token not in partners.values()]
        falling = list(student[left].sort(descending=True).values)
        rest = sum(falling[len(likeliest) :], torch.zeros((), dtype=torch.float64))
        ranks = by_rank(likeliest, falling[: len(likeliest)])
        if published:
            divergence = sum(
                (_published(a, b) for a, b in zip(p, q, strict=True)), torch.zeros((), dtype=torch.float64)
            )
        else:
            divergence = distance(p, q)
            ranks = ranks + (rest - behind - tail).relu() + (behind - rest).relu()
        items.append(common * divergence + uncommon * ranks)
    return items


def plain_published_p_kl(case: Case, probs_NV: Tensor, reverse: bool = False) -> list[Tensor]:
    """Means of probabilities on one side, of log-probabilities on the other, over what every position names."""
    example = case.example
    rows, positions = _numbers(example)
    items = []
    for s, t in predicted_spans(example):
        said = [dict(said_at(example.teacher_logprobs, positions[at])) for at in t]
        tokens = sorted(set.intersection(*(set(one) for one in said)))
        whole = [math.log(sum(math.exp(one[token]) for token in tokens)) if tokens else 0.0 for one in said]
        a = [sum(one[token] - total for one, total in zip(said, whole, strict=True)) / len(t) for token in tokens]
        y = sum(probs_NV[rows[at]] @ case.dense for at in s) / len(s)
        q = (y[tokens] / (y[tokens].sum() + 1e-10) + 1e-10).log()
        a = torch.tensor(a, dtype=torch.float64)
        items.append((q.exp() * (q - a) if reverse else a.exp() * (a - q)).sum())
    return items


def _published(p: float, q: Tensor) -> Tensor:
    return p * (math.log(p) - q.log()) if p > 0 else torch.zeros((), dtype=torch.float64)


def _numbers(example: LossInputs) -> tuple[dict[int, int], dict[int, int]]:
    """Which row and which position of the signal predicts a token."""
    rows = {int(row) + 1: n for n, row in enumerate(example.positions)}
    return rows, {int(position): n for n, position in enumerate(example.teacher_logprobs.positions)}


def _ranked(example: LossInputs, at: int, before: float, partners: dict[int, int]) -> tuple[list[float], float, float]:
    """The teacher's likeliest of what has no partner, falling; what is known to be behind them; what is not known."""
    said = dict(said_at(example.teacher_logprobs, at))
    tail = 1 - sum(math.exp(logprob) for logprob in said.values())
    tail = tail if tail > MIN_REMAINDER else 0.0
    written = int(example.teacher_ids[example.teacher_logprobs.positions[at]])
    behind = 0.0
    if written not in partners and said[written] == min(said.values()) and math.exp(said[written]) < tail:
        behind = math.exp(said.pop(written))  # it may be named for being written: there may be likelier ones
    ranked = sorted((before * math.exp(said[token]) for token in said if token not in partners), reverse=True)
    return ranked, before * behind, before * tail


def plain_pairs(W: Tensor) -> dict[int, int]:
    """{teacher token: student token}: the heaviest entry of a row, if it is at least 0.6; one row a teacher token."""
    claims = []
    for v, row in enumerate(W.tolist()):
        weight = max(row, default=0.0)
        if weight >= 0.6 - 1e-6:
            claims.append((row.index(weight), -weight, v))
    pairs: dict[int, int] = {}
    for u, _, v in sorted(claims):
        pairs.setdefault(u, v)
    return pairs


PLAIN = {
    "alm": plain_alm,
    "policy-gradient": plain_policy_gradient,
    "uld": plain_uld,
    "gold": plain_merged,
    "h-kl": functools.partial(plain_merged, weights=(1.0, 1.0)),
    "ce": plain_ce,
    "boundary-kl": plain_boundary_kl,
    "p-kl": plain_p_kl,
    "bpm": lambda case, probs_NV, *distance: plain_bpm(case.example, *case.words, probs_NV, *distance),
    "escd": lambda case, probs_NV, *distance: plain_escd(case.example, *case.words, probs_NV, *distance),
    "strict": plain_strict,
    "simct": plain_simct,
    "byte-kl": lambda case, probs_NV, *distance: plain_byte_kl(case.example, *case.words, probs_NV, *distance),
    **{name: functools.partial(plain_p_kl, distance=Distance(name)) for name in OF_A_CELL},
}


def draw_projection(draw: np.random.Generator, V: int, U: int) -> SparseProjection:
    """Rows that sum to 1, to less, or to nothing; every third teacher token is reached by none."""
    rows = []
    for _ in range(V):
        tokens = np.unique(draw.integers(0, U, draw.integers(0, 4)))
        tokens = tokens[tokens % 3 != 2]
        rows.append((tokens, draw.dirichlet(np.ones(len(tokens))) * draw.choice([1.0, 0.6]) if len(tokens) else []))
    return SparseProjection(
        row_offsets=np.cumsum([0] + [len(tokens) for tokens, _ in rows]).astype(np.int64),
        teacher_ids=np.concatenate([tokens for tokens, _ in rows]).astype(np.int32),
        weights=np.concatenate([weights for _, weights in rows]).astype(np.float32),
        student_cells=np.full(V, -1, np.int32),
        teacher_cells=np.full(U, -1, np.int32),
    )


def signal_of(logprobs_PU: np.ndarray, positions: np.ndarray, realised: np.ndarray, K: int) -> TeacherLogprobs:
    """The K most likely of full distributions and the realised token, as a teacher tells them."""
    best = np.argsort(-logprobs_PU, axis=1, kind="stable")[:, :K]
    kept = [np.unique([*ids, token]) for ids, token in zip(best.tolist(), realised.tolist(), strict=True)]
    said = [row[ids] for row, ids in zip(logprobs_PU, kept, strict=True)]
    return TeacherLogprobs(
        positions=positions.astype(np.int32),
        offsets=np.cumsum([0, *map(len, kept)]),
        ids=np.concatenate([np.zeros(0), *kept]).astype(np.int32),
        logprobs=np.concatenate([np.zeros(0), *said]).astype(np.float32),
        remainder_mass=np.array([max(0, 1 - np.exp(row).sum()) for row in said], np.float32),
        observed_logprobs=np.take_along_axis(logprobs_PU, realised[:, None], 1)[:, 0].astype(np.float32),
        entropy=-(np.exp(logprobs_PU) * logprobs_PU).sum(1).astype(np.float32),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits), -1).numpy()


def draw_text(
    draw: np.random.Generator, count: int, student: list[bytes], teacher: list[bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of both sides behind start tokens, and the spans: each equal bytes, an end, or now and then other bytes."""
    ours, theirs, spans = [0], [0], []
    strings = [spelling for spelling in student + teacher if len(spelling) > 1]
    for _ in range(count):
        texts = [b"".join(strings[at] for at in draw.integers(0, len(strings), draw.integers(1, 3))) for _ in range(2)]
        kind = draw.choice(["text", "end", "rewritten"], p=[0.8, 0.1, 0.1])
        if student == teacher or kind == "end":
            new = [int(draw.integers(1, len(student)))] if kind != "end" else [0]
            pair = new, new
        else:
            pair = draw_tokens(draw, student, texts[0]), draw_tokens(draw, teacher, texts[kind == "rewritten"])
        spans.append([len(ours), len(ours) + len(pair[0]), len(theirs), len(theirs) + len(pair[1])])
        ours, theirs = ours + pair[0], theirs + pair[1]
    return np.array(ours, np.int32), np.array(theirs, np.int32), np.array(spans, np.int32).reshape(-1, 4)


def draw_case(
    seed: int,
    *,
    K: int,
    one_tokenizer: bool = False,
    sharpness: float = 2.0,
    spans: int = 6,
    V: int = 23,
    U: int = 19,
    H: int = 5,
    bias: bool = False,
) -> Case:
    """A random document: some tokens are not trained or not drawn, some of the teacher's positions are missing."""
    # Words are the same for all seeds, as one student has one vocabulary.
    U, of_words = V if one_tokenizer else U, np.random.default_rng(0)
    student = draw_spellings(of_words, V)
    teacher = student if one_tokenizer else draw_spellings(of_words, U)
    draw = np.random.default_rng(seed)
    student_ids, teacher_ids, table = draw_text(draw, spans, student, teacher)
    trained = draw.random(len(student_ids) - 1) < 0.95
    positions = 1 + np.flatnonzero(draw.random(len(teacher_ids) - 1) < 0.95)
    logprobs = log_softmax(draw.normal(0, sharpness, (len(positions), U)))
    signal = signal_of(logprobs, positions, teacher_ids[positions], min(K, U))
    rows = np.flatnonzero(trained).astype(np.int64)
    of_drawn = np.random.default_rng([seed, 1])
    drawn = np.where(of_drawn.random(len(rows)) < 0.95, of_drawn.normal(-math.log(V), 0.5, len(rows)), np.nan)
    advantages = np.full(len(rows), of_drawn.normal(), np.float32)
    example = LossInputs(student_ids, rows, table, teacher_ids, signal, drawn.astype(np.float32), advantages)
    projection = SparseProjection.identity(V) if one_tokenizer else draw_projection(draw, V, U)
    torch.manual_seed(seed)
    return Case(
        example,
        projection,
        partition_of(student, teacher, V, U),
        torch.randn(len(example.positions), H, dtype=torch.float64),
        torch.randn(V, H, dtype=torch.float64) / 3,
        torch.randn(V, dtype=torch.float64) / 3 if bias else None,
    )


def case_of_one_model(seed: int, *, K: int, spans: int = 6, one_to_one: bool = False, V: int = 23, H: int = 5) -> Case:
    """A document on which student and teacher are one model: what the teacher said is what the student says."""
    draw = np.random.default_rng(seed)
    sizes = np.ones(spans, np.int64) if one_to_one else draw.integers(1, 4, spans)
    edges = 1 + np.concatenate([[0], np.cumsum(sizes)])
    table = np.stack([edges[:-1], edges[1:], edges[:-1], edges[1:]], 1).astype(np.int32)
    T = int(edges[-1])
    spellings = draw_spellings(draw, V)
    ids = draw.integers(0, len(spellings), T).astype(np.int32)
    states, weight = torch.from_numpy(draw.normal(size=(T - 1, H))), torch.from_numpy(draw.normal(size=(V, H)))
    positions = np.arange(1, T)
    signal = signal_of(torch.log_softmax(states @ weight.T, 1).numpy(), positions, ids[positions], K)
    # What it drew, and nothing rewarded.
    drawn = signal.observed_logprobs, np.zeros(T - 1, np.float32)
    example = LossInputs(ids, np.arange(T - 1, dtype=np.int64), table, ids, signal, *drawn)
    return Case(example, SparseProjection.identity(V), partition_of(spellings, spellings, V, V), states, weight)
