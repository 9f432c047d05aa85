"""Merging of teacher caches and extraction of row ranges: documents keep their order and their bytes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_teacher_cache import DOCUMENTS, HEADER, TeacherDocument, assert_equal, files_of, random_row

from xtk.cache.manifest import cache_totals
from xtk.cache.merging import merge_caches
from xtk.cache.output import find_finished_cache
from xtk.cache.reader import TeacherCache
from xtk.cache.writer import ShardedCacheWriter, write_cache_manifest
from xtk.errors import MismatchError, XtkError
from xtk.files.storage_folders import open_folder

SHARD_SIZES = {"a": [3, 1], "b": [4], "c": [1, 1]}  # documents per shard of each cache


@pytest.fixture(scope="module")
def rows() -> list[TeacherDocument]:
    rng = np.random.default_rng(0)
    return [random_row(document, 4, rng) for document in DOCUMENTS]


def header_of(name: str, **changed: dict[str, object]) -> dict[str, object]:
    sections_of_cache = {
        "data": {"fingerprint": f"sha256:{name}"},
        "options": {"support": "top-k", "dtype": "float32", "top_k": 4, "max_length": len(name)},
    }
    return {
        **HEADER,
        **sections_of_cache,
        **{
            section: {**HEADER.get(section, {}), **sections_of_cache.get(section, {}), **values}
            for section, values in changed.items()
        },
    }


def write(
    location: str,
    header: dict[str, object],
    rows: list[TeacherDocument],
    sizes: list[int],
    shared_files: dict[str, bytes] | None = None,
) -> str:
    writer = ShardedCacheWriter(open_folder(location), header, sizes)
    ends = np.cumsum([0, *sizes]).tolist()
    for number in range(len(sizes)):
        writer.write_shard(number, rows[ends[number] : ends[number + 1]])
    writer.write_shared_files({"tokenizer.json": b"{}", **(shared_files or {})})
    writer.finish()
    return location


@pytest.fixture(scope="module")
def caches(rows, tmp_path_factory) -> dict[str, str]:
    folder, first_row, found = tmp_path_factory.mktemp("caches"), 0, {}
    for name, sizes in SHARD_SIZES.items():
        found[name] = write(str(folder / name), header_of(name), rows[first_row : first_row + sum(sizes)], sizes)
        first_row += sum(sizes)
    return found


def assert_contains(location: str, rows: list[TeacherDocument]) -> None:
    found = TeacherCache(location)
    found.verify()
    assert len(found) == len(rows)
    for found_row, expected_row in zip(found, rows, strict=True):
        assert_equal(found_row, expected_row)
    assert cache_totals(found.manifest) == {
        "documents": len(rows),
        "positions": sum(len(row.stored_logprobs) for row in rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "bytes": sum(size for file, size in found.folder.file_sizes().items() if file.startswith("shard")),
    }
    assert found.header["data"]["documents"] == len(rows)


def test_merged_cache_has_all_rows_in_order_and_hard_links_the_shards(caches, rows, tmp_path):
    totals = merge_caches(list(caches.values()), str(tmp_path / "all"))
    assert totals["documents"] == len(rows)
    assert_contains(str(tmp_path / "all"), rows)
    assert (tmp_path / "all/shard-00002.arrow").samefile(f"{caches['b']}/shard-00000.arrow")
    assert (tmp_path / "all/tokenizer.json").read_bytes() == b"{}"
    header = TeacherCache(tmp_path / "all").header
    assert header["teacher"] == HEADER["teacher"]
    assert header["options"] == {"support": "top-k", "dtype": "float32", "top_k": 4, "max_length": 1}
    assert [part["fingerprint"] for part in header["data"]["sources"]] == ["sha256:a", "sha256:b", "sha256:c"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edges=st.tuples(st.integers(0, 10), st.integers(0, 10)).filter(lambda edges: edges[0] < edges[1]))
def test_row_range_of_a_merge_has_the_same_rows(caches, rows, tmp_path, edges):
    start, stop = edges
    location = str(tmp_path / f"{start}-{stop}")
    merge_caches(list(caches.values()), location, rows=f"{start}:{stop}")
    assert_contains(location, rows[start:stop])


def test_merging_all_row_ranges_of_a_cache_restores_its_rows(caches, rows, tmp_path):
    whole = str(tmp_path / "whole")
    merge_caches(list(caches.values()), whole)
    for number, row_range in enumerate((":2", "2:7", "7:")):
        merge_caches([whole], str(tmp_path / str(number)), rows=row_range)
    merge_caches([str(tmp_path / str(number)) for number in range(3)], str(tmp_path / "again"))
    assert_contains(str(tmp_path / "again"), rows)


def test_merging_is_associative(caches, tmp_path):
    a, b, c = caches.values()
    merge_caches([a, b, c], str(tmp_path / "at-once"))
    merge_caches([a, b], str(tmp_path / "ab"))
    merge_caches([str(tmp_path / "ab"), c], str(tmp_path / "ab-c"))
    merge_caches([b, c], str(tmp_path / "bc"))
    merge_caches([a, str(tmp_path / "bc")], str(tmp_path / "a-bc"))
    assert files_of(tmp_path / "at-once") == files_of(tmp_path / "ab-c") == files_of(tmp_path / "a-bc")


def test_merge_keeps_weights_if_only_some_inputs_have_them(caches, rows, tmp_path):
    weighted_rows = [
        TeacherDocument(replace(row.document, weight=2.5), row.tokens, row.stored_logprobs) for row in rows[:4]
    ]
    header = header_of("a", data={"optional_columns": ["weight"]})
    location = write(str(tmp_path / "requested"), header, weighted_rows, [3, 1])
    merge_caches([location, caches["b"]], str(tmp_path / "out"), rows="1:6")
    found = TeacherCache(str(tmp_path / "out"))
    assert found.document_weights().tolist() == [2.5, 2.5, 2.5, 1, 1]
    assert found.manifest["version"] == 6
    found.verify()


def test_repeated_merge_is_reused_and_another_merge_is_refused(caches, tmp_path):
    location = str(tmp_path / "out")
    totals = merge_caches([caches["a"], caches["b"]], location)
    before = files_of(tmp_path / "out")
    modified_ns = (tmp_path / "out/manifest.json").stat().st_mtime_ns
    assert merge_caches([caches["a"], caches["b"]], location) == totals
    assert (tmp_path / "out/manifest.json").stat().st_mtime_ns == modified_ns
    for other, row_range in (([caches["b"], caches["a"]], ""), ([caches["a"]], ""), ([caches["a"], caches["b"]], ":5")):
        with pytest.raises(XtkError, match="the output folder contains a cache with different inputs or options"):
            merge_caches(other, location, rows=row_range)
    assert files_of(tmp_path / "out") == before
    merge_caches([caches["b"], caches["a"]], location, force=True)
    assert len(TeacherCache(location)) == 8


def test_interrupted_merge_is_repeated_with_the_same_bytes(caches, tmp_path):
    output = tmp_path / "out"
    merge_caches([caches["a"], caches["b"]], str(output), rows="1:7")
    finished = files_of(output)
    for last_kept in range(len(finished)):
        for name in [name for name in finished if name == "manifest.json" or name > sorted(finished)[last_kept]]:
            (output / name).unlink(missing_ok=True)
        (output / ".xtk-tmp-1234567-aa-shard-00001.arrow").write_bytes(b"killed")
        merge_caches([caches["a"], caches["b"]], str(output), rows="1:7")
        assert files_of(output) == finished


def test_unfinished_cache_of_another_request_is_not_overwritten(caches, rows, tmp_path):
    writer = ShardedCacheWriter(open_folder(tmp_path / "out"), header_of("d"), [3, 1])
    writer.write_shard(0, rows[:3])
    with pytest.raises(XtkError, match="the output folder contains a cache with different inputs"):
        merge_caches([caches["a"]], str(tmp_path / "out"))
    assert sorted(files_of(tmp_path / "out")) == [".xtk-unfinished", "shard-00000.arrow"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher": {"weights": "sha256:other"}}, "teacher.weights: sha256:two and sha256:other"),
        ({"teacher": {"tokenizer": "sha256:other"}}, "teacher.tokenizer"),
        ({"options": {"top_k": 5}}, "options.top_k: 4 and 5"),
        ({"codec": {"num_sample_sets": 1}}, "codec.num_sample_sets: 2 and 1"),
    ],
)
def test_incompatible_caches_are_refused_with_both_paths_and_the_difference(caches, rows, tmp_path, changed, message):
    other = write(str(tmp_path / "other"), header_of("d"), rows[:2], [2])
    header = header_of("d", **changed)
    manifest = TeacherCache(other).manifest
    write_cache_manifest(open_folder(other), {**{key: manifest[key] for key in ("files", "shards")}, "header": header})
    with pytest.raises(MismatchError, match="these caches cannot be merged") as raised:
        merge_caches([caches["a"], other], str(tmp_path / "out"))
    assert raised.value.where.startswith(f"{caches['a']} and {other}: ")
    assert message in raised.value.where
    assert not (tmp_path / "out").exists()


def test_merged_caches_may_have_different_teacher_names(caches, rows, tmp_path):
    other = write(str(tmp_path / "other"), header_of("d", teacher={"name": "moved"}), rows[:2], [2])
    assert merge_caches([caches["a"], other], str(tmp_path / "out"))["documents"] == 6


def test_duplicate_documents_are_reported(caches, tmp_path, capsys):
    merge_caches([caches["a"], caches["b"], caches["a"]], str(tmp_path / "twice"))
    assert "inputs 1 and 3 overlap" in capsys.readouterr().err
    merge_caches([caches["a"]], str(tmp_path / "one"), rows=":2")
    merge_caches([caches["a"]], str(tmp_path / "two"), rows="2:")
    merge_caches([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "once"))
    assert "twice" not in capsys.readouterr().err


@pytest.mark.parametrize("row_range", ["4", "a:b", "-1:3", "3:3", "5:2", "0:11", "11:", "1:2:3"])
def test_invalid_row_range_is_refused(caches, tmp_path, row_range):
    with pytest.raises(XtkError, match="--rows is"):
        merge_caches(list(caches.values()), str(tmp_path / "out"), rows=row_range)
    assert not (tmp_path / "out").exists()


def test_unfinished_input_and_output_among_the_inputs_are_refused(caches, rows, tmp_path):
    ShardedCacheWriter(open_folder(tmp_path / "unfinished"), header_of("d"), [3, 1]).write_shard(0, rows[:1])
    with pytest.raises(XtkError, match="this teacher cache is unfinished"):
        merge_caches([caches["a"], str(tmp_path / "unfinished")], str(tmp_path / "out"))
    with pytest.raises(XtkError, match="the output folder is one of the caches to merge"):
        merge_caches([caches["a"], caches["b"]], caches["b"], force=True)
    assert len(TeacherCache(caches["b"])) == 4


def test_corrupt_row_in_a_row_range_is_refused(caches, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(caches["b"], folder)
    raw = (folder / "shard-00000.arrow").read_bytes()
    position = raw.index(b"all of it")
    (folder / "shard-00000.arrow").write_bytes(raw[:position] + b"A" + raw[position + 1 :])
    with pytest.raises(XtkError, match="a document of this teacher cache does not match") as raised:
        merge_caches([str(folder)], str(tmp_path / "out"), rows="0:3")
    assert raised.value.where.endswith("shard-00000.arrow, row 0")


def test_vocabulary_order_files_are_copied_with_their_shards(caches, rows, tmp_path):
    locations = []
    for name, file in (("d", "vocabulary-order-0d.arrow"), ("e", "vocabulary-order-0e.arrow")):
        header = header_of(name, codec={"vocabulary_order": file})
        location = write(str(tmp_path / name), header, rows[:2], [1, 1], {file: name.encode()})
        locations.append(location)
    merge_caches(locations, str(tmp_path / "out"))
    assert (tmp_path / "out/vocabulary-order-0d.arrow").read_bytes() == b"d"
    assert (tmp_path / "out/vocabulary-order-0e.arrow").read_bytes() == b"e"
    assert "vocabulary_order" not in TeacherCache(tmp_path / "out").header["codec"]
    merge_caches([str(tmp_path / "out")], str(tmp_path / "one"), rows=":2")
    assert sorted(path.name for path in (tmp_path / "one").glob("vocabulary-order*")) == ["vocabulary-order-0d.arrow"]
    assert TeacherCache(tmp_path / "one").header["codec"]["vocabulary_order"] == "vocabulary-order-0d.arrow"


@pytest.mark.slow
def test_merge_in_a_store_has_the_same_bytes_as_a_local_one(store, caches, rows, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    ends = np.cumsum([0, *map(sum, SHARD_SIZES.values())]).tolist()
    for number, (name, sizes) in enumerate(SHARD_SIZES.items()):
        write(f"{url}/{name}", header_of(name), rows[ends[number] : ends[number + 1]], sizes)
    before = len(store.requests())
    merge_caches([f"{url}/{name}" for name in SHARD_SIZES], f"{url}/all")
    downloads = [line for line in store.requests()[before:] if line.startswith("GET") and ".arrow" in line]
    assert downloads == []  # the store copies shards itself
    merge_caches([f"{url}/a", caches["b"], f"{url}/c"], f"{url}/mixed", rows="1:9")
    merge_caches([f"{url}/a", caches["b"], caches["c"]], str(tmp_path / "here"), rows="1:9")
    merge_caches(list(caches.values()), str(tmp_path / "all"))
    merge_caches([f"{url}/mixed"], str(tmp_path / "back"))
    folders = {name: open_folder(f"{url}/{name}") for name in ("all", "mixed")}
    assert {file: folders["all"].read(file) for file in folders["all"].file_sizes()} == files_of(tmp_path / "all")
    assert {file: folders["mixed"].read(file) for file in folders["mixed"].file_sizes()} == files_of(tmp_path / "here")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "here")
    assert find_finished_cache(folders["all"], json.loads(folders["all"].read("manifest.json"))["header"])


def test_merged_cache_stays_valid_when_its_inputs_are_deleted(caches, rows, tmp_path):
    copy = shutil.copytree(caches["a"], tmp_path / "a")
    merge_caches([str(copy)], str(tmp_path / "out"))
    shutil.rmtree(copy)
    assert_contains(str(tmp_path / "out"), rows[:4])
    assert Path(tmp_path / "out/shard-00000.arrow").stat().st_nlink == 1
