"""Several processes or machines that write one cache: partitions, locks, signals, corrupt shards and full disks."""

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

from xtk.cache.output import UNFINISHED_MARKER
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import Support
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import CachePartition, cache_teacher

pytestmark = pytest.mark.slow

OPTIONS = ("--top-k", 16, "--shard-tokens", 400)  # the options of the fixture `cache`


def cache_request(pair) -> CacheRequest:
    return CacheRequest(ModelRef(pair.teacher, name="teacher"), Support("top-k", top_k=16), shard_tokens=400)


def write_partition(pair, corpus: Path, folder: Path, rank: int, num_machines: int) -> dict | None:
    return cache_teacher(
        cache_request(pair), Corpus([str(corpus)]), folder, partition=CachePartition(1, rank, num_machines)
    )


def start_cache_teacher(
    pair, corpus: object, folder: Path, *options: object, **popen_options: object
) -> subprocess.Popen[str]:
    command = ("cache-teacher", pair.teacher, corpus, *OPTIONS, *options, "-o", folder)
    return subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **popen_options,
    )  # fmt: skip


def wait_for_children(process: subprocess.Popen[str], count: int) -> list[int]:
    deadline = time.monotonic() + 300
    while (
        len(child_pids := cache_writer_processes.child_processes(process.pid)) < count and time.monotonic() < deadline
    ):
        assert process.poll() is None
        time.sleep(0.01)
    assert len(child_pids) == count
    return child_pids


def assert_exited(pids: list[int]) -> None:
    deadline = time.monotonic() + 15
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_processes_with_piped_data_write_the_same_cache_as_one(run, pair, corpus, cache, tmp_path):
    done = run("cache-teacher", pair.teacher, "-", *OPTIONS, "--num-processes", 2, "-o", "c", "--json", cwd=tmp_path,
               stdin=corpus.read_text(encoding="utf-8"), timeout=600)  # fmt: skip
    assert cache_writer_processes.contents(tmp_path / "c") == cache_writer_processes.contents(cache)
    (line,) = done.stdout.splitlines()  # the workers print nothing
    assert json.loads(line)["documents"] == 40


