"""Hypothesis strategies of texts that are difficult for tokenizers."""

from __future__ import annotations

import random

import small_inputs
from hypothesis import settings
from hypothesis import strategies as st
from tokenizer_families import MAKERS

FAMILIES = list(MAKERS)
SPECIAL_SPELLINGS = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "</s>", "<unk>", "[SEP]"]
ADDED_WORDS = ["<think>", " <left>  ", "  <right> ", " <both> ", "pear", "pears", "Café", "<extra_id_0>"]
FRAGMENTS = [
    *small_inputs.ODD_TEXTS,
    *SPECIAL_SPELLINGS,
    *ADDED_WORDS,
    *[
        "Anna has ",
        "1234567",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "a" * 70,
        "日本" * 20,
        "▁",
        "##",
        "Ġ",
        "<0x41>",
        " [EOS] ",
    ],
    *["e\u0301", "\u0301", "a\u0323\u0302", "a\u0302\u0323", "\u1112\u1161\u11ab", "\u2126", "\ufffd", "\ufeff", "ﬁ"],
    *["😀", "👩\u200d👩\u200d👧", "🇫🇷", "☎\ufe0f", "👍🏽", "\x00", "\u2028", "\u00a0", "\u3000", "\u200b", "\u200d"],
    *["İ", "ı", "ſ", "ẞ", "ς", "Σ", "ŉ", "½", "Ⅻ", "㎏", "①", "™", "ｶﾞ", "ㅎㅏ", "``", "''", "`", "'", "´"],
    *[
        "\u05d0\u05b7",
        "ا\u064b",
        "\u0e33",
        "\u09c7\u09be",
        "\u0344",
        "\U0002f800",
        "\U0001d15e",
        "\u0958",
        "A",
        "b",
        "7",
    ],
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join))

# Without unassigned code points: Python and the backends use different versions of Unicode.
_FRAGMENTS = st.one_of(
    st.sampled_from(FRAGMENTS),
    st.text(st.characters(exclude_categories=("Cs", "Cn")), min_size=1, max_size=6),
    st.text(st.sampled_from("aeinoANO \u0301\u0323\u0302\u0327\u0345\u1112\u1161\u11ab日é0."), min_size=1, max_size=5),
)


def batches(size: int) -> st.SearchStrategy[list[str]]:
    """Return a strategy of lists of texts that are joined from the same few fragments: many cases from few examples."""

    def join_fragments(fragments: list[str], seed: int) -> list[str]:
        rng = random.Random(seed)
        return ["".join(rng.choices(fragments, k=rng.randint(0, 7))) for _ in range(size)]

    return st.builds(join_fragments, st.lists(_FRAGMENTS, min_size=4, max_size=16), st.integers(0, 2**32))


# The first example compiles or loads the Numba kernels, so no example has a deadline.
quick = settings(max_examples=60, deadline=None)
