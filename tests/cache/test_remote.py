"""Artifact folders in remote stores: complete files, one writer, and local copies of the files that are read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from test_teacher_cache import DOCUMENTS, HEADER, SIZES, assert_equal, files_of, random_row, write

from xtk.cache.output import find_finished_cache
from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.cache.writer import ShardedCacheWriter
from xtk.errors import CorruptError, XtkError
from xtk.files.storage_folders import LocalFolder, RemoteFolder, StorageFolder, open_folder


@pytest.fixture(scope="module")
def rows() -> list[TeacherDocument]:
    rng = np.random.default_rng(0)
    return [random_row(document, 4, rng) for document in DOCUMENTS]


@pytest.fixture(params=["s3", "memory", "file"])
def url(request, tmp_path) -> str:
    """Return the URL of a new folder in one of three stores; with `file`, files are visible while they grow."""
    if request.param == "s3":
        request.getfixturevalue("store")
        return f"s3://bucket/{tmp_path.name}/cache"
    return f"{request.param}://{tmp_path}/cache"


@pytest.fixture
def s3_url(store, tmp_path) -> str:
    return f"s3://bucket/{tmp_path.name}/cache"


def stored_files(url: str) -> dict[str, bytes]:
    """Return {name: content} of the files that fsspec finds in a folder, without xtk."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def write_to(folder: StorageFolder, rows, numbers=range(len(SIZES))) -> ShardedCacheWriter:
    writer = ShardedCacheWriter(folder, HEADER, SIZES)
    first_rows = [sum(SIZES[:number]) for number in range(len(SIZES))]
    for number in numbers:
        writer.write_shard(number, rows[first_rows[number] : first_rows[number] + SIZES[number]])
    return writer


def test_remote_cache_has_the_same_bytes_as_a_local_one(url, rows, tmp_path):
    write(tmp_path / "local", rows).finish()
    write_to(RemoteFolder(url), rows).finish()
    assert stored_files(url) == files_of(tmp_path / "local")
    found = TeacherCache(url)
    found.verify()
    for number, row in enumerate(rows):
        assert_equal(found.read_document(number), row)


def test_resumed_writer_writes_only_missing_shards_and_the_same_bytes(url, rows, tmp_path):
    write(tmp_path / "local", rows).finish()
    write_to(RemoteFolder(url), rows, [0, 2])
    assert find_finished_cache(RemoteFolder(url), HEADER) is None
    writer = ShardedCacheWriter(RemoteFolder(url), HEADER, SIZES)
    assert writer.missing_shards() == [1, 3]
    write_to(RemoteFolder(url), rows, [1, 3]).finish()
    assert stored_files(url) == files_of(tmp_path / "local")
    assert find_finished_cache(RemoteFolder(url), HEADER) is not None


def test_failed_write_creates_no_file(url):
    folder = RemoteFolder(url)

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


def test_exclusive_write_does_not_replace_a_file_of_another_writer(url):
    first, second = RemoteFolder(url), RemoteFolder(url)

    def write_twice() -> None:
        with first.write("shard-00000.arrow", exclusive=True) as temporary:
            temporary.write_bytes(b"mine")
            with second.write("shard-00000.arrow", exclusive=True) as other:
                other.write_bytes(b"theirs")

    with pytest.raises(XtkError, match="another process is writing this cache") as raised:
        write_twice()
    assert raised.value.where == f"{url}/shard-00000.arrow"
    assert raised.value.hint
    assert stored_files(url) == {"shard-00000.arrow": b"theirs"}
    with first.write("shard-00000.arrow") as temporary:
        temporary.write_bytes(b"replaced on purpose")
    assert first.read("shard-00000.arrow") == b"replaced on purpose"


def test_store_refuses_the_second_of_two_concurrent_uploads(s3_url, monkeypatch):
    folder = RemoteFolder(s3_url)
    monkeypatch.setattr(RemoteFolder, "_exists", lambda *_: False)  # as if the other file appeared after this check
    for content in (b"mine", b"mine"):  # the response to the first upload was lost, so it is repeated
        with folder.write("shard-00000.arrow", exclusive=True) as temporary:
            temporary.write_bytes(content)
    with (
        pytest.raises(XtkError, match="another process is writing this cache"),
        folder.write("shard-00000.arrow", exclusive=True) as temporary,
    ):
        temporary.write_bytes(b"others")
    assert stored_files(s3_url) == {"shard-00000.arrow": b"mine"}


