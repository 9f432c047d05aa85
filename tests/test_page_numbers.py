"""Numbers in README, pages and figures come from docs/figures/results.json."""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import figures
import results

ROOT = Path(__file__).parents[1]
# Pages whose every measured value (three decimals) is one of the data file; longer pages also have other experiments.
STRICT_PAGES = ("README.md", "docs/README.md", "docs/explanation/which-loss.md")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path, _ in figures.pages()], ids=lambda path: path.name)
def test_page_has_the_numbers_of_the_data(path):
    text = path.read_text(encoding="utf-8")
    assert results.fill(text) == text, "run python docs/figures.py"


@pytest.mark.parametrize("page", STRICT_PAGES)
def test_no_measured_value_is_typed_by_hand(page):
    text = results.BLOCK.sub("", results.NUMBER.sub("", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)))
    assert not re.findall(r"\d\.\d{3}\b", text)


def test_another_measurement_changes_pages_and_figures(monkeypatch):
    drawn, page = figures.draw_headline(), read("README.md")
    run = results.DATA["runs"]["quickstart"]
    worse = {**run, "students": {**run["students"], "default": [2.4, 2.41, 2.39]}}
    monkeypatch.setitem(results.DATA["runs"], "quickstart", worse)
    assert results.fill(page) != page
    assert figures.draw_headline() != drawn


def test_unknown_number_is_an_error():
    with pytest.raises(KeyError, match=r"quickstart\.nothing"):
        results.fill("1.0<!-- =quickstart.nothing -->")


def test_both_tables_have_the_same_values():
    objectives = results.DATA["objectives"]
    for name, run in results.DATA["runs"].items():
        at = objectives["settings"].index(name)
        assert objectives["teachers"][at] == run["teacher"]
        for student in ("ce", "default"):
            assert round(statistics.mean(run["students"][student]), 3) == objectives[student][at]


def test_curves_end_at_the_accuracies_of_the_table():
    curves = dict(results.DATA["on_policy"]["curves"])
    assert len(curves.pop("steps")) == len(curves["ce"][0])
    ends = [[values[-1] for values in seeds] for seeds in curves.values()]
    assert all(row in results.DATA["on_policy"]["accuracy"].values() for row in ends)


def test_conclusions_follow_from_the_intervals():
    cells = dict(results.objective_differences())
    named = {name: cells[name] for name in results.DATA["objectives"]["differences"]}
    assert all(
        change + half >= 0 for row in named.values() for change, half in row
    )  # nothing is better than the default
    assert all(change - half > 0 for change, half in named["ce, gold"])
    assert sum(change - half > 0 for change, half in named["ce:weight=0.3, bpm"]) == 1
    for run in results.DATA["runs"].values():
        for student in set(run["students"]) - {"default"}:
            change, half = results.difference(run, student)
            assert change - half > 0, student


def test_quantiles_are_those_of_student():
    from measurement import T_975
    from scipy.stats import t

    assert {degrees: round(float(t.ppf(0.975, degrees)), 3) for degrees in T_975} == T_975


def test_bytes_per_position_are_those_that_the_doctor_assumes():
    from xtk.doctor.memory_and_disk_estimates import BYTES_PER_POSITION

    assert results.DATA["constants"]["bytes_per_position"] == BYTES_PER_POSITION


def test_ten_numbers_are_those_of_the_laboratory_book():
    page = results.BLOCK.sub("", read("docs/explanation/numbers.md"))
    missing = [note for row in results.DATA["ten_numbers"] for note in row["notes"] if note not in page]
    assert len(results.DATA["ten_numbers"]) == 10
    assert not missing


HOW_TOS = sorted(path for path in (ROOT / "docs" / "how-to").glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("path", HOW_TOS, ids=lambda path: path.stem)
def test_how_to_begins_with_hardware_and_time(path):
    title, form, *_ = path.read_text(encoding="utf-8").split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert re.fullmatch(r"\*GPU: [^\n]+\. Time: [^\n]+\.\*", form)
    assert len(form) <= 160


def test_all_how_tos_are_in_the_index():
    index = read("docs/how-to/README.md")
    assert not [path.name for path in HOW_TOS if path.name not in ("reproduce.md",) and f"({path.name})" not in index]
