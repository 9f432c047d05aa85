"""Measured results of the manual: one data file, its statistics, and the places in pages that show them.

A page shows a result in one of two ways, and `python docs/figures.py` fills in both:

    0.204<!-- =quickstart.ce.difference -->              a number, with the decimals (and the sign) that it has there
    <!-- results: headline --> ... <!-- end -->          a table or a printed block
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "real_pairs"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "benchmarks"))
from measurement import half_interval
from pair_results import Results
from pair_tables import document_table, draw, pair_table, span_differences

DOCS = Path(__file__).parent
REAL_PAIRS = DOCS / "figures" / "real-pairs"  # a folder of results of examples/real_pairs/run.py for each pair
DATA: dict[str, Any] = json.loads((DOCS / "figures" / "results.json").read_text(encoding="utf-8"))
NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<digits>[\d,]+(?:\.(?P<decimals>\d+))?)(?P<rest>[^\s<]{0,3} ?[%]?)<!-- =(?P<name>\S+) -->"
)
BLOCK = re.compile(r"(?P<begin><!-- results: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
LEAST_ERROR = 0.0005  # upper bound of a standard error that was published as 0.000
NAMES = {
    "ce": "cross-entropy alone",
    "default": "xtk, default loss",
    "gold-trainer": "TRL's GOLD",
    "gold-trainer-ce": "TRL's GOLD + cross-entropy",
    "gold": "GOLD in xtk + cross-entropy",
}
Difference = tuple[float, float]  # from the default: mean, half of its 95 % interval


def interval(standard_error: float, seeds: int) -> float:
    """Return half of the 95 % interval of a mean over seeds, by Student's t, from a standard error that was rounded."""
    half: float = half_interval(max(standard_error, LEAST_ERROR), seeds)
    return half


def difference(run: dict[str, Any], student: str) -> Difference:
    """Return by how much a student of a run differs from the default, paired by seed."""
    values, default = run["students"][student], run["students"]["default"]
    if isinstance(values, dict):
        return values["mean"], interval(values["se"], len(default))
    paired = [value - reference for value, reference in zip(values, default, strict=True)]
    return statistics.mean(paired), interval(statistics.stdev(paired) / math.sqrt(len(paired)), len(paired))


def level(run: dict[str, Any], student: str) -> float:
    """Return a student's mean over seeds."""
    return statistics.mean(run["students"]["default"]) + difference(run, student)[0]


def objective_differences() -> Iterator[tuple[str, list[Difference | None]]]:
    """Yield (losses, difference from the default in each setting) of the table of all objectives."""
    objectives = DATA["objectives"]
    for name, cells in (objectives["differences"] | objectives["comparisons"]).items():
        yield name, [(cell[0], interval(cell[1], objectives["seeds"])) if cell else None for cell in cells]


def values() -> dict[str, float]:
    """Return every number that a page may name."""
    found: dict[str, float] = dict(DATA["constants"])
    for name, run in DATA["runs"].items():
        teacher = found[f"{name}.teacher"] = run["teacher"]
        for student in run["students"]:
            found[f"{name}.{student}"] = level(run, student)
            found[f"{name}.{student}.difference"], found[f"{name}.{student}.interval"] = difference(run, student)
        gain = found[f"{name}.gain"] = found[f"{name}.ce"] - found[f"{name}.default"]
        found[f"{name}.gap_closed"] = 100 * gain / (found[f"{name}.ce"] - teacher)
    for losses, cells in objective_differences():
        for setting, cell in zip(DATA["objectives"]["settings"], cells, strict=True):
            if cell:
                at = f"{losses}/{setting}".replace(" ", "_")
                found[f"{at}.difference"], found[f"{at}.interval"] = cell
    means = {task: statistics.mean(row) for task, row in DATA["on_policy"]["accuracy"].items()}
    found["on-policy.ratio"] = means["on-policy bpm, escd (equal here)"] / means["ce on the teacher's answers"]
    return found


def signed(cell: Difference | None, *, bold_better: bool = False) -> str:
    """Return a difference as text, in bold where the default is worse and the interval excludes 0."""
    if cell is None:
        return ""
    text = f"{cell[0]:+.3f} ± {cell[1]:.3f}"
    return f"**{text}**" if bold_better and cell[0] + cell[1] < 0 else text


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def headline() -> str:
    """Return the results of the runs with TRL's trainer and with the pretrained teacher, by seed."""
    rows = []
    for run in DATA["runs"].values():
        rows.append((f"**{run['title']}**: {run['conditions']}", f"{run['teacher']:.3f}", "", ""))
        for student in sorted(run["students"], key=lambda one: -level(run, one)):
            seeds = run["students"][student]
            shown = ", ".join(f"{value:.3f}" for value in seeds) if isinstance(seeds, list) else "not kept"
            change = "" if student == "default" else signed(difference(run, student))
            rows.append((NAMES[student], f"{level(run, student):.3f}", shown, change))
    return table(("model", "bits per byte", "seeds 0, 1, 2", "minus the default"), rows)


