"""On-policy training: time outside of generation, teacher and student's step; peak memory; bytes of log-probabilities.

A student with Llama 3's vocabulary generates 48 tokens after each of 32 prompts of GSM8K, a teacher with Qwen's
vocabulary and four times its size scores them, and the student trains on the scores with byte-kl. Timed inside of one
process: generation, `score` of the teacher, the optimization step; the remainder of a rollout batch is
xtk's overhead. The first rollout batch, which compiles, is left out; median of the others. The peak memory of a process
with two rollout batches is compared with those of processes that do one thing each: generate, score, train from the
scores; on a CPU, where all of them share one memory. The bytes are those of the log-probabilities in a rollout batch's
cache, where the teacher scores the student's 32 most likely tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import gsm8k, model_folder, report
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk import terminal
from xtk.losses.spec import parse_losses
from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import ModelRef
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.tokenizer import Tokenizer
from xtk.training import training_loop
from xtk.training.distill import distill
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

PROMPTS, TOKENS, STEPS = 32, 48, 6
Seconds = dict[str, float]


def make_models(folder: Path) -> None:
    """Write a student, a teacher, and a model with the student's tokenizer."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    for name, size in (("student", 192), ("alike", 192)):
        shape = {"hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": 6}
        model_folder(folder / name, "llama3", LlamaForCausalLM(LlamaConfig(vocab_size=128256, **shape, **heads)))
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    model_folder(folder / "teacher", "qwen", Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, **shape, **heads)))


def record_time(owner: Any, name: str, seconds: Seconds, label: str) -> Callable[[], None]:
    """Replace a function by one that adds up its time; return a function that undoes this."""
    original = getattr(owner, name)

    def timed_function(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*arguments, **options)
        finally:
            seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - started

    setattr(owner, name, timed_function)
    return lambda: setattr(owner, name, original)


def train_and_time(folder: Path, teacher: str, loss: str, name: str) -> list[Seconds]:
    """Train on-policy; return seconds by activity of each rollout batch."""
    student = folder / "student"
    paths = RunPaths(ModelRef(student), (str(folder / "prompts.jsonl"),), (), folder / name, online_teachers=(
        parse_online_teacher(teacher, long_documents="truncate", trust_remote_code=False),))  # fmt: skip
    sampling = SamplingConfig(max_completion_length=TOKENS, top_logprobs=paths.online_teachers[0].num_candidates)
    config = TrainConfig(losses=tuple(parse_losses([loss])), max_steps=STEPS, per_device_train_batch_size=PROMPTS,
                         on_policy=OnPolicyConfig(sampling=sampling))  # fmt: skip
    seconds: Seconds = {}
    seconds_of_batches: list[Seconds] = []
    restore_functions = [
        record_time(TransformersGenerator, "generate", seconds, "generation"),
        record_time(TransformersTeacher, "score", seconds, "teacher"),
        record_time(training_loop, "_step", seconds, "step"),
    ]
    started = [0.0]
    original_step = training_loop._step

    def recorded_step(*arguments: Any) -> Any:
        result = original_step(*arguments)
        now = time.perf_counter()
        if started[0]:
            seconds_of_batches.append({**seconds, "all": now - started[0]})
        seconds.clear()
        started[0] = now
        return result

    training_loop._step = recorded_step
    terminal.set_quiet(True)
    try:
        inputs = open_inputs(paths, config, Tokenizer(student))
        distill(paths, config, LoggingConfig(save_steps=0), inputs, force=True)
    finally:
        training_loop._step = original_step
        for restore in restore_functions:
            restore()
    return seconds_of_batches


def peak_memory(*arguments: object) -> float:
    """Run an xtk command; return its peak memory in GiB."""
    child = subprocess.Popen([sys.executable, "-m", "xtk", *map(str, arguments), "-q"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{arguments[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_maxrss / 2**20


def memory_row(folder: Path) -> tuple[str, str, str]:
    """Return the row about the peak memory of a rollout batch."""
    student, teacher, prompts = folder / "student", folder / "teacher", folder / "prompts.jsonl"
    rollouts, batch = folder / "r.jsonl", ("--per-device-train-batch-size", PROMPTS, "--save-steps", 0)
    generate_gib = peak_memory("rollout", student, prompts, "--max-completion-length", TOKENS, "--batch-tokens", 16384,
                               "-o", rollouts)  # fmt: skip
    score_gib = peak_memory("cache-teacher", teacher, rollouts, "--top-k", 32, "-o", folder / "r")
    train_gib = peak_memory("distill", student, folder / "r", "--loss", "byte-kl", *batch, "-o", folder / "one")
    peak_gib = peak_memory("distill-on-policy", student, prompts, "--teacher", f"{teacher}:top_k=32",
                           "--loss", "byte-kl", "--max-completion-length", TOKENS, "--max-steps", 2, *batch,
                           "-o", folder / "round")  # fmt: skip
    phase_gib = max(generate_gib, score_gib, train_gib)
    parts = (
        f"{peak_gib / phase_gib - 1:+.0%} ({peak_gib:.2f} GiB; {generate_gib:.2f} to generate, "
        f"{score_gib:.2f} to score, "
    )
    return (
        "peak memory of a rollout batch relative to its largest phase",
        f"{parts}{train_gib:.2f} to train)",
        "+10 %",
    )


def main() -> None:
    """Measure and print."""
    silence_transformers()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder)
        rows = [{"prompt": " ".join(text.split()[:24])} for text in gsm8k(PROMPTS)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        memory = memory_row(folder)
        seconds_of_batches = train_and_time(folder, f"{folder / 'teacher'}:top_k=32", "byte-kl", "across")
        overheads = [
            1 - (seconds["generation"] + seconds["teacher"] + seconds["step"]) / seconds["all"]
            for seconds in seconds_of_batches
        ]
        median_seconds = {
            key: statistics.median(seconds[key] for seconds in seconds_of_batches)
            for key in ("generation", "teacher", "step", "all")
        }
        medians = ", ".join(f"{key} {value:.2f} s" for key, value in median_seconds.items())
        report(
            Path(__file__).name,
            [
                ("a rollout batch: time outside of generation, the teacher's pass and the step",
                 f"{statistics.median(overheads):.1%} ({medians})", "5 %"),
                memory,
            ],
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
