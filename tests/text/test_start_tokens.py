"""What a model reads before a text: as its own tokenizer in transformers, or what --start-token names."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import tokenizers
from chat_families import FAMILIES, write_family
from tokenizer_families import MAKERS
from transformers import AutoTokenizer

from xtk.errors import XtkError
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

TEXT = "Anna has 12 apples."
REAL = [Path(os.environ["XTK_DATA"], "tokenizers", name) for name in ("gpt2", "llama3", "mistral-v1", "qwen")] \
    if "XTK_DATA" in os.environ else []  # fmt: skip


def text_ids(folder, start_token="auto"):
    """Return xtk's tokens of a text, without the end token after it."""
    tokenizer = Tokenizer(folder, start_token=start_token)
    (sequence,) = tokenize_documents(tokenizer, [Document.from_text(TEXT)])
    ids = sequence.ids.tolist()
    return ids if tokenizer.end_id is None else ids[:-1]


def own_ids(folder):
    return AutoTokenizer.from_pretrained(folder)(TEXT).input_ids


def post_processor(start_ids, names):
    pairs = zip(names, start_ids, strict=True)
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in pairs}
    front = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    text, pair = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    single, both = [*front, text], [*front, text, pair]
    return {"type": "TemplateProcessing", "single": single, "pair": both, "special_tokens": special}


def variants(folder, target):
    """Yield folders with this tokenizer: each post-processor, each flag, each class that real models name."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = [settings.get("bos_token") or settings.get("eos_token"), settings.get("eos_token")]
    names = [name["content"] if isinstance(name, dict) else name for name in names]
    ids = [backend.token_to_id(name) for name in names]
    processors = [content["post_processor"], None, post_processor([], []), post_processor(ids[:1], names[:1]),
                  post_processor(ids, names)]  # fmt: skip
    for at, (processor, flag) in enumerate(itertools.product(processors, (None, True, False))):
        place = target / str(at)
        place.mkdir(parents=True)
        (place / "tokenizer.json").write_text(json.dumps({**content, "post_processor": processor}))
        own = {name: value for name, value in settings.items() if name != "add_bos_token"}
        (place / "tokenizer_config.json").write_text(
            json.dumps(own if flag is None else {**own, "add_bos_token": flag})
        )
        yield place


def test_ids_of_a_text_equal_those_of_transformers_for_a_class_that_ignores_the_post_processor(families, tmp_path):
    for folder in variants(families["gpt2"], tmp_path):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**settings, "tokenizer_class": "GPTNeoXTokenizerFast"})
        )
        start = Tokenizer(folder).start_ids
        assert list(start) == own_ids(folder)[: len(start)] == []
        assert own_ids(folder)[0] != Tokenizer(folder).end_id


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_ids_of_a_text_equal_those_of_transformers_for_every_family_and_flag(name, families, tmp_path):
    starts = set()
    for folder in variants(families[name], tmp_path):
        tokenizer = Tokenizer(folder)
        starts.add(tokenizer.start_ids)
        plain = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
        assert [*tokenizer.start_ids, *tokenizer.encode([TEXT])[0].ids.tolist()] == plain, folder
    assert () in starts
    assert {1, 2} <= {len(start) for start in starts}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_of_a_text_equal_those_of_transformers_for_chat_families(name, tmp_path):
    folder = write_family(name, tmp_path)
    assert text_ids(folder) == own_ids(folder)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="real tokenizers: set XTK_DATA")
@pytest.mark.parametrize("folder", REAL, ids=lambda folder: folder.name)
def test_ids_of_a_text_equal_those_of_transformers_for_real_tokenizers(folder):
    assert text_ids(folder) == own_ids(folder)
    assert (len(Tokenizer(folder).start_ids) == 1) == (folder.name == "llama3")


@pytest.mark.parametrize("flag", [None, True, False])
def test_ids_of_a_text_equal_those_of_transformers_for_a_sentencepiece_file(flag, tmp_path):
    small_inputs.write_sentencepiece_model(tmp_path)
    settings = {"tokenizer_class": "LlamaTokenizer", **({} if flag is None else {"add_bos_token": flag})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    start = own_ids(tmp_path)[:1]
    assert Tokenizer(tmp_path).start_ids == ((1,) if flag else ())
    assert (start == [1]) == bool(flag)


def test_start_token_is_chosen_by_role_or_name_and_survives_processes(families):
    tokenizer = Tokenizer(families["student"])
    assert (tokenizer.start_ids, tokenizer.end_id) == ((0,), 1)
    for start_token, ids in (("none", ()), ("bos", (0,)), ("eos", (1,)), ("<|pad|>", (2,))):
        chosen = Tokenizer(families["student"], start_token=start_token)
        assert chosen.start_ids == tokenizer.with_start_token(start_token).start_ids == ids
        assert pickle.loads(pickle.dumps(chosen)).start_ids == ids
        assert chosen.fingerprint == tokenizer.fingerprint
        (sequence,) = tokenize_documents(chosen, [Document.from_text(TEXT)])
        assert tuple(sequence.ids[: len(ids)]) == ids
        # Without a start token nothing predicts the first token.
        assert np.flatnonzero(sequence.train_mask)[0] == max(1, len(ids))
    assert tokenizer.with_start_token("none").with_start_token("auto").start_ids == (0,)


@pytest.mark.parametrize("start_token", ["<|none|>", "bos", "Anna"])
def test_a_start_token_that_the_tokenizer_lacks_is_refused(start_token, families):
    with pytest.raises(XtkError, match=f"no special token '{start_token.replace('|', '.')}'") as raised:
        Tokenizer(families["teacher"], start_token=start_token)
    assert raised.value.hint == "use --start-token auto, none, eos or a special token's text"


def test_a_start_token_outside_of_the_vocabulary_is_refused(families, tmp_path):
    content = json.loads((families["student"] / "tokenizer.json").read_text())
    content["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = [700_000]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(XtkError, match="puts the token id 700000 before a text"):
        Tokenizer(tmp_path)
    assert Tokenizer(tmp_path, start_token="none").start_ids == ()


def test_a_tokenizer_that_cannot_encode_every_letter_is_loaded(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"b": 0}, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).start_ids == ()


def test_files_with_a_chosen_start_token_are_read_so_by_transformers(families, tmp_path):
    for start_token in ("none", "eos", "<|pad|>"):
        chosen = Tokenizer(families["student"], start_token=start_token)
        place = tmp_path / start_token.strip("<|>")
        place.mkdir()
        for name, content in chosen.to_files(with_start=True).items():
            (place / name).write_bytes(content)
        assert own_ids(place) == text_ids(place) == text_ids(families["student"], start_token)


def test_tokenizer_without_any_post_processor_has_no_start_token(tmp_path):
    tokenizer = small_inputs.byte_level_tokenizer(
        small_inputs.STUDENT_SPLIT, 400, ["<|begin_of_text|>", "<|end_of_text|>"], small_inputs.sentences(100)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(tmp_path).start_ids == ()
