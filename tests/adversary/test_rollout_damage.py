"""A rollouts file with a flipped bit is refused, or read as it was written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from xtk_processes import run_xtk

from xtk.data.corpus_reader import Corpus
from xtk.data.record_to_document import rollout_checksum
from xtk.errors import XtkError


@pytest.fixture(scope="module")
def rollouts(pair, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    prompts = [{"prompt": "Anna has 1234 apples", "question": "q"}, {"prompt": "Emil gives", "given": None}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    command = ["rollout", pair.student, folder / "prompts.jsonl", "--max-completion-length", 8]
    run_xtk(*command, "--num-generations", 2, "-o", folder / "r.jsonl")
    return folder / "r.jsonl"


def read_rollouts(path: Path) -> list[object]:
    """Return all values that training reads from a rollouts file."""
    return [
        (
            row.segments,
            row.is_complete,
            row.sampled_tokens and (row.sampled_tokens.to_bytes(), row.sampled_tokens.advantage),
        )
        for row in Corpus([str(path)])
    ]


def flip_random_bits(rollouts: Path, folder: Path, flips: int) -> dict[str, int]:
    rng, original, expected = random.Random(18), rollouts.read_bytes(), read_rollouts(rollouts)
    counts = {"refused": 0, "read as written": 0}
    path = folder / "r.jsonl"
    for _ in range(flips):
        damaged = bytearray(original)
        damaged[rng.randrange(len(original))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read_rollouts(path)
        except XtkError:
            counts["refused"] += 1
            continue
        assert found == expected, bytes(damaged)
        counts["read as written"] += 1
    return counts


def test_flipped_bits_give_no_wrong_values(rollouts, tmp_path):
    print(flip_random_bits(rollouts, tmp_path, 60))


@pytest.mark.long
def test_many_flipped_bits_give_no_wrong_values(rollouts, tmp_path):
    print(flip_random_bits(rollouts, tmp_path, 300))


def test_edited_rollout_is_refused_unless_its_checksum_is_removed(run, pair, rollouts, tmp_path):
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    lines[1]["student_logprobs"][-1] -= 1.0
    edited = tmp_path / "edited.jsonl"
    edited.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["cache-teacher", pair.teacher, edited, "--top-k", 4, "-o", tmp_path / "cache"]
    stderr = run(*command, code=1).stderr
    assert "this rollout does not match its checksum" in stderr
    assert "document 1" in stderr
    assert not (tmp_path / "cache").exists()
    del lines[1]["rollout_checksum"]
    edited.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(*command)


def test_inspect_checks_every_rollout(run, rollouts, tmp_path):
    record = json.loads(run("inspect", rollouts, "--verify", "--json").stdout)
    assert record["kind"] == "rollouts"
    assert record["statistics"]["rollouts"] == len(rollouts.read_text().splitlines())
    (tmp_path / "r.jsonl").write_text(rollouts.read_text().replace('"sample": 1', '"sample": 0', 1))
    assert "r.jsonl, line 2" in run("inspect", tmp_path / "r.jsonl", code=1).stderr


def test_rollouts_in_parquet_are_read_like_jsonl(rollouts, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    # Parquet has no empty objects. A table does not distinguish nulls from missing keys, so neither does the checksum.
    assert all(line.pop("rewards") == {} for line in lines)
    for line in lines:
        line["rollout_checksum"] = rollout_checksum(line)
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "r.parquet")
    assert read_rollouts(tmp_path / "r.parquet") == read_rollouts(rollouts)
