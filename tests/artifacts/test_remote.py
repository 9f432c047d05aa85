"""A folder in a store is a folder: whole files, nothing lost, no second writer; and what is read of it is a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import fsspec
import numpy as np
import pytest
from test_teacher_cache import DOCUMENTS, HEADER, SIZES, assert_equal, files_of, row_of, write

from xtk.artifacts.cache_output import CACHE, remove_cache
from xtk.artifacts.cache_writer import ShardedCacheWriter
from xtk.artifacts.shard_writing import ScoredDocument
from xtk.artifacts.storage_folders import LocalFolder, RemoteFolder, StorageFolder, open_folder
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import CorruptError, XtkError


@pytest.fixture(scope="module")
def rows() -> list[ScoredDocument]:
    draw = np.random.default_rng(0)
    return [row_of(document, 4, draw) for document in DOCUMENTS]


@pytest.fixture(params=["s3", "memory", "file"])
def place(request, tmp_path) -> str:
    """The name of a new folder in stores of three kinds; of `file` what is there is seen while it grows."""
    if request.param == "s3":
        request.getfixturevalue("store")
        return f"s3://bucket/{tmp_path.name}/cache"
    return f"{request.param}://{tmp_path}/cache"


@pytest.fixture
def at_s3(store, tmp_path) -> str:
    return f"s3://bucket/{tmp_path.name}/cache"


def stored(place: str) -> dict[str, bytes]:
    """What fsspec finds in a folder, without xtk."""
    fs, root = fsspec.core.url_to_fs(place)
    fs.invalidate_cache()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def write_to(folder: StorageFolder, rows, numbers=range(len(SIZES))) -> ShardedCacheWriter:
    writer = ShardedCacheWriter(folder, HEADER, SIZES)
    firsts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    for number in numbers:
        writer.write_shard(number, rows[firsts[number] : firsts[number] + SIZES[number]])
    return writer


def test_a_remote_cache_is_the_local_one_byte_for_byte(place, rows, tmp_path):
    write(tmp_path / "local", rows).finish()
    write_to(RemoteFolder(place), rows).finish()
    assert stored(place) == files_of(tmp_path / "local")
    found = TeacherCache(place)
    found.verify()
    for number, row in enumerate(rows):
        assert_equal(found.read_document(number), row)


def test_a_writer_that_comes_back_writes_what_is_missing_and_ends_equal(place, rows, tmp_path):
    write(tmp_path / "local", rows).finish()
    write_to(RemoteFolder(place), rows, [0, 2])
    assert CACHE.find_finished(RemoteFolder(place), HEADER) is None
    writer = ShardedCacheWriter(RemoteFolder(place), HEADER, SIZES)
    assert writer.missing_shards() == [1, 3]
    write_to(RemoteFolder(place), rows, [1, 3]).finish()
    assert stored(place) == files_of(tmp_path / "local")
    assert CACHE.find_finished(RemoteFolder(place), HEADER) is not None


def test_a_file_that_fails_while_it_is_made_is_never_seen(place):
    folder = RemoteFolder(place)

    def fail() -> None:
        with folder.write("manifest.json") as temporary:
            temporary.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert folder.file_sizes() == {}
    with pytest.raises(FileNotFoundError):
        folder.read("manifest.json")
    with pytest.raises(FileNotFoundError):
        folder.local_path("manifest.json")


def test_what_another_writer_has_put_there_is_not_replaced(place):
    one, two = RemoteFolder(place), RemoteFolder(place)

    def write_twice() -> None:
        with one.write("shard-00000.arrow", exclusive=True) as temporary:
            temporary.write_bytes(b"mine")
            with two.write("shard-00000.arrow", exclusive=True) as other:
                other.write_bytes(b"theirs")

    with pytest.raises(XtkError, match="another process is writing this cache") as caught:
        write_twice()
    assert caught.value.where == f"{place}/shard-00000.arrow"
    assert caught.value.hint
    assert stored(place) == {"shard-00000.arrow": b"theirs"}
    with one.write("shard-00000.arrow") as temporary:
        temporary.write_bytes(b"replaced on purpose")
    assert one.read("shard-00000.arrow") == b"replaced on purpose"


def test_a_store_itself_refuses_the_second_of_two_that_send_at_once(at_s3, monkeypatch):
    folder = RemoteFolder(at_s3)
    monkeypatch.setattr(RemoteFolder, "_exists", lambda *_: False)  # as if it came after this look
    for content in (b"mine", b"mine"):  # the answer to a request was lost, and it is sent again
        with folder.write("shard-00000.arrow", exclusive=True) as temporary:
            temporary.write_bytes(content)
    with (
        pytest.raises(XtkError, match="another process is writing this cache"),
        folder.write("shard-00000.arrow", exclusive=True) as temporary,
    ):
        temporary.write_bytes(b"others")
    assert stored(at_s3) == {"shard-00000.arrow": b"mine"}


def test_a_copy_is_used_again_until_the_store_holds_something_else(at_s3, store):
    folder = RemoteFolder(at_s3)
    for content in (b"old!", b"new!", b"longer"):
        with folder.write("tokenizer.json") as temporary:
            temporary.write_bytes(content)
        for reader in (folder, RemoteFolder(at_s3)):
            reader.file_sizes()
            assert reader.local_path("tokenizer.json").read_bytes() == content
    before = len([line for line in store.requests() if line.startswith("GET") and "tokenizer.json" in line])
    again = RemoteFolder(at_s3).local_path("tokenizer.json")
    assert again.read_bytes() == b"longer"
    assert len([line for line in store.requests() if line.startswith("GET") and "tokenizer.json" in line]) == before
    again.write_bytes(b"shorter"[:3])  # a copy that somebody cut
    assert RemoteFolder(at_s3).local_path("tokenizer.json").read_bytes() == b"longer"


def test_copies_stay_within_their_limit(at_s3, monkeypatch, tmp_path):
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "copies"))
    monkeypatch.setenv("XTK_REMOTE_CACHE_GB", "0.000002")  # 2,000 bytes
    folder = RemoteFolder(at_s3)
    for number in range(4):
        with folder.write(f"shard-{number:05d}.arrow") as temporary:
            temporary.write_bytes(bytes([number]) * 600)
    for _ in range(2):
        for number in range(4):
            assert folder.local_path(f"shard-{number:05d}.arrow").read_bytes() == bytes([number]) * 600
            held = list((tmp_path / "copies/remote").glob("*/*.arrow"))
            assert sum(path.stat().st_size for path in held) <= 2000
    monkeypatch.setenv("XTK_REMOTE_CACHE_GB", "much")
    with pytest.raises(XtkError, match="XTK_REMOTE_CACHE_GB is much"):
        RemoteFolder(at_s3)


def test_a_flipped_byte_in_an_object_is_named_by_shard_and_row(at_s3, rows):
    write_to(RemoteFolder(at_s3), rows).finish()
    fs, root = fsspec.core.url_to_fs(at_s3)
    raw = fs.cat_file(f"{root}/shard-00002.arrow")
    at = raw.rindex(b"x" * 300) + 7
    fs.pipe_file(f"{root}/shard-00002.arrow", raw[:at] + b"y" + raw[at + 1 :])
    opened = TeacherCache(at_s3)
    assert_equal(opened.read_document(0), rows[0])
    with pytest.raises(CorruptError) as caught:
        opened.verify()
    assert caught.value.where == f"{at_s3}/shard-00002.arrow, row 3"
    fs.pipe_file(f"{root}/shard-00002.arrow", raw[:-1])
    with pytest.raises(CorruptError, match="bytes, but must have "):
        TeacherCache(at_s3)
    fs.rm_file(f"{root}/shard-00002.arrow")
    with pytest.raises(CorruptError, match="a shard of this cache is missing"):
        TeacherCache(at_s3)


@pytest.mark.slow
def test_a_store_that_is_gone_is_told_and_nothing_is_lost(at_s3, rows, store, tmp_path):
    writer = write_to(RemoteFolder(at_s3), rows, [0, 1])
    store.cut(True)
    try:
        for use in (lambda: writer.write_shard(2, rows[4:8]), lambda: RemoteFolder(at_s3).file_sizes(), writer.finish):
            with pytest.raises(XtkError) as caught:
                use()
            assert caught.value.where.startswith(at_s3)
            assert "network" in caught.value.hint
    finally:
        store.cut(False)
    write_to(
        RemoteFolder(at_s3), rows, ShardedCacheWriter(RemoteFolder(at_s3), HEADER, SIZES).missing_shards()
    ).finish()
    write(tmp_path / "local", rows).finish()
    assert stored(at_s3) == files_of(tmp_path / "local")


def test_a_missing_bucket_key_or_package_is_told_before_anything_is_done(store, monkeypatch):
    with pytest.raises(XtkError, match="the bucket nowhere does not exist"):
        RemoteFolder("s3://nowhere/cache").file_sizes()
    with pytest.raises(XtkError, match="cannot be opened") as caught:
        open_folder("gopher://somewhere/cache")
    assert caught.value.where == "gopher://somewhere/cache"
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(XtkError, match="gs:// needs the Python package gcsfs") as caught:
        open_folder("gs://bucket/cache")
    assert caught.value.hint == "run pip install gcsfs"


def test_a_forced_cache_goes_whole_and_what_is_not_ours_stays(place, rows):
    write_to(RemoteFolder(place), rows).finish()
    remove_cache(RemoteFolder(place))
    assert stored(place) == {}
    with RemoteFolder(place).write("thesis.tex") as temporary:
        temporary.write_text("precious")
    with pytest.raises(XtkError, match="files that xtk did not write"):
        remove_cache(RemoteFolder(place))
    assert stored(place) == {"thesis.tex": b"precious"}


WRITER = """
import sys
from xtk.artifacts.storage_folders import RemoteFolder
folder = RemoteFolder(sys.argv[1])
with folder.write("shard-00000.arrow", exclusive=True) as temporary:
    temporary.write_bytes(b"x" * 30_000_000)
