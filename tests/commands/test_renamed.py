"""Earlier spellings of commands and options answer with the new one, and run nothing."""

from __future__ import annotations

import json

import pytest
from xtk_processes import run_here

from xtk.cli import COMMANDS
from xtk.commands.renamed import RENAMED
from xtk.errors import XtkError


@pytest.fixture
def answer(tmp_path):
    """Return a function that runs a command line and returns its exit code and messages."""

    def run(*arguments: object) -> tuple[int, str]:
        done = run_here(*arguments, cwd=tmp_path, code=None)
        assert done.stdout == ""
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize(
    ("arguments", "now"),
    [
        (("import-cache", "answers.jsonl", "-o", "c"), "xtk cache import"),
        (("export-cache", "c", "-o", "c.parquet"), "xtk cache export"),
        (("cache-teacher", "--merge", "a", "b", "-o", "c"), "xtk cache merge"),
        (("distill", "s", "p.jsonl", "--on-policy", "--teacher", "t", "-o", "r"), "xtk distill-on-policy"),
        (("distill", "s", "p.jsonl", "--on_policy", "-o", "r"), "xtk distill-on-policy"),
        (("sweep", "s", "p.jsonl", "--on-policy", "-o", "r"), "xtk sweep --command distill-on-policy"),
        (("evaluate", "s", "--tasks=mmlu"), "xtk evaluate-tasks MODEL TASK"),
        (("evaluate", "s", "p.jsonl", "--reward", "gsm8k"), "xtk evaluate-answers --reward"),
        (("evaluate", "d", "p.jsonl", "--draft-for", "t"), "xtk evaluate-draft DRAFT TARGET PROMPTS"),
        (("inspect", "c", "--teacher", "t"), "xtk cache verify CACHE TEACHER"),
    ],
)
def test_earlier_spellings_answer_with_the_new_one(answer, tmp_path, arguments, now):
    code, message = answer(*arguments)
    assert code == 2
    assert message.startswith("xtk: `xtk ")
    assert message.endswith(f"` is now `{now}`\n")
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_earlier_options_in_a_config_file_answer_with_the_new_command(answer, tmp_path):
    (tmp_path / "run.yaml").write_text("on-policy: true\n")
    code, message = answer("distill", "s", "p.jsonl", "--config", "run.yaml", "-o", "r")
    assert (code, "use `xtk distill-on-policy --config run.yaml`" in message) == (2, True)
    (tmp_path / "run.yaml").write_text("merge: true\n")
    assert answer("cache-teacher", "a", "b", "--config", "run.yaml", "-o", "c") == (
        2, "xtk: `xtk cache-teacher --merge` is now `xtk cache merge`\n"
    )  # fmt: skip


def test_every_new_spelling_is_a_command():
    for spelling in RENAMED.values():
        words = spelling.split()[1:]
        assert words[0] in COMMANDS or " ".join(words[:2]) in COMMANDS


def test_the_group_lists_its_commands_and_suggests_names(answer):
    assert answer("cache", "exprot") == (
        2, "xtk: no command called 'exprot'; did you mean export?\n"
    )  # fmt: skip
    shown = run_here("cache", "--help").stdout
    assert all(f"\n  {name} " in shown for name in ("merge", "import", "export", "verify"))


def test_recipe_of_an_on_policy_run_names_its_command(answer, tmp_path):
    identity = {"losses": ["byte-kl"], "inputs": {"student": {"weights": "w", "tokenizer": "t"}}}
    recipe = {"kind": "recipe", "version": 3, "identity": identity, "student": "s", "cache": ["p.jsonl"]}
    (tmp_path / "r.json").write_text(json.dumps({**recipe, "on_policy": True, "num_generations": 2}))
    code, message = answer("distill", "--config", "r.json", "-o", "r")
    assert (code, "use `xtk distill-on-policy --config r.json`" in message) == (2, True)
    (tmp_path / "r.json").write_text(json.dumps({**recipe, "on_policy": False, "num_generations": 1}))
    code, message = answer("distill-on-policy", "--config", "r.json", "-o", "r")
    assert (code, "use `xtk distill --config r.json`" in message) == (2, True)
    code, message = answer("distill", "--config", "r.json", "-o", "r")  # its keys are read, and the student is missing
    assert code == 1
    assert "num_generations" not in message


def test_errors_of_renamed_commands_are_usage_errors():
    from xtk.commands.renamed import renamed_error

    failure = renamed_error("export-cache")
    assert isinstance(failure, XtkError)
    assert failure.exit_code == 2
    assert renamed_error("export") is None
