"""Caches in an object store, as a user types them; and caches merged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from small_inputs import sentences, write_jsonl

from xtk.artifacts.teacher_cache import TeacherCache

pytestmark = pytest.mark.slow

OPTIONS = ["--top-k", 16, "--shard-tokens", 400]


def stored(place: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(place)
    fs.invalidate_cache()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def remote(run, store, pair, corpus) -> str:
    place = "s3://bucket/commands/cache"
    assert run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", place).stdout == f"{place}\n"
    return place


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_cache_in_a_store_is_the_local_one_byte_for_byte_and_found_again(run, remote, pair, corpus, cache, store):
    assert stored(remote) == files_of(cache)
    before = len(store.requests())
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", remote)
    assert not [line for line in store.requests()[before:] if line.startswith("PUT")]
    done = run("cache-teacher", pair.teacher, corpus, "--top-k", 4, "-o", remote, code=1)
    assert "the output folder contains a cache with different inputs or options" in done.stderr


def test_a_student_of_a_remote_cache_is_that_of_the_local_one(run, remote, cache, pair, projection, tmp_path):
    options = ["--projection", projection, "--max-steps", 2, "--per-device-train-batch-size", 4]
    run("distill", pair.student, cache, *options, "-o", tmp_path / "local")
    done = run("distill", pair.student, "-", *options, "-o", tmp_path / "remote", stdin=f"{remote}\n")
    assert done.stdout == f"{tmp_path / 'remote'}\n"
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "remote")]
    assert weights[0] == weights[1]


def test_a_remote_cache_is_inspected_and_what_was_altered_is_named(run, remote, tmp_path):
    record = json.loads(run("inspect", remote, "--verify", "--json").stdout)
    assert (record["path"], record["kind"]) == (remote, "teacher-cache")
    assert record["statistics"]["documents"] == 40
    fs, root = fsspec.core.url_to_fs(remote)
    other = f"bucket/{tmp_path.name}"
    for path in fs.find(root):
        fs.cp_file(path, f"{other}/{path.rpartition('/')[2]}")
    raw = fs.cat_file(f"{other}/shard-00001.arrow")
    at = raw.index(b" has ")
    fs.pipe_file(f"{other}/shard-00001.arrow", raw[:at] + b"_" + raw[at + 1 :])
    done = run("inspect", f"s3://{other}", "--verify", code=1)
    assert f"s3://{other}/shard-00001.arrow, row 0" in done.stderr
    done = run("inspect", "s3://bucket/nowhere", code=1)
    assert "this folder contains no teacher cache" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_killed_while_a_shard_is_sent_the_same_command_ends_with_the_same_cache(
    run, store, pair, corpus, cache, tmp_path, how
):
    place = f"s3://bucket/{tmp_path.name}"
    store.hold(f"PUT /bucket/{tmp_path.name}/shard-00002")
    process = start("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", place)
    try:
        store.wait_for(f"PUT /bucket/{tmp_path.name}/shard-00002")
        process.send_signal(how)
        store.hold(None)
        process.communicate(timeout=60)
    finally:
        store.hold(None)
        process.kill()
    there = stored(place)
    assert "manifest.json" not in there
    assert {"shard-00000.arrow", "shard-00001.arrow"} <= set(there)
    assert "shard-00003.arrow" not in there
    done = run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", place)
    assert "continuing, " in done.stderr
    assert stored(place) == files_of(cache)


@pytest.mark.long
def test_a_second_writer_is_refused_and_the_first_one_ends_well(run, store, pair, corpus, cache, tmp_path):
    place = f"s3://bucket/{tmp_path.name}"
    # The second looks at the empty folder, and meets the first one's shards when it sends its own.
    store.hold(f"PUT /bucket/{tmp_path.name}/tokenizer.json")
    processes = [start("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", place) for _ in range(2)]
    try:
        store.wait_for(f"PUT /bucket/{tmp_path.name}/tokenizer.json")
        store.hold(None)
        told = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        store.hold(None)
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 1}, told
    for code, message in zip(codes, told, strict=True):
        assert code == 0 or "another process is writing this cache" in message
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", place)
    assert stored(place) == files_of(cache)


def test_a_place_that_cannot_be_written_is_known_before_the_teacher_starts(run, store, pair, corpus, tmp_path):
    done = run("cache-teacher", pair.teacher, corpus, "-o", "s3://nowhere/cache", code=1)
    assert "the bucket nowhere does not exist" in done.stderr
    store.cut(True)
    try:
        done = run("cache-teacher", pair.teacher, corpus, "-o", f"s3://bucket/{tmp_path.name}", code=1)
    finally:
        store.cut(False)
    assert "Traceback" not in done.stderr
    assert "check the network" in done.stderr


@pytest.mark.long
def test_merged_caches_are_the_cache_of_the_data_put_together(run, pair, tmp_path):
    texts = sentences(30, seed=11)
    write_jsonl(tmp_path / "all.jsonl", texts)
    for name, first, last in (("a", 0, 13), ("b", 13, 30)):
        write_jsonl(tmp_path / f"{name}.jsonl", texts[first:last])
        run("cache-teacher", pair.teacher, tmp_path / f"{name}.jsonl", *OPTIONS, "-o", tmp_path / name)
    run("cache-teacher", pair.teacher, tmp_path / "all.jsonl", *OPTIONS, "-o", tmp_path / "all")
    done = run("cache-teacher", "--merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "merged", "--json")
    assert json.loads(done.stdout)["documents"] == 30
    stretch = tmp_path / "stretch"
    run("cache-teacher", "--merge", tmp_path / "a", "-", "--rows", "5:20", "-o", stretch, stdin=f"{tmp_path / 'b'}\n")
    whole = TeacherCache(tmp_path / "all")
    for found, first in ((TeacherCache(tmp_path / "merged"), 0), (TeacherCache(stretch), 5)):
        for number, row in enumerate(found):
            expected = whole.read_document(first + number)
            assert row.document == expected.document
            assert row.tokens.ids.tolist() == expected.tokens.ids.tolist()
            assert row.stored_logprobs.ids.tolist() == expected.stored_logprobs.ids.tolist()
            np.testing.assert_allclose(row.stored_logprobs.logprobs, expected.stored_logprobs.logprobs, atol=1e-5)
    assert run("inspect", tmp_path / "merged", "--verify").stdout
    run("distill", pair.student, tmp_path / "merged", "--max-steps", 1, "-o", tmp_path / "student")


def test_what_makes_no_sense_with_merge_is_told(run, cache, tmp_path):
    done = run("cache-teacher", "--merge", cache, "--top-k", 4, "-o", tmp_path / "out", code=2)
    assert "--merge does not run a teacher, so --top-k has no effect" in done.stderr
    done = run("cache-teacher", cache, cache, "--rows", "1:2", "-o", tmp_path / "out", code=2)
    assert "--rows needs --merge" in done.stderr
    done = run("cache-teacher", cache, "-o", tmp_path / "out", code=2)
    assert "DATA is missing" in done.stderr
