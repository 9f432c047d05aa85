"""Evaluation while training says what a plain computation says, and leaves the run as it is."""

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
from recorded_training_steps import inputs_of, recipe_of

from xtk.artifacts.projection_file import read_projection
from xtk.errors import XtkError
from xtk.evaluation.top1_agreement import BySpelling
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.metrics_file import read_metrics
from xtk.training.parallel_config import ParallelConfig
from xtk.training.student_with_losses import StudentWithLoss

CPU = torch.device("cpu")
STEPS = 4


@pytest.fixture(scope="module")
def caches(run, pair, tmp_path_factory) -> Path:
    """Held-out documents as the teacher said them, and as the student itself did."""
    folder = tmp_path_factory.mktemp("held-out")
    small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(12, seed=21))
    for name in ("teacher", "student"):
        run("cache-teacher", getattr(pair, name), "data.jsonl", "--top-k", 16, "--precision", "float32", "-o", name,
            cwd=folder)  # fmt: skip
    run("cache-teacher", pair.teacher, "data.jsonl", "--support", "sample", "-o", "sample", cwd=folder)
    return folder


def evaluate(student: Path, cache: Path, losses: list[str], projections: tuple[Path, ...] = ()) -> dict[str, float]:
    inputs = inputs_of(student, [cache], recipe_of(losses), projections, (cache,))
    model = StudentWithLoss(BackboneWithHead(load_causal_lm(student)))
    return HeldOutEvaluator(inputs.held_out, model, inputs.tokenizer, 256, 0, ParallelConfig(), CPU)()


def likeliest(folder: Path, ids: np.ndarray) -> np.ndarray:
    """What a model finds likeliest behind each token, from full logits in float64."""
    model = load_causal_lm(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].argmax(-1).numpy()


def starts_of_both(pair, texts: list[str]):
    """The tokens that student and teacher find likeliest, wherever both begin a trained token."""
    documents = [Document.from_text(text) for text in texts]
    students, teachers = (tokenize_documents(Tokenizer(folder), documents) for folder in (pair.student, pair.teacher))
    for ours, theirs in zip(students, teachers, strict=True):
        of_student, of_teacher = likeliest(pair.student, ours.ids), likeliest(pair.teacher, theirs.ids)
        for start, stop, begin, end in align_sequences(ours, theirs).tolist():
            if ours.train_mask[start:stop].all() and theirs.train_mask[begin:end].all():
                yield int(of_student[start - 1]), int(of_teacher[begin - 1])


def test_top1_agreement_through_a_projection_is_that_of_full_logits(pair, caches, projection):
    weights = read_projection(projection)
    dense = np.zeros((weights.student_width, weights.teacher_width))
    dense[weights.entry_rows, weights.teacher_ids] = weights.weights
    pairs = list(starts_of_both(pair, small_inputs.sentences(12, seed=21)))
    agreed = [dense[ours].max() > 0 and dense[ours].argmax() == theirs for ours, theirs in pairs]
    found = evaluate(pair.student, caches / "teacher", ["p-kl"], (projection,))
    assert len(pairs) > 100
    assert found["eval_top1_agreement"] == pytest.approx(np.mean(agreed), abs=1e-12)


def test_top1_agreement_without_a_projection_is_by_bytes(pair, caches):
    padding = [b""] * 100  # rows of the heads above the tokens
    spelled = [[*Tokenizer(folder).vocabulary.bytes_by_id, *padding] for folder in (pair.student, pair.teacher)]
    ends = [Tokenizer(folder).special_token_ids["eos"] for folder in (pair.student, pair.teacher)]
    pairs = list(starts_of_both(pair, small_inputs.sentences(12, seed=21)))
    agreed = 0
    for ours, theirs in pairs:
        one, other = spelled[0][ours], spelled[1][theirs]
        shorter = min(len(one), len(other))
        agreed += (shorter > 0 and one[:shorter] == other[:shorter]) or [ours, theirs] == ends
    found = evaluate(pair.student, caches / "teacher", ["byte-kl"])
    assert found["eval_top1_agreement"] == pytest.approx(agreed / len(pairs), abs=1e-12)


def test_special_tokens_agree_by_their_roles_and_others_by_their_bytes(pair):
    meeting = BySpelling((b"", b"ab", b"c", b""), (b"a", b"abc", b"", b"x"), {0: 2})
    students = np.repeat(np.arange(5), 4)
    teachers = np.tile(np.arange(4, dtype=np.int32), 5)
    found = meeting.matches(students, teachers).reshape(5, 4)
    assert np.argwhere(found).tolist() == [[0, 2], [1, 0], [1, 1]]


def test_a_student_agrees_with_itself_and_its_kl_to_itself_is_nothing(pair, caches):
    found = evaluate(pair.student, caches / "student", ["forward-kl"])
    assert found["eval_top1_agreement"] == 1.0
    assert abs(found["eval_forward-kl"]) < 1e-5
    assert found["eval_distillation_loss"] == found["eval_loss"] == found["eval_forward-kl"]


def test_the_cross_entropy_is_that_of_all_tokens_if_the_run_leaves_out_white_space(run, pair, tmp_path):
    small_inputs.write_jsonl(tmp_path / "data.jsonl", ["Anna has\n\n  two\n apples.", "\n\n  One\n\n"])
    run("cache-teacher", pair.teacher, "data.jsonl", "--top-k", 4, "-o", "cache", cwd=tmp_path)
    expected = evaluate(pair.student, tmp_path / "cache", ["byte-kl"])["eval_ce"]
    masked = evaluate(pair.student, tmp_path / "cache", ["ce:whitespace=mask", "byte-kl"])
    assert masked["eval_ce"] == pytest.approx(expected, rel=1e-12)
    assert masked["eval_loss"] - masked["eval_byte-kl"] != pytest.approx(expected, rel=1e-3)


