"""Interrupted runs resume and end like uninterrupted runs; finished runs are left unchanged."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from interrupted_runs import assert_equal_runs, assert_no_processes_left, signal_at_checkpoint, start_run, wait_for_path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from xtk_processes import run_xtk

from xtk.losses.spec import LossSpec
from xtk.runs.metrics_file import MetricsFile, read_metrics
from xtk.training.train_config import TrainConfig

STEPS = 24
REPORTED = {"step", "loss", "ce", "p-kl", "distillation_loss", "learning_rate", "gradient_norm", "tokens",
            "tokens_per_second", "training_seconds", "unaligned_fraction", "data_wait_fraction", "peak_memory_gib",
            "skipped_steps"}  # fmt: skip


@pytest.fixture(scope="module")
def arguments(pair, cache, projection) -> list[object]:
    """Arguments of 24 steps, with metrics of each step and a checkpoint every two; the output path comes last.

    All checkpoints are kept, so that a checkpoint still exists when a test looks for it.
    """
    return [
        "distill", pair.student, cache, "--projection", projection, "--max-steps", STEPS, "--save-steps", 2,
        "--save-total-limit", STEPS, "--logging-steps", 1, "--learning-rate", 1e-3,
        "--per-device-train-batch-size", 4, "-o",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> Path:
    """A run that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert run_xtk(*arguments, folder, "--save-total-limit", 2).stdout == f"{folder}\n"
    return folder


