"""Overhead of the training loop per step, and time until the first step.

The loop: `distill` trains a student from a cache; then a bare PyTorch loop trains on the same micro-batches, which are
already built, with the same model and loss, AdamW and clipping, and nothing else. Both alternate in one process,
without the first step; median of the ratios. On a GPU both compute in bf16 (`--mixed-precision bf16`): in fp32 a step
takes so long that no time of the host is seen.

The start: from the start of the process to the first line of `metrics.jsonl`, with the quickstart's student (0.9 M) and
an existing cache and projection; for comparison, a process that only imports torch and transformers, and a run on two
processes. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_distill import prepare
from measurement import gsm8k, median_seconds, model_folder, report, run_process
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk import terminal
from xtk.losses.spec import parse_losses
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, silence_transformers
from xtk.models.packed_attention import PackedSequence
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import parameter_groups
from xtk.quickstart.tiny_models import make_student, make_teacher
from xtk.text.tokenizer import Tokenizer
from xtk.training import training_loop
from xtk.training.distill import distill
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.student_generator import autocast
from xtk.training.student_with_losses import StudentWithLoss
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

REPEATS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED_PRECISION = "bf16" if DEVICE.type == "cuda" else "no"


def train_and_record(folder: Path, loss: str, steps: int, batch: int, name: str) -> tuple[list[Any], list[float]]:
    """Train with `distill`; return the micro-batches of each step, and the end time of each step."""
    paths = RunPaths(ModelRef(folder / "student"), (str(folder / "cache"),), (folder / "p",), folder / name)
    losses = tuple(parse_losses(["ce", loss] if loss != "ce" else ["ce"]))
    config = TrainConfig(
        losses=losses, max_steps=steps, per_device_train_batch_size=batch, mixed_precision=MIXED_PRECISION
    )
    batches, end_times, original_step = [], [], training_loop._step

    def step(run: Any, optimizer: Any, micro_batches: Any) -> Any:
        result = original_step(run, optimizer, micro_batches)
        batches.append(micro_batches)
        end_times.append(time.perf_counter())
        return result

    training_loop._step = step
    try:
        inputs = open_inputs(paths, config, Tokenizer(folder / "student"))
        distill(paths, config, LoggingConfig(save_steps=0), inputs, force=True)
    finally:
        training_loop._step = original_step
    return batches, end_times


def bare_loop(folder: Path, batches: list[Any]) -> list[float]:
    """Train on micro-batches in a bare loop; return the end time of each step."""
    torch.manual_seed(0)
    model = load_causal_lm(ModelRef(folder / "student"), device=DEVICE)
    backbone = BackboneWithHead(model)
    assert backbone.enable_packing()
    student = StudentWithLoss(backbone).train()
    parameters = list(student.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(backbone.model, 0.0), lr=5e-5, fused=True)
    end_times = []
    for (batch,) in batches:
        terms = [term.to(DEVICE, 1 / max(term.denominator, 1)) for term in batch.terms]
        ids = torch.from_numpy(batch.input_ids).to(DEVICE)
        with autocast(MIXED_PRECISION, DEVICE):
            total, _ = student(ids, batch.loss_positions, terms, PackedSequence(batch.document_lengths))
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        end_times.append(time.perf_counter())
    return end_times


def overhead_rows(folder: Path, name: str, steps: int, batch: int) -> list[tuple[str, str, str]]:
    """Return a row of the table for each loss."""
    rows = []
    for loss in ("ce", "byte-kl"):
        ratios = []
        for repeat in range(REPEATS):
            batches, end_times = train_and_record(folder, loss, steps, batch, f"{loss}-{repeat}")
            bare_end_times = bare_loop(folder, batches)
            ratios.append((end_times[-1] - end_times[0]) / (bare_end_times[-1] - bare_end_times[0]))
        change = f"{statistics.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"
        label = loss if loss == "ce" else f"ce and {loss}"
        rows.append((f"{name}: {label}, time of a step over a bare loop's", change, "+3 %"))
    return rows


def idle_row(folder: Path, steps: int, batch: int) -> tuple[str, str, str]:
    """Return the fraction of the time in which the GPU computes nothing, from the second step on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _, end_times = train_and_record(folder, "byte-kl", steps, batch, "idle")
    kernels = sorted((event.time_range.start, event.time_range.end) for event in profile.events())
    window_start = kernels[-1][1] - 1e6 * (end_times[-1] - end_times[0])
    busy, busy_until = 0.0, window_start
    for start, end in kernels:
        busy += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return f"ce and byte-kl, {steps} steps: the GPU is idle", f"{1 - busy / (kernels[-1][1] - window_start):.1%}", "3 %"


def write_small_inputs(folder: Path) -> None:
    """Write the quickstart's pair, a cache and a projection."""
    texts = gsm8k(400)
    make_student(folder / "student", texts, 0)
    make_teacher(folder / "teacher", texts, 1)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(folder)


def write_large_inputs(folder: Path) -> None:
    """Write a pair with the real vocabularies, a cache and a projection."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    model_folder(folder / "student", "llama3", LlamaForCausalLM(LlamaConfig(vocab_size=128256, **shape, **heads)))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    model_folder(folder / "teacher", "qwen", Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, **shape, **heads)))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in gsm8k(48)))
    prepare(folder)


def seconds_to_first_step(folder: Path, name: str, *options: str) -> float:
    """Return the time until the first step is logged."""
    models = [str(folder / "student"), str(folder / "cache")]
    command = [sys.executable, "-m", "xtk", "distill", *models, "--loss", "ce", "--loss", "byte-kl",
               "--max-steps", "1", "--save-steps", "0", "-q", "-o", str(folder / name)]  # fmt: skip
    started, metrics = time.perf_counter(), folder / name / "metrics.jsonl"
    child = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    while child.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    if child.wait():
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return seconds


def start_rows(folder: Path) -> list[tuple[str, str, str]]:
    """Return rows of the table."""
    import_seconds = median_seconds(
        lambda: run_process(sys.executable, "-c", "import torch; from transformers import AutoModelForCausalLM"),
        REPEATS,
    )
    rows = [("importing torch and transformers", f"{import_seconds:.1f} s", "(none)")]
    for processes in (1, 2):
        options = ("--num-processes", str(processes)) if processes > 1 else ()
        seconds = [seconds_to_first_step(folder, f"{processes}-{repeat}", *options) for repeat in range(REPEATS)]
        label = "a process" if processes == 1 else "two processes"
        rows.append((f"start to first step, 0.9 M parameters, {label}", f"{statistics.median(seconds):.1f} s", "15 s"))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("small", "large"), help="one of the two students")
    parser.add_argument("--steps", type=int, help="steps of a run (80 for the small student, 8 for the large one)")
    args = parser.parse_args()
    silence_transformers()
    terminal.set_quiet(True)
    rows = [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", "")]
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "large":
            write_small_inputs(Path(folder))
            rows += [] if args.only else start_rows(Path(folder))
            rows += overhead_rows(Path(folder), "V = 4,000, 0.9 M parameters", steps=args.steps or 80, batch=8)
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "small":
            write_large_inputs(Path(folder))
            rows += overhead_rows(Path(folder), "V = 128,256, 39 M parameters", steps=args.steps or 8, batch=4)
            if DEVICE.type == "cuda":
                rows.append(idle_row(Path(folder), args.steps or 8, 4))
    report(__file__, rows)


if __name__ == "__main__":
    main()
