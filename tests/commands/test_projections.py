"""Options of build-projection and prune-projection, and `xtk inspect` of their artifacts."""

from __future__ import annotations

import json

import pytest
from xtk_processes import run_here

from xtk.projection.build import METHODS
from xtk.projection.file import read_projection


def json_line(done) -> dict:
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def build(run, pair, *options: object, **keywords):
    return run("build-projection", pair.student, pair.teacher, *options, **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_projections_of_every_method_are_built_reused_and_inspected(run, pair, corpus, tmp_path, method):
    options = ("--method", method, *(("--corpus", corpus) if method == "cooccurrence" else ()), "-o", "p")
    built = json_line(build(run, pair, *options, "--json", cwd=tmp_path))
    before = (tmp_path / "p").stat().st_mtime_ns
    assert json_line(build(run, pair, *options, "--json", cwd=tmp_path)) == built
    assert (tmp_path / "p").stat().st_mtime_ns == before
    record = json_line(run("inspect", "p", "--json", cwd=tmp_path))
    assert record["header"]["method"] == method
    assert record["header"]["audit"]["unmapped_mass"] == pytest.approx(built["unmapped_mass"])
    output = run("inspect", "p", cwd=tmp_path).stdout
    assert "unmapped mass" in output
    assert all(category in output for category in ("digits", "white space", "partial UTF-8", "other scripts"))
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.slow
def test_another_corpus_or_smoothing_is_a_different_request(run, pair, corpus, tmp_path):
    options = ("--method", "cooccurrence", "-o", "p")
    build(run, pair, *options, "--corpus", corpus, cwd=tmp_path)
    done = build(run, pair, *options, "--corpus", corpus, "--smoothing", 3, cwd=tmp_path, code=1)
    assert "different options" in done.stderr
    (tmp_path / "other.jsonl").write_text('{"text": "something else 201"}\n')
    done = build(run, pair, *options, "--corpus", "other.jsonl", cwd=tmp_path, code=1)
    assert "--force" in done.stderr
    build(run, pair, *options, "--corpus", corpus, "--corpus", "other.jsonl", "--force", cwd=tmp_path)
    assert read_projection(tmp_path / "p").header["options"]["documents"] == 41


def test_an_option_of_zero_is_used(run, pair, corpus, tmp_path):
    build(run, pair, "--decay", 0, "-o", "p", cwd=tmp_path)
    cooccurrence = ("--method", "cooccurrence", "--corpus", corpus, "--smoothing", 0)
    build(run, pair, *cooccurrence, "-o", "c", cwd=tmp_path)
    assert read_projection(tmp_path / "p").header["options"]["decay"] == 0
    assert read_projection(tmp_path / "c").header["options"]["smoothing"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "first-token", "--decay", "0.5"), "--method first-token does not support --decay"),
        (("--corpus", "x.jsonl"), "--method multitoken does not support --corpus"),
        (("--method", "cooccurrence"), "--corpus DATA"),
        (("--method", "cooccurrence", "--corpus", "CORPUS", "--smoothing", "nan"), "--smoothing is nan"),
        (("--max-tokens-per-entry", "0"), "--max-tokens-per-entry is 0"),
        (("--special-tokens", "rolle"), "--special-tokens is not role, none or an existing file"),
        (("--special-tokens", "table.json"), "did you mean <|end_of_text|>?"),
        (("--special-tokens", "list.json"), "not a mapping of student tokens to teacher tokens"),
        (("--special-tokens", "broken.json"), "the file of --special-tokens is not valid JSON"),
        (("--special-tokens", "deep.json"), "nested more than 100 levels deep"),
        (("--special-tokens", "twice.json"), "has the key '<|pad|>' twice"),
        (("--columns", "text=body"), "does not support --columns"),
    ],
)
def test_invalid_build_options_are_refused(run, pair, corpus, tmp_path, options, message):
    (tmp_path / "table.json").write_text('{"<|end_of_tex|>": "<|im_end|>"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.json").write_text('{"<|pad|>": "<|im_end|>",\t"<|pad|>": "<|endoftext|>"}')
    options = [str(corpus) if option == "CORPUS" else option for option in options]
    done = build(run, pair, *options, "-o", "p", cwd=tmp_path, code=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p").exists()


def test_a_table_of_special_tokens_is_read(run, pair, tmp_path):
    (tmp_path / "table").write_text(json.dumps({"<|pad|>": "<|im_end|>"}, indent="\t"))
    build(run, pair, "--special-tokens", "table", "-o", "p", cwd=tmp_path)
    header = read_projection(tmp_path / "p").header
    assert header["special_tokens"] == {"<|pad|>": "<|im_end|>"}
    assert header["audit"]["rows"]["special"] == 1


def test_a_pruned_projection_is_read_from_a_pipe(run, projection, tmp_path):
    limits = ("--mass", 0.9, "--renormalize")
    done = run("prune-projection", projection, *limits, "-o", "p", "--json", cwd=tmp_path)
    assert json_line(done)["entries"] > 0
    header = read_projection(tmp_path / "p").header
    assert header["prunings"] == [{"top_k": None, "min_weight": 0.0, "mass": 0.9, "renormalize": True}]
    run("prune-projection", "-", *limits, "-o", "p2", stdin="p\n", cwd=tmp_path)
    assert (tmp_path / "p").read_bytes() == (tmp_path / "p2").read_bytes()
    assert "prunings" in run("inspect", "p", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mass", "0"), "--mass is 0"),
        (("--mass", "nan"), "--mass is nan"),
    ],
)
def test_invalid_mass_is_refused(projection, tmp_path, options, message):
    done = run_here("prune-projection", projection, *options, "-o", "out", cwd=tmp_path, code=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_absent_projection_is_refused(tmp_path):
    done = run_here("prune-projection", "absent", "--top-k", 1, "-o", "out", cwd=tmp_path, code=1)
    assert "this projection file does not exist" in done.stderr


def test_tokens_without_a_counterpart_are_reported_on_stderr_unless_quiet(run, pair, metaspace, tmp_path):
    done = run("build-projection", pair.student, metaspace, "-o", "p", cwd=tmp_path)
    assert "no counterpart with equal bytes" in done.stderr
    assert "no counterpart with equal bytes" in run("inspect", "p", cwd=tmp_path).stdout
    assert run("build-projection", pair.student, metaspace, "-o", "p", "--quiet", cwd=tmp_path).stderr == ""
