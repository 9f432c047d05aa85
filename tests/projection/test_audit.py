"""Audit of projections: token categories of examples, and figures counted by hand for a tiny vocabulary."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from xtk.projection import coverage_audit as module
from xtk.projection.build import build_projection
from xtk.projection.coverage_audit import audit_projection, audit_warning
from xtk.projection.prune import prune_projection
from xtk.projection.special_tokens import match_special_tokens
from xtk.projection.token_categories import CATEGORIES, token_categories
from xtk.projection.vocabulary_pair import VocabularyPair
from xtk.text.tokenizer import Tokenizer
from xtk.text.vocabulary import LITERAL, ByteVocabulary, decode_vocabulary

EXAMPLES = {
    "white space": [" ", "\n\n", "\t \r\n", "\u3000", "\xa0"],
    "digits": ["7", "201", " 12", "٣", "½", "１２"],
    "punctuation": [".", ", ", '."', "!", "—", "😀", "。", "...", "(", "\u200d", "-"],
    "code": ["();", "_name", ".append", "camelCase", "x1", "});\n", "==", "1.", "</", "1st"],
    "Latin": [" the", "don't", "Über", "naïve", "well-known", "Ａ", "e\u0301"],
    "CJK": ["日本", " の", "한국", "日x", "ㄅ"],
    "other scripts": ["привет", "α", "مرحبا", "αx1", "ไทย"],
}


def vocabulary_of(spellings: list[bytes]) -> ByteVocabulary:
    vocabulary = decode_vocabulary(LITERAL, ["<s>", *("x" for _ in spellings)], {0: "<s>"}, {"<s>": 0})
    offsets = [0, 0, *np.cumsum([len(spelling) for spelling in spellings]).tolist()]
    fields = {
        **vocabulary.__dict__,
        "token_bytes": np.frombuffer(b"".join(spellings), np.uint8),
        "offsets": np.array(offsets),
    }
    fields.pop("bytes_by_id")
    return ByteVocabulary(**fields)


def test_token_categories_of_examples():
    examples = [(name, text.encode()) for name, texts in EXAMPLES.items() for text in texts]
    examples += [("partial UTF-8", b"\xe6\x97"), ("partial UTF-8", b" \xf0\x9f"), ("specials", b"")]
    category_ids = token_categories(vocabulary_of([spelling for _, spelling in examples]))
    categories = [CATEGORIES[category] for category in category_ids.tolist()]
    assert categories[0] == "specials"
    assert dict(zip((spelling for _, spelling in examples), categories[1:], strict=True)) == {
        spelling: name for name, spelling in examples
    }


@pytest.mark.parametrize("name", ["student", "teacher", "metaspace", "composing", "word-piece"])
def test_every_token_has_a_valid_category(tokenizer_of, name):
    tokenizer = tokenizer_of[name]
    categories = token_categories(tokenizer.vocabulary)
    assert categories.shape == (len(tokenizer),)
    assert ((categories >= 0) & (categories < len(CATEGORIES))).all()


def tiny_tokenizer(folder, tokens: list[str], special_tokens: list[str], eos: str) -> Tokenizer:
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokens) + len(special_tokens) + 2}))
    return Tokenizer(folder)


@pytest.fixture
def tiny_pair(tmp_path):
    student = tiny_tokenizer(tmp_path / "one", ["a", "b", "ab", "12", "zz"], ["<e>", "<x>"], "<e>")
    return student, tiny_tokenizer(tmp_path / "other", ["a", "b", "1", "2", "c"], ["</e>"], "</e>")


def test_audit_of_a_tiny_pair_has_the_figures_counted_by_hand(tiny_pair):
    projection = build_projection(*tiny_pair, "first-token")
    audit = projection.header["audit"]
    # Exact: a, b. Special: <e>. Composed: ab as a, 12 as 1. Unmapped: zz, <x>. Padding: two rows above the vocabulary.
    assert audit["rows"] == {"exact": 2, "special": 1, "composed": 2, "unmapped": 2, "padding": 2}
    assert audit["unmapped_mass"] == pytest.approx(2 / 7, abs=1e-6)
    assert audit["unreachable_teacher_tokens"] == 2  # 2, c
    assert audit["categories"]["Latin"] == {
        "student_tokens": 4, "unmatched_student_tokens": 2, "unmapped": 1, "unmapped_mass": 0.25,
        "teacher_tokens": 3, "unmatched_teacher_tokens": 1, "unreachable_teacher_tokens": 1,
    }  # fmt: skip
    assert audit["categories"]["digits"] == {
        "student_tokens": 1, "unmatched_student_tokens": 1, "unmapped": 0, "unmapped_mass": 0.0,
        "teacher_tokens": 2, "unmatched_teacher_tokens": 2, "unreachable_teacher_tokens": 1,
    }  # fmt: skip
    assert audit["categories"]["specials"]["unmatched_student_tokens"] == 1
    assert audit["poorly_matched_categories"] == []
    assert audit_warning(audit) is None


def test_categories_with_many_unmatched_tokens_are_reported_with_a_warning(tiny_pair, monkeypatch):
    monkeypatch.setattr(module, "MIN_CRITICAL_TOKENS", 1)
    audit = build_projection(*tiny_pair, "first-token").header["audit"]
    assert audit["poorly_matched_categories"] == ["digits", "Latin"]
    warning = audit_warning(audit)
    assert "digits (100% of the student's and 100% of the teacher's); Latin (50% of the student's" in warning
    assert "the default loss compares bytes" in warning


def test_audit_of_pruned_projections_agrees_with_a_full_audit(tokenizer_of):
    pair = tokenizer_of["student"], tokenizer_of["word-piece"]
    pruned = prune_projection(build_projection(*pair), top_k=1)
    audit, full_audit = (
        pruned.header["audit"],
        audit_projection(pruned, VocabularyPair(*pair), *match_special_tokens(*pair)),
    )
    assert (audit["unmapped_mass"], audit["unreachable_teacher_tokens"]) == (
        full_audit["unmapped_mass"],
        full_audit["unreachable_teacher_tokens"],
    )
    rows = full_audit["rows"]
    mapped = rows["exact"] + rows["special"] + rows["composed"]
    assert audit["rows"] == {"mapped": mapped, "unmapped": rows["unmapped"], "padding": rows["padding"]}
    for name, figures in audit["categories"].items():
        assert figures.items() <= full_audit["categories"][name].items()
    assert audit["poorly_matched_categories"] == full_audit["poorly_matched_categories"]


def test_pruning_that_removes_nothing_keeps_the_audit(tokenizer_of):
    built = build_projection(tokenizer_of["student"], tokenizer_of["word-piece"])
    for limits in ({}, {"top_k": 1000}, {"renormalize": True}):
        assert prune_projection(built, **limits).header["audit"] == built.header["audit"]


@pytest.mark.slow
def test_real_pair_is_audited_in_half_a_second_with_poorly_matched_digits(real_data):
    tokenizers = [Tokenizer(real_data / "tokenizers" / name) for name in ("qwen", "llama3")]
    projection = build_projection(*tokenizers)
    figures = projection.header["audit"]["categories"]["digits"]
    assert (figures["unmatched_teacher_tokens"], figures["teacher_tokens"]) == (1180, 1211)
    assert "digits" in projection.header["audit"]["poorly_matched_categories"]
    pair, matched = VocabularyPair(*tokenizers), match_special_tokens(*tokenizers)
    seconds = []
    for _ in range(3):
        started = time.process_time()
        assert audit_projection(projection, pair, *matched) == projection.header["audit"]
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.5
