"""However weights, matrices and rows are shared: the loss, the gradient and its norm are those of one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import small_inputs
import torch
from parallel_layouts import (
    CONTEXT,
    LIKE_ONE,
    LIKE_ONE_LONG,
    LORA,
    LOSSES,
    MOVED,
    WAYS,
    Taken,
    cases,
    make_students,
    name_of,
    plain,
    references,
    take,
)
from safetensors.torch import load_file

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.parallel_config import ParallelConfig, parse_parallel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(run, pair, tmp_path_factory) -> Path:
    """Ten documents, as the teacher said it."""
    folder = tmp_path_factory.mktemp("exact")
    small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(10, seed=8))
    run("cache-teacher", pair.teacher, "data.jsonl", "--top-k", 16, "--precision", "float32", "-o", "cache", cwd=folder)
    return folder / "cache"


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, Path]:
    return make_students(tmp_path_factory.mktemp("students"))


@pytest.fixture(scope="module")
def dump(cache, students, tmp_path_factory):
    """What so many processes got."""
    known: dict[tuple[int, bool], Taken] = {}

    def of(processes: int, long: bool = False) -> Taken:
        if (processes, long) not in known:
            wanted = cases((LIKE_ONE_LONG if long else LIKE_ONE)[processes])
            wanted += references() if processes == 1 else []
            folder = tmp_path_factory.mktemp(f"of-{processes}")
            known[processes, long] = take(processes, wanted, cache, students, folder)
        return known[processes, long]

    return of


CASES = [
    pytest.param(
        processes, student, options, long, id=f"{processes} {name_of(student, options)}",
        marks=[pytest.mark.long] * long,
    )
    for long, table in enumerate((LIKE_ONE, LIKE_ONE_LONG))
    for processes, several in table.items()
    for student, options in cases(several)
]  # fmt: skip


@pytest.mark.parametrize(("processes", "student", "options", "long"), CASES)
def test_the_gradient_is_that_of_one_process_and_one_pass(dump, processes, student, options, long):
    """So are the weights after five steps."""
    taken = dump(processes, bool(long))
    for way in WAYS[processes]:
        told = taken.told[name_of(student, options)][way]
        assert (told["processes"], told["packed"]) == (processes, options.get("packing", True))
        found = taken.difference(student, options, way, dump(1))
        assert found.loss <= 2e-6
        assert found.gradient <= 3e-6
        assert found.norm <= 2e-6
        assert (found.weights is not None) == way.startswith(f"{MOVED}:")
        # AdamW divides what is nearly nothing by what is nearly nothing: 1e-5 to 1e-4, another on each processor. Steps
        # that go elsewhere are 1e-2 apart.
        assert found.weights is None or found.weights <= 1e-3


@pytest.mark.parametrize(("processes", "student", "options", "long"), CASES)
def test_the_evaluation_is_that_of_one_process(dump, students, cache, processes, student, options, long):
    """Nothing is moved by the steps, so before, between and after them it is the same too."""
    expected = dump(1).told[name_of(student, plain(options))]["8:8"]["held_out"][0]
    for way in dump(processes, bool(long)).told[name_of(student, options)].values():
        assert len(way["held_out"]) == 3
        for found in way["held_out"]:
            assert found == pytest.approx(expected, rel=2e-6)
    names = [
        "bits_per_byte",
        "loss",
        "distillation_loss",
        "top1_agreement",
        *(loss.split(":")[0] for loss in LOSSES.split(" ")),
    ]
    assert set(expected) == {f"eval_{name}" for name in names}
    if options.keys() & LORA:
        return
    documents = [row.document for row in TeacherCache(cache)]
    alone = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(students[student])), Tokenizer(students[student]), documents, max_length=CONTEXT
    )
    assert alone.num_windows > len(documents)
    assert expected["eval_bits_per_byte"] == pytest.approx(alone.bits_per_byte, rel=1e-6)


def test_a_budget_of_tokens_makes_more_passes_of_the_same_step(dump):
    told = dump(1).told
    passes = {options: told[f"llama {options}"]["8:2"]["passes"] for options in ("max_batch_tokens=100",)}
    assert passes["max_batch_tokens=100"] == 3
    assert told["llama max_batch_tokens=100 packing=False"]["8:2"]["passes"] >= 3


# --- through the command: checkpoints of one layout, read by another


@pytest.mark.long
def test_a_run_goes_on_in_another_layout(run, cache, students, tmp_path):
    def train(name: str, batch: int, *options: object) -> dict[str, torch.Tensor]:
        losses = ("--loss", "ce", "--loss", "byte-kl", "--ema-decay", 0.5, "--learning-rate", 1e-3)
        steps = ("--max-steps", 4, "--save-steps", 2, "--logging-steps", 1, "--per-device-train-batch-size", batch)
        run("distill", students["tied"], cache, *losses, *steps, *options, "-o", tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    def halfway(name: str) -> None:
        """Leave what a run that was killed after its checkpoint would have left."""
        shutil.copytree(tmp_path / "tp" / "checkpoint-2", tmp_path / name / "checkpoint-2")
        for file in ("recipe.json", "metrics.jsonl"):
            shutil.copyfile(tmp_path / "tp" / file, tmp_path / name / file)

    one = train("one", 8)
    cut = train("tp", 8, "--num-processes", 2, "--parallel", "tp=2")
    for name in ("again", "other"):
        halfway(name)
    again = train("again", 8, "--num-processes", 2, "--parallel", "tp=2")
    other = train("other", 4, "--num-processes", 2, "--parallel", "fsdp=2")
    for name, weight in one.items():
        assert torch.equal(again[name], cut[name])
        for found in (cut[name], other[name]):
            assert float((found - weight).abs().max()) <= 5e-5 * float(weight.abs().max()), name


# --- what `--parallel` says


@pytest.mark.parametrize(
    ("text", "processes", "expected"),
    [
        ("", 1, ParallelConfig()),
        ("", 6, ParallelConfig(dp=6)),
        ("fsdp=2,tp=2", 8, ParallelConfig(dp=2, fsdp=2, tp=2)),
        ("tp=4, cp=2", 8, ParallelConfig(cp=2, tp=4)),
        ("dp=2,cp=2", 4, ParallelConfig(dp=2, cp=2)),
    ],
)
def test_what_is_not_named_is_one_and_replicas_are_what_is_left(text, processes, expected):
    assert parse_parallel(text, processes) == expected


@pytest.mark.parametrize(
    ("text", "processes", "message"),
    [
        ("tp=3", 4, "--parallel tp=3 needs a multiple of 3 processes, but the run has 4"),
        ("dp=1,tp=2", 4, "--parallel dp=1,tp=2 needs 2 processes, but the run has 4"),
        ("pp=2", 2, "no parallel dimension called 'pp'"),
        ("tp", 2, "'tp' is not NAME=VALUE"),
        ("tp=0", 2, "tp of --parallel tp=0 is '0', but must be an integer of at least 1"),
        ("tp=2,tp=2", 4, "--parallel tp=2,tp=2: tp is given twice"),
    ],
)
def test_what_cannot_be_is_refused(text, processes, message):
    with pytest.raises(XtkError) as refused:
        parse_parallel(text, processes)
    assert message in str(refused.value)


def test_what_a_model_cannot_is_refused_and_nothing_is_left(run, pair, cache, tmp_path):
    asked = ["distill", pair.student, cache, "--num-processes", 2, "--max-steps", 2, "-o", tmp_path / "out"]
    done = run(*asked, "--parallel", "tp=2", code=1)
    assert done.stderr.count("--parallel tp=2 does not divide the model's 2 attention heads and 1 key-value heads") == 1
    assert "--parallel fsdp" in done.stderr
    assert not (tmp_path / "out" / "xtk.json").exists()
    done = run(*asked, "--parallel", "tp=3", code=1)
    assert "--parallel tp=3 needs a multiple of 3 processes, but the run has 2" in done.stderr


def test_a_plan_tells_what_each_number_means():
    layout = parse_parallel("fsdp=2,tp=2", 8)
    assert layout.describe() == "8 processes: 2-way data parallel x 2-way FSDP x 2-way tensor parallel"
    assert str(layout) == "dp=2,fsdp=2,tp=2"
