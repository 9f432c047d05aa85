"""Test and measure xtk on a GPU, in three parts of at most nine minutes each; results are written after each step.

    python tests/gpu/gpu_session.py --part 1 --output gpu-results.jsonl

A step is a process with a time limit. After each step, JSON lines are added to the output: one for each number that
it printed, and one with its status; an interrupted session keeps the results so far. `--dry-run` runs all steps on the
CPU at toy size, with six times the limits. This file needs only Python, and a session only the checkout and the
packages below: its data are made from Python's standard library. If a step needs a package that is not installed, that
is recorded, and the step is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = "tests/benchmarks"
DATA = ROOT / "build" / "gpu-data"
PART_SECONDS = 540.0
DRY_RUN_FACTOR = 6.0  # the time limits are for a GPU
MIN_STEP_SECONDS = 10.0  # with less time left in a part, a step is not started
TAIL_LINES = 20  # last lines of a step that did not pass
REQUIRED_PACKAGES = (
    "torch", "transformers", "accelerate", "pyarrow", "numba", "safetensors", "tokenizers", "xxhash",
    "typer", "rich", "yaml", "httpx", "jinja2", "fsspec", "filelock", "pytest", "hypothesis",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A test or a measurement, as a process.

    Attributes:
        name: its name in the results.
        part: 1, 2 or 3; the most important steps come first.
        seconds: time limit; also, a step ends with its part.
        command: arguments of Python.
        dry_command: the same at toy size; (): `command`; None: another step of a dry run does the same.
        needs: modules, or paths below the repository, without which the step is skipped.
        variables: additional environment variables.
    """

    name: str
    part: int
    seconds: float
    command: tuple[str, ...]
    dry_command: tuple[str, ...] | None = ()
    needs: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


# Warnings of the versions that are installed do not fail a test.
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m")


def _tests(pattern: str) -> tuple[str, ...]:
    return (*_PYTEST, "gpu", "tests/gpu/test_device.py", "-k", pattern)


def _bench(name: str, *options: str) -> tuple[str, ...]:
    return (f"{BENCHMARKS}/bench_{name}.py", *options)


# All tests in one process, with fewer cases of the slowest.
_ALL_TESTS = (
    "losses and (byte or gold or policy) or gradients_do_not and packed or waits or teacher or bf16 or resume or "
    "offload or one_process"
)
_TOY_LOSSES = ("--rows", "64", "--hidden", "32", "--rounds", "1", "--losses", "ce", "byte-kl")
_SPARSE = ("--losses", "ce", "p-kl", "boundary-kl", "byte-kl", "alm")

