"""A pruned vocabulary: the same tokens for texts whose tokens are kept, every byte encodable, the same logits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import small_inputs
import tokenizers
import torch

from xtk.errors import XtkError
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.tokenizer import Tokenizer
from xtk.transplant.corpus_token_counts import count_tokens
from xtk.transplant.model_transplant import TransplantConfig, pruned_tokenizer, transplant_model
from xtk.transplant.vocabulary_pruning import BpeVocabulary, choose_tokens

TEXTS = [*small_inputs.sentences(120, seed=9), *small_inputs.ODD, "  two   spaces\n\n\nand 99 lines"]


def check_exact(old: Tokenizer, files: dict[str, bytes], kept: np.ndarray, texts: list[str]) -> int:
    """Compare tokens of texts; return how many have only kept tokens."""
    with pruned_tokenizer(files, "pruned") as new:
        assert len(new) == len(kept)
        same = set(kept.tolist())
        exact = 0
        for text, before, after in zip(texts, old.encode(texts), new.encode(texts), strict=True):
            if set(before.ids.tolist()) <= same:
                exact += 1
                np.testing.assert_array_equal(kept[after.ids], before.ids)
            else:
                assert len(after.ids) >= len(before.ids)
            spelled = b"".join(new.vocabulary.bytes_by_id[token] for token in after.ids.tolist())
            assert spelled.decode("utf-8", "replace").strip() == text.strip()
        for name, token in old.special_token_ids.items():
            assert kept[new.special_token_ids[name]] == token
    return exact


def make_tokenizer_without_some_bytes(folder: Path) -> Path:
    """Write a tokenizer without tokens of the bytes that its training text has not, as SmolLM2's."""
    tokenizer = small_inputs.byte_level_tokenizer(small_inputs.TEACHER_SPLIT, 400, ["<|end|>"], TEXTS)
    content = json.loads(tokenizer.to_str())
    used = {letter for word, _ in small_inputs.word_counts(tokenizer, TEXTS) for letter in word}
    names = [name for name in content["model"]["vocab"] if len(name) > 1 or name in used]
    content["model"]["vocab"] = {name: at for at, name in enumerate(names)}
    return small_inputs.save_tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), folder, eos_token="<|end|>")


MAKERS = [
    make_tokenizer_without_some_bytes,
    small_inputs.make_student_tokenizer,
    small_inputs.make_teacher_tokenizer,
    small_inputs.make_metaspace_tokenizer,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.9])
def test_texts_of_kept_tokens_have_the_same_tokens(make, fraction, tmp_path):
    old = Tokenizer(make(tmp_path / "tokenizer"))
    vocabulary = BpeVocabulary(old)
    room = len(old) - len(vocabulary.smallest)
    size = len(vocabulary.smallest) + int(fraction * room)
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 5, len(old))
    spelled = [one.decode("utf-8", "ignore") for one in old.vocabulary.bytes_by_id]
    pieces = [" ".join(generator.choice(spelled, 6)) for _ in range(200)]
    for given in (None, counts):
        files, kept = vocabulary.pruned(choose_tokens(vocabulary, given, size))
        assert len(vocabulary.smallest) <= len(kept) <= size
        texts = [text for text in (*TEXTS, *pieces) if text.isascii() or old.unknown_id is None]
        check_exact(old, files, kept, texts)


def test_all_texts_of_the_corpus_are_exact_if_their_tokens_are_kept(tmp_path):
    old = Tokenizer(small_inputs.make_student_tokenizer(tmp_path / "tokenizer"))
    from xtk.artifacts.corpus_reader import Corpus

    corpus = Corpus([str(small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS))])
    vocabulary = BpeVocabulary(old)
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, count_tokens(old, corpus), None))
    assert check_exact(old, files, kept, TEXTS) == len(TEXTS)
    assert len(kept) < len(old)


def test_a_word_found_whole_is_kept_without_merges(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(
        str(small_inputs.make_student_tokenizer(tmp_path / "t") / "tokenizer.json")
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"]["zebra"] = max(content["model"]["vocab"].values()) + 1  # no merges make it
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    old = Tokenizer(tmp_path / "t")
    vocabulary = BpeVocabulary(old)
    token = old.vocabulary.token_of_bytes[b"zebra"]
    files, kept = vocabulary.pruned({token})
    with pruned_tokenizer(files, "pruned") as new:
        (found,) = new.encode(["zebra"])
        assert kept[found.ids].tolist() == [token]


def test_logits_of_kept_tokens_are_those_of_the_original(tmp_path):
    folder = gguf_files.make_llama(tmp_path / "llama")
    old = Tokenizer(folder)
    vocabulary = BpeVocabulary(old)
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, None, 400))
    with pruned_tokenizer(files, "pruned") as new:
        manifest = transplant_model(TransplantConfig(folder, None, old, new, kept=kept), tmp_path / "small")
        assert manifest["method"] == "kept"
        assert manifest["composed"] == manifest["unknown"] == 0
    (tokens,) = Tokenizer(tmp_path / "small").encode(["Anna has 12"])
    models = [load_causal_lm(place) for place in (folder, tmp_path / "small")]
    with torch.no_grad():
        before, after = (
            model(torch.from_numpy(ids.astype(np.int64))[None]).logits
            for model, ids in zip(models, (kept[tokens.ids], tokens.ids), strict=True)
        )
    torch.testing.assert_close(after[..., : len(kept)], before[..., torch.from_numpy(kept.astype(np.int64))])
    assert (tmp_path / "small" / "chat_template.jinja").read_text() == gguf_files.TEMPLATE


def test_tokens_of_the_post_processor_are_kept_and_ids_are_those_of_the_loaded_tokenizer(tmp_path):
    folder = gguf_files.make_llama(tmp_path / "llama")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    plain = next(name for name, number in content["model"]["vocab"].items() if number == 390)
    content["added_tokens"].append(
        {"id": 7, "content": plain, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
         "special": False}
    )  # fmt: skip
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "first", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"first": {"id": "first", "ids": [380], "tokens": ["first"]}},
    }
    path.write_text(json.dumps(content))
    old = Tokenizer(folder)
    vocabulary = BpeVocabulary(old)
    assert {380, 390} <= vocabulary.smallest
    files, kept = vocabulary.pruned(set())
    new = json.loads(files["tokenizer.json"])
    assert kept[new["post_processor"]["special_tokens"]["first"]["ids"]].tolist() == [380]
    assert [kept[token["id"]] for token in new["added_tokens"] if token["content"] == plain] == [390]


def test_other_kinds_of_tokenizers_are_refused(tmp_path, families):
    word_piece = Tokenizer(small_inputs.make_word_piece_tokenizer(tmp_path / "wordpiece"))
    with pytest.raises(XtkError, match="can be pruned exactly; this one is WordPiece"):
        BpeVocabulary(word_piece)


@pytest.mark.skipif("XTK_DATA" not in os.environ, reason="needs real tokenizers: set XTK_DATA")
@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama3", "mistral-v1"])
def test_real_tokenizers_are_exact_on_real_text(name):
    data = Path(os.environ["XTK_DATA"])
    old = Tokenizer(data / "tokenizers" / name)
    lines = (data / "corpora" / "wikitext2-valid.txt").read_text(encoding="utf-8")[:60000].split("\n")
    texts = [line for line in lines if line.strip()]
    vocabulary = BpeVocabulary(old)
    counts = np.zeros(len(old), np.int64)
    for encoded in old.encode(texts[: len(texts) // 2]):
        counts += np.bincount(encoded.ids, minlength=len(old))
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, counts, None))
    assert check_exact(old, files, kept, texts) >= len(texts) // 2
