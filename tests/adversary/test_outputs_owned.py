"""One rule for outputs: what xtk did not write for the same request stays, with `--force` too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xtk.artifacts.cache_manifest import FORMAT, VERSION

pytestmark = pytest.mark.slow

FORCE = ((), ("--force",))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def refused(done, *told: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for words in told:
        assert words in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def trained(run, pair, cache, tmp_path_factory) -> Path:
    """A finished run with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run("distill", pair.student, cache, "--loss", "ce", "--max-steps", 2, "--save-steps", 1, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def commands(run, pair, corpus, cache, projection, trained, tmp_path_factory) -> dict[str, tuple]:
    """Every command that writes, without its output."""
    return {
        "cache-teacher": ("cache-teacher", pair.teacher, corpus, "--top-k", 4),
        "merge": ("cache-teacher", "--merge", cache),
        "distill": ("distill", pair.student, cache, "--loss", "ce", "--max-steps", 1),
        "export": ("export", trained),
        "sweep": ("sweep", pair.student, cache, "--loss", "ce", "--max-steps", 1, "--vary", "seed=0"),
        "build-projection": ("build-projection", pair.student, pair.teacher),
        "prune-projection": ("prune-projection", projection, "--top-k", 1),
        "report": ("report", trained),
        "align": ("align", pair.student, pair.teacher, "text", "--html"),
        "rollout": ("rollout", pair.student, corpus, "--max-prompts", 1, "--max-completion-length", 4),
        "quickstart": ("quickstart",),
    }


FOLDERS = ("cache-teacher", "merge", "distill", "export", "quickstart")
FILES = ("build-projection", "prune-projection", "report", "align", "rollout")
ALL = (*FOLDERS, *FILES)


def with_output(command: str, arguments: tuple, path: Path, force: tuple = ()) -> tuple:
    return (*arguments, "-o", path, *(() if command == "quickstart" else force))


@pytest.mark.parametrize("force", FORCE)
@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_of_the_users_tokenizer_is_not_an_artifact(run, pair, commands, tmp_path, command, force):
    out = tmp_path / "mine"
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((pair.student / name).read_bytes())
    before = snapshot(tmp_path)
    done = run(*with_output(command, commands[command], out, force), code=None)
    refused(done, "this folder contains files that xtk did not write (tokenizer.json, tokenizer_config.json)", "mine")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("command", ["cache-teacher", "merge", "distill", "export"])
def test_force_names_the_users_files_and_removes_nothing(run, commands, cache, trained, tmp_path, command):
    out = tmp_path / "out"
    if command == "export":
        run("export", trained, "--dtype", "bfloat16", "-o", out)
    else:
        shutil.copytree(cache if command in ("cache-teacher", "merge") else trained, out)
    (out / "notes.txt").write_text("precious")
    (out / ".git").mkdir()
    (out / ".git" / "config").write_text("mine")
    before = snapshot(out)
    refused(
        run(*commands[command], "-o", out, "--force", code=None),
        "contains files that xtk did not write (.git, notes.txt)",
    )
    assert snapshot(out) == before
    shutil.rmtree(out / ".git")
    (out / "notes.txt").unlink()
    run(*commands[command], "-o", out, "--force")


def test_force_looks_into_checkpoints(run, commands, trained, tmp_path):
    out = Path(shutil.copytree(trained, tmp_path / "out"))
    note = next(out.glob("checkpoint-*")) / "remarks.md"
    note.write_text("precious")
    refused(run(*commands["distill"], "-o", out, "--force", code=None), f"{note.parent.name}/remarks.md")
    assert note.read_text() == "precious"


@pytest.mark.parametrize("force", FORCE)
@pytest.mark.parametrize("command", FILES)
def test_a_file_that_is_no_artifact_is_not_replaced(run, commands, cache, tmp_path, command, force):
    out = tmp_path / ("mine.jsonl" if command == "rollout" else "mine")
    for content in (b"notes\n", (cache / "manifest.json").read_bytes(), b'{"text": "data"}\n'):
        out.write_bytes(content)
        refused(
            run(*with_output(command, commands[command], out, force), code=None), "the output path is an existing file"
        )
        assert out.read_bytes() == content


@pytest.mark.parametrize("force", FORCE)
@pytest.mark.parametrize("name", ["notes", "manifest.json", "tokenizer.json"])
def test_a_page_of_inspect_replaces_pages_alone(run, cache, tmp_path, name, force):
    own = Path(shutil.copytree(cache, tmp_path / "cache"))
    page = tmp_path / name if name == "notes" else own / name
    if name == "notes":
        page.write_text("mine")
    before = snapshot(tmp_path)
    refused(run("inspect", own, "--html", page, *force, code=None), "the output path is an existing file", str(page))
    assert snapshot(tmp_path) == before


def test_a_page_of_inspect_is_written_again_for_the_same_cache_alone(run, pair, corpus, cache, tmp_path):
    page = tmp_path / "page.html"
    run("inspect", cache, "--html", page)
    run("inspect", cache, "--html", page)
    run("cache-teacher", pair.teacher, corpus, "--top-k", 2, "-o", tmp_path / "other")
    refused(
        run("inspect", tmp_path / "other", "--html", page, code=None), "page that was made from other inputs", "--force"
    )
    run("inspect", tmp_path / "other", "--html", page, "--force")


@pytest.mark.parametrize("command", ALL)
def test_an_output_that_cannot_be_made_is_refused_before_any_work(run, commands, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    ending = ".jsonl" if command == "rollout" else ""
    for path, told in (
        (tmp_path / "file" / "below" / f"out{ending}", "is a file, not a folder"),
        (tmp_path / ("x" * 300 + ending), "the file name is too long"),
        (tmp_path / f"link{ending}", "a broken symbolic link"),
    ):
        if path.name.startswith("link"):
            path.symlink_to(tmp_path / "nowhere")
        done = run(*with_output(command, commands[command], path), code=None)
        refused(done, told)
        assert done.stdout == ""


@pytest.mark.parametrize("command", FOLDERS)
def test_root_home_and_an_input_are_no_outputs(run, commands, pair, trained, tmp_path, command):
    home = tmp_path / "home"
    home.mkdir()
    for path in (Path("/"), home):
        done = run(*with_output(command, commands[command], path, ("--force",)), code=None, env={"HOME": str(home)})
        refused(done, "a home folder")
    if command != "quickstart":
        given = next(Path(str(one)) for one in commands[command][1:] if Path(str(one)).is_dir())
        before = snapshot(given)
        message = "the output folder contains the run" if command == "export" else "the output folder is"
        refused(run(*with_output(command, commands[command], given, ("--force",)), code=None), message)
        assert snapshot(given) == before


def test_a_linked_folder_stands_for_the_folder(run, commands, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run(*commands["merge"], "-o", tmp_path / "link")
    assert (tmp_path / "disk" / "manifest.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_a_device_is_no_output(run, commands):
    for command in ("build-projection", "report"):
        refused(run(*commands[command], "-o", "/dev/full", code=None), "a device or a pipe")


def test_a_log_of_the_users_own_gets_no_line_of_a_sweep(run, commands, tmp_path):
    (tmp_path / "seed=0.log").write_text("mine")
    refused(run(*commands["sweep"], "-o", tmp_path, code=None), "the output path is an existing file", "seed=0.log")
    assert (tmp_path / "seed=0.log").read_text() == "mine"


@pytest.mark.parametrize("kept", [(".xtk-unfinished",), (".xtk-unfinished", "tokenizer.json"), (".xtk-lock-0",)])
def test_a_cache_that_was_killed_before_its_first_shard_goes_on(run, pair, corpus, cache, tmp_path, kept):
    out = tmp_path / "out"
    out.mkdir()
    if ".xtk-unfinished" in kept:
        header = json.loads((cache / "manifest.json").read_text())["header"]
        marker = {"format": FORMAT, "version": VERSION, "header": header}
        (out / ".xtk-unfinished").write_text(json.dumps(marker))
    if "tokenizer.json" in kept:
        (out / "tokenizer.json").write_bytes((cache / "tokenizer.json").read_bytes()[:100])
    if ".xtk-lock-0" in kept:
        (out / ".xtk-lock-0").write_text("process 999999 on nowhere")
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", out)
    assert snapshot(out) == snapshot(cache)


def test_an_unfinished_cache_without_a_shard_states_its_request(run, pair, corpus, cache, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    header = json.loads((cache / "manifest.json").read_text())["header"]
    (out / ".xtk-unfinished").write_text(json.dumps({"format": "xtk-teacher-cache", "version": 6, "header": header}))
    other = ("cache-teacher", pair.teacher, corpus, "--top-k", 3, "-o", out)
    refused(
        run(*other, code=None),
        "the output folder contains a cache with different inputs or options",
        "options.top_k: 16 there, 3 in this command",
    )
    run(*other, "--force")


def test_what_a_kill_left_next_to_the_manifest_goes_with_the_next_run(run, pair, corpus, cache, tmp_path):
    out = Path(shutil.copytree(cache, tmp_path / "out"))
    (out / ".xtk-lock-0").write_text("process 999999 on nowhere")
    (out / ".xtk-unfinished").write_text("{}")
    run("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--shard-tokens", 400, "-o", out)
    assert snapshot(out) == snapshot(cache)


def test_a_path_that_a_line_cannot_hold_is_printed_as_json(run, pair, projection, tmp_path):
    for name in ("two\nlines", " spaces ", "{brace"):
        done = run("build-projection", pair.student, pair.teacher, "-o", name, cwd=tmp_path)
        assert json.loads(done.stdout) == {"path": name}
        pruned = run("prune-projection", "-", "--top-k", 1, "-o", "q", "--force", stdin=done.stdout, cwd=tmp_path)
        assert pruned.stdout == "q\n"


def test_a_path_that_is_not_utf_8_is_refused_by_what_cannot_write_there(pair, corpus, tmp_path):
    command = [sys.executable, "-m", "xtk", "cache-teacher", pair.teacher, corpus, "-o", b"caf\xe9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, env={**os.environ})
    assert done.returncode == 1
    assert b"is not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr
