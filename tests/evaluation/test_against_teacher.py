"""A model against a teacher: what it says is what training says of held-out caches, and what full logits say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from recorded_training_steps import inputs_of, recipe_of

from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.parallel_config import ParallelConfig
from xtk.training.student_with_losses import StudentWithLoss

TEXTS = small_inputs.sentences(12, seed=21)


@pytest.fixture(scope="module")
def folder(run, pair, tmp_path_factory) -> Path:
    """Documents, and what the teacher and the student say of them."""
    folder = tmp_path_factory.mktemp("against")
    small_inputs.write_jsonl(folder / "data.jsonl", TEXTS)
    for name, options in {"top": ("--top-k", 16, "--precision", "float32"), "none": ("--support", "none")}.items():
        run("cache-teacher", pair.teacher, "data.jsonl", *options, "-o", name, "-q", cwd=folder)
    return folder


def told(run, *arguments: object, cwd: Path) -> list[dict]:
    return [json.loads(line) for line in run("evaluate", *arguments, "--json", "-q", cwd=cwd).stdout.splitlines()]


@pytest.mark.parametrize(("cache", "loss"), [("top", "byte-kl"), ("none", "alm")])
def test_it_is_what_training_says_of_a_held_out_cache(run, pair, folder, cache, loss):
    (found,) = told(run, pair.student, cache, cwd=folder)
    inputs = inputs_of(pair.student, [folder / cache], recipe_of([loss]), (), (folder / cache,))
    model = StudentWithLoss(BackboneWithHead(load_causal_lm(pair.student)))
    expected = HeldOutEvaluator(
        inputs.held_out, model, inputs.tokenizer, 256, 0, ParallelConfig(), torch.device("cpu")
    )()
    names = ["bits_per_byte", loss, *(["top1_agreement"] if cache == "top" else [])]
    assert {name: found[name] for name in names} == pytest.approx(
        {name: expected[f"eval_{name}"] for name in names}, rel=1e-5
    )
    assert found["teacher"] == pair.teacher.name
    assert ("top1_agreement" in found) == (cache == "top")
    assert all(found[f"{name}_error"] > 0 for name in names)


def dense_kl(student: Path, teacher: Path) -> float:
    """The mean divergence of two models with one tokenizer, a token, over the whole vocabulary in float64."""
    models = [load_causal_lm(one, dtype=torch.float64).eval() for one in (teacher, student)]
    tokenizer = Tokenizer(student)
    nats, count = 0.0, 0
    for (encoded,) in (tokenizer.encode([text]) for text in TEXTS):
        ids = torch.tensor([[tokenizer.start_id, *encoded.ids.tolist(), tokenizer.end_id]])
        with torch.no_grad():
            probs = [torch.softmax(model(input_ids=ids).logits[0, :-1], -1) for model in models]
        # Rows above the tokens of the vocabulary mean nothing: they are told apart by nobody.
        named = [torch.cat([one[:, : len(tokenizer)], one[:, len(tokenizer) :].sum(1, True)], 1) for one in probs]
        theirs, ours = (one.log() for one in named)
        nats += float((named[0] * (theirs - ours)).sum())
        count += len(theirs)
    return nats / count


@pytest.mark.slow
def test_with_the_teachers_tokenizer_it_is_the_divergence_of_full_distributions(run, pair, folder, tmp_path):
    other = small_inputs.make_student(tmp_path / "other", seed=9)
    expected = dense_kl(pair.student, other)
    (whole,) = told(run, pair.student, "data.jsonl", "--teacher", f"{other}:top_k=all", cwd=folder)
    assert whole["forward-kl"] == pytest.approx(expected, rel=1e-4)
    (part,) = told(run, pair.student, "data.jsonl", "--teacher", f"{other}:top_k=8", cwd=folder)
    assert 0 < part["forward-kl"] < expected  # what is not told apart cannot diverge
    itself, beside = told(run, other, "data.jsonl", "--teacher", other, "--compare-to", pair.student, cwd=folder)
    assert itself["top1_agreement"] == 1.0
    assert abs(itself["forward-kl"]) < 1e-5
    assert abs(itself["byte-kl"]) < 1e-5
    for name in ("forward-kl", "byte-kl", "top1_agreement"):
        assert beside[f"{name}_difference"] == pytest.approx(itself[name] - beside[name], abs=1e-9)
        assert beside[f"{name}_difference_error"] == pytest.approx(beside[f"{name}_error"], abs=1e-6)  # it has none


@pytest.mark.long
def test_models_side_by_side_are_paired_by_documents(run, pair, folder, tmp_path):
    first, second = told(run, pair.student, "data.jsonl", "--compare-to", pair.teacher, cwd=folder)
    assert "difference" not in first
    assert second["difference"] == pytest.approx(first["bits_per_byte"] - second["bits_per_byte"])
    assert first["bytes"] == second["bytes"] == sum(len(text.encode()) for text in TEXTS)
    independent = math.hypot(first["bits_per_byte_error"], second["bits_per_byte_error"])
    assert 0 < second["difference_error"] < independent
    assert (first["window"], first["stride"]) == (256, 128)
    table = run("evaluate", pair.student, "top", "--compare-to", pair.teacher, cwd=folder).stdout
    assert "teacher: teacher" in table
    assert f"{pair.student} minus this" in table
    line = run("evaluate", pair.student, "data.jsonl", "--max-length", 16, "-q", cwd=folder).stdout
    assert "windows of 16 tokens, stride 8" in line
    assert " ± " in line


def test_a_single_document_has_no_error(run, pair, tmp_path):
    (tmp_path / "one.txt").write_text(TEXTS[0])
    (found,) = told(run, pair.student, "one.txt", cwd=tmp_path)
    assert found["bits_per_byte_error"] is None
    assert np.isfinite(found["bits_per_byte"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("top", "none"), "a teacher cache as DATA cannot be combined with other DATA"),
        (("top", "--teacher", "top"), "a teacher cache as DATA cannot be combined with other DATA"),
        (("top", "--columns", "text=a"), "--columns does not apply to a teacher cache"),
    ],
)
def test_what_makes_no_sense_beside_a_cache_is_refused(run, pair, folder, arguments, message):
    assert message in run("evaluate", pair.student, *arguments, cwd=folder, code=1).stderr


def test_teachers_and_categories_are_about_texts(run, pair, folder):
    for option in (("--by-category",), ("--teacher", pair.teacher)):
        done = run("evaluate", pair.student, "data.jsonl", "--reward", "exact", *option, cwd=folder, code=2)
        assert "without --reward" in done.stderr
