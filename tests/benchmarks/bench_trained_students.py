"""What a student learns from each loss: the quickstart's pair, one cache, the same steps and data, several seeds.

    python tests/benchmarks/bench_trained_students.py [FOLDER] [--seeds N] [--losses "NAME[+NAME...]" ...]

makes the quickstart's models in FOLDER (kept, so that a second run goes on), caches the teacher once, trains a student
with each line of losses from each seed, with `xtk distill` as it stands, and prints held-out bits per byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measurement import report

from xtk.losses import LOSSES
from xtk.quickstart.demo_pipeline import SHARED_TRAINING_OPTIONS, STUDENT_TRAINING_OPTIONS
from xtk.quickstart.python_docs_corpus import python_documents, train_test_split
from xtk.quickstart.tiny_models import make_student

ACROSS = ("byte-kl", "boundary-kl", "p-kl", "h-kl", "gold", "uld", "alm")
LINES = ("ce", *(name for name in ACROSS if name in LOSSES), *(f"ce+{name}" for name in ACROSS if name in LOSSES))
SEEDS = 3


def run(*arguments: object) -> str:
    """Run a command of xtk, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "xtk", *map(str, arguments), "--quiet"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"xtk {shlex.join(map(str, arguments))}\n{done.stderr}")
    return done.stdout.strip()


def prepare(folder: Path, seeds: int) -> None:
    """Make the teacher, the untrained students and the cache, where they are not there yet."""
    if not (folder / "results.json").is_file():
        run("quickstart", "-o", folder, "--seeds", 1)
    texts, _ = train_test_split(python_documents())
    for seed in range(seeds):
        if not (folder / f"student-{seed}").is_dir():
            make_student(folder / f"student-{seed}", texts, seed)
    run("cache-teacher", folder / "teacher", folder / "part.jsonl", "-o", folder / "objectives" / "cache")


def train(folder: Path, line: str, seed: int) -> float:
    """Train a student, and return its bits per byte on held-out text."""
    losses = [word for name in line.split("+") for word in ("--loss", name)]
    options = f"{STUDENT_TRAINING_OPTIONS} {SHARED_TRAINING_OPTIONS} --seed {seed}".split()
    output = folder / "objectives" / f"{line.replace(':', '-').replace('=', '-')}-{seed}"
    held_out = ["--eval-data", folder / "test.jsonl"]
    run(
        "distill",
        folder / f"student-{seed}",
        folder / "objectives" / "cache",
        *losses,
        *options,
        *held_out,
        "-o",
        output,
    )
    return float(json.loads((output / "xtk.json").read_text())["metrics"]["eval_bits_per_byte"])


def main() -> None:
    """Train all, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("objectives"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--losses", nargs="*", default=LINES, help="terms of a run, joined by +")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    chosen = parser.parse_args()
    prepare(chosen.folder, chosen.seeds)
    runs = [(line, seed) for seed in range(chosen.seeds) for line in chosen.losses]
    with ThreadPoolExecutor(chosen.at_once) as threads:
        found = dict(zip(runs, threads.map(lambda one: train(chosen.folder, *one), runs), strict=True))
    rows = []
    for line in chosen.losses:
        bits = [found[line, seed] for seed in range(chosen.seeds)]
        rows.append((line, ", ".join(f"{one:.3f}" for one in bits), f"{statistics.mean(bits):.3f}"))
    report(__file__, rows, ("losses", "bits per byte, by seed", "mean"))


if __name__ == "__main__":
    main()
