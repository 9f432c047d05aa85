"""Overhead of the training loop per step, and time until the first step.

The loop: `distill` trains a student from a cache; then a bare PyTorch loop trains on the same micro-batches, which are
already built, with the same model and loss, AdamW and clipping, and nothing else. Both alternate in one process,
without the first step; median of the ratios. Both compute in the precision that `distill` chooses for the device
(`--mixed-precision auto`): on a GPU bf16.

`--only 1b`: a student of the shape of Llama 3.2 1B, with passes of about 14,000 tokens, for a GPU. `--profile`: also
how long the GPU is idle, the kernels of a step, and the floating-point operations of its matrix products by dtype; in
bf16, the script fails if more than 1 % of them are of float32.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "gpu"))

import torch
from bench_distill import prepare
from measurement import gsm8k, median_seconds, model_folder, report, run_process
from profiled_products import MAX_FLOAT32_FRACTION, Profile
from torch.profiler import ProfilerActivity
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk import terminal
from xtk.losses.spec import parse_losses
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, silence_transformers
from xtk.models.packed_attention import PackedSequence
from xtk.models.precision import resolve_mixed_precision
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
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8}  # fmt: skip
SHOWN_KERNELS = 8


def take_plainly(number: int, step: Callable[[], Any]) -> Any:
    """Take a step of training."""
    return step()


def train_and_record(
    folder: Path, loss: str, steps: int, batch: int, name: str, precision: str = "auto",
    take_step: Callable[[int, Callable[[], Any]], Any] = take_plainly,
) -> tuple[list[Any], list[float]]:  # fmt: skip
    """Train with `distill`; return the micro-batches of each step, and the end time of each step."""
    paths = RunPaths(ModelRef(folder / "student"), (str(folder / "cache"),), (folder / "p",), folder / name)
    losses = tuple(parse_losses(["ce", loss] if loss != "ce" else ["ce"]))
    config = TrainConfig(losses=losses, max_steps=steps, per_device_train_batch_size=batch, mixed_precision=precision)
    batches, end_times, original_step = [], [], training_loop._step

    def step(run: Any, optimizer: Any, micro_batches: Any) -> Any:
        result = take_step(len(batches), lambda: original_step(run, optimizer, micro_batches))
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


def bare_loop(folder: Path, batches: list[Any], precision: str) -> list[float]:
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
        with autocast(resolve_mixed_precision(precision), DEVICE):
            total, _ = student(ids, batch.loss_positions, terms, PackedSequence(batch.document_lengths))
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        end_times.append(time.perf_counter())
    return end_times


def overhead_rows(
    folder: Path, name: str, steps: int, batch: int, losses: tuple[str, ...], options: argparse.Namespace
) -> list[tuple[str, str, str]]:
    """Return a row of the table for each loss."""
    rows = []
    for loss in losses:
        ratios = []
        for repeat in range(options.repeats):
            batches, ends = train_and_record(folder, loss, steps, batch, f"{loss}-{repeat}", options.mixed_precision)
            bare_ends = bare_loop(folder, batches, options.mixed_precision)
            ratios.append((ends[-1] - ends[0]) / (bare_ends[-1] - bare_ends[0]))
        change = f"{statistics.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"
        label = loss if loss == "ce" else f"ce and {loss}"
        rows.append((f"{name}: {label}, time of a step over a bare loop's", change, "+3 %"))
    return rows


def profile_rows(
    folder: Path, name: str, steps: int, batch: int, precision: str
) -> tuple[list[tuple[str, str, str]], float]:
    """Return rows on ce and byte-kl, and the fraction of float32 in the products of the last step.

    Rates and idle time are those between the first and the last step.
    """
    kernels_only = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    profiles = list[Profile]()

    def take_step(number: int, step: Callable[[], Any]) -> Any:
        if number < steps - 1:
            return step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            kernels_only.stop()
        results = list[Any]()
        profiles.append(Profile.of(lambda: results.append(step())))
        return results[0]

    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        kernels_only.start()
    batches, ends = train_and_record(folder, "byte-kl", steps, batch, "profiled", precision, take_step)
    seconds, (step_profile,) = ends[-2] - ends[0], profiles
    tokens = [sum(micro_batch.tokens for micro_batch in micro_batches) for micro_batches in batches]
    rate = sum(tokens[1:-1]) / seconds
    flops = step_profile.product_flops
    fraction = step_profile.float32_fraction()
    label = f"{name}: ce and byte-kl"
    rows = [
        (f"{label}, steps of {statistics.mean(tokens):,.0f} tokens", f"{rate:,.0f} tokens/s", ""),
        (f"{label}, matrix products", f"{rate * flops.total() / tokens[-1] / 1e12:.3g} TFLOP/s", ""),
        (f"{label}, products of float32, of all operations", f"{fraction:.2%}", f"{MAX_FLOAT32_FRACTION:.0%}"),
    ]
    if DEVICE.type == "cuda":
        spans = sorted((event.time_range.start, event.time_range.end) for event in kernels_only.events())
        window_start = spans[-1][1] - 1e6 * seconds
        busy, busy_until = 0.0, window_start
        for start, end in spans:
            busy += max(0.0, end - max(start, busy_until))
            busy_until = max(busy_until, end)
        kernels, total = step_profile.kernel_seconds, step_profile.kernel_seconds.total()
        rows += [
            (f"{label}, the GPU is idle", f"{1 - busy / (spans[-1][1] - window_start):.1%}", "3 %"),
            (f"{label}, peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", ""),
            (f"{label}, time in kernels of float32 products", f"{step_profile.float32_kernel_fraction():.2%}", "1 %"),
            *((f"kernel {kernel[:100]}", f"{used / total:.1%} of the step", "")
              for kernel, used in kernels.most_common(SHOWN_KERNELS)),
        ]  # fmt: skip
    return rows, fraction


def write_small_inputs(folder: Path) -> None:
    """Write the quickstart's pair, a cache and a projection."""
    texts = gsm8k(400)
    make_student(folder / "student", texts, 0)
    make_teacher(folder / "teacher", texts, 1)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(folder)


