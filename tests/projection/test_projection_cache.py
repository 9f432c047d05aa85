"""The disk cache of projections and byte partitions in the user's cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from xtk.files.atomic_files import atomic_write
from xtk.projection import disk_cache as projection_disk_cache
from xtk.projection.build import build_projection
from xtk.projection.disk_cache import cached_next_bytes, cached_projection
from xtk.projection.prune import prune_projection
from xtk.projection.vocabulary_byte_partition import build_byte_partition
from xtk.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "projections"


@pytest.fixture
def tokenizers(families):
    return Tokenizer(families["student"]), Tokenizer(families["teacher"])


def are_equal(one, other) -> bool:
    names = ("row_offsets", "teacher_ids", "weights", "student_cells", "teacher_cells")
    return one.header == other.header and all(getattr(one, name).tobytes() == getattr(other, name).tobytes()
                                              for name in names)  # fmt: skip


def test_projection_is_built_once_and_equals_one_built_directly(folder, tokenizers, monkeypatch):
    first = cached_projection(*tokenizers, "multitoken", top_k=2, decay=0.3)
    assert are_equal(first, prune_projection(build_projection(*tokenizers, "multitoken", decay=0.3), top_k=2))
    monkeypatch.setattr(projection_disk_cache, "build_projection", None)
    assert are_equal(cached_projection(*tokenizers, "multitoken", top_k=2, decay=0.3), first)
    assert len(list(folder.iterdir())) == 1


def test_each_request_has_a_separate_file(folder, tokenizers, families, tmp_path):
    requests = [{}, {"method": "partition"}, {"top_k": 1}, {"decay": 0.5}, {"special_tokens": "none"}]
    for number, options in enumerate(requests, start=1):
        cached_projection(*tokenizers, **options)
        assert len(list(folder.iterdir())) == number
    copy = shutil.copytree(families["teacher"], tmp_path / "copy")
    of_copy = cached_projection(tokenizers[0], Tokenizer(copy))
    assert len(list(folder.iterdir())) == len(requests)  # a copied folder is the same tokenizer
    configuration = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**configuration, "eos_token": "<|endoftext|>"}))
    of_changed = cached_projection(tokenizers[0], Tokenizer(copy))
    assert len(list(folder.iterdir())) == len(requests) + 1
    assert of_changed.teacher_ids.tolist() != of_copy.teacher_ids.tolist()


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_corrupt_projection_is_rebuilt(folder, tokenizers, damage):
    first = cached_projection(*tokenizers)
    (path,) = folder.iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if damage is None else damage)
    assert are_equal(cached_projection(*tokenizers), first)
    assert path.read_bytes() == raw


def arrays(found) -> list[bytes]:
    return [
        part.tobytes()
        for part in (*found.student, *found.teacher, *found.continuations, found.cell_token_offsets, found.cell_tokens)
    ]


def test_byte_partition_is_built_once_per_pair_and_special_tokens(folder, tokenizers, monkeypatch):
    folder = folder.parent / "next-bytes"
    built = arrays(cached_next_bytes(*tokenizers))
    assert built == arrays(build_byte_partition(*tokenizers))
    assert arrays(cached_next_bytes(*tokenizers, "none")) != built
    cached_next_bytes(*tokenizers[::-1])
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(projection_disk_cache, "build_byte_partition", None)
    assert arrays(cached_next_bytes(*tokenizers)) == built


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_corrupt_byte_partition_is_rebuilt(folder, tokenizers, damage):
    built = arrays(cached_next_bytes(*tokenizers))
    (path,) = (folder.parent / "next-bytes").iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if damage is None else damage)
    assert arrays(cached_next_bytes(*tokenizers)) == built
    assert path.read_bytes() == raw


def test_results_are_returned_if_the_cache_folder_is_a_file(tmp_path, tokenizers, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "file"))
    assert len(cached_projection(*tokenizers).teacher_ids)
    assert len(cached_next_bytes(*tokenizers).cell_tokens)


SCRIPT = """
import sys
from xtk.projection.disk_cache import cached_projection
from xtk.text.tokenizer import Tokenizer
for _ in range(5):
    print(len(cached_projection(Tokenizer(sys.argv[1]), Tokenizer(sys.argv[2])).teacher_ids))
"""


def test_concurrent_processes_get_the_same_projection(folder, families):
    arguments = [sys.executable, "-c", SCRIPT, str(families["student"]), str(families["teacher"])]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len({number for numbers in outputs for number in numbers}) == 1
    assert len(list(folder.iterdir())) == 1


@pytest.fixture
def no_permission(tokenizers, tmp_path, monkeypatch):
    """Set the cache folder to one below a folder without permissions; root switches to user 65534 for the test."""
    build_projection(*tokenizers, "exact")  # imports all that is needed while it is permitted
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    monkeypatch.setenv("XTK_CACHE", str(locked / "cache"))
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)
    locked.chmod(0o700)


def test_projection_is_returned_without_permission_to_the_cache_folder(no_permission, tokenizers):
    with pytest.raises(PermissionError):
        (projection_disk_cache.user_cache_folder() / "x").is_file()
    assert len(cached_projection(*tokenizers, "exact").teacher_ids)


def test_projection_is_returned_and_not_stored_without_a_home_folder(tokenizers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XTK_CACHE", "~nosuchuser/x")
    assert len(cached_projection(*tokenizers, "exact").teacher_ids)
    monkeypatch.delenv("XTK_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(RuntimeError):
        projection_disk_cache.user_cache_folder()
    assert len(cached_projection(*tokenizers, "exact").teacher_ids)
    assert not any(tmp_path.iterdir())


def test_atomic_write_from_several_threads_leaves_one_complete_file(tmp_path):
    def write(number: int) -> None:
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text(str(number) * 1000)
            barrier.wait()

    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert len(set((tmp_path / "file").read_text())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
