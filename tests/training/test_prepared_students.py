"""Students with adapters, quantized weights or frozen parts: training, resuming, and loading with other libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from xtk_processes import run_xtk

from xtk.runs.metrics_file import read_metrics

KINDS = {
    "LoRA": ["--lora-r", 4, "--lora-dropout", 0.1, "--lora-modules-to-save", "lm_head", "--freeze", "layers.0"],
    "QLoRA": ["--lora-r", 4, "--load-in-4bit"],
    "in bf16": ["--dtype", "bfloat16"],
}


@pytest.fixture(params=KINDS)
def prepared_run(request, pair, cache):
    """The kind of student, the student, and the arguments of four steps with a checkpoint after each."""
    student = pair.student
    arguments = [
        "distill", student, cache, "--loss", "p-kl", "--loss", "byte-kl", "--max-steps", 4, "--save-steps", 1,
        "--logging-steps", 1, "--learning-rate", 1e-2, "--per-device-train-batch-size", 4, *KINDS[request.param], "-o",
    ]  # fmt: skip
    return request.param, student, arguments


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors that a finished run has written."""
    return {
        f"{path.relative_to(folder)} {name}": value
        for path in (*folder.glob("*.safetensors"), *folder.glob("adapter/*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.slow
def test_a_prepared_student_trains_resumes_bit_for_bit_and_loads_with_transformers(
    prepared_run, corpus, cache, tmp_path
):
    kind, student, arguments = prepared_run
    uninterrupted = tmp_path / "whole"
    reported = run_xtk(*arguments, uninterrupted).stderr
    assert "parameters are trained" in reported
    assert ("updates below 1/256 of a weight are lost" in reported) == ("bf16" in kind)
    losses = [line["loss"] for line in read_metrics(uninterrupted / "metrics.jsonl")]
    assert losses[-1] < losses[0]

    stopped = tmp_path / "stopped"  # as if it had been killed after its third checkpoint
    shutil.copytree(uninterrupted / "checkpoint-3", stopped / "checkpoint-3")
    for name in ("recipe.json", "metrics.jsonl"):
        shutil.copyfile(uninterrupted / name, stopped / name)
    assert "resuming from" in run_xtk(*arguments, stopped).stderr
    found, expected = weights_of(stopped), weights_of(uninterrupted)
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())

    files = {path.name for path in uninterrupted.iterdir()} | {path.name for path in uninterrupted.glob("adapter/*")}
    assert "tokenizer.json" in files
    assert "Trained with" in (uninterrupted / "README.md").read_text()  # not peft's template with its empty fields
    assert not (uninterrupted / "adapter" / "README.md").exists()
    reported = json.loads((uninterrupted / "recipe.json").read_text())["identity"]["student_model"]
    if kind == "QLoRA":
        assert reported == {"lora_r": 4, "load_in_4bit": True}
        assert "config.json" not in files
    else:
        loaded = AutoModelForCausalLM.from_pretrained(uninterrupted)
        assert loaded.dtype == (torch.bfloat16 if "bf16" in kind else torch.float32)
        assert not [name for name in loaded.state_dict() if "lora" in name or "base" in name or "_orig" in name]
    if kind == "LoRA":
        assert (uninterrupted / "adapter" / "adapter_config.json").is_file()
        before, after = AutoModelForCausalLM.from_pretrained(student).state_dict(), loaded.state_dict()
        changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
        matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        assert "lm_head.weight" in changed
        assert all("layers.1." in name and name.split(".")[-2] in matrices for name in changed - {"lm_head.weight"})
        assert len(changed) == 1 + len(matrices)

    if kind == "QLoRA":  # a folder that peft loads can be evaluated, and trained as a student
        assert json.loads(run_xtk("evaluate", uninterrupted, corpus, "--json").stdout)["bits_per_byte"] < 8
        stderr = run_xtk(
            "distill", uninterrupted, cache, "--loss", "byte-kl", "--max-steps", 1, "-o", tmp_path / "more"
        ).stderr
        assert "parameters are trained" in stderr


@pytest.mark.slow
def test_a_finished_run_with_other_adapter_options_is_refused(pair, cache, tmp_path):
    arguments = ["distill", pair.student, cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out"]
    run_xtk(*arguments)
    run_xtk(*arguments, "--attn-implementation", "eager")
    refused = run_xtk(*arguments, "--lora-r", 2, code=1)
    assert "the output folder has a run with other options or inputs" in refused.stderr
    assert "lora_r" in refused.stderr