def test_the_cross_entropy_of_held_out_text_is_always_told(pair, caches):
    found = evaluate(pair.student, caches / "teacher", ["byte-kl"])
    nats, count = 0.0, 0
    model = load_causal_lm(pair.student, dtype=torch.float64).eval()
    texts = small_inputs.sentences(12, seed=21)
    for sequence in tokenize_documents(Tokenizer(pair.student), [Document.from_text(text) for text in texts]):
        ids = torch.from_numpy(sequence.ids.astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        nats -= float(logprobs[torch.arange(len(ids) - 1), ids[1:]].sum())
        count += len(ids) - 1
    assert found["eval_ce"] == pytest.approx(nats / count, rel=1e-6)
    assert found["eval_loss"] == found["eval_byte-kl"]  # it is told, and no part of the sum


def test_of_draws_alone_nobody_knows_the_likeliest_token(pair, caches):
    found = evaluate(pair.student, caches / "sample", ["byte-kl"])
    assert "eval_byte-kl" in found
    assert "eval_top1_agreement" not in found


def test_held_out_caches_of_others_are_refused(pair, caches):
    for held_out, message in [
        ((caches / "student",), "a cache of --eval-data is from a teacher with another vocabulary"),
        ((caches / "teacher", caches / "teacher"), "--eval-data has 2 caches for 1 teachers"),
    ]:
        with pytest.raises(XtkError, match=message):
            inputs_of(pair.student, [caches / "teacher"], recipe_of(["byte-kl"]), (), held_out)


# --- runs


@pytest.fixture(scope="module")
def with_dropout(pair, tmp_path_factory) -> Path:
    """The student, with dropout: who draws a number too many gets another one."""
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


EVALUATED = ["--eval-on-start", "--eval-steps", 1, "--report-to", "tensorboard"]


@pytest.fixture(scope="module")
def plain(run, arguments, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "out"
    run(*arguments, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(run, arguments, caches, tmp_path_factory) -> Path:
    """The same with evaluations, a tracker, and batches made by two processes; ended once in the middle."""
    folder = tmp_path_factory.mktemp("evaluated") / "out"
    command = [*arguments, "--eval-data", caches / "teacher", *EVALUATED, "--dataloader-num-workers", 2, "-o", folder]
    run(*command)
    (folder / "xtk.json").unlink()  # as if it had ended behind its last checkpoint
    assert "resuming from" in run(*command).stderr
    return folder


@pytest.mark.long
def test_evaluations_and_workers_change_nothing(plain, evaluated):
    assert (plain / "model.safetensors").read_bytes() == (evaluated / "model.safetensors").read_bytes()
    clocks = {"tokens_per_second", "training_seconds", "data_wait_fraction", "peak_memory_gib"}
    records = [
        [
            {key: value for key, value in record.items() if key not in clocks and not key.startswith("eval_")}
            for record in read_metrics(folder / "metrics.jsonl")
            if record["step"]
        ]
        for folder in (plain, evaluated)
    ]
    assert records[0] == records[1]


@pytest.mark.slow
def test_the_gain_is_known(run, evaluated, with_dropout, caches):
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
def test_a_tracker_gets_each_step_once_in_one_run(evaluated):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = evaluated / "trackers" / "xtk"
    events = EventAccumulator(str(folder)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    bits = [event.step for event in events.Scalars("eval_bits_per_byte")]
    records = [record for record in read_metrics(evaluated / "metrics.jsonl") if "loss" in record]
    assert losses == [(record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in records]
    assert bits == [0, 1, 2, 3, 4]


def test_plain_data_is_told_its_bits_and_cross_entropy(run, arguments, caches, tmp_path):
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


def test_what_a_worker_meets_is_told_as_its_own(run, arguments, cache, tmp_path):
    damaged = tmp_path / "cache"
    shutil.copytree(cache, damaged)
    shard = max(damaged.glob("*.arrow"), key=os.path.getsize)
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(byte ^ 0xFF for byte in content[middle : middle + 400])
    shard.write_bytes(content)
    told = [
        run(*arguments[:2], damaged, *arguments[3:], "--num-train-epochs", 1, "--max-steps", 0,
            "--dataloader-num-workers", workers, "-o", tmp_path / f"out-{workers}", code=1).stderr
        for workers in (0, 1)
    ]  # fmt: skip
    errors = [[line for line in text.splitlines() if line.startswith(("xtk:", "  where", "  try"))] for text in told]
    assert errors[0] == errors[1] != []


@pytest.mark.long
def test_workers_end_with_the_run_and_a_killed_one_ends_it(arguments, tmp_path):
    """The run of a killed worker says so; the workers of a killed run leave."""
    for victim, expected in (("worker", 1), ("run", -signal.SIGKILL)):
        output = tmp_path / victim
        command = [*arguments, "--max-steps", 100_000, "--dataloader-num-workers", 1, "--save-steps", 0, "-o", output]
        process = subprocess.Popen(
            [sys.executable, "-m", "xtk", *map(str, command)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 120
        while not read_metrics(output / "metrics.jsonl") and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        workers = [child for child in children_of(process.pid) if "spawn_main" in words_of(child)]
        assert len(workers) == 1
        os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
        _, told = process.communicate(timeout=60)
        assert process.returncode == expected, told
        assert "Traceback" not in told
        assert (victim == "worker") == ("a process of --dataloader-num-workers was killed" in told)
        while any(words_of(worker) for worker in workers) and time.monotonic() < until + 30:
            time.sleep(0.05)
        assert not any(words_of(worker) for worker in workers)


def children_of(parent: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{parent}/task").glob("*/children") for word in path.read_text().split()]


def words_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
