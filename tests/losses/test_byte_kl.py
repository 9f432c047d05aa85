"""byte-kl against a twin that enumerates bytes: by hand, and with the tokenizers that people have."""

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
from reference_byte_kl import Words, plain_byte_kl, plain_items
from reference_losses import signal_of
from small_vocabularies import draw_spellings, next_bytes_of, partition_of
from torch import Tensor

from xtk.errors import CorruptError
from xtk.losses import byte_kl
from xtk.losses.byte_kl import ByteKL
from xtk.losses.byte_prefix_marginalization import BPM
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import LossInputs
from xtk.losses.same_tokenizer_losses import ForwardKL
from xtk.losses.token_boundaries_numba import prefix_range
from xtk.models.output_head import OutputHead
from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_byte_partition import (
    BytePartition,
    SortedVocabulary,
    build_byte_partition,
    sort_vocabulary,
)
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import TeacherLogprobs
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

CPU = torch.device("cpu")


def loss_of(cells: LossCells, logits: Tensor, chunk: int = 3) -> tuple[float, Tensor]:
    """The sum over items, and its gradient."""
    leaf = logits.clone().requires_grad_()
    total, _ = fused_loss(leaf, OutputHead(None), [cells.to(CPU, 1.0)], chunk)
    total.backward()
    return float(total.detach()), leaf.grad


# --- by hand: the example of docs/explanation/losses.md

OURS, THEIRS = [b"", b"2", b"0", b"7", b"20"], [b"", b"2", b"0", b"7"]
TEACHER = [[0.0, 0.8, 0.1, 0.1], [0.0, 0.05, 0.75, 0.2]]
STUDENT = [[0.0, 0.1, 0.1, 0.2, 0.6], [0.0, 0.05, 0.05, 0.9, 0.0]]


def by_hand(student_ids: list[int]) -> list[float]:
    """The divergences at the offsets of "20" or "27", that the teacher reads as two digits."""
    words = partition_of(OURS, THEIRS, 5, 4)
    size = len(student_ids)
    theirs = np.array([0, 1, 2 if student_ids[-1] == 4 else 3], np.int32)
    signal = signal_of(np.log(np.maximum(TEACHER, 1e-30)), np.array([1, 2]), theirs[1:], 4)
    spans = [[1, 2, 1, 3]] if size == 1 else [[1, 2, 1, 2], [2, 3, 2, 3]]
    example = LossInputs(
        np.array([0, *student_ids], np.int32), np.arange(size), np.array(spans, np.int32), theirs, signal
    )
    logits = torch.tensor(STUDENT[:size], dtype=torch.float64).clamp_min(1e-30).log()
    total, _ = loss_of(ByteKL().build_cells(example, next_bytes_of(*words)), logits)
    items = [float(item.detach()) for item in plain_byte_kl(example, *words, logits.exp())]
    assert total == pytest.approx(sum(items), rel=1e-6)
    return items


def kl(teacher: list[float], student: list[float]) -> float:
    return sum(t * math.log(t / s) for t, s in zip(teacher, student, strict=True))


def test_the_example_of_the_documentation_comes_out():
    first = kl([0.8, 0.1, 0.1], [0.7, 0.1, 0.2])
    inside = kl([0.75, 0.25], [6 / 7, 1 / 7])
    mixed = kl([0.05, 0.75, 0.2], [0.05 / 7, 6 / 7 + 0.05 / 7, 0.9 / 7])
    assert by_hand([4]) == pytest.approx([first, inside])
    assert by_hand([1, 3]) == pytest.approx([first, mixed])
    assert [round(value, 4) for value in (first, inside, mixed)] == [0.0375, 0.0398, 0.0793]
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "losses.md").read_text(encoding="utf-8")
    assert all(f"{value:.4f}" in page for value in (first, inside, mixed))