def test_local_copy_is_reused_until_the_remote_file_changes(s3_url, store):
    folder = RemoteFolder(s3_url)
    for content in (b"old!", b"new!", b"longer"):
        with folder.write("tokenizer.json") as temporary:
            temporary.write_bytes(content)
        for reader in (folder, RemoteFolder(s3_url)):
            reader.file_sizes()
            assert reader.local_path("tokenizer.json").read_bytes() == content
    before = len([line for line in store.requests() if line.startswith("GET") and "tokenizer.json" in line])
    local_copy = RemoteFolder(s3_url).local_path("tokenizer.json")
    assert local_copy.read_bytes() == b"longer"
    assert len([line for line in store.requests() if line.startswith("GET") and "tokenizer.json" in line]) == before
    local_copy.write_bytes(b"shorter"[:3])  # a truncated local copy
    assert RemoteFolder(s3_url).local_path("tokenizer.json").read_bytes() == b"longer"


def test_readers_that_start_together_download_a_file_once(s3_url, store, tmp_path):
    with RemoteFolder(s3_url).write("shard-00000.arrow") as temporary:
        temporary.write_bytes(b"content")
    readers = [RemoteFolder(s3_url) for _ in range(3)]
    store.hold_requests(f"GET /{s3_url.removeprefix('s3://')}/shard")
    try:
        with ThreadPoolExecutor() as threads:
            paths = [threads.submit(reader.local_path, "shard-00000.arrow") for reader in readers]
            time.sleep(1)
            store.hold_requests(None)
    finally:
        store.hold_requests(None)
    assert {path.result().read_bytes() for path in paths} == {b"content"}
    requests = [line for line in store.requests() if line.startswith("GET") and tmp_path.name in line]
    assert len([line for line in requests if "shard-00000.arrow" in line]) == 2  # the held one was cut, and repeated


def test_flipped_byte_in_a_remote_shard_is_reported_with_shard_and_row(s3_url, rows):
    write_to(RemoteFolder(s3_url), rows).finish()
    fs, root = fsspec.core.url_to_fs(s3_url)
    raw = fs.cat_file(f"{root}/shard-00002.arrow")
    position = raw.rindex(b"x" * 300) + 7
    fs.pipe_file(f"{root}/shard-00002.arrow", raw[:position] + b"y" + raw[position + 1 :])
    opened = TeacherCache(s3_url)
    assert_equal(opened.read_document(0), rows[0])
    with pytest.raises(CorruptError) as raised:
        opened.verify()
    assert raised.value.where == f"{s3_url}/shard-00002.arrow, row 3"
    fs.pipe_file(f"{root}/shard-00002.arrow", raw[:-1])
    with pytest.raises(CorruptError, match="bytes, but must have "):
        TeacherCache(s3_url)
    fs.rm_file(f"{root}/shard-00002.arrow")
    with pytest.raises(CorruptError, match="a shard of this cache is missing"):
        TeacherCache(s3_url)


@pytest.mark.slow
def test_unreachable_store_is_reported_and_the_write_can_be_resumed(s3_url, rows, store, tmp_path):
    writer = write_to(RemoteFolder(s3_url), rows, [0, 1])
    store.cut_connections(True)
    try:
        for operation in (
            lambda: writer.write_shard(2, rows[4:8]),
            lambda: RemoteFolder(s3_url).file_sizes(),
            writer.finish,
        ):
            with pytest.raises(XtkError) as raised:
                operation()
            assert raised.value.where.startswith(s3_url)
            assert "network" in raised.value.hint
    finally:
        store.cut_connections(False)
    write_to(
        RemoteFolder(s3_url), rows, ShardedCacheWriter(RemoteFolder(s3_url), HEADER, SIZES).missing_shards()
    ).finish()
    write(tmp_path / "local", rows).finish()
    assert stored_files(s3_url) == files_of(tmp_path / "local")


