"""Reference implementations of all losses: dense W, full probabilities, explicit loops, float64."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from reference_byte_kl import (
    CELL_DIVERGENCES,
    FORWARD_KL,
    ReferenceDivergence,
    ReferenceVocabulary,
    reference_byte_kl,
    support_at,
)
from reference_longest_prefixes import reference_bpm, reference_escd
from small_vocabularies import make_byte_partition, partition_vocabularies, random_encode, random_spellings
from torch import Tensor

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses.cells.clipped_surrogate import ClippedSurrogateCells
from xtk.losses.cells.loss_cells import MIN_REMAINDER, LossCells
from xtk.losses.cells.next_byte_cells import NextByteCells
from xtk.losses.cells.shared_vocabulary_cells import CandidateUnitCells, SharedVocabularyCells
from xtk.losses.cells.sorted_probs import SortedProbCells
from xtk.losses.cells.span_probability_products import SpanProductCells
from xtk.losses.event_set_completion import EventSetCells
from xtk.losses.interface import LossInputs
from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_byte_partition import BytePartition

REVERSE_KL = ReferenceDivergence("reverse-kl")


def predicted_spans(example: LossInputs) -> list[tuple[list[int], list[int]]]:
    """Return the spans of which both models predict every token: (student positions, teacher positions)."""
    teacher_logprobs = example.teacher_logprobs
    assert teacher_logprobs is not None
    student_predicted, teacher_predicted = (
        {int(row) + 1 for row in example.positions},
        set(teacher_logprobs.positions.tolist()),
    )
    spans = [(list(range(s0, s1)), list(range(t0, t1))) for s0, s1, t0, t1 in example.spans.tolist()]
    return [(s, t) for s, t in spans if student_predicted.issuperset(s) and teacher_predicted.issuperset(t)]


def _projected_divergence(
    example: LossInputs,
    W: Tensor,
    probs_NV: Tensor,
    student_positions: list[int],
    teacher_positions: list[int],
    divergence: ReferenceDivergence,
) -> Tensor:
    teacher_logprobs = example.teacher_logprobs
    assert teacher_logprobs is not None
    row_of = {int(row) + 1: n for n, row in enumerate(example.positions)}
    index_of = {int(position): n for n, position in enumerate(teacher_logprobs.positions)}
    support: set[int] = set()
    mean_probs = [0.0] * W.shape[1]
    for position in teacher_positions:
        index = index_of[position]
        for token, logprob in support_at(teacher_logprobs, index):
            mean_probs[token] += math.exp(logprob) / len(teacher_positions)
            support.add(token)
    y = sum((probs_NV[row_of[token]] @ W for token in student_positions), torch.zeros(W.shape[1], dtype=torch.float64))
    reached = sorted(token for token in support if W[:, token].sum() > 0)
    teacher_probs = [mean_probs[token] for token in reached]
    if sum(teacher_probs) > 1e-30 and all(
        len(dict(support_at(teacher_logprobs, index_of[one]))) == W.shape[1] for one in teacher_positions
    ):
        # With full supports, compare with the distribution given that the token is mapped.
        teacher_probs = [one / sum(teacher_probs) for one in teacher_probs]
    return divergence(teacher_probs, [y[token] / len(student_positions) for token in reached])


def reference_cells_loss(cells: LossCells, probs_NV: Tensor, divergence: ReferenceDivergence = FORWARD_KL) -> Tensor:
    """Return the loss of given cells, with explicit loops over items, cells and entries."""
    total = torch.zeros((), dtype=torch.float64)
    for item in range(cells.num_items):
        cell_range = range(cells.cell_offsets[item], cells.cell_offsets[item + 1])
        student_probs = [_entry_sum(cells, cell, probs_NV) for cell in cell_range]
        teacher_probs = [float(cells.teacher_probs[cell]) for cell in cell_range]
        prefix_prob = torch.ones((), dtype=torch.float64)
        if isinstance(cells, SpanProductCells):
            prefix_size = int(cells.num_prefix_tokens[item])
            prefix_prob = math.prod(student_probs[:prefix_size], start=prefix_prob)
            student_probs, teacher_probs = (
                [(prefix_prob * prob) ** (1 / cells.temperature) for prob in student_probs[prefix_size:]],
                teacher_probs[prefix_size:],
            )
        remainder = float(cells.remainder_probs[item])
        if isinstance(cells, SharedVocabularyCells):
            total = total + _shared_token_divergence(cells, item, student_probs, teacher_probs, probs_NV, divergence)
            continue
        if isinstance(cells, ClippedSurrogateCells):
            item_inputs = float(cells.sampling_logprobs[item]), float(cells.advantages[item])
            total = total + surrogate(student_probs[0], *item_inputs, cells.min_ratio, cells.max_ratio)
        elif teacher_probs:
            total = total + cells.factor * divergence(
                teacher_probs, _condition_on_bytes(cells, item, student_probs, probs_NV), remainder
            )
        if isinstance(cells, EventSetCells):
            for set_index in range(cells.set_offsets[item], cells.set_offsets[item + 1]):
                tokens = cells.sorted_token_ids.values[cells.firsts[set_index] : cells.stops[set_index]]
                set_prob = probs_NV[cells.first_rows[item]][tokens.astype(np.int64)].sum()
                total = total - float(cells.set_masses[set_index]) * set_prob.log()
        if isinstance(cells, SortedProbCells):
            total = total + _sorted_difference(cells, item, prefix_prob, probs_NV)
    return total


def _shared_token_divergence(
    cells: SharedVocabularyCells, item: int, student_probs: list[Tensor], teacher_probs: list[float], probs_NV: Tensor,
    divergence: ReferenceDivergence,
) -> Tensor:  # fmt: skip
    cell_range = range(cells.cell_offsets[item], cells.cell_offsets[item + 1])
    shared_probs = {
        int(cells.tokens[cells.entry_offsets[cell]]): p for cell, p in zip(cell_range, teacher_probs, strict=True)
    }
    units = []
    if isinstance(cells, CandidateUnitCells):
        for unit in range(cells.unit_offsets[item], cells.unit_offsets[item + 1]):
            tokens = range(cells.unit_token_offsets[unit], cells.unit_token_offsets[unit + 1])
            logprobs = [probs_NV[cells.unit_rows[index], cells.unit_tokens[index]].log() for index in tokens]
            units.append((float(cells.unit_probs[unit]), (sum(logprobs) / len(logprobs)).exp()))
    shared_tokens = set(cells.paired_tokens.values.tolist())
    probs = probs_NV[cells.first_rows[item]]
    return _divergence_over_candidates(
        shared_probs, float(cells.remainder_probs[item]), shared_tokens, probs, cells.top_k, divergence, units, 1.0
    )


def surrogate(
    probability: Tensor, sampling_logprob: float, advantage: float, min_ratio: float, max_ratio: float
) -> Tensor:
    """Return PPO's clipped surrogate loss as published, with ratios limited to e^20."""
    ratio = probability * math.exp(-sampling_logprob)
    if ratio > math.exp(20):
        ratio = ratio.detach() * 0 + math.exp(20)
    return -torch.minimum(ratio * advantage, ratio.clamp(min_ratio, max_ratio) * advantage)


