"""Helpers of the benchmarks: description of the machine, median times, tables, real data."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
START_TIME = time.monotonic()
DATA = Path(os.environ.get("XTK_DATA", ROOT.parent / "shared" / "data"))
# 97.5 % quantiles of Student's t by degrees of freedom: a 95 % interval is the mean and this many standard errors.
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def machine() -> str:
    """Return one line with the processor, memory and versions of the important packages."""
    from importlib.metadata import version

    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = ("torch", "transformers", "tokenizers", "numba", "pyarrow")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, {versions}"


def half_interval(standard_error: float, seeds: int) -> float:
    """Return half of the 95 % interval of a mean over seeds or documents, by Student's t."""
    degrees = seeds - 1
    # Beyond the table: the quantile of the normal distribution, and two terms of the Cornish-Fisher expansion.
    return T_975.get(degrees, 1.96 + 2.372 / degrees + 2.82 / degrees**2) * standard_error


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median time of `repeats` calls, after one warm-up call."""
    function()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def cpu_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of `repeats` calls, after one warm-up call."""
    function()
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def run_process(*command: str) -> tuple[float, float, str]:
    """Run a command; return its wall time in seconds, the peak memory of the child processes in GiB, and its stdout."""
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = child.communicate()
    seconds = time.perf_counter() - started
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}\n{err}")
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, out


def report(
    script: str, rows: Sequence[tuple[str, ...]], columns: tuple[str, ...] = ("what", "measured", "reach")
) -> None:
    """Print a table with the machine and the time that the script has taken so far."""
    minutes, seconds = divmod(round(time.monotonic() - START_TIME), 60)
    lines = [
        f"\n`{Path(script).name}` on {machine()}; it took {minutes} min {seconds} s\n",
        *(" | ".join(row) for row in (columns, ("---",) * len(columns), *rows)),
    ]
    sys.stdout.write("".join(f"| {line} |\n" if index else f"{line}\n" for index, line in enumerate(lines)))


def real_data() -> Path:
    """Return the folder of real tokenizers and corpora, or exit with one line that names what is missing."""
    if not (DATA / "tokenizers" / "llama3").is_dir():
        raise SystemExit("skipped: XTK_DATA does not point to real tokenizers and corpora")
    return DATA


def gsm8k(rows: int | None = None, part: str = "train") -> list[str]:
    """Return problems of "train" or "test" with their answers, one text each."""
    lines = (real_data() / "corpora" / f"gsm8k_{part}.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
    return [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]


def model_folder(folder: Path, tokenizer: str, model: object) -> Path:
    """Write a model and the files of a real tokenizer into one folder; return the folder."""
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    for file in (real_data() / "tokenizers" / tokenizer).iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder
