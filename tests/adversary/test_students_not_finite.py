"""Weights with NaN or infinity, logits that are far too large, and runs that move nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from xtk_processes import run_xtk

from xtk.training.metrics_file import read_metrics

pytestmark = pytest.mark.slow

FILE = "model.safetensors"
SHORT = ["--loss", "ce", "--max-steps", 3, "--logging-steps", 1]


def changed(model: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / FILE)
    change(weights)
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    return folder


def scaled_head(factor: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights["lm_head.weight"].mul_(factor)


def assert_nothing_is_written(output: Path) -> None:
    assert not (output / FILE).exists()
    assert not (output / "xtk.json").exists()


def test_a_student_with_nan_is_refused_before_the_first_step(pair, corpus, tmp_path):
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
        weights["model.norm.weight"][0] = float("inf")

    broken = changed(pair.student, tmp_path / "broken", spoil)
    done = run_xtk("distill", broken, corpus, *SHORT, "-o", tmp_path / "out", code=1)
    names = "2 (model.layers.1.mlp.up_proj.weight, model.norm.weight)"
    assert f"the model has weights that are NaN or infinite in float32: {names}" in done.stderr
    assert_nothing_is_written(tmp_path / "out")


def test_a_run_of_which_all_steps_were_skipped_writes_no_student(pair, corpus, tmp_path):
    broken = changed(pair.student, tmp_path / "broken", scaled_head(1e38))
    done = run_xtk("distill", broken, corpus, *SHORT, "-o", tmp_path / "out", code=1)
    assert "no student is saved: the loss or the gradient was NaN or infinite in all 3 steps" in done.stderr
    assert_nothing_is_written(tmp_path / "out")


def test_a_learning_rate_that_makes_weights_infinite_ends_the_run_at_the_next_step(pair, corpus, tmp_path):
    arguments = ["--learning-rate", 1e39, "--lr-scheduler-type", "constant", "--warmup-ratio", 0]
    for steps in (1, 3):
        output = tmp_path / str(steps)
        done = run_xtk("distill", pair.student, corpus, *SHORT, *arguments, "--max-steps", steps, "-o", output, code=1)
        assert "the student has weights that are NaN or infinite: " in done.stderr
        assert_nothing_is_written(output)


def test_logits_that_are_far_too_large_are_the_teachers_fault(pair, corpus, tmp_path):
    loud = changed(pair.student, tmp_path / "loud", scaled_head(1e6))
    told = "precision standard stores at least -32,768"
    done = run_xtk("cache-teacher", loud, corpus, "-o", tmp_path / "cache", code=1)
    assert "the teacher's log-probability of an observed token is -" in done.stderr
    assert told in done.stderr
    assert "altered" not in done.stderr
    assert not (tmp_path / "cache" / "xtk.json").exists()
    # With --precision float32 they are stored, read and trained from.
    run_xtk("cache-teacher", loud, corpus, "--precision", "float32", "-o", tmp_path / "whole")
    run_xtk("inspect", tmp_path / "whole", "--verify")


def test_a_learning_rate_of_0_changes_no_bit(pair, corpus, tmp_path):
    def negative_zero(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.mlp.up_proj.weight"][0, :2] = torch.tensor([-0.0, 1e-40])

    student = changed(pair.student, tmp_path / "student", negative_zero)
    before = load_file(student / FILE)
    for number, more in enumerate(([], ["--weight-decay", 0.5], ["--ema-decay", 0.9])):
        output = tmp_path / str(number)
        run_xtk("distill", student, corpus, *SHORT, "--learning-rate", 0, *more, "-o", output)
        after = load_file(output / FILE)
        assert before.keys() == after.keys()
        for name, weight in before.items():
            assert torch.equal(weight.view(torch.int32), after[name].view(torch.int32)), name
        lines = read_metrics(output / "metrics.jsonl")
        assert [line["learning_rate"] for line in lines] == [0, 0, 0]
        assert all(line["loss"] > 0 for line in lines)
    # Interrupted, it goes on.
    arguments = ["distill", student, corpus, *SHORT, "--learning-rate", 0, "-o", tmp_path / "twice"]
    run_xtk(*arguments, "--max-seconds", 0.001, code=75)
    run_xtk(*arguments)
    assert read_metrics(tmp_path / "twice" / "metrics.jsonl")[-1]["loss"] == lines[-1]["loss"]
