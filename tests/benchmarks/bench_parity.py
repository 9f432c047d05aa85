"""The table of parallel layouts: differences of losses, gradients and weights from those of one process.

    python tests/benchmarks/bench_parity.py [--processes 1 2 3 4 8]

On a CPU with gloo, fp32, a Llama and a Qwen3 with tied embeddings, of 657 vocabulary rows, eight losses at once from
the cache of a teacher with another tokenizer, documents of unequal length. A row is the worst of both students, of
steps of eight and of five documents (the last process of some layouts has none), split into the passes that
tests/training/parallel_layouts.py lists. Weights are those after five steps of AdamW at 1e-3.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measurement import ROOT, machine

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "training")]

import small_inputs  # noqa: E402
from parallel_layouts import (  # noqa: E402
    LONG_LAYOUTS,
    SHORT_LAYOUTS,
    STEP_SPLITS,
    Difference,
    LayoutResults,
    all_cases,
    make_students,
    reference_cases,
    run_cases,
)

from xtk.parallel.parallel_config import parse_parallel  # noqa: E402

OPTION_LABELS = {
    "max_batch_tokens": "passes of {} tokens", "packing": "padded", "gradient_checkpointing": "checkpointed gradients",
    "fsdp_offload": "offloaded", "lora_r": "LoRA",
}  # fmt: skip


def layout_label(processes: int, options: dict[str, object]) -> str:
    """Return the name of a layout in the table."""
    parts = ["one process" if processes == 1 else str(parse_parallel(str(options.get("parallel", "")), processes))]
    parts += [OPTION_LABELS[name].format(value) for name, value in options.items() if name != "parallel"]
    return ", ".join(parts)


def worst(differences: list[Difference]) -> str:
    """Return the columns of a row; with eight processes no weights are updated."""
    columns = []
    for name in ("loss", "gradient", "norm", "weights"):
        values = [value for difference in differences if (value := getattr(difference, name)) is not None]
        columns.append(f"{max(values):.0e}" if values else "")
    return " | ".join(columns)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=sorted(STEP_SPLITS))
    requested = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        students = make_students(folder)
        small_inputs.make_teacher(folder / "teacher")
        small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(10, seed=8))
        subprocess.run(
            [sys.executable, "-m", "xtk", "cache-teacher", "teacher", "data.jsonl", "--top-k", "16", "--precision",
             "float32", "--quiet", "-o", "cache"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        os.environ["PYTHONPATH"] = str(ROOT)
        lines = [f"\n`bench_parity.py` on {machine()}\n"]
        lines += [
            "| processes | layout | loss | gradient | its norm | weights |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        reference: LayoutResults | None = None
        for processes in sorted({1, *requested}):
            layouts = [*SHORT_LAYOUTS.get(processes, []), *LONG_LAYOUTS.get(processes, [])]
            output = folder / f"of-{processes}"
            output.mkdir()
            selected_cases = all_cases(layouts) + (reference_cases() if processes == 1 else [])
            result = run_cases(processes, selected_cases, folder / "cache", students, output)
            reference = reference or result
            for options in layouts:
                differences = [
                    result.difference(student, layout, way, reference)
                    for student, layout in all_cases(layouts)
                    if layout == options
                    for way in STEP_SPLITS[processes]
                ]
                lines.append(f"| {processes} | {layout_label(processes, options)} | {worst(differences)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