@pytest.mark.parametrize("rule", [ByteKL(), BPM()], ids=["byte-kl", "bpm"])
@pytest.mark.parametrize("listed", [1, 4])
def test_an_observed_token_that_the_teacher_excludes_has_no_cell_but_a_value(rule, listed):
    spellings = [b"", b"2", b"0", b"7"], [b"", b"2", b"0", b"7", b"20"]
    partition = next_bytes_of(*partition_of(*spellings, 4, 5))
    spans = np.array([[1, 3, 1, 2]], np.int32)
    ids = np.array([0, 1, 2], np.int32), np.array([0, 4], np.int32)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 4)))
    found = []
    for logprob in (-80.0, -np.inf):
        given = np.append(np.log([[0.3, 0.1, 0.2, 0.4]]), [[logprob]], 1)
        with np.errstate(invalid="ignore"):
            signal = dataclasses.replace(
                signal_of(given, np.array([1]), np.array([4]), listed), entropy=np.ones(1, np.float32)
            )
        found.append(
            loss_of(rule.build_cells(LossInputs(ids[0], np.arange(2), spans, ids[1], signal), partition), logits)
        )
    (value, gradient), (limit, of_limit) = found
    assert 0 <= limit <= value  # cells of the small probability are in the remainder
    assert of_limit.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("rule", [ByteKL(), BPM()], ids=["byte-kl", "bpm"])
def test_a_teacher_whose_own_token_has_no_probability_is_a_corrupt_cache(rule):
    """The teacher's token "20" is not among those that its distribution lists: nothing begins with "2"."""
    spellings = [b"", b"2", b"0", b"7"], [b"", b"2", b"0", b"7", b"20"]
    signal = signal_of(np.log([[0.1, 0.1, 0.1, 0.1, 0.6]]), np.array([1]), np.array([4]), 1)
    spans = np.array([[1, 3, 1, 2]], np.int32)
    ids = np.array([0, 1, 2], np.int32), np.array([0, 4], np.int32)
    example = LossInputs(ids[0], np.arange(2), spans, ids[1], signal)
    partition = next_bytes_of(*partition_of(*spellings, 4, 5))
    rule.build_cells(example, partition)
    wrong = dataclasses.replace(signal, ids=np.array([3], np.int32))
    with pytest.raises(CorruptError, match="do not match its text"):
        rule.build_cells(dataclasses.replace(example, teacher_logprobs=wrong), partition)


# --- what it is where all is simple


def one_side(spellings: list[bytes]) -> BytePartition:
    return next_bytes_of(*partition_of(spellings, spellings, len(spellings), len(spellings)))


@pytest.mark.parametrize("K", [1, 3, 9])
def test_it_is_forward_kl_where_no_token_begins_like_another_and_both_have_one_tokenizer(K):
    draw = np.random.default_rng(K)
    spellings = [b"", b"a", b"bb", b"bc", b"c\xc3", b"da", b"db", b"dca", b"dcb"]
    ids = draw.integers(0, 9, 12).astype(np.int32)
    positions = np.arange(1, 12)
    said = torch.log_softmax(torch.from_numpy(draw.normal(size=(11, 9))), 1).numpy()
    spans = np.stack([positions, positions + 1, positions, positions + 1], 1).astype(np.int32)
    example = LossInputs(ids, np.arange(11), spans, ids, signal_of(said, positions, ids[1:], K))
    logits = torch.from_numpy(draw.normal(size=(11, 9)))
    found, gradient = loss_of(ByteKL().build_cells(example, one_side(spellings)), logits)
    expected, other = loss_of(ForwardKL().build_cells(example, SparseProjection.identity(9).columns), logits)
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-7)


def test_what_ends_is_no_alternative_to_what_goes_on_with_other_bytes():
    """The chance of a token that does not begin like the one that stands there changes nothing behind it."""
    words = partition_of(OURS, THEIRS, 5, 4)
    theirs = np.array([0, 1, 3], np.int32)
    signal = signal_of(np.log(np.array(TEACHER) + 1e-9), np.array([1, 2]), theirs[1:], 4)
    example = LossInputs(
        np.array([0, 1, 3], np.int32), np.arange(2), np.array([[2, 3, 2, 3]], np.int32), theirs, signal
    )
    cells = ByteKL().build_cells(example, next_bytes_of(*words))
    assert cells.num_items == 1
    logits = torch.randn(2, 5, dtype=torch.float64)
    _, gradient = loss_of(cells, logits)
    assert gradient[0, [1, 4]].abs().min() > 1e-3
    assert gradient[0].sum().abs() < 1e-12
    torch.testing.assert_close(gradient[0, [0, 2, 3]], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(7, 40))
