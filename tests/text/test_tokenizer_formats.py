"""Tokenizers in the formats of tiktoken, mistral-common and SentencePiece, compared with these packages."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import sentencepiece
import small_inputs
import tiktoken
from hypothesis import given
from hypothesis_texts import TEXTS, quick

from xtk.errors import XtkError
from xtk.text import tokenizer_formats
from xtk.text.tokenizer import Tokenizer

PATTERN = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PROSE = [
    *small_inputs.sentences(200, seed=9),
    *small_inputs.ODD_TEXTS,
    "  two  spaces ",
    "tab\tx",
    "\n\n x",
    "  ",
    "a▁b",
    "ﬁne ½",
]


@pytest.fixture(scope="module")
def ranks(families):
    """Return `{token bytes: rank}`: the byte-level vocabulary of the student, in the order of its merges."""
    vocabulary = Tokenizer(families["student"]).vocabulary
    spellings = [spelling for spelling in vocabulary.bytes_by_id if spelling]
    return {spelling: rank for rank, spelling in enumerate(spellings)}


def write_tiktoken(path, ranks):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))


def write_tekken(path, ranks, num_special: int):
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    unused = [{"rank": len(ranks), "token_bytes": base64.b64encode(b"beyond").decode(), "token_str": "beyond"}]
    settings = {
        "pattern": PATTERN, "num_vocab_tokens": len(ranks) + 1, "default_vocab_size": len(ranks) + num_special,
        "default_num_special_tokens": num_special, "version": "v7",
    }  # fmt: skip
    special_names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    special_tokens = [
        {"rank": index, "token_str": name, "is_control": True} for index, name in enumerate(special_names)
    ]
    path.write_text(json.dumps({"config": settings, "vocab": vocabulary + unused, "special_tokens": special_tokens}))


@pytest.fixture(scope="module")
def tekken_tokenizer(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tekken")
    write_tekken(folder / "tekken.json", ranks, 20)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def tiktoken_tokenizer(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_tiktoken(folder / "small.tiktoken", ranks)
    special_tokens = {"<|endoftext|>": len(ranks)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(
            tokenizer_formats.TIKTOKEN_SPECS,
            len(ranks),
            tokenizer_formats.TiktokenSpec(PATTERN, special_tokens, {"eos": "<|endoftext|>"}),
        )
        return Tokenizer(folder)


@given(text=TEXTS)
@quick
def test_token_ids_of_a_tiktoken_file_are_those_of_tiktoken(ranks, tiktoken_tokenizer, tekken_tokenizer, text):
    reference = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    expected = reference.encode_ordinary(text)
    assert tiktoken_tokenizer.encode([text])[0].ids.tolist() == expected
    # mistral-common places its special tokens before the ranks.
    assert tekken_tokenizer.encode([text])[0].ids.tolist() == [token + 20 for token in expected]


def test_special_tokens_of_tiktoken_and_tekken_have_their_ids_and_roles(tiktoken_tokenizer, tekken_tokenizer, ranks):
    assert tiktoken_tokenizer.special_token_ids == {"eos": len(ranks)}
    assert len(tiktoken_tokenizer) == len(ranks) + 1
    assert tekken_tokenizer.special_token_ids == {"bos": 1, "eos": 2, "unk": 0}
    assert tekken_tokenizer.vocabulary.special_tokens["[INST]"] == 3
    assert tekken_tokenizer.vocabulary.special_tokens["<SPECIAL_19>"] == 19
    assert len(tekken_tokenizer) == len(ranks) + 20
    assert b"beyond" not in tekken_tokenizer.vocabulary.bytes_by_id


@pytest.fixture(scope="module")
def sentencepiece_folders(tmp_path_factory):
    """Return folders of SentencePiece models: BPE with byte fallback as Llama 2, BPE with a normalizer, Unigram."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join([*small_inputs.sentences(1500), *small_inputs.ODD_TEXTS]))
    trainer_options = {
        "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "split_digits": True},
        "bpe-nfkc": {"model_type": "bpe", "byte_fallback": True},
        "unigram": {"model_type": "unigram", "user_defined_symbols": ["<sep>"]},
        "no-prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False,
                      "remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    }  # fmt: skip
    for name, options in trainer_options.items():
        (folder / name).mkdir()
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / name / "tokenizer"), vocab_size=420,
            character_coverage=1.0, hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
    return {name: folder / name for name in trainer_options}


@pytest.mark.parametrize("name", ["bpe", "bpe-nfkc", "unigram", "no-prefix"])
def test_token_ids_of_a_sentencepiece_model_are_those_of_sentencepiece(sentencepiece_folders, name):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folders[name] / "tokenizer.model"))
    tokenizer = Tokenizer(sentencepiece_folders[name])
    for text, tokens in zip(PROSE, tokenizer.encode(PROSE), strict=True):
        assert tokens.ids.tolist() == reference.encode(text), text
        assert tokens.byte_ends[-1:].tolist() in ([], [len(text.encode())])
    assert tokenizer.special_token_ids == {"bos": 1, "eos": 2, "unk": 0}
    assert len(tokenizer) == reference.get_piece_size()


