"""The audit: figures by hand on a tiny vocabulary, categories by example."""

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
from xtk.projection.merge_projections import merge_projections
from xtk.projection.prune import prune_projection
from xtk.projection.special_tokens import match_special_tokens
from xtk.projection.token_categories import CATEGORIES, token_categories
from xtk.projection.vocabulary_pair import VocabularyPair
from xtk.tokens.tokenizer import Tokenizer
from xtk.tokens.vocabulary import LITERAL, ByteVocabulary, decode_vocabulary

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
    plain = decode_vocabulary(LITERAL, ["<s>", *("x" for _ in spellings)], {0: "<s>"}, {"<s>": 0})
    sizes = [0, 0, *np.cumsum([len(spelling) for spelling in spellings]).tolist()]
    changed = {
        **plain.__dict__,
        "token_bytes": np.frombuffer(b"".join(spellings), np.uint8),
        "offsets": np.array(sizes),
    }
    changed.pop("bytes_by_id")
    return ByteVocabulary(**changed)


def test_each_category_by_example():
    examples = [(name, text.encode()) for name, texts in EXAMPLES.items() for text in texts]
    examples += [("partial UTF-8", b"\xe6\x97"), ("partial UTF-8", b" \xf0\x9f"), ("specials", b"")]
    found = token_categories(vocabulary_of([spelling for _, spelling in examples]))
    told = [CATEGORIES[place] for place in found.tolist()]
    assert told[0] == "specials"
    assert dict(zip((spelling for _, spelling in examples), told[1:], strict=True)) == {
        spelling: name for name, spelling in examples
    }


@pytest.mark.parametrize("name", ["student", "teacher", "metaspace", "composing", "word-piece"])
def test_every_token_has_one_category(tokenizer_of, name):
    tokenizer = tokenizer_of[name]
    found = token_categories(tokenizer.vocabulary)
    assert found.shape == (len(tokenizer),)
    assert ((found >= 0) & (found < len(CATEGORIES))).all()


def tiny(folder, tokens: list[str], specials: list[str], eos: str) -> Tokenizer:
    backend = Backend(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokens) + len(specials) + 2}))
    return Tokenizer(folder)


@pytest.fixture
def two(tmp_path):
    student = tiny(tmp_path / "one", ["a", "b", "ab", "12", "zz"], ["<e>", "<x>"], "<e>")
    return student, tiny(tmp_path / "other", ["a", "b", "1", "2", "c"], ["</e>"], "</e>")


def test_the_figures_of_a_tiny_pair_are_those_counted_by_hand(two):
    projection = build_projection(*two, "first-token")
    audited = projection.header["audit"]
    # Exact: a, b. Special: <e>. Spread: ab on a, 12 on 1. Empty: zz, <x>. Two rows above the vocabulary.
    assert audited["rows"] == {"exact": 2, "special": 1, "composed": 2, "unmapped": 2, "padding": 2}
    assert audited["unmapped_mass"] == pytest.approx(2 / 7, abs=1e-6)
    assert audited["unreachable_teacher_tokens"] == 2  # 2, c
    assert audited["categories"]["Latin"] == {
        "student_tokens": 4, "unmatched_student_tokens": 2, "unmapped": 1, "unmapped_mass": 0.25,
        "teacher_tokens": 3, "unmatched_teacher_tokens": 1, "unreachable_teacher_tokens": 1,
    }  # fmt: skip
    assert audited["categories"]["digits"] == {
        "student_tokens": 1, "unmatched_student_tokens": 1, "unmapped": 0, "unmapped_mass": 0.0,
        "teacher_tokens": 2, "unmatched_teacher_tokens": 2, "unreachable_teacher_tokens": 1,
    }  # fmt: skip
    assert audited["categories"]["specials"]["unmatched_student_tokens"] == 1
    assert audited["poorly_matched_categories"] == []
    assert audit_warning(audited) is None


def test_a_category_that_a_partition_would_leave_over_is_critical(two, monkeypatch):
    monkeypatch.setattr(module, "MIN_CRITICAL_TOKENS", 1)
    audited = build_projection(*two, "first-token").header["audit"]
    assert audited["poorly_matched_categories"] == ["digits", "Latin"]
    told = audit_warning(audited)
    assert "digits (100% of the student's and 100% of the teacher's); Latin (50% of the student's" in told
    assert "p-kl" in told


def test_pruned_and_merged_the_audit_tells_what_it_can(tokenizer_of):
    pair = tokenizer_of["student"], tokenizer_of["word-piece"]
    built = build_projection(*pair)
    pruned = prune_projection(built, top_k=1)
    merged = merge_projections(built, [(pruned, 0.5)])
    for projection in (pruned, merged):
        again, whole = (
            projection.header["audit"],
            audit_projection(projection, VocabularyPair(*pair), *match_special_tokens(*pair)),
        )
        assert (again["unmapped_mass"], again["unreachable_teacher_tokens"]) == (
            whole["unmapped_mass"],
            whole["unreachable_teacher_tokens"],
        )
        rows = whole["rows"]
        filled = rows["exact"] + rows["special"] + rows["composed"]
        assert again["rows"] == {"mapped": filled, "unmapped": rows["unmapped"], "padding": rows["padding"]}
        for name, figures in again["categories"].items():
            assert figures.items() <= whole["categories"][name].items()
        assert again["poorly_matched_categories"] == whole["poorly_matched_categories"]


def test_pruned_without_a_loss_the_audit_stays(tokenizer_of):
    built = build_projection(tokenizer_of["student"], tokenizer_of["word-piece"])
    for limits in ({}, {"top_k": 1000}, {"renormalize": True}):
        assert prune_projection(built, **limits).header["audit"] == built.header["audit"]


def test_the_real_pair_is_audited_in_half_a_second_and_its_digits_are_critical(real_data):
    sides = [Tokenizer(real_data / "tokenizers" / name) for name in ("qwen", "llama3")]
    projection = build_projection(*sides)
    figures = projection.header["audit"]["categories"]["digits"]
    assert (figures["unmatched_teacher_tokens"], figures["teacher_tokens"]) == (1180, 1211)
    assert "digits" in projection.header["audit"]["poorly_matched_categories"]
    pair, matched = VocabularyPair(*sides), match_special_tokens(*sides)
    seconds = []
    for _ in range(3):
        started = time.process_time()
        assert audit_projection(projection, pair, *matched) == projection.header["audit"]
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.5
