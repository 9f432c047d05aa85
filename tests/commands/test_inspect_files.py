"""`xtk inspect` of single files: each is described, or the message states its kind and what can be done with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf_files
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from small_inputs import Pair
from xtk_processes import run_here

from xtk.cache.reader import TeacherCache


@pytest.fixture(scope="module")
def folder(run, pair: Pair, tmp_path_factory) -> Path:
    """Return a folder with a cache and files of many kinds."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "data.jsonl").write_text('{"text": "Anna has 12"}\n')
    run("cache-teacher", pair.teacher, folder / "data.jsonl", "--top-k", 4, "-o", folder / "cache")
    run("cache", "export", folder / "cache", "-o", folder / "export.jsonl", "--format", "jsonl")
    run("build-projection", pair.student, pair.teacher, "-o", folder / "p.safetensors")
    shutil.copy(folder / "p.safetensors", folder / "projection")
    shutil.copytree(pair.student, folder / "model")
    gguf_files.write_gguf(gguf_files.make_llama(folder / "llama"), folder / "model.gguf")
    table = pa.table({"text": ["Anna has 12"]})
    pyarrow.feather.write_feather(table, folder / "data.arrow", compression="uncompressed")
    pyarrow.parquet.write_table(table, folder / "data.parquet")
    for name, content in {
        "data.csv": "text\nAnna\n", "data.txt": "Anna", "data.json": "[]", "notes": "my notes", "notes.md": "#",
        "answers.jsonl": '{"key": "sha256:0', "recipe.json": "{}", "xtk.json": "{}",
    }.items():  # fmt: skip
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("name", ["manifest", "vocabulary-order", "shard", "tokenizer"])
def test_every_file_of_an_intact_cache_is_known(run, folder, name):
    (path,) = (folder / "cache").glob(f"{name}*.*") if name != "tokenizer" else [folder / "cache" / "tokenizer.json"]
    if name in ("vocabulary-order", "shard"):
        record = json.loads(run("inspect", path, "--json").stdout)
        assert record["kind"] == f"teacher-cache-{name}"
        assert record["statistics"]["bytes"] == path.stat().st_size
    else:
        stderr = " ".join(run_here("inspect", path, code=1).stderr.split())
        assert "one file of a teacher cache, a run, a model or a tokenizer" in stderr
        assert f"inspect the folder: xtk inspect {path.parent}" in stderr


def test_vocabulary_order_is_described_and_its_damage_is_seen(run, folder, tmp_path):
    (path,) = (folder / "cache").glob("vocabulary-order-*.arrow")
    record = json.loads(run("inspect", path, "--json").stdout)
    assert record["statistics"]["tokens"] == TeacherCache(folder / "cache").header["teacher"]["embedding_rows"]
    damaged = tmp_path / path.name
    damaged.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "does not match the checksum in its name" in run_here("inspect", damaged, code=1).stderr


@pytest.mark.parametrize("name", ["p.safetensors", "projection"])
def test_projection_is_known_by_its_header(run, folder, name, tmp_path):
    assert json.loads(run("inspect", folder / name, "--json").stdout)["kind"] == "projection"
    (tmp_path / name).write_bytes((folder / name).read_bytes()[:1000])
    assert "this is not a complete projection file" in run_here("inspect", tmp_path / name, code=1).stderr


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("model.gguf", "a model (GGUF)", "use it as a model, for example: xtk evaluate"),
        ("model/model.safetensors", "a file of weights", "inspect the folder: xtk inspect"),
        ("model/tokenizer.json", "one file of a", "inspect the folder: xtk inspect"),
        ("model/config.json", "one file of a", "inspect the folder: xtk inspect"),
        ("recipe.json", "one file of a", "inspect the folder: xtk inspect"),
        ("xtk.json", "one file of a", "inspect the folder: xtk inspect"),
        ("data.parquet", "data", "check it with two models: xtk doctor STUDENT TEACHER"),
        ("data.arrow", "data", "check it with two models: xtk doctor STUDENT TEACHER"),
        ("data.csv", "data", "check it with two models: xtk doctor STUDENT TEACHER"),
        ("data.txt", "data", "check it with two models: xtk doctor STUDENT TEACHER"),
        ("data.json", "data", "check it with two models: xtk doctor STUDENT TEACHER"),
        ("data.jsonl", "data", "check it with two models: xtk doctor STUDENT TEACHER"),
        ("answers.jsonl", "a file of answers of query-teacher", "xtk cache import"),
        ("export.jsonl", "an exported teacher cache", "xtk cache import"),
        ("notes", "not of a kind that xtk knows", "give a teacher cache"),
        ("notes.md", "not of a kind that xtk knows", "give a teacher cache"),
    ],
)
def test_other_file_is_named_with_what_can_be_done(folder, name, what, hint):
    stderr = " ".join(run_here("inspect", folder / name, code=1).stderr.split())
    assert f"this file is not an artifact that inspect describes; it is {what}" in stderr
    assert hint in stderr
    assert not any(word in stderr for word in ("projection file", "checksum", "delete", "remove", "corrupt"))
