"""Reference log-probabilities of documents by a plain forward pass, and a comparison of stored ones with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import small_inputs

from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence, tokenize_documents
from xtk.text.tokenizer import Tokenizer

TEXTS = [
    *small_inputs.sentences(9, seed=8),
    "a",
    "",
    "Anna",
    " ".join(small_inputs.sentences(3, seed=9)),
    " ".join(small_inputs.sentences(60, seed=10)),
]


def make_documents(folder: Path, context: int, texts: list[str] = TEXTS) -> list[TokenSequence]:
    """Return documents of many lengths: without trained tokens, of one token, as long as the context."""
    completion = Document.from_completion("Anna has 12 ", "apples left. And Bert?")
    documents = tokenize_documents(Tokenizer(folder), [*(Document.from_text(text) for text in texts), completion])
    return [document.truncate(context) for document in documents]


def compute_full_logprobs(folder: Path, documents: list[TokenSequence]) -> list[np.ndarray]:
    """Return the log-probabilities [P, U] at the trained tokens of each document."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = []
    for document in documents:
        positions = np.flatnonzero(document.train_mask)
        if not len(positions):
            results.append(np.zeros((0, model.config.vocab_size)))
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(document.ids.astype(np.int64))[None]).logits[0]
        results.append(torch.log_softmax(logits.double(), -1)[positions - 1].numpy())
    return results


def supported_ids(expected: np.ndarray, observed: int, support: Support) -> set[int]:
    """Return the token ids that a support keeps of one distribution (a slow reference implementation)."""
    if support.kind == "none":
        return {observed}
    order = np.argsort(-expected, kind="stable")[: support.top_k]
    if support.kind == "top-p":
        mass, ids = 0.0, []
        for token in order.tolist():
            if mass >= support.top_p:
                break
            ids.append(token)
            mass += np.exp(expected[token])
        order = np.array(ids)
    return {observed, *order.tolist()}


def entropy_lower_bound(expected: np.ndarray, ids: set[int]) -> float:
    """Return the entropy with all other tokens counted as one token, a lower bound of the true entropy."""
    probs = [np.exp(expected[token]) for token in ids]
    return float(-sum(p * np.log(p) for p in [*probs, max(1 - sum(probs), 1e-12)]))


def assert_logprobs_match(
    scores: StoredLogprobs, document: TokenSequence, expected: np.ndarray, support: Support, tolerance: float
) -> None:
    """Assert that the top log-probabilities of a teacher match the full distributions [P, U]."""
    tolerances = {"rtol": 0, "atol": tolerance}
    assert scores.positions.tolist() == np.flatnonzero(document.train_mask).tolist()
    observed_ids = document.ids[scores.positions].tolist()
    observed_logprobs = [row[token] for row, token in zip(expected, observed_ids, strict=True)]
    np.testing.assert_allclose(scores.observed_logprobs, observed_logprobs, **tolerances)
    for number, (row, token) in enumerate(zip(expected, observed_ids, strict=True)):
        first, stop = scores.offsets[number : number + 2].tolist()
        ids = scores.ids[first:stop].tolist()
        assert ids == sorted(supported_ids(row, token, support))
        np.testing.assert_allclose(scores.logprobs[first:stop], row[ids], **tolerances)
        np.testing.assert_allclose(scores.remainder_mass[number], max(0, 1 - np.exp(row[ids]).sum()), **tolerances)
        top_k_support = Support("top-k", top_k=support.top_k) if support.top_k else support
        bound = entropy_lower_bound(row, supported_ids(row, token, top_k_support))
        np.testing.assert_allclose(scores.entropy[number], bound, rtol=0, atol=100 * tolerance)
        assert scores.entropy[number] <= -(np.exp(row) * row).sum() + 100 * tolerance
