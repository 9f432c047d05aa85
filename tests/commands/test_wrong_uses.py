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
        # 1: swapped arguments
        ("distill cache student-0 -o x",
         "STUDENT and CACHE seem to be swapped: cache is a teacher cache, student-0 is a model",
         "xtk distill student-0 cache ..."),
        ("cache-teacher train.jsonl teacher -o x",
         "TEACHER and DATA seem to be swapped", "xtk cache-teacher teacher train.jsonl"),
        # 2: another kind of file
        ("distill student-0 cache --loss p-kl --projection train.jsonl -o x",
         "--projection must be a projection, but this is a data file", "xtk inspect train.jsonl"),
        # 3: a file of a folder
        ("distill student-0 cache --eval-data cache/manifest.json -o x", "this is the manifest of a teacher cache",
         "use its folder: cache"),
        ("cache-teacher teacher teacher/tokenizer.json -o x",
         "this is the file of a tokenizer", "use its folder: teacher"),
        # 4: numbers
        ("distill student-0 cache --learning-rate abc -o x",
         "--learning-rate is 'abc', but must be a number at least 0",
         "xtk distill --help"),
        ("distill student-0 cache --max-steps 1.5 -o x",
         "--max-steps is 1.5, but must be a whole number", "xtk distill --help"),
        ("distill student-0 cache --max-steps=-1 -o x",
         "--max-steps is -1, but must be a whole number at least 0", "--help"),
        # 5: options
        ("distill student-0 cache --learnig-rate 3 -o x",
         "no option called --learnig-rate; did you mean --learning-rate?", ""),
        ("distill student-0 cache --zzz -o x", "no option called --zzz", "xtk distill --help-all"),
        ("distil", "no command called 'distil'; did you mean distill?", ""),
        ("distill", "STUDENT is missing", "for example: xtk distill ./student cache"),
        ("distill student-0 cache -o", "-o needs a value: FOLDER", "xtk distill --help"),
        ("align student-0 teacher text more", "too many arguments: (more)", "xtk align --help"),
        # 6: neighbors
        ("distill student-O cache -o x", "this model folder does not exist; did you mean student-0?", ""),
        ("build-projection student-0 ./teahcer -o x",
         "this tokenizer folder does not exist; did you mean teacher?", ""),
        ("cache-teacher teacher trian.jsonl -o x", "does not exist; did you mean train.jsonl?", ""),
        ("cache-teacher teacher x.jsonl -o x",
         "this data file, folder or dataset does not exist", "use a file, a folder"),
        ("align student-0 ./nowhere text", "this tokenizer folder does not exist", "a hub id such as owner/name"),
        # 7: the teacher of a cache
        ("cache verify cache student-0", "has another tokenizer than the teacher that wrote this cache",
         "give the teacher of this cache, which was named teacher"),
        # 8: data is described, see test_inspect_files.py
        # 9: names
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


def test_missing_package_is_named_before_anything_is_loaded(inputs, monkeypatch):  # 10
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
