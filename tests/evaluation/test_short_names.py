"""What pages and cards call models and data: no folders of a machine, unless they tell two apart."""

from __future__ import annotations

from xtk.evaluation.results import Result, short_names
from xtk.training.card import with_evaluation


def test_an_absolute_path_has_the_shortest_end_that_tells_it_apart():
    assert short_names(["/a/b/student", "org/model", "runs/one", "/a/b/student"]) == {
        "/a/b/student": "student", "org/model": "org/model", "runs/one": "runs/one"}  # fmt: skip
    assert list(short_names(["/a/x/run", "/a/y/run"]).values()) == ["x/run", "y/run"]
    assert list(short_names(["/a/student", "student"]).values()) == ["a/student", "student"]
    assert short_names([]) == {}


def test_a_card_names_no_folders_of_this_machine():
    results = [Result("/home/me/distilled", "/home/me/test.jsonl", "bits_per_byte", 2.5)]
    results.append(Result("/home/me/ce", "/home/me/test.jsonl", "bits_per_byte", 2.75))
    card = with_evaluation("## Recipe\n", results)
    assert "| test.jsonl | bits_per_byte | 2.5000 | 2.7500 |" in card
    assert "| distilled | ce |" in card
    assert "/home" not in card
