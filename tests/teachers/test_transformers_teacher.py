"""What a teacher says is what transformers' own forward pass says."""

from __future__ import annotations

from pathlib import Path

import material
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.models.causal_lm import load_causal_lm
from xtk.teachers.transformers import BLOCK, TransformersTeacher, batches_by_length, top_values
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence, sequences
from xtk.tokens.signal import Signal
from xtk.tokens.tokenizer import Tokenizer

TEXTS = [*material.sentences(9, seed=8), "a", "", "Anna", " ".join(material.sentences(6, seed=9))]


def read(folder: Path, texts: list[str] = TEXTS) -> list[Sequence]:
    documents = [Document.of_text(text) for text in texts]
    return sequences(Tokenizer(folder), [*documents, Document.of_completion("Anna has 12 ", "apples left.")])


def said_plainly(model: object, document: Sequence) -> np.ndarray:
    """Log-probabilities [P, U] of the trained tokens, of the plain forward pass of one document."""
    positions = np.flatnonzero(document.trained)
    if not len(positions):
        return np.zeros((0, 1))
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(document.ids.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits.double(), -1)[positions - 1].numpy()


def assert_says(signal: Signal, document: Sequence, expected: np.ndarray, K: int, tolerance: float) -> None:
    assert signal.positions.tolist() == np.flatnonzero(document.trained).tolist()
    if not len(signal):
        return
    assert signal.support_ids.shape == (len(signal), K)
    best = -np.sort(-expected, 1)[:, :K]
    close = {"rtol": 0, "atol": tolerance}
    np.testing.assert_allclose(signal.support_logprobs, best, **close)
    np.testing.assert_allclose(np.take_along_axis(expected, signal.support_ids.astype(np.int64), 1), best, **close)
    assert all(len(set(row)) == K for row in signal.support_ids.tolist())
    np.testing.assert_allclose(signal.tail_mass, 1 - np.exp(best).sum(1), **close)
    realised = document.ids[signal.positions].astype(np.int64)
    np.testing.assert_allclose(
        signal.realised_logprobs, np.take_along_axis(expected, realised[:, None], 1)[:, 0], **close
    )
    np.testing.assert_allclose(signal.entropy, -(np.exp(expected) * expected).sum(1), **close)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 40 * BLOCK),
    top_k=st.integers(1, 40),
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_top_values_are_those_of_topk(rows, width, top_k, ties, seed):
    torch.manual_seed(seed)
    logits = torch.randint(0, 5, (rows, width)).float() if ties else torch.randn(rows, width)
    top_k = min(top_k, width)
    values, ids = top_values(logits, top_k)
    assert torch.equal(values, logits.topk(top_k, 1).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize("width", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 1, 151_936, 128_256 + 7])
@pytest.mark.parametrize("top_k", [1, 32, None])
def test_top_values_are_those_of_topk_at_odd_and_at_real_widths(width, top_k):
    logits = torch.randn(3, width)
    logits[1] = -torch.inf
    logits[1, -1] = 0.5
    values, ids = top_values(logits, min(top_k or width, width))
    assert torch.equal(values, logits.topk(values.shape[1], 1).values)
    assert torch.equal(logits.gather(1, ids), values)


def test_top_values_of_a_slice_of_rows_are_its_own():
    logits = torch.randn(7, 20 * BLOCK + 5)
    values, ids = top_values(logits[3:5], 2)
    assert torch.equal(values, logits[3:5].topk(2, 1).values)
    assert torch.equal(logits[3:5].gather(1, ids), values)


@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize("top_k", [1, 16, 10_000])
def test_a_teacher_says_what_the_plain_forward_pass_says(pair, side, top_k):
    folder = getattr(pair, side)
    teacher = TransformersTeacher(folder, dtype="float32", batch_tokens=256)
    model = load_causal_lm(folder).eval()
    documents = read(folder)
    for document, signal in zip(documents, teacher.score(documents, top_k), strict=True):
        assert_says(signal, document, said_plainly(model, document), min(top_k, teacher.width), 1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 64, 100_000])
def test_what_a_teacher_says_does_not_depend_on_the_batch_or_its_padding(pair, batch_tokens):
    documents = read(pair.teacher)
    one_by_one = TransformersTeacher(pair.teacher, dtype="float32", batch_tokens=1)
    teacher = TransformersTeacher(pair.teacher, dtype="float32", batch_tokens=batch_tokens)
    for expected, found in zip(
        [one_by_one.score([document], 8)[0] for document in documents], teacher.score(documents, 8), strict=True
    ):
        assert found.positions.tolist() == expected.positions.tolist()
        for name in ("support_logprobs", "tail_mass", "realised_logprobs", "entropy"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-5)


def test_batches_hold_every_document_once_and_no_more_tokens_than_asked_for():
    lengths = [3, 50, 0, 7, 7, 120, 1]
    batches = list(batches_by_length(lengths, 60))
    assert sorted(number for batch in batches for number in batch) == list(range(7))
    assert all(len(batch) == 1 or len(batch) * max(lengths[at] for at in batch) <= 60 for batch in batches)


def test_the_cached_signal_is_what_transformers_says(pair, cache):
    model = load_causal_lm(pair.teacher).eval()
    tokenizer = Tokenizer(pair.teacher)
    rows = list(TeacherCache(cache))
    assert len(rows) == 40
    for row in rows:
        (document,) = sequences(tokenizer, [row.document])
        assert row.tokens.ids.tolist() == document.ids.tolist()
        assert_says(row.signal, document, said_plainly(model, document), 16, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_smaller_dtype_stays_near(pair, dtype):
    documents = read(pair.teacher)
    exact = TransformersTeacher(pair.teacher, dtype="float32", batch_tokens=512).score(documents, 4)
    near = TransformersTeacher(pair.teacher, dtype=dtype, batch_tokens=512).score(documents, 4)
    for one, other in zip(near, exact, strict=True):
        np.testing.assert_allclose(one.entropy, other.entropy, atol=0.1)


def test_a_teacher_without_numbers_is_refused(pair, tmp_path):
    model = load_causal_lm(pair.teacher)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    model.save_pretrained(tmp_path)
    teacher = TransformersTeacher(tmp_path, dtype="float32", batch_tokens=512)
    with pytest.raises(XtkError, match="log-probabilities that are no numbers"):
        teacher.score(read(pair.teacher), 4)
