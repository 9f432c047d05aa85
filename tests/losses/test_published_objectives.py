"""bpm, escd, simct, strict and dpca on the worked example of arXiv 2609.34738, appendix B.5."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference_losses import make_teacher_logprobs
from small_vocabularies import make_byte_partition, partition_vocabularies, random_spellings

from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.shared_vocabulary_cells import CandidateUnitCells
from xtk.losses.divergences import ReverseKLDivergence
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.projection.projection import ProjectionColumns, SparseProjection
from xtk.projection.vocabulary_array import VocabularyArray
from xtk.projection.vocabulary_byte_partition import BytePartition

STUDENT = [b"", b"Br", b"ead", b"eads", b"eak", b"Cat", b"x"]
TEACHER = [b"", b"Bread", b"Breads", b"Break", b"Cat"]
BR, EAD, EADS, EAK, CAT, X = range(1, 7)
ROOT = {BR: 0.5, CAT: 0.2, X: 0.3}
AFTER = {EAD: 0.2, EADS: 0.3, EAK: 0.1, X: 0.4}
OTHER_AFTER = {EAD: 0.1, EADS: 0.5, EAK: 0.1, X: 0.3}
TEACHER_PROBS = [0.0, 0.4, 0.2, 0.3, 0.1]


def partition(student: list[bytes] = STUDENT, teacher: list[bytes] = TEACHER) -> BytePartition:
    return make_byte_partition(*partition_vocabularies(student, teacher, len(student), len(teacher)))


def teacher_output(rows: list[list[float]], ids: list[int], K: int = 99) -> TeacherLogprobs:
    """Return the teacher's K most likely tokens at each position but the first; `rows` are the distributions there."""
    logprobs = np.log(np.maximum(np.array(rows), 1e-30))
    return make_teacher_logprobs(logprobs, np.arange(1, len(ids)), np.array(ids[1:]), min(K, logprobs.shape[1]))


def logits(*rows: dict[int, float], width: int = len(STUDENT)) -> torch.Tensor:
    table = torch.full((len(rows), width), 1e-30, dtype=torch.float64)
    for index, row in enumerate(rows):
        table[index, list(row)] = torch.tensor(list(row.values()), dtype=torch.float64)
    return table.log()


def bread() -> LossInputs:
    """Return the text Bread: two student tokens, one teacher token."""
    student, teacher = np.array([0, BR, EAD], np.int32), np.array([0, 1], np.int32)
    span = np.array([[1, 3, 1, 2]], np.int32)
    return LossInputs(student, np.array([0, 1]), span, teacher, teacher_output([TEACHER_PROBS], [0, 1]))


def term(text: str, space: object) -> LossTerm:
    (spec,) = parse_losses([text])
    return LossTerm(spec.make_loss(), spec.make_divergence(), space)


def projection_of(weights: dict[tuple[int, int], float], V: int, U: int) -> ProjectionColumns:
    """Return W from its entries, which are sorted by student tokens."""
    rows = [student for student, _ in weights]
    projection = SparseProjection(
        np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=V))]),
        np.array([teacher for _, teacher in weights], np.int32),
        np.array(list(weights.values()), np.float32),
        np.full(V, -1, np.int32),
        np.full(U, -1, np.int32),
    )
    return projection.columns


def values(cells: LossCells, logits: torch.Tensor) -> list[float]:
    """Return the value of each item."""
    items = [cells.select(slice(number, number + 1), 0) for number in range(cells.num_items)]
    return [float(fused_loss(logits, OutputHead(None), [item], 8)[1][0]) for item in items]


def test_bpm_of_the_published_example():
    cells = term("bpm", partition()).build_cells(bread())
    root, inside = values(cells, logits(ROOT, AFTER))
    assert round(root, 4) == 0.4597
    assert round(inside, 4) == 0.6895
    assert round(values(cells, logits(ROOT, OTHER_AFTER))[1], 4) == 0.8841