def test_missing_bucket_unknown_protocol_or_missing_package_is_refused(store, monkeypatch):
    with pytest.raises(XtkError, match="the bucket nowhere does not exist"):
        RemoteFolder("s3://nowhere/cache").file_sizes()
    with pytest.raises(XtkError, match="cannot be opened") as raised:
        open_folder("gopher://somewhere/cache")
    assert raised.value.where == "gopher://somewhere/cache"
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(XtkError, match="gs:// needs the Python package gcsfs") as raised:
        open_folder("gs://bucket/cache")
    assert raised.value.hint == "run pip install gcsfs"


def test_an_old_cache_and_files_of_the_user_are_moved_aside(url, rows, capsys):
    RemoteFolder(url).move_aside()  # nothing is there
    write_to(RemoteFolder(url), rows).finish()
    whole = stored_files(url)
    RemoteFolder(url).move_aside()
    assert stored_files(url) == {}
    assert stored_files(f"{url}.replaced-1") == whole
    with RemoteFolder(url).write("thesis.tex") as temporary:
        temporary.write_text("precious")
    with pytest.raises(XtkError, match="files that xtk did not write"):
        find_finished_cache(RemoteFolder(url), HEADER)
    RemoteFolder(url).move_aside()
    assert stored_files(url) == {}
    assert stored_files(f"{url}.replaced-2") == {"thesis.tex": b"precious"}
    assert f"moved {url} to {url}.replaced-2" in capsys.readouterr().err


WRITER_SCRIPT = """
import sys
from xtk.files.storage_folders import RemoteFolder
folder = RemoteFolder(sys.argv[1])
with folder.write("shard-00000.arrow", exclusive=True) as temporary:
    temporary.write_bytes(b"x" * 30_000_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_writer_killed_during_an_upload_leaves_no_partial_file(kind, store, tmp_path):
    url = f"s3://bucket/{tmp_path.name}/cache" if kind == "s3" else f"file://{tmp_path}/cache"
    for wait in (0.0, 0.01, 0.05):
        if kind == "s3":
            store.hold_requests(f"PUT /bucket/{tmp_path.name}/cache/shard")
        before = len(store.requests())
        process = subprocess.Popen([sys.executable, "-c", WRITER_SCRIPT, url], env=os.environ)
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
        store.hold_requests(None)
        visible = [file for file in RemoteFolder(url).file_sizes() if not file.startswith(".xtk-tmp-")]
        complete_file = (tmp_path / "cache/shard-00000.arrow") if kind == "file" else None
        assert not visible or (complete_file is not None and complete_file.stat().st_size == 30_000_000)
        RemoteFolder(url).remove_stale_temporary_files()
        assert [file for file in RemoteFolder(url).file_sizes() if file.startswith(".xtk-tmp-")] == []
        RemoteFolder(url).remove("shard-00000.arrow")


def test_copies_between_local_and_remote_folders_have_the_same_bytes(url, rows, tmp_path):
    write(tmp_path / "local", rows).finish()
    names = {f"shard-{number:05d}.arrow": f"shard-{number + 5:05d}.arrow" for number in range(len(SIZES))}
    RemoteFolder(url).copy_from(LocalFolder(tmp_path / "local"), names)
    RemoteFolder(url + "-2").copy_from(RemoteFolder(url), {new: old for old, new in names.items()})
    LocalFolder(tmp_path / "back").copy_from(RemoteFolder(url + "-2"), {old: old for old in names})
    LocalFolder(tmp_path / "linked").copy_from(LocalFolder(tmp_path / "back"), {old: old for old in names})
    LocalFolder(tmp_path / "linked").copy_from(LocalFolder(tmp_path / "back"), {old: old for old in names})
    expected = {name: raw for name, raw in files_of(tmp_path / "local").items() if name != "manifest.json"}
    assert files_of(tmp_path / "back") == files_of(tmp_path / "linked") == expected
    assert all((tmp_path / "linked" / name).samefile(tmp_path / "back" / name) for name in names)
    shutil.rmtree(tmp_path / "back")
    assert files_of(tmp_path / "linked") == expected
