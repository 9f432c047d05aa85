"""The memory that `xtk doctor` estimates, compared with that of `distill` and `cache-teacher`.

    python tests/benchmarks/bench_doctor.py [--only PART ...] [--at-once 1] [--cold]

Students and teachers are Llamas with random weights and real or generated tokenizers. Each case is a doctor process and
a run process; the peak of the run is VmHWM of Linux (ru_maxrss starts with the memory of the parent), on a GPU that of
its tensors (`max_memory_allocated`). A run that is not
measured compiles Numba's kernels beforehand. No case sets a constant of the formula. Limit: 25 %. The heap of glibc
keeps freed memory: with adapters, the limit holds only with MALLOC_MMAP_THRESHOLD_=1048576 in the environment, with
which glibc returns memory to the system.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import small_inputs
from measurement import real_data, report
from transformers import LlamaConfig, LlamaForCausalLM

TOLERANCE, STEPS = 0.25, 3
RUN_AND_PRINT_PEAK = (
    "import sys, torch; from xtk.cli import run_command; code = run_command(sys.argv[1:]); "
    "host = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')); "
    "print(torch.cuda.max_memory_allocated() // 1024 if torch.cuda.is_available() else host, file=sys.stderr); "
    "sys.exit(code)"
)
# name: tokenizer, hidden size, layers, vocabulary rows, whether the embeddings are tied
MODELS = {
    "11 MiB": ("student", 128, 4, 8192, False),
    "250 MiB": ("student", 768, 8, 8192, False),
    "100 MiB": ("student", 512, 8, 4096, False),
    "600 MiB": ("student", 1024, 12, 1024, False),
    "128k rows, tied": ("llama3", 256, 6, 128256, True),
    "128k rows": ("llama3", 128, 4, 128256, False),
    "teacher of 8k rows": ("teacher", 128, 4, 8192, False),
    "teacher of 300 MiB": ("teacher", 768, 10, 8192, False),
    "teacher of 152k rows": ("qwen", 128, 4, 151936, True),
}


@dataclass(frozen=True)
class Case:
    """A run: `distill` of a student, or `cache-teacher` of a teacher, with options that the doctor also accepts."""

    command: str
    model: str
    options: str

    @property
    def name(self) -> str:
        """The name of the case in the table."""
        return f"{self.command}, {self.model}, {self.options}"


CASES = (
    Case("distill", "11 MiB", "--max-batch-tokens 2048"),
    Case("distill", "250 MiB", "--max-batch-tokens 2048"),
    Case("distill", "128k rows, tied", "--max-batch-tokens 2048"),
    Case("cache-teacher", "teacher of 8k rows", "--batch-tokens 4096"),
    Case("cache-teacher", "teacher of 152k rows", "--batch-tokens 4096"),
    Case("distill", "11 MiB", "--max-batch-tokens 8192 --per-device-train-batch-size 32"),
    Case("distill", "100 MiB", "--max-batch-tokens 1024"),
    Case("distill", "100 MiB", "--max-batch-tokens 4096 --per-device-train-batch-size 16"),
    Case("distill", "100 MiB", "--max-batch-tokens 4096 --per-device-train-batch-size 16 --gradient-checkpointing"),
    Case("distill", "100 MiB", "--max-batch-tokens 2048 --mixed-precision bf16"),
    Case("distill", "100 MiB", "--max-batch-tokens 2048 --dtype bfloat16"),
    Case("distill", "100 MiB", "--max-batch-tokens 2048 --lora-r 8"),
    Case("distill", "100 MiB", "--per-device-train-batch-size 4"),
    Case("distill", "250 MiB", "--max-batch-tokens 1024 --lora-r 8"),
    Case("distill", "250 MiB", "--max-batch-tokens 2048 --gradient-checkpointing"),
    Case("distill", "600 MiB", "--max-batch-tokens 1024"),
    Case("distill", "600 MiB", "--max-batch-tokens 1024 --lora-r 16"),
    Case("distill", "100 MiB", "--max-batch-tokens 1024 --gradient-checkpointing"),
    Case("distill", "128k rows", "--max-batch-tokens 1024"),
    Case("distill", "128k rows, tied", "--max-batch-tokens 1024 --mixed-precision bf16"),
    Case("cache-teacher", "teacher of 300 MiB", "--batch-tokens 4096"),
    Case("cache-teacher", "teacher of 300 MiB", "--batch-tokens 4096 --dtype bfloat16"),
)


def xtk(folder: Path, *arguments: str) -> tuple[list[dict[str, object]], int]:
    """Run xtk; return its JSON lines, and its peak memory in bytes."""
    command = [sys.executable, "-c", RUN_AND_PRINT_PEAK, *arguments, "--json", "--quiet"]
    env = {**os.environ, "XTK_CACHE": str(folder / "kept")}
    completed = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if completed.returncode and arguments[0] != "doctor":
        raise SystemExit(f"{' '.join(arguments)}\n{completed.stdout}{completed.stderr}")
    return [json.loads(line) for line in completed.stdout.splitlines()], 1024 * int(completed.stderr.splitlines()[-1])


def model(folder: Path, name: str) -> None:
    """Write a Llama and its tokenizer into one folder."""
    tokenizer, hidden, layers, rows, tied = MODELS[name]
    folder.mkdir()
    writers = {"student": small_inputs.make_student_tokenizer, "teacher": small_inputs.make_teacher_tokenizer}
    if tokenizer in writers:
        writers[tokenizer](folder)
    else:
        for file in (real_data() / "tokenizers" / tokenizer).iterdir():
            shutil.copyfile(file, folder / file.name)
    config = LlamaConfig(
        vocab_size=rows, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def teacher_of(case: Case) -> str:
    """Return the name of the teacher of a case."""
    if case.command == "cache-teacher":
        return case.model
    return "teacher of 152k rows" if case.model.startswith("128k") else "teacher of 8k rows"


def measure(folder: Path, case: Case) -> tuple[int, int]:
    """Return the estimated and the measured bytes."""
    teacher, options = teacher_of(case), case.options.split()
    output = str(folder / f"out {CASES.index(case)}")
    if case.command == "distill":
        findings, _ = xtk(folder, "doctor", case.model, teacher, f"cache of {teacher}", "data.jsonl", *options)
        run = ["distill", case.model, f"cache of {teacher}", "--max-steps", str(STEPS), *options]
    else:
        doctor_options = [word.replace("--dtype", "--teacher-dtype") for word in options]
        findings, _ = xtk(folder, "doctor", "11 MiB", teacher, "data.jsonl", *doctor_options)
        run = ["cache-teacher", teacher, "data.jsonl", *options]
    (forecast,) = [
        int(finding["values"]["bytes"])  # type: ignore[index]
        for finding in findings
        if finding["check"] == "memory" and finding["values"]["command"] == case.command  # type: ignore[index]
    ]
    _, measured = xtk(folder, *run, "-o", output)
    shutil.rmtree(output)
    return forecast, measured


def prepare(folder: Path, cases: list[Case], *, cold: bool) -> None:
    """Write data, models and caches, and compile the Numba kernels unless `cold`."""
    texts = small_inputs.sentences(64 * 15)
    small_inputs.write_jsonl(folder / "data.jsonl", [" ".join(texts[at : at + 15]) for at in range(0, len(texts), 15)])
    for name in {case.model for case in cases} | {teacher_of(case) for case in cases} | {"11 MiB"}:
        model(folder / name, name)
    for teacher in {teacher_of(case) for case in cases}:
        xtk(folder, "cache-teacher", teacher, "data.jsonl", "-o", f"cache of {teacher}")
        if cold:
            continue
        # Other supports use other kernels.
        xtk(folder, "cache-teacher", teacher, "data.jsonl", "--top-k", "8", "-o", f"likeliest of {teacher}")
        student = "128k rows" if "152k" in teacher and (folder / "128k rows").is_dir() else "11 MiB"
        xtk(folder, "distill", student, f"cache of {teacher}", "-o", f"warm {teacher}", "--max-steps", "1",
            "--per-device-train-batch-size", "1")  # fmt: skip


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of cases")
    parser.add_argument("--at-once", type=int, default=1, help="cases measured at the same time")
    parser.add_argument("--cold", action="store_true", help="measured runs compile kernels, with more memory")
    args = parser.parse_args()
    cases = [case for case in CASES if any(part in case.name for part in args.only)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, cases, cold=args.cold)

        def measure_case(case: Case) -> tuple[Case, int, int]:
            result = (case, *measure(folder, case))
            sys.stderr.write(f"{case.name}: {result[1] / 2**30:.2f} of {result[2] / 2**30:.2f} GiB\n")
            return result

        with ThreadPoolExecutor(args.at_once) as pool:
            results = list(pool.map(measure_case, cases))
    rows = []
    for case, forecast, measured_bytes in results:
        deviation = forecast / measured_bytes - 1
        verdict = "within 25 %" if abs(deviation) <= TOLERANCE else "MISSED"
        cell = f"{forecast / 2**30:.2f} of {measured_bytes / 2**30:.2f} GiB, {deviation:+.1%}"
        rows.append((case.name, cell, verdict))
    within_tolerance = sum(abs(forecast / measured_bytes - 1) <= TOLERANCE for _, forecast, measured_bytes in results)
    rows.append(("share within 25 %", f"{within_tolerance} of {len(results)}", "all"))
    report(__file__, rows, ("case", "forecast of measured", "reach"))


if __name__ == "__main__":
    main()