"""


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_writer_killed_while_it_sends_leaves_nothing_that_is_seen(kind, store, tmp_path):
    place = f"s3://bucket/{tmp_path.name}/cache" if kind == "s3" else f"file://{tmp_path}/cache"
    for wait in (0.0, 0.01, 0.05):
        if kind == "s3":
            store.hold(f"PUT /bucket/{tmp_path.name}/cache/shard")
        before = len(store.requests())
        process = subprocess.Popen([sys.executable, "-c", WRITER, place], env=os.environ)
        if kind == "s3":
            while not any(f"PUT /bucket/{tmp_path.name}" in line for line in store.requests()[before:]):
                assert process.poll() is None
                time.sleep(0.005)
        else:
            while not list((tmp_path / "cache").glob(".xtk-tmp-*")) and process.poll() is None:
                time.sleep(0.0005)
        time.sleep(wait)
        process.kill()
        process.wait()
        store.hold(None)
        seen = [file for file in RemoteFolder(place).file_sizes() if not file.startswith(".xtk-tmp-")]
        whole = (tmp_path / "cache/shard-00000.arrow") if kind == "file" else None
        assert not seen or (whole is not None and whole.stat().st_size == 30_000_000)
        RemoteFolder(place).remove_stale_temporary_files()
        assert [file for file in RemoteFolder(place).file_sizes() if file.startswith(".xtk-tmp-")] == []
        RemoteFolder(place).remove("shard-00000.arrow")


def test_links_and_copies_between_folders_are_the_same_files(place, rows, tmp_path):
    write(tmp_path / "local", rows).finish()
    names = {f"shard-{number:05d}.arrow": f"shard-{number + 5:05d}.arrow" for number in range(len(SIZES))}
    RemoteFolder(place).copy_from(LocalFolder(tmp_path / "local"), names)
    RemoteFolder(place + "-2").copy_from(RemoteFolder(place), {ours: theirs for theirs, ours in names.items()})
    LocalFolder(tmp_path / "back").copy_from(RemoteFolder(place + "-2"), {theirs: theirs for theirs in names})
    LocalFolder(tmp_path / "linked").copy_from(LocalFolder(tmp_path / "back"), {theirs: theirs for theirs in names})
    LocalFolder(tmp_path / "linked").copy_from(LocalFolder(tmp_path / "back"), {theirs: theirs for theirs in names})
    expected = {name: raw for name, raw in files_of(tmp_path / "local").items() if name != "manifest.json"}
    assert files_of(tmp_path / "back") == files_of(tmp_path / "linked") == expected
    assert all((tmp_path / "linked" / name).samefile(tmp_path / "back" / name) for name in names)
    shutil.rmtree(tmp_path / "back")
    assert files_of(tmp_path / "linked") == expected
