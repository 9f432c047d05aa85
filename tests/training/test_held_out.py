"""Held-out evaluation during training: metrics equal to those of plain computations, and an unchanged run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from recorded_training_steps import make_train_config, open_run_inputs

from xtk.batches.top1_agreement import BySpelling
from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.parallel.parallel_config import ParallelConfig
from xtk.projection.file import read_projection
from xtk.runs.metrics_file import read_metrics
from xtk.text.alignment import align_sequences
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.student_with_losses import StudentWithLoss

CPU = torch.device("cpu")
STEPS = 4


@pytest.fixture(scope="module")
def caches(run, pair, tmp_path_factory) -> Path:
    """Held-out documents, with caches of the teacher, of the student itself, and of the teacher's samples only."""
    folder = tmp_path_factory.mktemp("held-out")
    small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(12, seed=21))
    for name in ("teacher", "student"):
        run("cache-teacher", getattr(pair, name), "data.jsonl", "--top-k", 16, "--precision", "float32", "-o", name,
            cwd=folder)  # fmt: skip
    run("cache-teacher", pair.teacher, "data.jsonl", "--support", "sample", "-o", "sample", cwd=folder)
    return folder


def evaluate(student: Path, cache: Path, losses: list[str], projections: tuple[Path, ...] = ()) -> dict[str, float]:
    inputs = open_run_inputs(student, [cache], make_train_config(losses), projections, (cache,))
    model = StudentWithLoss(BackboneWithHead(load_causal_lm(ModelRef(student))))
    return HeldOutEvaluator(inputs.held_out, model, inputs.tokenizer, 256, 0, ParallelConfig(), CPU)()


def top1_tokens(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Return a model's most likely token after each token, from full logits in float64."""
    model = load_causal_lm(ModelRef(folder, dtype="float64")).eval()
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].argmax(-1).numpy()


def top1_pairs(pair, texts: list[str]):
    """Yield the most likely tokens of student and teacher wherever both begin a trained token."""
    documents = [Document.from_text(text) for text in texts]
    student_sequences, teacher_sequences = (
        tokenize_documents(Tokenizer(folder), documents) for folder in (pair.student, pair.teacher)
    )
    for student_sequence, teacher_sequence in zip(student_sequences, teacher_sequences, strict=True):
        student_top1, teacher_top1 = (
            top1_tokens(pair.student, student_sequence.ids),
            top1_tokens(pair.teacher, teacher_sequence.ids),
        )
        for start, stop, teacher_start, teacher_stop in align_sequences(student_sequence, teacher_sequence).tolist():
            if (
                student_sequence.train_mask[start:stop].all()
                and teacher_sequence.train_mask[teacher_start:teacher_stop].all()
            ):
                yield int(student_top1[start - 1]), int(teacher_top1[teacher_start - 1])


@pytest.mark.slow
def test_top1_agreement_through_a_projection_equals_that_of_full_logits(pair, caches, projection):
    weights = read_projection(projection)
    dense = np.zeros((weights.student_width, weights.teacher_width))
    dense[weights.entry_rows, weights.teacher_ids] = weights.weights
    pairs = list(top1_pairs(pair, small_inputs.sentences(12, seed=21)))
    agreed = [
        dense[student_id].max() > 0 and dense[student_id].argmax() == teacher_id for student_id, teacher_id in pairs
    ]
    found = evaluate(pair.student, caches / "teacher", ["p-kl"], (projection,))
    assert len(pairs) > 100
    assert found["eval_top1_agreement"] == pytest.approx(np.mean(agreed), abs=1e-12)


@pytest.mark.slow
def test_top1_agreement_without_a_projection_compares_bytes(pair, caches):
    padding = [b""] * 100  # rows of the output heads above the vocabulary
    bytes_by_id = [[*Tokenizer(folder).vocabulary.bytes_by_id, *padding] for folder in (pair.student, pair.teacher)]
    eos_ids = [Tokenizer(folder).special_token_ids["eos"] for folder in (pair.student, pair.teacher)]
    pairs = list(top1_pairs(pair, small_inputs.sentences(12, seed=21)))
    agreed = 0
    for student_id, teacher_id in pairs:
        student_bytes, teacher_bytes = bytes_by_id[0][student_id], bytes_by_id[1][teacher_id]
        size = min(len(student_bytes), len(teacher_bytes))
        agreed += (size > 0 and student_bytes[:size] == teacher_bytes[:size]) or [student_id, teacher_id] == eos_ids
    found = evaluate(pair.student, caches / "teacher", ["byte-kl"])
    assert found["eval_top1_agreement"] == pytest.approx(agreed / len(pairs), abs=1e-12)