def test_spanning_student_token_has_the_product_of_teacher_probabilities():
    """The teacher encodes the student's 20 as 2 and 0, or the 0 is the beginning of a longer token."""
    student, teacher = [b"", b"2", b"0", b"7", b"20", b"200"], [b"", b"2", b"0", b"7", b"07", b"00"]
    rows = [[0, 0.7, 0.2, 0.1, 0, 0], [0, 0.1, 0.3, 0.2, 0.25, 0.15]]
    uniform = logits(dict.fromkeys(range(6), 1 / 6), width=6)
    for student_id, teacher_ids, moved in (
        (4, [0, 1, 2], 0.7 * 0.3),  # 20 ends with the teacher's 0
        (5, [0, 1, 5], 0.7 * 0.15),  # 200 ends with the teacher's 00
        (4, [0, 1, 4], 0.7 * (0.3 + 0.25 + 0.15)),  # 20 ends inside of the teacher's 07: all tokens that begin with 0
    ):
        ids = np.array([0, student_id, *([3] if teacher_ids[-1] == 4 else [])], np.int32)
        span = np.array([[1, len(ids), 1, 3]], np.int32)
        teacher_logprobs = teacher_output(rows, teacher_ids)
        example = LossInputs(ids, np.arange(len(ids) - 1), span, np.array(teacher_ids, np.int32), teacher_logprobs)
        cells = term("bpm", partition(student, teacher)).build_cells(example).select(slice(0, 1), 0)
        pairs = zip(cells.tokens.tolist(), cells.teacher_probs.tolist(), strict=True)
        found = {token: p for token, p in pairs if p > 1e-9}
        assert found == pytest.approx({1: 0.7 - moved, 2: 0.2, 3: 0.1, student_id: moved}, abs=1e-6)
        expected = sum(p * math.log(6 * p) for p in found.values() if p > 0)
        assert values(cells, uniform) == pytest.approx([expected], abs=1e-5)


def sampled_output(probs: np.ndarray, P: int, top_k: int, num_samples: int) -> TeacherLogprobs:
    """Return one distribution at P positions, each stored as its most likely tokens and samples of the others."""
    rng, kept = np.random.default_rng(5), sorted({0, *np.argsort(-probs)[:top_k].tolist()})
    remainder = probs.copy()
    remainder[kept] = 0
    counts = rng.multinomial(num_samples, remainder / remainder.sum(), P)
    sampled_ids = [np.flatnonzero(row) for row in counts]
    return StoredLogprobs.to_teacher_logprobs(
        StoredLogprobs(
            positions=np.arange(1, P + 1, dtype=np.int32),
            offsets=np.arange(P + 1) * len(kept),
            ids=np.tile(np.array(kept, np.int32), P),
            logprobs=np.tile(np.log(probs[kept]).astype(np.float32), P),
            sample_offsets=np.cumsum([0, *map(len, sampled_ids)]),
            sample_ids=np.concatenate(sampled_ids).astype(np.int32),
            sample_counts=np.concatenate([row[ids] for row, ids in zip(counts, sampled_ids, strict=True)]).astype(
                np.int32
            ),
            remainder_mass=np.full(P, remainder.sum(), np.float32),
            observed_logprobs=np.full(P, np.log(probs[0]), np.float32),
            entropy=np.full(P, -(probs * np.log(probs)).sum(), np.float32),
        ),
        0,
    )


def test_escd_of_the_published_example():
    cells = term("escd", partition()).build_cells(bread())
    root, child = values(cells, logits(ROOT, AFTER))
    assert round(root, 4) == 0.4597
    assert round(child, 4) == 1.1067
    assert round(root + child, 4) == 1.5664
    assert round(values(cells, logits(ROOT, OTHER_AFTER))[1], 4) == 0.9973
    assert cells.denominator == 2


def test_escd_has_both_terms_where_a_shared_token_begins_a_longer_one():
    """After the shared token a, b or bc must complete the teacher's ab and abc; no student token begins with xx."""
    student, teacher = [b"", b"a", b"b", b"bc", b"x"], [b"", b"a", b"ab", b"abc", b"x", b"axx"]
    ids = np.array([0, 1, 4], np.int32)
    spans = np.array([[1, 2, 1, 2], [2, 3, 2, 3]], np.int32)
    rows = [[0, 0.3, 0.2, 0.1, 0.1, 0.3], [0, 0.2, 0.2, 0.2, 0.4, 0]]
    example = LossInputs(ids, np.arange(2), spans, np.array([0, 1, 4], np.int32), teacher_output(rows, [0, 1, 4]))
    cells = term("escd", partition(student, teacher)).build_cells(example)
    student_logits = logits(dict.fromkeys(range(5), 0.2), {0: 0.1, 1: 0.2, 2: 0.1, 3: 0.2, 4: 0.4}, width=5)
    root = 0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.4)
    assert values(cells, student_logits)[1] == pytest.approx(root - 0.3 * math.log(0.1 + 0.2), abs=1e-5)


def test_simct_of_the_published_example():
    """Reverse KL over the units Bread, Breads, Break and Cat, whose first three begin with the observed Br."""
    cells = CandidateUnitCells.from_numpy(
        cell_offsets=np.array([0, 1]),
        entry_offsets=np.array([0, 1]),
        teacher_probs=np.array([0.1]),
        rows=np.array([0], np.int32),
        tokens=np.array([CAT], np.int32),
        log_weights=np.zeros(1, np.float32),
        row_counts=np.array([2]),
        remainder_probs=np.zeros(1),
        paired_tokens=VocabularyArray(np.array([CAT], np.int32)),
        unit_offsets=np.array([0, 3]),
        unit_token_offsets=np.array([0, 2, 4, 6]),
        unit_rows=np.array([0, 1, 0, 1, 0, 1], np.int32),
        unit_tokens=np.array([BR, EAD, BR, EADS, BR, EAK], np.int32),
        unit_probs=np.array([0.4, 0.2, 0.3]),
        divergence=ReverseKLDivergence(),
    )
    (value,) = values(cells, logits(ROOT, AFTER))
    assert round(value, 4) == 0.1062


