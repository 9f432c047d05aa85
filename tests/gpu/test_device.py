"""Losses, gradients, host waits, teacher, bf16, resume, offload, FSDP on a GPU; without one, losses on a simulated GPU.

`tests/gpu/gpu_session.py` runs these tests on a GPU, group by group: -k losses, gradients_do_not, waits, teacher, bf16,
resume, offload, one_process. Reductions on a GPU add in a different order each time, so runs are not compared bit for
bit there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.cache.reader import TeacherCache
from xtk.losses import LOSSES
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef

sys.path.insert(0, str(Path(__file__).parent.parent / "losses"))

import recorded_training_steps
from profiled_products import BFLOAT16, MAX_FLOAT32_FRACTION, Profile
from recorded_training_steps import make_train_config, open_run_inputs, record_steps
from simulated_cuda import CUDA, SimulatedCuda
from single_process_group import WAYS, step_config
from test_losses_on_a_device import loss_and_gradients

pytestmark = pytest.mark.gpu
ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
CROSS_TOKENIZER_LOSSES = ["ce", "p-kl", "boundary-kl", "byte-kl", "alm", "uld", "gold", "h-kl"]


@pytest.fixture(autouse=True)
def no_state_of_other_tests():
    """Forget the precision of the process's `Accelerator` after a test."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def on_a_device() -> contextlib.AbstractContextManager[object]:
    """Return a context in which `CUDA` is a GPU, or simulated so that a test takes the same branches."""
    return contextlib.nullcontext() if ON_GPU else SimulatedCuda(only_as_on_a_gpu=True)


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_gradients_match_fp64_on_the_cpu(name):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        for chunk in (64, 1):
            expected = loss_and_gradients(name, chunk, CPU)
            with on_a_device():
                found = loss_and_gradients(name, chunk, CUDA, dtype=dtype)
            for one, other in zip(found, expected, strict=True):
                scale = max(1.0, float(other.abs().max()))
                torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("mode", ["packed", "padded", "gradient checkpointing"])
def test_gradients_do_not_depend_on_passes_chunks_or_device(pair, cache, projection, monkeypatch, mode):
    options: dict[str, Any] = {"packed": {}, "padded": {"packing": False}}.get(mode, {"gradient_checkpointing": True})

    def steps(batch: int, rows: int, accelerator: Accelerator) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("xtk.losses.head.chunk_rows_of", lambda head, states: rows)
        config = make_train_config(CROSS_TOKENIZER_LOSSES, batch, **options)
        inputs = open_run_inputs(pair.student, [cache], config, (projection,))
        found, _ = record_steps(accelerator, pair.student, inputs, config, 6)
        return {name: tensor.cpu() for name, tensor in found.items()}

    accelerator = Accelerator(cpu=not ON_GPU)
    expected = steps(6, 1000, accelerator)
    for batch, rows in ((6, 16), (2, 1000), (1, 16)):
        for name, gradient in steps(batch, rows, accelerator).items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3 * scale + 1e-9)


@pytest.mark.skipif(
    not ON_GPU, reason="counts CUDA's synchronizations; tests/training/test_device_reads.py simulates it"
)
def test_host_waits_of_a_step_do_not_depend_on_its_passes(pair, cache, projection):
    counts = []
    for batch in (6, 1):
        config = make_train_config(CROSS_TOKENIZER_LOSSES, batch)
        inputs = open_run_inputs(pair.student, [cache], config, (projection,))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                record_steps(Accelerator(), pair.student, inputs, config, 6, steps=1)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        # Other synchronizations are of the model's loading and of the recorder.
        counts.append(sum("xtk/losses" in wait.filename or "host_to_device" in wait.filename for wait in waits))
    assert max(counts) <= 2
    assert counts[0] == counts[1]


