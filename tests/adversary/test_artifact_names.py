"""Invalid names, sizes and types in a manifest: no access outside of the artifact, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from forged_artifacts import checksum_of, forge, projection_parts, write_projection


@pytest.fixture
def forged_cache(cache, tmp_path) -> Path:
    """Return a cache that a test may change, in a folder with a file that must not be touched."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret.txt").write_text("the user's own\n")
    return Path(shutil.copytree(cache, tmp_path / "home" / "cache"))


def assert_refused(result, *messages: str) -> str:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    text = " ".join(result.stderr.split())
    for message in messages:
        assert message in text
    assert "remove" not in text or "/secret.txt" not in text.partition("remove")[2]
    return text


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_merge_writes_nothing_outside_of_its_output(run, forged_cache, tmp_path):
    def change(manifest):
        order = manifest["header"]["codec"]["vocabulary_order"]
        (forged_cache.parent / ".profile").write_bytes((forged_cache / order).read_bytes())
        manifest["header"]["codec"]["vocabulary_order"] = "../.profile"
        manifest["files"]["../.profile"] = manifest["files"].pop(order)

    forge(forged_cache, change)
    out = tmp_path / "elsewhere" / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".profile").write_text("export PATH")
    result = run("cache", "merge", forged_cache, "-o", out, code=None)
    assert_refused(
        result, "refers to '../.profile', which is not a file of an xtk artifact in the same folder", "manifest.json"
    )
    assert contents(tmp_path / "elsewhere") == {".profile": b"export PATH"}


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--verify"), ("cache", "merge")])
@pytest.mark.parametrize("name", ["/etc/hostname", "/dev/zero", "../secret.txt", "~/.profile", "a/b.json", ".hidden"])
def test_manifest_with_paths_or_hidden_names_of_files_is_refused(run, forged_cache, tmp_path, command, name):
    forge(
        forged_cache, lambda manifest: manifest["files"].update({name: checksum_of(forged_cache.parent / "secret.txt")})
    )
    options = ("-o", tmp_path / "out") if "merge" in command else ()
    assert_refused(run(*command, forged_cache, *options, code=None, timeout=60), f"this file refers to '{name}'")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../cache/shard-00000.arrow", "/etc/hostname", "manifest.json", "shard-00001.arrow", "shard-0.arrow"]
)
def test_shard_with_an_unexpected_file_name_is_refused(run, forged_cache, name):
    forge(forged_cache, lambda manifest: manifest["shards"][0].update(file=name))
    assert_refused(run("inspect", forged_cache, "--verify", code=None), f"this file refers to '{name}'")


@pytest.mark.parametrize("kind", ["link", "pipe", "link to a folder"])
@pytest.mark.parametrize("name", ["tokenizer.json", "shard-00000.arrow", "manifest.json"])
def test_links_and_pipes_are_not_read_as_files_of_a_cache(run, forged_cache, name, kind):
    target = forged_cache.parent / "secret.txt"
    target.write_bytes((forged_cache / name).read_bytes())
    (forged_cache / name).unlink()
    if kind == "pipe":
        os.mkfifo(forged_cache / name)
    else:
        (forged_cache / name).symlink_to(target if kind == "link" else forged_cache.parent)
    result = run("inspect", forged_cache, "--verify", code=None, timeout=60)
    text = assert_refused(result, name)
    assert "not a regular file" in text or "bytes" in text
    assert target.read_bytes()


