"""A tokenizer with more special tokens than the model has embedding rows, as that of Gemma 3 1B."""

from __future__ import annotations

import json

import pytest
import small_inputs
import transformers
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.api.tokenizer_argument import to_tokenizer
from xtk.errors import XtkError
from xtk.text.tokenizer import Tokenizer

SURPLUS_TOKEN = "<image_soft_token>"
TEMPLATE = "{% for m in messages %}<|x|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"


@pytest.fixture
def model(tmp_path):
    backend = small_inputs.byte_level_tokenizer(
        small_inputs.STUDENT_SPLIT, 400, ["<|x|>", "<|end|>"], small_inputs.sentences(200)
    )
    rows = backend.get_vocab_size()
    backend.add_special_tokens([AddedToken(SURPLUS_TOKEN, special=True)])
    folder = small_inputs.save_tokenizer(
        backend, tmp_path / "model", bos_token="<|x|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    configuration = LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_commands_accept_the_model_and_encode_the_surplus_token_as_text(run, pair, model, tmp_path):
    tokenizer = Tokenizer(model)
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == tokenizer.embedding_rows == rows
    assert SURPLUS_TOKEN not in tokenizer.vocabulary.special_tokens
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12.", f"An {SURPLUS_TOKEN} is 7."] * 4)
    run("cache-teacher", model, data, "--top-k", 8, "-o", tmp_path / "cache")
    run("cache-teacher", pair.teacher, data, "--top-k", 8, "-o", tmp_path / "other")
    run("distill", pair.student, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "one")
    run(
        "distill", model, tmp_path / "other", "--max-steps", 1, "--loss", "ce", "--loss", "p-kl", "-o", tmp_path / "two"
    )
    run("evaluate", tmp_path / "two", data)
    run("rollout", model, data, "--max-completion-length", 4, "-o", tmp_path / "rollouts.jsonl")
    run("transplant", pair.student, model, "-o", tmp_path / "new")
    reopened = Tokenizer(tmp_path / "cache", embedding_rows=rows)
    assert (len(reopened), reopened.fingerprint) == (rows, tokenizer.fingerprint)


def test_surplus_token_is_text_in_a_content_and_refused_in_a_template(model):
    tokenizer = Tokenizer(model)
    text = str(tokenizer.chat_template.render([{"role": "user", "content": f"an {SURPLUS_TOKEN}"}]))
    start = text.index("an <")
    content = [(start, start + len(f"an {SURPLUS_TOKEN}"))]
    (encoded,) = tokenizer.encode_rendered([text], [content])
    assert encoded.ids.max() < len(tokenizer)
    for content_spans in ([(0, 0)], content):
        rendered = text if content_spans == [(0, 0)] else text + SURPLUS_TOKEN
        with pytest.raises(XtkError, match="has no row in its embedding"):
            tokenizer.encode_rendered([rendered], [content_spans])


def test_missing_rows_of_ordinary_tokens_are_refused(run, model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    LlamaForCausalLM(LlamaConfig(**{**config, "vocab_size": config["vocab_size"] - 5})).save_pretrained(model)
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12."])
    assert "rows" in run("cache-teacher", model, data, "-o", tmp_path / "cache", code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize("usage", ["as eos", "in the template", "as an end of turn"])
def test_surplus_token_that_is_used_needs_an_embedding_row(run, pair, model, tmp_path, usage):
    name = "<|im_end|>" if usage == "as an end of turn" else SURPLUS_TOKEN
    content = (model / "tokenizer.json").read_text().replace(SURPLUS_TOKEN, name)
    (model / "tokenizer.json").write_text(content)
    path = model / "tokenizer_config.json"
    configuration = json.loads(path.read_text())
    configuration |= {"eos_token": name} if usage == "as eos" else {}
    configuration |= {"chat_template": TEMPLATE.replace("<|end|>", name)} if usage == "in the template" else {}
    path.write_text(json.dumps(configuration))
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12."] * 4)
    run("cache-teacher", pair.teacher, data, "-o", tmp_path / "cache")
    refused = run("distill", model, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "out", code=1)
    assert "resize_token_embeddings" in refused.stderr
    resized = transformers.AutoModelForCausalLM.from_pretrained(model)
    resized.resize_token_embeddings(len(transformers.AutoTokenizer.from_pretrained(model)))
    resized.save_pretrained(model)
    run("distill", model, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "out")
    assert name in Tokenizer(tmp_path / "out").vocabulary.special_tokens


def test_transformers_tokenizer_equals_the_tokenizer_of_the_folder(model):
    converted = to_tokenizer(transformers.AutoTokenizer.from_pretrained(model))
    assert (len(converted), converted.fingerprint) == (len(Tokenizer(model)), Tokenizer(model).fingerprint)
