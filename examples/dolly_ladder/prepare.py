"""Write Dolly-15k as prompts and completions: train, valid and test.

    python examples/dolly_ladder/prepare.py databricks-dolly-15k.jsonl OUTPUT

Reads the fields `instruction`, `context` and `response` of the hub's file, or `prompt` and `output` of a file that was
processed already; then give the split: `--as train`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VALID, TEST = 1000, 500
TASK = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately completes the request."
)
WITH_CONTEXT = ", paired with an input that provides further context"


def prompt_of(row: dict[str, Any]) -> str:
    """Return the prompt of a row in Alpaca's format."""
    if "prompt" in row:
        return str(row["prompt"]).replace("<n>", "\n")
    context = str(row.get("context") or "").strip()
    parts = [TASK.format(context=WITH_CONTEXT if context else ""), f"### Instruction:\n{row['instruction'].strip()}"]
    return "\n\n".join([*parts, *([f"### Input:\n{context}"] if context else []), "### Response:\n"])


def document(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with `prompt`, `completion` and `output`, the list of reference answers."""
    output = row.get("output", row.get("response", ""))
    references = [str(one).strip() for one in (output if isinstance(output, list) else [output])]
    return {"prompt": prompt_of(row), "completion": references[0], "output": references}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--as", dest="split", choices=("train", "valid", "test"), help="the whole file is this split")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(document, map(json.loads, lines)) if row["completion"]]
    if arguments.split:
        write(arguments.output / f"{arguments.split}.jsonl", rows)
        return
    random.Random(10).shuffle(rows)
    write(arguments.output / "test.jsonl", rows[:TEST])
    write(arguments.output / "valid.jsonl", rows[TEST : TEST + VALID])
    write(arguments.output / "train.jsonl", rows[TEST + VALID :])


if __name__ == "__main__":
    main()
