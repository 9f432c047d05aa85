"""Runs with `--teacher-shift`: from caches, with models in the process, on-policy; and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import small_inputs
from xtk_processes import run_xtk

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import TeacherDocument
from xtk.runs.metrics_file import read_metrics
from xtk.teachers.style_references import ShiftedTeacher

OPTIONS = ["--max-steps", 2, "--per-device-train-batch-size", 4, "--save-steps", 0, "--logging-steps", 1,
           "--learning-rate", 1e-2]  # fmt: skip
SHIFT = ["--teacher-shift", "--reference"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shift")


@pytest.fixture(scope="module")
def other(folder):
    """A reference: another model with the teacher's tokenizer."""
    return small_inputs.make_teacher(folder / "other", seed=7)


@pytest.fixture(scope="module")
def caches(pair, other, corpus, folder):
    """Caches of teacher and reference, and of the reference without the last document."""
    fewer = folder / "fewer.jsonl"
    fewer.write_text("".join(corpus.read_text().splitlines(keepends=True)[:-1]))
    for name, model, data, options in (
        ("teacher", pair.teacher, corpus, ["--top-k", 24, "--precision", "float32"]),
        ("reference", other, corpus, ["--top-k", 24, "--precision", "float32"]),
        ("fewer", other, fewer, ["--top-k", 24]),
        ("observed", other, corpus, ["--support", "none"]),
        ("student", pair.student, corpus, ["--top-k", 24]),
    ):
        run_xtk("cache-teacher", model, data, *options, "-o", folder / name)
    return folder


def lines_of(output):
    return read_metrics(output / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["byte-kl", "bpm", "p-kl"])
