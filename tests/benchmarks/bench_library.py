"""The Python API compared with `xtk distill`: time per step on the same documents, and students at equal steps.

Time: `distill` trains a student from a cache; then a plain loop trains on the same documents with
`DistillationCollator` (one DataLoader worker) and `DistillationLoss`, packed, with AdamW and clipping. Both alternate
in one process, without the first step; median of the ratios.

Students: the quickstart's pair, a teacher trained for a few hundred steps, and students trained by `distill` and by the
programs in `examples`, with equal options and numbers of steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_training_loop import LARGE, train_and_record, write_large_inputs, write_small_inputs
from measurement import ROOT, report, run_process
from transformers import AutoModelForCausalLM

import xtk
from xtk import terminal
from xtk.batches.micro_batches import BatchSampler
from xtk.models.causal_lm import silence_transformers
from xtk.models.student_model_setup import parameter_groups
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.quickstart.tiny_models import make_student, make_teacher

REPEATS = 3
LOSSES = ("ce", "p-kl:weight=2")
TEACHER_STEPS, STUDENT_STEPS = 200, 800
PROGRAMS = {"own loop": ("own_loop.py",), "Trainer": ("trainer.py",), "SFTTrainer": ("trl_sft.py",)}  # fmt: skip


def train_with_library(folder: Path, loss: str, steps: int, batch: int) -> list[float]:
    """Train on the documents of the steps of `distill` in a plain loop; return the end time of each step."""
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32).train()
    xtk.enable_packing(student)
    losses = xtk.DistillationLoss("ce", *(() if loss == "ce" else (loss,)))
    cache = xtk.TeacherCache(folder / "cache")
    collator = xtk.DistillationCollator(folder / "student", cache, losses, packing=True)
    sizes = cache.text_sizes()
    sampler = BatchSampler(np.flatnonzero(sizes > 0), sizes, batch, 0)
    loader = torch.utils.data.DataLoader(
        cache, batch_sampler=[sampler.documents_of_step(step) for step in range(steps)], collate_fn=collator,
        num_workers=1, multiprocessing_context="fork",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(parameter_groups(student, 0.0), lr=5e-5, fused=True)
    parameters, end_times = list(student.parameters()), []
    for inputs in loader:
        states = student.model(**inputs.model_inputs).last_hidden_state
        losses(states, student.lm_head, inputs).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end_times.append(time.perf_counter())
    return end_times


def step_time_rows(folder: Path, name: str, steps: int, batch: int) -> list[tuple[str, str, str]]:
    """Return a row of the table for each loss."""
    rows = []
    for loss in ("ce", "byte-kl"):
        ratios = []
        for repeat in range(REPEATS):
            _, command_times = train_and_record(folder, loss, steps, batch, f"{loss}-{repeat}")
            library_times = train_with_library(folder, loss, steps, batch)
            ratios.append((library_times[-1] - library_times[0]) / (command_times[-1] - command_times[0]))
        change = f"{statistics.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"
        rows.append((f"{name}: {loss if loss == 'ce' else f'ce and {loss}'}, step relative to distill", change, "+3 %"))
    return rows


def bits_per_byte(model: Path, data: Path) -> float:
    """Return the bits per byte of a model."""
    _, _, output = run_process(sys.executable, "-m", "xtk", "evaluate", str(model), str(data), "--json", "-q")
    return float(json.loads(output.splitlines()[0])["bits_per_byte"])


def student_rows(folder: Path) -> list[tuple[str, str, str]]:
    """Return a row of the table for each way to train the quickstart's student."""
    training, held_out = train_test_split(python_documents())
    make_student(folder / "student", training, 0)
    make_teacher(folder / "untrained", training, 1234)
    for name, texts in (("train", training), ("part", training[: len(training) * 15 // 100]), ("test", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    python = [sys.executable, "-m", "xtk"]
    options = [
        "--per-device-train-batch-size",
        "2",
        "--learning-rate",
        "3e-3",
        "--warmup-ratio",
        "0.1",
        "--save-steps",
        "0",
    ]
    run_process(*python, "distill", str(folder / "untrained"), str(folder / "train.jsonl"), "--loss", "ce", *options,
            "--max-steps", str(TEACHER_STEPS), "-o", str(folder / "teacher"))  # fmt: skip
    run_process(
        *python, "cache-teacher", str(folder / "teacher"), str(folder / "part.jsonl"), "-o", str(folder / "cache")
    )
    losses = [option for loss in LOSSES for option in ("--loss", loss)]
    run_process(*python, "distill", str(folder / "student"), str(folder / "cache"), *losses, *options,
            "--max-steps", str(STUDENT_STEPS), "-o", str(folder / "command"))  # fmt: skip
    expected = bits_per_byte(folder / "command", folder / "test.jsonl")
    rows = [(f"`xtk distill`, {STUDENT_STEPS} steps: bits per byte", f"{expected:.4f}", "")]
    for name, (program, *flags) in PROGRAMS.items():
        output = folder / name
        run_process(sys.executable, str(ROOT / "examples" / program), str(folder / "student"), str(folder / "cache"),
                str(output), *flags, "--steps", str(STUDENT_STEPS), "--loss", *LOSSES)  # fmt: skip
        value = bits_per_byte(output, folder / "test.jsonl")
        rows.append((f"{name}, the same", f"{value:.4f} ({value / expected - 1:+.2%})", "1 %"))
    return rows


def main() -> None:
    """Measure and print; with the arguments `cost`, `large` or `students` only these parts."""
    silence_transformers()
    terminal.set_quiet(True)
    rows = []
    parts = sys.argv[1:] or ["cost", "large", "students"]
    if "cost" in parts:
        with tempfile.TemporaryDirectory() as folder:
            write_small_inputs(Path(folder))
            rows += step_time_rows(Path(folder), "V = 4,000, 0.9 M parameters", steps=80, batch=8)
    if "large" in parts:
        with tempfile.TemporaryDirectory() as folder:
            write_large_inputs(Path(folder), LARGE, 48)
            rows += step_time_rows(Path(folder), "V = 128,256, 39 M parameters", steps=8, batch=4)
    if "students" in parts:
        with tempfile.TemporaryDirectory() as folder:
            rows += student_rows(Path(folder))
    report(__file__, rows)


if __name__ == "__main__":
    main()