def test_tokens_that_begin_alike_are_one_range(seed, size):
    spellings = draw_spellings(np.random.default_rng(seed), size)
    side = sort_vocabulary(spellings, np.arange(size, dtype=np.int32), lambda pieces: [0] * len(pieces))
    for token, spelling in enumerate(spellings):
        for cut in range(1, len(spelling) + 1):
            low, longer, high = prefix_range(side, token, cut)
            alike = [other for other in range(size) if spellings[other].startswith(spelling[:cut])]
            assert sorted(side.token_ids[low:high].tolist()) == alike
            assert all(len(spellings[other]) == cut for other in side.token_ids[low:longer])
            assert all(len(spellings[other]) > cut for other in side.token_ids[longer:high])


# --- tokenizers that people have

TEXTS = {
    "numbers": "In 2017 she had 201 of 1,234,567 and 20.15 left.",
    "words": "The theatre's other side: something somewhere",
    "CJK": "日本語の文章と中文，한국어 문장",
    "emoji": "ok 😀👩‍👩‍👧 and 🏳️‍🌈!",
    "code": "def f(x):\n    return x  # tabs\t\tand    spaces\n\n\n",
    "accents": "naïve façade, Ünïcödé — 12,50 €",
    "odd bytes": "a\u0301 e\u0301 \u200b\ufeff x",
}


def read_by_both(student: Tokenizer, teacher: Tokenizer, document: Document, limit: int | None = None) -> LossInputs:
    """A document as the loader hands it to a loss, without the teacher's word on it."""
    (ours,), (theirs,) = tokenize_documents(student, [document]), tokenize_documents(teacher, [document])
    ours = ours if limit is None else ours.truncate(limit)
    spans = align_sequences(ours, theirs)
    rows = np.flatnonzero(ours.train_mask).astype(np.int64) - 1
    positions = np.flatnonzero(theirs.train_mask).astype(np.int32)
    nothing = np.zeros(len(positions), np.float32)
    silent = TeacherLogprobs(
        positions, np.zeros(len(positions) + 1, np.int64), positions[:0], nothing[:0], *[nothing] * 3
    )
    return LossInputs(ours.ids, rows, spans[ours.train_mask[spans[:, 1] - 1]], theirs.ids, silent)


def near(draw: np.random.Generator, side: SortedVocabulary, token: int) -> list[int]:
    """A token, some that begin with it, some that begin with its first byte, some others."""
    found = [token, *draw.integers(0, len(side.sorted_indices), 4).tolist()]
    if side.sorted_indices[token] >= 0:
        for size in {
            1,
            int(side.byte_offsets[side.sorted_indices[token] + 1] - side.byte_offsets[side.sorted_indices[token]]),
        }:
            low, _, high = prefix_range(side, token, size)
            found += side.token_ids[draw.integers(low, high, 6)].tolist()
    return found