@pytest.mark.slow
def test_a_killed_run_ends_bitwise_equal_to_an_uninterrupted_run(arguments, uninterrupted, tmp_path):
    output = tmp_path / "out"
    code, _ = signal_at_checkpoint(arguments, output, signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = run_xtk(*arguments, output)
    assert done.stdout == f"{output}\n"
    assert f"resuming from {output}/checkpoint-" in done.stderr
    assert_equal_runs(output, uninterrupted)


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_the_same_command_resumes(arguments, uninterrupted, tmp_path):
    output = tmp_path / "out"
    code, stderr = signal_at_checkpoint(arguments, output, signal.SIGINT)
    assert code == 130
    assert "Traceback" not in stderr
    assert "resuming from" in run_xtk(*arguments, output).stderr
    assert_equal_runs(output, uninterrupted)


@pytest.mark.long
def test_ctrl_c_of_two_processes_exits_with_130_and_leaves_no_process(arguments, uninterrupted, tmp_path):
    output = tmp_path / "out"
    code, _ = signal_at_checkpoint(arguments, output, signal.SIGINT, "--num-processes", 2)
    assert code == 130
    assert_no_processes_left(output)


def test_a_finished_run_prints_its_path_and_trains_nothing(arguments, uninterrupted):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    done = run_xtk(*arguments, uninterrupted)
    assert done.stdout == f"{uninterrupted}\n"
    assert "steps of" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


@pytest.mark.slow
def test_another_recipe_at_the_same_path_is_refused_unless_forced(arguments, uninterrupted, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(uninterrupted, output)
    other_command = [*arguments, output, "--max-steps", 1]
    refused = run_xtk(*other_command, code=1)
    assert refused.stdout == ""
    assert "the output folder has a run with other options or inputs" in refused.stderr
    assert f"(max_steps: {STEPS} there, 1 now)" in refused.stderr
    assert "--force" in refused.stderr
    assert_equal_runs(output, uninterrupted)
    recipe = json.loads((output / "recipe.json").read_text())
    recipe["identity"]["inputs"]["student"]["weights"] = "sha256:" + "0" * 64
    (output / "recipe.json").write_text(json.dumps(recipe))
    refused = run_xtk(*arguments, output, code=1)
    assert "(inputs.student.weights: sha256:000000000000... there, sha256:" in refused.stderr
    assert run_xtk(*other_command, "--force").stdout == f"{output}\n"
    assert json.loads((output / "xtk.json").read_text())["steps"] == 1
    assert not list(output.glob("checkpoint-*"))
    assert list((tmp_path / "out.replaced-1").glob("checkpoint-*"))


def test_a_folder_with_other_files_is_not_touched(arguments, tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    refused = run_xtk(*arguments, tmp_path, code=1)
    assert "this folder contains files that xtk did not write" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_every_line_of_metrics_has_all_fields_with_finite_values(uninterrupted):
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        levels = {"student_bits_per_byte", "teacher_bits_per_byte"} if line["step"] == 1 else set()
        assert set(line) == REPORTED | levels
        assert all(math.isfinite(value) for value in line.values())
        assert line["loss"] == pytest.approx(line["ce"] + 2 * line["p-kl"])
        assert line["gradient_norm"] > 0
        assert line["tokens_per_second"] > 0
    recipe = TrainConfig(losses=(LossSpec("ce"),), learning_rate=1e-3)
    assert [line["learning_rate"] for line in lines] == [recipe.learning_rate_at(step, STEPS) for step in range(STEPS)]
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]


def test_the_student_loads_with_transformers(uninterrupted, pair):
    model = AutoModelForCausalLM.from_pretrained(uninterrupted)
    tokenizer = AutoTokenizer.from_pretrained(uninterrupted)
    original = AutoTokenizer.from_pretrained(pair.student)
    text = "Anna has 1234 apples."
    assert tokenizer(text).input_ids == original(text).input_ids
    weights = load_file(uninterrupted / "model.safetensors")
    before = load_file(pair.student / "model.safetensors")
    assert weights.keys() == before.keys()
    assert any(not torch.equal(weights[name], before[name]) for name in weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    generated = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] >= 4


def test_the_newest_checkpoints_are_kept_and_complete(uninterrupted):
    kept = sorted(path.name for path in uninterrupted.glob("checkpoint-*"))
    assert kept == ["checkpoint-20", "checkpoint-22"]
    for name in kept:
        step = int(name.removeprefix("checkpoint-"))
        tokens = read_metrics(uninterrupted / "metrics.jsonl")[step - 1]["tokens"]
        content = json.loads((uninterrupted / name / "xtk.json").read_text())
        assert content["kind"] == "checkpoint"
        assert (content["version"], content["num_processes"]) == (4, 1)
        assert (content["step"], content["tokens"], content["skipped_steps"]) == (step, tokens, 0)
        AutoModelForCausalLM.from_pretrained(uninterrupted / name)
    assert len({path.stat().st_mode for path in uninterrupted.rglob("*") if path.is_file()}) == 1


@pytest.mark.slow
def test_bf16_training_learns_with_fp32_weights(pair, cache, projection, uninterrupted, tmp_path):
    output = tmp_path / "out"
    run_xtk(
        "distill", pair.student, cache, "--projection", projection, "--max-steps", STEPS, "--logging-steps", 1,
        "--learning-rate", 1e-3, "--per-device-train-batch-size", 4, "--mixed-precision", "bf16",
        "--gradient-checkpointing", "-o", output,
    )  # fmt: skip
    assert {value.dtype for value in load_file(output / "model.safetensors").values()} == {torch.float32}
    losses = [line["loss"] for line in read_metrics(output / "metrics.jsonl")]
    fp32_losses = [line["loss"] for line in read_metrics(uninterrupted / "metrics.jsonl")]
    assert losses[-1] < 0.95 * losses[0]
    assert losses == pytest.approx(fp32_losses, rel=0.02)
    assert losses != fp32_losses


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_evaluates_its_start_once(pair, cache, projection, tmp_path):
    data = tmp_path / "held-out.jsonl"
    data.write_text('{"text": "Anna has 12 apples"}\n')
    command = ["distill", pair.student, cache, "--projection", projection, "--max-steps", 2000, "--logging-steps", 1,
               "--save-steps", 0, "--eval-data", data, "--eval-on-start", "-o", tmp_path / "out"]  # fmt: skip
    path = tmp_path / "out" / "metrics.jsonl"
    earlier_inode = -1
    for _ in range(2):
        process = start_run(command)
        wait_for_path(path, process)
        while path.stat().st_ino == earlier_inode or len(path.read_text().splitlines()) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.communicate()
        earlier_inode = path.stat().st_ino
    assert [record["step"] for record in read_metrics(path)][:3] == [0, 1, 2]


# --- the metrics file


def test_metrics_file_drops_steps_that_will_be_repeated_and_a_truncated_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "loss": 1.5}\n{"step": 4, "lo')
    metrics = MetricsFile(path, 2)
    metrics.write({"step": 3, "loss": 1.0})
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0}]
