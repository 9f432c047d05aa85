"""On-policy runs with a style reference: what is subtracted, and references that do not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import small_inputs
from xtk_processes import run_xtk

from xtk.runs.metrics_file import read_metrics

OPTIONS = ["--max-completion-length", 8, "--max-steps", 1, "--per-device-train-batch-size", 4, "--save-steps", 0,
           "--learning-rate", 1e-2, "--loss"]  # fmt: skip
OFFSET = "policy-gradient:offset=0.5"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} has"}) + "\n" for name in small_inputs.NAMES[:4]))
    return path


def run(pair, prompts, output, loss, *options, code=0):
    arguments = [pair.student, prompts, "--teacher", pair.teacher, *options, *OPTIONS, loss, "-o", output]
    return run_xtk("distill-on-policy", *arguments, code=code)


@pytest.mark.slow
def test_a_reference_that_equals_the_teacher_leaves_the_student_as_it_is(pair, prompts, tmp_path):
    """With R = T only the distance to the frozen student is left, which is 0 at the first step."""
    copy = shutil.copytree(pair.teacher, tmp_path / "copy")
    other = small_inputs.make_teacher(tmp_path / "other", seed=7)
    norms = []
    for reference in (copy, other):
        output = tmp_path / f"run-{reference.name}"
        run(pair, prompts, output, OFFSET, "--reference", reference)
        (line,) = read_metrics(output / "metrics.jsonl")
        norms.append(line["gradient_norm"])
    assert norms[0] < 1e-5 < 1e-2 < norms[1]


@pytest.mark.parametrize(
    ("loss", "references", "what"),
    [
        (OFFSET, ["student"], "a --reference has another tokenizer than its teacher"),
        (OFFSET, ["teacher"], "a --reference is the teacher itself"),
        (OFFSET, ["teacher", "teacher"], "--reference is given 2 times for 1 teachers"),
        (OFFSET, [], f"the loss {OFFSET} needs --reference"),
        ("policy-gradient", ["teacher"], "--reference has no effect without an offset"),
    ],
)
def test_references_that_do_not_fit_are_refused(pair, prompts, tmp_path, loss, references, what):
    options = [part for name in references for part in ("--reference", getattr(pair, name))]
    assert what in run(pair, prompts, tmp_path / "out", loss, *options, code=1).stderr
