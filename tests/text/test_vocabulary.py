"""Bytes of the tokens of a vocabulary."""

from __future__ import annotations

import pytest
import small_inputs
import tokenizers

from xtk.text.tokenizer import Tokenizer
from xtk.text.vocabulary import (
    BYTE_LEVEL,
    BYTE_LEVEL_DECODER,
    BYTE_LEVEL_ENCODER,
    LITERAL,
    METASPACE,
    WORD_PIECE,
    decode_vocabulary,
)


def test_byte_level_alphabet_has_one_letter_for_every_byte():
    assert sorted(BYTE_LEVEL_DECODER.values()) == list(range(256))
    assert all(BYTE_LEVEL_DECODER[ord(BYTE_LEVEL_ENCODER[byte])] == byte for byte in range(256))
    assert (BYTE_LEVEL_ENCODER[0x20], BYTE_LEVEL_ENCODER[0x0A], BYTE_LEVEL_ENCODER[0x41]) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize(
    ("alphabet", "tokens", "spellings"),
    [
        (BYTE_LEVEL, ["Ġthe", "Ċ", "Ã©", "Ã", "A"], [b" the", b"\n", "é".encode(), b"\xc3", b"A"]),
        (BYTE_LEVEL, ["Ġthe", "日"], [b" the", "日".encode()]),
        (METASPACE, ["▁the", "▁▁", "<0xE6>", "<0x0A>", "<0xE6", "é"], [b" the", b"  ", b"\xe6", b"\n", b"<0xE6",
                                                                       "é".encode()]),
        (WORD_PIECE, ["the", "##ing", "é"], [b"the", b"ing", "é".encode()]),
        (LITERAL, ["the", "Ġ"], [b"the", "Ġ".encode()]),
    ],
)  # fmt: skip
def test_tokens_of_every_alphabet_are_decoded_to_bytes(alphabet, tokens, spellings):
    vocabulary = decode_vocabulary(alphabet, tokens, added_tokens={}, special_tokens={})
    assert vocabulary.bytes_by_id == spellings
    assert [vocabulary.bytes_of(token) for token in range(len(vocabulary))] == spellings
    assert vocabulary.byte_lengths.tolist() == [len(spelling) for spelling in spellings]


@pytest.mark.parametrize("alphabet", [BYTE_LEVEL, METASPACE, WORD_PIECE, LITERAL])
def test_control_tokens_have_no_bytes_and_added_words_have_their_own_text(alphabet):
    tokens = ["A", None, "<eos>", "Ġ▁##"]
    vocabulary = decode_vocabulary(alphabet, tokens, added_tokens={2: "<eos>", 3: "Ġ▁##"}, special_tokens={"<eos>": 2})
    assert vocabulary.bytes_by_id == [b"A", b"", b"", "Ġ▁##".encode()]
    assert vocabulary.special_mask.tolist() == [False, False, True, False]
    assert vocabulary.special_tokens == {"<eos>": 2}


def test_added_metaspace_tokens_of_the_model_are_decoded_to_spaces(tmp_path):
    """Gemma also lists its runs of U+2581, which stand for spaces, as added tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "▁▁": 4, "▁▁▁": 5, "a": 6, "b": 7, "▁b": 8}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [("▁", "▁"), ("▁▁", "▁"), ("▁", "b")], unk_token="<unk>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = tokenizers.decoders.Replace("▁", " ")
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("▁▁", "▁▁▁")])
    tokenizer.add_tokens([tokenizers.AddedToken("▁▁▁▁▁", normalized=False)])  # not in the model's vocabulary: unchanged
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    small_inputs.save_tokenizer(tokenizer, tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    loaded = Tokenizer(tmp_path)
    assert [loaded.vocabulary.bytes_of(token) for token in (3, 4, 5, 8, 9)] == [
        b" ", b"  ", b"   ", b" b", "▁▁▁▁▁".encode()
    ]  # fmt: skip
    (encoded,) = loaded.encode(["a  b"])
    assert b"".join(map(loaded.vocabulary.bytes_of, encoded.ids.tolist())) == b"a  b"
    assert 4 in encoded.ids


def test_token_of_bytes_prefers_ordinary_tokens_then_the_lowest_id():
    vocabulary = decode_vocabulary(METASPACE, ["<0x41>", "<0xE6>", "B", "A", "B"], added_tokens={}, special_tokens={})
    assert vocabulary.byte_fallback_mask.tolist() == [True, True, False, False, False]
    assert vocabulary.token_of_bytes == {b"A": 3, b"\xe6": 1, b"B": 2}


def test_byte_token_is_ordinary_text_without_byte_fallback():
    vocabulary = decode_vocabulary(METASPACE, ["<0x41>", "▁A"], added_tokens={}, special_tokens={}, byte_fallback=False)
    assert vocabulary.bytes_by_id == [b"<0x41>", b" A"]
    assert not vocabulary.byte_fallback_mask.any()


def test_subword_prefix_and_word_suffix_are_not_part_of_the_bytes():
    assert decode_vocabulary(WORD_PIECE, ["a", "@@b", "##c"], {}, {}, subword_prefix="@@").bytes_by_id == [
        b"a",
        b"b",
        b"##c",
    ]
    with_suffix = decode_vocabulary(
        BYTE_LEVEL, ["the</w>", "th", "</w>"], added_tokens={}, special_tokens={}, word_suffix="</w>"
    )
    assert with_suffix.bytes_by_id == [b"the", b"th", b""]


FAMILIES_OF_ALPHABET = {
    BYTE_LEVEL: ["student", "teacher", "composing", "gpt2", "gpt2-prefix", "llama3", "tekken", "byte-lower", "added",
                 "added-lower"],
    METASPACE: ["metaspace", "metaspace-always", "llama2", "gemma", "t5", "albert", "xlm-r", "added-metaspace"],
    WORD_PIECE: ["word-piece", "word-piece-cased"],
    LITERAL: ["word-level", "characters"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "alphabet"), [(name, kind) for kind, names in FAMILIES_OF_ALPHABET.items() for name in names]
)
def test_alphabet_of_a_tokenizer_is_detected(families, name, alphabet):
    tokenizer = Tokenizer(families[name])
    assert tokenizer.vocabulary.alphabet == alphabet
    assert len(tokenizer.vocabulary) == len(tokenizer) == len(tokenizer.vocabulary.bytes_by_id)


@pytest.mark.parametrize("name", ["student", "teacher", "metaspace"])
def test_tokenizers_that_encode_every_text_have_a_token_for_every_byte(families, name):
    table = Tokenizer(families[name]).vocabulary.token_of_bytes
    assert all(bytes([byte]) in table for byte in range(256))
