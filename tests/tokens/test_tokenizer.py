"""Tokenizers: where each token ends in the text, and folders that hold none."""

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
from test_properties import readable_byte_ends
from transformers import AutoTokenizer

from xtk.errors import XtkError
from xtk.tokens.alignment_numba import token_byte_ends
from xtk.tokens.tokenizer import Tokenizer

UNCHANGING = ["student", "teacher", "metaspace"]  # without a normaliser


@pytest.fixture(scope="session")
def tokenizer_of(families):
    return {name: Tokenizer(folder) for name, folder in families.items()}


@pytest.mark.parametrize("name", UNCHANGING)
@given(text=TEXTS)
@quick
def test_tokens_spell_the_text_byte_for_byte(tokenizer_of, name, text):
    assume(name != "metaspace" or "▁" not in text)  # the letter that it writes spaces with
    tokenizer = tokenizer_of[name]
    (tokens,) = tokenizer.encode([text])
    spellings = [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids]
    whole = b"".join(spellings)
    assert whole == text.encode() or (name == "metaspace" and whole == b" " + text.encode())
    start = 0
    for spelling, end in zip(spellings, tokens.byte_ends.tolist(), strict=True):
        # The space in front of a metaspace text is the tokenizer's own.
        assert text.encode()[start:end] in (spelling, spelling.removeprefix(b" ") if start == 0 else spelling)
        start = end


@pytest.mark.parametrize("name", FAMILIES)
@given(before=st.text(max_size=5), spelling=st.sampled_from(SPECIAL_SPELLINGS), after=st.text(max_size=5))
@quick
def test_the_spelling_of_a_special_token_is_not_that_token(tokenizer_of, name, before, spelling, after):
    tokenizer = tokenizer_of[name]
    (tokens,) = tokenizer.encode([before + spelling + after])
    controls = set(tokenizer.vocabulary.special_tokens.values()) - {tokenizer.special_token_ids.get("unk")}
    assert not controls & set(tokens.ids.tolist())


@pytest.mark.parametrize(
    ("text", "tokens", "ends"),
    [
        ("ze\u0301x", ["z", "é", "x"], [1, 4, 5]),  # composed: the mark belongs to its letter
        ("a\u0302\u0323x", ["\u1ead", "x"], [5, 6]),  # put into order and composed
        ("\u1112\u1161\u11abx", ["\ud55c", "x"], [9, 10]),  # Hangul from its letters
        ("\u2126x", ["\u03a9", "x"], [3, 4]),
    ],
)
def test_what_a_normaliser_composed_ends_where_its_last_character_ended(tokenizer_of, text, tokens, ends):
    tokenizer = tokenizer_of["composing"]
    (encoded,) = tokenizer.encode([text])
    spellings = [tokenizer.vocabulary.bytes_of(token) for token in encoded.ids]
    assert b"".join(spellings).decode() == "".join(tokens)
    positions = np.cumsum([len(token.encode()) for token in tokens]).tolist()
    found = dict(
        zip(np.cumsum([len(spelling) for spelling in spellings]).tolist(), encoded.byte_ends.tolist(), strict=True)
    )
    assert [found[position] for position in positions] == ends
    # Tokens inside of a rewritten character end with the character before it.
    assert set(encoded.byte_ends.tolist()) <= {0, *ends}


def test_offsets_are_not_those_that_a_post_processor_trimmed(tmp_path):
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


def test_a_control_token_among_a_model_s_own_pieces_is_found_by_the_model_and_refused_by_us(families, tokenizer_of):
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


def test_exact_says_that_the_tokens_spell_the_text(tokenizer_of):
    def exact(name, text):
        return tokenizer_of[name].encode([text])[0].exact

    for name in ("student", "gpt2-prefix", "metaspace", "llama2", "gemma"):
        assert exact(name, "Anna <0x41> ## Ġ café 日")
    assert not exact("metaspace", "a▁b")  # it reads "▁" as a space
    assert exact("composing", "é")
    assert not exact("composing", "e\u0301")
    assert not exact("characters", "☃")


def test_accents_and_spaces_that_word_piece_drops_belong_to_its_tokens(tokenizer_of):
    tokenizer = tokenizer_of["word-piece"]
    text = "Anna  lèft 12\n"
    (tokens,) = tokenizer.encode([text])
    assert [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids] == [b"anna", b"left", b"12"]
    assert tokens.byte_ends.tolist() == [4, 11, 15]


@given(data=st.data())
@quick
def test_the_byte_kernel_agrees_with_its_readable_twin(tokenizer_of, data):
    vocabulary = tokenizer_of[data.draw(st.sampled_from(["student", "metaspace", "word-piece"]))].vocabulary
    ids = np.array(data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12)), np.int32)
    spellings = [vocabulary.bytes_of(token) for token in ids]
    whole = b"".join(spellings)
    text = data.draw(
        st.sampled_from([whole, whole.removeprefix(b" "), whole[:-1], whole + b"x", b"x" + whole[1:], whole[1:], b""])
    )
    ends, exact = token_byte_ends(vocabulary.token_bytes, vocabulary.offsets, ids, np.frombuffer(text, np.uint8))
    assert (ends.tolist() if exact else None) == readable_byte_ends(spellings, text)