def _sorted_difference(cells: SortedProbCells, item: int, prefix_prob: Tensor, probs_NV: Tensor) -> Tensor:
    t = cells.rank_probs[cells.rank_offsets[item] : cells.rank_offsets[item + 1]].tolist()
    excluded = set() if cells.excluded_tokens is None else set(cells.excluded_tokens.values.tolist())
    kept = [token for token in range(probs_NV.shape[1]) if token not in excluded]
    s = list((prefix_prob * probs_NV[cells.rank_rows[item]][kept]).sort(descending=True).values)
    remainder = sum(s[len(t) :], torch.zeros((), dtype=torch.float64))
    outside = (remainder - float(cells.max_remainder[item])).relu() + (
        float(cells.min_remainder[item]) - remainder
    ).relu()
    return cells.rank_weight * (sorted_l1(t, s[: len(t)]) + outside)


def sorted_l1(teacher_probs: Sequence[float], student_probs: Sequence[Tensor]) -> Tensor:
    """Return the sum of absolute differences of two descending sequences, the shorter one padded with zeros."""
    pairs = itertools.zip_longest(teacher_probs, student_probs, fillvalue=0.0)
    return sum((torch.as_tensor(t - s).abs() for t, s in pairs), torch.zeros((), dtype=torch.float64))


