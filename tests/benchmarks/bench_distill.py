"""`distill` from a cache compared with cross-entropy alone: the same student, steps and documents.

Two students: one of the quickstart's size (V = 4,000), and one with Llama-3's vocabulary (V = 128,256) that learns
from a teacher with Qwen's (U = 151,936), which is trained for a few steps so that its supports contain the frequent
tokens. The rates are those that `distill` logs, without its first step; runs alternate, median of 3.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from measurement import gsm8k, median_seconds, model_folder, report, run_process
from numba import njit
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xtk.losses.spec import parse_losses
from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import ModelRef
from xtk.text.tokenizer import Tokenizer
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.train_config import RunPaths, TrainConfig

REPEATS = 3
LOSSES = {
    "ce": (),
    "ce and p-kl": ("--loss", "p-kl"),
    "ce and boundary-kl": ("--loss", "boundary-kl"),
    "ce and byte-kl": ("--loss", "byte-kl"),
}


def xtk(*arguments: str) -> None:
    """Run an xtk command."""
    import sys

    run_process(sys.executable, "-m", "xtk", *arguments)


def rate(folder: Path) -> float:
    """Return the tokens per second of a run, without its first step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "tokens_per_second" in record]
    return float(statistics.median(record["tokens_per_second"] for record in records[1:]))


def measure(name: str, folder: Path, student: Path, steps: int, batch: int) -> list[tuple[str, str, str]]:
    """Train with each loss in turns; return rows of the table."""
    rates: dict[str, list[float]] = {losses: [] for losses in LOSSES}
    for repeat in range(REPEATS):
        for index, (losses, options) in enumerate(LOSSES.items()):
            out = folder / f"{repeat}-{index}"
            xtk(
                "distill", str(student), str(folder / "cache"), "--projection", str(folder / "p"),
                "--loss", "ce", *options, "--max-steps", str(steps), "--per-device-train-batch-size", str(batch),
                "--logging-steps", str(steps // 4), "--save-steps", "0", "-o", str(out),
            )  # fmt: skip
            rates[losses].append(rate(out))
    medians = {losses: statistics.median(values) for losses, values in rates.items()}
    return [
        (
            f"{name}: {losses}, tokens/s of ce alone",
            f"{medians[losses] / medians['ce']:.0%} ({medians[losses]:,.0f} of {medians['ce']:,.0f} tokens/s)",
            "85 %",
        )
        for losses in list(LOSSES)[1:]
    ]


def large(folder: Path) -> list[tuple[str, str, str]]:
    """Measure with the real vocabularies."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    student = LlamaForCausalLM(
        LlamaConfig(vocab_size=128256, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, **heads)
    )
    teacher = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=151936, hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=16, **heads)
    )
    model_folder(folder / "student", "llama3", student)
    model_folder(folder / "untrained", "qwen", teacher)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in gsm8k(96)))
    xtk("distill", str(folder / "untrained"), str(folder / "data.jsonl"), "--loss", "ce", "--max-steps", "24",
        "--learning-rate", "1e-2", "--save-steps", "0", "-o", str(folder / "teacher"))  # fmt: skip
    prepare(folder)
    return measure("V = 128,256", folder, folder / "student", steps=8, batch=4)


def small(folder: Path) -> list[tuple[str, str, str]]:
    """Measure with the quickstart's models."""
    from xtk.quickstart.tiny_models import make_student, make_teacher

    texts = gsm8k(400)
    make_student(folder / "student", texts, 0)
    make_teacher(folder / "untrained", texts, 1)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    xtk("distill", str(folder / "untrained"), str(folder / "data.jsonl"), "--loss", "ce", "--max-steps", "100",
        "--learning-rate", "3e-3", "--save-steps", "0", "-o", str(folder / "teacher"))  # fmt: skip
    prepare(folder)
    return [*measure("V = 4,000", folder, folder / "student", steps=80, batch=8), minimal_cost(folder)]


def prepare(folder: Path) -> None:
    """Build the projection and the cache."""
    xtk("build-projection", str(folder / "student"), str(folder / "teacher"), "-o", str(folder / "p"))
    xtk("cache-teacher", str(folder / "teacher"), str(folder / "data.jsonl"), "--top-k", "64",
        "-o", str(folder / "cache"))  # fmt: skip


def minimal_cost(folder: Path) -> tuple[str, str, str]:
    """Measure the cost of creating, reading with an exponential, and writing each entry of p-kl once."""
    paths = RunPaths(ModelRef(folder / "student"), (str(folder / "cache"),), (folder / "p",), folder / "nowhere")
    config = TrainConfig(losses=tuple(parse_losses(["p-kl"])), max_steps=1)
    inputs = open_inputs(paths, config, Tokenizer(folder / "student"))
    builder = inputs.batch_builder(None)
    batch = builder.build(range(8))
    (term,) = batch.terms
    rows, tokens = term.rows.numpy(), term.tokens.numpy()
    logits = np.zeros((int(rows.max()) + 1, inputs.tokenizer.embedding_rows), np.float32)
    seconds = median_seconds(lambda: touch_entries(logits, rows, tokens), 11)
    entries_per_token = len(rows) / batch.tokens
    result = (
        f"{entries_per_token:.0f} entries a token, {1e6 * seconds / batch.tokens:.1f} microseconds a token on one core"
    )
    return ("V = 4,000: making, reading and writing each entry of p-kl once", result, "(none)")


@njit  # type: ignore[untyped-decorator]
def touch_entries(logits: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Create, read and write each entry once."""
    entries = np.empty((3, len(rows)), np.int32)
    for at in range(len(rows)):
        entries[0, at], entries[1, at] = rows[at], tokens[at]
        entries[2, at] = np.exp(logits[rows[at], tokens[at]])
    for at in range(len(rows)):
        logits[entries[0, at], entries[1, at]] += entries[2, at] * 1e-6
    return entries


def main() -> None:
    """Measure and print."""
    silence_transformers()
    rows = []
    for measure_student in (small, large):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_student(Path(folder))
    report(__file__, rows)


if __name__ == "__main__":
    main()