def test_special_tokens_agree_by_their_roles_and_others_by_their_bytes(pair):
    matching = BySpelling((b"", b"ab", b"c", b""), (b"a", b"abc", b"", b"x"), {0: 2})
    student_ids = np.repeat(np.arange(5), 4)
    teacher_ids = np.tile(np.arange(4, dtype=np.int32), 5)
    found = matching.matches(student_ids, teacher_ids).reshape(5, 4)
    assert np.argwhere(found).tolist() == [[0, 2], [1, 0], [1, 1]]


def test_a_student_agrees_with_itself_and_its_kl_to_itself_is_zero(pair, caches):
    found = evaluate(pair.student, caches / "student", ["forward-kl"])
    assert found["eval_top1_agreement"] == 1.0
    assert abs(found["eval_forward-kl"]) < 1e-5
    assert found["eval_distillation_loss"] == found["eval_loss"] == found["eval_forward-kl"]


@pytest.mark.slow
def test_eval_ce_includes_whitespace_that_the_training_loss_masks(run, pair, tmp_path):
    small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has\n\n  two\n apples.", "\n\n  One\n\n"])
    run("cache-teacher", pair.teacher, "data.jsonl", "--top-k", 4, "-o", "cache", cwd=tmp_path)
    expected = evaluate(pair.student, tmp_path / "cache", ["byte-kl"])["eval_ce"]
    masked = evaluate(pair.student, tmp_path / "cache", ["ce:whitespace=mask", "byte-kl"])
    assert masked["eval_ce"] == pytest.approx(expected, rel=1e-12)
    assert masked["eval_loss"] - masked["eval_byte-kl"] != pytest.approx(expected, rel=1e-3)


def test_eval_ce_is_reported_even_if_ce_is_not_a_loss(pair, caches):
    found = evaluate(pair.student, caches / "teacher", ["byte-kl"])
    nats, count = 0.0, 0
    model = load_causal_lm(ModelRef(pair.student, dtype="float64")).eval()
    texts = small_inputs.sentences(12, seed=21)
    for sequence in tokenize_documents(Tokenizer(pair.student), [Document.from_text(text) for text in texts]):
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        nats -= float(logprobs[torch.arange(len(ids) - 1), ids[1:]].sum())
        count += len(ids) - 1
    assert found["eval_ce"] == pytest.approx(nats / count, rel=1e-6)
    assert found["eval_loss"] == found["eval_byte-kl"]  # eval_ce is reported, but is not part of the sum


def test_top1_agreement_is_unavailable_for_sampled_supports(pair, caches):
    found = evaluate(pair.student, caches / "sample", ["byte-kl"])
    assert "eval_byte-kl" in found
    assert "eval_top1_agreement" not in found


def test_eval_caches_of_other_teachers_or_in_wrong_number_are_refused(pair, caches):
    for held_out, message in [
        ((caches / "student",), "a cache of --eval-data is from a teacher with another vocabulary"),
        ((caches / "teacher", caches / "teacher"), "--eval-data has 2 caches for 1 teachers"),
    ]:
        with pytest.raises(XtkError, match=message):
            open_run_inputs(pair.student, [caches / "teacher"], make_train_config(["byte-kl"]), (), held_out)


# --- runs


@pytest.fixture(scope="module")
def with_dropout(pair, tmp_path_factory) -> Path:
    """The student with dropout: a run that samples one random number too many trains other weights."""
    folder = tmp_path_factory.mktemp("dropout") / "student"
    shutil.copytree(pair.student, folder)
    configuration = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(configuration | {"attention_dropout": 0.2}))
    return folder


@pytest.fixture(scope="module")
def arguments(with_dropout, cache, caches) -> list[object]:
    return ["distill", with_dropout, cache, "--loss", "ce", "--loss", "byte-kl", "--max-steps", STEPS,
            "--save-steps", 2, "--logging-steps", 1, "--learning-rate", 1e-3,
            "--per-device-train-batch-size", 4]  # fmt: skip


EVALUATION = ["--eval-on-start", "--eval-steps", 1, "--report-to", "tensorboard"]