def test_simct_compares_shared_tokens_and_the_observed_unit():
    """Candidates are Cat, and Bread as two tokens of the student: 0.4 and 0.1 against sqrt(0.1) and 0.2."""
    cells = term("simct", projection_of({(CAT, 4): 1.0}, len(STUDENT), len(TEACHER))).build_cells(bread())
    t, s = 0.4 / 0.5, 0.1**0.5 / (0.1**0.5 + 0.2)
    expected = s * math.log(s / t) + (1 - s) * math.log((1 - s) / (1 - t))
    assert values(cells, logits(ROOT, AFTER)) == pytest.approx([expected], abs=1e-6)


def cat_example(probs: list[float], K: int) -> LossInputs:
    """Return one token Cat on both sides; the teacher lists the K most likely tokens."""
    span = np.array([[1, 2, 1, 2]], np.int32)
    return LossInputs(np.array([0, CAT], np.int32), np.array([0]), span, np.array([0, 4], np.int32),
                      teacher_output([probs], [0, 4], K))  # fmt: skip


def test_strict_compares_the_top_shared_tokens_and_a_remainder():
    """a, b, c and Cat are shared; only the student has x, only the teacher has y."""
    student, teacher = [b"", b"a", b"b", b"c", b"x", b"Cat"], [b"", b"a", b"b", b"c", b"Cat", b"y"]
    pairs = {(0, 0): 1.0, (1, 1): 1.0, (2, 2): 1.0, (3, 3): 1.0, (5, 4): 1.0}
    row, probs = (
        logits({0: 0.0625, 1: 0.25, 2: 0.1875, 3: 0.125, 4: 0.25, 5: 0.125}, width=6),
        [0, 0.1, 0.2, 0.1, 0.1, 0.5],
    )
    s, t = np.array([0.0625, 0.25, 0.1875, 0.125, 0.125]) / 0.75, np.array([1e-30, 0.1, 0.2, 0.1, 0.1]) / 0.5
    space = projection_of(pairs, len(student), len(teacher))
    example = cat_example(probs, 6)

    def expected(kept: list[int]) -> float:
        q, p = [*s[kept], 1 - s[kept].sum()], [*t[kept], max(1e-6, 1 - t[kept].sum())]
        return sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a > 1e-9)

    assert values(term("strict:top_k=2", space).build_cells(example), row) == pytest.approx(
        [expected([1, 2])], abs=1e-5
    )
    assert values(term("strict:top_k=3", space).build_cells(example), row)[0] > 0


@pytest.mark.parametrize("name", ["bpm", "escd"])
def test_samples_give_unbiased_cell_probabilities_and_values_near_full_ones(name):
    rng, P, U = np.random.default_rng(2), 4000, 90
    teacher = random_spellings(rng, U)
    # A quarter of the teacher's tokens has no equal student token.
    student = [spelling for token, spelling in enumerate(teacher) if token < 6 or token % 4]
    V, probs = len(student), rng.dirichlet(np.full(U, 0.5))
    logits = torch.log_softmax(torch.from_numpy(rng.normal(0, 1, V)), 0).expand(P, V).contiguous()
    ids, positions = np.zeros(P + 1, np.int32), np.arange(1, P + 1, dtype=np.int32)
    # All observed tokens are end tokens, with any token as an alternative.
    spans = np.column_stack([positions, positions + 1, positions, positions + 1])
    objective = term(name, partition(student, teacher))
    found = []
    for teacher_logprobs in (
        make_teacher_logprobs(np.tile(np.log(probs), (P, 1)), positions, ids[1:], U),
        sampled_output(probs, P, 8, 16),
    ):
        cells = objective.build_cells(LossInputs(ids, np.arange(P), spans, ids, teacher_logprobs))
        first = cells.tokens[cells.entry_offsets[:-1]].long()
        means = torch.zeros(V, dtype=torch.float64).index_add(0, first, cells.teacher_probs.double()) / P
        found.append((means, float(fused_loss(logits, OutputHead(None), [cells], 512)[1][0]) / P))
    (expected, full_value), (estimated, sampled_value) = found
    assert (expected > 0).sum() > 30
    torch.testing.assert_close(estimated, expected, rtol=0, atol=4 * 0.5 / np.sqrt(16 * P))
    # An unlisted token that shares a cell with other unlisted ones counts as the only one: 12 % of the correction.
    assert abs(sampled_value - full_value) < 0.15 * float(cells.corrections.abs().mean())
