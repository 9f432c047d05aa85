"""byte-kl against values by hand, and against a reference implementation that enumerates bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_byte_kl import ReferenceVocabulary, reference_byte_kl, reference_items
from reference_losses import make_teacher_logprobs
from small_vocabularies import make_byte_partition, partition_vocabularies, random_spellings
from torch import Tensor

from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.errors import CorruptError
from xtk.losses import byte_kl
from xtk.losses.byte_kl import ByteKL
from xtk.losses.byte_prefix_marginalization import BPM
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import LossInputs
from xtk.losses.kernels.token_boundaries_numba import prefix_range
from xtk.losses.same_tokenizer_losses import ForwardKL
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_byte_partition import (
    BytePartition,
    SortedVocabulary,
    build_byte_partition,
    sort_vocabulary,
)
from xtk.text.alignment import align_sequences
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


def loss_and_gradient(cells: LossCells, logits: Tensor, chunk: int = 3) -> tuple[float, Tensor]:
    """Return the sum over items, and its gradient."""
    leaf = logits.clone().requires_grad_()
    total, _ = fused_loss(leaf, OutputHead(None), [cells.to(CPU, 1.0)], chunk)
    total.backward()
    return float(total.detach()), leaf.grad


# --- by hand: the example of docs/explanation/losses.md

STUDENT_SPELLINGS, TEACHER_SPELLINGS = [b"", b"2", b"0", b"7", b"20"], [b"", b"2", b"0", b"7"]
TEACHER_PROBS = [[0.0, 0.8, 0.1, 0.1], [0.0, 0.05, 0.75, 0.2]]
STUDENT_PROBS = [[0.0, 0.1, 0.1, 0.2, 0.6], [0.0, 0.05, 0.05, 0.9, 0.0]]


def offset_divergences(student_ids: list[int]) -> list[float]:
    """Return the divergences at the offsets of "20" or "27", which are two teacher tokens."""
    vocabularies = partition_vocabularies(STUDENT_SPELLINGS, TEACHER_SPELLINGS, 5, 4)
    size = len(student_ids)
    teacher_ids = np.array([0, 1, 2 if student_ids[-1] == 4 else 3], np.int32)
    teacher_logprobs = make_teacher_logprobs(
        np.log(np.maximum(TEACHER_PROBS, 1e-30)), np.array([1, 2]), teacher_ids[1:], 4
    )
    spans = [[1, 2, 1, 3]] if size == 1 else [[1, 2, 1, 2], [2, 3, 2, 3]]
    example = LossInputs(
        np.array([0, *student_ids], np.int32), np.arange(size), np.array(spans, np.int32), teacher_ids, teacher_logprobs
    )
    logits = torch.tensor(STUDENT_PROBS[:size], dtype=torch.float64).clamp_min(1e-30).log()
    total, _ = loss_and_gradient(ByteKL().build_cells(example, make_byte_partition(*vocabularies)), logits)
    items = [float(item.detach()) for item in reference_byte_kl(example, *vocabularies, logits.exp())]
    assert total == pytest.approx(sum(items), rel=1e-6)
    return items


def kl(teacher: list[float], student: list[float]) -> float:
    return sum(t * math.log(t / s) for t, s in zip(teacher, student, strict=True))


def test_byte_kl_reproduces_the_worked_example_of_the_docs():
    first = kl([0.8, 0.1, 0.1], [0.7, 0.1, 0.2])
    inside = kl([0.75, 0.25], [6 / 7, 1 / 7])
    mixed = kl([0.05, 0.75, 0.2], [0.05 / 7, 6 / 7 + 0.05 / 7, 0.9 / 7])
    assert offset_divergences([4]) == pytest.approx([first, inside])
    assert offset_divergences([1, 3]) == pytest.approx([first, mixed])
    assert [round(value, 4) for value in (first, inside, mixed)] == [0.0375, 0.0398, 0.0793]
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "losses.md").read_text(encoding="utf-8")
    assert all(f"{value:.4f}" in page for value in (first, inside, mixed))


@pytest.mark.parametrize("loss", [ByteKL(), BPM()], ids=["byte-kl", "bpm"])
@pytest.mark.parametrize("listed", [1, 4])
def test_observed_token_with_zero_teacher_probability_gives_a_finite_loss(loss, listed):
    spellings = [b"", b"2", b"0", b"7"], [b"", b"2", b"0", b"7", b"20"]
    partition = make_byte_partition(*partition_vocabularies(*spellings, 4, 5))
    spans = np.array([[1, 3, 1, 2]], np.int32)
    ids = np.array([0, 1, 2], np.int32), np.array([0, 4], np.int32)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 4)))
    results = []
    for logprob in (-80.0, -np.inf):
        given = np.append(np.log([[0.3, 0.1, 0.2, 0.4]]), [[logprob]], 1)
        with np.errstate(invalid="ignore"):
            teacher_logprobs = dataclasses.replace(
                make_teacher_logprobs(given, np.array([1]), np.array([4]), listed), entropy=np.ones(1, np.float32)
            )
        results.append(
            loss_and_gradient(
                loss.build_cells(LossInputs(ids[0], np.arange(2), spans, ids[1], teacher_logprobs), partition), logits
            )
        )
    (value, gradient), (limit, limit_gradient) = results
    assert 0 <= limit <= value  # cells with a very small probability are in the remainder
    assert limit_gradient.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", [ByteKL(), BPM()], ids=["byte-kl", "bpm"])
def test_support_without_the_observed_token_is_a_corrupt_cache(loss):
    """The support does not list the observed token "20": no listed token begins with "2"."""
    spellings = [b"", b"2", b"0", b"7"], [b"", b"2", b"0", b"7", b"20"]
    teacher_logprobs = make_teacher_logprobs(np.log([[0.1, 0.1, 0.1, 0.1, 0.6]]), np.array([1]), np.array([4]), 1)
    spans = np.array([[1, 3, 1, 2]], np.int32)
    ids = np.array([0, 1, 2], np.int32), np.array([0, 4], np.int32)
    example = LossInputs(ids[0], np.arange(2), spans, ids[1], teacher_logprobs)
    partition = make_byte_partition(*partition_vocabularies(*spellings, 4, 5))
    loss.build_cells(example, partition)
    corrupt = dataclasses.replace(teacher_logprobs, ids=np.array([3], np.int32))
    with pytest.raises(CorruptError, match="do not match its text"):
        loss.build_cells(dataclasses.replace(example, teacher_logprobs=corrupt), partition)


# --- simple cases


def same_vocabulary_partition(spellings: list[bytes]) -> BytePartition:
    return make_byte_partition(*partition_vocabularies(spellings, spellings, len(spellings), len(spellings)))


@pytest.mark.parametrize("K", [1, 3, 9])
def test_byte_kl_equals_forward_kl_if_no_token_is_a_prefix_of_another(K):
    rng = np.random.default_rng(K)
    spellings = [b"", b"a", b"bb", b"bc", b"c\xc3", b"da", b"db", b"dca", b"dcb"]
    ids = rng.integers(0, 9, 12).astype(np.int32)
    positions = np.arange(1, 12)
    logprobs = torch.log_softmax(torch.from_numpy(rng.normal(size=(11, 9))), 1).numpy()
    spans = np.stack([positions, positions + 1, positions, positions + 1], 1).astype(np.int32)
    example = LossInputs(ids, np.arange(11), spans, ids, make_teacher_logprobs(logprobs, positions, ids[1:], K))
    logits = torch.from_numpy(rng.normal(size=(11, 9)))
    found, gradient = loss_and_gradient(ByteKL().build_cells(example, same_vocabulary_partition(spellings)), logits)
    expected, expected_gradient = loss_and_gradient(
        ForwardKL().build_cells(example, SparseProjection.identity(9).columns), logits
    )
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)


def test_tokens_with_other_first_bytes_are_not_alternatives():
    """The probability of a token that does not begin with the observed bytes does not affect the next item."""
    vocabularies = partition_vocabularies(STUDENT_SPELLINGS, TEACHER_SPELLINGS, 5, 4)
    teacher_ids = np.array([0, 1, 3], np.int32)
    teacher_logprobs = make_teacher_logprobs(
        np.log(np.array(TEACHER_PROBS) + 1e-9), np.array([1, 2]), teacher_ids[1:], 4
    )
    example = LossInputs(
        np.array([0, 1, 3], np.int32), np.arange(2), np.array([[2, 3, 2, 3]], np.int32), teacher_ids, teacher_logprobs
    )
    cells = ByteKL().build_cells(example, make_byte_partition(*vocabularies))
    assert cells.num_items == 1
    logits = torch.randn(2, 5, dtype=torch.float64)
    _, gradient = loss_and_gradient(cells, logits)
    assert gradient[0, [1, 4]].abs().min() > 1e-3
    assert gradient[0].sum().abs() < 1e-12
    torch.testing.assert_close(gradient[0, [0, 2, 3]], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(7, 40))
def test_prefix_range_contains_exactly_the_tokens_with_a_prefix(seed, size):
    spellings = random_spellings(np.random.default_rng(seed), size)
    side = sort_vocabulary(spellings, np.arange(size, dtype=np.int32), lambda pieces: [0] * len(pieces))
    for token, spelling in enumerate(spellings):
        for prefix_length in range(1, len(spelling) + 1):
            low, longer, high = prefix_range(side, token, prefix_length)
            with_prefix = [other for other in range(size) if spellings[other].startswith(spelling[:prefix_length])]
            assert sorted(side.token_ids[low:high].tolist()) == with_prefix
            assert all(len(spellings[other]) == prefix_length for other in side.token_ids[low:longer])
            assert all(len(spellings[other]) > prefix_length for other in side.token_ids[longer:high])


# --- trained tokenizers

TEXTS = {
    "numbers": "In 2017 she had 201 of 1,234,567 and 20.15 left.",
    "words": "The theatre's other side: something somewhere",
    "CJK": "日本語の文章と中文，한국어 문장",
    "emoji": "ok 😀👩‍👩‍👧 and 🏳️‍🌈!",
    "code": "def f(x):\n    return x  # tabs\t\tand    spaces\n\n\n",
    "accents": "naïve façade, Ünïcödé — 12,50 €",
    "odd bytes": "a\u0301 e\u0301 \u200b\ufeff x",
}


def example_of_document(
    student: Tokenizer, teacher: Tokenizer, document: Document, limit: int | None = None
) -> LossInputs:
    """Return a document as the loader passes it to a loss, with empty teacher log-probabilities."""
    (student_tokens,), (teacher_tokens,) = (
        tokenize_documents(student, [document]),
        tokenize_documents(teacher, [document]),
    )
    student_tokens = student_tokens if limit is None else student_tokens.truncate(limit)
    spans = align_sequences(student_tokens, teacher_tokens)
    rows = np.flatnonzero(student_tokens.train_mask).astype(np.int64) - 1
    positions = np.flatnonzero(teacher_tokens.train_mask).astype(np.int32)
    zeros = np.zeros(len(positions), np.float32)
    empty_logprobs = TeacherLogprobs(
        positions, np.zeros(len(positions) + 1, np.int64), positions[:0], zeros[:0], *[zeros] * 3
    )
    return LossInputs(
        student_tokens.ids, rows, spans[student_tokens.train_mask[spans[:, 1] - 1]], teacher_tokens.ids, empty_logprobs
    )


def tokens_near(rng: np.random.Generator, side: SortedVocabulary, token: int) -> list[int]:
    """Return a token, some tokens that begin with its bytes or its first byte, and random others."""
    found = [token, *rng.integers(0, len(side.sorted_indices), 4).tolist()]
    if side.sorted_indices[token] >= 0:
        for size in {
            1,
            int(side.byte_offsets[side.sorted_indices[token] + 1] - side.byte_offsets[side.sorted_indices[token]]),
        }:
            low, _, high = prefix_range(side, token, size)
            found += side.token_ids[rng.integers(low, high, 6)].tolist()
    return found


def with_random_teacher(
    rng: np.random.Generator, example: LossInputs, side: SortedVocabulary, remainder: float, *, sampled: bool = False
) -> LossInputs:
    """Return the example with a random teacher: a few tokens per position, with `sampled` half of them samples."""
    ids = [np.unique(tokens_near(rng, side, int(example.teacher_ids[at]))) for at in example.teacher_logprobs.positions]
    logprobs_per_position = [np.log(rng.dirichlet(np.ones(len(token_ids))) * (1 - remainder)) for token_ids in ids]
    offsets = np.cumsum([0, *map(len, ids)])
    logprobs = np.concatenate(logprobs_per_position).astype(np.float32)
    per_position = np.full(len(ids), remainder, np.float32)
    exact = None
    if sampled:  # the observed token is exact, and comes first
        observed = example.teacher_ids[example.teacher_logprobs.positions]
        ids = [
            np.concatenate([[token], token_ids[token_ids != token]])
            for token, token_ids in zip(observed, ids, strict=True)
        ]
        exact = np.array([(len(token_ids) + 1) // 2 for token_ids in ids])
    teacher_logprobs = TeacherLogprobs(
        example.teacher_logprobs.positions,
        offsets,
        np.concatenate(ids).astype(np.int32),
        logprobs,
        *[per_position] * 3,
        exact,
    )
    return dataclasses.replace(example, teacher_logprobs=teacher_logprobs)


def vocabulary_of(own: Tokenizer, other: Tokenizer, cells: np.ndarray, other_cells: np.ndarray) -> ReferenceVocabulary:
    def cell_of_piece(piece: bytes) -> int:
        if not piece:
            return -1
        if piece in other.vocabulary.token_of_bytes:
            return int(other_cells[other.vocabulary.token_of_bytes[piece]])
        if piece in own.vocabulary.token_of_bytes:
            return int(cells[own.vocabulary.token_of_bytes[piece]])
        ids = other.encode_bytes([piece])[0]
        return -1 if ids is None else int(other_cells[ids[0]])

    spellings = own.vocabulary.bytes_by_id + [b""] * (len(cells) - len(own.vocabulary.bytes_by_id))
    return ReferenceVocabulary(spellings, cells.tolist(), functools.lru_cache(None)(cell_of_piece))


def restricted_to(vocabulary: ReferenceVocabulary, possible: set[int]) -> ReferenceVocabulary:
    """Return the vocabulary without other tokens, since the reference enumerates all."""
    spellings = [spelling if token in possible else b"" for token, spelling in enumerate(vocabulary.spellings)]
    kept = [token for token, spelling in enumerate(vocabulary.spellings) if token in possible or not spelling]
    cells = [
        cell if token_id in possible or not vocabulary.spellings[token_id] else -1
        for token_id, cell in enumerate(vocabulary.cells)
    ]
    return ReferenceVocabulary(spellings, cells, vocabulary.cell_of_piece, kept)


def assert_matches_reference(
    student: Tokenizer,
    teacher: Tokenizer,
    partition: BytePartition,
    example: LossInputs,
    seed: int,
    remainder: float,
    *,
    sampled: bool = False,
) -> None:
    rng = np.random.default_rng(seed)
    example = with_random_teacher(rng, example, partition.teacher, remainder, sampled=sampled)
    student_cells, teacher_cells = partition.student.token_cells, partition.teacher.token_cells
    student_vocabulary, teacher_vocabulary = (
        vocabulary_of(student, teacher, student_cells, teacher_cells),
        vocabulary_of(teacher, student, teacher_cells, student_cells),
    )
    if len(student_cells) > 1000:
        possible = {
            candidate for token in example.student_ids for candidate in tokens_near(rng, partition.student, int(token))
        }
        listed_cells = teacher_cells[example.teacher_logprobs.ids]
        sizes = np.diff(partition.cell_token_offsets)
        possible |= {
            int(partition.cell_tokens[partition.cell_token_offsets[cell]])
            for cell in listed_cells[listed_cells >= 0]
            if sizes[cell]
        }
        student_vocabulary = restricted_to(student_vocabulary, possible)
        sorted_student = sort_vocabulary(
            student_vocabulary.spellings,
            np.array(student_vocabulary.cells, np.int32),
            lambda pieces: [*map(student_vocabulary.cell_of_piece, pieces)],
        )
        partition = BytePartition.from_vocabularies(sorted_student, partition.teacher)
    logits = torch.from_numpy(rng.normal(0, 2, (len(example.positions), len(student_cells))))
    if student_vocabulary.possible_tokens:
        logits[:, ~np.isin(np.arange(len(student_cells)), student_vocabulary.possible_tokens)] = -80.0
    cells = ByteKL().build_cells(example, partition)
    leaf = logits.requires_grad_()
    expected = reference_byte_kl(example, student_vocabulary, teacher_vocabulary, torch.softmax(leaf, 1))
    assert cells.num_items == len(expected)
    (expected_gradient,) = torch.autograd.grad(torch.stack(expected).sum(), leaf)
    value, gradient = loss_and_gradient(cells, logits.detach(), chunk=7)
    # test_sampled_values.py tests the corrections.
    corrections = 0.0 if cells.corrections is None else float(cells.corrections.sum())
    assert value - corrections == pytest.approx(float(sum(expected).detach()), rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def family_partitions(families):
    """Return a function that returns the tokenizers of two families and their byte partition."""
    tokenizers = {name: Tokenizer(folder) for name, folder in families.items()}

    @functools.cache
    def partition_of_pair(student: str, teacher: str) -> tuple[Tokenizer, Tokenizer, BytePartition]:
        return tokenizers[student], tokenizers[teacher], build_byte_partition(tokenizers[student], tokenizers[teacher])

    return partition_of_pair


SMALL_PAIRS = [("student", "teacher"), ("teacher", "student"), ("student", "student"), ("metaspace", "teacher"),
               ("student", "metaspace"), ("teacher", "word-piece"), ("composing", "student")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("student", "teacher"), SMALL_PAIRS)
@pytest.mark.parametrize("kind", ["numbers", "emoji", "accents"])
def test_byte_kl_matches_the_reference_with_small_tokenizers(family_partitions, student, teacher, kind):
    student_tokenizer, teacher_tokenizer, partition = family_partitions(student, teacher)
    example = example_of_document(student_tokenizer, teacher_tokenizer, Document.from_text(TEXTS[kind]))
    for seed, (remainder, sampled) in enumerate(((0.1, False), (0.0, False), (0.0, True))):
        assert_matches_reference(
            student_tokenizer, teacher_tokenizer, partition, example, seed, remainder, sampled=sampled
        )


@pytest.mark.slow
@pytest.mark.parametrize(("student", "teacher"), SMALL_PAIRS)
def test_linear_scan_and_search_find_the_same_cells(family_partitions, student, teacher, monkeypatch):
    student_tokenizer, teacher_tokenizer, partition = family_partitions(student, teacher)
    example = example_of_document(student_tokenizer, teacher_tokenizer, Document.from_text(TEXTS["numbers"]))
    rng = np.random.default_rng(0)
    for remainder in (0.1, 0.0):
        with_teacher = with_random_teacher(rng, example, partition.teacher, remainder)
        found = []
        for scan_limit in (0, 1 << 40):
            patched_fill = functools.partial(byte_kl.fill_byte_cells, scan_limit=scan_limit)
            with monkeypatch.context() as patch:
                patch.setattr(byte_kl, "fill_byte_cells", patched_fill)
                cells = ByteKL().build_cells(with_teacher, partition)
            arrays = (cells.cell_offsets, cells.teacher_probs, cells.entry_offsets, cells.first_members)
            runs = (cells.run_offsets, cells.firsts, cells.stops)
            found.append([array.numpy().tobytes() for array in (*arrays, *runs)])
        assert found[0] == found[1]


@pytest.mark.parametrize("prompt_length", [7, 14, 15])
def test_byte_kl_matches_the_reference_after_a_prompt_that_splits_a_token(family_partitions, prompt_length):
    text = "Anna has 1234 apples and gives 17 to Bert."
    student_tokenizer, teacher_tokenizer, partition = family_partitions("student", "teacher")
    example = example_of_document(
        student_tokenizer, teacher_tokenizer, Document.from_completion(text[:prompt_length], text[prompt_length:])
    )
    assert 0 < len(example.positions) < len(example.student_ids) - 1
    assert_matches_reference(student_tokenizer, teacher_tokenizer, partition, example, prompt_length, 0.1)


@pytest.fixture(scope="module")
def real_partitions(real_data):
    tokenizers = {name: Tokenizer(real_data / "tokenizers" / name) for name in ("llama3", "qwen", "mistral-v1")}

    @functools.cache
    def partition_of_pair(student: str, teacher: str) -> tuple[Tokenizer, Tokenizer, BytePartition]:
        return tokenizers[student], tokenizers[teacher], build_byte_partition(tokenizers[student], tokenizers[teacher])

    return partition_of_pair


# The reference enumerates the bytes of whole vocabularies: almost a minute per text.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("student", "teacher", "kind"),
    [
        pytest.param(*pair, kind, marks=[] if (pair, kind) == (("llama3", "qwen"), "numbers") else pytest.mark.long)
        for pair in (("llama3", "qwen"), ("qwen", "llama3"), ("llama3", "mistral-v1"))
        for kind in TEXTS
    ],
)
def test_byte_kl_matches_the_reference_with_real_tokenizers(real_partitions, student, teacher, kind):
    student_tokenizer, teacher_tokenizer, partition = real_partitions(student, teacher)
    document = Document.from_text(TEXTS[kind])
    for seed, (limit, remainder) in enumerate([(None, 0.1), (9, 0.0), (None, None)]):
        example = example_of_document(student_tokenizer, teacher_tokenizer, document, limit)
        assert_matches_reference(
            student_tokenizer, teacher_tokenizer, partition, example, seed, remainder or 0.0, sampled=remainder is None
        )


def test_a_number_in_one_student_token_is_compared_at_each_teacher_digit(real_partitions):
    student_tokenizer, teacher_tokenizer, partition = real_partitions("llama3", "qwen")
    example = example_of_document(student_tokenizer, teacher_tokenizer, Document.from_text("x 201 y"))
    student_vocabulary = vocabulary_of(
        student_tokenizer, teacher_tokenizer, partition.student.token_cells, partition.teacher.token_cells
    )
    teacher_vocabulary = vocabulary_of(
        teacher_tokenizer, student_tokenizer, partition.teacher.token_cells, partition.student.token_cells
    )
    inside = [(student_vocabulary.spellings[example.student_ids[s]][:prefix_length], teacher_boundary)
              for (s, prefix_length, student_boundary), (_, _, teacher_boundary)
              in reference_items(example, student_vocabulary, teacher_vocabulary) if not student_boundary]  # fmt: skip
    assert inside == [(b"2", True), (b"20", True)]
