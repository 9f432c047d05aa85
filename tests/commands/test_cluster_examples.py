"""Jobs for clusters: what examples/cluster starts gives the bytes of one command, whatever is lost on the way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import cache_writer_processes
import pytest
import slurm_on_this_machine

from xtk.training.metrics_file import read_metrics

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
ARRAY, DISTILL = CLUSTER / "cache_teacher_array.sbatch", CLUSTER / "distill.sbatch"
OPTIONS = ("--top-k", 16, "--shard-tokens", 100)
TRAINING = ("--loss", "ce", "--max-steps", 3, "--per-device-train-batch-size", 2, "--logging-steps", 1)

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Programs of a Slurm cluster on this machine, and the environment in which they are found."""
    return {**os.environ, **slurm_on_this_machine.install(tmp_path / "slurm"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(run, pair, corpus, tmp_path_factory) -> Path:
    """The cache of one command."""
    folder = tmp_path_factory.mktemp("one") / "cache"
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", folder)
    return folder


def start(env: dict[str, str], folder: Path, *words: object, code: int = 0) -> str:
    done = subprocess.run(list(map(str, words)), cwd=folder, env=env, capture_output=True, text=True, timeout=500,
                          check=False)  # fmt: skip
    logs = "\n".join(log.read_text() for log in folder.glob("*.log"))
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}\n{logs}"
    return done.stdout + done.stderr


def codes(env: dict[str, str]) -> dict[tuple[int, int | None, int], int]:
    """Return {(job, task of an array, start): exit code}, jobs counted from 0."""
    return {(job["job"] - 4200, job["task"], job["start"]): job["code"] for job in slurm_on_this_machine.jobs(env)}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is missing: apt-get install shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", ARRAY, DISTILL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_an_array_whose_second_task_is_lost_fills_the_cache_of_one_command(pair, corpus, whole, slurm, tmp_path):
    slurm["SLURM_HERE_LOSES"] = f"1={tmp_path / 'cache' / 'shard-00001.arrow'}"
    start(slurm, tmp_path, "bash", ARRAY, 3, tmp_path / "cache", pair.teacher, corpus, *OPTIONS)
    assert codes(slurm) == {(0, 0, 1): 0, (0, 1, 1): -9, (0, 2, 1): 0, (1, None, 1): 0}
    assert slurm_on_this_machine.jobs(slurm)[-1]["dependency"] == "afterany:4200"
    last = (tmp_path / "cache-teacher-4201.log").read_text()
    assert "shards already exist" in last
    assert last.endswith(f"{tmp_path / 'cache'}\n")
    assert cache_writer_processes.contents(tmp_path / "cache") == cache_writer_processes.contents(whole)


def test_an_array_with_data_for_each_task_ends_as_their_merge(run, pair, corpus, slurm, tmp_path):
    lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    for part in (0, 1):
        (tmp_path / f"corpus-{part}.jsonl").write_text("".join(lines[part * 20 : part * 20 + 20]), encoding="utf-8")
        run("cache-teacher", pair.teacher, f"corpus-{part}.jsonl", *OPTIONS, "-o", f"by-hand-{part}", cwd=tmp_path)
    run("cache-teacher", "--merge", "by-hand-0", "by-hand-1", "-o", "by-hand", cwd=tmp_path)
    start(slurm, tmp_path, "bash", ARRAY, 2, "cache", pair.teacher, "corpus-{part}.jsonl", *OPTIONS)
    assert set(codes(slurm).values()) == {0}
    found = cache_writer_processes.contents(tmp_path / "cache")
    assert found == cache_writer_processes.contents(tmp_path / "by-hand")


@pytest.mark.long  # a minute of three jobs; the test after this one has two
def test_a_run_without_time_is_queued_again_and_ends_as_the_undisturbed_one(pair, corpus, slurm, tmp_path):
    def train(output: str, seconds: int) -> dict[tuple[int, int | None, int], int]:
        start({**slurm, "MAX_SECONDS": str(seconds)}, tmp_path, "sbatch", DISTILL, output, pair.student, corpus,
              *TRAINING)  # fmt: skip
        return codes(slurm)

    train("undisturbed", 10_000)
    ended = train("sliced", 1)
    assert ended == {(0, None, 1): 0, (1, None, 1): 0, (1, None, 2): 0, (1, None, 3): 0}
    assert (tmp_path / "distill-4201.log").read_text().count("is queued again") == 2
    student = (tmp_path / "sliced" / "model.safetensors").read_bytes()
    assert student == (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
    curves = [[line.get("loss") for line in read_metrics(tmp_path / name / "metrics.jsonl")]
              for name in ("undisturbed", "sliced")]  # fmt: skip
    assert curves[0] == curves[1]


def test_a_preempted_run_writes_a_checkpoint_and_continues_from_it(pair, corpus, slurm, tmp_path):
    slurm["SLURM_HERE_PREEMPTS"] = str(tmp_path / "student" / "checkpoint-100" / "xtk.json")
    start(slurm, tmp_path, "sbatch", DISTILL, "student", pair.student, corpus, *TRAINING, "--max-steps", 300,
          "--save-steps", 100)  # fmt: skip
    assert list(codes(slurm)) == [(0, None, 1), (0, None, 2)]
    assert codes(slurm)[0, None, 2] == 0
    log = (tmp_path / "distill-4200.log").read_text()
    stopped = re.search(r"stopped after step (\d+)", log)
    assert stopped, log
    assert f"resuming from student/checkpoint-{stopped[1]}\n" in log
    assert (tmp_path / "student" / "xtk.json").exists()


def test_a_run_that_fails_is_not_queued_again(pair, slurm, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    start(slurm, tmp_path, "sbatch", DISTILL, "student", pair.student, "empty.jsonl", *TRAINING)
    assert list(codes(slurm)) == [(0, None, 1)]
    assert codes(slurm)[0, None, 1] != 0


@pytest.mark.parametrize(
    "words",
    [(ARRAY, 2, "cache", "teacher", "data", "--force"), (ARRAY, "two", "cache", "teacher", "data"), (ARRAY, 2, "cache"),
     (DISTILL, "student", "model", "data", "--max-seconds", 3)],
)  # fmt: skip
def test_arguments_that_a_repeated_job_cannot_have_are_refused_before_a_job_is_submitted(slurm, tmp_path, words):
    done = subprocess.run(["bash", *map(str, words)], cwd=tmp_path, env=slurm, capture_output=True, check=False)
    assert done.returncode in (1, 2)
    assert not (tmp_path / "slurm" / "jobs.jsonl").exists()