DATA_STEP = Step("data", 0, 120, ("tests/gpu/standard_library_data.py", str(DATA)))  # before the benchmarks of a part
STEPS = (
    # Correctness.
    Step("losses against fp64", 1, 240, _tests("losses"), _tests(_ALL_TESTS)),
    Step("gradients of passes", 1, 180, _tests("gradients_do_not"), None),
    Step("host waits of a step", 1, 100, _tests("waits"), None),
    Step("teacher's log-probabilities", 1, 100, _tests("teacher"), None),
    Step("bf16: training, matrix products, packing", 1, 120, _tests("bf16"), None),
    Step("exact resume", 1, 180, _tests("resume"), None),
    Step("offloading", 1, 100, _tests("offload"), None),
    Step("one process under torchrun, NCCL, FSDP", 1, 100, _tests("one_process"), None),
    Step("Triton kernels", 1, 80, (*_PYTEST, "gpu", "tests/losses/test_triton_kernels.py"), needs=("triton",)),
    # Time and memory.
    Step("time of losses, H = 4,096", 2, 240, _bench("losses", "time", "--hidden", "4096", *_SPARSE),
         _bench("losses", "time", *_TOY_LOSSES)),
    Step("distill, a student of 1.2 billion parameters", 2, 180,
         _bench("training_loop", "--only", "1b", "--steps", "8", "--repeats", "1", "--profile"),
         _bench("training_loop", "--only", "small", "--steps", "3", "--repeats", "1", "--mixed-precision", "bf16",
                "--profile")),
    Step("forward passes of teachers", 2, 90, _bench("forward")),
    Step("memory of losses, H = 4,096", 2, 120, _bench("losses", "memory", "--hidden", "4096", *_SPARSE),
         _bench("losses", "memory", "--memory-rows", "64", *_TOY_LOSSES)),
    Step("memory against the forecast of doctor", 2, 180, _bench("doctor", "--only", "128k rows, tied"),
         _bench("doctor", "--only", "distill, 11 MiB, --max-batch-tokens 2048", "--cold")),
    Step("cache-teacher over the forward pass", 3, 150, _bench("cache"),
         _bench("cache", "--documents", "2", "--layers", "1", "--hidden", "128")),
    Step("scores of cache-teacher alone", 3, 60, _bench("teacher_operations", "--time", "4"),
         _bench("teacher_operations", "--time", "0")),
    Step("time of losses, H = 2,048", 3, 100, _bench("losses", "time", "--hidden", "2048", "--rounds", "3"), None),
    Step("the same with Triton kernels", 3, 50,
         _bench("losses", "time", "--hidden", "2048", "--rounds", "3", "--losses", "ce", "p-kl", "byte-kl"),
         None, needs=("triton",), variables=(("XTK_TRITON", "1"),)),
    Step("distill over a bare loop, small passes", 3, 100,
         _bench("training_loop", "--only", "large", "--steps", "12", "--profile"), None),
    Step("losses of TRL", 3, 40, _bench("losses", "trl", "--rows", "2048", "--rounds", "3"),
         _bench("losses", "trl", "--rows", "64", "--hidden", "32", "--rounds", "1"), needs=("trl",)),
    Step("packing", 3, 30, _bench("packing"), _bench("packing", "--documents", "4", "--rounds", "1")),
    Step("vLLM teacher", 3, 80, (*_PYTEST, "vllm", "tests/teachers/vllm_scoring"), needs=("vllm",)),
    Step("vLLM rollouts", 3, 70, (*_PYTEST, "vllm", "tests/rollouts/vllm_generation/test_on_policy_with_vllm.py"),
         needs=("vllm",)),
)  # fmt: skip


class Results:
    """JSON lines in a file; each is written to disk before the next step begins.

    Args:
        path: the file; lines are appended.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def add(self, **values: Any) -> None:
        """Append a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def missing(needs: Sequence[str]) -> list[str]:
    """Return the modules or paths that do not exist."""
    return [
        name
        for name in needs
        if not ((ROOT / name).exists() if "/" in name else importlib.util.find_spec(name) is not None)
    ]


