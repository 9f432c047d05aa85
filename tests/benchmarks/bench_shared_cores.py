"""Two runs at the same time on the same cores, with several ways in which OpenMP's threads wait for work.

    python tests/benchmarks/bench_shared_cores.py [--turns 3] [--steps 40] [--documents 8] [--threads 2]

`distill` trains the quickstart's student (0.9 M parameters) with `ce`, alone and next to an equal run. Rates are those
that the runs log, without the first records; of two runs, the mean. The ways alternate; medians of the turns. Two equal
runs on cores that they share fairly have half of the rate each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import small_inputs
from measurement import report

from xtk.quickstart.tiny_models import make_student

# Each replaces xtk's own default. 300,000 turns of a loop, about 3 ms, are libgomp's default.
WAYS = {
    "active for 3 ms (libgomp's default)": {"GOMP_SPINCOUNT": "300000"},
    "active for 0.1 ms": {"GOMP_SPINCOUNT": "10000"},
    "active for 0.01 ms (xtk's default)": {"GOMP_SPINCOUNT": "1000"},
    "active for 0.003 ms": {"GOMP_SPINCOUNT": "300"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
LOGGING_STEPS = 2


def run_together(folder: Path, count: int, env: dict[str, str], steps: int, batch: int) -> float:
    """Start some equal runs at the same time; return the mean of their tokens per second."""
    outputs = [folder / f"out-{number}" for number in range(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "xtk", "distill", str(folder / "student"), str(folder / "data.jsonl"), "--loss",
             "ce", "--max-steps", str(steps), "--per-device-train-batch-size", str(batch), "--logging-steps",
             str(LOGGING_STEPS), "--save-steps", "0", "--force", "--quiet", "-o", str(output)],
            env={**os.environ, **env}, stdout=subprocess.DEVNULL,
        )
        for output in outputs
    ]  # fmt: skip
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a run failed")
    rates = []
    for output in outputs:
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        records = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
        rates.append(statistics.median(records[1:]))
    return statistics.mean(rates)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--documents", type=int, default=8, help="documents of a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OpenMP threads of a run")
    args = parser.parse_args()
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder, texts = Path(name), small_inputs.sentences(400)
        make_student(folder / "student", texts, 0)
        small_inputs.write_jsonl(folder / "data.jsonl", texts)
        for _ in range(args.turns):
            for way, variables in WAYS.items():
                env = {"OMP_NUM_THREADS": str(args.threads), **variables}
                alone, together = (run_together(folder, count, env, args.steps, args.documents) for count in (1, 2))
                rates[way].append((alone, together))
                sys.stderr.write(f"{way}: {alone:,.0f} tokens/s alone, {together:,.0f} each of two\n")
    rows = []
    for way, pairs in rates.items():
        alone, together = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratio = statistics.median(each / one for one, each in pairs)
        rows.append((way, f"{alone:,.0f}", f"{together:,.0f}", f"{ratio:.2f}"))
    report(__file__, rows, (f"waiting of {args.threads} threads", "alone, tokens/s", "each of two", "of alone"))


if __name__ == "__main__":
    main()
