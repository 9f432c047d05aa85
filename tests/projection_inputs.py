"""Texts for projection tests."""

from __future__ import annotations

import small_inputs

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