def test_link_next_to_the_tokenizer_files_is_refused(run, pair, forged_cache, projection, tmp_path):
    (forged_cache / "special_tokens_map.json").symlink_to(forged_cache.parent / "secret.txt")
    assert_refused(run("inspect", forged_cache, "--verify", code=None), "special_tokens_map.json", "not a regular file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["shards"][0].update(documents=-1), "shards[0].documents is -1, but must be an integer from 1"),
        (lambda m: m["shards"][0].update(documents="12"), "shards[0].documents is '12'"),
        (lambda m: m["shards"][0].update(documents=True), "shards[0].documents is True"),
        (lambda m: m["shards"][0].update(bytes=10**30), "shards[0].bytes is 1000"),
        (lambda m: m["shards"][0].update(payload_ranges=[[0, 1]]), "three ranges [start, stop]"),
        (lambda m: m["shards"][0].update(payload_ranges=[[5, 1]] * 3), "three ranges [start, stop]"),
        (
            lambda m: m["shards"][0].update(payload_ranges=[[0, 10**9]] * 3),
            "payload_ranges in the manifest ends after the last byte of the shard",
        ),
        (
            lambda m: m["shards"][0].update(source_header=7),
            "shards[0].source_header in the manifest is 7, but must be below 1",
        ),
        (lambda m: m["shards"][0].update(checksum=5), "shards[0].checksum is 5"),
        (lambda m: m["shards"][0].pop("positions"), "shards[0].positions"),
        (lambda m: m["shards"][0].pop("quantization_kl"), "lacks the key shards[0].quantization_kl"),
        (lambda m: m["shards"].insert(0, []), "shards[0] is []"),
        (lambda m: m.update(shards=[]), "the manifest of this cache lists no shards"),
        (lambda m: m.update(shards={}), "does not match its checksum"),
        (lambda m: m.update(files=[]), "files is []"),
        (lambda m: m.update(header=[]), "header is []"),
        (lambda m: m["header"].pop("teacher"), "this file lacks the key header.teacher"),
        (lambda m: m["header"]["teacher"].update(embedding_rows=4_000_000_000), "header.teacher.embedding_rows"),
        (lambda m: m["header"]["teacher"].update(embedding_rows=10**9), "header.teacher.embedding_rows is 1000000000"),
        (lambda m: m["header"]["teacher"].pop("embedding_rows"), "lacks the key header.teacher.embedding_rows"),
        (lambda m: m["header"]["data"].pop("fingerprint"), "lacks the key header.data.fingerprint"),
        (lambda m: m["header"]["codec"].update(num_samples="all"), "header.codec.num_samples"),
        (lambda m: m["header"]["codec"].update(precision="exact"), "header.codec.precision"),
        (lambda m: m["header"]["options"].update(deep=eval("[" * 30 + "]" * 30)), "nested at most"),
        (
            lambda m: m["files"].pop(m["header"]["codec"]["vocabulary_order"]),
            "has no checksum for the file vocabulary-order-",
        ),
        (lambda m: m.update(version=[]), "version []"),
    ],
)
def test_invalid_manifest_value_is_refused_with_its_key(run, forged_cache, change, message):
    forge(forged_cache, change)
    assert_refused(
        run("inspect", forged_cache, "--verify", code=None),
        message,
        "manifest.json",
    )


@pytest.mark.parametrize("name", ["positions", "tokens"])
def test_manifest_counts_that_differ_from_the_shard_are_refused(run, pair, forged_cache, name, tmp_path):
    forge(forged_cache, lambda manifest: manifest["shards"][0].update({name: manifest["shards"][0][name] + 1}))
    result = run(
        "distill", pair.teacher, forged_cache, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out", code=None
    )
    assert_refused(result, f" {name}, but the manifest of the cache states ", "shard-00000.arrow")


def test_manifest_nested_ten_thousand_levels_deep_is_refused(run, forged_cache):
    (forged_cache / "manifest.json").write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    assert_refused(run("inspect", forged_cache, code=None), "nested more than 100 levels deep")


def test_recipe_that_is_a_link_is_not_read(run, pair, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret.json").write_text('{"losses": ["ce"], "inputs": {"password": "1234"}}')
    (tmp_path / "run" / "recipe.json").symlink_to(tmp_path / "secret.json")
    for command in (("inspect",), ("report", "-o", tmp_path / "page.html")):
        text = assert_refused(run(*command, tmp_path / "run", code=None), "recipe.json")
        assert "1234" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student": {"tokenizer": 5, "special_tokens": {}, "tokens": 1, "embedding_rows": 1}}, "student"),
        (
            {"student": {"tokenizer": "x", "special_tokens": {}, "tokens": -5, "embedding_rows": 1}},
            "student.tokens is -5",
        ),
        ({"audit": []}, "audit"),
        ({"prunings": "no"}, "prunings"),
        ({"method": {"a": 1}}, "method"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "prune-projection"])
def test_projection_with_an_invalid_header_is_refused(run, projection, tmp_path, change, message, command):
    header, data, safetensors_header = projection_parts(projection)
    write_projection(tmp_path / "p", {**header, **change}, data, safetensors_header)
    options = ("--top-k", 1, "-o", tmp_path / "q") if command == "prune-projection" else ()
    assert_refused(run(command, tmp_path / "p", *options, code=None), message)


def test_inspect_reports_whether_checksums_were_verified(run, cache):
    plain, verified = run("inspect", cache).stdout, run("inspect", cache, "--verify").stdout
    assert "verified: no (--verify)" in plain
    assert "verified: yes" in verified
    assert json.loads(run("inspect", cache, "--json").stdout)["statistics"]["verified"] is None
    assert json.loads(run("inspect", cache, "--verify", "--json").stdout)["statistics"]["verified"] is True


def test_reused_cache_reports_that_only_file_sizes_were_checked(run, pair, corpus, cache):
    result = run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", cache)
    assert "checked file sizes, not checksums" in result.stderr


@pytest.mark.parametrize("documents", [0, 5])
def test_merge_refuses_shard_counts_that_contradict_the_cache(run, forged_cache, tmp_path, documents):
    forge(forged_cache, lambda manifest: manifest["shards"][0].update(documents=documents))
    message = "shards[0].documents" if documents == 0 else "its shards have"
    assert_refused(run("cache", "merge", forged_cache, "-o", tmp_path / "out", code=None), message)
    assert not (tmp_path / "out" / "manifest.json").exists()