def table_rows(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of tables that a benchmark printed: `| what | measured | reach |`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("what", "case", "---"):
            yield dict(zip(("what", "measured", "reach"), cells, strict=True))


def take_step(step: Step, seconds: float, results: Results, *, dry_run: bool) -> str:
    """Run a step with a time limit, record it, and return its status."""
    missing_needs = missing(step.needs)
    if missing_needs:
        results.add(
            step=step.name, part=step.part, status="skipped", reason=f"not installed: {', '.join(missing_needs)}"
        )
        return "skipped"
    command = [sys.executable, *((step.dry_command or step.command) if dry_run else step.command)]
    path = os.pathsep.join([str(ROOT), str(ROOT / BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "XTK_DATA": str(DATA), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    env |= dict(step.variables)
    if dry_run:
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    results.add(step=step.name, part=step.part, status="started", command=" ".join(command[1:]))
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process)
        output.seek(0)
        text = output.read()
    elapsed = round(time.monotonic() - started, 1)
    for row in table_rows(text):
        results.add(step=step.name, part=step.part, **row)
    lines = [line for line in text.splitlines() if line.strip()]
    status = "cut" if code is None else "passed" if code == 0 else "failed"
    if status == "failed" and lines and lines[-1].startswith("skipped: "):
        status = "skipped"
    tail_lines = lines[-1:] if status == "passed" else lines[-TAIL_LINES:]
    results.add(
        step=step.name, part=step.part, status=status, seconds=elapsed, limit=round(seconds, 1), tail=tail_lines
    )
    return status


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, also if the parent is killed (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a step and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def device() -> dict[str, str]:
    """Return the GPU's name and torch's version, from a subprocess: this process allocates no GPU memory."""
    code = ("import json, torch; there = torch.cuda.is_available(); "
            "print(json.dumps({'torch': torch.__version__, 'cuda': str(torch.version.cuda), "
            "'device': torch.cuda.get_device_name() if there else 'cpu'}))")  # fmt: skip
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (
        json.loads(completed.stdout) if completed.returncode == 0 else {"device": "", "error": completed.stderr[-500:]}
    )


def steps_of(part: int, steps: Sequence[Step], *, dry_run: bool) -> list[Step]:
    """Return the steps of a part; if there are benchmarks, after the step that writes their data."""
    chosen = [step for step in steps if step.part == part and not (dry_run and step.dry_command is None)]
    uses_data = any(step.command[0].startswith(BENCHMARKS) for step in chosen)
    return [replace(DATA_STEP, part=part), *chosen] if uses_data else chosen


def run_parts(parts: Sequence[int], steps: Sequence[Step], results: Results, *, dry_run: bool) -> int:
    """Run the steps of some parts; return the number of steps that did not pass, or had no time left."""
    not_passed = 0
    factor = DRY_RUN_FACTOR if dry_run else 1.0
    for part in parts:
        deadline = time.monotonic() + factor * PART_SECONDS
        for step in steps_of(part, steps, dry_run=dry_run):
            remaining = deadline - time.monotonic()
            if remaining < MIN_STEP_SECONDS:
                results.add(step=step.name, part=part, status="skipped", reason="no time is left in this part")
                not_passed += 1
                continue
            status = take_step(step, min(factor * step.seconds, remaining), results, dry_run=dry_run)
            not_passed += status in ("failed", "cut")
            sys.stdout.write(f"part {part}: {status:8}{step.name}\n")
            sys.stdout.flush()
    return not_passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit code: 1 if a step did not pass, 2 if a requirement is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), nargs="*", default=[1, 2, 3], help="which parts")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of steps")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu-results.jsonl", help="lines are appended")
    parser.add_argument("--list", action="store_true", help="print the steps and their time limits")
    args = parser.parse_args(arguments)
    steps = [step for step in STEPS if any(part in step.name for part in args.only)]
    if args.list:
        for step in steps:
            sys.stdout.write(f"part {step.part}  {step.seconds:4.0f} s  {step.name}\n")
        return 0
    packages = missing(REQUIRED_PACKAGES)
    device_info = {"device": ""} if packages else device()
    if packages or (not args.dry_run and device_info["device"] in ("", "cpu")):
        sys.stderr.write(
            f"{'Python packages are missing: ' + ', '.join(packages) if packages else 'torch finds no CUDA device'}\n"
            "  needed: a GPU, a CUDA build of torch (pip installs it on a machine with a GPU), xtk's dependencies but\n"
            "  datasets, and pytest and hypothesis; vllm is optional\n"
            "  try: pip install '.[dev]', or --dry-run for the CPU\n"
        )
        return 2
    results = Results(args.output)
    results.add(
        session="dry run" if args.dry_run else "gpu", parts=args.part, python=sys.version.split()[0], **device_info
    )
    not_passed = run_parts(args.part, steps, results, dry_run=args.dry_run)
    sys.stdout.write(f"{args.output}\n")
    return int(not_passed > 0)


if __name__ == "__main__":
    sys.exit(main())