def objectives() -> str:
    """Return the table of all objectives and settings."""
    data = DATA["objectives"]
    levels = {
        "teacher": data["teachers"],
        "`ce`": data["ce"],
        "**`ce:weight=0.3`, `byte-kl`** (`auto`)": data["default"],
    }
    rows = [(name, *(f"{value:.3f}" for value in row)) for name, row in levels.items()]
    for name, cells in objective_differences():
        prefix = "for comparison: " if name in data["comparisons"] else ""
        rows.append((prefix + code(name), *(signed(cell, bold_better=not prefix) for cell in cells)))
    return table(("losses", *data["settings"]), rows)


def code(losses: str) -> str:
    """Return names of losses as code, and other words as they are."""
    return ", ".join(f"`{part}`" if " " not in part else part for part in losses.split(", "))


def on_policy(part: str = "accuracy") -> str:
    """Return the accuracies of the on-policy example, by seed."""
    accuracies = DATA["on_policy"][part]
    rows = [
        (name, ", ".join(f"{value:.3f}" for value in row), f"{statistics.mean(row):.3f}")
        for name, row in accuracies.items()
    ]
    return table(("objective", "accuracy, seeds 0, 1, 2", "mean"), rows)


def on_policy_six() -> str:
    """Return five of these with six seeds, and their distance from `bpm`."""
    data = DATA["on_policy"]["six_seeds"]
    rows = [
        (name, f"{mean:.3f}", signed((change, interval(error, 6))) if error else "")
        for name, (mean, change, error) in data.items()
    ]
    return table(("objective", "accuracy, mean of six seeds", "`bpm` minus it"), rows)


def on_policy_ways() -> str:
    """Return the three ways of the tutorial."""
    accuracies = {name.split(",")[0].split(" on the")[0]: row for name, row in DATA["on_policy"]["accuracy"].items()}
    rows = []
    for way in DATA["on_policy"]["curves"].keys() - {"steps"}:
        row = accuracies[way]
        rows.append((f"`{way}`", ", ".join(f"{value:.3f}" for value in row), f"{statistics.mean(row):.3f}"))
    heads = ("way", "fraction correct after 100 steps, seeds 0, 1, 2", "mean")
    return table(heads, sorted(rows, key=lambda one: one[2]))


def quickstart() -> str:
    """Return what `xtk quickstart` printed at its end."""
    from xtk.quickstart.demo_pipeline import explain_results, result_rows
    from xtk.terminal_tables import plain_lines

    title, rows = result_rows(DATA["quickstart_as_printed"])
    lines = [title, *plain_lines(rows, (False, True)), explain_results(DATA["quickstart_as_printed"])]
    return "\n".join(["```text", *lines, "```", ""])


def ten_numbers() -> str:
    """Return the numbers that matter most, each with the place where it was measured."""
    rows = [(row["what"], row["value"], row["script"]) for row in DATA["ten_numbers"]]
    return table(("what", "measured", "script"), rows)


def how_to() -> str:
    """Return the how-tos by the groups of the site's menu, with hardware and time from the head of each page."""
    menu = yaml.safe_load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    parts = []
    for group in next(entry["How to"] for entry in menu if "How to" in entry)[1:]:
        ((heading, sources),) = group.items()
        rows = []
        for source in sources:
            title, head, *_ = (DOCS.parent / source).read_text(encoding="utf-8").split("\n\n")
            name = Path(source).name
            head = head.strip("*").removeprefix("GPU: ").removesuffix(".").replace("](#", f"]({name}#")
            rows.append((f"[{title.removeprefix('# ')}]({name})", *head.split(". Time: ")))
        parts.append(f"## {heading}\n\n{table(('page', 'GPU', 'time'), rows)}")
    return "\n" + "\n".join(parts) + "\n"


def real_pair(name: str) -> str:
    """Return the tables of a pair of pretrained models: the test set, and its differences by document."""
    results = Results(REAL_PAIRS / name)
    return "\n".join([*pair_table(results, name), "", *document_table(results, name), ""])


def draw_spans() -> str:
    """Return the figure of losses over spans minus `byte-kl` and `strict`, by category of text."""
    title = "bits per byte by category; left of the line spans help"
    return draw(title, span_differences(Results(REAL_PAIRS / "code"), ["code"]))


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "objectives": objectives,
    "on-policy": on_policy,
    "on-policy-controls": partial(on_policy, "controls"),
    "on-policy-six": on_policy_six,
    "on-policy-ways": on_policy_ways,
    "quickstart": quickstart,
    "ten-numbers": ten_numbers,
    "how-to": how_to,
    "real-pair-text": partial(real_pair, "text"),
    "real-pair-code": partial(real_pair, "code"),
}


def fill(page: str) -> str:
    """Return a page with its numbers and blocks from the data; an unknown name is a KeyError."""
    known = values()

    def number(found: re.Match[str]) -> str:
        value = known[found["name"]]
        text = f"{value:{'+' if found['sign'] else ''},.{len(found['decimals'] or '')}f}"
        return f"{text}{found['rest']}<!-- ={found['name']} -->"

    page = NUMBER.sub(number, page)
    return BLOCK.sub(lambda found: f"{found['begin']}{BLOCKS[found['name']]()}{found['end']}", page)
