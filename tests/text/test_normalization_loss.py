"""Characters that a tokenizer's normalization changes or drops."""

from __future__ import annotations

import pytest

from xtk.text.normalization_changes import count_normalization_loss
from xtk.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def normalization_loss(families):
    def count(name, texts):
        return count_normalization_loss(Tokenizer(families[name], name=name), texts)

    return count


@pytest.mark.parametrize("name", ["student", "gpt2-prefix", "metaspace", "llama2", "added-metaspace"])
def test_lossless_tokenizers_lose_no_characters(normalization_loss, name):
    result = normalization_loss(name, ["Anna <think>has 日本 café", ""])
    assert (result.num_characters, result.lost, result.warning()) == (23, 0, None)


def test_lower_case_and_stripped_accents_are_counted_per_character(normalization_loss):
    result = normalization_loss("byte-lower", ["CAFÉ", "é"] * 10)
    assert (result.num_characters, result.rewritten, result.dropped, result.unknown) == (50, 50, 0, 0)
    assert result.examples == {("C", "c"): 10, ("A", "a"): 10, ("F", "f"): 10, ("É", "e"): 10, ("é", "e"): 10}


def test_composed_character_counts_as_all_of_its_original_characters(normalization_loss):
    result = normalization_loss("composing", ["cafe\u0301 \u2126"])
    assert (result.num_characters, result.rewritten, result.dropped) == (7, 3, 0)
    assert result.examples == {("e\u0301", "é"): 1, ("\u2126", "Ω"): 1}
    # Both look the same, so the warning shows code points.
    assert "'e\\u0301' to '\\xe9' 1 time" in result.warning()


def test_dropped_white_space_control_characters_and_lone_accents_are_counted(normalization_loss):
    result = normalization_loss("word-piece", ["Anna  has\x00 ."])
    assert (result.rewritten, result.dropped, result.unknown) == (1, 4, 0)
    assert result.examples == {("A", "a"): 1, ("  ", ""): 1, ("\x00 ", ""): 1}
    lone = normalization_loss("byte-lower", ["\u0301x"])
    assert (lone.rewritten, lone.dropped, lone.examples) == (0, 1, {("\u0301", ""): 1})


def test_text_without_remaining_tokens_is_counted_as_dropped(normalization_loss):
    result = normalization_loss("word-piece", [" \n "])
    assert (result.num_characters, result.dropped, result.lost) == (3, 3, 3)


def test_unknown_words_are_counted_without_the_space_before_them(normalization_loss):
    result = normalization_loss("word-level", ["Anna xyz has"])
    assert (result.num_characters, result.rewritten, result.dropped, result.unknown) == (12, 0, 2, 3)
    assert result.examples["xyz", None] == 1


def test_metaspace_character_in_the_text_is_counted_as_rewritten(normalization_loss):
    result = normalization_loss("metaspace", ["a▁b ▁"])
    assert (result.rewritten, result.dropped, result.examples) == (2, 0, {("▁", " "): 2})


def test_warning_reports_the_percentage_and_the_most_frequent_examples(normalization_loss):
    warning = normalization_loss("byte-lower", ["xÉ"] * 20 + ["B"]).warning()
    assert warning == (
        "byte-lower changes 51.22% of the characters of these texts (21 of 41: 21 rewritten); "
        "the changed text is compared; most frequent: 'É' to 'e' 20 times; 'B' to 'b' 1 time"
    )
    assert "'xyz' unknown 1 time" in normalization_loss("word-level", ["xyz"]).warning()
    assert "' \\n ' dropped 1 time" in normalization_loss("word-piece", [" \n "]).warning()


def test_given_tokens_are_not_encoded_again(families):
    tokenizer = Tokenizer(families["byte-lower"])
    texts = ["CAFÉ", "cafe"]
    encoded = tokenizer.encode(texts)
    tokenizer.encode = None
    assert count_normalization_loss(tokenizer, iter(texts), encoded).lost == 4


def test_texts_are_processed_in_batches(normalization_loss, monkeypatch):
    monkeypatch.setattr("xtk.text.normalization_changes.BATCH_SIZE", 3)
    assert normalization_loss("byte-lower", iter(["É"] * 10)).rewritten == 10
