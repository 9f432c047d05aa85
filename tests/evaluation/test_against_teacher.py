"""Evaluation against a teacher: metrics equal those of training on held-out caches and of full logits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from recorded_training_steps import make_train_config, open_run_inputs

from xtk.cache.reader import TeacherCache
from xtk.cache.writer import ShardedCacheWriter
from xtk.files.storage_folders import LocalFolder
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.parallel.parallel_config import ParallelConfig
from xtk.text.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.student_with_losses import StudentWithLoss

TEXTS = small_inputs.sentences(12, seed=21)


@pytest.fixture(scope="module")
def folder(run, pair, tmp_path_factory) -> Path:
    """Return a folder with documents and teacher caches of them, with and without a support."""
    folder = tmp_path_factory.mktemp("against")
    small_inputs.write_jsonl(folder / "data.jsonl", TEXTS)
    for name, options in {"top": ("--top-k", 16, "--precision", "float32"), "none": ("--support", "none")}.items():
        run("cache-teacher", pair.teacher, "data.jsonl", *options, "-o", name, "-q", cwd=folder)
    return folder


def evaluate_json(run, *arguments: object, cwd: Path) -> list[dict]:
    return [json.loads(line) for line in run("evaluate", *arguments, "--json", "-q", cwd=cwd).stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "loss"), [("top", "byte-kl"), ("none", "alm")])
def test_metrics_equal_those_of_training_on_a_held_out_cache(run, pair, folder, cache, loss):
    (found,) = evaluate_json(run, pair.student, cache, cwd=folder)
    inputs = open_run_inputs(pair.student, [folder / cache], make_train_config([loss]), (), (folder / cache,))
    model = StudentWithLoss(BackboneWithHead(load_causal_lm(ModelRef(pair.student))))
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


def write_older_cache(source: Path, folder: Path) -> Path:
    """Write a cache as before sampled tokens had log-probabilities."""
    cache = TeacherCache(source)
    codec = {"name": "raw", "precision": "float32"} | {
        name: cache.header["codec"][name] for name in ("num_samples", "num_sample_sets")
    }
    writer = ShardedCacheWriter(LocalFolder(folder), {**cache.header, "codec": codec}, [len(cache)])
    writer.write_shard(0, list(cache))
    writer.write_shared_files({name: (source / name).read_bytes() for name in cache.manifest["files"]})
    writer.finish()
    return folder


@pytest.mark.slow
def test_an_older_held_out_cache_is_compared_as_with_an_older_training_cache(run, pair, folder, tmp_path):
    """Its sampled tokens have no log-probabilities, so that jsd reads only the exact tokens."""
    run("cache-teacher", pair.teacher, folder / "data.jsonl", "-o", "new", cwd=tmp_path)
    old = write_older_cache(tmp_path / "new", tmp_path / "old")
    model = StudentWithLoss(BackboneWithHead(load_causal_lm(ModelRef(pair.teacher))))
    with torch.no_grad():
        for weights in model.parameters():
            weights *= 1.2
    found = []
    for training in (tmp_path / "new", old):
        inputs = open_run_inputs(pair.teacher, [training], make_train_config(["jsd", "forward-kl"]), (), (old,))
        evaluator = HeldOutEvaluator(
            inputs.held_out, model, inputs.tokenizer, 256, 0, ParallelConfig(), torch.device("cpu")
        )
        found.append(evaluator())
    assert found[0] == found[1]
    assert found[0]["eval_jsd"] > 0


def reference_measures(student: Path, teacher: Path) -> tuple[float, float]:
    """Return the mean divergence and the overlap per token of two models with one tokenizer, in float64."""
    models = [load_causal_lm(ModelRef(one, dtype="float64")).eval() for one in (teacher, student)]
    tokenizer = Tokenizer(student)
    nats, overlap, count = 0.0, 0.0, 0
    for (encoded,) in (tokenizer.encode([text]) for text in TEXTS):
        ids = torch.tensor([[tokenizer.start_ids[0], *encoded.ids.tolist(), tokenizer.end_id]])
        with torch.no_grad():
            probs = [torch.softmax(model(input_ids=ids).logits[0, :-1], -1) for model in models]
        # Padding rows above the vocabulary are merged into one cell: they have no meaning.
        vocabulary_probs = [
            torch.cat([one[:, : len(tokenizer)], one[:, len(tokenizer) :].sum(1, True)], 1) for one in probs
        ]
        teacher_logprobs, student_logprobs = (one.log() for one in vocabulary_probs)
        nats += float((vocabulary_probs[0] * (teacher_logprobs - student_logprobs)).sum())
        overlap += float(torch.minimum(*vocabulary_probs).sum())
        count += len(teacher_logprobs)
    return nats / count, overlap / count


@pytest.mark.long
@pytest.mark.slow
def test_forward_kl_with_a_shared_tokenizer_equals_that_of_full_distributions(run, pair, folder, tmp_path):
    teacher = small_inputs.make_student(tmp_path / "other", seed=9)
    expected, overlap = reference_measures(pair.student, teacher)
    (full,) = evaluate_json(run, pair.student, "data.jsonl", "--teacher", f"{teacher}:top_k=all", cwd=folder)
    assert full["forward-kl"] == pytest.approx(expected, rel=1e-4)
    assert full["acceptance_on_text"] == pytest.approx(overlap, rel=1e-4)
    (top8,) = evaluate_json(run, pair.student, "data.jsonl", "--teacher", f"{teacher}:top_k=8", cwd=folder)
    assert 0 < top8["forward-kl"] < expected  # tokens in the remainder cell cannot diverge
    samples = f"{teacher}:top_k=8,num_samples=200"
    (sampled,) = evaluate_json(run, pair.student, "data.jsonl", "--teacher", samples, cwd=folder)
    assert sampled["forward-kl"] == pytest.approx(expected, rel=0.1)
    first, second = evaluate_json(
        run, teacher, "data.jsonl", "--teacher", teacher, "--compare-to", pair.student, cwd=folder
    )
    assert first["top1_agreement"] == 1.0
    assert abs(first["forward-kl"]) < 1e-5
    assert first["acceptance_on_text"] == pytest.approx(1.0, abs=1e-4)
    assert abs(first["byte-kl"]) < 1e-5
    for name in ("forward-kl", "byte-kl", "top1_agreement"):
        assert second[f"{name}_difference"] == pytest.approx(first[name] - second[name], abs=1e-9)
        assert second[f"{name}_difference_error"] == pytest.approx(
            second[f"{name}_error"], abs=1e-6
        )  # the first has none


@pytest.mark.long
def test_two_models_are_compared_by_paired_documents(run, pair, folder, tmp_path):
    first, second = evaluate_json(run, pair.student, "data.jsonl", "--compare-to", pair.teacher, cwd=folder)
    assert "difference" not in first
    assert second["difference"] == pytest.approx(first["bits_per_byte"] - second["bits_per_byte"])
    assert first["bytes"] == second["bytes"] == sum(len(text.encode()) for text in TEXTS)
    independent = math.hypot(first["bits_per_byte_error"], second["bits_per_byte_error"])
    assert 0 < second["difference_error"] < independent
    assert (first["window"], first["stride"]) == (256, 128)
    table = run("evaluate", pair.student, "top", "--compare-to", pair.teacher, cwd=folder).stdout
    assert "teacher: teacher" in table
    assert f"{pair.student} minus {pair.teacher}" in table
    line = run("evaluate", pair.student, "data.jsonl", "--max-length", 16, "-q", cwd=folder).stdout
    assert "windows of 16 tokens, stride 8" in line
    assert " ± " in line


def test_single_document_has_no_standard_error(run, pair, tmp_path):
    (tmp_path / "one.txt").write_text(TEXTS[0])
    (found,) = evaluate_json(run, pair.student, "one.txt", cwd=tmp_path)
    assert found["bits_per_byte_error"] is None
    assert np.isfinite(found["bits_per_byte"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("top", "none"), "a teacher cache as DATA cannot be combined with other DATA"),
        (("top", "--teacher", "top"), "a teacher cache as DATA cannot be combined with other DATA"),
        (("top", "--columns", "text=a"), "--columns does not apply to a teacher cache"),
    ],
)
def test_options_that_do_not_apply_to_a_cache_are_refused(run, pair, folder, arguments, message):
    assert message in run("evaluate", pair.student, *arguments, cwd=folder, code=1).stderr
