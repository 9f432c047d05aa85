"""Several teachers of one student, weights of documents, and the losses that `--loss auto` selects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_inputs
import torch
from accelerate import Accelerator
from recorded_training_steps import make_train_config, open_run_inputs, record_steps

from xtk.batches.data_sources import match_documents
from xtk.batches.losses_per_teacher import AUTO_LOSSES, assign_losses, open_teachers
from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.losses import AUTO_LOSS
from xtk.losses.spec import LossSpec, parse_losses
from xtk.text.tokenizer import Tokenizer

TEXTS = small_inputs.sentences(8, seed=11)
ROUTES = ["teacher", "twin", "twin", "teacher", "twin", "teacher", "teacher", "teacher"]
WEIGHTS = [1, 2, 1, 0, 3, 1, 2, 1]
Step = Callable[..., tuple[dict[str, torch.Tensor], dict[str, float]]]


@pytest.fixture(scope="module")
def folder(run, pair, tmp_path_factory) -> Path:
    """Caches of three teachers: `teacher` and `other` have one tokenizer, `alike` has the student's; and data."""
    folder = tmp_path_factory.mktemp("teachers")
    other, alike = (
        small_inputs.make_teacher(folder / "other", seed=5),
        small_inputs.make_student(folder / "alike", seed=7),
    )
    small_inputs.write_jsonl(folder / "plain.jsonl", TEXTS)
    small_inputs.write_jsonl(folder / "turned.jsonl", TEXTS[::-1])
    small_inputs.write_jsonl(folder / "listed.jsonl", np.repeat(TEXTS, WEIGHTS).tolist())
    lines = [
        {"text": text, "by": route, "quality": weight}
        for text, route, weight in zip(TEXTS, ROUTES, WEIGHTS, strict=True)
    ]
    for name, kept in {"columns": lines, "head": lines[:5], "tail": lines[5:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    exact = ("--top-k", 12, "--precision", "float32", "-q")
    sampled = ("--support", "top-k+sample", "--top-k", 4, "--precision", "float32", "-q")
    cache_arguments: dict[str, tuple[Any, ...]] = {
        "teacher": (pair.teacher, "plain.jsonl", *exact),
        "other": (other, "turned.jsonl", *exact),
        "alike": (alike, "plain.jsonl", *exact),
        "drawn": (pair.teacher, "plain.jsonl", *sampled),
        "none": (pair.teacher, "plain.jsonl", "--support", "none", "-q"),
        "weighted": (pair.teacher, "columns.jsonl", *exact, "--weight-column", "quality"),
        "listed": (pair.teacher, "listed.jsonl", *exact),
        "head": (pair.teacher, "head.jsonl", *exact),
        "tail": (pair.teacher, "tail.jsonl", *exact),
    }
    for name, arguments in cache_arguments.items():
        run("cache-teacher", *arguments, "-o", f"c-{name}", cwd=folder)
    run("cache", "merge", "c-head", "c-tail", "-o", "c-merged", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def step(pair, folder) -> Step:
    """Return a function that takes one step on all documents and returns the gradients and the metrics."""
    accelerator = Accelerator(cpu=True)

    def take_step(*names: str, losses: tuple[str, ...] = (AUTO_LOSS,), **options: Any) -> tuple[Any, Any]:
        recipe = make_train_config(list(losses), **options)
        inputs = open_run_inputs(pair.student, [folder / f"c-{name}" for name in names], recipe)
        gradients, results = record_steps(accelerator, pair.student, inputs, recipe, len(inputs.source), steps=1)
        return gradients, results["losses"][0]

    return take_step


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * scale)


def weighted_sum(*parts: tuple[float, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(weight * gradients[name] for weight, gradients in parts) for name in parts[0][1]}


# --- several teachers per document


@pytest.mark.slow
def test_a_teacher_with_all_the_weight_gives_the_gradients_of_that_teacher_alone(step):
    losses = ("ce:weight=0.5", "byte-kl")
    gradients, metrics = step("teacher", losses=losses)
    gradients_of_both, metrics_of_both = step("teacher", "alike", losses=losses, teacher_weights="1,0")
    assert_same(gradients_of_both, gradients)
    assert metrics_of_both["byte-kl/teacher"] == pytest.approx(metrics["byte-kl"])
    assert metrics_of_both["loss"] == pytest.approx(metrics["loss"])


@pytest.mark.slow
def test_two_equal_teachers_give_the_gradients_of_one_for_any_weights(step):
    gradients, metrics = step("teacher")
    for weights in ("", "0.3,0.7", "ce:alpha=5", "entropy:alpha=2,per=span", "max-probability:per=batch"):
        gradients_of_both, metrics_of_both = step("teacher", "teacher", teacher_weights=weights)
        assert_same(gradients_of_both, gradients)
        assert metrics_of_both["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        assert metrics_of_both["distillation_loss"] == pytest.approx(metrics["byte-kl"], rel=1e-5)
        if weights[:1].isalpha():
            assert metrics_of_both["teacher_weight/teacher-1"] == pytest.approx(0.5)
    assert_same(step("teacher", "teacher", combine_teachers="select")[0], gradients)


def test_combined_loss_is_the_weighted_sum_over_teachers_with_their_own_losses(step):
    gradients, metrics = step("teacher", "alike", losses=("byte-kl:weight=2", "forward-kl"), teacher_weights="3,1")
    other_tokenizer, _ = step("teacher", losses=("byte-kl:weight=2",))
    same_tokenizer, _ = step("alike", losses=("byte-kl:weight=2", "forward-kl"))
    assert_same(gradients, weighted_sum((0.75, other_tokenizer), (0.25, same_tokenizer)))
    assert {"byte-kl/teacher", "byte-kl/alike", "forward-kl/alike"} <= set(metrics)
    assert "forward-kl/teacher" not in metrics
    expected = 2 * 0.75 * metrics["byte-kl/teacher"] + 0.25 * (
        2 * metrics["byte-kl/alike"] + metrics["forward-kl/alike"]
    )
    assert metrics["loss"] == metrics["distillation_loss"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["teacher", "drawn"])
def test_a_mixture_of_one_teacher_with_itself_equals_that_teacher(step, name):
    """With sampled tokens, a mixture has no control variate, so it is compared with a mixture with one weight 0."""
    of_one = {} if name == "teacher" else {"combine_teachers": "mixture", "teacher_weights": "1,0"}
    gradients, metrics = step(*[name] * (1 + bool(of_one)), **of_one)
    gradients_of_mixture, metrics_of_mixture = step(name, name, combine_teachers="mixture", teacher_weights="0.3,0.7")
    assert_same(gradients_of_mixture, gradients)
    assert metrics_of_mixture["byte-kl"] == pytest.approx(metrics["byte-kl"], rel=1e-5)


def test_the_loss_of_a_mixture_of_two_teachers_is_less_than_that_of_their_sum(step):
    """A divergence is convex in the teacher, and coarser cells make it no larger."""
    _, mixed = step("teacher", "other", combine_teachers="mixture", losses=("boundary-kl",))
    _, summed = step("teacher", "other", losses=("boundary-kl",))
    assert 0 < mixed["loss"] < summed["loss"]


def test_teacher_weights_sum_to_1_and_select_uses_the_highest_score_only(step, pair, folder):
    _, metrics = step("teacher", "other", teacher_weights="ce:alpha=3")
    assert metrics["teacher_weight/teacher"] + metrics["teacher_weight/other"] == pytest.approx(1)
    rows = match_documents([TeacherCache(folder / f"c-{name}") for name in ("teacher", "other")])
    selected = []
    for number in range(len(TEXTS)):
        document_logprobs = [
            TeacherCache(folder / f"c-{name}").read_document(int(row)).teacher_logprobs.observed_logprobs.sum()
            for name, row in zip(("teacher", "other"), rows[:, number], strict=True)
        ]
        selected.append(int(document_logprobs[1] > document_logprobs[0]))
    tokenizer = Tokenizer(pair.student)
    sizes = [len(ids.ids) + 1 for ids in tokenizer.encode(TEXTS)]
    _, metrics = step("teacher", "other", combine_teachers="select")
    assert metrics["teacher_weight/other"] == pytest.approx(np.average(selected, weights=sizes), abs=1e-9)


# --- one teacher per document


def test_route_over_two_half_caches_equals_the_merged_cache(step):
    merged, merged_metrics = step("merged")
    routed, metrics = step("head", "tail", combine_teachers="route")
    assert_same(routed, merged)
    assert metrics["loss"] == pytest.approx(merged_metrics["loss"], rel=1e-6)
    assert_same(
        step("head", "tail", combine_teachers="route", losses=("byte-kl",))[0], step("merged", losses=("byte-kl",))[0]
    )


@pytest.mark.slow
def test_route_column_names_the_teacher_of_a_document(run, step, pair, folder):
    renamed_teacher = small_inputs.make_teacher(folder / "twin")  # the same model with another name
    exact = ("--top-k", 12, "--precision", "float32", "--route-column", "by", "-q")
    run("cache-teacher", pair.teacher, "columns.jsonl", *exact, "-o", "c-routed", cwd=folder)
    run("cache-teacher", renamed_teacher, "columns.jsonl", *exact, "-o", "c-twin", cwd=folder)
    assert_same(step("routed", "twin", combine_teachers="route")[0], step("teacher")[0])
    with pytest.raises(XtkError, match="has 'twin', which is not the name of a teacher"):
        step("routed", "other", combine_teachers="route")


def test_a_document_in_several_caches_needs_a_route(step):
    with pytest.raises(XtkError, match="a document without a value in --route-column is in several caches"):
        step("teacher", "other", combine_teachers="route")


# --- matching of documents between caches


@pytest.mark.slow
def test_documents_are_matched_in_any_order_of_the_caches(folder, tmp_path, run, pair):
    caches = [TeacherCache(folder / f"c-{name}") for name in ("teacher", "other", "alike")]
    rows = match_documents(caches)
    for number in range(len(TEXTS)):
        matched_texts = [
            cache.read_document(int(row)).document.text for cache, row in zip(caches, rows[:, number], strict=True)
        ]
        assert matched_texts == [TEXTS[number]] * 3
    duplicates = [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[0]]
    for name, texts in (("one", duplicates), ("two", duplicates[::-1])):
        small_inputs.write_jsonl(tmp_path / f"{name}.jsonl", texts)
        run("cache-teacher", pair.teacher, f"{name}.jsonl", "--support", "none", "-q", "-o", name, cwd=tmp_path)
    assert match_documents([TeacherCache(tmp_path / name) for name in ("one", "two")]).tolist() == [
        [0, 1, 2, 3],
        [0, 2, 1, 3],
    ]


@pytest.mark.slow
def test_duplicates_with_different_weights_are_matched_by_weight_in_any_order(tmp_path, run, pair):
    rows = {"one": [(0, 1), (1, 2), (0, 3), (0, 1)], "two": [(0, 3), (0, 1), (0, 1), (1, 2)], "other": [(0, 3), (0, 2)]}
    for name, listed in rows.items():
        lines = [json.dumps({"text": TEXTS[at], "quality": weight}) + "\n" for at, weight in listed]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        options = ("--support", "none", "--weight-column", "quality", "-q", "-o", name)
        run("cache-teacher", pair.teacher, f"{name}.jsonl", *options, cwd=tmp_path)
    one, two, other = (TeacherCache(tmp_path / name) for name in rows)
    assert match_documents([one, two]).tolist() == [[0, 1, 2, 3], [1, 3, 0, 2]]
    assert match_documents([two, one]).tolist() == [[0, 1, 2, 3], [2, 0, 3, 1]]
    small_inputs.write_jsonl(tmp_path / "plain.jsonl", [TEXTS[0]] * 2)
    run("cache-teacher", pair.teacher, "plain.jsonl", "--support", "none", "-q", "-o", "plain", cwd=tmp_path)
    with pytest.raises(XtkError, match=r"a document has the weight 3 in the cache .*other and 1 in .*plain"):
        match_documents([other, TeacherCache(tmp_path / "plain")])


def test_documents_that_are_missing_in_a_cache_are_reported(folder, step):
    with pytest.raises(XtkError) as raised:
        step("teacher", "head")
    assert raised.value.what == f"3 of 8 documents of the cache {folder}/c-teacher are missing in {folder}/c-head"
    assert repr(TEXTS[5][:40]) in raised.value.where
    assert "route" in raised.value.hint
    with pytest.raises(XtkError, match=r"has the weight 2 in the cache .*c-weighted and 1 in .*c-teacher"):
        step("weighted", "teacher")


def test_mixture_refuses_teachers_with_different_tokenizers(step):
    with pytest.raises(XtkError, match="mixture needs teachers with the same tokenizer"):
        step("teacher", "alike", combine_teachers="mixture")


# --- document weights


def test_a_cached_document_of_weight_w_counts_like_w_documents(step, folder):
    losses = ("ce", "byte-kl", "p-kl")
    weighted_gradients, weighted_metrics = step("weighted", losses=losses)
    repeated_gradients, repeated_metrics = step("listed", losses=losses)
    assert_same(weighted_gradients, repeated_gradients)
    assert weighted_metrics == pytest.approx(repeated_metrics, rel=1e-6)
    sources = {name: TeacherCache(folder / f"c-{name}") for name in ("weighted", "teacher")}
    assert sources["weighted"].document_weights().tolist() == WEIGHTS
    assert sources["teacher"].document_weights().tolist() == [1] * 8
    assert [row.document.weight for row in sources["weighted"]] == WEIGHTS


# --- --scale-kd-to


def test_scale_kd_to_rescales_the_distillation_loss_to_ce_and_leaves_ce_unchanged(step):
    for names, options in ((("teacher",), {}), (("teacher", "other"), {"teacher_weights": "ce:alpha=2"})):
        losses = ("ce:weight=0.5", "byte-kl:weight=2")
        ce_gradients, _ = step(*names, losses=("ce:weight=0.5",))
        kd_gradients, _ = step(*names, losses=("byte-kl:weight=2",), **options)
        gradients, metrics = step(*names, losses=losses, scale_kd_to="ce", **options)
        distilled = sum(value for name, value in metrics.items() if name.startswith("byte-kl"))
        assert metrics["kd_scale"] == pytest.approx(metrics["ce"] / distilled)
        assert metrics["loss"] == pytest.approx(0.5 * metrics["ce"] + 2 * metrics["ce"])
        assert_same(gradients, weighted_sum((1, ce_gradients), (metrics["kd_scale"], kd_gradients)))


def test_scale_kd_to_uses_the_losses_of_the_same_step_despite_dropout(folder):
    student = small_inputs.make_student(folder / "forgetful")
    configuration = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**configuration, "attention_dropout": 0.5}))
    ratios = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        recipe = make_train_config(["ce", "byte-kl"], batch=3, scale_kd_to="ce")
        inputs = open_run_inputs(student, [folder / "c-teacher"], recipe)
        _, results = record_steps(Accelerator(cpu=True), student, inputs, recipe, 8, steps=1)
        (metrics,) = results["losses"]
        assert metrics["kd_scale"] == pytest.approx(metrics["ce"] / metrics["byte-kl"], rel=1e-6)
        ratios.append(metrics["kd_scale"])
    assert ratios[0] != ratios[1]  # dropout has an effect


def test_scale_kd_to_needs_the_ce_loss(step):
    with pytest.raises(XtkError, match="--scale-kd-to ce"):
        step("teacher", losses=("byte-kl",), scale_kd_to="ce")


# --- losses of `--loss auto`


@pytest.fixture(scope="module")
def teachers(pair, folder):
    def open_caches(*names: str) -> Any:
        return open_teachers([str(folder / f"c-{name}") for name in names], [], Tokenizer(pair.student))

    return open_caches


def test_auto_losses_depend_on_the_tokenizers_and_on_the_cache(teachers):
    auto_losses = {name: teachers(name)[0].auto_losses() for name in ("teacher", "alike", "none")}
    assert auto_losses["teacher"][0] == AUTO_LOSSES["bytes"] == ["ce:weight=0.3", "byte-kl"]
    assert teachers("teacher")[0].auto_losses(on_policy=True)[0] == ["ce:weight=0.3", "bpm"]
    assert teachers("alike")[0].auto_losses(on_policy=True)[0] == AUTO_LOSSES["tokens"]
    assert teachers("none")[0].auto_losses(on_policy=True)[0] == AUTO_LOSSES["observed"]
    assert auto_losses["teacher"][1].startswith("teacher has another tokenizer, with ")
    assert auto_losses["alike"] == (AUTO_LOSSES["tokens"], "alike has the student's tokenizer")
    assert auto_losses["none"][0] == AUTO_LOSSES["observed"] == ["alm"]


def names_of(assigned: Any) -> list[tuple[str, int | None]]:
    return [(one.loss.name, one.teacher) for one in assigned]


def test_auto_assigns_each_teacher_its_loss_in_addition_to_named_losses(teachers):
    both = teachers("teacher", "alike")
    assigned, note = assign_losses(parse_losses([AUTO_LOSS, "ce:weight=0.5"]), both)
    assert sorted(names_of(assigned), key=str) == [("byte-kl", 0), ("ce", None), ("forward-kl", 1)]
    assert [one.loss.weight for one in assigned if one.teacher is None] == [0.5]
    assert note.count("; ") == 1
    assert names_of(assign_losses(parse_losses(["byte-kl", "forward-kl"]), both)[0]) == [
        ("byte-kl", 0),
        ("byte-kl", 1),
        ("forward-kl", 1),
    ]


def test_a_loss_without_a_teacher_and_a_teacher_without_a_loss_are_refused(teachers):
    with pytest.raises(XtkError, match="forward-kl needs a teacher with the student's tokenizer"):
        assign_losses([LossSpec("forward-kl")], teachers("teacher", "other"))
    with pytest.raises(XtkError, match="no --loss can be computed from the teacher teacher"):
        assign_losses([LossSpec("forward-kl")], teachers("teacher", "alike"))
    with pytest.raises(XtkError, match="--loss auto takes no options"):
        parse_losses(["auto:weight=2"])


def test_plain_data_instead_of_a_cache_needs_ce_as_the_only_loss(pair, folder):
    data = [folder / "plain.jsonl"]
    assert len(open_run_inputs(pair.student, data, make_train_config(["ce"])).source) == 8
    for losses in ([AUTO_LOSS], [AUTO_LOSS, "ce"], ["byte-kl"]):
        with pytest.raises(XtkError, match=r"plain\.jsonl"):
            open_run_inputs(pair.student, data, make_train_config(losses))


# --- the command line


@pytest.mark.slow
def test_distill_trains_from_several_caches_and_logs_metrics_of_each(run, pair, folder, tmp_path):
    done = run(
        "distill", pair.student, folder / "c-teacher", folder / "c-alike", "--teacher-weights", "entropy:per=span",
        "--max-steps", 2, "--logging-steps", 1, "--scale-kd-to", "ce", "--loss", "auto", "--loss", "ce", "-o", "out",
        cwd=tmp_path,
    )  # fmt: skip
    assert "distill: --loss auto chose byte-kl, because teacher has another tokenizer" in done.stderr
    assert "; " in done.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    expected = {
        "ce",
        "byte-kl/teacher",
        "forward-kl/alike",
        "distillation_loss",
        "kd_scale",
        "teacher_weight/teacher",
        "teacher_weight/alike",
    }
    assert expected | {"unaligned_fraction/teacher", "unaligned_fraction/alike"} <= set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())["identity"]
    assert recipe["losses"] == ["ce", "byte-kl of teacher", "forward-kl of alike"]
    assert recipe["teacher_weights"] == "entropy:per=span"
    assert len(recipe["inputs"]["caches"]) == 2


