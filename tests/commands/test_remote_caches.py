"""Teacher caches in an object store, and merged caches."""

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

from xtk.cache.reader import TeacherCache

pytestmark = pytest.mark.slow

OPTIONS = ["--top-k", 16, "--shard-tokens", 400]


def remote_files(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def local_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def remote(run, store, pair, corpus) -> str:
    url = "s3://bucket/commands/cache"
    assert run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", url).stdout == f"{url}\n"
    return url


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "xtk", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_remote_cache_has_the_bytes_of_a_local_one_and_is_reused(run, remote, pair, corpus, cache, store):
    assert remote_files(remote) == local_files(cache)
    before = len(store.requests())
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", remote)
    assert not [line for line in store.requests()[before:] if line.startswith("PUT")]
    done = run("cache-teacher", pair.teacher, corpus, "--top-k", 4, "-o", remote, code=1)
    assert "the output folder contains a cache with different inputs or options" in done.stderr


def test_training_from_a_remote_cache_gives_the_same_student(run, remote, cache, pair, projection, tmp_path):
    options = ["--projection", projection, "--max-steps", 2, "--per-device-train-batch-size", 4]
    run("distill", pair.student, cache, *options, "-o", tmp_path / "local")
    done = run("distill", pair.student, "-", *options, "-o", tmp_path / "remote", stdin=f"{remote}\n")
    assert done.stdout == f"{tmp_path / 'remote'}\n"
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "remote")]
    assert weights[0] == weights[1]


def test_inspect_reads_a_remote_cache_and_names_a_corrupt_row(run, remote, tmp_path):
    record = json.loads(run("inspect", remote, "--verify", "--json").stdout)
    assert (record["path"], record["kind"]) == (remote, "teacher-cache")
    assert record["statistics"]["documents"] == 40
    fs, root = fsspec.core.url_to_fs(remote)
    other = f"bucket/{tmp_path.name}"
    for path in fs.find(root):
        fs.cp_file(path, f"{other}/{path.rpartition('/')[2]}")
    raw = fs.cat_file(f"{other}/shard-00001.arrow")
    offset = raw.index(b" has ")
    fs.pipe_file(f"{other}/shard-00001.arrow", raw[:offset] + b"_" + raw[offset + 1 :])
    done = run("inspect", f"s3://{other}", "--verify", code=1)
    assert f"s3://{other}/shard-00001.arrow, row 0" in done.stderr
    done = run("inspect", "s3://bucket/nowhere", code=1)
    assert "this folder contains no teacher cache" in done.stderr


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_cache_killed_during_an_upload_resumes_to_the_same_cache(
    run, store, pair, corpus, cache, tmp_path, signal_number
):
    url = f"s3://bucket/{tmp_path.name}"
    store.hold_requests(f"PUT /bucket/{tmp_path.name}/shard-00002")
    process = start("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", url)
    try:
        store.wait_for(f"PUT /bucket/{tmp_path.name}/shard-00002")
        process.send_signal(signal_number)
        store.hold_requests(None)
        process.communicate(timeout=60)
    finally:
        store.hold_requests(None)
        process.kill()
    uploaded = remote_files(url)
    assert "manifest.json" not in uploaded
    assert {"shard-00000.arrow", "shard-00001.arrow"} <= set(uploaded)
    assert "shard-00003.arrow" not in uploaded
    done = run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", url)
    assert "continuing, " in done.stderr
    assert remote_files(url) == local_files(cache)


@pytest.mark.long
def test_two_simultaneous_writers_leave_a_valid_remote_cache(run, store, pair, corpus, cache, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    # Both processes see an empty folder; the second one finds the shards of the first when it uploads its own.
    store.hold_requests(f"PUT /bucket/{tmp_path.name}/tokenizer.json")
    processes = [start("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", url) for _ in range(2)]
    try:
        store.wait_for(f"PUT /bucket/{tmp_path.name}/tokenizer.json")
        store.hold_requests(None)
        stderrs = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        store.hold_requests(None)
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 1}, stderrs
    for code, stderr in zip(codes, stderrs, strict=True):
        assert code == 0 or "another process is writing this cache" in stderr
    run("cache-teacher", pair.teacher, corpus, *OPTIONS, "-o", url)
    assert remote_files(url) == local_files(cache)


def test_an_output_url_that_cannot_be_written_is_refused(run, store, pair, corpus, tmp_path):
    done = run("cache-teacher", pair.teacher, corpus, "-o", "s3://nowhere/cache", code=1)
    assert "the bucket nowhere does not exist" in done.stderr
    store.cut_connections(True)
    try:
        done = run("cache-teacher", pair.teacher, corpus, "-o", f"s3://bucket/{tmp_path.name}", code=1)
    finally:
        store.cut_connections(False)
    assert "Traceback" not in done.stderr
    assert "check the network" in done.stderr


@pytest.mark.long
def test_merged_caches_equal_the_cache_of_the_concatenated_data(run, pair, tmp_path):
    texts = sentences(30, seed=11)
    write_jsonl(tmp_path / "all.jsonl", texts)
    for name, begin, end in (("a", 0, 13), ("b", 13, 30)):
        write_jsonl(tmp_path / f"{name}.jsonl", texts[begin:end])
        run("cache-teacher", pair.teacher, tmp_path / f"{name}.jsonl", *OPTIONS, "-o", tmp_path / name)
    run("cache-teacher", pair.teacher, tmp_path / "all.jsonl", *OPTIONS, "-o", tmp_path / "all")
    done = run("cache", "merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "merged", "--json")
    assert json.loads(done.stdout)["documents"] == 30
    selected_rows = tmp_path / "stretch"
    run(
        "cache",
        "merge",
        tmp_path / "a",
        "-",
        "--rows",
        "5:20",
        "-o",
        selected_rows,
        stdin=f"{tmp_path / 'b'}\n",
    )
    whole = TeacherCache(tmp_path / "all")
    for merged, begin in ((TeacherCache(tmp_path / "merged"), 0), (TeacherCache(selected_rows), 5)):
        for number, row in enumerate(merged):
            expected = whole.read_document(begin + number)
            assert row.document == expected.document
            assert row.tokens.ids.tolist() == expected.tokens.ids.tolist()
            assert row.stored_logprobs.ids.tolist() == expected.stored_logprobs.ids.tolist()
            np.testing.assert_allclose(row.stored_logprobs.logprobs, expected.stored_logprobs.logprobs, atol=1e-5)
    assert run("inspect", tmp_path / "merged", "--verify").stdout
    run("distill", pair.student, tmp_path / "merged", "--max-steps", 1, "-o", tmp_path / "student")


def test_options_of_a_teacher_and_of_merging_are_in_their_own_commands(run, cache, tmp_path):
    done = run("cache", "merge", cache, "--top-k", 4, "-o", tmp_path / "out", code=2)
    assert "no option called --top-k" in done.stderr
    done = run("cache-teacher", cache, cache, "--rows", "1:2", "-o", tmp_path / "out", code=2)
    assert "no option called --rows" in done.stderr
    done = run("cache-teacher", cache, "-o", tmp_path / "out", code=2)
    assert "is missing" in done.stderr
