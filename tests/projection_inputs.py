"""Texts and embeddings for projection tests."""

from __future__ import annotations

import numpy as np
import small_inputs

from xtk.text.tokenizer import Tokenizer

TEXTS = [
    *small_inputs.sentences(60, seed=5),
    *small_inputs.ODD_TEXTS,
    "",
    " ",
    "A",
    "é" * 9,
    "e\u0301",
    "ÀÉ Über 日本 ￼",
]


def random_embedding(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """Return random embeddings, one row per token id, always the same for the same vocabulary size."""
    return np.random.default_rng(len(tokenizer)).normal(size=(tokenizer.embedding_rows, size)).astype(np.float32)
