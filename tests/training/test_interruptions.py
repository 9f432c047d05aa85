"""Runs that are stopped, killed, blocked or have non-finite losses; averaged weights, early stopping, model card."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from interrupted_runs import (
    assert_equal_runs,
    assert_no_processes_left,
    deterministic_metrics,
    exit_of_unfinished_run,
    process_of_rank,
    signal_at_checkpoint,
    start_run,
    wait_for_path,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_inputs import sentences, write_jsonl
from xtk_processes import run_xtk

from xtk.batches.micro_batches import BatchSampler
from xtk.runs.folder import read_recipe
from xtk.runs.metrics_file import read_metrics
from xtk.runs.model_card import public_model_name
from xtk.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

STEPS = 16
EXIT_RESUMABLE = 75
TWO_PROCESSES = ("--num-processes", 2, "--per-device-train-batch-size", 2)


@pytest.fixture(scope="module")
def arguments(pair, corpus) -> list[object]:
    """Arguments of sixteen steps, with metrics of each step and a checkpoint every two; the output path comes last."""
    return [
        "distill", pair.student, corpus, "--loss", "ce", "--max-steps", STEPS, "--save-steps", 2, "--save-total-limit",
        STEPS, "--logging-steps", 1, "--learning-rate", 1e-3, "--per-device-train-batch-size", 4, "-o",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> Path:
    """A run that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run_xtk(*arguments, folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted_two_processes(arguments, tmp_path_factory) -> Path:
    """The same run with two processes."""
    folder = tmp_path_factory.mktemp("whole-of-two") / "out"
    assert "2 processes: 2-way data parallel" in run_xtk(*arguments, folder, *TWO_PROCESSES, fresh=True).stderr
    return folder


def newest_step(output: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*")), default=0)


# --- signals, time limits and kills


def test_sigterm_saves_after_the_step_and_exits_with_75(arguments, uninterrupted, tmp_path):
    output = tmp_path / "out"
    code, stderr = signal_at_checkpoint(arguments, output, signal.SIGTERM)
    assert code == EXIT_RESUMABLE
    assert "Traceback" not in stderr
    assert f"stopped after step {newest_step(output)} of {STEPS}: SIGTERM" in stderr
    assert "resuming from" in run_xtk(*arguments, output).stderr
    assert_equal_runs(output, uninterrupted)


def test_a_time_limit_saves_and_exits_with_75_until_the_run_is_done(arguments, tmp_path):
    three_steps = [*arguments[:-1], "--max-steps", 3, "-o"]
    run_xtk(*three_steps, tmp_path / "whole")
    limited = [*three_steps, tmp_path / "sliced", "--max-seconds", 0.001]
    for step in (1, 2):
        done = run_xtk(*limited, code=EXIT_RESUMABLE)
        assert f"stopped after step {step} of 3: --max-seconds is over" in done.stderr
        assert done.stdout == ""
    assert run_xtk(*limited).stdout == f"{tmp_path}/sliced\n"
    assert_equal_runs(tmp_path / "sliced", tmp_path / "whole")


def test_two_processes_stop_together_end_if_one_is_killed_and_resume(arguments, uninterrupted_two_processes, tmp_path):
    output = tmp_path / "out"
    code, stderr = signal_at_checkpoint(arguments, output, signal.SIGUSR1, *TWO_PROCESSES)
    assert code == EXIT_RESUMABLE, stderr
    stopped_at = newest_step(output)
    assert f"stopped after step {stopped_at} of {STEPS}: SIGUSR1" in stderr
    assert "Traceback" not in stderr
    assert_no_processes_left(output)

    process = start_run([*arguments, output, *TWO_PROCESSES])
    wait_for_path(output / f"checkpoint-{stopped_at // 2 * 2 + 2}", process)
    os.kill(process_of_rank(output, rank=1), signal.SIGKILL)
    killed_at = time.monotonic()
    code, stderr = exit_of_unfinished_run(process, output)
    assert time.monotonic() - killed_at < 30
    assert code == 128 + signal.SIGKILL
    assert "training process 1 was killed by the signal SIGKILL" in stderr
    assert_no_processes_left(output)

    assert "resuming from" in run_xtk(*arguments, output, *TWO_PROCESSES, fresh=True).stderr
    assert_equal_runs(output, uninterrupted_two_processes)


def test_a_run_of_two_processes_that_was_started_with_nohup_survives_a_hangup(arguments, tmp_path):
    output, ignored = tmp_path / "out", (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    process = start_run([*arguments, output, *TWO_PROCESSES], ignored_signals=ignored)
    wait_for_path(output / "checkpoint-4", process)
    for number in ignored:
        os.kill(process.pid, number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout == f"{output}\n"


@pytest.mark.long
def test_a_hanging_process_ends_the_run_after_the_timeout(arguments, tmp_path):
    output = tmp_path / "out"
    process = start_run([*arguments, output, *TWO_PROCESSES, "--ddp-timeout", 5])
    wait_for_path(output / "checkpoint-4", process)
    os.kill(process_of_rank(output, rank=1), signal.SIGSTOP)
    stopped_at = time.monotonic()
    code, stderr = exit_of_unfinished_run(process, output)
    assert time.monotonic() - stopped_at < 45  # it takes 38 s (docs/explanation/decisions.md)
    assert code == 1
    assert "a process of this run did not respond within --ddp-timeout" in stderr
    assert_no_processes_left(output)


@pytest.mark.long
def test_training_processes_end_with_their_launcher(arguments, tmp_path):
    output = tmp_path / "out"
    code, _ = signal_at_checkpoint(arguments, output, signal.SIGKILL, *TWO_PROCESSES)
    assert code == -signal.SIGKILL
    assert_no_processes_left(output)


@pytest.mark.long
def test_torchrun_restarts_killed_processes_and_the_run_resumes(arguments, uninterrupted_two_processes, tmp_path):
    output = tmp_path / "out"
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
                "--nproc-per-node", 2, "--max-restarts", 2]  # fmt: skip
    process = start_run([*arguments, output, *TWO_PROCESSES[2:]], launcher)
    for checkpoint in (4, 8):
        wait_for_path(output / f"checkpoint-{checkpoint}", process)
        os.kill(process_of_rank(output, rank=1), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert stdout == f"{output}\n"
    assert stderr.count("resuming from") == 2
    assert_equal_runs(output, uninterrupted_two_processes)


def kill_at_random_instants(
    arguments: list[object], uninterrupted: Path, folder: Path, kills: int, *extra_arguments: object
) -> None:
    """Kill a run `kills` times, up to three steps further each time; when it has ended, start another run."""
    rng = random.Random(kills)
    output = folder / "out"
    while kills:
        metrics = output / "metrics.jsonl"
        earlier_mtime = metrics.stat().st_mtime_ns if metrics.exists() else 0
        target = newest_step(output) + rng.randint(0, 3)
        process = start_run([*arguments, output, *extra_arguments])
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            has_started = metrics.exists() and metrics.stat().st_mtime_ns != earlier_mtime
            if has_started and len(deterministic_metrics(output)) >= target:
                break
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.communicate(timeout=60)
        assert_no_processes_left(output)
        kills -= not (output / "xtk.json").exists()
        if (output / "xtk.json").exists() or not kills:
            run_xtk(*arguments, output, *extra_arguments, fresh=True)
            assert_equal_runs(output, uninterrupted)
            shutil.rmtree(output)


@pytest.mark.long
def test_a_run_killed_three_times_equals_an_uninterrupted_run(arguments, uninterrupted, tmp_path):
    kill_at_random_instants(arguments, uninterrupted, tmp_path, 3)


@pytest.mark.long
def test_runs_killed_fifty_times_equal_an_uninterrupted_run(arguments, uninterrupted, tmp_path):
    kill_at_random_instants(arguments, uninterrupted, tmp_path, 50)


@pytest.mark.long
def test_runs_of_two_processes_killed_ten_times_equal_an_uninterrupted_run(
    arguments, uninterrupted_two_processes, tmp_path
):
    kill_at_random_instants(arguments, uninterrupted_two_processes, tmp_path, 10, *TWO_PROCESSES)


# --- steps with a non-finite loss


@pytest.fixture(scope="module")
def nonfinite_run(pair, tmp_path_factory) -> tuple[list[object], list[int]]:
    """Arguments for a student with finite weights whose gradient is not finite at one token, and the steps with it."""
    folder = tmp_path_factory.mktemp("broken")
    texts = sentences(24, seed=5)
    tokenizer = Tokenizer(pair.student)
    ids_of_documents = [set(encoded.ids.tolist()) for encoded in tokenizer.encode(texts)]
    rare_tokens = [
        token for token in range(9, len(tokenizer)) if 3 <= sum(token in ids for ids in ids_of_documents) <= 4
    ]
    shutil.copytree(pair.student, folder / "student")
    weights = load_file(folder / "student" / "model.safetensors")
    weights["model.embed_tokens.weight"][rare_tokens[0]] = 3e38
    save_file(weights, folder / "student" / "model.safetensors", metadata={"format": "pt"})
    data = write_jsonl(folder / "data.jsonl", texts)
    sampler = BatchSampler(np.arange(24), np.array([len(text.encode()) for text in texts]), 4, 42)
    skipped = [
        step + 1
        for step in range(6)
        if any(rare_tokens[0] in ids_of_documents[number] for number in sampler.documents_of_step(step))
    ]
    assert 0 < len(skipped) < 5
    arguments = ["distill", folder / "student", data, "--loss", "ce", "--max-steps", 6, "--logging-steps", 1,
                 "--learning-rate", 1e-3, "--save-steps", 1, "--save-total-limit", 9, "-o"]  # fmt: skip
    return arguments, skipped


def test_a_step_with_nonfinite_loss_updates_nothing_and_is_counted(nonfinite_run, tmp_path):
    arguments, skipped = nonfinite_run
    batch_of_four = ("--per-device-train-batch-size", 4)
    done = run_xtk(*arguments, tmp_path / "out", *batch_of_four)
    for step in skipped:
        assert f"skipping step {step}, which is not finite: loss " in done.stderr
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [sum(step <= at for step in skipped) for at in range(1, 7)]
    assert [line["step"] for line in lines if "gradient_norm" not in line] == skipped
    checkpoints = [load_file(tmp_path / "out" / f"checkpoint-{step}" / "model.safetensors") for step in range(1, 6)]
    for step in range(2, 6):
        before, after = (weights["lm_head.weight"] for weights in checkpoints[step - 2 : step])
        assert torch.equal(before, after) == (step in skipped)
    with safe_open(tmp_path / "out" / "checkpoint-5" / "trainer" / "rank-00000-of-00001.safetensors", "pt") as state:
        assert state.get_tensor("step.lm_head.weight") == 5 - sum(step <= 5 for step in skipped)
        assert all(state.get_tensor(key).isfinite().all() for key in state.keys() if key.startswith("exp_avg"))  # noqa: SIM118

    run_xtk(*arguments, tmp_path / "again", *batch_of_four, "--max-seconds", 0.001, code=EXIT_RESUMABLE)
    run_xtk(*arguments, tmp_path / "again", *batch_of_four)
    assert_equal_runs(tmp_path / "again", tmp_path / "out")

    run_xtk(*arguments, tmp_path / "two", *TWO_PROCESSES, fresh=True)
    found = read_metrics(tmp_path / "two" / "metrics.jsonl")
    assert [line["skipped_steps"] for line in found] == [line["skipped_steps"] for line in lines]
    found_losses, expected_losses = ([line["loss"] for line in records if "loss" in line] for records in (found, lines))
    assert found_losses == pytest.approx(expected_losses, rel=1e-5)


def test_too_many_consecutive_nonfinite_steps_end_the_run(nonfinite_run, tmp_path):
    arguments, skipped = nonfinite_run
    refused = run_xtk(
        *arguments, tmp_path / "out", "--max-skipped-steps", 0, "--per-device-train-batch-size", 4, code=1
    )
    assert "gradient norm nan" in refused.stderr
    assert f"step {skipped[0]}" in refused.stderr
    command = (*arguments, tmp_path / "every", "--max-skipped-steps", 2, "--per-device-train-batch-size", 24)
    stderr = run_xtk(*command, code=1).stderr
    assert "the loss or the gradient is not finite in 3 consecutive step(s)" in stderr
    assert "where: step 3" in stderr


# --- averaged weights and the best checkpoint


def test_with_ema_the_student_is_the_average_of_the_weights_of_all_steps(arguments, pair, tmp_path):
    common = [*arguments[:-1], "--lr-scheduler-type", "constant", "--warmup-ratio", 0, "--save-steps", 1, "-o"]
    run_xtk(*common, tmp_path / "steps", "--max-steps", 5)
    with_ema = (*common, tmp_path / "averaged", "--max-steps", 4, "--ema-decay", 0.75)
    run_xtk(*with_ema, "--max-seconds", 0.001, code=EXIT_RESUMABLE)
    run_xtk(*with_ema)
    expected = load_file(pair.student / "model.safetensors")
    for step in range(1, 5):
        weights = load_file(tmp_path / "steps" / f"checkpoint-{step}" / "model.safetensors")
        expected = {name: 0.75 * one + 0.25 * weights[name] for name, one in expected.items()}
    found = load_file(tmp_path / "averaged" / "model.safetensors")
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-5, atol=1e-7)
        assert not torch.equal(found[name], weights[name])


def test_early_stopping_returns_the_best_student_also_after_an_interruption(arguments, tmp_path):
    # The more the student learns of the corpus, the less likely it finds letters that are not in the corpus.
    held_out = write_jsonl(tmp_path / "held-out.jsonl", ["ЖЩЪЫ ЭЮЯ ЖЖЩ ЪЫЭ", "ЯЮЭ ЫЪЩЖ"])
    command = [*arguments[:-1], "--learning-rate", 0.01, "--eval-data", held_out, "--eval-steps", 1,
               "--early-stopping-patience", 16, "--save-total-limit", 1, "--max-steps", 60, "--ema-decay", 0.1,
               "-o"]  # fmt: skip
    uninterrupted = tmp_path / "whole"
    run_xtk(*command, uninterrupted)
    content = json.loads((uninterrupted / "xtk.json").read_text())
    bits = [line["eval_bits_per_byte"] for line in read_metrics(uninterrupted / "metrics.jsonl")]
    best = min(bits)
    assert content["best"] == {"step": bits.index(best) + 1, "eval_bits_per_byte": best}
    assert (content["metrics"]["step"], content["metrics"]["eval_bits_per_byte"]) == (bits.index(best) + 1, best)
    (reported,) = json.loads(run_xtk("report", uninterrupted, "-o", tmp_path / "page.html", "--json").stdout)["runs"]
    assert reported["metrics"]["eval_bits_per_byte"] == pytest.approx(best)
    assert len(bits) == content["steps"] == bits.index(best) + 1 + 16 < 60
    evaluation = json.loads(run_xtk("evaluate", uninterrupted, held_out, "--json").stdout)
    assert evaluation["bits_per_byte"] == pytest.approx(best, rel=1e-6)
    assert not list(uninterrupted.glob("best-*"))

    later_step = (bits.index(best) + 1) // 2 * 2 + 2  # the only checkpoint that is kept, and not the best one
    output = tmp_path / "out"
    code, _ = signal_at_checkpoint(command, output, signal.SIGTERM, step=later_step)
    assert code == EXIT_RESUMABLE
    assert [path.name for path in output.glob("best-*")] == [f"best-{bits.index(best) + 1}"]
    run_xtk(*command, output)
    assert_equal_runs(output, uninterrupted)


def test_early_stopping_keeps_the_first_weights_if_no_step_improves_them(arguments, tmp_path, pair):
    held_out = write_jsonl(tmp_path / "held-out.jsonl", ["ЖЩЪЫ ЭЮЯ ЖЖЩ ЪЫЭ", "ЯЮЭ ЫЪЩЖ"])
    command = [*arguments[:-1], "--learning-rate", 0.5, "--lr-scheduler-type", "constant", "--warmup-ratio", 0,
               "--eval-data", held_out, "--eval-steps", 1, "--eval-on-start", "--early-stopping-patience", 5,
               "--save-steps", 2, "--max-steps", 12, "-o"]  # fmt: skip
    run_xtk(*command, tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "xtk.json").read_text())
    first = read_metrics(tmp_path / "whole" / "metrics.jsonl")[0]
    assert first["step"] == 0
    assert content["best"] == {"step": 0, "eval_bits_per_byte": first["eval_bits_per_byte"]}
    assert content["steps"] == 5
    without_eval_on_start = [one for one in command if one != "--eval-on-start"]
    assert "eval_on_start" in run_xtk(*without_eval_on_start, tmp_path / "whole", code=1).stderr
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    for name, one in load_file(pair.student / "model.safetensors").items():
        assert torch.equal(weights[name], one), name
    assert not list((tmp_path / "whole").glob("best-*"))
    code, _ = signal_at_checkpoint(command, tmp_path / "out", signal.SIGTERM, step=2)
    assert code == EXIT_RESUMABLE
    run_xtk(*command, tmp_path / "out")
    assert_equal_runs(tmp_path / "out", tmp_path / "whole")


def test_early_stopping_without_evaluations_is_refused(arguments, tmp_path):
    refused = run_xtk(*arguments, tmp_path / "out", "--early-stopping-patience", 2, code=1)
    assert "--eval-data DATA --eval-steps N" in refused.stderr


# --- the model card


def test_the_model_card_names_the_base_model_and_no_local_path(pair, cache, tmp_path):
    hub_folder = tmp_path / "models--some-lab--small-1" / "snapshots" / "0123"
    shutil.copytree(pair.student, hub_folder)
    run_xtk("distill", hub_folder, cache, "--max-steps", 2, "-o", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["base_model"] == "some-lab/small-1"
    assert "distillation" in metadata["tags"]
    recipe = read_recipe(tmp_path / "out")
    manifest = json.loads((cache / "manifest.json").read_text())["header"]
    for fingerprint in (
        recipe["inputs"]["student"]["weights"], manifest["teacher"]["weights"], manifest["data"]["fingerprint"],
    ):  # fmt: skip
        assert fingerprint[:23] in card
    assert all(f"`{loss}`" in card for loss in recipe["losses"])
    assert "| metric | step 1 | step 2 |" in card
    for path in (tmp_path, Path.home(), Path.cwd()):
        assert str(path) not in card
    assert public_model_name(pair.student) == pair.student.name
