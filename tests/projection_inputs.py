"""Texts and embeddings for the tests of projections."""

from __future__ import annotations

import numpy as np
import small_inputs

from xtk.tokens.tokenizer import Tokenizer

TEXTS = [*small_inputs.sentences(60, seed=5), *small_inputs.ODD, "", " ", "A", "é" * 9, "e\u0301", "ÀÉ Über 日本 ￼"]


def embedding_of(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """Return random vectors, the same for the same tokenizer."""
    return np.random.default_rng(len(tokenizer)).normal(size=(tokenizer.embedding_rows, size)).astype(np.float32)
