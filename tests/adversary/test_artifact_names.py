"""Names, sizes and types that a manifest states: none leads out of its artifact, none ends in a traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from forged_artifacts import checksum_of, forge, projection_parts, write_projection


@pytest.fixture
def forged(cache, tmp_path) -> Path:
    """A cache that may be changed, in a folder with a file that is not to be touched."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret.txt").write_text("the user's own\n")
    return Path(shutil.copytree(cache, tmp_path / "home" / "cache"))


def refused(done, *told: str) -> str:
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    text = " ".join(done.stderr.split())
    for words in told:
        assert words in text
    assert "remove" not in text or "/secret.txt" not in text.partition("remove")[2]
    return text


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_merge_writes_nothing_outside_of_its_output(run, forged, tmp_path):
    def change(manifest):
        order = manifest["header"]["codec"]["vocabulary_order"]
        (forged.parent / ".profile").write_bytes((forged / order).read_bytes())
        manifest["header"]["codec"]["vocabulary_order"] = "../.profile"
        manifest["files"]["../.profile"] = manifest["files"].pop(order)

    forge(forged, change)
    out = tmp_path / "elsewhere" / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".profile").write_text("export PATH")
    done = run("cache-teacher", "--merge", forged, "-o", out, code=None)
    refused(done, "refers to '../.profile', which is not a file of an xtk artifact in the same folder", "manifest.json")
    assert contents(tmp_path / "elsewhere") == {".profile": b"export PATH"}


@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--verify"), ("cache-teacher", "--merge")])
@pytest.mark.parametrize("name", ["/etc/hostname", "/dev/zero", "../secret.txt", "~/.profile", "a/b.json", ".hidden"])
def test_files_of_a_manifest_are_plain_names_inside_of_the_cache(run, forged, tmp_path, command, name):
    forge(forged, lambda manifest: manifest["files"].update({name: checksum_of(forged.parent / "secret.txt")}))
    more = ("-o", tmp_path / "out") if "--merge" in command else ()
    refused(run(*command, forged, *more, code=None, timeout=60), f"this file refers to '{name}'")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../cache/shard-00000.arrow", "/etc/hostname", "manifest.json", "shard-00001.arrow", "shard-0.arrow"]
)
def test_a_shard_has_the_name_of_its_place(run, forged, name):
    forge(forged, lambda manifest: manifest["shards"][0].update(file=name))
    refused(run("inspect", forged, "--verify", code=None), f"this file refers to '{name}'")


@pytest.mark.parametrize("kind", ["link", "pipe", "link to a folder"])
@pytest.mark.parametrize("name", ["tokenizer.json", "shard-00000.arrow", "manifest.json"])
def test_links_and_devices_are_not_read_as_files_of_a_cache(run, forged, name, kind):
    target = forged.parent / "secret.txt"
    target.write_bytes((forged / name).read_bytes())
    (forged / name).unlink()
    if kind == "pipe":
        os.mkfifo(forged / name)
    else:
        (forged / name).symlink_to(target if kind == "link" else forged.parent)
    done = run("inspect", forged, "--verify", code=None, timeout=60)
    text = refused(done, name)
    assert "not a regular file" in text or "bytes" in text
    assert target.read_bytes()


def test_a_link_next_to_the_tokenizer_is_not_followed(run, pair, forged, projection, tmp_path):
    (forged / "special_tokens_map.json").symlink_to(forged.parent / "secret.txt")
    refused(run("inspect", forged, "--verify", code=None), "special_tokens_map.json", "not a regular file")


@pytest.mark.parametrize(
    ("change", "told"),
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
        (lambda m: m["header"].pop("teacher"), "this shard is from another cache"),
        (lambda m: m["header"]["teacher"].update(embedding_rows=4_000_000_000), "header.teacher.embedding_rows"),
        (lambda m: m["header"]["teacher"].update(embedding_rows=10**9), "header.teacher.embedding_rows is 1000000000"),
        (lambda m: m["header"]["teacher"].pop("embedding_rows"), "this shard is from another cache"),
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
def test_a_value_that_cannot_be_is_named_with_its_place(run, forged, change, told):
    forge(forged, change)
    refused(run("inspect", forged, "--verify", code=None), told, "manifest.json" if "shard is from" not in told else "")


@pytest.mark.parametrize("name", ["positions", "tokens"])
def test_counts_of_a_manifest_are_compared_with_the_shard_before_it_is_read(run, pair, forged, name, tmp_path):
    forge(forged, lambda manifest: manifest["shards"][0].update({name: manifest["shards"][0][name] + 1}))
    done = run("distill", pair.teacher, forged, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out", code=None)
    refused(done, f" {name}, but the manifest of the cache states ", "shard-00000.arrow")


def test_a_manifest_that_is_nested_ten_thousand_deep_is_a_sentence(run, forged):
    (forged / "manifest.json").write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    refused(run("inspect", forged, code=None), "nested more than 100 levels deep")


def test_a_recipe_that_is_a_link_is_not_read(run, pair, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret.json").write_text('{"losses": ["ce"], "inputs": {"password": "1234"}}')
    (tmp_path / "run" / "recipe.json").symlink_to(tmp_path / "secret.json")
    for command in (("inspect",), ("report", "-o", tmp_path / "page.html")):
        text = refused(run(*command, tmp_path / "run", code=None), "recipe.json")
        assert "1234" not in text


@pytest.mark.parametrize(
    ("change", "told"),
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
def test_the_header_of_a_projection_is_checked(run, projection, tmp_path, change, told, command):
    header, data, outer = projection_parts(projection)
    write_projection(tmp_path / "p", {**header, **change}, data, outer)
    more = ("--top-k", 1, "-o", tmp_path / "q") if command == "prune-projection" else ()
    refused(run(command, tmp_path / "p", *more, code=None), told)


def test_what_was_not_checked_is_printed_as_not_checked(run, cache):
    plain, verified = run("inspect", cache).stdout, run("inspect", cache, "--verify").stdout
    assert "not checked (--verify)" in plain
    assert "not checked" not in verified
    assert json.loads(run("inspect", cache, "--json").stdout)["statistics"]["verified"] is None
    assert json.loads(run("inspect", cache, "--verify", "--json").stdout)["statistics"]["verified"] is True


def test_a_finished_cache_that_is_found_again_says_what_was_compared(run, pair, corpus, cache):
    done = run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", cache)
    assert "checked file sizes, not checksums" in done.stderr


@pytest.mark.parametrize("rows", [0, 5])
def test_counts_of_shards_add_up_to_those_of_the_cache(run, forged, tmp_path, rows):
    forge(forged, lambda manifest: manifest["shards"][0].update(documents=rows))
    told = "shards[0].documents" if rows == 0 else "its shards have"
    refused(run("cache-teacher", "--merge", forged, "-o", tmp_path / "out", code=None), told)
    assert not (tmp_path / "out" / "manifest.json").exists()