def xtk(*arguments: object, on_gpu: bool = ON_GPU, code: int = 0) -> None:
    """Run `xtk` on the GPU, or on the CPU."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    command = [sys.executable, "-m", "xtk", *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert completed.returncode == code, completed.stderr


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def distance(run: Path, reference: Path) -> float:
    """Return the largest difference of weights, relative to the largest weight of each matrix."""
    weights, expected = load_file(run / "model.safetensors"), load_file(reference / "model.safetensors")
    assert weights.keys() == expected.keys()
    return max(
        float((weights[name] - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-9))
        for name in weights
    )


def distill(pair, data: Path, folder: Path, *options: object, code: int = 0) -> Path:
    xtk("distill", pair.student, data, "--loss", "ce", "--loss", "byte-kl", "--max-steps", 6, "--logging-steps", 1,
        "--per-device-train-batch-size", 4, *options, "-o", folder, code=code)  # fmt: skip
    return folder


def test_bf16_training_follows_fp32(pair, cache, tmp_path):
    losses = [
        [record["loss"] for record in records(distill(pair, cache, tmp_path / kind, "--mixed-precision", kind))]
        for kind in ("no", "bf16")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("packing", [True, False])
def test_matrix_products_of_a_bf16_step_are_bf16(pair, cache, projection, monkeypatch, packing):
    profiles, step = [], recorded_training_steps._step

    def profiled_step(*arguments: Any) -> Any:
        results = []
        profiles.append(Profile.of(lambda: results.append(step(*arguments))))
        return results[0]

    monkeypatch.setattr(recorded_training_steps, "_step", profiled_step)
    config = make_train_config(CROSS_TOKENIZER_LOSSES, 3, mixed_precision="bf16", packing=packing)
    inputs = open_run_inputs(pair.student, [cache], config, (projection,))
    accelerator = Accelerator(cpu=not ON_GPU, mixed_precision=config.mixed_precision)
    record_steps(accelerator, pair.student, inputs, config, 6, steps=2)
    _, profile = profiles  # the first step also compares student and teacher in float32, once
    assert profile.product_flops[BFLOAT16] > 0
    assert profile.float32_fraction() < MAX_FLOAT32_FRACTION, profile.product_flops


def test_bf16_students_of_real_depth_pack_their_documents():
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}
    hidden = 2048 if ON_GPU else 256
    config = LlamaConfig(hidden_size=hidden, intermediate_size=4 * hidden, **shape)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = LlamaForCausalLM(config).bfloat16()
    assert BackboneWithHead(model).enable_packing()


def test_one_process_under_torchrun_has_the_gradients_of_a_plain_process(pair, cache, tmp_path):
    config = step_config()
    accelerator = Accelerator(cpu=not ON_GPU)
    expected, results = record_steps(
        accelerator, pair.student, open_run_inputs(pair.student, [cache], config), config, 6, steps=1
    )
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
               folder / "single_process_group.py", pair.student, cache, tmp_path]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    completed = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, check=False)
    assert completed.returncode == 0, completed.stderr
    printed = json.loads(completed.stdout.splitlines()[-1])
    assert printed["backend"] == ("nccl" if ON_GPU else "gloo")
    for way in WAYS:
        assert printed["norms"][way] == pytest.approx(results["norms"][0], rel=1e-4)
        gradients = load_file(tmp_path / f"{way}.safetensors")
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], gradient.cpu(), rtol=1e-3, atol=1e-3 * scale + 1e-9)


def test_resume_after_a_stop_matches_an_uninterrupted_run(pair, cache, tmp_path):
    uninterrupted = distill(pair, cache, tmp_path / "whole")
    repeated = distill(pair, cache, tmp_path / "again") if ON_GPU else uninterrupted
    stopped = distill(pair, cache, tmp_path / "stopped", "--max-seconds", 0.001, code=75)
    assert not (stopped / "model.safetensors").exists()
    distill(pair, cache, stopped)
    # Two uninterrupted runs on a GPU differ by the order of additions; resuming must not add to it.
    assert distance(stopped, uninterrupted) <= 10 * distance(repeated, uninterrupted) + (1e-5 if ON_GPU else 0)


def test_offload_of_the_student_does_not_change_its_weights(pair, corpus, tmp_path):
    runs = [
        distill(pair, corpus, tmp_path / f"run-{len(options)}", "--teacher", pair.teacher, *options)
        for options in ((), ("--offload-student",))
    ]
    assert distance(*runs) <= (1e-5 if ON_GPU else 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_teacher_logprobs_match_fp64_on_the_cpu(pair, corpus, tmp_path, dtype):
    xtk("cache-teacher", pair.teacher, corpus, "--top-k", 16, "--precision", "float32", "--dtype", dtype,
        "-o", tmp_path / "cache")  # fmt: skip
    cache = TeacherCache(tmp_path / "cache")
    model = load_causal_lm(ModelRef(pair.teacher, dtype="float64"), device=CPU)
    worst = 0.0
    for number in range(0, len(cache), 7):
        stored = cache.read_document(number)
        ids = torch.from_numpy(stored.tokens.ids.astype(np.int64))[None]
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0].log_softmax(-1)
        found = stored.teacher_logprobs
        owners = np.repeat(found.positions - 1, np.diff(found.offsets))
        exact = expected[torch.from_numpy(owners), torch.from_numpy(found.ids.astype(np.int64))].numpy()
        worst = max(worst, float(np.abs(found.logprobs - exact).max()))
    assert worst < (1e-4 if dtype == "float32" else 0.15)
