"""Fraction of time that the device waits for batches, which a thread or two processes build.

The quickstart's pair (V = 4,000) on GSM8K, 8 documents per step, for the losses with the cheapest and the most
expensive batches. `data_wait_fraction` and tokens/s are those that `distill` logs, the median of records without the
first one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from bench_distill import prepare, xtk
from measurement import gsm8k, report

from xtk.quickstart.tiny_models import make_student, make_teacher

LOSSES = {"ce": ["ce"], "ce and byte-kl": ["ce", "byte-kl"], "ce and p-kl": ["ce", "p-kl"]}
WORKERS = (0, 2)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, texts, rows = Path(temporary), gsm8k(400), []
        make_student(folder / "student", texts, 0)
        make_teacher(folder / "teacher", texts, 1)
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(folder)
        for name, losses in LOSSES.items():
            for workers in WORKERS:
                output = folder / f"{name}-{workers}"
                xtk(
                    "distill", str(folder / "student"), str(folder / "cache"), "--projection", str(folder / "p"),
                    *(f"--loss={loss}" for loss in losses), "--max-steps", "60", "--per-device-train-batch-size", "8",
                    "--logging-steps", "10", "--save-steps", "0", "--dataloader-num-workers", str(workers),
                    "-o", str(output),
                )  # fmt: skip
                rows.append(
                    (
                        f"{name}, {f'{workers} processes' if workers else 'a thread'}: waiting",
                        wait_and_rate(output),
                        "2 %",
                    )
                )
        report(__file__, rows)


def wait_and_rate(folder: Path) -> str:
    """Return the fraction of time spent waiting, and the tokens per second, as text."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    wait_fraction, rate = (
        statistics.median(record[name] for record in records) for name in ("data_wait_fraction", "tokens_per_second")
    )
    return f"{wait_fraction:.2%} ({rate:,.0f} tokens/s)"


if __name__ == "__main__":
    main()
