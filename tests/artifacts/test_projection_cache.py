"""What was made of a pair, kept in the user's cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from xtk.artifacts import projection_disk_cache
from xtk.artifacts.atomic_files import atomic_write
from xtk.artifacts.projection_disk_cache import cached_next_bytes, cached_projection
from xtk.projection.build import build_projection
from xtk.projection.prune import prune_projection
from xtk.projection.vocabulary_byte_partition import build_byte_partition
from xtk.tokens.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "projections"


@pytest.fixture
def sides(families):
    return Tokenizer(families["student"]), Tokenizer(families["teacher"])


def same(one, other) -> bool:
    names = ("row_offsets", "teacher_ids", "weights", "student_cells", "teacher_cells")
    return one.header == other.header and all(getattr(one, name).tobytes() == getattr(other, name).tobytes()
                                              for name in names)  # fmt: skip


def test_it_is_built_once_and_equals_what_is_built_by_hand(folder, sides, monkeypatch):
    first = cached_projection(*sides, "multitoken", top_k=2, decay=0.3)
    assert same(first, prune_projection(build_projection(*sides, "multitoken", decay=0.3), top_k=2))
    monkeypatch.setattr(projection_disk_cache, "build_projection", None)
    assert same(cached_projection(*sides, "multitoken", top_k=2, decay=0.3), first)
    assert len(list(folder.iterdir())) == 1


def test_another_request_is_another_file(folder, sides, families, tmp_path):
    requests = [{}, {"method": "partition"}, {"top_k": 1}, {"decay": 0.5}, {"special_tokens": "none"}]
    for number, options in enumerate(requests, start=1):
        cached_projection(*sides, **options)
        assert len(list(folder.iterdir())) == number
    copy = shutil.copytree(families["teacher"], tmp_path / "copy")
    moved = cached_projection(sides[0], Tokenizer(copy))
    assert len(list(folder.iterdir())) == len(requests)  # a folder that was moved is the same tokenizer
    configuration = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**configuration, "eos_token": "<|endoftext|>"}))
    other = cached_projection(sides[0], Tokenizer(copy))
    assert len(list(folder.iterdir())) == len(requests) + 1
    assert other.teacher_ids.tolist() != moved.teacher_ids.tolist()


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_file_is_built_again(folder, sides, damage):
    first = cached_projection(*sides)
    (path,) = folder.iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if damage is None else damage)
    assert same(cached_projection(*sides), first)
    assert path.read_bytes() == raw


def arrays(found) -> list[bytes]:
    return [
        part.tobytes()
        for part in (*found.student, *found.teacher, *found.continuations, found.cell_token_offsets, found.cell_tokens)
    ]


def test_next_bytes_are_made_once_for_a_pair_and_its_special_tokens(folder, sides, monkeypatch):
    folder = folder.parent / "next-bytes"
    made = arrays(cached_next_bytes(*sides))
    assert made == arrays(build_byte_partition(*sides))
    assert arrays(cached_next_bytes(*sides, "none")) != made
    cached_next_bytes(*sides[::-1])
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setattr(projection_disk_cache, "build_byte_partition", None)
    assert arrays(cached_next_bytes(*sides)) == made


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_damaged_next_bytes_are_made_again(folder, sides, damage):
    made = arrays(cached_next_bytes(*sides))
    (path,) = (folder.parent / "next-bytes").iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]) if damage is None else damage)
    assert arrays(cached_next_bytes(*sides)) == made
    assert path.read_bytes() == raw


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, sides, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XTK_CACHE", str(tmp_path / "file"))
    assert len(cached_projection(*sides).teacher_ids)
    assert len(cached_next_bytes(*sides).cell_tokens)


ASK = """
import sys
from xtk.artifacts.projection_disk_cache import cached_projection
from xtk.tokens.tokenizer import Tokenizer
for _ in range(5):
    print(len(cached_projection(Tokenizer(sys.argv[1]), Tokenizer(sys.argv[2])).teacher_ids))
"""


def test_processes_that_ask_at_once_get_the_same(folder, families):
    arguments = [sys.executable, "-c", ASK, str(families["student"]), str(families["teacher"])]
    children = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [child.communicate()[0].split() for child in children]
    assert all(child.returncode == 0 for child in children)
    assert len({number for numbers in told for number in numbers}) == 1
    assert len(list(folder.iterdir())) == 1


@pytest.fixture
def no_permission(sides, tmp_path, monkeypatch):
    """A cache folder below one that this user may not open; root becomes nobody for a while."""
    build_projection(*sides, "exact")  # imports what it needs while it may
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


def test_without_permission_nothing_is_kept(no_permission, sides):
    with pytest.raises(PermissionError):
        (projection_disk_cache.user_cache_folder() / "x").is_file()
    assert len(cached_projection(*sides, "exact").teacher_ids)


def test_without_a_home_nothing_is_kept(sides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XTK_CACHE", "~nosuchuser/x")
    assert len(cached_projection(*sides, "exact").teacher_ids)
    monkeypatch.delenv("XTK_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(RuntimeError):
        projection_disk_cache.user_cache_folder()
    assert len(cached_projection(*sides, "exact").teacher_ids)
    assert not any(tmp_path.iterdir())


def test_threads_that_write_at_once_write_whole_files(tmp_path):
    def write(number: int) -> None:
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text(str(number) * 1000)
            together.wait()

    together = threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert len(set((tmp_path / "file").read_text())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
