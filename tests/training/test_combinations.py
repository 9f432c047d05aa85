"""What is tested apart elsewhere, together: narrow numbers, adapters and live teachers with shared work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_layouts import make_students
from safetensors.torch import load_file
from xtk_processes import run_xtk

from xtk.training.metrics_file import read_metrics

FIVE = ["--max-steps", 5, "--logging-steps", 1, "--learning-rate", 1e-3, "--save-steps", 0]
TWO = ["--num-processes", 2]


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    """A Llama that can be cut in two."""
    return make_students(tmp_path_factory.mktemp("students"))["llama"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All numbers that a finished run has written, the adapter's among them."""
    return {
        f"{path.parent.name == 'adapter'} {name}": value
        for path in (*folder.glob("*.safetensors"), *folder.glob("adapter/*.safetensors"))
        for name, value in load_file(path).items()
    }


def farthest(found: Path, expected: Path) -> float:
    """How far two students are apart: the largest difference of a matrix over its largest number."""
    ours, theirs = weights_of(found), weights_of(expected)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - one).abs().max() / one.abs().max()) for name, one in theirs.items())


# --- bf16, weights shared out


@pytest.mark.long
def test_bf16_over_shared_weights_learns_what_one_process_learns_and_adds_losses_in_fp32(student, cache, tmp_path):
    arguments = ["distill", student, cache, "--loss", "ce", "--loss", "byte-kl", *FIVE]
    narrow, half = ("--mixed-precision", "bf16"), ("--per-device-train-batch-size", 4)
    run_xtk(*arguments, "-o", tmp_path / "exact")
    run_xtk(*arguments, *narrow, "-o", tmp_path / "one")
    done = run_xtk(*arguments, *narrow, *half, *TWO, "--parallel", "fsdp=2", "-o", tmp_path / "two", fresh=True)
    assert "2 processes: 2-way FSDP" in done.stderr
    told = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in ("exact", "one", "two")}
    for one, two, exact in zip(told["one"], told["two"], told["exact"], strict=True):
        for loss in ("ce", "byte-kl"):
            # A loss of 6 in bf16 would be a multiple of 1/32, half a percent of it.
            assert two[loss] == pytest.approx(one[loss], rel=1e-3), loss
            assert two[loss] == pytest.approx(exact[loss], rel=5e-3), loss
            assert two[loss] != exact[loss]
    before = load_file(student / "model.safetensors")
    after = {name: load_file(tmp_path / name / "model.safetensors") for name in told}
    assert {value.dtype for value in after["two"].values()} == {torch.float32}
    moves = {name: torch.cat([(one - before[key]).flatten() for key, one in of.items()]) for name, of in after.items()}
    for other in ("one", "exact"):
        assert float(torch.cosine_similarity(moves["two"], moves[other], dim=0)) > 0.98


# --- adapters


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["dp=2", "fsdp=2"])
def test_adapters_of_two_processes_are_those_of_one(student, cache, tmp_path, parallel):
    arguments = ["distill", student, cache, *FIVE, "--lora-r", 4, "--lora-modules-to-save", "lm_head"]
    run_xtk(*arguments, "-o", tmp_path / "one")
    two = (*TWO, "--parallel", parallel, "--per-device-train-batch-size", 4, "--save-steps", 2)
    run_xtk(*arguments, *two, "-o", tmp_path / "two", fresh=True)
    assert farthest(tmp_path / "two", tmp_path / "one") <= 5e-5

    # What is left of a run that was killed after its second checkpoint goes on in the other layout.
    (tmp_path / "other").mkdir()
    (tmp_path / "two" / "checkpoint-4").rename(tmp_path / "other" / "checkpoint-4")
    for name in ("recipe.json", "metrics.jsonl"):
        (tmp_path / "two" / name).rename(tmp_path / "other" / name)
    other = {"dp=2": "fsdp=2", "fsdp=2": "dp=2"}[parallel]
    done = run_xtk(*arguments, *two, "--parallel", other, "-o", tmp_path / "other", fresh=True)
    assert "resuming from" in done.stderr
    assert farthest(tmp_path / "other", tmp_path / "one") <= 5e-5


# --- live teachers, whose layout is not the student's


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["tp=2", "cp=2", "fsdp=2"])
def test_beside_its_teacher_a_student_that_is_shared_learns_to_the_bit_what_it_learns_from_a_cache(
    student, pair, corpus, tmp_path, parallel
):
    told = "top_k=16,batch_tokens=1"
    run_xtk("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--precision", "float32", "--batch-tokens", 1,
            "-o", tmp_path / "cache")  # fmt: skip
    shared = [*FIVE, *TWO, "--parallel", parallel, "--per-device-train-batch-size", 4, "-o"]
    run_xtk("distill", student, tmp_path / "cache", *shared, tmp_path / "from-cache", fresh=True)
    live = ("--teacher", f"{pair.teacher}:{told}", "--teacher-block-steps", 2)
    run_xtk("distill", student, corpus, *live, *shared, tmp_path / "live", fresh=True)
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("live", "from-cache"))
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    assert (tmp_path / "live" / "model.safetensors").read_bytes() == (
        tmp_path / "from-cache" / "model.safetensors"
    ).read_bytes()


@pytest.mark.long
def test_a_student_cut_in_two_directions_learns_from_a_teacher_cut_in_one(student, corpus, tmp_path):
    teacher = make_students(tmp_path / "teachers")["tied"]
    run_xtk("distill", student, corpus, "--teacher", f"{teacher}:top_k=16", *FIVE, "-o", tmp_path / "one")
    cut = ("--teacher", f"{teacher}:top_k=16,engine.tp_size=2", "--teacher-block-steps", 2)
    layout = ("--num-processes", 4, "--parallel", "tp=2,cp=2")
    run_xtk("distill", student, corpus, *cut, *FIVE, *layout, "-o", tmp_path / "four", fresh=True)
    assert farthest(tmp_path / "four", tmp_path / "one") <= 5e-4
