"""Vocabulary pruning: texts with only kept tokens keep their tokens and logits, and every byte stays encodable."""

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
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.errors import XtkError
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer
from xtk.transplant.model_transplant import TransplantConfig, pruned_tokenizer, transplant_model
from xtk.transplant.token_sources import TokenSources
from xtk.transplant.vocabulary_pruning import BpeVocabulary, choose_tokens, count_tokens

TEXTS = [*small_inputs.sentences(120, seed=9), *small_inputs.ODD_TEXTS, "  two   spaces\n\n\nand 99 lines"]


def count_exact_texts(old: Tokenizer, files: dict[str, bytes], kept: np.ndarray, texts: list[str]) -> int:
    """Compare the tokens of texts before and after pruning; return the number of texts with only kept tokens."""
    with pruned_tokenizer(files, "pruned") as new:
        assert len(new) == len(kept)
        kept_ids = set(kept.tolist())
        num_exact = 0
        for text, old_tokens, new_tokens in zip(texts, old.encode(texts), new.encode(texts), strict=True):
            if set(old_tokens.ids.tolist()) <= kept_ids:
                num_exact += 1
                np.testing.assert_array_equal(kept[new_tokens.ids], old_tokens.ids)
            else:
                assert len(new_tokens.ids) >= len(old_tokens.ids)
            decoded = b"".join(new.vocabulary.bytes_by_id[token] for token in new_tokens.ids.tolist())
            assert decoded.decode("utf-8", "replace").strip() == text.strip()
        for role, token in old.special_token_ids.items():
            assert kept[new.special_token_ids[role]] == token
    return num_exact


def make_tokenizer_without_some_bytes(folder: Path) -> Path:
    """Write a tokenizer without tokens for bytes that its training text does not contain, as SmolLM2's."""
    tokenizer = small_inputs.byte_level_tokenizer(small_inputs.TEACHER_SPLIT, 400, ["<|end|>"], TEXTS)
    content = json.loads(tokenizer.to_str())
    used = {letter for word, _ in small_inputs.word_counts(tokenizer, TEXTS) for letter in word}
    names = [name for name in content["model"]["vocab"] if len(name) > 1 or name in used]
    content["model"]["vocab"] = {name: index for index, name in enumerate(names)}
    return small_inputs.save_tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), folder, eos_token="<|end|>")


MAKERS = [
    make_tokenizer_without_some_bytes,
    small_inputs.make_student_tokenizer,
    small_inputs.make_teacher_tokenizer,
    small_inputs.make_metaspace_tokenizer,
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.9])
def test_texts_with_only_kept_tokens_have_the_same_tokens(make, fraction, tmp_path):
    old = Tokenizer(make(tmp_path / "tokenizer"))
    vocabulary = BpeVocabulary(old)
    num_removable = len(old) - len(vocabulary.smallest)
    size = len(vocabulary.smallest) + int(fraction * num_removable)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, len(old))
    token_texts = [token_bytes.decode("utf-8", "ignore") for token_bytes in old.vocabulary.bytes_by_id]
    random_texts = [" ".join(rng.choice(token_texts, 6)) for _ in range(200)]
    for token_counts in (None, counts):
        files, kept = vocabulary.pruned(choose_tokens(vocabulary, token_counts, size))
        assert len(vocabulary.smallest) <= len(kept) <= size
        texts = [text for text in (*TEXTS, *random_texts) if text.isascii() or old.unknown_id is None]
        count_exact_texts(old, files, kept, texts)


def test_all_texts_of_the_counted_corpus_keep_their_tokens(tmp_path):
    old = Tokenizer(small_inputs.make_student_tokenizer(tmp_path / "tokenizer"))
    from xtk.data.corpus_reader import Corpus

    corpus = Corpus([str(small_inputs.write_jsonl(tmp_path / "c.jsonl", TEXTS))])
    vocabulary = BpeVocabulary(old)
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, count_tokens(old, corpus), None))
    assert count_exact_texts(old, files, kept, TEXTS) == len(TEXTS)
    assert len(kept) < len(old)


PLACEHOLDERS = ["<unused{}>", "<|reserved_special_token_{}|>", "[control_{}]", "<|dummy_{}|>",
                "<｜place▁holder▁no▁{}｜>"]  # fmt: skip