def with_a_teacher(
    draw: np.random.Generator, example: LossInputs, side: SortedVocabulary, tail: float, *, drawn: bool = False
) -> LossInputs:
    """The same with a teacher who names a few tokens at each position, and leaves a tail; half of them are drawn."""
    ids = [np.unique(near(draw, side, int(example.teacher_ids[at]))) for at in example.teacher_logprobs.positions]
    said = [np.log(draw.dirichlet(np.ones(len(some))) * (1 - tail)) for some in ids]
    offsets = np.cumsum([0, *map(len, ids)])
    logprobs = np.concatenate(said).astype(np.float32)
    of_all = np.full(len(ids), tail, np.float32)
    exact = None
    if drawn:  # the token that stands there is exact, and comes first
        standing = example.teacher_ids[example.teacher_logprobs.positions]
        ids = [np.concatenate([[token], some[some != token]]) for token, some in zip(standing, ids, strict=True)]
        exact = np.array([(len(some) + 1) // 2 for some in ids])
    signal = TeacherLogprobs(
        example.teacher_logprobs.positions,
        offsets,
        np.concatenate(ids).astype(np.int32),
        logprobs,
        *[of_all] * 3,
        exact,
    )
    return dataclasses.replace(example, teacher_logprobs=signal)


def words_of(own: Tokenizer, other: Tokenizer, cells: np.ndarray, other_cells: np.ndarray) -> Words:
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
    return Words(spellings, cells.tolist(), functools.lru_cache(None)(cell_of_piece))


def only(words: Words, possible: set[int]) -> Words:
    """The same with no other tokens, for the twin looks at each."""
    spellings = [spelling if token in possible else b"" for token, spelling in enumerate(words.spellings)]
    kept = [token for token, spelling in enumerate(words.spellings) if token in possible or not spelling]
    cells = [cell if at in possible or not words.spellings[at] else -1 for at, cell in enumerate(words.cells)]
    return Words(spellings, cells, words.cell_of_piece, kept)


def assert_it_is_what_its_twin_says(
    student: Tokenizer,
    teacher: Tokenizer,
    ground: BytePartition,
    example: LossInputs,
    seed: int,
    tail: float,
    *,
    drawn: bool = False,
) -> None:
    draw = np.random.default_rng(seed)
    example = with_a_teacher(draw, example, ground.teacher, tail, drawn=drawn)
    ours, theirs = ground.student.token_cells, ground.teacher.token_cells
    words, others = words_of(student, teacher, ours, theirs), words_of(teacher, student, theirs, ours)
    if len(ours) > 1000:
        possible = {one for token in example.student_ids for one in near(draw, ground.student, int(token))}
        named = theirs[example.teacher_logprobs.ids]
        sizes = np.diff(ground.cell_token_offsets)
        possible |= {
            int(ground.cell_tokens[ground.cell_token_offsets[cell]]) for cell in named[named >= 0] if sizes[cell]
        }
        words = only(words, possible)
        side = sort_vocabulary(
            words.spellings, np.array(words.cells, np.int32), lambda pieces: [*map(words.cell_of_piece, pieces)]
        )
        ground = BytePartition.from_vocabularies(side, ground.teacher)
    logits = torch.from_numpy(draw.normal(0, 2, (len(example.positions), len(ours))))
    if words.possible:
        logits[:, ~np.isin(np.arange(len(ours)), words.possible)] = -80.0
    cells = ByteKL().build_cells(example, ground)
    leaf = logits.requires_grad_()
    expected = plain_byte_kl(example, words, others, torch.softmax(leaf, 1))
    assert cells.num_items == len(expected)
    (gradient,) = torch.autograd.grad(torch.stack(expected).sum(), leaf)
    found, exact = loss_of(cells, logits.detach(), chunk=7)
    corrections = 0.0 if cells.corrections is None else float(cells.corrections.sum())  # of test_sampled_values.py
    assert found - corrections == pytest.approx(float(sum(expected).detach()), rel=1e-6)
    torch.testing.assert_close(exact, gradient, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def of_families(families):
    """Tokenizers of some families, and what each pair of them compares on."""
    tokenizers = {name: Tokenizer(folder) for name, folder in families.items()}

    @functools.cache
    def ground(student: str, teacher: str) -> tuple[Tokenizer, Tokenizer, BytePartition]:
        return tokenizers[student], tokenizers[teacher], build_byte_partition(tokenizers[student], tokenizers[teacher])

    return ground


SMALL_PAIRS = [("student", "teacher"), ("teacher", "student"), ("student", "student"), ("metaspace", "teacher"),
               ("student", "metaspace"), ("teacher", "word-piece"), ("composing", "student")]  # fmt: skip


@pytest.mark.parametrize(("student", "teacher"), SMALL_PAIRS)
@pytest.mark.parametrize("kind", ["numbers", "emoji", "accents"])
def test_a_text_in_small_tokenizers_costs_what_the_twin_says(of_families, student, teacher, kind):
    ours, theirs, ground = of_families(student, teacher)
    example = read_by_both(ours, theirs, Document.from_text(TEXTS[kind]))
    for seed, (tail, drawn) in enumerate(((0.1, False), (0.0, False), (0.0, True))):
        assert_it_is_what_its_twin_says(ours, theirs, ground, example, seed, tail, drawn=drawn)


@pytest.mark.parametrize(("student", "teacher"), SMALL_PAIRS)
def test_tokens_that_are_searched_are_those_that_are_found_one_by_one(of_families, student, teacher, monkeypatch):
    ours, theirs, ground = of_families(student, teacher)
    example = read_by_both(ours, theirs, Document.from_text(TEXTS["numbers"]))
    draw = np.random.default_rng(0)
    for tail in (0.1, 0.0):
        said = with_a_teacher(draw, example, ground.teacher, tail)
        found = []
        for scan_limit in (0, 1 << 40):
            filled = functools.partial(byte_kl.fill_byte_cells, scan_limit=scan_limit)
            with monkeypatch.context() as patch:
                patch.setattr(byte_kl, "fill_byte_cells", filled)
                cells = ByteKL().build_cells(said, ground)
            runs = (cells.run_offsets, cells.firsts, cells.stops)
            found.append(
                [array.numpy().tobytes() for array in (cells.cell_offsets, cells.teacher_probs, cells.tokens, *runs)]
            )
        assert found[0] == found[1]


@pytest.mark.parametrize("cut", [7, 14, 15])
def test_behind_a_prompt_that_ends_inside_of_a_token_it_is_what_the_twin_says(of_families, cut):
    text = "Anna has 1234 apples and gives 17 to Bert."
    ours, theirs, ground = of_families("student", "teacher")
    example = read_by_both(ours, theirs, Document.from_completion(text[:cut], text[cut:]))
    assert 0 < len(example.positions) < len(example.student_ids) - 1
    assert_it_is_what_its_twin_says(ours, theirs, ground, example, cut, 0.1)


@pytest.fixture(scope="module")
def real_grounds(real_data):
    tokenizers = {name: Tokenizer(real_data / "tokenizers" / name) for name in ("llama3", "qwen", "mistral-v1")}

    @functools.cache
    def ground(student: str, teacher: str) -> tuple[Tokenizer, Tokenizer, BytePartition]:
        return tokenizers[student], tokenizers[teacher], build_byte_partition(tokenizers[student], tokenizers[teacher])

    return ground


# The twin enumerates bytes of whole vocabularies: most of a minute a text.
@pytest.mark.parametrize(
    ("student", "teacher", "kind"),
    [
        pytest.param(*pair, kind, marks=[] if (pair, kind) == (("llama3", "qwen"), "numbers") else pytest.mark.long)
        for pair in (("llama3", "qwen"), ("qwen", "llama3"), ("llama3", "mistral-v1"))
        for kind in TEXTS
    ],
)
def test_a_text_in_real_tokenizers_costs_what_the_twin_says(real_grounds, student, teacher, kind):
    ours, theirs, ground = real_grounds(student, teacher)
    document = Document.from_text(TEXTS[kind])
    for seed, (limit, tail) in enumerate([(None, 0.1), (9, 0.0), (None, None)]):
        example = read_by_both(ours, theirs, document, limit)
        assert_it_is_what_its_twin_says(ours, theirs, ground, example, seed, tail or 0.0, drawn=tail is None)


def test_a_number_of_one_token_is_asked_of_at_each_digit_of_the_teacher(real_grounds):
    ours, theirs, ground = real_grounds("llama3", "qwen")
    example = read_by_both(ours, theirs, Document.from_text("x 201 y"))
    words = words_of(ours, theirs, ground.student.token_cells, ground.teacher.token_cells)
    others = words_of(theirs, ours, ground.teacher.token_cells, ground.student.token_cells)
    inside = [(words.spellings[example.student_ids[s]][:cut], boundary)
              for (s, cut, here), (_, _, boundary) in plain_items(example, words, others) if not here]  # fmt: skip
    assert inside == [(b"2", True), (b"20", True)]
