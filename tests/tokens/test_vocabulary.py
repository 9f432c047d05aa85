"""What tokens spell."""

from __future__ import annotations

import pytest

from xtk.tokens.tokenizer import Tokenizer
from xtk.tokens.vocabulary import (
    BYTE_LEVEL,
    BYTE_OF_LETTER,
    LETTER_OF_BYTE,
    LITERAL,
    METASPACE,
    WORD_PIECE,
    read_vocabulary,
)


def test_the_byte_level_alphabet_has_one_letter_for_every_byte():
    assert sorted(BYTE_OF_LETTER.values()) == list(range(256))
    assert all(BYTE_OF_LETTER[ord(LETTER_OF_BYTE[byte])] == byte for byte in range(256))
    assert (LETTER_OF_BYTE[0x20], LETTER_OF_BYTE[0x0A], LETTER_OF_BYTE[0x41]) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize(
    ("family", "tokens", "spellings"),
    [
        (BYTE_LEVEL, ["Ġthe", "Ċ", "Ã©", "Ã", "A"], [b" the", b"\n", "é".encode(), b"\xc3", b"A"]),
        (BYTE_LEVEL, ["Ġthe", "日"], [b" the", "日".encode()]),
        (METASPACE, ["▁the", "▁▁", "<0xE6>", "<0x0A>", "<0xE6", "é"], [b" the", b"  ", b"\xe6", b"\n", b"<0xE6",
                                                                       "é".encode()]),
        (WORD_PIECE, ["the", "##ing", "é"], [b"the", b"ing", "é".encode()]),
        (LITERAL, ["the", "Ġ"], [b"the", "Ġ".encode()]),
    ],
)  # fmt: skip
def test_every_family_becomes_bytes(family, tokens, spellings):
    vocabulary = read_vocabulary(family, tokens, literal={}, special={})
    assert vocabulary.spellings == spellings
    assert [vocabulary.spelling(token) for token in range(len(vocabulary))] == spellings
    assert vocabulary.lengths.tolist() == [len(spelling) for spelling in spellings]


@pytest.mark.parametrize("family", [BYTE_LEVEL, METASPACE, WORD_PIECE, LITERAL])
def test_control_tokens_spell_nothing_and_added_words_spell_themselves(family):
    tokens = ["A", None, "<eos>", "Ġ▁##"]
    vocabulary = read_vocabulary(family, tokens, literal={2: "<eos>", 3: "Ġ▁##"}, special={"<eos>": 2})
    assert vocabulary.spellings == [b"A", b"", b"", "Ġ▁##".encode()]
    assert vocabulary.special.tolist() == [False, False, True, False]
    assert vocabulary.special_tokens == {"<eos>": 2}


def test_of_tokens_that_spell_the_same_the_ordinary_one_then_the_lowest_is_found():
    vocabulary = read_vocabulary(METASPACE, ["<0x41>", "<0xE6>", "B", "A", "B"], literal={}, special={})
    assert vocabulary.lone_byte.tolist() == [True, True, False, False, False]
    assert vocabulary.token_of_bytes == {b"A": 3, b"\xe6": 1, b"B": 2}


def test_without_byte_fallback_the_spelling_of_a_lone_byte_is_a_word():
    vocabulary = read_vocabulary(METASPACE, ["<0x41>", "▁A"], literal={}, special={}, byte_fallback=False)
    assert vocabulary.spellings == [b"<0x41>", b" A"]
    assert not vocabulary.lone_byte.any()


def test_the_marks_of_a_word_s_pieces_are_no_text():
    assert read_vocabulary(WORD_PIECE, ["a", "@@b", "##c"], {}, {}, word_mark="@@").spellings == [b"a", b"b", b"##c"]
    clip = read_vocabulary(BYTE_LEVEL, ["the</w>", "th", "</w>"], literal={}, special={}, end_mark="</w>")
    assert clip.spellings == [b"the", b"th", b""]


KINDS = {
    BYTE_LEVEL: ["student", "teacher", "composing", "gpt2", "gpt2-prefix", "llama3", "tekken", "byte-lower", "added",
                 "added-lower"],
    METASPACE: ["metaspace", "metaspace-always", "llama2", "gemma", "t5", "albert", "xlm-r", "added-metaspace"],
    WORD_PIECE: ["word-piece", "word-piece-cased"],
    LITERAL: ["word-level", "characters"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), [(name, kind) for kind, names in KINDS.items() for name in names])
def test_the_family_of_a_tokenizer_is_recognised(families, name, family):
    tokenizer = Tokenizer(families[name])
    assert tokenizer.vocabulary.family == family
    assert len(tokenizer.vocabulary) == len(tokenizer) == len(tokenizer.vocabulary.spellings)


@pytest.mark.parametrize("name", ["student", "teacher", "metaspace"])
def test_tokenizers_that_can_write_every_text_have_every_byte(families, name):
    table = Tokenizer(families[name]).vocabulary.token_of_bytes
    assert all(bytes([byte]) in table for byte in range(256))
