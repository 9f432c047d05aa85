"""Who owns an output: what each command does with a path, by what is there, with and without --force."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import small_inputs
import xtk_processes

from xtk.files.output import writer_lock

FOLDER_COMMANDS = ("cache-teacher", "merge", "distill", "export", "transplant")
FILE_COMMANDS = ("build-projection", "prune-projection", "rollout", "report", "align", "export-cache")
COMMANDS = (*FOLDER_COMMANDS, *FILE_COMMANDS)
RESUMABLE = ("cache-teacher", "merge", "distill")
LOCKED = ("cache-teacher", "distill", "export", "transplant", "rollout")
NOT_SLOW = ("merge", "build-projection", "export-cache")  # the others with nox -s slow
OTHER_OPTIONS = {"cache-teacher": ["--top-k", 2], "merge": ["--rows", "1:9"], "distill": ["--seed", 9], "transplant":
                 ["--method", "random"], "export": ["--max-shard-size", "60KB"], "build-projection":
                 ["--method", "exact"], "prune-projection": ["--top-k", 1], "rollout": ["--seed", 9]}  # fmt: skip
STATES = ("missing", "empty", "finished", "other", "unfinished", "foreign", "own and foreign", "link", "broken link",
          "wrong kind", "locked")  # fmt: skip


def cases() -> list[object]:
    return [
        pytest.param(command, state, force, marks=[] if command in NOT_SLOW else pytest.mark.slow)
        for command in COMMANDS
        for state in STATES
        for force in (False, True)
        if not (
            (command in FILE_COMMANDS and state in ("empty", "own and foreign"))
            or (command not in RESUMABLE and state == "unfinished")
            or (command not in LOCKED and state == "locked")
            or (command not in OTHER_OPTIONS and state == "other")
        )
    ]


@pytest.fixture(scope="module")
def run_folder(pair, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    small_inputs.write_jsonl(folder / "prompts.jsonl", small_inputs.sentences(2, seed=5))
    xtk_processes.run_xtk("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 2, "-o", folder / "run")
    return folder


@pytest.fixture(scope="module")
def commands(pair, corpus, cache, projection, run_folder) -> dict[str, list[object]]:
    """Return the arguments of each command, without the output."""
    student, teacher = pair.student, pair.teacher
    return {
        "cache-teacher": ["cache-teacher", teacher, corpus, "--top-k", 4, "--shard-tokens", 400],
        "merge": ["cache", "merge", cache, "--rows", "3:30"],
        "distill": ["distill", student, corpus, "--loss", "ce", "--max-steps", 2, "--save-steps", 1],
        "export": ["export", run_folder / "run"],
        "transplant": ["transplant", student, teacher],
        "build-projection": ["build-projection", student, teacher],
        "prune-projection": ["prune-projection", projection, "--top-k", 2],
        "rollout": ["rollout", student, run_folder / "prompts.jsonl", "--max-completion-length", 4],
        "report": ["report", run_folder / "run"],
        "align": ["align", student, teacher, "text"],
        "export-cache": ["cache", "export", cache],
    }


@pytest.fixture(scope="module")
def finished(commands, tmp_path_factory):
    """Return a function: the path of a finished output of a command, of its request or of another one."""
    made: dict[tuple[str, bool], Path] = {}

    def make(command: str, *, is_other: bool) -> Path:
        if (command, is_other) not in made:
            made[command, is_other] = path = tmp_path_factory.mktemp("own") / "out.jsonl"
            xtk_processes.run_xtk(
                *commands[command], output_flag(command), path, *(OTHER_OPTIONS[command] if is_other else ())
            )
        return made[command, is_other]

    return make


def output_flag(command: str) -> str:
    return "--html" if command == "align" else "-o"


def snapshot(path: Path) -> object:
    """Return the contents of a file, the target of a link, or {name: snapshot} of a folder; None: it does not exist."""
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if path.is_dir():
        return {one.name: snapshot(one) for one in path.iterdir()}
    return path.read_bytes() if path.exists() else None


def make_state(state: str, output: Path, command: str, finished) -> Path:
    """Write what is at the output path; return the path of what --force moves aside."""
    is_folder = command in FOLDER_COMMANDS
    if state in ("finished", "other", "unfinished", "own and foreign"):
        own = finished(command, is_other=state == "other")
        (shutil.copytree if is_folder else shutil.copyfile)(own, output)
        if state == "unfinished":
            (output / ("xtk.json" if command == "distill" else "manifest.json")).unlink()
        if state == "own and foreign":
            (output / ".git").mkdir()
            (output / ".git" / "config").write_text("mine")
    elif state == "empty":
        output.mkdir()
    elif state in ("foreign", "link"):
        place = output if state == "foreign" else output.with_name("disk")
        if is_folder:
            place.mkdir()
            for name in ("tokenizer.json", "notes.txt"):
                (place / name).write_text("mine")
        else:
            place.write_text('{"text": "mine"}\n')
        if state == "link":
            output.symlink_to(place)
            return place if is_folder else output
    elif state == "broken link":
        output.symlink_to("nowhere")
    elif state == "wrong kind" and is_folder:
        output.write_text("mine")
    elif state == "wrong kind":
        output.mkdir()
    return output


REFUSALS = {
    "other": "--force",
    "foreign": "--force moves",
    "link": "--force moves",
    "broken link": "a broken symbolic link",
    "wrong kind": "must be a",
    "locked": f"process {os.getpid()} on {socket.gethostname()}",
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "state", "force"), cases())
def test_who_owns_an_output(commands, finished, tmp_path, command, state, force):
    output = tmp_path / "out.jsonl"
    moved = make_state(state, output, command, finished)
    before, old = snapshot(tmp_path), snapshot(moved)
    arguments = [*commands[command], output_flag(command), output, *(["--force"] if force else [])]
    if state == "locked":
        with writer_lock(output, "file"):
            result = xtk_processes.run_xtk(*arguments, code=None)
    else:
        result = xtk_processes.run_xtk(*arguments, code=None)
    stderr = " ".join(result.stderr.split())
    aside = moved.with_name(f"{moved.name}.replaced-1")
    never_finished_twice = command == "export-cache" and state == "finished"
    if state in ("broken link", "wrong kind", "locked") or (not force and (state in REFUSALS or never_finished_twice)):
        assert result.returncode == 1, stderr
        assert REFUSALS.get(state, "--force") in stderr
        assert "Traceback" not in stderr
        assert result.stdout == ""
        assert snapshot(tmp_path) == before
        return
    assert result.returncode == 0, stderr
    assert not list(tmp_path.glob(".xtk-*"))
    is_equal_file = command in FILE_COMMANDS and state == "finished"  # nothing to move: it has the same bytes
    if force and state not in ("missing", "empty") and not is_equal_file:
        assert snapshot(aside) == old
        assert re.search(rf"moved {re.escape(str(moved))} to {aside.name}; xtk does not need it any more", stderr)
    else:
        assert not aside.exists()
        assert "moved" not in stderr
        if state in ("finished", "own and foreign"):
            assert snapshot(tmp_path) == before  # also the user's files in it
    if state == "link" and command in FOLDER_COMMANDS:
        assert output.is_symlink()
    whole = finished(command, is_other=False)
    assert output.is_file() if command in FILE_COMMANDS else snapshot(whole).keys() <= snapshot(output.resolve()).keys()


def test_each_old_output_gets_the_next_free_number(commands, tmp_path):
    for number in range(3):
        (tmp_path / "out").write_text(f"mine {number}")
        xtk_processes.run_xtk(*commands["build-projection"], "-o", tmp_path / "out", "--force")
    for number in range(3):
        assert (tmp_path / f"out.replaced-{number + 1}").read_text() == f"mine {number}"


def test_force_does_not_move_the_working_directory(commands, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes").write_text("mine")
    for path in (".", ".."):
        result = xtk_processes.run_xtk(*commands["merge"], "-o", path, "--force", cwd=tmp_path / "here", code=1)
        assert "contains the working directory" in result.stderr
    assert snapshot(tmp_path) == {"here": {"notes": b"mine"}}


def test_force_does_not_move_a_file_of_an_input_folder(run, cache, tmp_path):
    copy = Path(shutil.copytree(cache, tmp_path / "cache"))
    before = snapshot(copy)
    result = run("inspect", copy, "--html", copy / "manifest.json", "--force", code=1)
    assert "the output file is one of the input files" in result.stderr
    assert snapshot(copy) == before
