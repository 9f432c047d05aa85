"""Tokenizers in the files of tiktoken, mistral-common and SentencePiece, against those packages themselves."""

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
from xtk.tokens import tokenizer_formats
from xtk.tokens.tokenizer import Tokenizer

PATTERN = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PROSE = [
    *small_inputs.sentences(200, seed=9),
    *small_inputs.ODD,
    "  two  spaces ",
    "tab\tx",
    "\n\n x",
    "  ",
    "a▁b",
    "ﬁne ½",
]


@pytest.fixture(scope="module")
def ranks(families):
    """Real ranks: the byte-level vocabulary of the student, in the order of its merges."""
    vocabulary = Tokenizer(families["student"]).vocabulary
    spellings = [spelling for spelling in vocabulary.bytes_by_id if spelling]
    return {spelling: rank for rank, spelling in enumerate(spellings)}


def write_tiktoken(path, ranks):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()))


def write_tekken(path, ranks, specials: int):
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    left_out = [{"rank": len(ranks), "token_bytes": base64.b64encode(b"beyond").decode(), "token_str": "beyond"}]
    settings = {
        "pattern": PATTERN, "num_vocab_tokens": len(ranks) + 1, "default_vocab_size": len(ranks) + specials,
        "default_num_special_tokens": specials, "version": "v7",
    }  # fmt: skip
    named = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    told = [{"rank": at, "token_str": name, "is_control": True} for at, name in enumerate(named)]
    path.write_text(json.dumps({"config": settings, "vocab": vocabulary + left_out, "special_tokens": told}))