def _entry_sum(cells: LossCells, cell: int, probs_NV: Tensor) -> Tensor:
    entries = cells.softmax_reads(torch.float64).cells
    return sum(
        (
            probs_NV[entries.rows[e], entries.tokens[e]]
            * (1 if entries.log_weights is None else math.exp(entries.log_weights[e]))
            for e in range(cells.entry_offsets[cell], cells.entry_offsets[cell + 1])
        ),
        torch.zeros((), dtype=torch.float64),
    )


def _condition_on_bytes(cells: LossCells, item: int, student_probs: list[Tensor], probs_NV: Tensor) -> list[Tensor]:
    """Return cell probabilities conditioned on the bytes since the previous boundary, for losses that do so."""
    if not isinstance(cells, NextByteCells) or cells.previous_rows[item] < 0:
        return student_probs
    probs = probs_NV[cells.previous_rows[item]]
    first = cells.cell_offsets[item] + 2 * item
    ended, in_no_cell, *continued = (
        sum(
            (probs[cells.sorted_token_ids.values[cells.firsts[run] : cells.stops[run]]].sum() for run in range(*group)),
            torch.tensor(0.0),
        )
        for group in itertools.pairwise(cells.run_offsets[first : first + len(student_probs) + 3].tolist())
    )
    normalizer = ended + in_no_cell + sum(continued)
    assert not (cells.is_inside_token[item] and sum(student_probs) > 0)
    return [
        (ended * prob + continued_prob) / normalizer
        for prob, continued_prob in zip(student_probs, continued, strict=True)
    ]


@dataclass(frozen=True)
class Case:
    """A document in both tokenizations, W, both vocabularies, hidden states, and the student's output head."""

    example: LossInputs
    projection: SparseProjection
    vocabularies: tuple[ReferenceVocabulary, ReferenceVocabulary]
    states: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @cached_property
    def next_bytes(self) -> BytePartition:
        return make_byte_partition(*self.vocabularies)

    @property
    def dense(self) -> Tensor:
        """W [V, U]."""
        projection = self.projection
        W = torch.zeros(projection.student_width, projection.teacher_width, dtype=torch.float64)
        W[projection.entry_rows, projection.teacher_ids] = torch.from_numpy(projection.weights).double()
        return W


def reference_ce(case: Case, probs_NV: Tensor) -> list[Tensor]:
    example = case.example
    return [-probs_NV[n, int(example.student_ids[row + 1])].log() for n, row in enumerate(example.positions)]


def reference_p_kl(case: Case, probs_NV: Tensor, divergence: ReferenceDivergence = FORWARD_KL) -> list[Tensor]:
    spans = predicted_spans(case.example)
    return [_projected_divergence(case.example, case.dense, probs_NV, s, t, divergence) for s, t in spans]


def reference_boundary_kl(case: Case, probs_NV: Tensor, divergence: ReferenceDivergence = FORWARD_KL) -> list[Tensor]:
    spans = predicted_spans(case.example)
    return [_projected_divergence(case.example, case.dense, probs_NV, s[:1], t[:1], divergence) for s, t in spans]


