"""Completion of commands, options and values: in a real bash, and what the other shells' scripts read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from xtk_processes import run_here

IN_BASH = """
eval "$(xtk completion bash)"
complete_line() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _xtk_completion xtk
    echo "${COMPREPLY[*]}"
}
complete_line xtk dist
complete_line xtk distill --learn
complete_line xtk distill student cache --mixed-precision ""
complete_line xtk cache mer
complete -p xtk
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Return environment variables with which a program `xtk` is on the path."""
    program = tmp_path / "xtk"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m xtk "$@"\n')
    program.chmod(0o755)
    root = str(Path(__file__).parent.parent.parent)
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": root}


@pytest.mark.slow
def test_bash_completes_commands_options_and_values(environment):
    done = subprocess.run(
        ["bash", "--norc", "-c", IN_BASH], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "distill distill-on-policy", "--learning-rate", "auto no bf16", "merge",
        "complete -o default -F _xtk_completion xtk",
    ]  # fmt: skip
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("shell", "variables"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "xtk distill --learn"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "xtk distill --learn", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_other_shells_get_the_same_words(environment, shell, variables):
    script = run_here("completion", shell).stdout
    assert f"_XTK_COMPLETE=complete_{shell}" in script
    variables = {**environment, **variables, "_XTK_COMPLETE": f"complete_{shell}"}
    done = subprocess.run(["xtk"], env=variables, capture_output=True, text=True, check=False)
    assert "--learning-rate" in done.stdout


def test_another_shell_is_refused():
    done = run_here("completion", "zhs", code=1)
    assert "no value of SHELL called 'zhs'; did you mean zsh?" in done.stderr
