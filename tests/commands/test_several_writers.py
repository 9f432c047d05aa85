"""Several processes and machines that write one cache; two that do by mistake; what is found when the work goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cache_writer_processes
import pytest
import small_inputs

from xtk.artifacts.cache_output import UNFINISHED_MARKER
from xtk.artifacts.corpus_reader import Corpus
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import CachePartition, cache_teacher
from xtk.tokens.teacher_logprobs import Support

pytestmark = pytest.mark.slow

OPTIONS = ("--top-k", 16, "--shard-tokens", 400)  # those of the fixture `cache`


def request_of(pair) -> CacheRequest:
    return CacheRequest(pair.teacher, "teacher", Support("top-k", top_k=16), shard_tokens=400)


def write(pair, corpus: Path, folder: Path, rank: int, machines: int) -> dict | None:
    return cache_teacher(request_of(pair), Corpus([str(corpus)]), folder, partition=CachePartition(1, rank, machines))


def start(pair, corpus: object, folder: Path, *options: object, **arguments: object) -> subprocess.Popen[str]:
    words = ("cache-teacher", pair.teacher, corpus, *OPTIONS, *options, "-o", folder)
    return subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **arguments,
    )  # fmt: skip


def wait_for_children(process: subprocess.Popen[str], count: int) -> list[int]:
    deadline = time.monotonic() + 300
    while len(children := cache_writer_processes.children_of(process.pid)) < count and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    assert len(children) == count
    return children


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_processes_and_a_pipe_write_the_cache_of_one(run, pair, corpus, cache, tmp_path):
    done = run("cache-teacher", pair.teacher, "-", *OPTIONS, "--num-processes", 2, "-o", "c", "--json", cwd=tmp_path,
               stdin=corpus.read_text(encoding="utf-8"), timeout=600)  # fmt: skip
    assert cache_writer_processes.contents(tmp_path / "c") == cache_writer_processes.contents(cache)
    (line,) = done.stdout.splitlines()  # of the workers, nothing
    assert json.loads(line)["documents"] == 40


@pytest.mark.long
def test_what_goes_wrong_in_a_process_is_told_as_it_is_without_it(run, pair, corpus, tmp_path):
    broken = small_inputs.make_teacher(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    arguments = ("cache-teacher", broken, corpus, *OPTIONS, "-o", tmp_path / "c")
    alone, several = (run(*arguments, "--num-processes", count, code=1, timeout=600) for count in (1, 2))
    assert "weights cannot be read" in alone.stderr
    told = [line for line in alone.stderr.splitlines() if line.startswith(("xtk:", "  where:", "  try:"))]
    assert told == [line for line in several.stderr.splitlines() if line.startswith(("xtk:", "  where:", "  try:"))]
    assert several.stdout == ""
    assert not list((tmp_path / "c").glob("shard-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_processes(pair, corpus, tmp_path, number, code):
    process = start(pair, corpus, tmp_path / "c", "--num-processes", 2, start_new_session=True)
    children = wait_for_children(process, 2)
    if number == signal.SIGINT:  # Ctrl-C reaches all processes of a terminal
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    assert_gone(children)


def test_machines_write_their_own_shards_and_the_last_one_finishes(pair, corpus, cache, tmp_path, capsys):
    folder = tmp_path / "c"
    shards = sorted(path.name for path in cache.glob("shard-*"))
    assert write(pair, corpus, folder, 1, 3) is None
    assert sorted(path.name for path in folder.glob("shard-*.arrow")) == shards[1::3]
    assert "shards of other machines are missing" in capsys.readouterr().err
    assert write(pair, corpus, folder, 0, 3) is None
    # What a machine that was lost had half written.
    (folder / f".xtk-tmp-7@0123abcd-89abcdef-{shards[2]}").write_bytes(b"half")
    assert write(pair, corpus, folder, 2, 3) == write(pair, corpus, folder, 0, 3)
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


def test_two_machines_that_finish_at_once_write_the_same(pair, corpus, cache, tmp_path):
    teacher, folder = pair.teacher, tmp_path / "c"
    processes = [
        cache_writer_processes._forks.Process(
            target=cache_writer_processes.write_share, args=(teacher, corpus, folder, rank, 2)
        )
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--machine-rank", 2, "--num-machines", 2),
            "--machine-rank is 2, but must be at least 0 and below --num-machines (2)",
        ),
        (("--num-machines", 2, "--force"), "--force cannot be combined with --num-machines"),
    ],
)
def test_shares_that_make_no_sense(run, pair, corpus, tmp_path, options, words):
    done = run("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "c", code=1)
    assert words in done.stderr
    assert not (tmp_path / "c").exists()


def test_a_second_writer_of_a_cache_is_refused_and_nothing_is_lost(run, pair, corpus, cache, tmp_path):
    folder = tmp_path / "c"
    many = small_inputs.write_jsonl(tmp_path / "many.jsonl", small_inputs.sentences(2000))
    first = start(pair, many, folder)
    deadline = time.monotonic() + 300
    while not list(folder.glob("shard-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)  # it is alive, and in the middle
    for force in ((), ("--force",)):
        done = run("cache-teacher", pair.teacher, many, *OPTIONS, *force, "-o", folder, code=1, timeout=600)
        assert "another process is writing this cache" in done.stderr
        assert f"process {first.pid} on " in done.stderr
        assert "try:" in done.stderr
    held = cache_writer_processes.contents(folder)
    first.kill()
    first.communicate()
    assert any(name.startswith("shard-") for name in held)
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "--force", "-o", folder)  # the dead hold nobody up
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


def test_a_second_run_of_one_student_is_refused(run, pair, cache, projection, tmp_path):
    words = ("distill", pair.student, cache, "--projection", projection, "-o", tmp_path / "out", "--max-steps")
    first = subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, words), "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "out" / "recipe.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    for force in ((), ("--force",)):
        done = run(*words, 100_000, *force, code=1)
        assert "another process is writing this student" in done.stderr
        assert f"process {first.pid} on " in done.stderr
    first.kill()
    first.communicate()
    run(*words, 2, "--force")
    assert not list((tmp_path / "out").glob(".xtk-*"))


def test_a_checkpoint_that_a_running_process_removes_is_not_loaded(run, pair, cache, projection, tmp_path):
    output = tmp_path / "out"
    words = ("distill", pair.student, cache, "--projection", projection, "-o", output, "--max-steps", 100_000)
    first = subprocess.Popen([sys.executable, "-m", "xtk", *map(str, words), "--save-steps", "1"])
    deadline = time.monotonic() + 300
    while not list(output.glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    for file in output.glob("checkpoint-*/*.safetensors"):
        file.unlink()  # as the process does next, with --save-total-limit
    done = run(*words, "--save-steps", "1", code=1)
    first.kill()
    first.communicate()
    assert "another process is writing this student" in done.stderr


def flipped(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", ["a flipped byte", "cut in half"])
def test_what_was_damaged_between_a_kill_and_the_next_run_is_named_and_written_again(
    pair, corpus, cache, tmp_path, capfd, damage
):
    folder = tmp_path / "c"
    write(pair, corpus, folder, 0, 2)  # some of the shards, as a kill leaves them
    shard = folder / "shard-00002.arrow"
    raw = shard.read_bytes()
    if damage == "cut in half":
        shard.write_bytes(raw[: len(raw) // 2])
    else:
        texts = [row.document.text for row in list(TeacherCache(cache))]
        flipped(shard, next(raw.find(text.encode()) for text in texts if text.encode() in raw))
    write(pair, corpus, folder, 0, 1)
    assert f"{shard}: " in capfd.readouterr().err
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


def test_a_flipped_byte_in_the_tokenizer_is_found_by_inspect_and_by_who_reads_it(run, cache, tmp_path):
    import shutil

    broken = Path(shutil.copytree(cache, tmp_path / "c"))
    flipped(broken / "tokenizer.json", 1000)
    done = run("inspect", "--verify", broken, code=1)
    assert str(broken / "tokenizer.json") in done.stderr
    with pytest.raises(XtkError, match="does not match its checksum in the manifest"):
        _ = TeacherCache(broken).teacher_tokenizer


@pytest.mark.long
def test_two_processes_on_a_full_disk_go_on_when_there_is_room(run, pair, corpus, tmp_path):
    options = (*OPTIONS, "--precision", "float32")
    run("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "whole")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        arguments = ("cache-teacher", pair.teacher, corpus, *options, "--num-processes", 2, "-o", disk / "c")
        done = run(*arguments, code=1, timeout=600)
        assert "the disk is full" in done.stderr
        assert "Traceback" not in done.stderr
        assert {path.name for path in (disk / "c").glob(".*")} == {UNFINISHED_MARKER}
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        run(*arguments, timeout=600)
        assert cache_writer_processes.contents(disk / "c") == cache_writer_processes.contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
