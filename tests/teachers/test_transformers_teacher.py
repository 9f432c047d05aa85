"""The transformers teacher: log-probabilities equal those of the plain forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.teacher_logprobs import Support
from xtk.errors import XtkError
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.logprob_checks import check_scored_document
from xtk.teachers.transformers import (
    BLOCK_SIZE,
    TransformersTeacher,
    batches_by_length,
    blockwise_top_k,
    systematic_sample,
)
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer

TEXTS = [*small_inputs.sentences(9, seed=8), "a", "", "Anna", " ".join(small_inputs.sentences(6, seed=9))]


def tokenized(folder: Path, texts: list[str] = TEXTS) -> list[TokenSequence]:
    documents = [Document.from_text(text) for text in texts]
    return tokenize_documents(Tokenizer(folder), [*documents, Document.from_completion("Anna has 12 ", "apples left.")])


def plain_logprobs(model: object, document: TokenSequence) -> np.ndarray:
    """Return the log-probabilities [P, U] of the trained tokens, from the plain forward pass of one document."""
    positions = np.flatnonzero(document.train_mask)
    if not len(positions):
        return np.zeros((0, 1))
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(document.ids.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits.double(), -1)[positions - 1].numpy()


def open_teacher(
    folder: Path, support: Support, *, dtype: str = "float32", batch_tokens: int = 512
) -> TransformersTeacher:
    tokenizer = Tokenizer(folder)
    return TransformersTeacher(
        TeacherConfig(
            ModelRef(folder, dtype=dtype, name=str(folder)), tokenizer, batch_tokens=batch_tokens, support=support
        )
    )


def top_k_support(k: int) -> Support:
    return Support("top-k", top_k=k)


def top_ids(logprobs: np.ndarray, K: int) -> set[int]:
    return set(np.argsort(-logprobs, kind="stable")[:K].tolist())


def expected_exact_ids(support: Support, logprobs: np.ndarray, given: np.ndarray | None) -> set[int]:
    """Return the ids that are exact, in addition to the observed one, of one distribution."""
    if support.kind == "top-p":
        order = np.argsort(-logprobs)[: support.top_k]
        before = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        return set(order[before < support.top_p].tolist())
    if support.kind == "candidates":
        assert given is not None
        return {token for token in given.tolist() if token >= 0}
    return top_ids(logprobs, support.top_k)


def assert_matches(scores, document, expected, support, tolerance, given=None) -> None:
    assert scores.positions.tolist() == np.flatnonzero(document.train_mask).tolist()
    close = {"rtol": 0, "atol": tolerance}
    for at, position in enumerate(scores.positions.tolist()):
        ids = scores.ids[scores.offsets[at] : scores.offsets[at + 1]]
        expected_ids = expected_exact_ids(support, expected[at], None if given is None else given[at]) | {
            int(document.ids[position])
        }
        assert ids.tolist() == sorted(set(ids.tolist()))
        # Of tokens with nearly equal probabilities, any may be stored.
        np.testing.assert_allclose(np.sort(expected[at][ids]), np.sort(expected[at][list(expected_ids)]), **close)
        np.testing.assert_allclose(
            scores.logprobs[scores.offsets[at] : scores.offsets[at + 1]], expected[at][ids], **close
        )
        assert abs(scores.remainder_mass[at] - (1 - np.exp(expected[at][ids]).sum())) < tolerance
        for number in range(support.num_sample_sets):
            first, stop = scores.sample_offsets[at * support.num_sample_sets + number :][:2]
            sampled = scores.sample_ids[first:stop]
            assert sampled.tolist() == sorted(set(sampled.tolist()) - set(ids.tolist()))
            assert scores.sample_counts[first:stop].sum() == (
                support.num_samples if len(ids) < len(expected[at]) else 0
            )
            # Systematic sampling: the count of an id differs by less than 1 from its mean.
            mean = support.num_samples * np.exp(expected[at][sampled]) / max(1e-30, 1 - np.exp(expected[at][ids]).sum())
            assert (
                np.abs(scores.sample_counts[first:stop] - mean) < 1 + 1e-3 * mean + support.num_samples * tolerance
            ).all()
    if len(scores):
        observed = document.ids[scores.positions].astype(np.int64)
        np.testing.assert_allclose(
            scores.observed_logprobs, np.take_along_axis(expected, observed[:, None], 1)[:, 0], **close
        )
        np.testing.assert_allclose(scores.entropy, -(np.exp(expected) * expected).sum(1), **close)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 40 * BLOCK_SIZE),
    top_k=st.integers(1, 40),
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_blockwise_top_k_equals_torch_topk(rows, width, top_k, ties, seed):
    torch.manual_seed(seed)
    logits = torch.randint(0, 5, (rows, width)).float() if ties else torch.randn(rows, width)
    top_k = min(top_k, width)
    values, ids = blockwise_top_k(logits, top_k)
    assert torch.equal(values, logits.topk(top_k, 1).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize(
    "width", [1, BLOCK_SIZE - 1, BLOCK_SIZE, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 151_936, 128_256 + 7]
)
@pytest.mark.parametrize("top_k", [1, 32, None])
def test_blockwise_top_k_equals_torch_topk_at_odd_and_real_widths(width, top_k):
    logits = torch.randn(3, width)
    logits[1] = -torch.inf
    logits[1, -1] = 0.5
    values, ids = blockwise_top_k(logits, min(top_k or width, width))
    assert torch.equal(values, logits.topk(values.shape[1], 1).values)
    assert torch.equal(logits.gather(1, ids), values)


def test_blockwise_top_k_equals_torch_topk_for_a_slice_of_rows():
    logits = torch.randn(7, 20 * BLOCK_SIZE + 5)
    values, ids = blockwise_top_k(logits[3:5], 2)
    assert torch.equal(values, logits[3:5].topk(2, 1).values)
    assert torch.equal(logits[3:5].gather(1, ids), values)


SUPPORTS = {
    "top-1": top_k_support(1),
    "top-16": top_k_support(16),
    "all": top_k_support(10_000),
    "top-p": Support("top-p", top_k=40, top_p=0.7),
    "top-p, all": Support("top-p", top_k=10_000, top_p=1.0),
    "sample": Support("sample", num_samples=9, num_sample_sets=1),
    "sets": Support("sample", num_samples=5, num_sample_sets=3, seed=7),
    "top-k+sample": Support("top-k+sample", top_k=6, num_samples=8, num_sample_sets=2),
    "all+sample": Support("top-k+sample", top_k=10_000, num_samples=3, num_sample_sets=1),
    "candidates": Support("candidates"),
    "none": Support("none"),
}


def random_candidate_ids(document: TokenSequence, width: int) -> np.ndarray:
    """Return random ids [P, 6] at the trained tokens, one of them twice, some of them -1 (padding)."""
    ids = np.random.default_rng(len(document)).integers(-1, width, (int(document.train_mask.sum()), 6)).astype(np.int32)
    ids[:, 3:4] = ids[:, :1]
    return ids


@pytest.mark.parametrize("kind", SUPPORTS)
@pytest.mark.parametrize("role", ["teacher", "student"])
def test_teacher_matches_the_plain_forward_pass(pair, role, kind):
    folder, support = getattr(pair, role), SUPPORTS[kind]
    teacher = open_teacher(folder, support, batch_tokens=256)
    model = load_causal_lm(ModelRef(folder)).eval()
    documents = tokenized(folder)
    given = (
        [random_candidate_ids(document, teacher.vocab_size) for document in documents] if kind == "candidates" else None
    )
    for at, (document, scores) in enumerate(zip(documents, teacher.score(documents, given), strict=True)):
        expected = plain_logprobs(model, document)
        assert_matches(scores, document, expected, support, 1e-5, None if given is None else given[at])


@pytest.mark.parametrize("batch_tokens", [1, 64, 100_000])
def test_log_probabilities_do_not_depend_on_the_batch_or_its_padding(pair, batch_tokens):
    documents, support = tokenized(pair.teacher), Support("top-k+sample", top_k=8, num_samples=6, num_sample_sets=2)
    unbatched = open_teacher(pair.teacher, support, batch_tokens=1)
    teacher = open_teacher(pair.teacher, support, batch_tokens=batch_tokens)
    for expected, found in zip(
        [unbatched.score([document])[0] for document in documents], teacher.score(documents), strict=True
    ):
        for name in ("positions", "offsets", "ids", "sample_offsets", "sample_ids", "sample_counts"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        for name in ("logprobs", "remainder_mass", "observed_logprobs", "entropy"):
            np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-5)


def test_samples_are_equal_for_one_seed_and_differ_for_another(pair):
    documents = tokenized(pair.teacher)

    def sampled_ids(seed: int) -> list[list[int]]:
        scores = open_teacher(pair.teacher, Support("sample", num_samples=4, num_sample_sets=1, seed=seed)).score(
            documents
        )
        return [row.sample_ids.tolist() for row in scores]

    assert sampled_ids(0) == sampled_ids(0)
    assert sampled_ids(0) != sampled_ids(1)


@pytest.mark.slow
@pytest.mark.parametrize("width", [3, BLOCK_SIZE, 5 * BLOCK_SIZE + 3])
@pytest.mark.parametrize("num_samples", [1, 12])
def test_systematic_sample_frequencies_match_the_distribution(width, num_samples):
    weights = torch.rand(2, width) ** 8
    weights[:, width // 2] = 0
    weights[1] = 0
    starts = torch.rand(2, 20_000, dtype=torch.float64)
    ids, total = systematic_sample(weights, starts, num_samples)
    assert (ids[1] == -1).all()
    assert total.tolist() == pytest.approx(weights.double().sum(1).tolist(), rel=1e-6)
    frequencies = torch.bincount(ids[0].flatten(), minlength=width) / ids[0].numel()
    expected = weights[0] / weights[0].sum()
    assert frequencies[width // 2] == 0
    assert (frequencies - expected).abs().max() < 5 * (1 / 20_000) ** 0.5 / num_samples**0.5
    edges = torch.tensor([[0.0, 1 - 2**-53]] * 2, dtype=torch.float64)
    assert (weights[0][systematic_sample(weights, edges, num_samples)[0][0]] > 0).all()


def test_batches_contain_every_document_once_within_the_token_limit():
    lengths = [3, 50, 0, 7, 7, 120, 1]
    batches = list(batches_by_length(lengths, 60))
    assert sorted(number for batch in batches for number in batch) == list(range(7))
    assert all(len(batch) == 1 or len(batch) * max(lengths[at] for at in batch) <= 60 for batch in batches)


def test_cached_log_probabilities_match_the_plain_forward_pass(run, pair, corpus, tmp_path):
    cache = tmp_path / "c"
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--precision", "float32", "-o", cache)
    model = load_causal_lm(ModelRef(pair.teacher)).eval()
    tokenizer = Tokenizer(pair.teacher)
    rows = list(TeacherCache(cache))
    assert len(rows) == 40
    for row in rows:
        (document,) = tokenize_documents(tokenizer, [row.document])
        assert row.tokens.ids.tolist() == document.ids.tolist()
        assert_matches(row.stored_logprobs, document, plain_logprobs(model, document), top_k_support(16), 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_entropy_in_half_precision_is_close_to_float32(pair, dtype):
    documents = tokenized(pair.teacher)
    in_float32 = open_teacher(pair.teacher, top_k_support(4)).score(documents)
    in_half_precision = open_teacher(pair.teacher, top_k_support(4), dtype=dtype).score(documents)
    for one, other in zip(in_half_precision, in_float32, strict=True):
        np.testing.assert_allclose(one.entropy, other.entropy, atol=0.1)


def test_nan_log_probabilities_of_a_teacher_are_refused(pair, tmp_path):
    model = load_causal_lm(ModelRef(pair.teacher))
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)  # finite, as weights must be; the logits are not
    model.save_pretrained(tmp_path)
    for name, content in Tokenizer(pair.teacher).to_files().items():
        (tmp_path / name).write_bytes(content)
    documents = tokenized(pair.teacher)
    texts = [Document.from_text(text) for text in TEXTS]
    num_refused = 0
    for text, tokens, scores in zip(
        texts, documents, open_teacher(tmp_path, top_k_support(4)).score(documents), strict=False
    ):
        if len(scores):
            num_refused += 1
            with pytest.raises(XtkError, match="log-probabilities that are NaN"):
                check_scored_document(TeacherDocument(text, tokens, scores), "here")
    assert num_refused
