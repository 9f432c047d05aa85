"""Caches merged are the cache of their data, one after the other; and a stretch of a cache is those rows, unchanged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_teacher_cache import DOCUMENTS, HEADER, ScoredDocument, assert_equal, files_of, row_of

from xtk.artifacts.cache_manifest import cache_totals
from xtk.artifacts.cache_merging import merge_caches
from xtk.artifacts.cache_output import CACHE
from xtk.artifacts.cache_writer import ShardedCacheWriter, write_cache_manifest
from xtk.artifacts.storage_folders import open_folder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import MismatchError, XtkError

CUTS = {"a": [3, 1], "b": [4], "c": [1, 1]}  # documents a shard


@pytest.fixture(scope="module")
def rows() -> list[ScoredDocument]:
    draw = np.random.default_rng(0)
    return [row_of(document, 4, draw) for document in DOCUMENTS]


def header_of(name: str, **changed: dict[str, object]) -> dict[str, object]:
    own = {
        "data": {"fingerprint": f"sha256:{name}"},
        "options": {"support": "top-k", "top_k": 4, "max_length": len(name)},
    }
    return {
        **HEADER,
        **own,
        **{
            section: {**HEADER.get(section, {}), **own.get(section, {}), **values}
            for section, values in changed.items()
        },
    }


def write(
    place: str,
    header: dict[str, object],
    rows: list[ScoredDocument],
    sizes: list[int],
    others: dict[str, bytes] | None = None,
) -> str:
    writer = ShardedCacheWriter(open_folder(place), header, sizes)
    ends = np.cumsum([0, *sizes]).tolist()
    for number in range(len(sizes)):
        writer.write_shard(number, rows[ends[number] : ends[number + 1]])
    writer.write_shared_files({"tokenizer.json": b"{}", **(others or {})})
    writer.finish()
    return place


@pytest.fixture(scope="module")
def caches(rows, tmp_path_factory) -> dict[str, str]:
    folder, at, found = tmp_path_factory.mktemp("caches"), 0, {}
    for name, sizes in CUTS.items():
        found[name] = write(str(folder / name), header_of(name), rows[at : at + sum(sizes)], sizes)
        at += sum(sizes)
    return found


def assert_holds(place: str, rows: list[ScoredDocument]) -> None:
    found = TeacherCache(place)
    found.verify()
    assert len(found) == len(rows)
    for ours, theirs in zip(found, rows, strict=True):
        assert_equal(ours, theirs)
    assert cache_totals(found.manifest) == {
        "documents": len(rows),
        "positions": sum(len(row.stored_logprobs) for row in rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "bytes": sum(size for file, size in found.folder.file_sizes().items() if file.startswith("shard")),
    }
    assert found.header["data"]["documents"] == len(rows)


def test_a_merge_holds_the_rows_of_all_in_their_order_and_the_same_files(caches, rows, tmp_path):
    figures = merge_caches(list(caches.values()), str(tmp_path / "all"))
    assert figures["documents"] == len(rows)
    assert_holds(str(tmp_path / "all"), rows)
    assert (tmp_path / "all/shard-00002.arrow").samefile(f"{caches['b']}/shard-00000.arrow")
    assert (tmp_path / "all/tokenizer.json").read_bytes() == b"{}"
    header = TeacherCache(tmp_path / "all").header
    assert header["teacher"] == HEADER["teacher"]
    assert header["options"] == {"support": "top-k", "top_k": 4, "max_length": 1}
    assert [part["fingerprint"] for part in header["data"]["sources"]] == ["sha256:a", "sha256:b", "sha256:c"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edges=st.tuples(st.integers(0, 10), st.integers(0, 10)).filter(lambda edges: edges[0] < edges[1]))
def test_any_stretch_is_those_rows_with_the_bytes_that_they_have(caches, rows, tmp_path, edges):
    start, stop = edges
    place = str(tmp_path / f"{start}-{stop}")
    merge_caches(list(caches.values()), place, rows=f"{start}:{stop}")
    assert_holds(place, rows[start:stop])


def test_stretches_put_together_again_are_the_whole(caches, rows, tmp_path):
    whole = str(tmp_path / "whole")
    merge_caches(list(caches.values()), whole)
    for number, stretch in enumerate((":2", "2:7", "7:")):
        merge_caches([whole], str(tmp_path / str(number)), rows=stretch)
    merge_caches([str(tmp_path / str(number)) for number in range(3)], str(tmp_path / "again"))
    assert_holds(str(tmp_path / "again"), rows)


def test_it_does_not_matter_in_which_pairs_caches_are_merged(caches, tmp_path):
    a, b, c = caches.values()
    merge_caches([a, b, c], str(tmp_path / "at-once"))
    merge_caches([a, b], str(tmp_path / "ab"))
    merge_caches([str(tmp_path / "ab"), c], str(tmp_path / "ab-c"))
    merge_caches([b, c], str(tmp_path / "bc"))
    merge_caches([a, str(tmp_path / "bc")], str(tmp_path / "a-bc"))
    assert files_of(tmp_path / "at-once") == files_of(tmp_path / "ab-c") == files_of(tmp_path / "a-bc")


def test_a_merge_keeps_the_weights_that_some_of_its_parts_have(caches, rows, tmp_path):
    asked = [replace(row, document=replace(row.document, weight=2.5)) for row in rows[:4]]
    header = header_of("a", data={"optional_columns": ["weight"]})
    place = write(str(tmp_path / "asked"), header, asked, [3, 1])
    merge_caches([place, caches["b"]], str(tmp_path / "out"), rows="1:6")
    found = TeacherCache(str(tmp_path / "out"))
    assert found.document_weights().tolist() == [2.5, 2.5, 2.5, 1, 1]
    assert found.manifest["version"] == 6
    found.verify()


def test_again_the_finished_merge_is_found_and_another_refused(caches, tmp_path):
    place = str(tmp_path / "out")
    figures = merge_caches([caches["a"], caches["b"]], place)
    before = files_of(tmp_path / "out")
    stamp = (tmp_path / "out/manifest.json").stat().st_mtime_ns
    assert merge_caches([caches["a"], caches["b"]], place) == figures
    assert (tmp_path / "out/manifest.json").stat().st_mtime_ns == stamp
    for other, stretch in (([caches["b"], caches["a"]], ""), ([caches["a"]], ""), ([caches["a"], caches["b"]], ":5")):
        with pytest.raises(XtkError, match="the output folder contains a cache with different inputs or options"):
            merge_caches(other, place, rows=stretch)
    assert files_of(tmp_path / "out") == before
    merge_caches([caches["b"], caches["a"]], place, force=True)
    assert len(TeacherCache(place)) == 8


def test_a_merge_that_was_killed_is_done_again_and_ends_equal(caches, tmp_path):
    place = tmp_path / "out"
    merge_caches([caches["a"], caches["b"]], str(place), rows="1:7")
    whole = files_of(place)
    for kept in range(len(whole)):
        for name in [name for name in whole if name == "manifest.json" or name > sorted(whole)[kept]]:
            (place / name).unlink(missing_ok=True)
        (place / ".xtk-tmp-1234567-aa-shard-00001.arrow").write_bytes(b"killed")
        merge_caches([caches["a"], caches["b"]], str(place), rows="1:7")
        assert files_of(place) == whole


def test_the_unfinished_cache_of_another_request_is_not_written_over(caches, rows, tmp_path):
    writer = ShardedCacheWriter(open_folder(tmp_path / "out"), header_of("d"), [3, 1])
    writer.write_shard(0, rows[:3])
    with pytest.raises(XtkError, match="the output folder contains an unfinished cache with different inputs"):
        merge_caches([caches["a"]], str(tmp_path / "out"))
    assert sorted(files_of(tmp_path / "out")) == [".xtk-unfinished", "shard-00000.arrow"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"teacher": {"weights": "sha256:other"}}, "teacher.weights: sha256:two and sha256:other"),
        ({"teacher": {"tokenizer": "sha256:other"}}, "teacher.tokenizer"),
        ({"options": {"top_k": 5}}, "options.top_k: 4 and 5"),
        ({"codec": {"num_sample_sets": 1}}, "codec.num_sample_sets: 2 and 1"),
    ],
)
def test_what_is_not_of_one_kind_is_refused_naming_both_and_the_difference(caches, rows, tmp_path, changed, told):
    other = write(str(tmp_path / "other"), header_of("d"), rows[:2], [2])
    header = header_of("d", **changed)
    manifest = TeacherCache(other).manifest
    write_cache_manifest(open_folder(other), {**{key: manifest[key] for key in ("files", "shards")}, "header": header})
    with pytest.raises(MismatchError, match="these caches cannot be merged") as caught:
        merge_caches([caches["a"], other], str(tmp_path / "out"))
    assert caught.value.where.startswith(f"{caches['a']} and {other}: ")
    assert told in caught.value.where
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_was_moved_is_the_same_teacher(caches, rows, tmp_path):
    other = write(str(tmp_path / "other"), header_of("d", teacher={"name": "moved"}), rows[:2], [2])
    assert merge_caches([caches["a"], other], str(tmp_path / "out"))["documents"] == 6


def test_documents_that_come_twice_are_told(caches, tmp_path, capsys):
    merge_caches([caches["a"], caches["b"], caches["a"]], str(tmp_path / "twice"))
    assert "inputs 1 and 3 overlap" in capsys.readouterr().err
    merge_caches([caches["a"]], str(tmp_path / "one"), rows=":2")
    merge_caches([caches["a"]], str(tmp_path / "two"), rows="2:")
    merge_caches([str(tmp_path / "one"), str(tmp_path / "two")], str(tmp_path / "once"))
    assert "twice" not in capsys.readouterr().err


@pytest.mark.parametrize("stretch", ["4", "a:b", "-1:3", "3:3", "5:2", "0:11", "11:", "1:2:3"])
def test_rows_that_are_not_there_are_refused(caches, tmp_path, stretch):
    with pytest.raises(XtkError, match="--rows is"):
        merge_caches(list(caches.values()), str(tmp_path / "out"), rows=stretch)
    assert not (tmp_path / "out").exists()


def test_neither_an_unfinished_input_nor_the_output_among_them_is_taken(caches, rows, tmp_path):
    ShardedCacheWriter(open_folder(tmp_path / "unfinished"), header_of("d"), [3, 1]).write_shard(0, rows[:1])
    with pytest.raises(XtkError, match="this teacher cache is unfinished"):
        merge_caches([caches["a"], str(tmp_path / "unfinished")], str(tmp_path / "out"))
    with pytest.raises(XtkError, match="the output folder is one of the caches to merge"):
        merge_caches([caches["a"], caches["b"]], caches["b"], force=True)
    assert len(TeacherCache(caches["b"])) == 4


def test_a_row_that_was_altered_is_not_taken_into_a_stretch_as_if_it_were_whole(caches, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(caches["b"], folder)
    raw = (folder / "shard-00000.arrow").read_bytes()
    at = raw.index(b"all of it")
    (folder / "shard-00000.arrow").write_bytes(raw[:at] + b"A" + raw[at + 1 :])
    with pytest.raises(XtkError, match="a document of this teacher cache does not match") as caught:
        merge_caches([str(folder)], str(tmp_path / "out"), rows="0:3")
    assert caught.value.where.endswith("shard-00000.arrow, row 0")


def test_files_that_headers_name_come_along(caches, rows, tmp_path):
    places = []
    for name, ranks in (("d", "vocabulary-order-0d.arrow"), ("e", "vocabulary-order-0e.arrow")):
        header = header_of(name, codec={"vocabulary_order": ranks})
        place = write(str(tmp_path / name), header, rows[:2], [1, 1], {ranks: name.encode()})
        places.append(place)
    merge_caches(places, str(tmp_path / "out"))
    assert (tmp_path / "out/vocabulary-order-0d.arrow").read_bytes() == b"d"
    assert (tmp_path / "out/vocabulary-order-0e.arrow").read_bytes() == b"e"
    assert "vocabulary_order" not in TeacherCache(tmp_path / "out").header["codec"]
    merge_caches([str(tmp_path / "out")], str(tmp_path / "one"), rows=":2")
    assert sorted(path.name for path in (tmp_path / "one").glob("vocabulary-order*")) == ["vocabulary-order-0d.arrow"]
    assert TeacherCache(tmp_path / "one").header["codec"]["vocabulary_order"] == "vocabulary-order-0d.arrow"


def test_a_merge_in_a_store_is_that_of_this_machine_byte_for_byte(store, caches, rows, tmp_path):
    place = f"s3://bucket/{tmp_path.name}"
    ends = np.cumsum([0, *map(sum, CUTS.values())]).tolist()
    for number, (name, sizes) in enumerate(CUTS.items()):
        write(f"{place}/{name}", header_of(name), rows[ends[number] : ends[number + 1]], sizes)
    before = len(store.requests())
    merge_caches([f"{place}/{name}" for name in CUTS], f"{place}/all")
    read = [line for line in store.requests()[before:] if line.startswith("GET") and ".arrow" in line]
    assert read == []  # the store copies shards itself
    merge_caches([f"{place}/a", caches["b"], f"{place}/c"], f"{place}/mixed", rows="1:9")
    merge_caches([f"{place}/a", caches["b"], caches["c"]], str(tmp_path / "here"), rows="1:9")
    merge_caches(list(caches.values()), str(tmp_path / "all"))
    merge_caches([f"{place}/mixed"], str(tmp_path / "back"))
    folders = {name: open_folder(f"{place}/{name}") for name in ("all", "mixed")}
    assert {file: folders["all"].read(file) for file in folders["all"].file_sizes()} == files_of(tmp_path / "all")
    assert {file: folders["mixed"].read(file) for file in folders["mixed"].file_sizes()} == files_of(tmp_path / "here")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "here")
    assert CACHE.find_finished(folders["all"], json.loads(folders["all"].read("manifest.json"))["header"])


def test_the_hard_links_of_a_merge_outlive_its_inputs(caches, rows, tmp_path):
    copy = shutil.copytree(caches["a"], tmp_path / "a")
    merge_caches([str(copy)], str(tmp_path / "out"))
    shutil.rmtree(copy)
    assert_holds(str(tmp_path / "out"), rows[:4])
    assert Path(tmp_path / "out/shard-00000.arrow").stat().st_nlink == 1
