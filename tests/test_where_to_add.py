"""The table "Where do I add ...?" of docs/contributing.md: its files exist, and its additions are all that it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<places>[^|]+) \| (?P<table>[^|]+) \|$", re.MULTILINE)

TOY_LOSS = '''"""toy-kl: a loss of this test."""

from __future__ import annotations

from dataclasses import dataclass

from xtk.losses.alm import ALM


@dataclass(frozen=True)
class ToyKL(ALM):
    """toy-kl: the loss alm. Option: `strength`."""

    strength: float = 1.0
'''

TOY_TEACHER = '''"""Teacher backend `uniform`: all tokens are equally probable."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.teachers.backend_interface import TeacherBackend


class UniformTeacher(TeacherBackend):
    """Scores every token with 1 / U."""

    support_kinds: ClassVar[frozenset[str]] = frozenset({"none"})

    def __init__(self, request):
        self.vocab = len(request.tokenizer)

    @classmethod
    def weights_identity(cls, model, options):
        return "uniform"

    @property
    def vocab_size(self):
        return self.vocab

    def score(self, documents, candidate_ids=None):
        return [self._score(document) for document in documents]

    def _score(self, document):
        positions = np.flatnonzero(document.train_mask).astype(np.int32)
        size, nothing = len(positions), np.zeros(0, np.int32)
        logprobs = np.full(size, -np.log(self.vocab), np.float32)
        return StoredLogprobs(
            positions, np.arange(size + 1, dtype=np.int64), document.ids[positions], logprobs, np.zeros(1, np.int64),
            nothing, nothing, 1 - np.exp(logprobs), logprobs, -logprobs,
        )
'''


def rows() -> dict[str, tuple[list[str], str]]:
    text = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    section = text.split("## Where do I add ...?")[1].split("\n## ")[0]
    found = [match.groups() for match in ROW.finditer(section)]
    return {what.strip(): (re.findall(r"`([^`]+)`", places), table.strip()) for what, places, table in found[2:]}


def test_every_file_and_table_is_there():
    table_of = rows()
    assert {
        "loss",
        "teacher backend",
        "generation backend (rollouts)",
        "data format",
        "option",
        "command",
        "metric of online teachers",
        "compression of shards",
    } <= table_of.keys()
    for what, (places, table) in table_of.items():
        assert 1 <= len(places) <= 2, what
        for place in places:
            if place.startswith("xtk/") and "NAME" not in place:
                assert (ROOT / place).exists(), (what, place)
            elif place.startswith("xtk/"):
                assert (ROOT / place).parent.is_dir(), (what, place)
        if table != "-":
            name, _, path = table.replace("`", "").partition(" in ")
            assert re.search(rf"^{name}\b.* = ", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), (what, table)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package with a loss, a teacher backend and an option, added as the table says."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "xtk", folder / "xtk", ignore=shutil.ignore_patterns("__pycache__"))
    table_of = rows()

    def add_line(path: str, before: str, line: str) -> None:
        text = (folder / path).read_text(encoding="utf-8")
        assert text.count(before) == 1
        (folder / path).write_text(text.replace(before, before + line), encoding="utf-8")

    for what, file, code, key in (
        ("loss", "toy_kl.py", TOY_LOSS, '    "toy-kl": "xtk.losses.toy_kl:ToyKL",\n'),
        ("teacher backend", "uniform.py", TOY_TEACHER, '    "uniform": "xtk.teachers.uniform:UniformTeacher",\n'),
    ):
        (place,), table = table_of[what]
        name, _, path = table.replace("`", "").partition(" in ")
        (folder / place.replace("NAME.py", file)).write_text(code, encoding="utf-8")
        add_line(path, f"{name} = {{\n", key)
    add_line("xtk/options/training_options.py", "class OptimizationOptions:\n", '    """Steps."""\n\n'
             '    toy_scale: float = option(1.0, "A number of this test.", min=0)\n')  # fmt: skip
    return folder


def run_changed(changed: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xtk", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(changed)}
    done = subprocess.run(command, cwd=changed, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
@pytest.mark.slow
def test_a_loss_a_teacher_and_an_option_are_one_file_and_one_line_each(changed, pair, corpus, tmp_path):
    cache, output = tmp_path / "cache", tmp_path / "run"
    run_changed(
        changed, "cache-teacher", pair.teacher, corpus, "--backend", "uniform", "--support", "none", "-o", cache
    )
    run_changed(changed, "distill", pair.student, cache, "--loss", "toy-kl:strength=2", "--max-steps", 1,
                "--toy-scale", 3, "-o", output)  # fmt: skip
    recipe = json.loads((output / "recipe.json").read_text())
    assert "toy-kl:strength=2" in json.dumps(recipe)
    assert '"toy_scale": 3' in json.dumps(recipe)
    assert "--toy-scale" in run_changed(changed, "distill", "--help-all").stdout
