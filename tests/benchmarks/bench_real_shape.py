"""`distill` from a cache with a student of SmolLM2-135M's shape, compared with cross-entropy alone and a plain loop.

The student has SmolLM2's layers with random weights, and the vocabulary of GPT-2 (50,257 tokens; SmolLM2 has 49,152)
or of Qwen (151,646), tied. It learns from a cache of a one-layer teacher with the other vocabulary, on GSM8K. The plain
loop is a usual loop with transformers: batches padded to their longest document, the model's own loss on `labels`,
AdamW, clipping. Runs alternate; tokens are those of documents, without padding; without the first step; medians of the
ratios. `--profile`: the time of the steps by PyTorch operator, for each loss, in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_distill import prepare, rate, xtk
from measurement import gsm8k, model_folder, report
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

LOSSES = {"ce": (), "ce and p-kl": ("--loss", "p-kl"), "ce and byte-kl": ("--loss", "byte-kl")}
# The student's tokenizer and vocabulary rows, the teacher's tokenizer and vocabulary rows.
PAIRS = {"V = 50,257": ("gpt2", 50304, "qwen", 151936), "V = 151,646": ("qwen", 151936, "gpt2", 50304)}
BODY = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip


def write_pair(folder: Path, student: tuple[str, int], teacher: tuple[str, int], documents: int) -> list[str]:
    """Write models, cache and projection; return the texts."""
    torch.manual_seed(0)
    for name, shape, (tokenizer, rows) in (("student", BODY, student), ("teacher", SMALL, teacher)):
        config = LlamaConfig(vocab_size=rows, tie_word_embeddings=True, **shape)
        model_folder(folder / name, tokenizer, LlamaForCausalLM(config))
    texts = gsm8k(documents)
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(folder)
    return texts


def plain_loop(folder: Path, texts: list[str], steps: int, batch: int) -> float:
    """Train with a usual loop of transformers; return tokens/s without the first step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    rates = []
    for step in range(steps):
        started = time.perf_counter()
        rows = tokenizer(texts[step * batch : (step + 1) * batch], padding=True, return_tensors="pt")
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        model(**rows, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rates.append(int(rows["attention_mask"].sum()) / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def train(folder: Path, name: str, losses: tuple[str, ...], steps: int, batch: int) -> float:
    """Train with xtk; return tokens/s without the first step."""
    xtk(
        "distill", str(folder / "student"), str(folder / "cache"), "--projection", str(folder / "p"), "--loss", "ce",
        *losses, "--max-steps", str(steps), "--per-device-train-batch-size", str(batch), "--logging-steps", "1",
        "--save-steps", "0", "--force", "-o", str(folder / name),
    )  # fmt: skip
    return rate(folder / name)


def measure(
    name: str, folder: Path, texts: list[str], repeats: int, steps: int, batch: int
) -> list[tuple[str, str, str]]:
    """Return rows of the table."""
    rates: dict[str, list[float]] = {way: [] for way in ("plain", *LOSSES)}
    for _ in range(repeats):
        rates["plain"].append(plain_loop(folder, texts, steps, batch))
        for losses, options in LOSSES.items():
            rates[losses].append(train(folder, "out", options, steps, batch))
    rows = []
    for losses in LOSSES:
        for other in ("ce", "plain"):
            if losses == other:
                continue
            ratios = [
                rate_of_loss / rate_of_other
                for rate_of_loss, rate_of_other in zip(rates[losses], rates[other], strict=True)
            ]
            baseline = "ce alone" if other == "ce" else "a plain loop"
            result = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append(
                (f"{name}: {losses}, tokens/s relative to {baseline}", result, "0.97" if other == "ce" else "1")
            )
    return rows


def profile(folder: Path, steps: int, batch: int) -> None:
    """Print the time of each operator, for each loss."""
    from xtk.losses.spec import parse_losses
    from xtk.models.resolver import ModelRef
    from xtk.text.tokenizer import Tokenizer
    from xtk.training.distill import distill
    from xtk.training.kinds.open_inputs import open_inputs
    from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

    paths = RunPaths(ModelRef(folder / "student"), (str(folder / "cache"),), (folder / "p",), folder / "profiled")
    for losses, options in LOSSES.items():
        specs = tuple(parse_losses(["ce", *options[1:]]))
        config = TrainConfig(losses=specs, max_steps=steps, per_device_train_batch_size=batch)
        inputs = open_inputs(paths, config, Tokenizer(folder / "student"))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            distill(paths, config, LoggingConfig(save_steps=0), inputs, force=True)
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40)
        sys.stdout.write(f"\n{losses}\n{table}\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="repetitions of each way")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run")
    parser.add_argument("--batch", type=int, default=4, help="documents of a step")
    parser.add_argument("--profile", action="store_true", help="print profiles instead of the table")
    args = parser.parse_args()
    rows = []
    for name, (student, student_rows, teacher, teacher_rows) in PAIRS.items():
        with tempfile.TemporaryDirectory() as folder:
            pair = (student, student_rows), (teacher, teacher_rows)
            texts = write_pair(Path(folder), *pair, args.steps * args.batch)
            if args.profile:
                profile(Path(folder), args.steps, args.batch)
            else:
                rows += measure(name, Path(folder), texts, args.turns, args.steps, args.batch)
    if rows:
        report(__file__, rows)


if __name__ == "__main__":
    main()