@pytest.mark.long
def test_an_error_in_a_worker_process_is_printed_as_with_one_process(run, pair, corpus, tmp_path):
    broken = small_inputs.make_teacher(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    arguments = ("cache-teacher", broken, corpus, *OPTIONS, "-o", tmp_path / "c")
    single, double = (run(*arguments, "--num-processes", count, code=1, timeout=600) for count in (1, 2))
    assert "weights cannot be read" in single.stderr
    error_lines = [line for line in single.stderr.splitlines() if line.startswith(("xtk:", "  where:", "  try:"))]
    assert error_lines == [
        line for line in double.stderr.splitlines() if line.startswith(("xtk:", "  where:", "  try:"))
    ]
    assert double.stdout == ""
    assert not list((tmp_path / "c").glob("shard-*"))


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_all_processes(pair, corpus, tmp_path, signal_number, code):
    process = start_cache_teacher(pair, corpus, tmp_path / "c", "--num-processes", 2, start_new_session=True)
    child_pids = wait_for_children(process, 2)
    if signal_number == signal.SIGINT:  # Ctrl-C reaches all processes of a terminal
        os.killpg(process.pid, signal_number)
    else:
        process.send_signal(signal_number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert_exited(child_pids)


def test_each_machine_writes_its_shards_and_the_last_one_finishes_the_cache(pair, corpus, cache, tmp_path, capsys):
    folder = tmp_path / "c"
    shards = sorted(path.name for path in cache.glob("shard-*"))
    assert write_partition(pair, corpus, folder, 1, 3) is None
    assert sorted(path.name for path in folder.glob("shard-*.arrow")) == shards[1::3]
    assert "shards of other machines are missing" in capsys.readouterr().err
    assert write_partition(pair, corpus, folder, 0, 3) is None
    # A temporary file that a lost machine left half written.
    (folder / f".xtk-tmp-7@0123abcd-89abcdef-{shards[2]}").write_bytes(b"half")
    assert write_partition(pair, corpus, folder, 2, 3) == write_partition(pair, corpus, folder, 0, 3)
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


def test_two_machines_that_finish_at_the_same_time_write_the_same_cache(pair, corpus, cache, tmp_path):
    teacher, folder = pair.teacher, tmp_path / "c"
    processes = [
        cache_writer_processes.fork_context.Process(
            target=cache_writer_processes.write_partition, args=(teacher, corpus, folder, rank, 2)
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
    ("options", "message"),
    [
        (
            ("--machine-rank", 2, "--num-machines", 2),
            "--machine-rank is 2, but must be at least 0 and below --num-machines (2)",
        ),
        (("--num-machines", 2, "--force"), "--force cannot be combined with --num-machines"),
    ],
)
def test_invalid_machine_options_are_refused(run, pair, corpus, tmp_path, options, message):
    done = run("cache-teacher", pair.teacher, corpus, *options, "-o", tmp_path / "c", code=1)
    assert message in done.stderr
    assert not (tmp_path / "c").exists()


def test_a_second_writer_of_a_cache_is_refused_while_the_first_is_alive(run, pair, corpus, cache, tmp_path):
    folder = tmp_path / "c"
    large_corpus = small_inputs.write_jsonl(tmp_path / "many.jsonl", small_inputs.sentences(2000))
    first = start_cache_teacher(pair, large_corpus, folder)
    deadline = time.monotonic() + 300
    while not list(folder.glob("shard-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    first.send_signal(signal.SIGSTOP)  # the process is alive and the cache is unfinished
    for force in ((), ("--force",)):
        done = run("cache-teacher", pair.teacher, large_corpus, *OPTIONS, *force, "-o", folder, code=1, timeout=600)
        assert "another process is writing this cache" in done.stderr
        assert f"process {first.pid} on " in done.stderr
        assert "try:" in done.stderr
    partial_cache = cache_writer_processes.contents(folder)
    first.kill()
    first.communicate()
    assert any(name.startswith("shard-") for name in partial_cache)
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "--force", "-o", folder)  # a dead process holds no lock
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


def test_a_second_run_with_the_same_output_is_refused(run, pair, cache, projection, tmp_path):
    arguments = ("distill", pair.student, cache, "--projection", projection, "-o", tmp_path / "out", "--max-steps")
    first = subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, arguments), "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "out" / "recipe.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    for force in ((), ("--force",)):
        done = run(*arguments, 100_000, *force, code=1)
        assert "another process is writing this student" in done.stderr
        assert f"process {first.pid} on " in done.stderr
    first.kill()
    first.communicate()
    run(*arguments, 2, "--force")
    assert not list((tmp_path / "out").glob(".xtk-*"))


def test_the_write_lock_is_checked_before_a_checkpoint_is_loaded(run, pair, cache, projection, tmp_path):
    output = tmp_path / "out"
    arguments = ("distill", pair.student, cache, "--projection", projection, "-o", output, "--max-steps", 100_000)
    first = subprocess.Popen([sys.executable, "-m", "xtk", *map(str, arguments), "--save-steps", "1"])
    deadline = time.monotonic() + 300
    while not list(output.glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    for file in output.glob("checkpoint-*/*.safetensors"):
        file.unlink()  # as the process would do next with --save-total-limit
    done = run(*arguments, "--save-steps", "1", code=1)
    first.kill()
    first.communicate()
    assert "another process is writing this student" in done.stderr


def flip_bit(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", ["a flipped byte", "cut in half"])
def test_a_shard_that_became_corrupt_between_two_runs_is_named_and_rewritten(
    pair, corpus, cache, tmp_path, capfd, damage
):
    folder = tmp_path / "c"
    write_partition(pair, corpus, folder, 0, 2)  # some of the shards, as after a kill
    shard = folder / "shard-00002.arrow"
    raw = shard.read_bytes()
    if damage == "cut in half":
        shard.write_bytes(raw[: len(raw) // 2])
    else:
        texts = [row.document.text for row in list(TeacherCache(cache))]
        flip_bit(shard, next(raw.find(text.encode()) for text in texts if text.encode() in raw))
    write_partition(pair, corpus, folder, 0, 1)
    assert f"{shard}: " in capfd.readouterr().err
    assert cache_writer_processes.contents(folder) == cache_writer_processes.contents(cache)


def test_a_flipped_bit_in_the_tokenizer_is_found_by_inspect_and_on_loading(run, cache, tmp_path):
    import shutil

    broken = Path(shutil.copytree(cache, tmp_path / "c"))
    flip_bit(broken / "tokenizer.json", 1000)
    done = run("inspect", "--verify", broken, code=1)
    assert str(broken / "tokenizer.json") in done.stderr
    with pytest.raises(XtkError, match="does not match its checksum in the manifest"):
        _ = TeacherCache(broken).teacher_tokenizer


@pytest.mark.long
def test_two_processes_continue_after_a_full_disk_when_space_is_available(run, pair, corpus, tmp_path):
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
