"""Rollouts of an unfinished on-policy run have checksums, and are kept as long as a run can go back to them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from command_line import run_xtk
from flips import flip
from interrupting import start, told, wait_for
from material import write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed(pair, tmp_path_factory) -> tuple[list[object], Path]:
    """A run of rounds of two steps, killed after the checkpoint of step 6; that of step 3 lies inside of a round."""
    folder = tmp_path_factory.mktemp("rounds")
    prompts = write_jsonl(folder / "prompts.jsonl", [f"{n} plus {n} is" for n in range(12)])
    arguments = [
        "distill", pair.student, prompts, "--on-policy", "--teacher", f"{pair.teacher}:top_k=16", "--loss", "byte-kl",
        "--max-completion-length", 12, "--steps-per-generation", 2, "--max-steps", 10, "--save-steps", 3,
        "--save-total-limit", 9, "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", 4,
        "-o",
    ]  # fmt: skip
    process = start([*arguments, folder / "killed"])
    wait_for(folder / "killed" / "checkpoint-6", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run_xtk(*arguments, folder / "whole")
    return arguments, folder


def test_a_run_that_goes_back_a_checkpoint_reads_the_rollouts_of_that_time(killed, tmp_path):
    arguments, folder = killed
    run = Path(shutil.copytree(folder / "killed", tmp_path / "run"))
    assert (run / "rollout_batches" / "000001").is_dir()  # steps 3 and 4: the student that wrote them is gone
    for step in range(4, 11):
        if (run / f"checkpoint-{step}").is_dir():
            flip(run / f"checkpoint-{step}" / "model.safetensors", 9000, 4)
    done = run_xtk(*arguments, run)
    assert "skipping checkpoint-6" in done.stderr
    assert "checkpoint-3" in done.stderr
    whole = folder / "whole"
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [[line["loss"] for line in told(one)] for one in (run, whole)]
    assert losses[0] == losses[1]


def test_rollouts_that_were_altered_or_removed_are_not_trained_from(killed, tmp_path):
    arguments, folder = killed
    for attack, message in (
        ("flip", "a file of the run's stored rollouts does not match its checksums"),
        ("remove", "are missing"),
    ):
        run = Path(shutil.copytree(folder / "killed", tmp_path / attack))
        for step in range(4, 11):
            shutil.rmtree(run / f"checkpoint-{step}", ignore_errors=True)
        (rollouts,) = (run / "rollout_batches" / "000001").glob("rollouts-*.jsonl")
        if attack == "flip":
            flip(rollouts, rollouts.read_bytes().index(b'"sampled_tokens": "') + 60, 1)
        else:
            shutil.rmtree(rollouts.parent)
        done = run_xtk(*arguments, run, code=1)
        assert message in done.stderr
        assert "rollout_batches/000001" in done.stderr
        assert "Traceback" not in done.stderr
