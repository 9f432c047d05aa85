"""Rounds of on-policy training: what is neither writing, nor the teacher, nor the student's step; and bytes of signal.

A student with Llama 3's vocabulary writes 48 tokens behind each of 32 prompts of GSM8K, a teacher with Qwen's of four
times its size scores that, and the student trains from it with byte-kl. Timed inside of one process: `write` of the
writer, `score` of the teacher, the optimisation step; the rest of a round is what xtk adds. The first round, which
compiles, is left out; median of the others. The peak of a round is that of a process with two rounds, beside those of
processes that do one thing each: write, score, train from the scores; on a CPU, where all of them share one memory. The
bytes are those of the signals of a round's cache, where the teacher is
asked about the 32 tokens that the student found likeliest.
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
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.losses.loss_spec import parse_losses
from xtk.models.causal_lm import silence_transformers
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.teachers.transformers import TransformersTeacher
from xtk.tokens.tokenizer import Tokenizer
from xtk.training import on_policy_loop, training_loop
from xtk.training.distill import distill
from xtk.training.graceful_stop import StopListener
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.runs.open_inputs import open_inputs
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

PROMPTS, TOKENS, ROUNDS = 32, 48, 6
Seconds = dict[str, float]


def make_models(folder: Path) -> None:
    """Write a student, a teacher, and one with the student's tokenizer."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    for name, size in (("student", 192), ("alike", 192)):
        shape = {"hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": 6}
        model_folder(folder / name, "llama3", LlamaForCausalLM(LlamaConfig(vocab_size=128256, **shape, **heads)))
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    model_folder(folder / "teacher", "qwen", Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, **shape, **heads)))


def timed(owner: Any, name: str, seconds: Seconds, label: str) -> Callable[[], None]:
    """Count what a function takes, and return what undoes that."""
    plain = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return plain(*arguments, **options)
        finally:
            seconds[label] = seconds.get(label, 0.0) + time.perf_counter() - started

    setattr(owner, name, counted)
    return lambda: setattr(owner, name, plain)


def run(folder: Path, teacher: str, loss: str, name: str) -> tuple[list[Seconds], float]:
    """Train some rounds; return the seconds of each by what they were for, and bytes of signal a position."""
    student = folder / "student"
    places = RunPaths(student, (str(folder / "prompts.jsonl"),), (), folder / name, online_teachers=(
        parse_online_teacher(teacher, long_documents="truncate", trust_remote_code=False),))  # fmt: skip
    sampling = SamplingConfig(max_completion_length=TOKENS, top_logprobs=places.online_teachers[0].num_candidates)
    recipe = TrainConfig(losses=tuple(parse_losses([loss])), max_steps=ROUNDS, per_device_train_batch_size=PROMPTS,
                    on_policy=OnPolicyConfig(sampling=sampling))  # fmt: skip
    seconds: Seconds = {}
    lines: list[Seconds] = []
    bytes_a_position: list[float] = []
    undo = [
        timed(TransformersGenerator, "write", seconds, "writing"),
        timed(TransformersTeacher, "score", seconds, "teacher"),
        timed(training_loop, "_step", seconds, "step"),
    ]
    score, began = on_policy_loop.OnPolicyLoop._score_block, [0.0]

    def scored(self: on_policy_loop.OnPolicyLoop, block: range, place: Path, stop: StopListener) -> bool:
        found = score(self, block, place, stop)
        cache = TeacherCache(next(path for path in place.iterdir() if path.is_dir()))
        shards = list(cache.shards())
        positions = sum(shard.counts()["positions"] for shard in shards)
        bytes_a_position.append(sum(shard.bytes_by_section()["teacher_logprobs"] for shard in shards) / positions)
        return found

    step = training_loop._step

    def stepped(*arguments: Any) -> Any:
        found = step(*arguments)
        now = time.perf_counter()
        if began[0]:
            lines.append({**seconds, "all": now - began[0]})
        seconds.clear()
        began[0] = now
        return found

    on_policy_loop.OnPolicyLoop._score_block = scored  # type: ignore[method-assign]
    training_loop._step = stepped
    terminal.set_quiet(True)
    try:
        inputs = open_inputs(places, recipe, Tokenizer(student))
        distill(places, recipe, LoggingConfig(save_steps=0), inputs, force=True, trust_remote_code=False)
    finally:
        on_policy_loop.OnPolicyLoop._score_block = score  # type: ignore[method-assign]
        training_loop._step = step
        for back in undo:
            back()
    return lines, statistics.median(bytes_a_position)


def peak(*arguments: object) -> float:
    """Run a command; return the peak of its memory, GiB."""
    child = subprocess.Popen([sys.executable, "-m", "xtk", *map(str, arguments), "-q"], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{arguments[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_maxrss / 2**20


def memory(folder: Path) -> tuple[str, str, str]:
    """Return the row about the peak of a round."""
    student, teacher, prompts = folder / "student", folder / "teacher", folder / "prompts.jsonl"
    rollouts, batch = folder / "r.jsonl", ("--per-device-train-batch-size", PROMPTS, "--save-steps", 0)
    writing = peak("rollout", student, prompts, "--max-completion-length", TOKENS, "--batch-tokens", 16384,
                   "-o", rollouts)  # fmt: skip
    scoring = peak("cache-teacher", teacher, rollouts, "--top-k", 32, "-o", folder / "r")
    training = peak("distill", student, folder / "r", "--loss", "byte-kl", *batch, "-o", folder / "one")
    whole = peak("distill", student, prompts, "--on-policy", "--teacher", f"{teacher}:top_k=32", "--loss", "byte-kl",
                 "--max-completion-length", TOKENS, "--max-steps", 2, *batch, "-o", folder / "round")  # fmt: skip
    highest = max(writing, scoring, training)
    told = f"{whole / highest - 1:+.0%} ({whole:.2f} GiB; {writing:.2f} to write, {scoring:.2f} to score, "
    return ("peak of a round over the largest of its parts", f"{told}{training:.2f} to train)", "+10 %")


def main() -> None:
    """Measure and print."""
    silence_transformers()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_models(folder)
        rows = [{"prompt": " ".join(text.split()[:24])} for text in gsm8k(PROMPTS)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        held = memory(folder)
        lines, _ = run(folder, f"{folder / 'teacher'}:top_k=32", "byte-kl", "across")
        shares = [1 - (line["writing"] + line["teacher"] + line["step"]) / line["all"] for line in lines]
        parts = {key: statistics.median(line[key] for line in lines) for key in ("writing", "teacher", "step", "all")}
        given = {
            precision: run(
                folder, f"{folder / 'alike'}:support=candidates,top_k=32,precision={precision}", "reverse-kl", precision
            )[1]
            for precision in ("float32", "fine", "standard")
        }  # fmt: skip
        told = ", ".join(f"{key} {value:.2f} s" for key, value in parts.items())
        report(
            Path(__file__).name,
            [
                ("a round: time outside of writing, the teacher's pass and the step",
                 f"{statistics.median(shares):.1%} ({told})", "5 %"),
                held,
                *((f"signal a position, `given` K=32, `precision={precision}`", f"{found:.0f} bytes", "160 bytes")
                  for precision, found in given.items()),
            ],
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