@pytest.mark.parametrize("name", ["student", "teacher", "composing"])
@given(spelling=st.one_of(st.binary(min_size=1, max_size=12), st.text(min_size=1, max_size=8).map(str.encode)))
@quick
def test_byte_level_tokenizers_spell_any_bytes(tokenizer_of, name, spelling):
    tokenizer = tokenizer_of[name]
    (ids,) = tokenizer.encode_bytes([spelling])
    assert b"".join(tokenizer.vocabulary.bytes_of(token) for token in ids) == spelling


def test_what_cannot_be_spelled_has_no_spelling(tokenizer_of):
    assert tokenizer_of["word-piece"].encode_bytes([b"\xff", "日本".encode(), b" the"])[0] is None
    assert tokenizer_of["metaspace"].encode_bytes([b""]) == [None]


def test_a_token_is_spelled_as_inside_a_text(tokenizer_of):
    tokenizer = tokenizer_of["teacher"]
    (ids,) = tokenizer.encode_bytes([b" 201"])
    assert [tokenizer.vocabulary.bytes_of(token) for token in ids] == [b" ", b"2", b"0", b"1"]


@pytest.mark.parametrize("name", FAMILIES)
def test_truncation_and_padding_change_neither_the_fingerprint_nor_the_tokens(families, tokenizer_of, name, tmp_path):
    shutil.copytree(families[name], tmp_path / "copy")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "copy/tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "copy/tokenizer.json"))
    copy = Tokenizer(tmp_path / "copy")
    assert copy.fingerprint == tokenizer_of[name].fingerprint
    text = "Anna has 1234 apples and gives 12 to Bert."
    assert copy.encode([text])[0].ids.tolist() == tokenizer_of[name].encode([text])[0].ids.tolist()


def test_every_tokenizer_has_a_fingerprint_of_its_own(tokenizer_of):
    assert len({tokenizer.fingerprint for tokenizer in tokenizer_of.values()}) == len(FAMILIES)


def test_a_chat_template_is_named_wherever_it_is_written(families, tmp_path):
    folder = shutil.copytree(families["student"], tmp_path / "copy")
    assert Tokenizer(folder).template_fingerprint is None
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    in_a_file = Tokenizer(folder).template_fingerprint
    (folder / "chat_template.jinja").unlink()
    configuration = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**configuration, "chat_template": "{{ messages }}"}))
    assert Tokenizer(folder).template_fingerprint == in_a_file is not None


def test_roles_and_width_are_read_from_the_folder(families, tmp_path):
    folder = shutil.copytree(families["student"], tmp_path / "copy")
    assert Tokenizer(folder).special_token_ids == {"bos": 0, "eos": 1, "pad": 2}
    assert Tokenizer(folder).embedding_rows == 640
    (folder / "config.json").write_text('{"vocab_size": 656}')
    assert Tokenizer(folder).embedding_rows == 656
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 700}}')
    assert Tokenizer(folder).embedding_rows == 700


def test_a_tokenizer_without_bos_starts_with_eos(tokenizer_of):
    assert (tokenizer_of["student"].start_id, tokenizer_of["student"].end_id) == (0, 1)
    assert (tokenizer_of["teacher"].start_id, tokenizer_of["teacher"].end_id) == (1, 1)


def folder_without_a_tokenizer(folder):
    folder.mkdir()
    return "this folder has no tokenizer.json"


def folder_with_words_alone(folder):
    folder.mkdir()
    (folder / "vocab.txt").write_text("[UNK]\nanna\n")
    return "this folder has only a slow tokenizer (vocab.txt"


def folder_with_broken_json(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": ')
    return "invalid tokenizer.json"


def folder_with_other_json(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text('["a list"]')
    return "invalid tokenizer.json"


def no_folder(folder):
    return "this model or tokenizer folder does not exist"


@pytest.mark.parametrize(
    "prepare",
    [
        folder_without_a_tokenizer,
        folder_with_words_alone,
        folder_with_broken_json,
        folder_with_other_json,
        no_folder,
    ],
)
def test_a_folder_without_a_fast_tokenizer_is_named_with_a_next_step(tmp_path, prepare):
    folder = tmp_path / "model"
    what = prepare(folder)
    with pytest.raises(XtkError) as caught:
        Tokenizer(folder)
    assert caught.value.what.startswith(what)
    assert str(folder) in caught.value.where
    assert caught.value.hint


def test_a_broken_configuration_beside_the_tokenizer_is_named(families, tmp_path):
    folder = shutil.copytree(families["student"], tmp_path / "copy")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(XtkError, match="this file is not valid JSON") as caught:
        Tokenizer(folder)
    assert caught.value.where == str(folder / "tokenizer_config.json")


def test_added_tokens_whose_numbers_leave_a_gap_have_those_of_transformers(tmp_path):
    folder = small_inputs.make_student_tokenizer(tmp_path / "gap")
    content = json.loads((folder / "tokenizer.json").read_text())
    last = content["added_tokens"][-1]
    most = max(*content["model"]["vocab"].values(), last["id"])
    content["added_tokens"] += [
        {**last, "id": most + 5, "content": "<|new|>"},
        {**last, "id": most + 9, "content": "plainword", "special": False, "normalized": False},
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    assert len(ours) == len(theirs) == most + 3
    assert ours.special_token_names[most + 1] == "<|new|>"
    assert ours.vocabulary.bytes_of(most + 2) == b"plainword"
    assert ours.encode(["a plainword"])[0].ids.tolist() == theirs("a plainword", add_special_tokens=False).input_ids
