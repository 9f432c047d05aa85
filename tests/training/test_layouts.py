"""Every parallel layout computes the losses, gradients and gradient norms of one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import small_inputs
import torch
from parallel_layouts import (
    CONTEXT,
    LONG_LAYOUTS,
    LORA,
    LOSSES,
    SHORT_LAYOUTS,
    STEP_SPLITS,
    UPDATED_DOCUMENTS,
    LayoutResults,
    all_cases,
    case_name,
    make_students,
    reference_cases,
    reference_options,
    run_cases,
)
from safetensors.torch import load_file

from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.parallel.parallel_config import ParallelConfig, parse_parallel
from xtk.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(run, pair, tmp_path_factory) -> Path:
    """A cache of ten documents with the teacher's log-probabilities in float32."""
    folder = tmp_path_factory.mktemp("exact")
    small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(10, seed=8))
    run("cache-teacher", pair.teacher, "data.jsonl", "--top-k", 16, "--precision", "float32", "-o", "cache", cwd=folder)
    return folder / "cache"


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, Path]:
    return make_students(tmp_path_factory.mktemp("students"))


@pytest.fixture(scope="module")
def results_of(cache, students, tmp_path_factory):
    """Return a function from a number of processes to their results, which are computed once."""
    computed: dict[tuple[int, bool], LayoutResults] = {}

    def compute(processes: int, long: bool = False) -> LayoutResults:
        if (processes, long) not in computed:
            requested_cases = all_cases((LONG_LAYOUTS if long else SHORT_LAYOUTS)[processes])
            requested_cases += reference_cases() if processes == 1 else []
            folder = tmp_path_factory.mktemp(f"of-{processes}")
            computed[processes, long] = run_cases(processes, requested_cases, cache, students, folder)
        return computed[processes, long]

    return compute


CASES = [
    pytest.param(
        processes, student, options, long, id=f"{processes} {case_name(student, options)}",
        marks=[pytest.mark.long] * long,
    )
    for long, table in enumerate((SHORT_LAYOUTS, LONG_LAYOUTS))
    for processes, several in table.items()
    for student, options in all_cases(several)
]  # fmt: skip


@pytest.mark.parametrize(("processes", "student", "options", "long"), CASES)
def test_gradients_equal_those_of_one_process_and_one_pass(results_of, processes, student, options, long):
    """The weights after five steps are also equal."""
    steps = results_of(processes, bool(long))
    for way in STEP_SPLITS[processes]:
        way_results = steps.results[case_name(student, options)][way]
        assert (way_results["processes"], way_results["packed"]) == (processes, options.get("packing", True))
        found = steps.difference(student, options, way, results_of(1))
        assert found.loss <= 2e-6
        assert found.gradient <= 3e-6
        assert found.norm <= 2e-6
        assert (found.weights is not None) == way.startswith(f"{UPDATED_DOCUMENTS}:")
        # AdamW divides values near zero by values near zero: differences of 1e-5 to 1e-4, which depend on the
        # processor. Wrong steps differ by 1e-2.
        assert found.weights is None or found.weights <= 1e-3


@pytest.mark.parametrize(("processes", "student", "options", "long"), CASES)
def test_held_out_metrics_equal_those_of_one_process(results_of, students, cache, processes, student, options, long):
    """The steps update no weights, so the evaluations before, between and after them are equal too."""
    expected = results_of(1).results[case_name(student, reference_options(options))]["8:8"]["held_out"][0]
    for way in results_of(processes, bool(long)).results[case_name(student, options)].values():
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
    one_process = evaluate_bits_per_byte(
        BackboneWithHead(load_causal_lm(ModelRef(students[student]))),
        Tokenizer(students[student]),
        documents,
        max_length=CONTEXT,
    )
    assert one_process.num_windows > len(documents)
    assert expected["eval_bits_per_byte"] == pytest.approx(one_process.bits_per_byte, rel=1e-6)


def test_max_batch_tokens_determines_the_number_of_passes(results_of):
    def passes(**options: object) -> int:
        return results_of(1).results[case_name("llama", options)]["8:2"]["passes"]

    assert passes() == 4  # eight documents, two in a pass
    assert passes(max_batch_tokens=100) == 3
    assert passes(max_batch_tokens=100, packing=False) >= 3  # padding counts, so no fewer
    assert passes(max_batch_tokens=10) == 8  # each document has more


# --- the command line: checkpoints of one layout, resumed in another one


@pytest.mark.long
def test_a_run_resumes_in_another_layout(run, cache, students, tmp_path):
    def train(name: str, batch: int, *options: object) -> dict[str, torch.Tensor]:
        losses = ("--loss", "ce", "--loss", "byte-kl", "--ema-decay", 0.5, "--learning-rate", 1e-3)
        steps = ("--max-steps", 4, "--save-steps", 2, "--logging-steps", 1, "--per-device-train-batch-size", batch)
        run("distill", students["tied"], cache, *losses, *steps, *options, "-o", tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    def copy_killed_run(name: str) -> None:
        """Copy the files that a run leaves when it is killed after its checkpoint."""
        shutil.copytree(tmp_path / "tp" / "checkpoint-2", tmp_path / name / "checkpoint-2")
        for file in ("recipe.json", "metrics.jsonl"):
            shutil.copyfile(tmp_path / "tp" / file, tmp_path / name / file)

    one_process = train("one", 8)
    tensor_parallel = train("tp", 8, "--num-processes", 2, "--parallel", "tp=2")
    for name in ("again", "other"):
        copy_killed_run(name)
    resumed = train("again", 8, "--num-processes", 2, "--parallel", "tp=2")
    fully_sharded = train("other", 4, "--num-processes", 2, "--parallel", "fsdp=2")
    for name, weight in one_process.items():
        assert torch.equal(resumed[name], tensor_parallel[name])
        for found in (tensor_parallel[name], fully_sharded[name]):
            assert float((found - weight).abs().max()) <= 5e-5 * float(weight.abs().max()), name


# --- the option `--parallel`


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
def test_unnamed_dimensions_are_one_and_dp_uses_the_remaining_processes(text, processes, expected):
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
def test_invalid_parallel_options_are_refused(text, processes, message):
    with pytest.raises(XtkError) as raised:
        parse_parallel(text, processes)
    assert message in str(raised.value)


def test_a_layout_that_the_model_does_not_support_is_refused(run, pair, cache, tmp_path):
    command = ["distill", pair.student, cache, "--num-processes", 2, "--max-steps", 2, "-o", tmp_path / "out"]
    done = run(*command, "--parallel", "tp=2", code=1)
    assert done.stderr.count("--parallel tp=2 does not divide the model's 2 attention heads and 1 key-value heads") == 1
    assert "--parallel fsdp" in done.stderr
    assert not (tmp_path / "out" / "xtk.json").exists()
    done = run(*command, "--parallel", "tp=3", code=1)
    assert "--parallel tp=3 needs a multiple of 3 processes, but the run has 2" in done.stderr


def test_a_layout_describes_each_of_its_dimensions():
    layout = parse_parallel("fsdp=2,tp=2", 8)
    assert layout.describe() == "8 processes: 2-way data parallel x 2-way FSDP x 2-way tensor parallel"
    assert str(layout) == "dp=2,fsdp=2,tp=2"
