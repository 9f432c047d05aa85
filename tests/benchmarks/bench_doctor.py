"""The memory that `xtk doctor` forecasts, against what `cache-teacher` and `distill` hold: a tiny and a middling model.

    python tests/benchmarks/bench_doctor.py [--steps 3] [--only tiny middling]

Llamas of 32 hidden in 2 layers and of 512 in 8, as teacher and as student of one pair of tokenizers, with their own
256 to 8,192 rows. Each command is run twice, so that numba has compiled what it needs, and the second run counts; the
peak of a process is what the kernel says (ru_maxrss). Reach: 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import material
from common import report
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"tiny": (32, 2, 640, 1024), "middling": (512, 8, 8192, 1024), "middling, long rows": (512, 8, 8192, 3072)}
REACH = 0.15
PEAK = (
    "import json, resource, sys; from xtk.cli import run; code = run(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr); sys.exit(code)"
)


def run(folder: Path, *arguments: str) -> tuple[list[dict[str, object]], int]:
    """Run xtk; return its JSON lines, and the peak of its memory in bytes."""
    command = [sys.executable, "-c", PEAK, *arguments, "--json", "--quiet"]
    surroundings = {**os.environ, "XTK_CACHE": str(folder / "kept")}
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()], int(done.stderr.splitlines()[-1])


def model(folder: Path, hidden: int, layers: int, rows: int) -> None:
    """Write a Llama into a folder that has a tokenizer."""
    configuration = LlamaConfig(
        vocab_size=rows, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 16 if hidden < 64 else hidden // 64,
        num_key_value_heads=hidden // 32 if hidden < 64 else hidden // 128, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(configuration).save_pretrained(folder)


def measure(folder: Path, size: tuple[int, int, int, int], steps: int) -> dict[str, tuple[int, int]]:
    """Return {command: (bytes that were forecast, bytes that were held)}."""
    hidden, layers, rows, tokens = size
    model(material.make_student_tokenizer(folder / "student"), hidden, layers, rows)
    model(material.make_teacher_tokenizer(folder / "teacher"), hidden, layers, rows)
    texts = material.sentences(600)
    material.write_jsonl(folder / "data.jsonl", [" ".join(texts[at : at + 15]) for at in range(0, 600, 15)])
    batch = ["--max-batch-tokens", str(tokens), "--per-device-train-batch-size", "16"]
    teach = ["--batch-tokens", str(2 * tokens)]
    found, _ = run(folder, "doctor", "student", "teacher", "data.jsonl", *batch, *teach)
    said = {str(one["figures"]["command"]): int(one["figures"]["bytes"]) for one in found if one["check"] == "memory"}
    held: dict[str, int] = {}
    for number in (1, 2):
        _, held["cache-teacher"] = run(folder, "cache-teacher", "teacher", "data.jsonl", "-o", f"cache{number}", *teach)
        again = ["-o", f"out{number}", "--max-steps", str(steps)]
        _, held["distill"] = run(folder, "distill", "student", f"cache{number}", *again, *batch)
    return {command: (said[command], held[command]) for command in held}


def main() -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(SIZES))
    asked = parser.parse_args()
    rows = []
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            for command, (said, held) in measure(Path(folder), SIZES[name], asked.steps).items():
                off = said / held - 1
                told = f"{said / 2**30:.2f} of {held / 2**30:.2f} GiB, {off:+.1%}"
                rows.append((f"{name}: {command}", told, "within 15 %" if abs(off) <= REACH else "MISSED"))
    report(__file__, rows)


if __name__ == "__main__":
    main()
