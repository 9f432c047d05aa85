"""Output paths that are refused, with and without `--force`, and outputs that a kill left unfinished."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xtk.cache.manifest import FORMAT, VERSION

pytestmark = pytest.mark.slow


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def assert_refused(result, *messages: str) -> None:
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for message in messages:
        assert message in " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def finished_run(run, pair, cache, tmp_path_factory) -> Path:
    """Return a finished run with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run("distill", pair.student, cache, "--loss", "ce", "--max-steps", 2, "--save-steps", 1, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def commands(run, pair, corpus, cache, projection, finished_run, tmp_path_factory) -> dict[str, tuple]:
    """Return the arguments of every command that writes, without the output path."""
    return {
        "cache-teacher": ("cache-teacher", pair.teacher, corpus, "--top-k", 4),
        "merge": ("cache", "merge", cache),
        "distill": ("distill", pair.student, cache, "--loss", "ce", "--max-steps", 1),
        "export": ("export", finished_run),
        "sweep": ("sweep", pair.student, cache, "--loss", "ce", "--max-steps", 1, "--vary", "seed=0"),
        "build-projection": ("build-projection", pair.student, pair.teacher),
        "prune-projection": ("prune-projection", projection, "--top-k", 1),
        "report": ("report", finished_run),
        "align": ("align", pair.student, pair.teacher, "text"),
        "rollout": ("rollout", pair.student, corpus, "--max-prompts", 1, "--max-completion-length", 4),
        "quickstart": ("quickstart",),
    }


FOLDER_COMMANDS = ("cache-teacher", "merge", "distill", "export", "quickstart")
FILE_COMMANDS = ("build-projection", "prune-projection", "report", "align", "rollout")
ALL_COMMANDS = (*FOLDER_COMMANDS, *FILE_COMMANDS)


def with_output(command: str, arguments: tuple, path: Path | str, force: tuple = ()) -> tuple:
    return (*arguments, "--html" if command == "align" else "-o", path, *(() if command == "quickstart" else force))


def test_inspect_page_is_rewritten_only_for_the_same_cache(run, pair, corpus, cache, tmp_path):
    page = tmp_path / "page.html"
    run("inspect", cache, "--html", page)
    run("inspect", cache, "--html", page)
    run("cache-teacher", pair.teacher, corpus, "--top-k", 2, "-o", tmp_path / "other")
    assert_refused(
        run("inspect", tmp_path / "other", "--html", page, code=None), "page that was made from other inputs", "--force"
    )
    run("inspect", tmp_path / "other", "--html", page, "--force")


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_output_that_cannot_be_created_is_refused(run, commands, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    suffix = ".jsonl" if command == "rollout" else ""
    for path, message in (
        (tmp_path / "file" / "below" / f"out{suffix}", "is a file, not a folder"),
        (tmp_path / ("x" * 300 + suffix), "the file name is too long"),
        (tmp_path / f"link{suffix}", "a broken symbolic link"),
    ):
        if path.name.startswith("link"):
            path.symlink_to(tmp_path / "nowhere")
        result = run(*with_output(command, commands[command], path), code=None)
        assert_refused(result, message)
        assert result.stdout == ""


@pytest.mark.parametrize("command", FOLDER_COMMANDS)
def test_root_home_and_input_folders_are_refused_as_outputs(run, commands, pair, finished_run, tmp_path, command):
    home = tmp_path / "home"
    home.mkdir()
    for path in (Path("/"), home):
        result = run(*with_output(command, commands[command], path, ("--force",)), code=None, env={"HOME": str(home)})
        assert_refused(result, "a home folder")
    if command != "quickstart":
        input_folder = next(Path(str(one)) for one in commands[command][1:] if Path(str(one)).is_dir())
        before = snapshot(input_folder)
        message = "the output folder contains the run" if command == "export" else "the output folder is"
        assert_refused(run(*with_output(command, commands[command], input_folder, ("--force",)), code=None), message)
        assert snapshot(input_folder) == before


def test_device_is_refused_as_output(run, commands):
    for command in ("build-projection", "report"):
        assert_refused(run(*with_output(command, commands[command], "/dev/full"), code=None), "a device or a pipe")


def test_sweep_does_not_write_into_a_log_file_of_the_user(run, commands, tmp_path):
    (tmp_path / "seed=0.log").write_text("mine")
    assert_refused(
        run(*commands["sweep"], "-o", tmp_path, code=None), "the output path is an existing file", "seed=0.log"
    )
    assert (tmp_path / "seed=0.log").read_text() == "mine"


@pytest.mark.parametrize("leftovers", [(".xtk-unfinished",), (".xtk-unfinished", "tokenizer.json")])
def test_cache_killed_before_its_first_shard_resumes(run, pair, corpus, cache, tmp_path, leftovers):
    out = tmp_path / "out"
    out.mkdir()
    if ".xtk-unfinished" in leftovers:
        header = json.loads((cache / "manifest.json").read_text())["header"]
        marker = {"format": FORMAT, "version": VERSION, "header": header}
        (out / ".xtk-unfinished").write_text(json.dumps(marker))
    if "tokenizer.json" in leftovers:
        (out / "tokenizer.json").write_bytes((cache / "tokenizer.json").read_bytes()[:100])
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", out)
    assert snapshot(out) == snapshot(cache)


def test_unfinished_cache_without_shards_refuses_other_options(run, pair, corpus, cache, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    header = json.loads((cache / "manifest.json").read_text())["header"]
    (out / ".xtk-unfinished").write_text(json.dumps({"format": "xtk-teacher-cache", "version": 6, "header": header}))
    arguments = ("cache-teacher", pair.teacher, corpus, "--top-k", 3, "-o", out)
    assert_refused(
        run(*arguments, code=None),
        "the output folder contains a cache with different inputs or options",
        "options.top_k: 16 there, 3 in this command",
    )
    run(*arguments, "--force")


def test_next_run_removes_files_that_a_kill_left_next_to_the_manifest(run, pair, corpus, cache, tmp_path):
    out = Path(shutil.copytree(cache, tmp_path / "out"))
    (out / ".xtk-unfinished").write_text("{}")
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", out)
    assert snapshot(out) == snapshot(cache)


def test_path_that_is_ambiguous_as_a_line_is_printed_as_json(run, pair, projection, tmp_path):
    for name in ("two\nlines", " spaces ", "{brace"):
        result = run("build-projection", pair.student, pair.teacher, "-o", name, cwd=tmp_path)
        assert json.loads(result.stdout) == {"path": name}
        pruned = run("prune-projection", "-", "--top-k", 1, "-o", "q", "--force", stdin=result.stdout, cwd=tmp_path)
        assert pruned.stdout == "q\n"


def test_cache_teacher_refuses_an_output_path_that_is_not_utf_8(pair, corpus, tmp_path):
    command = [sys.executable, "-m", "xtk", "cache-teacher", pair.teacher, corpus, "-o", b"caf\xe9"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, env={**os.environ})
    assert result.returncode == 1
    assert b"is not UTF-8" in result.stderr
    assert b"Traceback" not in result.stderr
