"""Wrong uses of commands: the error names the mistake and the next step, in one style; nothing prints a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from xtk_processes import run_here

from xtk import terminal
from xtk.errors import XtkError


@pytest.fixture(scope="module")
def inputs(pair, cache, corpus, projection, tmp_path_factory) -> Path:
    """Return a folder with links to one input of each kind, with the names of a quickstart."""
    folder = tmp_path_factory.mktemp("wrong")
    links = {"student-0": pair.student, "teacher": pair.teacher, "cache": cache, "train.jsonl": corpus, "p": projection}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    return folder


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        # paths of another kind
        ("distill cache student-0 -o x", "this folder contains no teacher cache", "xtk cache-teacher TEACHER DATA"),
        ("cache-teacher train.jsonl teacher -o x", "this is a model folder, not data", "use a file, a folder"),
        ("distill student-0 cache --loss p-kl --projection train.jsonl -o x",
         "this is not a complete projection file of xtk", "build it again: xtk build-projection"),
        # numbers
        ("distill student-0 cache --learning-rate abc -o x", "invalid value for '--learning-rate'",
         "xtk distill --help"),
        ("distill student-0 cache --max-steps 1.5 -o x", "invalid value for '--max-steps'", "xtk distill --help"),
        ("distill student-0 cache --max-steps=-1 -o x", "invalid value for '--max-steps'", "xtk distill --help"),
        # options
        ("distill student-0 cache --learnig-rate 3 -o x",
         "no option called --learnig-rate; did you mean --learning-rate?", ""),
        ("distill student-0 cache --zzz -o x", "no option called --zzz", "xtk distill --help-all"),
        ("distil", "no command called 'distil'; did you mean distill?", ""),
        ("distill", "STUDENT is missing", "for example: xtk distill ./student cache"),
        ("distill student-0 cache -o", "option '-o' requires an argument", "--help"),
        ("align student-0 teacher text more", "too many arguments: (more)", "xtk align --help"),
        # paths that do not exist
        ("cache-teacher teacher x.jsonl -o x",
         "this data file, folder or dataset does not exist", "use a file, a folder"),
        ("align student-0 ./nowhere text", "this tokenizer folder does not exist", "a hub id such as owner/name"),
         # names
        ("distill student-0 cache --loss p-kll -o x", "no loss called 'p-kll'; did you mean p-kl?", ""),
        ("distill student-0 cache --loss xxxx -o x", "no loss called 'xxxx'", "use one of: alm, "),
    ],
)  # fmt: skip
def test_mistake_is_named_with_the_next_step(inputs, arguments, what, hint):
    done = run_here(*arguments.split(), cwd=inputs, code=None)
    assert done.returncode in (1, 2)
    first, *rest = done.stderr.splitlines()
    assert first.startswith("xtk: ")
    assert what in first
    assert hint in " ".join(done.stderr.split())
    assert all(line.startswith(("  where: ", "  try:   ", "         ")) for line in rest)
    assert max(map(len, rest), default=0) <= 125
    assert not (inputs / "x").exists()


def test_missing_package_is_named_before_anything_is_loaded(inputs, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run_here("distill", "student-0", "cache", "--lora-r", 4, "-o", "x", cwd=inputs, code=1)
    assert "LoRA adapters need the package peft" in done.stderr


def test_names_are_listed_in_lines_that_fit(inputs):
    done = run_here("distill", "student-0", "cache", "--loss", "xxxx", "-o", "x", cwd=inputs, code=1)
    assert max(map(len, done.stderr.splitlines())) <= 80
    done = run_here("frobnicate", code=2)
    assert max(map(len, done.stderr.splitlines())) <= 80


def test_right_path_with_another_error_keeps_the_error(inputs, tmp_path):
    (tmp_path / "empty.jsonl").write_text(json.dumps({"body": "x"}) + "\n")
    done = run_here("cache-teacher", "teacher", tmp_path / "empty.jsonl", "-o", "x", cwd=inputs, code=1)
    assert "this document has no column text" in done.stderr


@pytest.mark.parametrize("is_terminal", [True, False])
def test_errors_are_red_on_a_terminal(monkeypatch, capsys, is_terminal):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    terminal.error(XtkError("it is wrong", where="here", hint="this"))
    printed = capsys.readouterr().err
    assert ("\x1b[1;31mxtk:\x1b[0m" in printed) == is_terminal
    assert is_terminal or printed == "xtk: it is wrong\n  where: here\n  try:   this\n"


def test_the_group_lists_its_commands_and_suggests_names(tmp_path):
    done = run_here("cache", "exprot", cwd=tmp_path, code=2)
    assert (done.stdout, done.stderr) == ("", "xtk: no command called 'exprot'; did you mean export?\n")
    shown = run_here("cache", "--help").stdout
    assert all(f"\n  {name} " in shown for name in ("merge", "import", "export"))


def test_recipe_of_an_on_policy_run_names_its_command(tmp_path):
    (tmp_path / "run.yaml").write_text("on-policy: true\n")
    done = run_here("distill", "s", "p.jsonl", "--config", "run.yaml", "-o", "r", cwd=tmp_path, code=2)
    assert "use `xtk distill-on-policy --config run.yaml`" in done.stderr
    identity = {"losses": ["byte-kl"], "inputs": {"student": {"weights": "w", "tokenizer": "t"}}}
    recipe = {"kind": "recipe", "version": 3, "identity": identity, "student": "s", "cache": ["p.jsonl"]}
    (tmp_path / "r.json").write_text(json.dumps({**recipe, "on_policy": True, "num_generations": 2}))
    done = run_here("distill", "--config", "r.json", "-o", "r", cwd=tmp_path, code=2)
    assert "use `xtk distill-on-policy --config r.json`" in done.stderr
    (tmp_path / "r.json").write_text(json.dumps({**recipe, "on_policy": False}))
    done = run_here("distill-on-policy", "--config", "r.json", "-o", "r", cwd=tmp_path, code=2)
    assert "use `xtk distill --config r.json`" in done.stderr
    # Its keys are read, and the student is missing.
    done = run_here("distill", "--config", "r.json", "-o", "r", cwd=tmp_path, code=1)
    assert "no option" not in done.stderr
