"""A page about runs: what they are, their curves over one another, their numbers, what their students wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from xtk.commands import curves, samples_page
from xtk.commands.page import CLOSED, opened
from xtk.evaluation.results import rows_of, short_names
from xtk.lookup import unknown

if TYPE_CHECKING:
    from xtk.commands.samples_page import Written
    from xtk.evaluation.results import Result

CLOCKS = ("step", "seconds", "tokens")  # are no curves
WRITING = ("reward", "on_policy_step", "staleness", "rollout_")
RUNNING = (
    "learning_rate", "gradient_norm", "tokens_per_second", "memory", "waiting", "unaligned", "balance", "weight/",
    "teacher_seconds", "writing_seconds", "skipped_steps",
)  # fmt: skip
SECTIONS = ("Held-out text", "Losses", "What the student writes", "Training")
UNITS = {
    "eval_bits_per_byte": "bits a byte", "eval_ce": "nats a token", "ce": "nats a token", "memory": "GiB",
    "eval_top1_agreement": "share", "tokens_per_second": "tokens a second", "waiting": "share of the time",
    "rollout_entropy": "nats a token", "rollout_length": "tokens", "rollout_truncated": "share",
    "rollout_repetition": "share", "rollout_dropped": "share", "rollout_tool_share": "share", "staleness": "steps",
    "teacher_seconds": "s", "writing_seconds": "s", "skipped_steps": "steps",
}  # fmt: skip

STYLE = """
.swatch { display: inline-block; width: 1.4em; height: 0.35em; margin-inline-end: 0.45em; vertical-align: middle; }
.legend { position: sticky; top: 0; padding: 0.4rem 0; background: var(--paper); border-bottom: 1px solid var(--line); }
.legend span { display: inline-block; } .legend > span { margin-inline-end: 1.2em; }
.legend .swatch { margin-inline-end: 0.45em; }
td small { display: block; }
.compared th[scope="row"] { position: sticky; inset-inline-start: 0; background: var(--paper); }
td.wide { min-width: 14rem; max-width: 34rem; overflow-wrap: anywhere; } .differs th { font-weight: 600; }
summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Shown:
    """A run, as a page shows it.

    Attributes:
        name: how the page calls it, unlike the others.
        path: where it lies, as it was named.
        state: whether it is finished, and where it stands.
        fingerprint: of its recipe.
        recipe: what it does.
        metrics: its records, by rising steps.
        samples: what its student wrote, one a round.
        command: makes it again.
    """

    name: str
    path: str
    state: str
    fingerprint: str
    recipe: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]] = field(default=())
    command: str = ""

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric."""
        return [(one["step"], one[metric]) for one in self.metrics if _is_number(one.get(metric))]

    def last(self) -> dict[str, float]:
        """Return the last value of each metric."""
        return {name: value for one in self.metrics for name, value in one.items() if _is_number(value)}

    def untrained(self, metric: str) -> float | None:
        """Return what a metric of held-out text was before the first step; None if nobody looked."""
        first = self.metrics[0] if self.metrics else {}
        if first.get("step") or not metric.startswith("eval_") or not _is_number(first.get(metric)):
            return None
        return float(first[metric])


@dataclass(frozen=True)
class Cell:
    """A number of a table.

    Attributes:
        value: the number.
        error: its standard error; None: nobody told.
        others: (number, name) of those with which it is compared.
    """

    value: float
    error: float | None
    others: Sequence[tuple[float, str]]


def page(
    runs: Sequence[Shown],
    results: Sequence[Result],
    baselines: Sequence[str],
    written: Sequence[Written],
    pictures: Iterable[str],
    style: str,
    request: str,
) -> Iterator[str]:
    """Write a page that needs nothing but itself.

    Args:
        runs: the first one is what others are compared with.
        results: of evaluations.
        baselines: models of the evaluations with which the others are compared.
        written: by models, for the same prompts.
        pictures: more of it, as HTML.
        style: of these pictures, on which the page's own stands.
        request: kept in the head of the page.

    Yields:
        HTML.
    """
    title = ("Runs " if len(runs) > 1 else "Run ") + ", ".join(run.name for run in runs)
    yield opened(title, style + curves.STYLE + samples_page.STYLE + STYLE, request)
    yield from _runs(runs)
    if len(runs) > 1:
        legend = "".join(f"<span>{_swatch(at)}{escape(run.name)}</span>" for at, run in enumerate(runs))
        yield f'<p class="legend">{legend}</p>\n'
    yield from _curves(runs)
    yield from _numbers(runs)
    yield from _evaluations(results, baselines)
    yield from samples_page.samples(written, curves.number)
    for at, run in enumerate(runs):
        if run.samples:
            yield f"<section>\n<h2>{_swatch(at)}What {escape(run.name)} wrote</h2>\n"
            yield from samples_page.over_time(run.samples, curves.number)
            yield "</section>\n"
    yield from pictures
    yield from _recipes(runs)
    yield CLOSED


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background: {curves.colour(number)}"></span>'


def _runs(runs: Sequence[Shown]) -> Iterator[str]:
    yield '<div class="scroll"><table>\n<tr>' + "".join(
        f'<th scope="col">{head}</th>' for head in ("run", "state", "losses", "recipe")
    )
    yield "</tr>\n"
    for at, run in enumerate(runs):
        losses = ", ".join(map(str, run.recipe["losses"]))
        cells = (escape(run.state), escape(losses), f"<code>{run.fingerprint[:23]}</code>")
        yield (
            f'<tr><th scope="row" title="{escape(run.path)}">{_swatch(at)}{escape(run.name)}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>\n"
        )
    yield "</table></div>\n"


def _section(metric: str) -> str:
    if metric.startswith("eval_"):
        return SECTIONS[0]
    if metric.startswith(WRITING):
        return SECTIONS[2]
    return SECTIONS[3] if metric.startswith(RUNNING) else SECTIONS[1]


def metrics_of(runs: Sequence[Shown]) -> list[str]:
    """Return the names of all metrics that are curves, in the order in which runs tell them."""
    names = dict.fromkeys(name for run in runs for one in run.metrics for name in one
                          if name not in CLOCKS and not name.endswith("_error"))  # fmt: skip
    found = {name: [value for run in runs for _, value in run.points(name)] for name in names}
    return [name for name, values in found.items() if values and (name != "skipped_steps" or any(values))]


def _curves(runs: Sequence[Shown]) -> Iterator[str]:
    metrics = metrics_of(runs)
    for section in SECTIONS:
        here = [metric for metric in metrics if _section(metric) == section]
        if not here:
            continue
        yield f'<section>\n<h2>{section}</h2>\n<div class="pictures">\n'
        for metric in here:
            drawn = [curves.Curve(run.name, at, run.points(metric)) for at, run in enumerate(runs)]
            yield curves.figure(metric, UNITS.get(metric, ""), [curve for curve in drawn if curve.points])
        yield "</div>\n</section>\n"


def _numbers(runs: Sequence[Shown]) -> Iterator[str]:
    """Yield a table of the last values: what a run has more or less than the first one named, and than before."""
    last = [run.last() for run in runs]
    names = [name for name in dict.fromkeys(name for values in last for name in values) if name != "step"]
    if not names:
        return
    rows = []
    for name in names:
        cells: list[Cell | None] = []
        for run, values in zip(runs, last, strict=True):
            before = run.untrained(name)
            others = [] if run is runs[0] or name not in last[0] else [(last[0][name], runs[0].name)]
            others += [] if before is None else [(before, "untrained")]
            cells.append(Cell(values[name], None, others) if name in values else None)
        rows.append((name, cells))
    yield "<section>\n<h2>Last metrics</h2>\n"
    yield _compared([run.name for run in runs], rows)
    yield "</section>\n"


def _evaluations(results: Sequence[Result], baselines: Sequence[str]) -> Iterator[str]:
    """Yield a table of results: what each model has more or less than those that it is compared with."""
    if not results:
        return
    models = list(dict.fromkeys(one.model for one in results))
    for name in baselines:
        if name not in models:
            raise unknown("--baseline", name, models)
    compared = list(baselines) or models[:1]
    called = short_names(models)
    table: list[tuple[str, list[Cell | None]]] = []
    for row in rows_of(results):
        cells: list[Cell | None] = []
        for model in models:
            others = [(row.of[other].value, called[other]) for other in compared if other in row.of and other != model]
            cells.append(Cell(row.of[model].value, row.of[model].error, others) if model in row.of else None)
        table.append((f"{row.data}: {row.metric}" if row.data else row.metric, cells))
    yield "<section>\n<h2>Evaluations</h2>\n"
    yield _compared([called[model] for model in models], table)
    yield "</section>\n"


def _compared(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[Cell | None]]]) -> str:
    """Return a table of numbers with what they are more or less than others."""
    named = "".join(f'<th scope="col" class="number">{escape(head)}</th>' for head in heads)
    parts = [f'<div class="scroll"><table class="compared">\n<tr><th scope="col"></th>{named}</tr>\n']
    for name, cells in rows:
        parts.append(f'<tr><th scope="row">{escape(name)}</th>')
        for cell in cells:
            if cell is None:
                parts.append('<td class="number"></td>')
                continue
            error = "" if cell.error is None else f" ± {curves.number(cell.error)}"
            differences = "".join(
                f" <small>{_signed(cell.value - other)} to {escape(model)}</small>"
                for other, model in cell.others
                if other != cell.value
            )
            parts.append(f'<td class="number">{curves.number(cell.value)}{error}{differences}</td>')
        parts.append("</tr>\n")
    return "".join([*parts, "</table></div>\n"])


def _signed(difference: float) -> str:
    return ("+" if difference > 0 else "\N{MINUS SIGN}") + curves.number(abs(difference))


def _recipes(runs: Sequence[Shown]) -> Iterator[str]:
    """Yield what runs were asked for: what differs first."""
    flat = [dict(_flat(run.recipe)) for run in runs]
    names = sorted({name for one in flat for name in one})
    differing = [name for name in names if len({one.get(name, "") for one in flat}) > 1]
    told = f"{len(differing)} of {len(names)} options differ" if len(runs) > 1 else f"{len(names)} options"
    opened_at_once = " open" if differing else ""
    yield f"<section>\n<h2>Recipes</h2>\n<details{opened_at_once}><summary>{told}</summary>\n"
    yield '<div class="scroll"><table>\n<tr><th scope="col"></th>' + "".join(
        f'<th scope="col">{escape(run.name)}</th>' for run in runs
    )
    yield "</tr>\n"
    for name in [*differing, *(name for name in names if name not in differing)]:
        kind = ' class="differs"' if name in differing else ""
        cells = "".join(f'<td class="wide">{escape(one.get(name, ""))}</td>' for one in flat)
        yield f'<tr{kind}><th scope="row">{escape(name)}</th>{cells}</tr>\n'
    again = "\n".join(run.command for run in runs if run.command)
    yield "</table></div>\n</details>\n"
    yield f"<h3>The same again</h3>\n<pre>{escape(again)}</pre>\n</section>\n" if again else "</section>\n"


def _flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
