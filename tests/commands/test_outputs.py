"""Output files: what `--force` replaces and what it keeps, and file names that are not UTF-8."""

from __future__ import annotations

import json
import os

import pytest
from test_bad_input import assert_refused
from xtk_processes import run_here

FORCE = ((), ("--force",))


@pytest.mark.parametrize("force", FORCE)
def test_an_input_file_is_never_replaced(pair, projection, tmp_path, force):
    for name in ("p", "q"):
        (tmp_path / name).write_bytes(projection.read_bytes())
    (tmp_path / "table.yaml").write_text("{}")
    for arguments, stdin in (
        (("prune-projection", "p", "--top-k", 1, "-o", "./p"), ""),
        (("prune-projection", "-", "--top-k", 1, "-o", "p"), "p\n"),
        (("build-projection", pair.student, pair.teacher, "--special-tokens", "table.yaml", "-o", "table.yaml"), ""),
    ):
        assert_refused(
            run_here(*arguments, *force, cwd=tmp_path, stdin=stdin, code=None),
            "the output file is one of the input files",
        )
    assert (tmp_path / "p").read_bytes() == (tmp_path / "q").read_bytes() == projection.read_bytes()


@pytest.mark.parametrize("size", [0, 60, -1])
def test_a_corrupt_projection_is_replaced_only_with_force(run, pair, projection, tmp_path, size):
    content = projection.read_bytes()
    (tmp_path / "p").write_bytes(content[:size])
    arguments = ("build-projection", pair.student, pair.teacher, "-o", "p")
    assert_refused(run_here(*arguments, cwd=tmp_path, code=None), "where: p", "--force")
    run(*arguments, "--force", cwd=tmp_path)
    assert (tmp_path / "p").read_bytes() == content


@pytest.mark.slow
def test_a_page_of_other_data_is_replaced_only_with_force(run, pair, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "one"}\n')
    page_options = ("--html", "page")
    run("align", pair.student, pair.teacher, data, *page_options, cwd=tmp_path)
    run("align", pair.student, pair.teacher, "-", *page_options, cwd=tmp_path, stdin='{"text": "one"}\n')
    data.write_text('{"text": "two"}\n')
    for source, stdin in ((data, ""), ("-", '{"text": "two"}\n')):
        done = run_here(
            "align", pair.student, pair.teacher, source, *page_options, cwd=tmp_path, stdin=stdin, code=None
        )
        assert_refused(done, "page that was made from other inputs", "--force")
    run("align", pair.student, pair.teacher, data, *page_options, "--force", cwd=tmp_path)


@pytest.mark.slow
def test_a_path_that_is_not_utf_8_passes_through_a_pipe(pair, tmp_path):
    import subprocess
    import sys

    name, xtk = b"p\xff", [sys.executable, "-m", "xtk"]
    built = subprocess.run([*xtk, "build-projection", pair.student, pair.teacher, "-o", name],
                           cwd=tmp_path, capture_output=True, check=True)  # fmt: skip
    assert built.stdout == name + b"\n"
    done = subprocess.run([*xtk, "prune-projection", "-", "--top-k", "1", "-o", b"q\xff", "--json"],
                          cwd=tmp_path, input=built.stdout, capture_output=True, check=True)  # fmt: skip
    assert json.loads(done.stdout)["path"] == os.fsdecode(b"q\xff")
    assert sorted(os.fsencode(path.name) for path in tmp_path.iterdir()) == [name, b"q\xff"]
    aligned = subprocess.run([*xtk, "align", pair.student, pair.teacher, b"a \xff b"], cwd=tmp_path,
                             capture_output=True, check=True)  # fmt: skip
    assert json.loads(aligned.stdout)["text"] == "a \ufffd b"