def test_a_run_from_caches_equals_one_with_models_in_the_process(pair, other, caches, corpus, tmp_path, loss):
    cached, online = tmp_path / "cached", tmp_path / "online"
    options = [*OPTIONS, "--loss", loss]
    run_xtk("distill", pair.student, "teacher", *SHIFT, "reference", *options, "-o", cached, cwd=caches)
    assert json.loads((cached / "recipe.json").read_text())["reference"] == [str(caches / "reference")]
    models = [f"{model}:top_k=24" for model in (pair.teacher, other)]
    run_xtk("distill", pair.student, corpus, "--teacher", models[0], *SHIFT, models[1], *options, "-o", online)
    of_runs = [[line["loss"] for line in lines_of(output)] for output in (cached, online)]
    np.testing.assert_allclose(*of_runs, rtol=1e-3)
    assert of_runs[0][0] > 1e-3
    plain = tmp_path / "plain"
    run_xtk("distill", pair.student, caches / "teacher", *options, "-o", plain)
    assert abs(lines_of(plain)[0]["loss"] - of_runs[0][0]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--packing"], ["--lora-r", 4, "--scale-kd-to", "ce", "--loss", "ce"]])
def test_with_a_reference_that_equals_the_teacher_the_student_stays_as_it_is(pair, corpus, tmp_path, options):
    copy = shutil.copytree(pair.teacher, tmp_path / "copy")
    output, losses = tmp_path / "run", [*options, "--loss", "byte-kl"]
    run_xtk("distill", pair.student, corpus, "--teacher", pair.teacher, *SHIFT, copy, *OPTIONS, *losses, "-o", output)
    first, second = lines_of(output)
    assert abs(first["byte-kl"]) < 1e-5
    if "--lora-r" not in options:
        assert first["gradient_norm"] < 1e-4
    else:  # the cross-entropy moves the student away from where it was
        assert second["byte-kl"] > 1e-6


@pytest.mark.slow
def test_on_policy_runs_train_toward_the_shifted_target(pair, other, tmp_path):
    prompts, norms = tmp_path / "prompts.jsonl", []
    prompts.write_text("".join(json.dumps({"prompt": f"{name} has"}) + "\n" for name in small_inputs.NAMES[:4]))
    copy = shutil.copytree(pair.teacher, tmp_path / "copy")
    for reference in (copy, other):
        output = tmp_path / f"run-{reference.name}"
        models = ["--teacher", f"{pair.teacher}:support=candidates", *SHIFT, f"{reference}:support=candidates"]
        run_xtk("distill-on-policy", pair.student, prompts, *models, *OPTIONS, "--max-completion-length", 8,
                "--loss", "bpm", "-o", output)  # fmt: skip
        norms.append(lines_of(output)[0]["gradient_norm"])
    assert norms[0] < 1e-4 < 1e-2 < norms[1]


@pytest.mark.slow
def test_entries_that_one_of_them_lacks_are_in_the_remainder_of_both(caches):
    teacher, reference = (TeacherCache(caches / name) for name in ("teacher", "reference"))
    plain, other = (cache.outputs([3], None)[0].teacher_logprobs for cache in (teacher, reference))
    (output,) = ShiftedTeacher(teacher, reference).outputs([3])
    assert isinstance(output, TeacherDocument)
    for kept, full in ((output.teacher_logprobs, plain), (output.shift_reference, other)):
        for position in range(len(plain)):
            entries = slice(kept.offsets[position], kept.offsets[position + 1])
            ours = dict(zip(kept.ids[entries].tolist(), kept.logprobs[entries].tolist(), strict=True))
            lists = [
                dict(zip(*(part[some.offsets[position] : some.offsets[position + 1]].tolist()
                           for part in (some.ids, some.logprobs)), strict=True))
                for some in (full, plain, other)
            ]  # fmt: skip
            assert ours.keys() == lists[1].keys() & lists[2].keys()
            assert all(ours[token] == lists[0][token] for token in ours)
            mass = sum(np.exp(list(ours.values()))) + kept.remainder_mass[position]
            assert mass == pytest.approx(1, abs=1e-4)


REFUSALS = {
    "student": "a --reference has another tokenizer than its teacher",
    "teacher": "a --reference is the teacher itself",
    "fewer": "document",
    "observed": "--teacher-shift needs exact probabilities of several tokens per position",
    "other": "--reference is not a cache, but the teacher is one",
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_references_that_do_not_fit_are_refused(pair, caches, tmp_path, name):
    arguments = [pair.student, caches / "teacher", *SHIFT, caches / name, *OPTIONS, "-o", tmp_path / "out"]
    assert REFUSALS[name] in run_xtk("distill", *arguments, code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--teacher-shift"], "--teacher-shift needs --reference"),
        (["--reference", "reference"], "--reference has no effect without --teacher-shift"),
        ([*SHIFT, "reference", "--loss", "uld"], "the loss uld cannot be used with --teacher-shift"),
        ([*SHIFT, "reference", "--loss", "p-kl:published=true"], "the loss p-kl:published=true cannot be used with"),
        ([*SHIFT, "reference", "--loss", "ce"], "--teacher-shift is given, but no --loss uses a teacher"),
        ([*SHIFT, "reference", "--reference", "reference"], "--reference is given 2 times for 1 teachers"),
        ([*SHIFT, "reference", "--loss", "alm"], "the loss alm cannot be used with --teacher-shift"),
    ],
)
def test_options_without_effect_and_other_losses_are_refused(pair, caches, tmp_path, options, what):
    options = [caches / part if part == "reference" else part for part in options]
    arguments = [pair.student, caches / "teacher", *options, *OPTIONS, "-o", tmp_path / "out"]
    assert what in run_xtk("distill", *arguments, code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "options", "what"),
    [
        ("self", [], "--reference self changes with the student"),
        ("other", ["--offload-student"], "--offload-student would leave the copy of the student"),
    ],
)
def test_references_that_follow_the_student_and_offloading_are_refused(
    pair, other, corpus, tmp_path, reference, options, what
):
    models = ["--teacher", pair.teacher, *SHIFT, other if reference == "other" else reference]
    run = ["distill", pair.student, corpus, *models, *OPTIONS, "--loss", "byte-kl", *options, "-o", tmp_path / "out"]
    assert what in run_xtk(*run, code=1).stderr


def test_weights_by_the_most_likely_token_are_refused(pair, caches, tmp_path):
    shutil.copytree(caches / "teacher", tmp_path / "second")
    run = [pair.student, caches / "teacher", tmp_path / "second", *SHIFT, caches / "reference", "--reference",
           caches / "reference", "--teacher-weights", "max-probability", *OPTIONS, "-o", tmp_path / "out"]  # fmt: skip
    assert "--teacher-shift cannot be used with --teacher-weights max-prob" in run_xtk("distill", *run, code=1).stderr


def test_positions_with_a_nan_of_one_of_them_are_left_out_of_both(caches):
    teacher, reference = (TeacherCache(caches / name).outputs([3], None)[0] for name in ("teacher", "reference"))
    damaged = reference.teacher_logprobs.logprobs.copy()
    damaged[-1] = np.nan
    reference = reference.with_teacher_logprobs(replace(reference.teacher_logprobs, logprobs=damaged))

    class Scored:
        def __init__(self, document):
            self.document = document

        def outputs(self, documents, sample_set=0):
            return [self.document]

    (output,) = ShiftedTeacher(Scored(teacher), Scored(reference)).outputs([3])
    kept = output.without_nan()
    assert len(kept.teacher_logprobs) == len(kept.shift_reference) < len(teacher.teacher_logprobs)
    assert np.array_equal(kept.teacher_logprobs.ids, kept.shift_reference.ids)
    assert np.isfinite(kept.shift_reference.logprobs).all()
