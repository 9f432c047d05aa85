"""Short names of models and data in tables and model cards: no local folders unless needed to distinguish two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xtk.errors import XtkError
from xtk.evaluation.evaluation_result_files import (
    EvaluationResult,
    add_evaluation_table,
    read_results,
    result_rows,
    shorten_names,
)


def test_absolute_paths_are_shortened_to_their_shortest_unique_suffix():
    assert shorten_names(["/a/b/student", "org/model", "runs/one", "/a/b/student"]) == {
        "/a/b/student": "student", "org/model": "org/model", "runs/one": "runs/one"}  # fmt: skip
    assert list(shorten_names(["/a/x/run", "/a/y/run"]).values()) == ["x/run", "y/run"]
    assert list(shorten_names(["/a/student", "student"]).values()) == ["a/student", "student"]
    assert shorten_names([]) == {}


def test_model_card_contains_no_local_folders():
    results = [EvaluationResult("/home/me/distilled", "/home/me/test.jsonl", "bits_per_byte", 2.5)]
    results.append(EvaluationResult("/home/me/ce", "/home/me/test.jsonl", "bits_per_byte", 2.75))
    card = add_evaluation_table("## Recipe\n", results)
    assert "| test.jsonl | bits_per_byte | 2.5000 | 2.7500 |" in card
    assert "| distilled | ce |" in card
    assert "/home" not in card


def values_by_row(path: Path, *records: dict) -> dict[tuple[str, str], dict[str, float]]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = result_rows(read_results(path))
    return {(row.data, row.metric): {model: one.value for model, one in row.by_model.items()} for row in rows}


def test_only_results_with_equal_settings_share_a_row(tmp_path):
    path = tmp_path / "results.jsonl"
    scored = [{"model": "a", "data": "p1.jsonl", "reward": reward, "temperature": heat, "avg@1": value}
              for reward, heat, value in (("gsm8k", 0.0, 0.9), ("json", 0.0, 0.2), ("json", 0.8, 0.1))]  # fmt: skip
    assert values_by_row(path, *scored) == {
        ("p1.jsonl, gsm8k", "avg@1"): {"a": 0.9},
        ("p1.jsonl, json", "avg@1"): {"a": 0.2},
        ("p1.jsonl, json, temperature 0.8", "avg@1"): {"a": 0.1},
    }
    by_task = [{"model": model, "data": ["sums"], "results": {"sums": {"acc": value, "num_fewshot": num_fewshot}}}
               for model, num_fewshot, value in (("a", 0, 0.3), ("b", 0, 0.4), ("b", 2, 0.5))]  # fmt: skip
    harness_result = {"model_name": "c", "results": {"sums": {"acc,none": 0.6}}, "n-shot": {"sums": 2}}
    expected = {("sums, 0-shot", "acc"): {"a": 0.3, "b": 0.4}, ("sums, 2-shot", "acc"): {"b": 0.5, "c": 0.6}}
    assert values_by_row(path, *by_task, harness_result) == expected


def test_two_different_results_of_one_name_are_refused(tmp_path):
    results = []
    for name, value in (("one.json", 2.5), ("other.json", 2.25)):
        (tmp_path / name).write_text(json.dumps({"model": "a", "data": "t", "bits_per_byte": value}))
        results += read_results(tmp_path / name)
    with pytest.raises(XtkError, match="the model a has two different results for bits_per_byte on t: 2") as raised:
        add_evaluation_table("## Recipe\n", results)
    assert all(str(tmp_path / name) in str(raised.value) for name in ("one.json", "other.json"))


def test_values_that_are_not_metrics_are_left_out(tmp_path):
    """An integer of hundreds of digits, a reward that is a number, an error of a value that is null."""
    record = {"model": "m", "data": "d", "acc": 10**400, "reward": 0.5, "difference": None, "difference_error": 0.1}
    record |= {"skipped_bytes": 3, "difference_of": "m minus n"}
    (tmp_path / "one.json").write_text(json.dumps(record | {"categories": {"Latin": {"x": None, "x_error": 0.1}}}))
    assert [(one.metric, one.value, one.settings) for one in read_results(tmp_path / "one.json")] == [
        ("reward", 0.5, ())
    ]
