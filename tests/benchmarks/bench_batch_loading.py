"""How long the device waits for batches: made by a thread, and by two processes.

The quickstart's pair (V = 4,000) on GSM8K, 8 documents a step, for the losses that ask for least and for most of a
batch. `data_wait_fraction` and tokens/s are those that `distill` itself writes, the median of lines without the first
one.
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
    with tempfile.TemporaryDirectory() as place:
        folder, texts, rows = Path(place), gsm8k(400), []
        make_student(folder / "student", texts, 0)
        make_teacher(folder / "teacher", texts, 1)
        (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(folder)
        for name, losses in LOSSES.items():
            for workers in WORKERS:
                out = folder / f"{name}-{workers}"
                xtk(
                    "distill", str(folder / "student"), str(folder / "cache"), "--projection", str(folder / "p"),
                    *(f"--loss={loss}" for loss in losses), "--max-steps", "60", "--per-device-train-batch-size", "8",
                    "--logging-steps", "10", "--save-steps", "0", "--dataloader-num-workers", str(workers),
                    "-o", str(out),
                )  # fmt: skip
                rows.append((f"{name}, {f'{workers} processes' if workers else 'a thread'}: waiting", told(out), "2 %"))
        report(__file__, rows)


def told(folder: Path) -> str:
    """Return the share of time waited, and the rate."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    waiting, rate = (
        statistics.median(record[name] for record in records) for name in ("data_wait_fraction", "tokens_per_second")
    )
    return f"{waiting:.2%} ({rate:,.0f} tokens/s)"


if __name__ == "__main__":
    main()
