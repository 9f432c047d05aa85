"""Conversion of top log-probabilities to stored ones: equal to the conversion of the full distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_logprobs import assert_logprobs_match

from xtk.cache.teacher_logprobs import Support
from xtk.errors import XtkError
from xtk.teachers.vllm_top_logprobs import (
    TopLogprobs,
    empty_top_logprobs,
    num_tokens_to_read,
    num_top_ids,
    top_logprobs_to_stored,
)
from xtk.text.token_sequence import TokenSequence


def document_of(ids: np.ndarray, trained: np.ndarray) -> TokenSequence:
    empty = np.zeros(0, np.int32)
    return TokenSequence(ids.astype(np.int32), np.zeros(len(ids), np.int32), trained, np.zeros((0, 3), np.int32), empty)


def top_logprobs_of(logprobs: np.ndarray, observed_ids: np.ndarray, K: int) -> TopLogprobs:
    ids = np.argsort(-logprobs, 1, kind="stable")[:, :K].astype(np.int32)
    rows = np.arange(len(observed_ids))
    return TopLogprobs(
        ids, np.take_along_axis(logprobs, ids, 1).astype(np.float32), logprobs[rows, observed_ids].astype(np.float32)
    )


@settings(deadline=None, max_examples=150)
@given(
    length=st.integers(1, 12),
    width=st.integers(2, 30),
    K=st.integers(0, 40),
    kind=st.sampled_from(["top-k", "top-p", "none"]),
    top_p=st.floats(0.0, 1.0),
    sharpness=st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    seed=st.integers(0, 2**31),
)
def test_top_logprobs_are_converted_like_the_full_distribution(length, width, K, kind, top_p, sharpness, seed):
    rng = np.random.default_rng(seed)
    document = document_of(rng.integers(0, width, length), np.r_[False, rng.random(length - 1) < 0.6])
    positions = np.flatnonzero(document.train_mask)
    logits = rng.normal(0, sharpness, (len(positions), width))
    logprobs = (logits - np.logaddexp.reduce(logits, 1, keepdims=True)).astype(np.float32).astype(np.float64)
    support = Support(kind, top_k=max(1, K) if kind != "none" else 0, top_p=top_p)
    top_logprobs = top_logprobs_of(logprobs, document.ids[positions], num_top_ids(support, width))
    scores = top_logprobs_to_stored(document, top_logprobs, support, width, "here")
    assert num_tokens_to_read(document) == (positions[-1] + 1 if len(positions) else 0)
    assert_logprobs_match(scores, document, logprobs, support, tolerance=1e-5)


def test_entropy_is_exact_if_all_tokens_are_known():
    logprobs = np.log(np.array([[0.5, 0.25, 0.125, 0.125]]))
    document = document_of(np.array([0, 3]), np.array([False, True]))
    top_logprobs = top_logprobs_of(logprobs, np.array([3]), 3)
    scores = top_logprobs_to_stored(document, top_logprobs, Support("top-k", top_k=3), 4, "here")
    np.testing.assert_allclose(scores.entropy, -(np.exp(logprobs) * logprobs).sum(1), rtol=1e-6)


def test_document_without_trained_tokens_has_no_positions():
    document = document_of(np.array([0, 3]), np.array([False, False]))
    scores = top_logprobs_to_stored(document, empty_top_logprobs(3), Support("top-k", top_k=3), 4, "here")
    assert len(scores) == 0
    assert scores.offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "logprobs", "observed_logprobs", "message"),
    [
        ([[0, 1]], [[-1.0, float("nan")]], [-2.0], "NaN or infinite"),
        ([[0, 1]], [[-1.0, -2.0]], [float("nan")], "NaN or infinite"),
        ([[0, 1]], [[-1.0, -2.0]], [-float("inf")], "NaN or infinite"),
        ([[0, 1]], [[-1.0, -2.0]], [float("inf")], "NaN or infinite"),
        ([[0, 1]], [[-0.1, -0.2]], [-2.0], "sum to"),
        ([[0, 1]], [[-0.1, -3.0]], [-0.1], "sum to"),
        ([[0, 1]], [[float("inf"), -3.0]], [-3.0], "sum to"),
        ([[1, 1]], [[-1.0, -1.0]], [-2.0], "two log-probabilities of the same token"),
        ([[0, 4]], [[-1.0, -2.0]], [-3.0], "token id 4"),
        ([[0, -1]], [[-1.0, -2.0]], [-3.0], "token id"),
        (
            [[0, 1], [0, 1]],
            [[-1.0, -2.0], [-1.0, -2.0]],
            [-3.0, -3.0],
            "returned log-probabilities for 2 tokens instead of 1",
        ),
    ],
)
def test_values_that_are_not_log_probabilities_are_refused(ids, logprobs, observed_logprobs, message):
    document = document_of(np.array([0, 3]), np.array([False, True]))
    top_logprobs = TopLogprobs(
        np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(observed_logprobs, np.float32)
    )
    with pytest.raises(XtkError, match=message) as raised:
        top_logprobs_to_stored(document, top_logprobs, Support("top-k", top_k=2), 4, "the place")
    assert raised.value.where == "the place"