@pytest.fixture(scope="module")
def plain(run, arguments, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "out"
    run(*arguments, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(run, arguments, caches, tmp_path_factory) -> Path:
    """The same run with evaluations, a tracker and two data loader workers, interrupted and resumed once."""
    folder = tmp_path_factory.mktemp("evaluated") / "out"
    command = [*arguments, "--eval-data", caches / "teacher", *EVALUATION, "--dataloader-num-workers", 2, "-o", folder]
    run(*command)
    (folder / "xtk.json").unlink()  # as if it had ended after its last checkpoint
    assert "resuming from" in run(*command).stderr
    return folder


@pytest.mark.long
def test_evaluations_and_data_loader_workers_do_not_change_the_run(plain, evaluated):
    assert (plain / "model.safetensors").read_bytes() == (evaluated / "model.safetensors").read_bytes()
    varying_metrics = {"tokens_per_second", "training_seconds", "data_wait_fraction", "peak_memory_gib"}
    records = [
        [
            {key: value for key, value in record.items() if key not in varying_metrics and not key.startswith("eval_")}
            for record in read_metrics(folder / "metrics.jsonl")
            if record["step"]
        ]
        for folder in (plain, evaluated)
    ]
    assert records[0] == records[1]


@pytest.mark.slow
def test_eval_bits_per_byte_before_and_after_training_equal_xtk_evaluate(run, evaluated, with_dropout, caches):
    records = {record["step"]: record for record in read_metrics(evaluated / "metrics.jsonl")}
    assert sorted(records) == [0, 1, 2, 3, 4]
    data = caches / "data.jsonl"
    for step, folder in ((0, with_dropout), (STEPS, evaluated)):
        found = json.loads(run("evaluate", folder, data, "--json").stdout)["bits_per_byte"]
        assert records[step]["eval_bits_per_byte"] == pytest.approx(found, rel=1e-6)
    assert records[STEPS]["eval_bits_per_byte"] < records[0]["eval_bits_per_byte"]
    expected = {"bits_per_byte", "ce", "byte-kl", "distillation_loss", "loss", "top1_agreement"}
    assert set(records[0]) == {"step", *(f"eval_{name}" for name in expected)}
    assert all(
        0 < records[step]["peak_memory_gib"] < 64 and 0 <= records[step]["data_wait_fraction"] <= 1
        for step in range(1, STEPS + 1)
    )
    assert all(math.isfinite(value) for record in records.values() for value in record.values())


@pytest.mark.slow
def test_a_tracker_logs_each_step_once_in_one_run(evaluated):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = evaluated / "trackers" / "xtk"
    events = EventAccumulator(str(folder)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    bits = [event.step for event in events.Scalars("eval_bits_per_byte")]
    records = [record for record in read_metrics(evaluated / "metrics.jsonl") if "loss" in record]
    assert losses == [(record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in records]
    assert bits == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_evaluation_on_plain_data_reports_bits_per_byte_and_ce(run, arguments, caches, tmp_path):
    run(*arguments, "--max-steps", 1, "--eval-data", caches / "data.jsonl", "-o", tmp_path / "out")
    (record,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert {name for name in record if name.startswith("eval_")} == {"eval_bits_per_byte", "eval_ce"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused(run, arguments, tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    done = run(*arguments, "--report-to", f"tensorboard,{name}", "-o", tmp_path / "out", code=1)
    assert f"the tracker {name} is not installed" in done.stderr
    assert not (tmp_path / "out").exists()


def test_errors_in_a_data_loader_worker_are_reported_like_those_of_the_run(run, arguments, cache, tmp_path):
    damaged = tmp_path / "cache"
    shutil.copytree(cache, damaged)
    shard = max(damaged.glob("*.arrow"), key=os.path.getsize)
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(byte ^ 0xFF for byte in content[middle : middle + 400])
    shard.write_bytes(content)
    outputs = [
        run(*arguments[:2], damaged, *arguments[3:], "--num-train-epochs", 1, "--max-steps", 0,
            "--dataloader-num-workers", workers, "-o", tmp_path / f"out-{workers}", code=1).stderr
        for workers in (0, 1)
    ]  # fmt: skip
    errors = [[line for line in text.splitlines() if line.startswith(("xtk:", "  where", "  try"))] for text in outputs]
    assert errors[0] == errors[1] != []


@pytest.mark.long
def test_workers_end_with_the_run_and_a_killed_worker_ends_the_run(arguments, tmp_path):
    """The run of a killed worker reports it; the workers of a killed run exit; a signal to all is one to the run."""
    for victim, expected in (("worker", 1), ("run", -signal.SIGKILL), ("all", os.EX_TEMPFAIL)):
        output = tmp_path / victim
        command = [*arguments, "--max-steps", 100_000, "--dataloader-num-workers", 1, "--save-steps", 0, "-o", output]
        process = subprocess.Popen(
            [sys.executable, "-m", "xtk", *map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 120
        while not read_metrics(output / "metrics.jsonl") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = [child for child in children_of(process.pid) if "spawn_main" in command_line_of(child)]
        assert len(workers) == 1
        if victim == "all":  # as Slurm with --signal=USR1@120
            os.kill(workers[0], signal.SIGUSR1)
            time.sleep(1)
            os.kill(process.pid, signal.SIGUSR1)
        else:
            os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == expected, stderr
        assert "Traceback" not in stderr
        assert (victim == "worker") == ("a process of --dataloader-num-workers was killed" in stderr)
        while any(command_line_of(worker) for worker in workers) and time.monotonic() < deadline + 30:
            time.sleep(0.05)
        assert not any(command_line_of(worker) for worker in workers)


def children_of(parent: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{parent}/task").glob("*/children") for word in path.read_text().split()]


def command_line_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
