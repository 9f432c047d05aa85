"""Shards of unfinished caches, which no manifest describes: any damage is found, named and mended by the next run."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import small_caches

from xtk.artifacts.cache_manifest import shard_file_name
from xtk.artifacts.cache_writer import ShardedCacheWriter
from xtk.artifacts.corpus_reader import Corpus
from xtk.artifacts.shard_writing import ShardPosition, check_file_checksum
from xtk.artifacts.storage_folders import open_folder
from xtk.artifacts.teacher_cache import TeacherCache, open_verified_shard
from xtk.errors import CorruptError
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import CachePartition, cache_teacher
from xtk.tokens.teacher_logprobs import Support

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("unfinished")


@pytest.fixture(scope="module")
def packed(run, pair, folder) -> Path:
    return small_caches.make(run, pair, folder, "packed")


@pytest.fixture(scope="module")
def raw(run, pair, folder) -> Path:
    return small_caches.make(run, pair, folder, "raw")


def resume(run, pair, packed: Path, place: object, *options: object, code: int = 0):
    """Run the command of the cache again, on a copy."""
    options = (*small_caches.KINDS["packed"], "--shard-tokens", 100, *options)
    return run("cache-teacher", pair.teacher, packed.parent / "data.jsonl", *options, "-o", place, code=code)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["packed", "raw"])
def test_a_flip_of_any_byte_of_a_shard_is_found_before_anything_is_parsed(kind, request, tmp_path):
    cache = request.getfixturevalue(kind)
    draw = np.random.default_rng(1)
    flips = 0
    for shard in (cache / shard_file_name(1),):
        content = shard.read_bytes()
        copy = tmp_path / shard.name
        copy.write_bytes(content)
        open_verified_shard(copy, "copy")
        with copy.open("r+b", buffering=0) as stream:
            for position in range(len(content)):
                stream.seek(position)
                stream.write(bytes([content[position] ^ int(draw.integers(1, 256))]))
                with pytest.raises(CorruptError, match="does not match its checksum"):
                    check_file_checksum(copy, "copy")
                stream.seek(position)
                stream.write(content[position : position + 1])
                flips += 1
        open_verified_shard(copy, "copy")
    assert flips > 5_000


def changed(content: bytes, change: str) -> bytes:
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
def test_a_shard_of_another_length_is_refused(raw, tmp_path, change, capsys):
    place = small_caches.unfinished(raw, tmp_path / "cache")
    shard = place / shard_file_name(1)
    shard.write_bytes(changed(shard.read_bytes(), change))
    cache = TeacherCache(raw)
    writer = small_caches.resumed(cache, place)
    assert writer.missing_shards() == [1]
    told = capsys.readouterr().err
    assert f"{shard}: this shard " in told
    assert "writing this shard again" in told


def test_shards_that_were_swapped_or_copied_over_each_other_are_refused(packed, tmp_path, capsys):
    cache = TeacherCache(packed)
    place = small_caches.unfinished(packed, tmp_path / "swapped")
    (place / shard_file_name(0)).rename(place / "other")
    (place / shard_file_name(1)).rename(place / shard_file_name(0))
    (place / "other").rename(place / shard_file_name(1))
    assert small_caches.resumed(cache, place).missing_shards() == [0, 1]
    place = small_caches.unfinished(packed, tmp_path / "copied")
    shutil.copy(place / shard_file_name(1), place / shard_file_name(2))
    assert small_caches.resumed(cache, place).missing_shards() == [2]
    rows = [entry["documents"] for entry in cache.manifest["shards"]]
    first, second = sum(rows[:1]), sum(rows[:2])
    assert (
        f"{place / shard_file_name(2)}: this file contains documents {first} to {second - 1} of shard 1, not "
        f"documents {second} to {second + rows[2] - 1} of shard 2; writing this shard again"
    ) in capsys.readouterr().err


def test_the_next_run_writes_damaged_shards_again_and_ends_equal(run, pair, packed, tmp_path):
    place = small_caches.unfinished(packed, tmp_path / "cache")
    (order,) = place.glob("vocabulary-order-*.arrow")
    flipped = bytearray((place / shard_file_name(0)).read_bytes())
    flipped[len(flipped) // 2] ^= 4
    (place / shard_file_name(0)).write_bytes(flipped)
    shutil.copy(place / shard_file_name(2), place / shard_file_name(1))
    order.write_bytes(order.read_bytes()[:-5])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes(b"{}")
    done = resume(run, pair, packed, place)
    for number in (0, 1):
        assert f"{place / shard_file_name(number)}: this" in done.stderr
    assert done.stderr.count("writing this shard again") == 2
    assert contents(place) == contents(packed)
    run("inspect", place, "--verify")


def test_a_shard_of_another_request_is_refused_and_nothing_is_removed(run, pair, packed, tmp_path):
    resume(run, pair, packed, tmp_path / "other", "--seed", 1)
    place = small_caches.unfinished(packed, tmp_path / "cache")
    shutil.copy(tmp_path / "other" / shard_file_name(1), place / shard_file_name(1))
    before = contents(place)
    done = resume(run, pair, packed, place, code=1)
    (place / ".xtk-unfinished").unlink()
    assert "the output folder contains a cache with different inputs or options" in done.stderr
    assert f"{place / shard_file_name(1)} (options.seed: 1 there, 0 in this command)" in done.stderr
    assert contents(place) == before


def test_a_shard_of_an_older_version_is_refused_with_the_command_that_makes_it_again(run, pair, packed, tmp_path):
    place = tmp_path / "cache"
    place.mkdir()
    batch = pa.record_batch({"closers": [1], "codec_kl": [0.5]}).replace_schema_metadata(
        {"xtk": json.dumps(TeacherCache(packed).header), "tables": base64.b64encode(b"x").decode()}
    )
    with pa.OSFile(str(place / shard_file_name(0)), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    (place / "ranks-0123456789abcdef.arrow").write_bytes(b"old")
    done = resume(run, pair, packed, place, code=1)
    assert "version 4 or older" in done.stderr
    assert "reads version 6" in done.stderr
    assert "xtk cache-teacher TEACHER DATA -o FOLDER --force" in done.stderr
    resume(run, pair, packed, place, "--force")
    assert contents(place) == contents(packed)
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "version": 5}))
    for done in (run("inspect", place, code=1), resume(run, pair, packed, place, code=1)):
        assert "this teacher cache has version 5; this xtk reads version 6" in done.stderr
        assert "--force" in done.stderr


def test_a_shard_alone_is_inspected_only_if_it_is_whole(run, packed, tmp_path):
    shard = Path(shutil.copy(packed / shard_file_name(0), tmp_path))
    run("inspect", shard)
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    done = run("inspect", shard, code=1)
    assert "this shard of a teacher cache does not match its checksum" in done.stderr
    assert str(shard) in done.stderr


def test_inspecting_an_unfinished_cache_names_its_damaged_shard(run, packed, tmp_path):
    place = small_caches.unfinished(packed, tmp_path / "cache")
    assert "this teacher cache is unfinished" in run("inspect", place, "--verify", code=1).stderr
    shutil.copy(place / shard_file_name(0), place / shard_file_name(2))
    done = run("inspect", place, "--verify", code=1)
    assert "this file contains shard 0" in done.stderr
    assert str(place / shard_file_name(2)) in done.stderr
    (place / shard_file_name(1)).write_bytes(b"")
    assert "this shard of a teacher cache is empty" in run("inspect", place, "--verify", code=1).stderr


def test_a_damaged_shard_of_another_machine_is_named_and_that_machine_writes_it_again(pair, packed, tmp_path):
    def write(rank: int) -> dict[str, int] | None:
        request = CacheRequest(pair.teacher, "teacher", Support("top-k", top_k=4), shard_tokens=100)
        return cache_teacher(
            request, Corpus([str(packed.parent / "data.jsonl")]), place, partition=CachePartition(1, rank, 2)
        )

    place = tmp_path / "cache"
    assert write(0) is None
    damaged = place / shard_file_name(2)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(CorruptError, match="does not match its checksum") as caught:
        write(1)
    assert caught.value.where == str(damaged)
    assert "on the machine that wrote this shard" in caught.value.hint
    assert not (place / "manifest.json").exists()
    assert write(0)
    assert damaged.read_bytes() == content
    TeacherCache(place).verify()


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_damage_in_a_remote_folder_is_found_too(packed, tmp_path, protocol):
    cache = TeacherCache(packed)
    place = open_folder(f"{protocol}://{tmp_path}/cache")
    damaged = {
        shard_file_name(0): (packed / shard_file_name(1)).read_bytes(),
        shard_file_name(1): (packed / shard_file_name(1)).read_bytes()[:-1],
    }
    for entry in cache.manifest["shards"]:
        with place.write(entry["file"]) as temporary:
            temporary.write_bytes(damaged.get(entry["file"]) or (packed / entry["file"]).read_bytes())
    rows = [entry["documents"] for entry in cache.manifest["shards"]]
    assert ShardedCacheWriter(place, cache.header, rows).missing_shards() == [0, 1]


def test_a_damaged_shard_of_an_unfinished_merge_is_replaced(packed, raw, run, tmp_path):
    run("cache-teacher", "--merge", packed, "--rows", "1:", "-o", tmp_path / "merged")
    whole = contents(tmp_path / "merged")
    place = small_caches.unfinished(tmp_path / "merged", tmp_path / "again")
    for file in (shard_file_name(0), shard_file_name(1)):
        content = bytearray((place / file).read_bytes())
        content[100] ^= 1
        (place / file).unlink()  # linked: the input has the same file
        (place / file).write_bytes(content)
    run("cache-teacher", "--merge", packed, "--rows", "1:", "-o", place)
    assert contents(place) == whole
    run("inspect", place, "--verify")


def test_a_shard_that_is_cut_short_while_it_is_read_is_named(packed, tmp_path):
    place = Path(shutil.copytree(packed, tmp_path / "cache"))
    cache = TeacherCache(place)
    cache.read_document(0)
    with (place / shard_file_name(0)).open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CorruptError, match="another program truncated this shard") as caught:
        cache.read_document(1)
    assert caught.value.where == str(place / shard_file_name(0))


def test_the_place_of_a_stretch_is_that_of_the_cache_it_was_written_for(packed, run, tmp_path):
    run("cache-teacher", "--merge", packed, "--rows", "1:", "-o", tmp_path / "cut")
    rows = TeacherCache(packed).manifest["shards"][0]["documents"]
    assert open_verified_shard(tmp_path / "cut" / shard_file_name(0), "cut").position == ShardPosition(0, 1, rows - 1)
    assert open_verified_shard(packed / shard_file_name(1), "whole").position == ShardPosition(
        1, rows, TeacherCache(packed).manifest["shards"][1]["documents"]
    )
