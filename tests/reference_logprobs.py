"""What a model says of documents, by its plain forward pass, and whether scores say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import small_inputs

from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import StoredLogprobs, Support
from xtk.tokens.token_sequence import TokenSequence, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

TEXTS = [
    *small_inputs.sentences(9, seed=8),
    "a",
    "",
    "Anna",
    " ".join(small_inputs.sentences(3, seed=9)),
    " ".join(small_inputs.sentences(60, seed=10)),
]


def documents_of(folder: Path, context: int, texts: list[str] = TEXTS) -> list[TokenSequence]:
    """Documents of many lengths: none of them trained, one token, as long as the context."""
    completion = Document.from_completion("Anna has 12 ", "apples left. And Bert?")
    read = tokenize_documents(Tokenizer(folder), [*(Document.from_text(text) for text in texts), completion])
    return [document.truncate(context) for document in read]


def said_plainly(folder: Path, documents: list[TokenSequence]) -> list[np.ndarray]:
    """Log-probabilities [P, U] at the trained tokens of each document."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for document in documents:
        positions = np.flatnonzero(document.train_mask)
        if not len(positions):
            found.append(np.zeros((0, model.config.vocab_size)))
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(document.ids.astype(np.int64))[None]).logits[0]
        found.append(torch.log_softmax(logits.double(), -1)[positions - 1].numpy())
    return found


def kept(expected: np.ndarray, realised: int, support: Support) -> set[int]:
    """The ids that a support keeps of one distribution, slowly."""
    if support.kind == "none":
        return {realised}
    order = np.argsort(-expected, kind="stable")[: support.top_k]
    if support.kind == "top-p":
        mass, few = 0.0, []
        for token in order.tolist():
            if mass >= support.top_p:
                break
            few.append(token)
            mass += np.exp(expected[token])
        order = np.array(few)
    return {realised, *order.tolist()}


def least_entropy(expected: np.ndarray, known: set[int]) -> float:
    """The entropy if all that is not known were one token."""
    probs = [np.exp(expected[token]) for token in known]
    return float(-sum(p * np.log(p) for p in [*probs, max(1 - sum(probs), 1e-12)]))


def assert_is_the_truth(
    scores: StoredLogprobs, document: TokenSequence, expected: np.ndarray, support: Support, tolerance: float
) -> None:
    """Compare what a teacher that knows the head says with the whole distributions [P, U]."""
    close = {"rtol": 0, "atol": tolerance}
    assert scores.positions.tolist() == np.flatnonzero(document.train_mask).tolist()
    realised = document.ids[scores.positions].tolist()
    own = [row[token] for row, token in zip(expected, realised, strict=True)]
    np.testing.assert_allclose(scores.observed_logprobs, own, **close)
    for at, (row, token) in enumerate(zip(expected, realised, strict=True)):
        first, stop = scores.offsets[at : at + 2].tolist()
        ids = scores.ids[first:stop].tolist()
        assert ids == sorted(kept(row, token, support))
        np.testing.assert_allclose(scores.logprobs[first:stop], row[ids], **close)
        np.testing.assert_allclose(scores.remainder_mass[at], max(0, 1 - np.exp(row[ids]).sum()), **close)
        likeliest = Support("top-k", top_k=support.top_k) if support.top_k else support
        bound = least_entropy(row, kept(row, token, likeliest))
        np.testing.assert_allclose(scores.entropy[at], bound, rtol=0, atol=100 * tolerance)
        assert scores.entropy[at] <= -(np.exp(row) * row).sum() + 100 * tolerance
