"""Tokenizers: byte ends of tokens in the text, encoding of bytes, and folders without a valid tokenizer."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import small_inputs
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis_texts import FAMILIES, SPECIAL_SPELLINGS, TEXTS, quick
from test_properties import reference_byte_ends
from transformers import AutoTokenizer

from xtk.errors import XtkError
from xtk.text.alignment_numba import token_byte_ends
from xtk.text.tokenizer import Tokenizer

LOSSLESS = ["student", "teacher", "metaspace"]  # families without a normalizer


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.mark.parametrize("name", LOSSLESS)
@given(text=TEXTS)
@quick
def test_tokens_decode_to_the_bytes_of_the_text(tokenizer_of, name, text):
    assume(name != "metaspace" or "▁" not in text)  # the character that stands for a space in a metaspace vocabulary
    tokenizer = tokenizer_of[name]
    (tokens,) = tokenizer.encode([text])
    spellings = [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids]
    joined = b"".join(spellings)
    assert joined == text.encode() or (name == "metaspace" and joined == b" " + text.encode())
    start = 0
    for spelling, end in zip(spellings, tokens.byte_ends.tolist(), strict=True):
        # The metaspace tokenizer adds the space in front.
        assert text.encode()[start:end] in (spelling, spelling.removeprefix(b" ") if start == 0 else spelling)
        start = end


@pytest.mark.parametrize("name", FAMILIES)
@given(before=st.text(max_size=5), spelling=st.sampled_from(SPECIAL_SPELLINGS), after=st.text(max_size=5))
@quick
def test_text_of_a_special_token_is_not_encoded_as_that_token(tokenizer_of, name, before, spelling, after):
    tokenizer = tokenizer_of[name]
    (tokens,) = tokenizer.encode([before + spelling + after])
    controls = set(tokenizer.vocabulary.special_tokens.values()) - {tokenizer.special_token_ids.get("unk")}
    assert not controls & set(tokens.ids.tolist())


@pytest.mark.parametrize(
    ("text", "tokens", "ends"),
    [
        ("ze\u0301x", ["z", "é", "x"], [1, 4, 5]),  # composed: the combining mark belongs to its letter
        ("a\u0302\u0323x", ["\u1ead", "x"], [5, 6]),  # reordered and composed
        ("\u1112\u1161\u11abx", ["\ud55c", "x"], [9, 10]),  # Hangul composed from its letters
        ("\u2126x", ["\u03a9", "x"], [3, 4]),
    ],
)
def test_composed_character_ends_at_the_end_of_its_last_original_character(tokenizer_of, text, tokens, ends):
    tokenizer = tokenizer_of["composing"]
    (encoded,) = tokenizer.encode([text])
    spellings = [tokenizer.vocabulary.bytes_of(token) for token in encoded.ids]
    assert b"".join(spellings).decode() == "".join(tokens)
    positions = np.cumsum([len(token.encode()) for token in tokens]).tolist()
    byte_end_at = dict(
        zip(np.cumsum([len(spelling) for spelling in spellings]).tolist(), encoded.byte_ends.tolist(), strict=True)
    )
    assert [byte_end_at[position] for position in positions] == ends
    # Tokens within a rewritten character end at the end of the previous character.
    assert set(encoded.byte_ends.tolist()) <= {0, *ends}


def test_byte_ends_ignore_offsets_trimmed_by_the_post_processor(tmp_path):
    letters = ["e", "Ì", "ģ", "Ã", "©", "Ċ", "Ġ", "x", "ĊĠ"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, [("Ċ", "Ġ")])
    )
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    (tokens,) = tokenizer.encode(["e\u0301\n x"])
    assert [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids] == [b"\xc3", b"\xa9", b"\n ", b"x"]
    assert tokens.byte_ends.tolist() == [0, 3, 5, 6]


def test_control_token_in_the_model_vocabulary_is_not_produced_from_text(families, tokenizer_of):
    for name, text in (("t5", "a</s>b"), ("word-level", "Anna [EOS] has")):
        backend = tokenizers.Tokenizer.from_file(str(families[name] / "tokenizer.json"))
        backend.encode_special_tokens = True
        tokenizer = tokenizer_of[name]
        assert tokenizer.special_token_ids["eos"] in backend.encode(text).ids
        assert tokenizer.special_token_ids["eos"] not in tokenizer.encode([text])[0].ids
    (tokens,) = tokenizer_of["t5"].encode(["a</s><extra_id_0><turn>"])
    spellings = tokenizer_of["t5"].vocabulary.bytes_by_id
    assert b"".join(spellings[token] for token in tokens.ids) == b" a</s><extra_id_0> <turn>"
    assert b"<extra_id_0>" in [spellings[token] for token in tokens.ids]


def test_exact_is_true_only_if_the_tokens_decode_to_the_text(tokenizer_of):
    def exact(name, text):
        return tokenizer_of[name].encode([text])[0].exact

    for name in ("student", "gpt2-prefix", "metaspace", "llama2", "gemma"):
        assert exact(name, "Anna <0x41> ## Ġ café 日")
    assert not exact("metaspace", "a▁b")  # it encodes "▁" as a space
    assert exact("composing", "é")
    assert not exact("composing", "e\u0301")
    assert not exact("characters", "☃")


def test_bytes_that_word_piece_drops_are_within_the_byte_ranges_of_its_tokens(tokenizer_of):
    tokenizer = tokenizer_of["word-piece"]
    text = "Anna  lèft 12\n"
    (tokens,) = tokenizer.encode([text])
    assert [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids] == [b"anna", b"left", b"12"]
    assert tokens.byte_ends.tolist() == [4, 11, 15]


@given(data=st.data())
@quick
def test_byte_end_kernel_agrees_with_the_reference_implementation(tokenizer_of, data):
    vocabulary = tokenizer_of[data.draw(st.sampled_from(["student", "metaspace", "word-piece"]))].vocabulary
    ids = np.array(data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12)), np.int32)
    spellings = [vocabulary.bytes_of(token) for token in ids]
    joined = b"".join(spellings)
    text = data.draw(
        st.sampled_from(
            [joined, joined.removeprefix(b" "), joined[:-1], joined + b"x", b"x" + joined[1:], joined[1:], b""]
        )
    )
    ends, exact = token_byte_ends(vocabulary.token_bytes, vocabulary.offsets, ids, np.frombuffer(text, np.uint8))
    assert (ends.tolist() if exact else None) == reference_byte_ends(spellings, text)


@pytest.mark.parametrize("name", ["student", "teacher", "composing"])
@given(spelling=st.one_of(st.binary(min_size=1, max_size=12), st.text(min_size=1, max_size=8).map(str.encode)))
@quick
def test_byte_level_tokenizers_encode_any_bytes(tokenizer_of, name, spelling):
    tokenizer = tokenizer_of[name]
    (ids,) = tokenizer.encode_bytes([spelling])
    assert b"".join(tokenizer.vocabulary.bytes_of(token) for token in ids) == spelling


def test_encode_bytes_returns_none_for_bytes_without_tokens(tokenizer_of):
    assert tokenizer_of["word-piece"].encode_bytes([b"\xff", "日本".encode(), b" the"])[0] is None
    assert tokenizer_of["metaspace"].encode_bytes([b""]) == [None]


def test_encode_bytes_returns_the_tokens_of_the_bytes_within_a_text(tokenizer_of):
    tokenizer = tokenizer_of["teacher"]
    (ids,) = tokenizer.encode_bytes([b" 201"])
    assert [tokenizer.vocabulary.bytes_of(token) for token in ids] == [b" ", b"2", b"0", b"1"]


@pytest.mark.parametrize("name", FAMILIES)
def test_truncation_and_padding_settings_change_neither_fingerprint_nor_tokens(families, tokenizer_of, name, tmp_path):
    shutil.copytree(families[name], tmp_path / "copy")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "copy/tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "copy/tokenizer.json"))
    copy = Tokenizer(tmp_path / "copy")
    assert copy.fingerprint == tokenizer_of[name].fingerprint
    text = "Anna has 1234 apples and gives 12 to Bert."
    assert copy.encode([text])[0].ids.tolist() == tokenizer_of[name].encode([text])[0].ids.tolist()


def test_every_tokenizer_has_a_different_fingerprint(tokenizer_of):
    assert len({tokenizer.fingerprint for tokenizer in tokenizer_of.values()}) == len(FAMILIES)


def test_template_fingerprint_is_the_same_for_both_template_files(families, tmp_path):
    folder = shutil.copytree(families["student"], tmp_path / "copy")
    assert Tokenizer(folder).template_fingerprint is None
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    fingerprint_of_jinja_file = Tokenizer(folder).template_fingerprint
    (folder / "chat_template.jinja").unlink()
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": "{{ messages }}"}))
    assert Tokenizer(folder).template_fingerprint == fingerprint_of_jinja_file is not None


def test_special_token_ids_and_embedding_rows_are_read_from_the_folder(families, tmp_path):
    folder = shutil.copytree(families["student"], tmp_path / "copy")
    assert Tokenizer(folder).special_token_ids == {"bos": 0, "eos": 1, "pad": 2}
    assert Tokenizer(folder).embedding_rows == 640
    (folder / "config.json").write_text('{"vocab_size": 656}')
    assert Tokenizer(folder).embedding_rows == 656
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 700}}')
    assert Tokenizer(folder).embedding_rows == 700


def folder_without_a_tokenizer(folder):
    folder.mkdir()
    return "this folder has no tokenizer.json"


def folder_with_only_a_word_list(folder):
    folder.mkdir()
    (folder / "vocab.txt").write_text("[UNK]\nanna\n")
    return "this folder has only a slow tokenizer (vocab.txt"


def folder_with_broken_json(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": ')
    return "invalid tokenizer.json"


def folder_with_a_json_list(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text('["a list"]')
    return "invalid tokenizer.json"


def missing_folder(folder):
    return "this model or tokenizer folder does not exist"


@pytest.mark.parametrize(
    "prepare",
    [
        folder_without_a_tokenizer,
        folder_with_only_a_word_list,
        folder_with_broken_json,
        folder_with_a_json_list,
        missing_folder,
    ],
)
def test_folder_without_a_fast_tokenizer_is_refused_with_its_path_and_a_hint(tmp_path, prepare):
    folder = tmp_path / "model"
    message = prepare(folder)
    with pytest.raises(XtkError) as raised:
        Tokenizer(folder)
    assert raised.value.what.startswith(message)
    assert str(folder) in raised.value.where
    assert raised.value.hint


def test_invalid_tokenizer_config_is_refused_with_its_path(families, tmp_path):
    folder = shutil.copytree(families["student"], tmp_path / "copy")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(XtkError, match="this file is not valid JSON") as raised:
        Tokenizer(folder)
    assert raised.value.where == str(folder / "tokenizer_config.json")


def test_added_tokens_with_a_gap_in_their_ids_get_the_ids_of_transformers(tmp_path):
    folder = small_inputs.make_student_tokenizer(tmp_path / "gap")
    content = json.loads((folder / "tokenizer.json").read_text())
    last_added = content["added_tokens"][-1]
    max_id = max(*content["model"]["vocab"].values(), last_added["id"])
    content["added_tokens"] += [
        {**last_added, "id": max_id + 5, "content": "<|new|>"},
        {**last_added, "id": max_id + 9, "content": "plainword", "special": False, "normalized": False},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    transformers_tokenizer, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert len(tokenizer) == len(transformers_tokenizer) == max_id + 3
    assert tokenizer.special_token_names[max_id + 1] == "<|new|>"
    assert tokenizer.vocabulary.bytes_of(max_id + 2) == b"plainword"
    assert (
        tokenizer.encode(["a plainword"])[0].ids.tolist()
        == transformers_tokenizer("a plainword", add_special_tokens=False).input_ids
    )