def write_large_inputs(folder: Path, shape: dict[str, int], documents: int) -> None:
    """Write a student with the real vocabulary and a small teacher with another one, a cache and a projection."""
    torch.manual_seed(0)
    with DEVICE:
        config = LlamaConfig(vocab_size=128256, tie_word_embeddings=True, **shape)
        student = LlamaForCausalLM(config)
        model_folder(folder / "student", "llama3", student.bfloat16() if DEVICE.type == "cuda" else student)
        small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16,
                 "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
        config = Qwen3Config(vocab_size=151936, tie_word_embeddings=True, **small)
        model_folder(folder / "teacher", "qwen", Qwen3ForCausalLM(config))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in gsm8k(documents)))
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
    parser.add_argument("--only", choices=("small", "large", "1b"), help="one of the students; without it, not 1b")
    parser.add_argument("--steps", type=int, help="steps of a run (80 for the small student, else 8)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="runs of each loss")
    parser.add_argument("--mixed-precision", choices=("auto", "no", "bf16"), default="auto")
    parser.add_argument("--profile", action="store_true", help="idle time, kernels and products of a step")
    args = parser.parse_args()
    silence_transformers()
    terminal.set_quiet(True)
    rows = [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", "")]
    fractions = [0.0]

    def measure(folder: Path, name: str, steps: int, batch: int, losses: tuple[str, ...]) -> None:
        rows.extend(overhead_rows(folder, name, args.steps or steps, batch, losses, args))
        if args.profile:
            more, fraction = profile_rows(folder, name, args.steps or steps, batch, args.mixed_precision)
            rows.extend(more)
            fractions.append(fraction)

    with tempfile.TemporaryDirectory() as folder:
        if args.only in (None, "small"):
            write_small_inputs(Path(folder))
            rows += [] if args.only else start_rows(Path(folder))
            measure(Path(folder), "V = 4,000, 0.9 M parameters", 80, 8, ("ce", "byte-kl"))
    with tempfile.TemporaryDirectory() as folder:
        if args.only in (None, "large"):
            write_large_inputs(Path(folder), LARGE, 48)
            measure(Path(folder), "V = 128,256, 39 M parameters", 8, 4, ("ce", "byte-kl"))
    with tempfile.TemporaryDirectory() as folder:
        if args.only == "1b":
            write_large_inputs(Path(folder), LLAMA_1B, 320)
            measure(Path(folder), "V = 128,256, 1.2 B parameters", 8, 80, ("byte-kl",))
    report(__file__, rows)
    if resolve_mixed_precision(args.mixed_precision) == "bf16" and max(fractions) > MAX_FLOAT32_FRACTION:
        raise SystemExit(f"float32 products: {max(fractions):.1%} of the operations of a bf16 step")


if __name__ == "__main__":
    main()
