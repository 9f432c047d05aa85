"""`xtk inspect` of single files and of projections: artifacts are described, and other files are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_inputs import Pair
from xtk_processes import run_here

from xtk.cache.reader import TeacherCache
from xtk.projection.file import read_projection
from xtk.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(run, pair: Pair, tmp_path_factory) -> Path:
    """Return a folder with a cache, a projection, a model and other files."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "data.jsonl").write_text('{"text": "Anna has 12"}\n')
    run("cache-teacher", pair.teacher, folder / "data.jsonl", "--top-k", 4, "-o", folder / "cache")
    run("build-projection", pair.student, pair.teacher, "-o", folder / "p.safetensors")
    shutil.copy(folder / "p.safetensors", folder / "projection")
    shutil.copytree(pair.student, folder / "model")
    (folder / "other").mkdir()
    (folder / "other" / "recipe.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["vocabulary-order", "shard"])
def test_files_of_a_cache_are_known(run, folder, name):
    (path,) = (folder / "cache").glob(f"{name}*.*")
    record = json.loads(run("inspect", path, "--json").stdout)
    assert record["kind"] == f"teacher-cache-{name}"
    assert record["statistics"]["bytes"] == path.stat().st_size


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
    "name", ["model/model.safetensors", "model/tokenizer.json", "other/recipe.json", "data.jsonl", "."]
)
def test_files_and_folders_that_are_not_artifacts_are_refused(folder, name):
    stderr = " ".join(run_here("inspect", folder / name, code=1).stderr.split())
    assert "is not of a kind that xtk inspects" in stderr
    assert "instead of a file inside, its folder" in stderr


def test_headline_has_the_sizes_of_the_cache_rounded(folder):
    printed = run_here("inspect", folder / "cache").stdout.splitlines()
    figures = TeacherCache(folder / "cache").manifest["shards"]
    positions, size = (sum(shard[name] for shard in figures) for name in ("positions", "bytes"))
    assert printed[1].startswith(
        f"  1 document, {positions:,} positions, {size / 1024:,.1f} KiB, {size / positions:.1f} B/"
    )
    assert printed[1].endswith("; teacher: teacher; verified: no (--verify)")
    hashes = [word for line in printed for word in line.split() if word.startswith("sha256:")]
    assert {len(word) for word in hashes} == {len("sha256:") + 8}
    everything = run_here("inspect", folder / "cache", "--json").stdout
    assert TeacherCache(folder / "cache").header["teacher"]["weights"] in everything


@pytest.mark.parametrize("given", ["532", "text:<|begin_of_text|>", "400"])
def test_row_of_a_projection_is_printed(folder, pair, given):
    projection = read_projection(folder / "projection")
    done = run_here("inspect", folder / "projection", pair.student, pair.teacher, "--token", given, "--json")
    record = json.loads(done.stdout)
    token = record["student_token"]["id"]
    low, high = projection.row_offsets[token : token + 2]
    weights = dict(zip(projection.teacher_ids[low:high].tolist(), projection.weights[low:high].tolist(), strict=True))
    assert {entry["id"]: entry["weight"] for entry in record["entries"]} == pytest.approx(weights, abs=1e-6)
    student = Tokenizer(pair.student)
    if given.isdecimal():
        assert token == int(given)
        assert bytes.fromhex(record["student_token"]["bytes"]) == student.vocabulary.bytes_of(token)
    else:
        assert token == 0
    alone = run_here("inspect", folder / "projection", "--token", str(token))
    assert f"student token {token}" in alone.stdout
    assert "to see the tokens' text" in alone.stderr


@pytest.mark.parametrize(
    ("token", "message"),
    [("99999", "has no row 99999"), ("text:xyzzy", "has no token 'xyzzy'"), ("x", "not a token id")],
)
def test_row_that_is_not_there_is_refused(folder, pair, token, message):
    done = run_here("inspect", folder / "projection", pair.student, pair.teacher, "--token", token, code=1)
    assert message in done.stderr


def test_row_needs_the_tokenizers_of_the_projection(folder, metaspace):
    done = run_here("inspect", folder / "projection", metaspace, "--token", 1, code=1)
    assert "neither the student's nor the teacher's" in done.stderr