@pytest.mark.parametrize("name", ["bpe", "unigram"])
@pytest.mark.parametrize("file_name", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_of_the_folder_are_special_tokens(sentencepiece_folders, tmp_path, name, file_name):
    """As InternLM, whose turn tokens are only in its configuration: one replaces a piece, others follow the last."""
    plain = Tokenizer(sentencepiece_folders[name])
    size = len(plain)
    added = {size - 1: "<|im_start|>", size: "<|im_end|>", size + 2: "<|tool|>"}
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folders[name] / "tokenizer.model").read_bytes())
    configuration: dict[str, object] = {"eos_token": "<|im_end|>"}
    if file_name == "added_tokens.json":
        (tmp_path / file_name).write_text(json.dumps({text: token_id for token_id, text in added.items()}))
    else:
        configuration["added_tokens_decoder"] = {
            str(token_id): {"content": text, "special": True} for token_id, text in added.items()
        }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    tokenizer = Tokenizer(tmp_path)
    assert {tokenizer.special_token_names[token_id]: token_id for token_id in added} == {
        text: token_id for token_id, text in added.items()
    }
    assert tokenizer.end_id == size
    assert len(tokenizer) == size + 3
    unaffected_texts = [text for text in PROSE if size - 1 not in plain.encode([text])[0].ids]
    assert len(unaffected_texts) > 3
    for tokens, plain_tokens in zip(tokenizer.encode(unaffected_texts), plain.encode(unaffected_texts), strict=True):
        assert tokens.ids.tolist() == plain_tokens.ids.tolist()
    (rendered,) = tokenizer.encode_rendered(["<|im_start|>user\nHi<|im_end|>"], [[(17, 19)]])
    assert [rendered.ids[0], rendered.ids[-1]] == [size - 1, size]
    (encoded,) = tokenizer.encode(["<|im_end|>"])
    assert size not in encoded.ids  # in a document, it is text
    for saved_name, content in tokenizer.to_files().items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / saved_name).write_bytes(content)
    assert Tokenizer(tmp_path / "copy").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("token_id", [-1, 2_000_000_000])
def test_added_tokens_with_impossible_ids_are_refused(sentencepiece_folders, tmp_path, token_id):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folders["bpe"] / "tokenizer.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|x|>": token_id}))
    with pytest.raises(XtkError, match="an added token has the id"):
        Tokenizer(tmp_path)


def test_tokenizer_of_another_format_is_restored_from_its_saved_files(sentencepiece_folders, tmp_path):
    first = Tokenizer(sentencepiece_folders["bpe"])
    for name, content in first.to_files().items():
        (tmp_path / name).write_bytes(content)
    second = Tokenizer(tmp_path)
    assert second.fingerprint == first.fingerprint
    assert second.special_token_ids == first.special_token_ids


def test_tokenizer_config_overrides_the_special_tokens_of_the_format(sentencepiece_folders, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folders["bpe"] / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert Tokenizer(tmp_path).special_token_ids == {"bos": 1, "eos": 1, "unk": 0}


def truncated_file(sentencepiece_folders, folder):
    raw = (sentencepiece_folders["bpe"] / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(raw[: len(raw) // 2])


def random_bytes(sentencepiece_folders, folder):
    (folder / "tokenizer.model").write_bytes(bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)))


def unknown_tiktoken_ranks(sentencepiece_folders, folder):
    write_tiktoken(folder / "mine.tiktoken", {bytes([byte]): byte for byte in range(256)})


def ranks_that_are_not_base64(sentencepiece_folders, folder):
    (folder / "mine.tiktoken").write_text("***** 5\n")


def tekken_without_settings(sentencepiece_folders, folder):
    (folder / "tekken.json").write_text('{"vocab": []}')


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (truncated_file, "this tokenizer file is invalid or truncated"),
        (random_bytes, "this tokenizer file is invalid or truncated"),
        (unknown_tiktoken_ranks, "is unknown to xtk"),
        (ranks_that_are_not_base64, "this tokenizer file is invalid or truncated"),
        (tekken_without_settings, "this tokenizer file is invalid or truncated"),
    ],
)
def test_invalid_tokenizer_file_is_refused_with_its_folder(sentencepiece_folders, tmp_path, prepare, message):
    prepare(sentencepiece_folders, tmp_path)
    with pytest.raises(XtkError, match=message) as raised:
        Tokenizer(tmp_path)
    assert str(tmp_path) in raised.value.where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [
        pytest.param("llama3", "tokenizer.model", marks=pytest.mark.long),
        pytest.param("qwen", "qwen.tiktoken", marks=pytest.mark.long),
        ("gpt2", "gpt2.tiktoken"),
    ],
)
def test_real_tiktoken_files_have_the_token_ids_of_tokenizer_json(real_data, tmp_path, name, file):
    expected = Tokenizer(real_data / "tokenizers" / name)
    vocabulary = expected.vocabulary
    ranks = {vocabulary.bytes_by_id[token]: token for token in np.flatnonzero(~vocabulary.special_mask).tolist()}
    write_tiktoken(tmp_path / file, ranks)
    tokenizer = Tokenizer(tmp_path)
    articles = (real_data / "corpora/wikitext2-test.txt").read_text(encoding="utf-8").splitlines()
    texts = [*articles[:1500], *PROSE]
    for encoded, expected_encoded in zip(tokenizer.encode(texts), expected.encode(texts), strict=True):
        assert encoded.ids.tolist() == expected_encoded.ids.tolist()
    assert tokenizer.vocabulary.special_tokens == vocabulary.special_tokens
    assert tokenizer.special_token_ids["eos"] == expected.special_token_ids["eos"]