@pytest.mark.slow
def test_plain_data_can_have_a_weight_column(run, pair, folder, tmp_path):
    lines = [{"text": TEXTS[0], "quality": 2}, {"text": TEXTS[1], "quality": 1}, {"text": TEXTS[2], "quality": 0}]
    (tmp_path / "weighted.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small_inputs.write_jsonl(tmp_path / "listed.jsonl", [TEXTS[0], TEXTS[0], TEXTS[1]])
    options = ("--loss", "ce", "--max-steps", 1, "--logging-steps", 1)
    done = run("distill", pair.student, "weighted.jsonl", "--weight-column", "quality", *options,
               "--per-device-train-batch-size", 2, "-o", "one", cwd=tmp_path)  # fmt: skip
    assert "skipping 1 of 3 documents, whose weight is 0" in done.stderr
    run(
        "distill", pair.student, "listed.jsonl", *options, "--per-device-train-batch-size", 3, "-o", "two", cwd=tmp_path
    )
    one, two = (json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("one", "two"))
    for name in ("loss", "gradient_norm"):
        assert one[name] == pytest.approx(two[name], rel=1e-5)
    refused = run("distill", pair.student, folder / "c-teacher", "--weight-column", "quality", "-o", "three",
                  cwd=tmp_path, code=1)  # fmt: skip
    assert "xtk cache-teacher ... --weight-column quality" in refused.stderr


def test_auto_chooses_the_same_losses_in_any_order_of_the_teachers(folder, pair):
    student = Tokenizer(pair.student)
    chosen = []
    for order in (("drawn", "alike"), ("alike", "drawn")):
        teachers = open_teachers([str(folder / f"c-{name}") for name in order], (), student)
        losses, _ = assign_losses([LossSpec(AUTO_LOSS)], teachers)
        chosen.append({(str(one.loss), one.teacher if one.teacher is None else order[one.teacher]) for one in losses})
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("order", [("none", "alike"), ("alike", "none")])
def test_max_probability_score_needs_caches_with_top_1_tokens(folder, pair, run, tmp_path, order):
    caches = [folder / f"c-{name}" for name in order]
    command = ("distill", pair.student, *caches, "--loss", "alm", "--max-steps", 1, "-o", tmp_path / "out")
    refused = run(*command, "--teacher-weights", "max-probability", code=1).stderr
    assert "--teacher-weights max-probability needs the exact most likely token" in refused
    assert "c-none has the support none" in refused
    run(*command, "--teacher-weights", "ce")
