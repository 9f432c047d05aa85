"""Teachers and student on the same text of the first step: their bits per byte, and the note about a weak teacher."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from accelerate import Accelerator
from recorded_training_steps import make_train_config, open_run_inputs, record_steps

from xtk.batches.first_step_bits_per_byte import ComparedText
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.runs.metrics_file import read_metrics
from xtk.text.document import Document, Segment
from xtk.text.document_token_ids import SampledTokens
from xtk.text.tokenizer import Tokenizer

TEXTS = small_inputs.sentences(8, seed=23)
NOTE = "distill: warning: the teacher"
OPTIONS = ("--max-steps", 4, "--per-device-train-batch-size", 8, "--learning-rate", 1e-3, "--save-steps", 2)
# Two untrained models; the Qwen3 has larger initial weights, and predicts every text worse than the Llama.
WORSE, BETTER = "teacher", "student"


@pytest.fixture(scope="module")
def folder(run, pair, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("levels")
    data = small_inputs.write_jsonl(folder / "data.jsonl", TEXTS)
    for name in (WORSE, BETTER):
        run("cache-teacher", getattr(pair, name), data, "--precision", "float32", "-o", folder / f"of-{name}")
    return folder


def bits_per_byte(model: Path) -> float:
    """Return the bits per byte of all texts, as `xtk evaluate` does."""
    documents = [Document((Segment("text", text, train=True),)) for text in TEXTS]
    backbone = BackboneWithHead(load_causal_lm(ModelRef(model), device=torch.device("cpu")))
    return evaluate_bits_per_byte(backbone, Tokenizer(model), documents).bits_per_byte


def first_step(student: Path, *caches: Path, losses: tuple[str, ...] = ("ce", "byte-kl"), **options) -> dict:
    recipe = make_train_config([*losses], **options)
    inputs = open_run_inputs(student, [*caches], recipe)
    _, recorded = record_steps(Accelerator(cpu=True), student, inputs, recipe, len(TEXTS))
    assert not any("bits_per_byte" in name for name in recorded["losses"][1]), "only the first step is compared"
    return {name: value for name, value in recorded["losses"][0].items() if "bits_per_byte" in name}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch": 3, "packing": True}, {"losses": ("alm",), "batch": 2}],
                         ids=["one batch", "packed", "without ce"])  # fmt: skip
@pytest.mark.parametrize(("student", "teacher"), [(BETTER, WORSE), (WORSE, BETTER)])
def test_levels_of_the_first_step_are_those_of_evaluate(pair, folder, student, teacher, options):
    levels = first_step(getattr(pair, student), folder / f"of-{teacher}", **options)
    assert levels == pytest.approx(
        {
            "teacher_bits_per_byte": bits_per_byte(getattr(pair, teacher)),
            "student_bits_per_byte": bits_per_byte(getattr(pair, student)),
        },
        rel=1e-5,
    )


@pytest.mark.slow
def test_only_a_teacher_that_is_hardly_better_is_reported_and_only_at_the_first_step(run, pair, folder):
    weak = run("distill", pair.student, folder / f"of-{WORSE}", *OPTIONS, "-o", "weak", cwd=folder)
    (line,) = [one for one in weak.stderr.splitlines() if one.startswith(NOTE)]
    for level in map(bits_per_byte, (pair.teacher, pair.student)):
        assert f" {level:.4f}" in line
    strong = run("distill", pair.teacher, folder / f"of-{BETTER}", *OPTIONS, "-o", "strong", cwd=folder)
    assert NOTE not in strong.stderr
    first, *others = read_metrics(folder / "weak" / "metrics.jsonl")
    assert first["teacher_bits_per_byte"] > first["student_bits_per_byte"]
    assert not any("teacher_bits_per_byte" in record for record in others)
    card = (folder / "weak" / "README.md").read_text()
    assert "bits_per_byte" not in card.partition("## Recipe")[0], "the card has the last metrics"

    (folder / "weak" / "xtk.json").unlink()
    again = run("distill", pair.student, folder / f"of-{WORSE}", *OPTIONS, "-o", "weak", cwd=folder)
    assert "resuming from" in again.stderr
    assert NOTE not in again.stderr
    assert read_metrics(folder / "weak" / "metrics.jsonl")[0] == first


@pytest.mark.slow
def test_report_has_both_levels_in_the_table_of_runs_and_no_curve_of_one_point(run, pair, folder):
    run("distill", pair.student, folder / f"of-{WORSE}", *OPTIONS, "-o", "reported", cwd=folder)
    run("report", "reported", "-o", "page.html", cwd=folder)
    table, _, rest = (folder / "page.html").read_text().partition("</table>")
    assert f"teacher {bits_per_byte(pair.teacher):.4g}<br>student {bits_per_byte(pair.student):.4g}" in table
    assert "teacher_bits_per_byte" not in rest


@pytest.mark.slow
def test_two_processes_sum_their_texts_and_print_one_note(run, pair, folder):
    two = ("--max-steps", 4, "--per-device-train-batch-size", 4, "--num-processes", 2, "-o", "two")
    result = run("distill", pair.student, folder / f"of-{WORSE}", *two, cwd=folder)
    assert result.stderr.count(NOTE) == 1
    expected = first_step(pair.student, folder / f"of-{WORSE}")
    (first, *_) = read_metrics(folder / "two" / "metrics.jsonl")
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_each_of_several_online_teachers_is_reported_and_the_student_itself_is_not(run, pair, folder):
    teachers = ("--teacher", pair.teacher, "--teacher", pair.student)
    options = ("--max-steps", 1, "--per-device-train-batch-size", 8)
    both = run("distill", pair.student, "data.jsonl", *teachers, *options, "-o", "both", cwd=folder)
    assert both.stderr.count(NOTE) == 2, "the second has the same weights as the student"
    itself = run("distill", pair.student, "data.jsonl", "--teacher", "self:weights=ema", "--ema-decay", 0.9, *options,
                 "-o", "itself", cwd=folder)  # fmt: skip
    assert NOTE not in itself.stderr
    levels = read_metrics(folder / "itself" / "metrics.jsonl")[0]
    assert levels["teacher_bits_per_byte"] == pytest.approx(levels["student_bits_per_byte"], rel=0.01)


@pytest.mark.slow
def test_text_counts_where_both_sides_predict_it_and_sampled_completions_never(pair, folder):
    recipe = make_train_config(["byte-kl"])
    inputs = open_run_inputs(pair.student, [folder / f"of-{WORSE}"], recipe)
    builder = inputs.batch_builder(None)
    read = builder._tokenize([0])
    ((example,),), _ = builder._read([0], read, None)
    student, document, weights = read[0].student, read[0].document, np.full(len(example.positions), 2.0)
    whole = ComparedText.of_documents([example], [student], [document], weights)
    assert whole.num_bytes == 2 * len(TEXTS[0].encode()), "weighted, without the end token"
    assert whole.row_weights.tolist() == [2.0] * (len(weights) - 1) + [0.0]

    logprobs = example.teacher_logprobs
    later = dataclasses.replace(
        logprobs, **{name: getattr(logprobs, name)[1:] for name in ("positions", "observed_logprobs")}
    )  # a teacher without a start token has no prediction of its first token
    shorter = ComparedText.of_documents(
        [dataclasses.replace(example, teacher_logprobs=later)], [student], [document], weights
    )
    first_span = example.spans[0]
    missing = int(student.text_sizes[first_span[0] : first_span[1]].sum())
    assert shorter.num_bytes == whole.num_bytes - 2 * missing
    assert not shorter.row_weights[: first_span[1] - first_span[0]].any()

    ids = student.ids
    sampled = SampledTokens(ids, np.ones(len(ids), np.bool_), np.zeros(len(ids), np.float32), "")
    rollout = dataclasses.replace(document, sampled_tokens=sampled)
    for nothing in (
        ComparedText.of_documents([example], [student], [rollout], weights),
        ComparedText.of_documents([None], [student], [document], weights),
        ComparedText.of_documents([example], [student], [document], 0 * weights),
    ):
        assert (nothing.num_bytes, nothing.teacher_nats, nothing.row_weights.any()) == (0, 0, False)


@pytest.mark.slow
def test_cache_prints_the_bits_per_byte_of_its_teacher_also_after_merging_and_slicing(run, pair, folder, tmp_path):
    data, options = folder / "data.jsonl", ("--shard-tokens", 60, "--json")
    made = run("cache-teacher", pair.teacher, data, *options, "-o", tmp_path / "cache")
    level = bits_per_byte(pair.teacher)
    assert f"cache-teacher: the teacher has {level:.4f} bits per byte" in made.stderr
    assert json.loads(made.stdout)["teacher_bits_per_byte"] == pytest.approx(level, abs=2e-6)
    for rows in ("", "1:7"):
        parts = ("--rows", rows) if rows else ()
        run("cache", "merge", tmp_path / "cache", *parts, "-o", tmp_path / f"part{rows[:1]}")
    described = json.loads(run("inspect", tmp_path / "part", "--json").stdout)["statistics"]
    assert described["teacher_bits_per_byte"] == pytest.approx(level, abs=2e-6)
    some = small_inputs.write_jsonl(tmp_path / "some.jsonl", TEXTS[1:7])
    scored = run("cache-teacher", pair.teacher, some, *options, "-o", tmp_path / "some")
    sliced = json.loads(run("inspect", tmp_path / "part1", "--json").stdout)["statistics"]
    assert sliced["teacher_bits_per_byte"] == pytest.approx(
        json.loads(scored.stdout)["teacher_bits_per_byte"], rel=0.01
    ), "a shard that is split counts its quantized log-probabilities"
