"""A tokenizer with more special tokens than the model has rows, as that of Gemma 3 1B."""

from __future__ import annotations

import json

import pytest
import small_inputs
import transformers
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.errors import XtkError
from xtk.library.tokenizer_argument import to_tokenizer
from xtk.tokens.tokenizer import Tokenizer

SURPLUS = "<image_soft_token>"
TEMPLATE = "{% for m in messages %}<|x|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"


@pytest.fixture
def model(tmp_path):
    backend = small_inputs.byte_level_tokenizer(
        small_inputs.STUDENT_SPLIT, 400, ["<|x|>", "<|end|>"], small_inputs.sentences(200)
    )
    rows = backend.get_vocab_size()
    backend.add_special_tokens([AddedToken(SURPLUS, special=True)])
    folder = small_inputs.save_tokenizer(
        backend, tmp_path / "model", bos_token="<|x|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    configuration = LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)
    return folder


def test_the_model_is_teacher_and_student_and_texts_with_the_token_are_texts(run, pair, model, tmp_path):
    tokenizer = Tokenizer(model)
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == tokenizer.embedding_rows == rows
    assert SURPLUS not in tokenizer.vocabulary.special_tokens
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12.", f"An {SURPLUS} is 7."] * 4)
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


def test_in_a_content_it_is_text_and_in_a_template_it_is_refused(model):
    tokenizer = Tokenizer(model)
    text = str(tokenizer.chat_template.render([{"role": "user", "content": f"an {SURPLUS}"}]))
    start = text.index("an <")
    content = [(start, start + len(f"an {SURPLUS}"))]
    (encoded,) = tokenizer.encode_rendered([text], [content])
    assert encoded.ids.max() < len(tokenizer)
    for wrong in ([(0, 0)], content):
        shown = text if wrong == [(0, 0)] else text + SURPLUS
        with pytest.raises(XtkError, match="has no row in its embedding"):
            tokenizer.encode_rendered([shown], [wrong])


def test_other_missing_rows_are_refused(run, model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    LlamaForCausalLM(LlamaConfig(**{**config, "vocab_size": config["vocab_size"] - 5})).save_pretrained(model)
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12."])
    assert "rows" in run("cache-teacher", model, data, "-o", tmp_path / "cache", code=1).stderr


@pytest.mark.parametrize("used", ["as eos", "in the template", "as an end of turn"])
def test_a_token_that_something_writes_needs_its_row(run, pair, model, tmp_path, used):
    """Such a student is refused, and --resize-vocabulary adds the row."""
    name = "<|im_end|>" if used == "as an end of turn" else SURPLUS
    content = (model / "tokenizer.json").read_text().replace(SURPLUS, name)
    (model / "tokenizer.json").write_text(content)
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"eos_token": name} if used == "as eos" else {}
    settings |= {"chat_template": TEMPLATE.replace("<|end|>", name)} if used == "in the template" else {}
    path.write_text(json.dumps(settings))
    data = small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has 12."] * 4)
    run("cache-teacher", pair.teacher, data, "-o", tmp_path / "cache")
    refused = run("distill", model, tmp_path / "cache", "--max-steps", 1, "-o", tmp_path / "out", code=1)
    assert "--resize-vocabulary" in refused.stderr
    run("distill", model, tmp_path / "cache", "--max-steps", 1, "--resize-vocabulary", "-o", tmp_path / "out")
    assert name in Tokenizer(tmp_path / "out").vocabulary.special_tokens


def test_a_tokenizer_of_transformers_is_the_one_of_the_folder(model):
    found = to_tokenizer(transformers.AutoTokenizer.from_pretrained(model))
    assert (len(found), found.fingerprint) == (len(Tokenizer(model)), Tokenizer(model).fingerprint)
