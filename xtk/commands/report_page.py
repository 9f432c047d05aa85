"""A page about runs: what they are, their curves over one another, their numbers, what their students wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from xtk.commands import curves
from xtk.commands.alignment_page import direction
from xtk.commands.page import CLOSED, opened

if TYPE_CHECKING:
    from xtk.evaluation.results import Result

SAMPLES, CHARACTERS = 6, 1200  # that are shown of a run; of each of them
CLOCKS = ("step", "seconds", "tokens")  # are no curves
WRITING = ("reward", "staleness", "rollout_")
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
.state { color: var(--faint); }
.swatch { display: inline-block; width: 1.4em; height: 0.35em; margin-inline-end: 0.45em; vertical-align: middle; }
.scroll { overflow-x: auto; }
td small { color: var(--faint); }
td.text { text-align: start; }
tr.differs th { font-weight: 600; }
.legend { position: sticky; top: 0; padding: 0.4rem 0; background: var(--paper); border-bottom: 1px solid var(--line); }
.legend span { margin-inline-end: 1.2em; white-space: nowrap; } .legend .swatch { margin-inline-end: 0.45em; }
.sample { font: 0.95rem/1.6 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap;
  border: 1px solid var(--line); border-radius: 0.3rem; padding: 0.6rem; margin: 0.3rem 0 1rem; }
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
    """

    name: str
    path: str
    state: str
    fingerprint: str
    recipe: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]] = field(default=())

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric."""
        return [(one["step"], one[metric]) for one in self.metrics if _is_number(one.get(metric))]

    def last(self) -> dict[str, float]:
        """Return the last value of each metric."""
        return {name: value for one in self.metrics for name, value in one.items() if _is_number(value)}


def page(
    runs: Sequence[Shown], results: Sequence[Result], cache: Iterable[str], style: str, request: str
) -> Iterator[str]:
    """Write a page that needs nothing but itself.

    Args:
        runs: the first one is what others are compared with.
        results: of evaluations.
        cache: HTML of a cache; none: there is none.
        style: of a cache's pictures, on which the page's own stands.
        request: kept in the head of the page.

    Yields:
        HTML.
    """
    title = ("Runs " if len(runs) > 1 else "Run ") + ", ".join(run.name for run in runs)
    yield opened(title, style + curves.STYLE + STYLE, request)
    yield from _runs(runs)
    if len(runs) > 1:
        legend = "".join(f"<span>{_swatch(at)}{escape(run.name)}</span>" for at, run in enumerate(runs))
        yield f'<p class="legend">{legend}</p>\n'
    yield from _curves(runs)
    yield from _numbers(runs)
    yield from _evaluations(results)
    yield from _recipes(runs)
    for at, run in enumerate(runs):
        yield from _samples(at, run)
    yield from cache
    yield CLOSED


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background: {curves.colour(number)}"></span>'


def _runs(runs: Sequence[Shown]) -> Iterator[str]:
    yield '<div class="scroll"><table>\n<tr><th>run</th><th>state</th><th>losses</th><th>recipe</th></tr>\n'
    for at, run in enumerate(runs):
        losses = ", ".join(map(str, run.recipe["losses"]))
        cells = (escape(run.state), escape(losses), f"<code>{run.fingerprint[:23]}</code>")
        yield (
            f'<tr><th scope="row" title="{escape(run.path)}">{_swatch(at)}{escape(run.name)}</th>'
            + "".join(f'<td class="text">{cell}</td>' for cell in cells)
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
    names = dict.fromkeys(name for run in runs for one in run.metrics for name in one if name not in CLOCKS)
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
    """Yield a table of the last values, with what a run has more or less than the first one named."""
    last = [run.last() for run in runs]
    names = [name for name in dict.fromkeys(name for values in last for name in values) if name != "step"]
    if not names:
        return
    yield "<section>\n<h2>Last metrics</h2>\n"
    yield _compared(
        [run.name for run in runs],
        [(name, [(values[name], None) if name in values else None for values in last]) for name in names],
    )
    yield "</section>\n"


def _evaluations(results: Sequence[Result]) -> Iterator[str]:
    if not results:
        return
    models = list(dict.fromkeys(one.model for one in results))
    rows: dict[str, list[tuple[float, float | None] | None]] = {}
    for one in results:
        row = rows.setdefault(f"{one.data}: {one.metric}" if one.data else one.metric, [None] * len(models))
        row[models.index(one.model)] = (one.value, one.error)
    yield "<section>\n<h2>Evaluations</h2>\n"
    yield _compared(models, list(rows.items()))
    yield "</section>\n"


def _compared(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, float | None] | None]]]) -> str:
    """Return a table of (value, standard error), with differences to the first column."""
    parts = ['<div class="scroll"><table>\n<tr><th></th>', *(f"<td>{escape(head)}</td>" for head in heads), "</tr>\n"]
    for name, values in rows:
        parts.append(f'<tr><th scope="row">{escape(name)}</th>')
        for at, cell in enumerate(values):
            if cell is None:
                parts.append("<td></td>")
                continue
            first = values[0]
            difference = "" if not at or first is None else f" <small>{_signed(cell[0] - first[0])}</small>"
            error = "" if cell[1] is None else f" ± {curves.number(cell[1])}"
            parts.append(f"<td>{curves.number(cell[0])}{error}{difference}</td>")
        parts.append("</tr>\n")
    return "".join([*parts, "</table></div>\n"])


def _signed(difference: float) -> str:
    return "=" if not difference else ("+" if difference > 0 else "\N{MINUS SIGN}") + curves.number(abs(difference))


def _recipes(runs: Sequence[Shown]) -> Iterator[str]:
    """Yield what runs were asked for: what differs first."""
    flat = [dict(_flat(run.recipe)) for run in runs]
    names = sorted({name for one in flat for name in one})
    differing = [name for name in names if len({one.get(name, "") for one in flat}) > 1]
    told = f"{len(differing)} of {len(names)} options differ" if len(runs) > 1 else f"{len(names)} options"
    opened_at_once = " open" if differing else ""
    yield f"<section>\n<h2>Recipes</h2>\n<details{opened_at_once}><summary>{told}</summary>\n"
    yield '<div class="scroll"><table>\n<tr><th></th>' + "".join(
        f'<td class="text">{escape(run.name)}</td>' for run in runs
    )
    yield "</tr>\n"
    for name in [*differing, *(name for name in names if name not in differing)]:
        kind = ' class="differs"' if name in differing else ""
        cells = "".join(f'<td class="text">{escape(one.get(name, ""))}</td>' for one in flat)
        yield f'<tr{kind}><th scope="row">{escape(name)}</th>{cells}</tr>\n'
    yield "</table></div>\n</details>\n</section>\n"


def _flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _samples(at: int, run: Shown) -> Iterator[str]:
    """Yield what a student wrote, from its first round to its last."""
    if not run.samples:
        return
    count = len(run.samples)
    places = sorted({round(place * (count - 1) / max(SAMPLES - 1, 1)) for place in range(SAMPLES)})
    yield f"<section>\n<h2>{_swatch(at)}What {escape(run.name)} wrote</h2>\n"
    for place in places:
        one = run.samples[place]
        text = str(one.get("text", ""))
        facts = [f"before step {one.get('step', 0) + 1:,}", f"prompt {one.get('prompt', '?')}"]
        facts += [f"reward {curves.number(one['reward'])}"] if _is_number(one.get("reward")) else []
        facts += ["cut off"] if one.get("finish") == "length" else []
        more = "…" if len(text) > CHARACTERS else ""
        yield (
            f'<p class="state">{escape(", ".join(facts))}</p>\n'
            f'<p class="sample" lang="" translate="no" dir="{direction(text)}">{escape(text[:CHARACTERS])}{more}</p>\n'
        )
    yield "</section>\n"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
