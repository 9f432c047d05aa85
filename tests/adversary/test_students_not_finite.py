"""Weights with NaN or infinity, logits that are far too large, and runs that change no weight."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from xtk_processes import run_xtk

from xtk.runs.metrics_file import read_metrics

pytestmark = pytest.mark.slow

WEIGHT_FILE = "model.safetensors"
SHORT_RUN = ["--loss", "ce", "--max-steps", 3, "--logging-steps", 1]


def copy_with_change(model: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / WEIGHT_FILE)
    change(weights)
    save_file(weights, folder / WEIGHT_FILE, metadata={"format": "pt"})
    return folder


def scaled_head(factor: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights["lm_head.weight"].mul_(factor)


def assert_no_student_is_written(output: Path) -> None:
    assert not (output / WEIGHT_FILE).exists()
    assert not (output / "xtk.json").exists()


def test_student_with_nan_is_refused_before_the_first_step(pair, corpus, tmp_path):
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
        weights["model.norm.weight"][0] = float("inf")

    broken = copy_with_change(pair.student, tmp_path / "broken", spoil)
    result = run_xtk("distill", broken, corpus, *SHORT_RUN, "-o", tmp_path / "out", code=1)
    names = "2 (model.layers.1.mlp.up_proj.weight, model.norm.weight)"
    assert f"the model has weights that are NaN or infinite in float32: {names}" in result.stderr
    assert_no_student_is_written(tmp_path / "out")


def test_run_with_only_skipped_steps_writes_no_student(pair, corpus, tmp_path):
    broken = copy_with_change(pair.student, tmp_path / "broken", scaled_head(1e38))
    result = run_xtk("distill", broken, corpus, *SHORT_RUN, "-o", tmp_path / "out", code=1)
    assert "no student is saved: the loss or the gradient was NaN or infinite in all 3 steps" in result.stderr
    assert_no_student_is_written(tmp_path / "out")


def test_learning_rate_that_makes_weights_infinite_ends_the_run(pair, corpus, tmp_path):
    arguments = ["--learning-rate", 1e39, "--lr-scheduler-type", "constant", "--warmup-ratio", 0]
    for steps in (1, 3):
        output = tmp_path / str(steps)
        result = run_xtk(
            "distill", pair.student, corpus, *SHORT_RUN, *arguments, "--max-steps", steps, "-o", output, code=1
        )
        assert "the student has weights that are NaN or infinite: " in result.stderr
        assert_no_student_is_written(output)


def test_teacher_with_far_too_large_logits_is_refused(pair, corpus, tmp_path):
    teacher = copy_with_change(pair.student, tmp_path / "loud", scaled_head(1e6))
    message = "precision standard stores at least -32,768"
    result = run_xtk("cache-teacher", teacher, corpus, "-o", tmp_path / "cache", code=1)
    assert "the teacher's log-probability of an observed token is -" in result.stderr
    assert message in result.stderr
    assert "corrupt" not in result.stderr
    assert "checksum" not in result.stderr
    assert not (tmp_path / "cache" / "manifest.json").exists()
    # With --precision float32 they are stored and read.
    run_xtk("cache-teacher", teacher, corpus, "--precision", "float32", "-o", tmp_path / "whole")
    run_xtk("inspect", tmp_path / "whole", "--verify")


def test_learning_rate_of_0_changes_no_bit(pair, corpus, tmp_path):
    def negative_zero(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.mlp.up_proj.weight"][0, :2] = torch.tensor([-0.0, 1e-40])

    student = copy_with_change(pair.student, tmp_path / "student", negative_zero)
    before = load_file(student / WEIGHT_FILE)
    for number, options in enumerate(([], ["--weight-decay", 0.5], ["--ema-decay", 0.9])):
        output = tmp_path / str(number)
        run_xtk("distill", student, corpus, *SHORT_RUN, "--learning-rate", 0, *options, "-o", output)
        after = load_file(output / WEIGHT_FILE)
        assert before.keys() == after.keys()
        for name, weight in before.items():
            assert torch.equal(weight.view(torch.int32), after[name].view(torch.int32)), name
        lines = read_metrics(output / "metrics.jsonl")
        assert [line["learning_rate"] for line in lines] == [0, 0, 0]
        assert all(line["loss"] > 0 for line in lines)
    # An interrupted run resumes.
    arguments = ["distill", student, corpus, *SHORT_RUN, "--learning-rate", 0, "-o", tmp_path / "twice"]
    run_xtk(*arguments, "--max-seconds", 0.001, code=75)
    run_xtk(*arguments)
    assert read_metrics(tmp_path / "twice" / "metrics.jsonl")[-1]["loss"] == lines[-1]["loss"]
