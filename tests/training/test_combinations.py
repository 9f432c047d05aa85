"""bf16, adapters and online teachers, each combined with several processes and sharded students."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_layouts import make_students
from safetensors.torch import load_file
from xtk_processes import run_xtk

from xtk.runs.metrics_file import read_metrics

FIVE_STEPS = ["--max-steps", 5, "--logging-steps", 1, "--learning-rate", 1e-3, "--save-steps", 0]
TWO_PROCESSES = ["--num-processes", 2]


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    """A Llama that can be split over two processes."""
    return make_students(tmp_path_factory.mktemp("students"))["llama"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors that a finished run has written, including the adapter's."""
    return {
        f"{path.parent.name == 'adapter'} {name}": value
        for path in (*folder.glob("*.safetensors"), *folder.glob("adapter/*.safetensors"))
        for name, value in load_file(path).items()
    }


def largest_difference(found: Path, expected: Path) -> float:
    """Return the largest difference of a matrix between two students, divided by its largest absolute value."""
    found_weights, expected_weights = weights_of(found), weights_of(expected)
    assert found_weights.keys() == expected_weights.keys()
    return max(
        float((found_weights[name] - one).abs().max() / one.abs().max()) for name, one in expected_weights.items()
    )


# --- bf16 with sharded weights


@pytest.mark.long
def test_bf16_with_fsdp_learns_like_one_process_and_sums_losses_in_fp32(student, cache, tmp_path):
    arguments = ["distill", student, cache, "--loss", "ce", "--loss", "byte-kl", *FIVE_STEPS]
    bf16, half_batch = ("--mixed-precision", "bf16"), ("--per-device-train-batch-size", 4)
    run_xtk(*arguments, "-o", tmp_path / "exact")
    run_xtk(*arguments, *bf16, "-o", tmp_path / "one")
    done = run_xtk(
        *arguments, *bf16, *half_batch, *TWO_PROCESSES, "--parallel", "fsdp=2", "-o", tmp_path / "two", fresh=True
    )
    assert "2 processes: 2-way FSDP" in done.stderr
    metrics = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("exact", "one", "two")}
    for one, two, exact in zip(metrics["one"], metrics["two"], metrics["exact"], strict=True):
        for loss in ("ce", "byte-kl"):
            # In bf16, a loss of 6 would be a multiple of 1/32, which is half a percent of it.
            assert two[loss] == pytest.approx(one[loss], rel=1e-3), loss
            assert two[loss] == pytest.approx(exact[loss], rel=5e-3), loss
            assert two[loss] != exact[loss]
    before = load_file(student / "model.safetensors")
    after = {name: load_file(tmp_path / name / "model.safetensors") for name in metrics}
    assert {value.dtype for value in after["two"].values()} == {torch.float32}
    updates = {
        name: torch.cat([(one - before[key]).flatten() for key, one in weights.items()])
        for name, weights in after.items()
    }
    for other in ("one", "exact"):
        assert float(torch.cosine_similarity(updates["two"], updates[other], dim=0)) > 0.98


# --- adapters


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["dp=2", "fsdp=2"])
def test_adapters_of_two_processes_equal_those_of_one(student, cache, tmp_path, parallel):
    arguments = ["distill", student, cache, *FIVE_STEPS, "--lora-r", 4, "--lora-modules-to-save", "lm_head"]
    run_xtk(*arguments, "-o", tmp_path / "one")
    two = (*TWO_PROCESSES, "--parallel", parallel, "--per-device-train-batch-size", 4, "--save-steps", 2)
    run_xtk(*arguments, *two, "-o", tmp_path / "two", fresh=True)
    assert largest_difference(tmp_path / "two", tmp_path / "one") <= 5e-5

    # The files of a run that was killed after its second checkpoint are resumed in the other layout.
    (tmp_path / "other").mkdir()
    (tmp_path / "two" / "checkpoint-4").rename(tmp_path / "other" / "checkpoint-4")
    for name in ("recipe.json", "metrics.jsonl"):
        (tmp_path / "two" / name).rename(tmp_path / "other" / name)
    other_layout = {"dp=2": "fsdp=2", "fsdp=2": "dp=2"}[parallel]
    done = run_xtk(*arguments, *two, "--parallel", other_layout, "-o", tmp_path / "other", fresh=True)
    assert "resuming from" in done.stderr
    assert largest_difference(tmp_path / "other", tmp_path / "one") <= 5e-5


# --- online teachers, whose layout is not the student's


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["tp=2", "cp=2", "fsdp=2"])
def test_sharded_student_learns_bitwise_equally_from_an_online_teacher_and_a_cache(
    student, pair, corpus, tmp_path, parallel
):
    teacher_options = "top_k=16,batch_tokens=1"
    run_xtk("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--precision", "float32", "--batch-tokens", 1,
            "-o", tmp_path / "cache")  # fmt: skip
    common = [*FIVE_STEPS, *TWO_PROCESSES, "--parallel", parallel, "--per-device-train-batch-size", 4, "-o"]
    run_xtk("distill", student, tmp_path / "cache", *common, tmp_path / "from-cache", fresh=True)
    online_teacher = ("--teacher", f"{pair.teacher}:{teacher_options}", "--teacher-block-steps", 2)
    run_xtk("distill", student, corpus, *online_teacher, *common, tmp_path / "live", fresh=True)
    online_metrics, cache_metrics = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("live", "from-cache"))
    assert [line["loss"] for line in online_metrics] == [line["loss"] for line in cache_metrics]
    assert (tmp_path / "live" / "model.safetensors").read_bytes() == (
        tmp_path / "from-cache" / "model.safetensors"
    ).read_bytes()


@pytest.mark.long
def test_student_with_tp_and_cp_learns_from_a_teacher_in_a_subprocess(student, corpus, tmp_path):
    teacher = make_students(tmp_path / "teachers")["tied"]
    run_xtk("distill", student, corpus, "--teacher", f"{teacher}:top_k=16", *FIVE_STEPS, "-o", tmp_path / "one")
    placed_teacher = ("--teacher", f"{teacher}:top_k=16,engine.device_map=cpu", "--teacher-block-steps", 2)
    layout = ("--num-processes", 4, "--parallel", "tp=2,cp=2")
    run_xtk("distill", student, corpus, *placed_teacher, *FIVE_STEPS, *layout, "-o", tmp_path / "four", fresh=True)
    assert largest_difference(tmp_path / "four", tmp_path / "one") <= 5e-4