def reference_alm(
    case: Case, probs_NV: Tensor, divergence: ReferenceDivergence = FORWARD_KL, temperature: float = 100.0
) -> list[Tensor]:
    example = case.example
    rows, indices = _indices(example)
    items = []
    for s, t in predicted_spans(example):
        student_logprob = sum(probs_NV[rows[position], int(example.student_ids[position])].log() for position in s)
        teacher_logprob = sum(float(example.teacher_logprobs.observed_logprobs[indices[position]]) for position in t)
        q, p = (student_logprob / temperature).exp(), math.exp(teacher_logprob / temperature)
        items.append(temperature * divergence([p], [q], 1 - p))
    return items


def reference_policy_gradient(
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
    rows, indices = _indices(example)
    items = []
    for s, t in predicted_spans(example):
        sampling_logprob = sum(float(example.sampling_logprobs[rows[position]]) for position in s)
        if math.isnan(sampling_logprob):
            continue
        teacher_logprob = sum(float(example.teacher_logprobs.observed_logprobs[indices[position]]) for position in t)
        reward_advantage = reward * float(example.advantages[rows[s[0]]])
        if credit == "dpca":
            for position in s:
                token_logprob = float(example.sampling_logprobs[rows[position]])
                advantage = (
                    teacher * min(max((teacher_logprob / sampling_logprob - 1) * token_logprob, -clip), clip)
                    + reward_advantage
                )
                token_prob = probs_NV[rows[position], int(example.student_ids[position])]
                items.append(surrogate(token_prob, token_logprob, advantage, 1 - epsilon, 1 + epsilon_high))
            continue
        advantage = teacher * min(max(teacher_logprob - sampling_logprob, -clip), clip) + reward_advantage
        span_prob = math.prod(probs_NV[rows[position], int(example.student_ids[position])] for position in s)
        items.append(surrogate(span_prob, sampling_logprob, advantage, 1 - epsilon, 1 + epsilon_high))
    return items


def reference_uld(case: Case, probs_NV: Tensor) -> list[Tensor]:
    example = case.example
    rows, indices = _indices(example)
    items = []
    for s, t in predicted_spans(example):
        top_probs, min_remainder, unlisted = _sorted_teacher_probs(example, indices[t[0]], 1.0, {})
        student = list(probs_NV[rows[s[0]]].sort(descending=True).values)
        remainder = sum(student[len(top_probs) :], torch.zeros((), dtype=torch.float64))
        items.append(sorted_l1(top_probs, student[: len(top_probs)]) + (remainder - min_remainder - unlisted).abs())
    return items


def _shared_support_at(example: LossInputs, index: int, partners: dict[int, int]) -> tuple[dict[int, float], float]:
    """Return the teacher's probabilities of shared tokens at one position, by student token, and its remainder."""
    teacher_logprobs = example.teacher_logprobs
    shared_probs = {
        partners[u]: math.exp(logprob)
        for u, logprob in support_at(teacher_logprobs, index, exact=True)
        if u in partners
    }
    remainder = float(teacher_logprobs.remainder_mass[index])
    return shared_probs, remainder if remainder > MIN_REMAINDER else 0.0


def _divergence_over_candidates(
    shared_probs: dict[int, float], teacher_remainder: float, shared_tokens: set[int], probs: Tensor, top_k: int,
    divergence: ReferenceDivergence,
    units: Sequence[tuple[float, Tensor]] = (),
    normalizer: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the divergence over shared tokens and units; shared tokens that are not listed are the remainder."""
    unlisted = sum((probs[v] for v in sorted(shared_tokens - set(shared_probs))), torch.zeros((), dtype=torch.float64))
    p, q = (
        [*shared_probs.values(), *(prob for prob, _ in units)],
        [*(probs[v] for v in shared_probs), *(prob for _, prob in units)],
    )
    normalizer, student_normalizer = normalizer or sum(p) + teacher_remainder, sum(q, unlisted)
    p, q = [prob / normalizer for prob in p] if normalizer > 0 else p, [prob / student_normalizer for prob in q]
    teacher_remainder = teacher_remainder / normalizer if normalizer > 0 else 1.0
    if top_k and divergence.name != "forward-kl":
        kept = sorted(range(len(q)), key=lambda index: -float(q[index].detach()))[:top_k]
        teacher_remainder += sum(p) - sum(p[index] for index in kept)
        p, q = [p[index] for index in kept], [q[index] for index in kept]
    return divergence(p, q, teacher_remainder)


def reference_strict(
    case: Case, probs_NV: Tensor, divergence: ReferenceDivergence = REVERSE_KL, top_k: int = 16
) -> list[Tensor]:
    partners = reference_pairs(case.dense)
    rows, indices = _indices(case.example)
    return [
        _divergence_over_candidates(*_shared_support_at(case.example, indices[t[0]], partners),
                                    set(partners.values()), probs_NV[rows[s[0]]], top_k, divergence)
        for s, t in predicted_spans(case.example) if len(s) == len(t) == 1
    ]  # fmt: skip


def reference_simct(case: Case, probs_NV: Tensor, divergence: ReferenceDivergence = REVERSE_KL) -> list[Tensor]:
    example, partners, items = case.example, reference_pairs(case.dense), []
    rows, indices = _indices(example)
    for s, t in predicted_spans(example):
        units = []
        if not (len(s) == len(t) == 1 and partners.get(int(example.teacher_ids[t[0]])) == example.student_ids[s[0]]):
            teacher_logprobs = [float(example.teacher_logprobs.observed_logprobs[indices[position]]) for position in t]
            student_logprobs = [probs_NV[rows[position], int(example.student_ids[position])].log() for position in s]
            units = [(math.exp(sum(teacher_logprobs) / len(t)), (sum(student_logprobs) / len(s)).exp())]
        shared = _shared_support_at(example, indices[t[0]], partners)
        items.append(
            _divergence_over_candidates(*shared, set(partners.values()), probs_NV[rows[s[0]]], 0, divergence, units)
        )
    return items


def reference_gold(
    case: Case,
    probs_NV: Tensor,
    divergence: ReferenceDivergence = FORWARD_KL,
    weights: tuple[float, float] | None = None,
    published: bool = False,
) -> list[Tensor]:
    """Return the items of gold, or with other weights of h-kl."""
    example, partners = case.example, reference_pairs(case.dense)
    rows, indices = _indices(example)
    paired_weight, ranked_weight = weights or (
        len(partners) / case.dense.shape[1],
        1 - len(partners) / case.dense.shape[1],
    )
    items = []
    for s, t in predicted_spans(example):
        student_prefix_prob = math.prod(
            probs_NV[rows[position], int(example.student_ids[position])] for position in s[:-1]
        )
        teacher_prefix_prob = math.exp(
            sum(float(example.teacher_logprobs.observed_logprobs[indices[position]]) for position in t[:-1])
        )
        student_probs, last_index = student_prefix_prob * probs_NV[rows[s[-1]]], indices[t[-1]]
        listed = [token for token, _ in support_at(example.teacher_logprobs, last_index) if token in partners]
        p = [
            teacher_prefix_prob * math.exp(logprob)
            for token, logprob in support_at(example.teacher_logprobs, last_index)
            if token in partners
        ]
        q = [student_probs[partners[token]] for token in listed]
        top_probs, min_remainder, unlisted = _sorted_teacher_probs(example, last_index, teacher_prefix_prob, partners)
        unpaired = [token for token in range(len(student_probs)) if token not in partners.values()]
        sorted_probs = list(student_probs[unpaired].sort(descending=True).values)
        remainder = sum(sorted_probs[len(top_probs) :], torch.zeros((), dtype=torch.float64))
        ranked_term = sorted_l1(top_probs, sorted_probs[: len(top_probs)])
        if published:
            paired_term = sum(
                (_published_kl_term(a, b) for a, b in zip(p, q, strict=True)), torch.zeros((), dtype=torch.float64)
            )
        else:
            paired_term = divergence(p, q)
            ranked_term = (
                ranked_term + (remainder - min_remainder - unlisted).relu() + (min_remainder - remainder).relu()
            )
        items.append(paired_weight * paired_term + ranked_weight * ranked_term)
    return items


def reference_published_p_kl(case: Case, probs_NV: Tensor, reverse: bool = False) -> list[Tensor]:
    """Compare mean student probabilities with mean teacher log-probabilities, over tokens in all supports of a span."""
    example = case.example
    rows, indices = _indices(example)
    items = []
    for s, t in predicted_spans(example):
        supports = [dict(support_at(example.teacher_logprobs, indices[position])) for position in t]
        tokens = sorted(set.intersection(*(set(support) for support in supports)))
        log_totals = [
            math.log(sum(math.exp(support[token]) for token in tokens)) if tokens else 0.0 for support in supports
        ]
        a = [
            sum(support[token] - log_total for support, log_total in zip(supports, log_totals, strict=True)) / len(t)
            for token in tokens
        ]
        y = sum(probs_NV[rows[position]] @ case.dense for position in s) / len(s)
        q = (y[tokens] / (y[tokens].sum() + 1e-10) + 1e-10).log()
        a = torch.tensor(a, dtype=torch.float64)
        items.append((q.exp() * (q - a) if reverse else a.exp() * (a - q)).sum())
    return items


def _published_kl_term(p: float, q: Tensor) -> Tensor:
    return p * (math.log(p) - q.log()) if p > 0 else torch.zeros((), dtype=torch.float64)


def _indices(example: LossInputs) -> tuple[dict[int, int], dict[int, int]]:
    """Return the row of the student's logits and the index in `teacher_logprobs` that predict a token."""
    rows = {int(row) + 1: n for n, row in enumerate(example.positions)}
    return rows, {int(position): n for n, position in enumerate(example.teacher_logprobs.positions)}


def _sorted_teacher_probs(
    example: LossInputs, index: int, prefix_prob: float, partners: dict[int, int]
) -> tuple[list[float], float, float]:
    """Return the teacher's top unpaired probabilities, descending; the mass known to be below them; unlisted mass."""
    support = dict(support_at(example.teacher_logprobs, index))
    remainder = 1 - sum(math.exp(logprob) for logprob in support.values())
    remainder = remainder if remainder > MIN_REMAINDER else 0.0
    observed = int(example.teacher_ids[example.teacher_logprobs.positions[index]])
    observed_prob = 0.0
    if (
        observed not in partners
        and support[observed] == min(support.values())
        and math.exp(support[observed]) < remainder
    ):
        # It may be listed only as the observed token: unlisted tokens may have larger probabilities.
        observed_prob = math.exp(support.pop(observed))
    top_probs = sorted(
        (prefix_prob * math.exp(support[token]) for token in support if token not in partners), reverse=True
    )
    return top_probs, prefix_prob * observed_prob, prefix_prob * remainder


def reference_pairs(W: Tensor) -> dict[int, int]:
    """Return {teacher token: student token}: the largest entry of a row, if at least 0.6; one row per teacher token."""
    candidates = []
    for v, row in enumerate(W.tolist()):
        weight = max(row, default=0.0)
        if weight >= 0.6 - 1e-6:
            candidates.append((row.index(weight), -weight, v))
    pairs: dict[int, int] = {}
    for u, _, v in sorted(candidates):
        pairs.setdefault(u, v)
    return pairs


REFERENCE_LOSSES = {
    "alm": reference_alm,
    "policy-gradient": reference_policy_gradient,
    "uld": reference_uld,
    "gold": reference_gold,
    "h-kl": functools.partial(reference_gold, weights=(1.0, 1.0)),
    "ce": reference_ce,
    "boundary-kl": reference_boundary_kl,
    "p-kl": reference_p_kl,
    "bpm": lambda case, probs_NV, *divergence: reference_bpm(case.example, *case.vocabularies, probs_NV, *divergence),
    "escd": lambda case, probs_NV, *divergence: reference_escd(case.example, *case.vocabularies, probs_NV, *divergence),
    "strict": reference_strict,
    "simct": reference_simct,
    "byte-kl": lambda case, probs_NV, *divergence: reference_byte_kl(
        case.example, *case.vocabularies, probs_NV, *divergence
    ),
    **{name: functools.partial(reference_p_kl, divergence=ReferenceDivergence(name)) for name in CELL_DIVERGENCES},
}


def random_projection(rng: np.random.Generator, V: int, U: int) -> SparseProjection:
    """Return a projection with rows that sum to 1, to less or to 0; every third teacher token is unreachable."""
    rows = []
    for _ in range(V):
        tokens = np.unique(rng.integers(0, U, rng.integers(0, 4)))
        tokens = tokens[tokens % 3 != 2]
        rows.append((tokens, rng.dirichlet(np.ones(len(tokens))) * rng.choice([1.0, 0.6]) if len(tokens) else []))
    return SparseProjection(
        row_offsets=np.cumsum([0] + [len(tokens) for tokens, _ in rows]).astype(np.int64),
        teacher_ids=np.concatenate([tokens for tokens, _ in rows]).astype(np.int32),
        weights=np.concatenate([weights for _, weights in rows]).astype(np.float32),
        student_cells=np.full(V, -1, np.int32),
        teacher_cells=np.full(U, -1, np.int32),
    )


def make_teacher_logprobs(
    logprobs_PU: np.ndarray, positions: np.ndarray, observed: np.ndarray, K: int
) -> TeacherLogprobs:
    """Return the K most likely tokens of full distributions, and the observed token, as `TeacherLogprobs`."""
    top_ids = np.argsort(-logprobs_PU, axis=1, kind="stable")[:, :K]
    kept = [np.unique([*ids, token]) for ids, token in zip(top_ids.tolist(), observed.tolist(), strict=True)]
    kept_logprobs = [row[ids] for row, ids in zip(logprobs_PU, kept, strict=True)]
    return TeacherLogprobs(
        positions=positions.astype(np.int32),
        offsets=np.cumsum([0, *map(len, kept)]),
        ids=np.concatenate([np.zeros(0), *kept]).astype(np.int32),
        logprobs=np.concatenate([np.zeros(0), *kept_logprobs]).astype(np.float32),
        remainder_mass=np.array([max(0, 1 - np.exp(row).sum()) for row in kept_logprobs], np.float32),
        observed_logprobs=np.take_along_axis(logprobs_PU, observed[:, None], 1)[:, 0].astype(np.float32),
        entropy=-(np.exp(logprobs_PU) * logprobs_PU).sum(1).astype(np.float32),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits), -1).numpy()


def random_text(
    rng: np.random.Generator, count: int, student: list[bytes], teacher: list[bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids of both sides after a start token, and spans: equal bytes, end tokens or sometimes different bytes."""
    student_ids, teacher_ids, spans = [0], [0], []
    strings = [spelling for spelling in student + teacher if len(spelling) > 1]
    for _ in range(count):
        texts = [
            b"".join(strings[index] for index in rng.integers(0, len(strings), rng.integers(1, 3))) for _ in range(2)
        ]
        kind = rng.choice(["text", "end", "rewritten"], p=[0.8, 0.1, 0.1])
        if student == teacher or kind == "end":
            tokens = [int(rng.integers(1, len(student)))] if kind != "end" else [0]
            pair = tokens, tokens
        else:
            pair = random_encode(rng, student, texts[0]), random_encode(rng, teacher, texts[kind == "rewritten"])
        spans.append(
            [len(student_ids), len(student_ids) + len(pair[0]), len(teacher_ids), len(teacher_ids) + len(pair[1])]
        )
        student_ids, teacher_ids = student_ids + pair[0], teacher_ids + pair[1]
    return np.array(student_ids, np.int32), np.array(teacher_ids, np.int32), np.array(spans, np.int32).reshape(-1, 4)


def random_case(
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
    """Return a random document: some tokens are not trained or not sampled, some teacher positions are missing."""
    # The vocabularies are the same for all seeds, as one student has one vocabulary.
    U, vocabulary_rng = V if one_tokenizer else U, np.random.default_rng(0)
    student = random_spellings(vocabulary_rng, V)
    teacher = student if one_tokenizer else random_spellings(vocabulary_rng, U)
    rng = np.random.default_rng(seed)
    student_ids, teacher_ids, span_table = random_text(rng, spans, student, teacher)
    trained = rng.random(len(student_ids) - 1) < 0.95
    positions = 1 + np.flatnonzero(rng.random(len(teacher_ids) - 1) < 0.95)
    logprobs = log_softmax(rng.normal(0, sharpness, (len(positions), U)))
    teacher_logprobs = make_teacher_logprobs(logprobs, positions, teacher_ids[positions], min(K, U))
    rows = np.flatnonzero(trained).astype(np.int64)
    rollout_rng = np.random.default_rng([seed, 1])
    sampling_logprobs = np.where(
        rollout_rng.random(len(rows)) < 0.95, rollout_rng.normal(-math.log(V), 0.5, len(rows)), np.nan
    )
    advantages = np.full(len(rows), rollout_rng.normal(), np.float32)
    example = LossInputs(
        student_ids, rows, span_table, teacher_ids, teacher_logprobs, sampling_logprobs.astype(np.float32), advantages
    )
    projection = SparseProjection.identity(V) if one_tokenizer else random_projection(rng, V, U)
    torch.manual_seed(seed)
    return Case(
        example,
        projection,
        partition_vocabularies(student, teacher, V, U),
        torch.randn(len(example.positions), H, dtype=torch.float64),
        torch.randn(V, H, dtype=torch.float64) / 3,
        torch.randn(V, dtype=torch.float64) / 3 if bias else None,
    )


def equal_models_case(seed: int, *, K: int, spans: int = 6, one_to_one: bool = False, V: int = 23, H: int = 5) -> Case:
    """Return a document on which student and teacher are one model with equal distributions."""
    rng = np.random.default_rng(seed)
    sizes = np.ones(spans, np.int64) if one_to_one else rng.integers(1, 4, spans)
    edges = 1 + np.concatenate([[0], np.cumsum(sizes)])
    span_table = np.stack([edges[:-1], edges[1:], edges[:-1], edges[1:]], 1).astype(np.int32)
    T = int(edges[-1])
    spellings = random_spellings(rng, V)
    ids = rng.integers(0, len(spellings), T).astype(np.int32)
    states, weight = torch.from_numpy(rng.normal(size=(T - 1, H))), torch.from_numpy(rng.normal(size=(V, H)))
    positions = np.arange(1, T)
    teacher_logprobs = make_teacher_logprobs(
        torch.log_softmax(states @ weight.T, 1).numpy(), positions, ids[positions], K
    )
    # The student sampled with the same log-probabilities; rewards are 0.
    rollout = teacher_logprobs.observed_logprobs, np.zeros(T - 1, np.float32)
    example = LossInputs(ids, np.arange(T - 1, dtype=np.int64), span_table, ids, teacher_logprobs, *rollout)
    return Case(
        example, SparseProjection.identity(V), partition_vocabularies(spellings, spellings, V, V), states, weight
    )
