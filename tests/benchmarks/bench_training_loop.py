"""What the loop adds to a step, and how long it takes to the first one.

The loop: `distill` trains a student from a cache; a bare loop of PyTorch then takes the same micro-batches, which are
ready, through the same model and loss, with AdamW and clipping, and nothing else. In turns in one process, the first
step left out; median of the ratios.

The start: from the start of the process to the first line of `metrics.jsonl`, the quickstart's student (0.9 M), its
cache and its projection there; beside it a process that only imports torch and transformers, and one that trains on two
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
from measurement import gsm8k, median_seconds, model_folder, process, report
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk import terminal
from xtk.losses.loss_spec import parse_losses
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, silence_transformers
from xtk.models.packed_attention import PackedSequence
from xtk.models.student_model_setup import parameter_groups
from xtk.quickstart.tiny_models import make_student, make_teacher
from xtk.tokens.tokenizer import Tokenizer
from xtk.training import training_loop
from xtk.training.distill import distill
from xtk.training.runs.open_inputs import open_inputs
from xtk.training.student_with_losses import StudentWithLoss
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

TIMES = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def with_the_loop(folder: Path, loss: str, steps: int, batch: int, name: str) -> tuple[list[Any], list[float]]:
    """Train; return the micro-batches of each step, and when each step ended."""
    places = RunPaths(folder / "student", (str(folder / "cache"),), (folder / "p",), folder / name)
    losses = tuple(parse_losses(["ce", loss] if loss != "ce" else ["ce"]))
    recipe = TrainConfig(losses=losses, max_steps=steps, per_device_train_batch_size=batch)
    taken, ends, plain = [], [], training_loop._step

    def step(run: Any, optimizer: Any, micro_batches: Any) -> Any:
        found = plain(run, optimizer, micro_batches)
        taken.append(micro_batches)
        ends.append(time.perf_counter())
        return found

    training_loop._step = step
    try:
        inputs = open_inputs(places, recipe, Tokenizer(folder / "student"))
        distill(places, recipe, LoggingConfig(save_steps=0), inputs, force=True, trust_remote_code=False)
    finally:
        training_loop._step = plain
    return taken, ends


def bare(folder: Path, batches: list[Any]) -> list[float]:
    """Take micro-batches through the model and the loss; return when each step ended."""
    torch.manual_seed(0)
    model = load_causal_lm(folder / "student", dtype=torch.float32, device=DEVICE, trust_remote_code=False)
    cut = BackboneWithHead(model)
    assert cut.enable_packing()
    student = StudentWithLoss(cut).train()
    parameters = list(student.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(cut.model, 0.0), lr=5e-5, fused=True)
    ends = []
    for (batch,) in batches:
        terms = [term.to(DEVICE, 1 / max(term.denominator, 1)) for term in batch.terms]
        ids = torch.from_numpy(batch.input_ids).to(DEVICE)
        total, _ = student(ids, batch.loss_positions, terms, PackedSequence(batch.document_lengths))
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    return ends


def overhead(folder: Path, name: str, steps: int, batch: int) -> list[tuple[str, str, str]]:
    """Return a row of the table for each loss."""
    rows = []
    for loss in ("ce", "byte-kl"):
        ratios = []
        for turn in range(TIMES):
            batches, ends = with_the_loop(folder, loss, steps, batch, f"{loss}-{turn}")
            without = bare(folder, batches)
            ratios.append((ends[-1] - ends[0]) / (without[-1] - without[0]))
        told = f"{statistics.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"
        what = loss if loss == "ce" else f"ce and {loss}"
        rows.append((f"{name}: {what}, time of a step over a bare loop's", told, "+3 %"))
    return rows


def idle(folder: Path, steps: int, batch: int) -> tuple[str, str, str]:
    """Return the part of the time in which the GPU computes nothing, from the second step on."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _, ends = with_the_loop(folder, "byte-kl", steps, batch, "idle")
    kernels = sorted((event.time_range.start, event.time_range.end) for event in profile.events())
    begin = kernels[-1][1] - 1e6 * (ends[-1] - ends[0])
    busy, last = 0.0, begin
    for start, end in kernels:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return f"ce and byte-kl, {steps} steps: the GPU is idle", f"{1 - busy / (kernels[-1][1] - begin):.1%}", "3 %"


def small(folder: Path) -> None:
    """Write the quickstart's pair, a cache and a projection."""
    texts = gsm8k(400)
    make_student(folder / "student", texts, 0)
    make_teacher(folder / "teacher", texts, 1)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(folder)


def large(folder: Path) -> None:
    """Write a pair with the real vocabularies, a cache and a projection."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    model_folder(folder / "student", "llama3", LlamaForCausalLM(LlamaConfig(vocab_size=128256, **shape, **heads)))
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
    model_folder(folder / "teacher", "qwen", Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, **shape, **heads)))
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in gsm8k(48)))
    prepare(folder)


def seconds_to_the_first_step(folder: Path, name: str, *options: str) -> float:
    """Return the time until the first step is told of."""
    models = [str(folder / "student"), str(folder / "cache")]
    command = [sys.executable, "-m", "xtk", "distill", *models, "--loss", "ce", "--loss", "byte-kl",
               "--max-steps", "1", "--save-steps", "0", "-q", "-o", str(folder / name)]  # fmt: skip
    started, told = time.perf_counter(), folder / name / "metrics.jsonl"
    child = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    while child.poll() is None and not (told.is_file() and told.stat().st_size):
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    if child.wait():
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return seconds


def starts(folder: Path) -> list[tuple[str, str, str]]:
    """Return rows of the table."""
    floor = median_seconds(
        lambda: process(sys.executable, "-c", "import torch; from transformers import AutoModelForCausalLM"), TIMES
    )
    rows = [("importing torch and transformers", f"{floor:.1f} s", "(none)")]
    for processes in (1, 2):
        options = ("--num-processes", str(processes)) if processes > 1 else ()
        found = [seconds_to_the_first_step(folder, f"{processes}-{turn}", *options) for turn in range(TIMES)]
        what = "a process" if processes == 1 else "two processes"
        rows.append((f"start to first step, 0.9 M parameters, {what}", f"{statistics.median(found):.1f} s", "15 s"))
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("small", "large"), help="one of the two students")
    parser.add_argument("--steps", type=int, help="steps of a run (80 for the small student, 8 for the large one)")
    given = parser.parse_args()
    silence_transformers()
    terminal.set_quiet(True)
    rows = [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", "")]
    with tempfile.TemporaryDirectory() as place:
        if given.only != "large":
            small(Path(place))
            rows += [] if given.only else starts(Path(place))
            rows += overhead(Path(place), "V = 4,000, 0.9 M parameters", steps=given.steps or 80, batch=8)
    with tempfile.TemporaryDirectory() as place:
        if given.only != "small":
            large(Path(place))
            rows += overhead(Path(place), "V = 128,256, 39 M parameters", steps=given.steps or 8, batch=4)
            if DEVICE.type == "cuda":
                rows.append(idle(Path(place), given.steps or 8, 4))
    report(__file__, rows)


if __name__ == "__main__":
    main()