@pytest.mark.parametrize("pattern", PLACEHOLDERS)
def test_reserved_tokens_are_kept_only_where_they_are_used(pattern, tmp_path):
    """Gemma has 6,242 `<unusedN>`, more rows than most pruned vocabularies have."""
    from xtk.data.corpus_reader import Corpus

    folder = small_inputs.make_student_tokenizer(tmp_path / "t")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    used = {"role": pattern.format(30), "data": pattern.format(31), "template": pattern.format(32)}
    placeholders = {pattern.format(number) for number in range(40)}
    tokenizer.add_tokens([used["data"]])  # xtk does not read special tokens in text
    tokenizer.add_special_tokens([*sorted(placeholders - {used["data"]}), "<|fim_prefix|>", "<tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"pad_token": used["role"], "chat_template": "{{ messages[0].content }}" + used["template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    old = Tokenizer(folder)
    texts = [*TEXTS[:20], f"a {used['data']} b"]
    vocabulary = BpeVocabulary(old)
    corpus = Corpus([str(small_inputs.write_jsonl(tmp_path / "c.jsonl", texts))])
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, count_tokens(old, corpus), None))
    with pruned_tokenizer(files, "pruned") as new:
        names = {token["content"] for token in json.loads(files["tokenizer.json"])["added_tokens"]}
        removed = placeholders - set(used.values())
        assert {"<|fim_prefix|>", "<tool_call>", *used.values()} <= names
        assert not removed & {*names, *new.vocabulary.special_tokens}
        assert names | removed == {token["content"] for token in vocabulary.content["added_tokens"]}
        assert len(new) == len(kept)
    assert count_exact_texts(old, files, kept, texts) == len(texts)


def test_vocabulary_word_without_merges_is_kept_with_ignore_merges(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(
        str(small_inputs.make_student_tokenizer(tmp_path / "t") / "tokenizer.json")
    )
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    content["model"]["vocab"]["zebra"] = max(content["model"]["vocab"].values()) + 1  # no merges result in it
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    old = Tokenizer(tmp_path / "t")
    vocabulary = BpeVocabulary(old)
    token = old.vocabulary.token_of_bytes[b"zebra"]
    files, kept = vocabulary.pruned({token})
    with pruned_tokenizer(files, "pruned") as new:
        (encoded,) = new.encode(["zebra"])
        assert kept[encoded.ids].tolist() == [token]


def test_logits_of_kept_tokens_are_unchanged(tmp_path):
    folder = gguf_files.make_llama(tmp_path / "llama")
    old = Tokenizer(folder)
    vocabulary = BpeVocabulary(old)
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, None, 400))
    with pruned_tokenizer(files, "pruned") as new:
        manifest = transplant_model(TransplantConfig(folder, None, old, new, kept=kept), tmp_path / "small")
        assert manifest["method"] == "kept"
        assert manifest["composed"] == manifest["unknown"] == 0
    (tokens,) = Tokenizer(tmp_path / "small").encode(["Anna has 12"])
    models = [load_causal_lm(ModelRef(path)) for path in (folder, tmp_path / "small")]
    with torch.no_grad():
        old_logits, new_logits = (
            model(torch.from_numpy(ids.astype(np.int64))[None]).logits
            for model, ids in zip(models, (kept[tokens.ids], tokens.ids), strict=True)
        )
    torch.testing.assert_close(new_logits[..., : len(kept)], old_logits[..., torch.from_numpy(kept.astype(np.int64))])
    assert (tmp_path / "small" / "chat_template.jinja").read_text() == gguf_files.TEMPLATE


