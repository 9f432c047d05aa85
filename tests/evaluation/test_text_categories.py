"""Bits per byte by text category: every byte has one category, and a token's bits are split among its bytes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import small_inputs
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.evaluation.byte_text_categories import TEXT_CATEGORIES, categorize_bytes, fenced_ranges
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

CODE = "See:\n```python\nx = 1\n```\nand 2."
TEXTS = [
    *small_inputs.sentences(10, seed=8),
    *small_inputs.ODD_TEXTS,
    CODE,
    "a",
    "",
    " ".join(small_inputs.sentences(40, seed=6)),
]


def category_names(text: str) -> list[str]:
    return [TEXT_CATEGORIES[category] for category in categorize_bytes(Document.from_text(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a1 .", ["Latin", "digits", "white space", "punctuation"]),
        ("é", ["Latin"] * 2),
        ("e\N{COMBINING ACUTE ACCENT}", ["Latin"] * 3),
        (
            "αж字かー한ع",
            ["Greek"] * 2 + ["Cyrillic"] * 2 + ["Han"] * 3 + ["Kana"] * 6 + ["Hangul"] * 3 + ["Arabic"] * 2,
        ),
        ("\N{FULLWIDTH LATIN SMALL LETTER A}٣½", ["Latin"] * 3 + ["digits"] * 4),
        ("🙂\x00", ["punctuation"] * 5),
        ("\N{RUNIC LETTER FEHU FEOH FE F}", ["other scripts"] * 3),
        ("\N{COMBINING ACUTE ACCENT}", ["other scripts"] * 2),
        ("```\n1\n```", ["punctuation"] * 3 + ["white space"] + ["code"] * 2 + ["punctuation"] * 3),
    ],
)
def test_bytes_are_categorized_by_example(text, expected):
    assert category_names(text) == expected


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("no fence", []),
        ("```\nx\n```\ny\n~~~\nz\n~~~\n", ["x\n", "z\n"]),
        ("````\n```\nx\n````", ["```\nx\n"]),
        ("```a`b\nx", []),
        ("  ```py\nx = 1", ["x = 1"]),
        ("```\n```", [""]),
        ("```", [""]),
        ("~~~\n``` x\n~~~~  \ny", ["``` x\n"]),
        ("    ```\nx\n", []),
    ],
)
def test_fenced_ranges_follow_markdown(text, inside):
    assert [text[start:stop] for start, stop in fenced_ranges(text)] == inside


@given(text=st.text())
def test_every_byte_has_a_category(text):
    document = Document.from_text(text)
    assert len(categorize_bytes(document)) == len(document.text.encode())


def reference_bits_by_category(folder, texts: list[str]) -> dict[str, float]:
    """Return bits by category of short texts: a loop over tokens and the bytes of each, in float64."""
    tokenizer = Tokenizer(folder)
    model = load_causal_lm(ModelRef(folder, dtype="float64")).eval()
    bytes_by_id = tokenizer.vocabulary.bytes_by_id
    bits = dict.fromkeys(TEXT_CATEGORIES, 0.0)
    for text, sequence in zip(texts, tokenize_documents(tokenizer, list(map(Document.from_text, texts))), strict=True):
        categories, stop = category_names(text), int(sequence.text_runs[:, 1].max(initial=1))
        with torch.no_grad():
            probs = torch.softmax(model(input_ids=torch.from_numpy(sequence.ids.astype(np.int64))[None]).logits[0], -1)
        for i in range(1, stop):
            token, probs_row = int(sequence.ids[i]), probs[i - 1].tolist()
            token_bytes, start = bytes_by_id[token], int(sequence.byte_ends[i - 1])
            previous_mass = 1.0
            for size in range(1, len(token_bytes) + 1):
                mass = sum(
                    probs_row[other_id]
                    for other_id, other_bytes in enumerate(bytes_by_id)
                    if other_bytes.startswith(token_bytes[:size])
                )
                bits[categories[start + size - 1]] -= math.log2(mass / previous_mass)
                previous_mass = mass
            bits[categories[start + len(token_bytes) - 1]] -= math.log2(probs_row[token] / previous_mass)
    return bits


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_bits_per_category_equal_the_reference_implementation(pair, side):
    folder, texts = getattr(pair, side), [*small_inputs.sentences(2, seed=8), CODE, "naïve 12 字 café"]
    expected = reference_bits_by_category(folder, texts)
    documents = list(map(Document.from_text, texts))
    found = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder), documents, by_category=True
    )
    bits = {category: float(ratio.sums.sum()) for category, ratio in found.per_category.items()}
    assert bits == pytest.approx({category: value for category, value in expected.items() if value}, rel=1e-5)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("max_length", [None, 24])
def test_categories_sum_to_the_total(pair, side, max_length):
    folder = getattr(pair, side)
    model, tokenizer = BackboneWithHead(load_causal_lm(ModelRef(folder))), Tokenizer(folder)
    documents = [
        *map(Document.from_text, TEXTS),
        Document.from_completion("It is 1", "2 and αβ."),
        Document.from_text(""),
    ]
    without_categories = evaluate_bits_per_byte(model, tokenizer, documents, max_length=max_length)
    found = evaluate_bits_per_byte(
        model, tokenizer, documents, max_length=max_length, by_category=True, batch_tokens=500
    )
    assert without_categories.per_category == {}
    assert found.bits == pytest.approx(without_categories.bits, rel=1e-6)
    for field in ("sums", "counts"):
        summed = sum(getattr(ratio, field) for ratio in found.per_category.values())
        assert summed == pytest.approx(getattr(found.per_document, field), rel=1e-9, abs=1e-9)
    assert {"digits", "white space", "punctuation", "code", "Latin", "Greek"} <= set(found.per_category)


@pytest.mark.slow
def test_evaluate_command_reports_bits_by_category(run, pair, tmp_path):
    (tmp_path / "texts.txt").write_text(CODE)
    arguments = ("evaluate", pair.student, "texts.txt", "--compare-to", pair.teacher, "--by-category", "-q")
    lines = [json.loads(line) for line in run(*arguments, "--json", cwd=tmp_path).stdout.splitlines()]
    for line in lines:
        categories = line["categories"]
        assert categories["code"]["bytes"] == len("x = 1\n")
        assert sum(one["bytes"] for one in categories.values()) == line["bytes"]
        assert sum(one["bits"] for one in categories.values()) / line["bytes"] == pytest.approx(line["bits_per_byte"])
    assert "difference" in lines[1]["categories"]["digits"]
    table = run(*arguments, cwd=tmp_path).stdout
    assert "bits per byte by category" in table
    assert "white space" in table
