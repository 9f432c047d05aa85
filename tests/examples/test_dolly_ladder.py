"""`examples/dolly_ladder`: Dolly as prompts and completions, and ROUGE-L as a reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xtk.user_code import load_user_object

EXAMPLE = Path(__file__).parents[2] / "examples" / "dolly_ladder"


def prepare(source: Path, output: Path, *options: str) -> dict[str, list[dict]]:
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", source, output, *options], check=True)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in output.iterdir()}


def test_rows_of_the_hub_are_split_and_keep_their_context(tmp_path):
    rows = [
        {"instruction": f"Do {n}.", "context": "Given." if n % 2 else "", "response": f" done {n} "}
        for n in range(1600)
    ]
    source = tmp_path / "dolly.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"instruction": "x", "response": ""}]))
    splits = prepare(source, tmp_path / "data")
    assert {name: len(split) for name, split in splits.items()} == {"train": 100, "valid": 1000, "test": 500}
    everything = [row for split in splits.values() for row in split]
    assert len({row["completion"] for row in everything}) == 1600
    for row in everything:
        number = int(row["completion"].removeprefix("done "))
        assert row["output"] == [row["completion"]]
        assert f"### Instruction:\nDo {number}." in row["prompt"]
        assert ("### Input:\nGiven." in row["prompt"]) == bool(number % 2)
        assert row["prompt"].endswith("### Response:\n")


def test_processed_rows_keep_their_prompt_and_all_references(tmp_path):
    source = tmp_path / "valid.jsonl"
    source.write_text(json.dumps({"prompt": "One<n>two", "output": ["a", "b"]}) + "\n")
    assert prepare(source, tmp_path / "data", "--as", "test") == {
        "test": [{"prompt": "One\ntwo", "completion": "a", "output": ["a", "b"]}]
    }


def test_rouge_l_takes_the_nearest_reference():
    pytest.importorskip("rouge_score")
    rouge_l = load_user_object(f"{EXAMPLE / 'rouge_l.py'}:rouge_l", "--reward", "function")
    row = {"output": ["something else", "the cats sat there"]}
    assert rouge_l(" the cat sat there\n", "", row) == 1.0  # after stemming
    assert rouge_l("the cat", "", row) == pytest.approx(2 * 1.0 * 0.5 / 1.5)
    assert rouge_l("", "", {"output": "one"}) == 0.0
