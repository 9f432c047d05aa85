"""What a tokenizer loses of texts."""

from __future__ import annotations

import pytest

from xtk.tokens.normalization_changes import count_normalization_loss
from xtk.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def found(families):
    def count(name, texts):
        return count_normalization_loss(Tokenizer(families[name], name=name), texts)

    return count


@pytest.mark.parametrize("name", ["student", "gpt2-prefix", "metaspace", "llama2", "added-metaspace"])
def test_tokenizers_that_spell_the_text_lose_nothing(found, name):
    result = found(name, ["Anna <think>has 日本 café", ""])
    assert (result.num_characters, result.lost, result.warning()) == (23, 0, None)


def test_lower_case_and_stripped_accents_are_rewritten_character_by_character(found):
    result = found("byte-lower", ["CAFÉ", "é"] * 10)
    assert (result.num_characters, result.rewritten, result.dropped, result.unknown) == (50, 50, 0, 0)
    assert result.examples == {("C", "c"): 10, ("A", "a"): 10, ("F", "f"): 10, ("É", "e"): 10, ("é", "e"): 10}


def test_a_composed_character_counts_for_all_that_it_was_made_from(found):
    result = found("composing", ["cafe\u0301 \u2126"])
    assert (result.num_characters, result.rewritten, result.dropped) == (7, 3, 0)
    assert result.examples == {("e\u0301", "é"): 1, ("\u2126", "Ω"): 1}
    # They look alike, so the warning shows code points.
    assert "'e\\u0301' to '\\xe9' 1 time" in result.warning()


def test_dropped_white_space_control_characters_and_lone_accents(found):
    result = found("word-piece", ["Anna  has\x00 ."])
    assert (result.rewritten, result.dropped, result.unknown) == (1, 4, 0)
    assert result.examples == {("A", "a"): 1, ("  ", ""): 1, ("\x00 ", ""): 1}
    lone = found("byte-lower", ["\u0301x"])
    assert (lone.rewritten, lone.dropped, lone.examples) == (0, 1, {("\u0301", ""): 1})


def test_a_text_of_which_nothing_is_left(found):
    result = found("word-piece", [" \n "])
    assert (result.num_characters, result.dropped, result.lost) == (3, 3, 3)


def test_unknown_words_are_counted_without_the_space_before_them(found):
    result = found("word-level", ["Anna xyz has"])
    assert (result.num_characters, result.rewritten, result.dropped, result.unknown) == (12, 0, 2, 3)
    assert result.examples["xyz", None] == 1


def test_the_letter_that_metaspace_reads_as_a_space_is_rewritten(found):
    result = found("metaspace", ["a▁b ▁"])
    assert (result.rewritten, result.dropped, result.examples) == (2, 0, {("▁", " "): 2})


def test_the_warning_tells_the_share_and_the_most_frequent_examples(found):
    warning = found("byte-lower", ["xÉ"] * 20 + ["B"]).warning()
    assert warning == (
        "byte-lower changes 51.22% of the characters of these texts (21 of 41: 21 rewritten); "
        "the changed text is compared; most frequent: 'É' to 'e' 20 times; 'B' to 'b' 1 time"
    )
    assert "'xyz' unknown 1 time" in found("word-level", ["xyz"]).warning()
    assert "' \\n ' dropped 1 time" in found("word-piece", [" \n "]).warning()


def test_tokens_at_hand_are_not_made_again(families):
    tokenizer = Tokenizer(families["byte-lower"])
    texts = ["CAFÉ", "cafe"]
    encoded = tokenizer.encode(texts)
    tokenizer.encode = None
    assert count_normalization_loss(tokenizer, iter(texts), encoded).lost == 4


def test_any_number_of_texts_is_read_in_pieces(found, monkeypatch):
    monkeypatch.setattr("xtk.tokens.normalization_changes.BATCH_SIZE", 3)
    assert found("byte-lower", iter(["É"] * 10)).rewritten == 10
