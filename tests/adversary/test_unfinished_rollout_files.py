"""Rollouts of an unfinished on-policy run have checksums, and are kept while the run can resume at them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from bit_flips import flip
from interrupted_runs import deterministic_metrics, start_run, wait_for_path
from small_inputs import write_jsonl
from xtk_processes import run_xtk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed_run(pair, tmp_path_factory) -> tuple[list[object], Path]:
    """Return the arguments and the folder of on-policy runs with rollout batches of two steps.

    `killed` was killed after the checkpoint of step 6 (that of step 3 is within a rollout batch), `whole` is finished,
    `other` has another seed.
    """
    folder = tmp_path_factory.mktemp("rounds")
    prompts = write_jsonl(folder / "prompts.jsonl", [f"{n} plus {n} is" for n in range(12)])
    arguments = [
        "distill-on-policy", pair.student, prompts, "--teacher", f"{pair.teacher}:top_k=16", "--loss", "byte-kl",
        "--max-completion-length", 12, "--steps-per-generation", 2, "--max-steps", 10, "--save-steps", 3,
        "--save-total-limit", 9, "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", 4,
        "-o",
    ]  # fmt: skip
    process = start_run([*arguments, folder / "killed"])
    wait_for_path(folder / "killed" / "checkpoint-6", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run_xtk(*arguments, folder / "whole")
    other = start_run([*arguments, folder / "other", "--seed", 7])
    wait_for_path(folder / "other" / "checkpoint-3", other)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    return arguments, folder


@pytest.mark.long
def test_run_resumed_from_an_older_checkpoint_reads_its_stored_rollouts(killed_run, tmp_path):
    arguments, folder = killed_run
    run = Path(shutil.copytree(folder / "killed", tmp_path / "run"))
    assert (run / "rollout_batches" / "000001").is_dir()  # steps 3 and 4: the student that made them is gone
    for step in range(4, 11):
        if (run / f"checkpoint-{step}").is_dir():
            flip(run / f"checkpoint-{step}" / "model.safetensors", 9000, 4)
    result = run_xtk(*arguments, run)
    assert "skipping checkpoint-6" in result.stderr
    assert "checkpoint-3" in result.stderr
    whole = folder / "whole"
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [[line["loss"] for line in deterministic_metrics(one)] for one in (run, whole)]
    assert losses[0] == losses[1]


ATTACKS = {
    "a line is lost": lambda lines: lines[:-1],
    "the first line is left": lambda lines: lines[:1],
    "a line within is lost": lambda lines: [*lines[:1], *lines[2:]],
    "a line is there twice": lambda lines: [*lines, lines[0]],
    "a line replaces another": lambda lines: [lines[0], lines[0], *lines[2:]],
    "two lines are swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "no line is left": lambda lines: [],
}


@pytest.mark.parametrize(
    "attack",
    [
        "a bit is flipped",
        "the batch is removed",
        "renamed to none of none",
        "renamed to one of many",
        "of another run",
        *ATTACKS,
    ],
)
def test_changed_or_removed_rollouts_are_refused(killed_run, tmp_path, attack):
    arguments, folder = killed_run
    run = Path(shutil.copytree(folder / "killed", tmp_path / "run"))
    for step in range(4, 11):
        shutil.rmtree(run / f"checkpoint-{step}", ignore_errors=True)
    (rollouts,) = (run / "rollout_batches" / "000001").glob("rollouts-*.jsonl")
    shutil.copyfile(rollouts, rollouts.with_name(f"{rollouts.stem} (copy).jsonl"))  # a copy by the user; not read
    if attack == "a bit is flipped":
        flip(rollouts, rollouts.read_bytes().index(b'"sampled_tokens": "') + 60, 1)
    elif attack == "the batch is removed":
        shutil.rmtree(rollouts.parent)
    elif attack == "renamed to none of none":
        rollouts.rename(rollouts.with_name("rollouts-00000-of-00000.jsonl"))
    elif attack == "renamed to one of many":
        rollouts.rename(rollouts.with_name("rollouts-00000-of-3000000.jsonl"))
    elif attack == "of another run":
        shutil.copyfile(folder / "other" / rollouts.relative_to(run), rollouts)
    else:
        rollouts.write_text("".join(ATTACKS[attack](rollouts.read_text().splitlines(keepends=True))))
    result = run_xtk(*arguments, run, code=1)
    if attack.startswith(("the batch", "renamed")):
        assert "are missing" in result.stderr
    else:
        assert "stored rollouts" in result.stderr
    assert "rollout_batches/000001" in result.stderr
    assert "move checkpoint-3 out of the run folder" in result.stderr  # there is no other way to generate them again
    assert "Traceback" not in result.stderr
