"""`xtk sweep`: planning, failures, resuming and refusals; each run equals one that is started by hand."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted_runs import assert_equal_runs, assert_no_processes_left, processes_of_run, start_run, wait_for_path
from xtk_processes import run_here, run_xtk

from xtk.commands.sweep import plan_runs, varying_options
from xtk.errors import XtkError
from xtk.files.output import writer_lock

EXIT_RESUMABLE, EXIT_INTERRUPTED = 75, 130
STEPS = 24
SEEDS = ("--vary", "seed=0 1")
SAFE_NAME = re.compile(r"[\w.+=,-]+", re.ASCII)


def modification_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def times_of_runs(folder: Path) -> dict[Path, int]:
    """Return the modification times of all files but logs, to which every sweep appends."""
    return {path: time for path, time in modification_times(folder).items() if path.suffix != ".log"}


def common_arguments(pair, corpus) -> list[object]:
    return [pair.student, corpus, "--loss", "ce", "--max-steps", 3, "--logging-steps", 1, "--eval-data", corpus]


@pytest.fixture(scope="module")
def swept(pair, corpus, tmp_path_factory):
    """Return (folder, command, failed result, resumed result) of a sweep of two runs, one of them locked at first."""
    root = tmp_path_factory.mktemp("swept")
    command = ["sweep", *common_arguments(pair, corpus), *SEEDS, "-o", "all"]
    with writer_lock(root / "all" / "seed=0", "student"):
        failed = run_xtk(*command, "--json", cwd=root, code=1)
    before = modification_times(root / "all" / "seed=1")
    resumed = run_xtk(*command, "--json", cwd=root)
    assert before
    assert modification_times(root / "all" / "seed=1") == before, "what was finished is not repeated"
    return root, command, failed, resumed


@pytest.mark.slow
def test_a_failed_run_is_reported_and_the_other_runs_are_kept(swept):
    _, _, failed, resumed = swept
    stderr = failed.stderr
    assert "seed=0 failed with exit code 1\n    xtk: another process is writing this student" in stderr
    assert "1 of the 2 runs of the sweep failed\n  where: seed=0" in stderr
    assert [json.loads(line)["state"] for line in failed.stdout.splitlines()] == ["failed", "finished"]
    assert "2 runs, 1 already finished" in resumed.stderr
    assert [json.loads(line)["state"] for line in resumed.stdout.splitlines()] == ["finished", "finished"]


@pytest.mark.slow
def test_a_repeated_sweep_trains_nothing_and_prints_the_stored_metrics(swept):
    root, command, _, resumed = swept
    before = times_of_runs(root)
    records = [json.loads(line) for line in run_xtk(*command, "--json", cwd=root).stdout.splitlines()]
    assert records == [json.loads(line) for line in resumed.stdout.splitlines()]
    table = run_xtk(*command, cwd=root).stdout.splitlines()
    assert times_of_runs(root) == before
    for name in ("loss", "ce", "eval_bits_per_byte"):
        values = []
        for seed, record in enumerate(records):
            assert record["path"] == f"all/seed={seed}"
            assert record["varied_options"] == {"seed": str(seed)}
            assert record["metrics"] == json.loads((root / record["path"] / "xtk.json").read_text())["metrics"]
            assert record[name] == record["metrics"][name]
            values.append(record[name])
        mean, error = np.mean(values), np.std(values, ddof=1) / np.sqrt(2)
        stored = records[0]["seed_means"][name]
        assert (stored["mean"], stored["standard_error"]) == (pytest.approx(mean), pytest.approx(error))
        assert f"{mean:.4f} ± " in table[-1]
    assert table[0] == "2 of 2 runs in all"
    assert table[1].split()[:4] == ["seed", "steps", "loss", "ce"]
    assert table[2].split()[:3] == ["0", "1", "3"]


@pytest.mark.slow
def test_a_run_equals_the_run_of_its_printed_command(swept):
    root, command, *_ = swept
    lines = run_xtk(*command, "--dry-run", cwd=root).stdout.splitlines()
    assert len(lines) == 2
    for seed, line in enumerate(lines):
        words = shlex.split(line)
        assert words[:2] == ["xtk", "distill"]
        assert words[-2:] == ["-o", f"all/seed={seed}"]
    assert f"$ {lines[0]}\n" in (root / "all" / "seed=0.log").read_text()
    run_xtk(*words[1:-1], "alone", cwd=root)
    assert_equal_runs(root / "all" / "seed=1", root / "alone")


@pytest.mark.slow
def test_report_accepts_all_files_of_a_sweep_folder(swept):
    root = swept[0]
    done = run_xtk("report", *sorted((root / "all").glob("*")), "-o", root / "page.html", "--json")
    assert [Path(one["path"]).name for one in json.loads(done.stdout)["runs"]] == ["seed=0", "seed=1"]
    assert (
        "names only log files of a sweep, not runs"
        in run_xtk("report", root / "all" / "seed=0.log", "-o", root / "other.html", code=1).stderr
    )


@pytest.mark.slow
def test_finished_runs_refuse_options_that_change_the_student_and_accept_others(swept):
    root, command, *_ = swept
    before = times_of_runs(root)
    done = run_xtk(*command, "--learning-rate", 1e-3, cwd=root, code=1)
    for seed in (0, 1):
        message = "xtk: the output folder has a run with other options or inputs"
        assert f"the run seed={seed} failed with exit code 1\n    {message}" in done.stderr
    assert "learning_rate: 5e-05 there, 0.001 now" in done.stderr
    assert run_xtk(*command, "--save-steps", 7, cwd=root).stdout.startswith("2 of 2 runs")
    assert times_of_runs(root) == before


@pytest.mark.slow
def test_two_simultaneous_sweeps_of_one_folder_are_refused(swept):
    root, command, *_ = swept
    with writer_lock(root / "all", "sweep"):
        done = run_xtk(*command, cwd=root, code=1)
    assert "another process is writing this sweep" in done.stderr


@pytest.mark.parametrize(
    ("code", "message", "options"),
    [
        (1, "no option of --vary called 'sede'; did you mean seed?", ["--vary", "sede=0"]),
        (2, "seed=1.5: invalid value for '--seed'", ["--vary", "seed=0 1.5"]),
        (
            2,
            "seed=0: no option called --max-stepps; did you mean --max-steps?",
            ["--vary", "seed=0", "--max-stepps", 3],
        ),
        (2, "the value must be true or false", ["--vary", "packing=true no"]),
        (2, "seed has no value", ["--vary", "seed="]),
        (1, "have the same options", ["--vary", "seed=0 0"]),
        (1, "use-dora=true and use-dora=false have the same options", ["--use-dora", "--vary", "use-dora=true false"]),
        (1, "no closing quotation", ["--vary", "seed='0"]),
        (1, "--vary is missing", []),
        (1, "learning-rate=-1: --learning-rate is -1", ["--vary", "learning-rate=1e-3 -1"]),
    ],
)
def test_command_lines_are_parsed_before_the_first_run_starts(pair, cache, tmp_path, code, message, options):
    done = run_here("sweep", pair.student, cache, "--max-steps", 1, *options, "-o", tmp_path / "out", code=code)
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_error_in_the_inputs_of_a_run_is_reported_when_it_starts_and_the_other_runs_continue(pair, cache, tmp_path):
    messages = {
        "cache=nowhere,loss=ce": "this data file, folder or dataset does not exist",
        "cache=nowhere,loss=cee": "no loss called 'cee'; did you mean ce?",
        "cache=cache,loss=cee": "no loss called 'cee'; did you mean ce?",
    }
    (tmp_path / "cache").symlink_to(cache)
    vary = ["--vary", "cache=nowhere cache", "--vary", "loss=ce cee"]
    done = run_xtk("sweep", pair.student, "--max-steps", 1, *vary, "-o", "out", cwd=tmp_path, code=1)
    for name, message in messages.items():
        assert f"the run {name} failed with exit code 1\n    xtk: {message}" in done.stderr
    assert done.stdout.startswith("1 of 4 runs in out\n")


@pytest.mark.slow
def test_an_output_that_is_not_a_sweep_folder_is_refused(swept, tmp_path):
    root, command, *_ = swept
    (tmp_path / "file").touch()
    (tmp_path / "mine" / "seed=0").mkdir(parents=True)
    (tmp_path / "mine" / "seed=0" / "notes").touch()
    for output, message in (
        (tmp_path / "file", "a sweep must be a folder"),
        (root / "all" / "seed=0", "is a run of xtk distill"),
        (
            tmp_path / "mine",
            "seed=0 failed with exit code 1\n    xtk: this folder contains files that xtk did not write",
        ),
    ):
        assert message in run_xtk(*command[:-1], output, cwd=root, code=1).stderr


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@settings(max_examples=40, deadline=None)
@given(st.lists(texts, min_size=1, max_size=5, unique=True), st.lists(texts, min_size=1, max_size=3))
def test_varied_values_are_passed_unchanged_and_run_names_are_unique(values, list_value):
    separate_values = shlex.join(values)
    one_list = shlex.quote(shlex.join(list_value))
    vary = [f"route_column={separate_values}", f"freeze={one_list}", "packing=true false"]
    runs = plan_runs(["student", "cache"], vary, Path("out"))
    expected = [(value, tuple(list_value), packing) for value in values for packing in (True, False)]
    assert [(run.options.route_column, run.options.freeze, run.options.packing) for run in runs] == expected
    assert [(run.options.student, run.options.cache) for run in runs] == [("student", ("cache",))] * len(runs)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        assert SAFE_NAME.fullmatch(run.name)
        assert len(f"{run.name}.log") <= 255
        assert run.folder == Path("out", run.name) == Path(run.options.output)
    assert plan_runs(["student", "cache"], vary, Path("out")) == runs


def test_students_caches_losses_and_config_files_can_be_varied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{name}.yaml" for name in ("a", "b")]
    for steps, name in enumerate(names, 5):
        (tmp_path / name).write_text(f"max_steps: {steps}\nseed: 7\n")
    vary = ["student=small/it large/it", "cache=c 'c d'", "loss=ce 'ce alm:weight=2'"]
    vary += [f"config={name}" for name in names]
    runs = plan_runs(["--loss", "byte-kl"], vary, Path("out"))
    given = [
        (
            run.options.student,
            run.options.cache,
            run.options.loss,
            run.options.max_steps,
        )
        for run in runs
    ]
    losses = (("byte-kl", "ce"), ("byte-kl", "ce", "alm:weight=2"))
    assert given == list(itertools.product(("small/it", "large/it"), (("c",), ("c", "d")), losses, (5, 6)))
    assert {run.options.seed for run in runs} == {7}
    assert runs[0].name == "student=small-it,cache=c,loss=ce,config=a.yaml"
    assert runs[-1].name == "student=large-it,cache=c+d,loss=ce+alm-weight=2,config=b.yaml"


def test_either_command_can_be_swept(tmp_path):
    runs = plan_runs(["STUDENT", "DATA"], ["num-generations=2 4"], tmp_path, "distill-on-policy")
    assert [run.options.num_generations for run in runs] == [2, 4]
    assert [run.arguments[0] for run in runs] == ["distill-on-policy"] * 2
    with pytest.raises(XtkError, match="no option of --vary called 'num-generations'"):
        plan_runs(["STUDENT", "DATA"], ["num-generations=2 4"], tmp_path)


def test_run_names_that_end_as_those_of_logs_are_refused(tmp_path):
    with pytest.raises(XtkError, match=r"the name of the run eval-data=a\.log ends in \.log"):
        plan_runs(["STUDENT", "DATA"], ["eval-data=a.log"], tmp_path)


def test_runs_are_compared_by_their_option_values_and_not_by_their_text(tmp_path):
    runs = plan_runs(["STUDENT", "DATA"], ["loss=ce alm", "seed=42 1"], tmp_path)
    assert [set(varied) for varied in varying_options(runs)] == [{"loss", "seed"}] * 4
    assert varying_options(runs[:2]) == [{"seed": "42"}, {"seed": "1"}]
    runs = plan_runs(["STUDENT", "DATA"], ["learning-rate=1e-3 1e-2"], tmp_path)
    assert varying_options(runs) == [{"learning-rate": "0.001"}, {"learning-rate": "0.01"}]
    message = "the runs learning-rate=1e-3 and learning-rate=0.001 have the same options"
    with pytest.raises(XtkError, match=message):
        plan_runs(["STUDENT", "DATA"], ["learning-rate=1e-3 0.001"], tmp_path)


def test_a_path_from_stdin_is_used_in_every_run(tmp_path):
    done = run_xtk("sweep", "student", "-", *SEEDS, "-o", "out", "--dry-run", stdin="some/cache\n", cwd=tmp_path)
    assert [shlex.split(line)[2:4] for line in done.stdout.splitlines()] == [["student", "some/cache"]] * 2


# --- tests that take minutes


@pytest.fixture(scope="module")
def arguments(pair, corpus) -> list[object]:
    """Return the arguments of a sweep of 2 x 2 runs with a checkpoint every 2 steps, without the output path."""
    return [
        "sweep", pair.student, corpus, "--loss", "ce", "--max-steps", STEPS, "--save-steps", 2, "--save-total-limit",
        STEPS, "--logging-steps", 1, "--vary", "learning-rate=1e-3 1e-2", *SEEDS, "-o",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(arguments, tmp_path_factory) -> Path:
    """Return the folder of a sweep that is not interrupted."""
    folder = tmp_path_factory.mktemp("whole-sweep") / "out"
    done = run_xtk(*arguments, folder)
    assert done.stdout.startswith(f"4 of 4 runs in {folder}\nlearning-rate  seed  steps")
    assert len(done.stdout.splitlines()) == 4, "a row for both seeds"
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def interrupt_at_checkpoint(arguments, output: Path, run: str, signal_number: int, step: int) -> tuple[int, str]:
    """Start a sweep, send it a signal when a run has a checkpoint, and return its exit code and stderr."""
    process = start_run([*arguments, output])
    wait_for_path(output / run / f"checkpoint-{step}", process)
    os.kill(process.pid, signal_number)
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert not (output / run / "xtk.json").exists()
    return process.returncode, stderr


@pytest.mark.long
def test_a_sweep_that_is_stopped_killed_and_interrupted_resumes_to_the_same_runs(arguments, uninterrupted, tmp_path):
    output = tmp_path / "out"
    first, second, third, _ = runs = [
        f"learning-rate={rate},seed={seed}" for rate in ("1e-3", "1e-2") for seed in (0, 1)
    ]
    assert names(uninterrupted) == sorted(runs)

    code, stderr = interrupt_at_checkpoint(arguments, output, first, signal.SIGTERM, 4)
    assert code == EXIT_RESUMABLE
    assert f"stopped in run {first}: SIGTERM" in stderr
    assert "Traceback" not in stderr
    assert "stopped after step" in (output / f"{first}.log").read_text()

    code, _ = interrupt_at_checkpoint(arguments, output, second, signal.SIGKILL, 4)
    assert code == -signal.SIGKILL
    assert_no_processes_left(output / second)
    assert_equal_runs(output / first, uninterrupted / first)
    finished = modification_times(output / first)

    process = start_run([*arguments, output])
    wait_for_path(output / second / "checkpoint-8", process)
    assert "another process is writing this sweep" in run_xtk(*arguments, output, code=1).stderr
    wait_for_path(output / third / "checkpoint-4", process)
    assert processes_of_run(output / third)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert_no_processes_left(output / third)

    assert "4 runs, 2 already finished" in run_xtk(*arguments, output).stderr
    assert modification_times(output / first) == finished
    for run in runs:
        assert_equal_runs(output / run, uninterrupted / run)


@pytest.mark.long
def test_max_seconds_limits_the_whole_sweep(arguments, tmp_path):
    output = tmp_path / "out"
    first, second = (f"learning-rate=1e-3,seed={seed}" for seed in (0, 1))
    long_training = ["--max-steps", 10**6, "--save-steps", 0]
    for limit in (60, 1e-3):  # reached in the first run; reached before it
        done = run_xtk(*arguments, output, *long_training, "--max-seconds", limit, code=EXIT_RESUMABLE)
        assert f"stopped in run {first}: --max-seconds is over" in done.stderr
        assert done.stdout == ""
    assert len(list((output / first).glob("checkpoint-*"))) == 1
    (remaining_seconds,) = re.findall(r"--max-seconds ([0-9.]+)", (output / f"{first}.log").read_text())
    assert 0 < float(remaining_seconds) < 60
    assert not (output / second).exists()


@pytest.mark.long
def test_printed_commands_give_the_same_students_and_force_replaces_changed_runs(arguments, uninterrupted, tmp_path):
    script = tmp_path / "bin" / "xtk"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m xtk "$@"\n')
    script.chmod(0o755)
    printed = run_xtk(*arguments, tmp_path / "out", "--dry-run").stdout
    env = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "-e"], input=printed, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines() == [shlex.split(line)[-1] for line in printed.splitlines()]
    for run in names(uninterrupted):
        assert_equal_runs(tmp_path / "out" / run, uninterrupted / run)
    before = modification_times(tmp_path / "out" / "learning-rate=1e-3,seed=0")
    changed_run = tmp_path / "out" / "learning-rate=1e-2,seed=1"
    recipe = json.loads((changed_run / "recipe.json").read_text())
    (changed_run / "recipe.json").write_text(
        json.dumps(recipe | {"identity": {**recipe["identity"], "weight_decay": 0.5}})
    )
    assert "weight_decay: 0.5 there" in run_xtk(*arguments, tmp_path / "out", code=1).stderr
    run_xtk(*arguments, tmp_path / "out", "--force")
    assert_equal_runs(changed_run, uninterrupted / changed_run.name)
    assert modification_times(tmp_path / "out" / "learning-rate=1e-3,seed=0") == before, "those that fit stay"
