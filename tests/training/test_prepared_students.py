"""Students with adapters, packed weights, frozen parts: from the command line to the folder that others load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xtk_processes import run_xtk

from xtk.training.metrics_file import read_metrics

KINDS = {
    "LoRA": ["--lora-r", 4, "--lora-dropout", 0.1, "--lora-modules-to-save", "lm_head", "--freeze", "layers.0"],
    "QLoRA": ["--lora-r", 4, "--load-in-4bit"],
    "resized, in bf16": ["--resize-vocabulary", "--dtype", "bfloat16"],
}


@pytest.fixture(scope="module")
def short(pair, tmp_path_factory) -> Path:
    """The student, with a row less than it has tokens."""
    folder = Path(shutil.copytree(pair.student, tmp_path_factory.mktemp("short") / "student"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(639)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=KINDS)
def run_of(request, pair, short, cache):
    """What it is, the student and the arguments of four steps with a checkpoint after each."""
    student = short if request.param.startswith("resized") else pair.student
    arguments = [
        "distill", student, cache, "--loss", "p-kl", "--loss", "byte-kl", "--max-steps", 4, "--save-steps", 1,
        "--logging-steps", 1, "--learning-rate", 1e-2, "--per-device-train-batch-size", 4, *KINDS[request.param], "-o",
    ]  # fmt: skip
    return request.param, student, arguments


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All numbers that a finished run has written."""
    return {
        f"{path.relative_to(folder)} {name}": value
        for path in (*folder.glob("*.safetensors"), *folder.glob("adapter/*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.slow
def test_a_prepared_student_is_trained_resumed_to_the_bit_and_loads_anywhere(run_of, corpus, cache, tmp_path):
    kind, student, arguments = run_of
    whole = tmp_path / "whole"
    told = run_xtk(*arguments, whole).stderr
    assert "parameters are trained" in told
    assert ("updates below 1/256 of a weight are lost" in told) == ("bf16" in kind)
    losses = [line["loss"] for line in read_metrics(whole / "metrics.jsonl")]
    assert losses[-1] < losses[0]

    stopped = tmp_path / "stopped"  # as if it had been killed after its third checkpoint
    shutil.copytree(whole / "checkpoint-3", stopped / "checkpoint-3")
    for name in ("recipe.json", "metrics.jsonl"):
        shutil.copyfile(whole / name, stopped / name)
    assert "resuming from" in run_xtk(*arguments, stopped).stderr
    found, expected = weights_of(stopped), weights_of(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())

    files = {path.name for path in whole.iterdir()} | {path.name for path in whole.glob("adapter/*")}
    assert "tokenizer.json" in files
    assert "Trained with" in (whole / "README.md").read_text()  # not peft's form with its blanks
    assert not (whole / "adapter" / "README.md").exists()
    told = json.loads((whole / "recipe.json").read_text())["identity"]["student_model"]
    if kind == "QLoRA":
        assert told == {"lora_r": 4, "load_in_4bit": True}
        assert "config.json" not in files
    else:
        loaded = AutoModelForCausalLM.from_pretrained(whole)
        assert loaded.config.vocab_size == (640 if "resized" in kind else 656)
        assert loaded.dtype == (torch.bfloat16 if "bf16" in kind else torch.float32)
        assert not [name for name in loaded.state_dict() if "lora" in name or "base" in name or "_orig" in name]
    if kind == "LoRA":
        assert (whole / "adapter" / "adapter_config.json").is_file()
        before, after = AutoModelForCausalLM.from_pretrained(student).state_dict(), loaded.state_dict()
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        assert "lm_head.weight" in changed
        assert all("layers.1." in name and name.split(".")[-2] in matrices for name in changed - {"lm_head.weight"})
        assert len(changed) == 1 + len(matrices)

    if kind == "QLoRA":  # what others load with peft is a student, and a model to evaluate, here too
        assert json.loads(run_xtk("evaluate", whole, corpus, "--json").stdout)["bits_per_byte"] < 8
        more = run_xtk("distill", whole, cache, "--loss", "byte-kl", "--max-steps", 1, "-o", tmp_path / "more").stderr
        assert "parameters are trained" in more


def test_a_finished_run_of_other_adapters_is_not_taken_for_this_one(pair, cache, tmp_path):
    arguments = ["distill", pair.student, cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out"]
    run_xtk(*arguments)
    run_xtk(*arguments, "--attn-implementation", "eager")
    refused = run_xtk(*arguments, "--lora-r", 2, code=1)
    assert "the output folder has a run with other options or inputs" in refused.stderr
    assert "lora_r" in refused.stderr