@pytest.fixture(scope="module")
def tekken(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tekken")
    write_tekken(folder / "tekken.json", ranks, 20)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def rank_file(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_tiktoken(folder / "small.tiktoken", ranks)
    specials = {"<|endoftext|>": len(ranks)}
    with pytest.MonkeyPatch.context() as known:
        known.setitem(
            tokenizer_formats.TIKTOKEN_SPECS,
            len(ranks),
            tokenizer_formats.TiktokenSpec(PATTERN, specials, {"eos": "<|endoftext|>"}),
        )
        return Tokenizer(folder)


@given(text=TEXTS)
@quick
def test_ranks_are_merged_as_tiktoken_merges_them(ranks, rank_file, tekken, text):
    theirs = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    expected = theirs.encode_ordinary(text)
    assert rank_file.encode([text])[0].ids.tolist() == expected
    # mistral-common counts its special tokens before the ranks.
    assert tekken.encode([text])[0].ids.tolist() == [token + 20 for token in expected]


def test_special_tokens_of_ranks_have_their_ids_and_roles(rank_file, tekken, ranks):
    assert rank_file.special_token_ids == {"eos": len(ranks)}
    assert len(rank_file) == len(ranks) + 1
    assert tekken.special_token_ids == {"bos": 1, "eos": 2, "unk": 0}
    assert tekken.vocabulary.special_tokens["[INST]"] == 3
    assert tekken.vocabulary.special_tokens["<SPECIAL_19>"] == 19
    assert len(tekken) == len(ranks) + 20
    assert b"beyond" not in tekken.vocabulary.bytes_by_id


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models trained by SentencePiece itself: BPE with byte fallback as Llama 2, with a normaliser, Unigram."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join([*small_inputs.sentences(1500), *small_inputs.ODD]))
    kinds = {
        "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "split_digits": True},
        "bpe-nfkc": {"model_type": "bpe", "byte_fallback": True},
        "unigram": {"model_type": "unigram", "user_defined_symbols": ["<sep>"]},
        "no-prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False,
                      "remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
    }  # fmt: skip
    for name, options in kinds.items():
        (folder / name).mkdir()
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text"), model_prefix=str(folder / name / "tokenizer"), vocab_size=420,
            character_coverage=1.0, hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
    return {name: folder / name for name in kinds}


@pytest.mark.parametrize("name", ["bpe", "bpe-nfkc", "unigram", "no-prefix"])
def test_pieces_are_those_of_sentencepiece(models, name):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(models[name] / "tokenizer.model"))
    ours = Tokenizer(models[name])
    for text, tokens in zip(PROSE, ours.encode(PROSE), strict=True):
        assert tokens.ids.tolist() == theirs.encode(text), text
        assert tokens.byte_ends[-1:].tolist() in ([], [len(text.encode())])
    assert ours.special_token_ids == {"bos": 1, "eos": 2, "unk": 0}
    assert len(ours) == theirs.get_piece_size()


@pytest.mark.parametrize("name", ["bpe", "unigram"])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_the_folder_adds_are_tokens(models, tmp_path, name, where):
    """InternLM's marks of turns are in its configuration only: one replaces a piece, others follow the last one."""
    plain = Tokenizer(models[name])
    size = len(plain)
    added = {size - 1: "<|im_start|>", size: "<|im_end|>", size + 2: "<|tool|>"}
    (tmp_path / "tokenizer.model").write_bytes((models[name] / "tokenizer.model").read_bytes())
    configuration: dict[str, object] = {"eos_token": "<|im_end|>"}
    if where == "added_tokens.json":
        (tmp_path / where).write_text(json.dumps({text: number for number, text in added.items()}))
    else:
        configuration["added_tokens_decoder"] = {
            str(number): {"content": text, "special": True} for number, text in added.items()
        }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    tokenizer = Tokenizer(tmp_path)
    assert {tokenizer.special_token_names[number]: number for number in added} == {
        text: number for number, text in added.items()
    }
    assert tokenizer.end_id == size
    assert len(tokenizer) == size + 3
    kept = [text for text in PROSE if size - 1 not in plain.encode([text])[0].ids]
    assert len(kept) > 3
    for one, other in zip(tokenizer.encode(kept), plain.encode(kept), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
    (rendered,) = tokenizer.encode_rendered(["<|im_start|>user\nHi<|im_end|>"], [[(17, 19)]])
    assert [rendered.ids[0], rendered.ids[-1]] == [size - 1, size]
    (again,) = tokenizer.encode(["<|im_end|>"])
    assert size not in again.ids  # in a document it is text
    for file, content in tokenizer.to_files().items():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / file).write_bytes(content)
    assert Tokenizer(tmp_path / "copy").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("number", [-1, 2_000_000_000])
def test_added_tokens_with_impossible_ids_are_refused(models, tmp_path, number):
    (tmp_path / "tokenizer.model").write_bytes((models["bpe"] / "tokenizer.model").read_bytes())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|x|>": number}))
    with pytest.raises(XtkError, match="an added token has the id"):
        Tokenizer(tmp_path)


def test_a_tokenizer_of_another_format_comes_back_from_its_own_files(models, tmp_path):
    first = Tokenizer(models["bpe"])
    for name, content in first.to_files().items():
        (tmp_path / name).write_bytes(content)
    second = Tokenizer(tmp_path)
    assert second.fingerprint == first.fingerprint
    assert second.special_token_ids == first.special_token_ids


def test_the_configuration_of_the_folder_holds_over_the_formats_own(models, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((models["bpe"] / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert Tokenizer(tmp_path).special_token_ids == {"bos": 1, "eos": 1, "unk": 0}


def cut_short(models, folder):
    raw = (models["bpe"] / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(raw[: len(raw) // 2])


def another_file(models, folder):
    (folder / "tokenizer.model").write_bytes(bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)))


def ranks_of_an_unknown_tokenizer(models, folder):
    write_tiktoken(folder / "mine.tiktoken", {bytes([byte]): byte for byte in range(256)})


def ranks_that_are_no_base64(models, folder):
    (folder / "mine.tiktoken").write_text("***** 5\n")


def tekken_without_its_settings(models, folder):
    (folder / "tekken.json").write_text('{"vocab": []}')


@pytest.mark.parametrize(
    ("prepare", "what"),
    [
        (cut_short, "this tokenizer file is invalid or truncated"),
        (another_file, "this tokenizer file is invalid or truncated"),
        (ranks_of_an_unknown_tokenizer, "is unknown to xtk"),
        (ranks_that_are_no_base64, "this tokenizer file is invalid or truncated"),
        (tekken_without_its_settings, "this tokenizer file is invalid or truncated"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named(models, tmp_path, prepare, what):
    prepare(models, tmp_path)
    with pytest.raises(XtkError, match=what) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize(
    ("name", "file"),
    [
        pytest.param("llama3", "tokenizer.model", marks=pytest.mark.long),
        pytest.param("qwen", "qwen.tiktoken", marks=pytest.mark.long),
        ("gpt2", "gpt2.tiktoken"),
    ],
)
def test_the_rank_files_of_real_tokenizers_give_the_ids_of_their_tokenizer_json(real_data, tmp_path, name, file):
    expected = Tokenizer(real_data / "tokenizers" / name)
    vocabulary = expected.vocabulary
    ranks = {vocabulary.bytes_by_id[token]: token for token in np.flatnonzero(~vocabulary.special_mask).tolist()}
    write_tiktoken(tmp_path / file, ranks)
    found = Tokenizer(tmp_path)
    articles = (real_data / "corpora/wikitext2-test.txt").read_text(encoding="utf-8").splitlines()
    texts = [*articles[:1500], *PROSE]
    for ours, theirs in zip(found.encode(texts), expected.encode(texts), strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
    assert found.vocabulary.special_tokens == vocabulary.special_tokens
    assert found.special_token_ids["eos"] == expected.special_token_ids["eos"]
