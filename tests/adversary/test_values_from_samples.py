"""Reported divergences are true distances: a model compared with itself gives 0, also with the default cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_inputs

from xtk.runs.metrics_file import read_metrics

TEXTS = small_inputs.sentences(40, seed=77)
TRAINING = (
    "--max-steps",
    1,
    "--logging-steps",
    1,
    "--learning-rate",
    "1e-12",
    "--per-device-train-batch-size",
    40,
    "-q",
)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory) -> Path:
    """Return a folder with two models that share a tokenizer, and sampled and complete caches of the teacher."""
    folder = tmp_path_factory.mktemp("values")
    small_inputs.write_jsonl(folder / "data.jsonl", TEXTS)
    small_inputs.make_student(folder / "teacher", seed=5)
    small_inputs.make_student(folder / "student", seed=6)
    for name in ("fine", "standard", "coarse", "float32"):
        run("cache-teacher", "teacher", "data.jsonl", "--precision", name, "-o", name, "-q", cwd=folder)
    run(
        "cache-teacher",
        "teacher",
        "data.jsonl",
        "--top-k",
        640,
        "--precision",
        "float32",
        "-o",
        "whole",
        "-q",
        cwd=folder,
    )
    return folder


def last_metrics(folder: Path, run_folder: str) -> dict:
    (path,) = (folder / run_folder).glob("**/metrics.jsonl")
    values: dict = {}
    for line in read_metrics(path):
        values.update(line)
    return values


@pytest.mark.parametrize("precision", ["standard", "coarse"])
def test_model_distilled_from_itself_reports_0_and_full_agreement(run, folder, precision):
    output = f"itself-{precision}"
    run(
        "distill", "teacher", precision, "--loss", "forward-kl", "--loss", "byte-kl", "--eval-data", precision,
        *TRAINING, "-o", output, cwd=folder,
    )  # fmt: skip
    metrics = last_metrics(folder, output)
    for name in ("loss", "distillation_loss", "forward-kl", "byte-kl", "eval_loss", "eval_forward-kl", "eval_byte-kl"):
        # An untrained model has the same entropy everywhere, so its rounding error, half a step, does not average out.
        terms = 2 if name.endswith(("loss", "distillation_loss")) else 1
        assert abs(metrics[name]) < terms * {"standard": 0.04, "coarse": 0.075}[precision], name
    assert metrics["eval_top1_agreement"] == 1.0
    (evaluated,) = map(
        json.loads, run("evaluate", "teacher", precision, "--json", "-q", cwd=folder).stdout.splitlines()
    )
    assert evaluated["top1_agreement"] == 1.0
    assert evaluated["forward-kl"] == pytest.approx(metrics["eval_forward-kl"], abs=1e-6)


def test_kd_scale_from_samples_matches_complete_distributions_and_is_bounded(run, folder):
    factors = {}
    for student, cache in (
        ("student", "standard"),
        ("student", "whole"),
        ("teacher", "standard"),
        ("teacher", "whole"),
    ):
        output = f"{student}-from-{cache}"
        run(
            "distill", student, cache, "--loss", "ce", "--loss", "forward-kl", "--scale-kd-to", "ce", *TRAINING,
            "-o", output, cwd=folder,
        )  # fmt: skip
        factors[student, cache] = last_metrics(folder, output)["kd_scale"]
    assert factors["student", "standard"] == pytest.approx(factors["student", "whole"], rel=0.1)
    assert factors["teacher", "whole"] == 100
    assert 0 < factors["teacher", "standard"] <= 100
