"""Slurm jobs of examples/cluster: the same bytes as one command, also after lost, preempted and requeued jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import cache_writer_processes
import pytest
import slurm_on_this_machine

from xtk.runs.metrics_file import read_metrics

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
ARRAY, DISTILL = CLUSTER / "cache_teacher_array.sbatch", CLUSTER / "distill.sbatch"
OPTIONS = ("--top-k", 16, "--shard-tokens", 100)
TRAINING = ("--loss", "ce", "--max-steps", 3, "--per-device-train-batch-size", 2, "--logging-steps", 1)

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Install simulated Slurm programs and return the environment in which they are found."""
    return {**os.environ, **slurm_on_this_machine.install(tmp_path / "slurm"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def reference_cache(run, pair, corpus, tmp_path_factory) -> Path:
    """Return the cache that one command writes."""
    folder = tmp_path_factory.mktemp("one") / "cache"
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", folder)
    return folder


def run_command(env: dict[str, str], folder: Path, *command: object, code: int = 0) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, timeout=500,
                          check=False)  # fmt: skip
    logs = "\n".join(log.read_text() for log in folder.glob("*.log"))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{logs}"
    return done.stdout + done.stderr


def exit_codes(env: dict[str, str]) -> dict[tuple[int, int | None, int], int]:
    """Return {(job, array task, number of the start): exit code}, with jobs counted from 0."""
    return {(job["job"] - 4200, job["task"], job["start"]): job["code"] for job in slurm_on_this_machine.read_jobs(env)}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is missing: apt-get install shellcheck")
def test_the_scripts_pass_shellcheck():
    done = subprocess.run(["shellcheck", ARRAY, DISTILL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_an_array_with_a_lost_task_completes_the_cache_of_one_command(pair, corpus, reference_cache, slurm, tmp_path):
    slurm["SLURM_HERE_LOSES"] = f"1={tmp_path / 'cache' / 'shard-00001.arrow'}"
    run_command(slurm, tmp_path, "bash", ARRAY, 3, tmp_path / "cache", pair.teacher, corpus, *OPTIONS)
    assert exit_codes(slurm) == {(0, 0, 1): 0, (0, 1, 1): -9, (0, 2, 1): 0, (1, None, 1): 0}
    assert slurm_on_this_machine.read_jobs(slurm)[-1]["dependency"] == "afterany:4200"
    last = (tmp_path / "cache-teacher-4201.log").read_text()
    assert "shards already exist" in last
    assert last.endswith(f"{tmp_path / 'cache'}\n")
    assert cache_writer_processes.contents(tmp_path / "cache") == cache_writer_processes.contents(reference_cache)


def test_an_array_with_data_for_each_task_writes_the_merged_cache(run, pair, corpus, slurm, tmp_path):
    lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    for task in (0, 1):
        (tmp_path / f"corpus-{task}.jsonl").write_text("".join(lines[task * 20 : task * 20 + 20]), encoding="utf-8")
        run("cache-teacher", pair.teacher, f"corpus-{task}.jsonl", *OPTIONS, "-o", f"by-hand-{task}", cwd=tmp_path)
    run("cache", "merge", "by-hand-0", "by-hand-1", "-o", "by-hand", cwd=tmp_path)
    run_command(slurm, tmp_path, "bash", ARRAY, 2, "cache", pair.teacher, "corpus-{part}.jsonl", *OPTIONS)
    assert set(exit_codes(slurm).values()) == {0}
    found = cache_writer_processes.contents(tmp_path / "cache")
    assert found == cache_writer_processes.contents(tmp_path / "by-hand")


@pytest.mark.long  # three jobs take a minute; the next test has two
def test_a_run_that_is_out_of_time_is_requeued_and_equals_an_uninterrupted_run(pair, corpus, slurm, tmp_path):
    def train(output: str, seconds: int) -> dict[tuple[int, int | None, int], int]:
        run_command({**slurm, "MAX_SECONDS": str(seconds)}, tmp_path, "sbatch", DISTILL, output, pair.student, corpus,
              *TRAINING)  # fmt: skip
        return exit_codes(slurm)

    train("undisturbed", 10_000)
    sliced_codes = train("sliced", 1)
    assert sliced_codes == {(0, None, 1): 0, (1, None, 1): 0, (1, None, 2): 0, (1, None, 3): 0}
    assert (tmp_path / "distill-4201.log").read_text().count("is queued again") == 2
    student = (tmp_path / "sliced" / "model.safetensors").read_bytes()
    assert student == (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
    curves = [[line.get("loss") for line in read_metrics(tmp_path / name / "metrics.jsonl")]
              for name in ("undisturbed", "sliced")]  # fmt: skip
    assert curves[0] == curves[1]


@pytest.mark.long
def test_a_preempted_run_writes_a_checkpoint_and_continues_from_it(pair, corpus, slurm, tmp_path):
    slurm["SLURM_HERE_PREEMPTS"] = str(tmp_path / "student" / "checkpoint-100" / "xtk.json")
    run_command(slurm, tmp_path, "sbatch", DISTILL, "student", pair.student, corpus, *TRAINING, "--max-steps", 300,
          "--save-steps", 100)  # fmt: skip
    assert list(exit_codes(slurm)) == [(0, None, 1), (0, None, 2)]
    assert exit_codes(slurm)[0, None, 2] == 0
    log = (tmp_path / "distill-4200.log").read_text()
    stopped = re.search(r"stopped after step (\d+)", log)
    assert stopped, log
    assert f"resuming from student/checkpoint-{stopped[1]}\n" in log
    assert (tmp_path / "student" / "xtk.json").exists()


def test_a_failed_run_is_not_requeued(pair, slurm, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    run_command(slurm, tmp_path, "sbatch", DISTILL, "student", pair.student, "empty.jsonl", *TRAINING)
    assert list(exit_codes(slurm)) == [(0, None, 1)]
    assert exit_codes(slurm)[0, None, 1] != 0


@pytest.mark.parametrize(
    "arguments",
    [(ARRAY, 2, "cache", "teacher", "data", "--force"), (ARRAY, 2, "cache", "teacher", "data", "--estimate"),
     (ARRAY, "two", "cache", "teacher", "data"), (ARRAY, 2, "cache"),
     (DISTILL, "student", "model", "data", "--max-seconds", 3)],
)  # fmt: skip
def test_invalid_arguments_are_refused_before_a_job_is_submitted(slurm, tmp_path, arguments):
    done = subprocess.run(["bash", *map(str, arguments)], cwd=tmp_path, env=slurm, capture_output=True, check=False)
    assert done.returncode in (1, 2)
    assert not (tmp_path / "slurm" / "jobs.jsonl").exists()
