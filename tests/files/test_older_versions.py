"""Artifacts of older versions are refused with their version and the command that creates them again."""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import safetensors.numpy

from xtk.cache import manifest as cache_manifest
from xtk.cache import reader as teacher_cache
from xtk.cache import shard_writing
from xtk.cache import writer as cache_writer
from xtk.cache.reader import TeacherCache
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import canonical_json
from xtk.files.storage_folders import LocalFolder
from xtk.projection.file import read_projection
from xtk.runs.folder import read_recipe, read_run_manifest

REBUILD_COMMAND = "xtk cache-teacher TEACHER DATA -o FOLDER --force"


def error_of(call: Any, *arguments: Any) -> XtkError:
    """Return the error of a call, which must not be a CorruptError."""
    with pytest.raises(XtkError) as raised:
        call(*arguments)
    assert not isinstance(raised.value, CorruptError)
    return raised.value


def make_shard_version_5(path: Path) -> None:
    """Rewrite a shard as one of version 5."""
    reader = pa.ipc.open_file(path.read_bytes())
    batch, metadata = reader.get_batch_with_custom_metadata(0)
    stated = {**json.loads(metadata[b"xtk"]), "version": 5}
    seal = canonical_json({**stated, "checksum": "xxh3_128:" + "0" * shard_writing.CHECKSUM_DIGITS})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"xtk": seal})
    content = path.read_bytes()
    start = content.find(shard_writing.CHECKSUM_PREFIX) + len(shard_writing.CHECKSUM_PREFIX)
    with path.open("r+b") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            digits = shard_writing._checksum_around(mapped, start)
        stream.seek(start)
        stream.write(digits.encode())


def test_older_finished_cache_is_refused(cache, tmp_path):
    shutil.copytree(cache, tmp_path / "c")
    content = json.loads((tmp_path / "c" / "manifest.json").read_text())
    (tmp_path / "c" / "manifest.json").write_text(json.dumps({**content, "version": 5}))
    failure = error_of(TeacherCache, tmp_path / "c")
    assert failure.what == f"this teacher cache has version 5; this xtk reads version {cache_manifest.VERSION}"
    assert REBUILD_COMMAND in str(failure.hint)


def test_older_shard_and_the_unfinished_cache_that_contains_it_are_refused(cache, tmp_path, run, pair, corpus):
    shutil.copytree(cache, tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    shard = tmp_path / "c" / "shard-00000.arrow"
    make_shard_version_5(shard)
    failure = error_of(teacher_cache.open_verified_shard, shard, str(shard))
    assert failure.what == "this teacher cache has version 5; this xtk reads version 6"
    assert REBUILD_COMMAND in str(failure.hint)
    result = run(
        "cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", tmp_path / "c", code=1
    )
    assert "has version 5" in result.stderr
    assert REBUILD_COMMAND in result.stderr


def test_older_unfinished_cache_without_shards_is_refused(cache, tmp_path):
    header = TeacherCache(cache).header
    (tmp_path / ".xtk-unfinished").write_text(
        canonical_json({"format": cache_manifest.FORMAT, "version": 5, "header": header})
    )
    failure = error_of(cache_writer.start_cache, LocalFolder(tmp_path), header)
    assert failure.what == "this teacher cache has version 5; this xtk reads version 6"


def test_older_projection_is_refused(projection, tmp_path):
    tensors = safetensors.numpy.load_file(projection)
    with safetensors.safe_open(projection, "numpy") as file:
        header = json.loads(file.metadata()["xtk"])
    safetensors.numpy.save_file(tensors, tmp_path / "p", metadata={"xtk": canonical_json({**header, "version": 1})})
    failure = error_of(read_projection, tmp_path / "p")
    assert failure.what == "this projection has version 1; this xtk reads version 2"
    assert "xtk build-projection STUDENT TEACHER -o FILE" in str(failure.hint)


@pytest.mark.parametrize("kind", ["student", "checkpoint", "best", "exported-student"])
def test_older_run_manifest_is_refused(tmp_path, kind):
    (tmp_path / "xtk.json").write_text(canonical_json({"kind": kind, "version": 3, "processes": 1}))
    failure = error_of(read_run_manifest, tmp_path)
    assert failure.what == f"this {kind} has version 3; this xtk reads version 4"
    assert "xtk distill" in str(failure.hint)
    assert "xtk export" in str(failure.hint)


def test_older_recipe_is_refused_also_by_xtk_report(tmp_path, run):
    (tmp_path / "recipe.json").write_text(canonical_json({"kind": "recipe", "version": 2, "identity": {}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kd": 0.5}\n')
    failure = error_of(read_recipe, tmp_path)
    assert failure.what == "this recipe of xtk distill has version 2; this xtk reads version 3"
    assert "xtk distill ... -o FOLDER --force" in str(failure.hint)
    assert failure.what in run("report", tmp_path, "-o", tmp_path / "page.html", code=1).stderr