def test_post_processor_and_added_tokens_are_kept_by_the_ids_of_the_loaded_tokenizer(tmp_path):
    folder = gguf_files.make_llama(tmp_path / "llama")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    plain_token = next(name for name, token_id in content["model"]["vocab"].items() if token_id == 390)
    content["added_tokens"].append(
        {"id": 7, "content": plain_token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
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
    assert [kept[token["id"]] for token in new["added_tokens"] if token["content"] == plain_token] == [390]


def test_word_piece_tokenizer_is_refused(tmp_path, families):
    word_piece = Tokenizer(small_inputs.make_word_piece_tokenizer(tmp_path / "wordpiece"))
    with pytest.raises(XtkError, match="can be pruned exactly; this one is WordPiece"):
        BpeVocabulary(word_piece)


@pytest.mark.slow
@pytest.mark.skipif("XTK_DATA" not in os.environ, reason="needs real tokenizers: set XTK_DATA")
@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama3", "mistral-v1"])
def test_real_tokenizers_have_the_same_tokens_on_counted_real_text(name):
    data = Path(os.environ["XTK_DATA"])
    old = Tokenizer(data / "tokenizers" / name)
    lines = (data / "corpora" / "wikitext2-valid.txt").read_text(encoding="utf-8")[:60000].split("\n")
    texts = [line for line in lines if line.strip()]
    vocabulary = BpeVocabulary(old)
    counts = np.zeros(len(old), np.int64)
    for encoded in old.encode(texts[: len(texts) // 2]):
        counts += np.bincount(encoded.ids, minlength=len(old))
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, counts, None))
    assert count_exact_texts(old, files, kept, texts) >= len(texts) // 2


def test_vocabulary_with_a_token_beyond_the_models_rows_is_pruned(tmp_path):
    folder = small_inputs.make_metaspace_tokenizer(tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = backend.get_vocab_size()
    backend.add_special_tokens(["<image>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
    old = Tokenizer(folder)
    assert old.num_left_out == 1
    vocabulary = BpeVocabulary(old)
    files, kept = vocabulary.pruned(choose_tokens(vocabulary, None, 500))
    assert kept.max() < rows
    assert b"<image>" not in files["tokenizer.json"]
    assert count_exact_texts(old, files, kept, TEXTS)


def test_data_without_text_is_refused(tmp_path):
    tokenizer = Tokenizer(small_inputs.make_student_tokenizer(tmp_path))
    with pytest.raises(XtkError, match="contains no text"):
        count_tokens(tokenizer, [Document.from_text(""), Document.from_text("")])


def test_several_roles_of_one_old_token_get_different_rows_in_the_head(tmp_path):
    """A model with one special token for all roles predicts only the end token where it predicted that token."""
    name = "<|endoftext|>"
    backend = small_inputs.byte_level_tokenizer(small_inputs.TEACHER_SPLIT, 480, [name], small_inputs.sentences(400))
    folder = small_inputs.save_tokenizer(
        backend, tmp_path / "model", bos_token=name, eos_token=name, unk_token=name, pad_token=name
    )
    torch.manual_seed(0)
    for tied in (False, True):
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=480, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            )
        ).save_pretrained(folder)  # fmt: skip
        new = Tokenizer(small_inputs.make_student_tokenizer(tmp_path / f"new-{tied}"))
        output = tmp_path / f"out-{tied}"
        manifest = transplant_model(TransplantConfig(folder, None, Tokenizer(folder), new), output)
        model, old = load_causal_lm(ModelRef(output)), load_causal_lm(ModelRef(folder))
        ids = new.special_token_ids
        row = old.get_input_embeddings().weight[0]
        for role in ("bos", "eos", "pad"):
            assert torch.equal(model.get_input_embeddings().weight[ids[role]], row)
        head = model.get_output_embeddings().weight
        assert torch.equal(head[ids["eos"]], old.get_output_embeddings().weight[0])
        assert torch.equal(head[ids["bos"]], head[ids["eos"]]) == tied
        # Where the rows are equal, generation also ends at the other tokens.
        assert set(manifest["eos_token_ids"]) == {ids["bos"], ids["eos"], ids["pad"]}


def test_a_special_token_of_the_same_name_comes_before_a_further_copy(tmp_path):
    names = ["<|endoftext|>", "<|im_end|>"]
    folders = []
    for number, pad in enumerate(("<|im_end|>", "<|endoftext|>")):  # pad of the old tokenizer is its eos
        backend = small_inputs.byte_level_tokenizer(
            small_inputs.TEACHER_SPLIT, 480, names[::-1] if number else names, small_inputs.sentences(400)
        )
        folders.append(
            small_inputs.save_tokenizer(
                backend, tmp_path / str(number), bos_token=None, eos_token="<|im_end|>", pad_token=pad
            )
        )
    old, new = map(Tokenizer, folders)
    sources = TokenSources(new, old)
    for name in names:
        assert sources.copied[new.vocabulary.special_tokens[name]] == old.vocabulary.special_tokens[name]
