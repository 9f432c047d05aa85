"""Texts that are hard on tokenizers, for hypothesis."""

from __future__ import annotations

import material
from hypothesis import settings
from hypothesis import strategies as st

FAMILIES = ["student", "teacher", "metaspace", "composing", "word-piece"]
SPECIAL_SPELLINGS = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "</s>", "<unk>", "[SEP]"]
PIECES = [
    *material.ODD,
    *SPECIAL_SPELLINGS,
    *["Anna has ", "1234567", " ", "  ", "\n", "\r\n", "\t", "a" * 70, "日本" * 20, "▁", "##", "<0x41>"],
    *["e\u0301", "\u0301", "a\u0323\u0302", "a\u0302\u0323", "\u1112\u1161\u11ab", "\u2126", "\ufffd", "\ufeff", "ﬁ"],
    *["😀", "👩\u200d👩\u200d👧", "🇫🇷", "☎\ufe0f", "\x00", "\u2028", "İ"],
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=10).map("".join))

# The first example compiles or loads the kernels, so no example has a deadline.
quick = settings(max_examples=60, deadline=None)
