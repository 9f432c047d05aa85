"""Shards of unfinished caches, which no manifest lists: the next run finds, reports and rewrites corrupt ones."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import small_caches

from xtk.cache.manifest import shard_file_name
from xtk.cache.reader import TeacherCache, open_verified_shard
from xtk.cache.shard_writing import ShardPosition, check_file_checksum
from xtk.cache.teacher_logprobs import Support
from xtk.cache.writer import ShardedCacheWriter
from xtk.data.corpus_reader import Corpus
from xtk.errors import CorruptError
from xtk.files.storage_folders import open_folder
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import CachePartition, cache_teacher

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("unfinished")


@pytest.fixture(scope="module")
def packed(run, pair, folder) -> Path:
    return small_caches.make_cache(run, pair, folder, "packed")


@pytest.fixture(scope="module")
def raw(run, pair, folder) -> Path:
    return small_caches.make_cache(run, pair, folder, "raw")


def resume(run, pair, packed: Path, output: object, *options: object, code: int = 0):
    """Run the command of the packed cache again, with this output folder."""
    options = (*small_caches.KINDS["packed"], "--shard-tokens", 100, *options)
    return run("cache-teacher", pair.teacher, packed.parent / "data.jsonl", *options, "-o", output, code=code)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["packed", "raw"])
def test_flip_of_any_byte_of_a_shard_is_found_before_parsing(kind, request, tmp_path):
    cache = request.getfixturevalue(kind)
    rng = np.random.default_rng(1)
    flips = 0
    for shard in (cache / shard_file_name(1),):
        content = shard.read_bytes()
        copy = tmp_path / shard.name
        copy.write_bytes(content)
        open_verified_shard(copy, "copy")
        with copy.open("r+b", buffering=0) as stream:
            for position in range(len(content)):
                stream.seek(position)
                stream.write(bytes([content[position] ^ int(rng.integers(1, 256))]))
                with pytest.raises(CorruptError, match="does not match its checksum"):
                    check_file_checksum(copy, "copy")
                stream.seek(position)
                stream.write(content[position : position + 1])
                flips += 1
        open_verified_shard(copy, "copy")
    assert flips > 5_000


def changed_content(content: bytes, change: str) -> bytes:
    return {
        "empty": b"",
        "one byte": content[:1],
        "half": content[: len(content) // 2],
        "one byte less": content[:-1],
        "one byte more": content + b"\0",
        "twice": content + content,
        "zeros": bytes(len(content)),
        "last page of zeros": content[:-4096] + bytes(min(4096, len(content))),
    }[change][: 2 * len(content)]


CHANGES = ("empty", "one byte", "half", "one byte less", "one byte more", "twice", "zeros", "last page of zeros")


@pytest.mark.parametrize("change", CHANGES)
def test_truncated_extended_or_zeroed_shard_is_written_again(raw, tmp_path, change, capsys):
    output = small_caches.copy_without_manifest(raw, tmp_path / "cache")
    shard = output / shard_file_name(1)
    shard.write_bytes(changed_content(shard.read_bytes(), change))
    cache = TeacherCache(raw)
    writer = small_caches.resume_writer(cache, output)
    assert writer.missing_shards() == [1]
    stderr = capsys.readouterr().err
    assert f"{shard}: this shard " in stderr
    assert "writing this shard again" in stderr


def test_shards_swapped_or_copied_over_each_other_are_written_again(packed, tmp_path, capsys):
    cache = TeacherCache(packed)
    output = small_caches.copy_without_manifest(packed, tmp_path / "swapped")
    (output / shard_file_name(0)).rename(output / "other")
    (output / shard_file_name(1)).rename(output / shard_file_name(0))
    (output / "other").rename(output / shard_file_name(1))
    assert small_caches.resume_writer(cache, output).missing_shards() == [0, 1]
    output = small_caches.copy_without_manifest(packed, tmp_path / "copied")
    shutil.copy(output / shard_file_name(1), output / shard_file_name(2))
    assert small_caches.resume_writer(cache, output).missing_shards() == [2]
    documents = [entry["documents"] for entry in cache.manifest["shards"]]
    first, second = sum(documents[:1]), sum(documents[:2])
    assert (
        f"{output / shard_file_name(2)}: this file contains documents {first} to {second - 1} of shard 1, not "
        f"documents {second} to {second + documents[2] - 1} of shard 2; writing this shard again"
    ) in capsys.readouterr().err


def test_next_run_rewrites_corrupt_files_and_gives_the_same_cache(run, pair, packed, tmp_path):
    output = small_caches.copy_without_manifest(packed, tmp_path / "cache")
    (order,) = output.glob("vocabulary-order-*.arrow")
    flipped = bytearray((output / shard_file_name(0)).read_bytes())
    flipped[len(flipped) // 2] ^= 4
    (output / shard_file_name(0)).write_bytes(flipped)
    shutil.copy(output / shard_file_name(2), output / shard_file_name(1))
    order.write_bytes(order.read_bytes()[:-5])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).write_bytes(b"{}")
    result = resume(run, pair, packed, output)
    for number in (0, 1):
        assert f"{output / shard_file_name(number)}: this" in result.stderr
    assert result.stderr.count("writing this shard again") == 2
    assert contents(output) == contents(packed)
    run("inspect", output, "--verify")


def test_shard_with_other_options_is_refused_and_nothing_is_removed(run, pair, packed, tmp_path):
    resume(run, pair, packed, tmp_path / "other", "--seed", 1)
    output = small_caches.copy_without_manifest(packed, tmp_path / "cache")
    shutil.copy(tmp_path / "other" / shard_file_name(1), output / shard_file_name(1))
    before = contents(output)
    result = resume(run, pair, packed, output, code=1)
    (output / ".xtk-unfinished").unlink()
    assert "the output folder contains a cache with different inputs or options" in result.stderr
    assert f"{output / shard_file_name(1)} (options.seed: 1 there, 0 in this command)" in result.stderr
    assert contents(output) == before


def test_a_shard_of_another_program_is_written_again_and_another_version_is_refused(run, pair, packed, tmp_path):
    output = tmp_path / "cache"
    output.mkdir()
    batch = pa.record_batch({"closers": [1], "codec_kl": [0.5]}).replace_schema_metadata(
        {"xtk": json.dumps(TeacherCache(packed).header), "tables": base64.b64encode(b"x").decode()}
    )
    with pa.OSFile(str(output / shard_file_name(0)), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    result = resume(run, pair, packed, output)
    assert "this shard of a teacher cache does not match its checksum; writing this shard again" in result.stderr
    assert contents(output) == contents(packed)
    manifest = json.loads((output / "manifest.json").read_text())
    (output / "manifest.json").write_text(json.dumps({**manifest, "version": 5}))
    for result in (run("inspect", output, code=1), resume(run, pair, packed, output, code=1)):
        assert "this teacher cache has version 5; this xtk reads version 6" in result.stderr
        assert "--force" in result.stderr


def test_inspect_of_a_single_shard_verifies_its_checksum(run, packed, tmp_path):
    shard = Path(shutil.copy(packed / shard_file_name(0), tmp_path))
    run("inspect", shard)
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    result = run("inspect", shard, code=1)
    assert "this shard of a teacher cache does not match its checksum" in result.stderr
    assert str(shard) in result.stderr


def test_inspect_names_the_corrupt_shard_of_an_unfinished_cache(run, packed, tmp_path):
    output = small_caches.copy_without_manifest(packed, tmp_path / "cache")
    assert "this teacher cache is unfinished" in run("inspect", output, "--verify", code=1).stderr
    shutil.copy(output / shard_file_name(0), output / shard_file_name(2))
    result = run("inspect", output, "--verify", code=1)
    assert "this file contains shard 0" in result.stderr
    assert str(output / shard_file_name(2)) in result.stderr
    (output / shard_file_name(1)).write_bytes(b"")
    assert "this shard of a teacher cache is empty" in run("inspect", output, "--verify", code=1).stderr


def test_corrupt_shard_of_another_machine_is_rewritten_by_that_machine(pair, packed, tmp_path):
    def write(rank: int) -> dict[str, int] | None:
        request = CacheRequest(ModelRef(pair.teacher, name="teacher"), Support("top-k", top_k=4), shard_tokens=100)
        return cache_teacher(
            request, Corpus([str(packed.parent / "data.jsonl")]), output, partition=CachePartition(1, rank, 2)
        )

    output = tmp_path / "cache"
    assert write(0) is None
    damaged = output / shard_file_name(2)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(CorruptError, match="does not match its checksum") as raised:
        write(1)
    assert raised.value.where == str(damaged)
    assert "on the machine that wrote this shard" in raised.value.hint
    assert not (output / "manifest.json").exists()
    assert write(0)
    assert damaged.read_bytes() == content
    TeacherCache(output).verify()


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_corrupt_shards_in_a_remote_folder_are_found(packed, tmp_path, protocol):
    cache = TeacherCache(packed)
    remote_folder = open_folder(f"{protocol}://{tmp_path}/cache")
    corrupt = {
        shard_file_name(0): (packed / shard_file_name(1)).read_bytes(),
        shard_file_name(1): (packed / shard_file_name(1)).read_bytes()[:-1],
    }
    for entry in cache.manifest["shards"]:
        with remote_folder.write(entry["file"]) as temporary:
            temporary.write_bytes(corrupt.get(entry["file"]) or (packed / entry["file"]).read_bytes())
    documents = [entry["documents"] for entry in cache.manifest["shards"]]
    assert ShardedCacheWriter(remote_folder, cache.header, documents).missing_shards() == [0, 1]


def test_corrupt_shard_of_an_unfinished_merge_is_rewritten(packed, raw, run, tmp_path):
    run("cache", "merge", packed, "--rows", "1:", "-o", tmp_path / "merged")
    expected = contents(tmp_path / "merged")
    output = small_caches.copy_without_manifest(tmp_path / "merged", tmp_path / "again")
    for file in (shard_file_name(0), shard_file_name(1)):
        content = bytearray((output / file).read_bytes())
        content[100] ^= 1
        (output / file).unlink()  # a link: the input has the same file
        (output / file).write_bytes(content)
    run("cache", "merge", packed, "--rows", "1:", "-o", output)
    assert contents(output) == expected
    run("inspect", output, "--verify")


def test_shard_position_refers_to_the_cache_it_was_written_for(packed, run, tmp_path):
    run("cache", "merge", packed, "--rows", "1:", "-o", tmp_path / "cut")
    documents = TeacherCache(packed).manifest["shards"][0]["documents"]
    assert open_verified_shard(tmp_path / "cut" / shard_file_name(0), "cut").position == ShardPosition(
        0, 1, documents - 1
    )
    assert open_verified_shard(packed / shard_file_name(1), "whole").position == ShardPosition(
        1, documents, TeacherCache(packed).manifest["shards"][1]["documents"]
    )
