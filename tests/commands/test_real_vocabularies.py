"""All commands with the real Llama-3 and Qwen tokenizers (128,256 and 151,646 tokens) on GSM8K."""

from __future__ import annotations

import json
import shutil

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(real_data, tmp_path_factory):
    """Return a folder with small models of the real vocabularies, with random weights, and with some problems."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(vocab_size=128256, **shape)).save_pretrained(folder / "student")
    teacher = Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, head_dim=32, **shape))
    teacher.save_pretrained(folder / "untrained")
    for model, tokenizer in (("student", "llama3"), ("untrained", "qwen")):
        for file in (real_data / "tokenizers" / tokenizer).iterdir():
            shutil.copyfile(file, folder / model / file.name)
    lines = (real_data / "corpora" / "gsm8k_train.jsonl").read_text().splitlines()
    (folder / "gsm8k.jsonl").write_text("\n".join(lines[:8]) + "\n")
    return folder


@pytest.mark.long
def test_every_command_works_with_the_real_vocabularies(run, folder):
    def run_json(*arguments: object) -> dict:
        return json.loads(run(*arguments, "--json", cwd=folder).stdout)

    columns = ("--columns", "prompt=question,completion=answer")
    training = ("--max-steps", 3, "--per-device-train-batch-size", 4, "--learning-rate", 1e-2)
    run_json("distill", "untrained", "gsm8k.jsonl", *columns, "--loss", "ce", *training, "-o", "teacher")
    built = run_json("build-projection", "student", "teacher", "-o", "p")
    assert (built["rows"], built["columns"]) == (128256, 151936)
    assert built["unmapped_mass"] < 0.01
    pruned = run_json("prune-projection", "p", "--top-k", 2, "-o", "p2")
    assert 128256 - 1000 < pruned["entries"] < built["entries"]
    cached = run_json("cache-teacher", "teacher", "gsm8k.jsonl", *columns, "--top-k", 64, "-o", "cache")
    assert cached["documents"] == 8
    trained = run_json("distill", "student", "cache", "--projection", "p2", "--loss", "ce", "--loss", "p-kl",
                   "--loss", "boundary-kl", *training, "-o", "out")  # fmt: skip
    metrics = trained["metrics"]
    assert metrics["unaligned_fraction"] == 0
    assert metrics["ce"] < 11.76  # below ln 128,256, the value of an untrained student
    assert 0 < metrics["p-kl"] < 2
    evaluated = run_json("evaluate", "out", "gsm8k.jsonl", *columns)
    texts = [json.loads(line)["answer"] for line in (folder / "gsm8k.jsonl").read_text().splitlines()]
    assert evaluated["bytes"] == sum(len(text.encode()) for text in texts)
    assert 2 < evaluated["bits_per_byte"] < 7
