"""The HTML page of `xtk report`: runs, metric curves, final values, evaluations, samples and recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from xtk.evaluation.evaluation_result_files import finite_number, result_rows, shorten_names
from xtk.name_registry import unknown_name_error
from xtk.pages import completions_html, svg_curves
from xtk.pages.html_page import PAGE_END, page_start

if TYPE_CHECKING:
    from xtk.evaluation.evaluation_result_files import EvaluationResult
    from xtk.pages.completions_html import GeneratedSample

CLOCK_METRICS = ("step", "training_seconds", "tokens")  # not drawn as curves
# Teacher and student on the text of the first step: one value each, in the table of runs.
FIRST_STEP_METRICS = ("teacher_bits_per_byte", "student_bits_per_byte")
GENERATION_METRICS = ("reward", "is_on_policy_step", "staleness_steps", "rollout_")
TRAINING_METRICS = (
    "learning_rate", "gradient_norm", "tokens_per_second", "peak_memory_gib", "data_wait_fraction",
    "unaligned_fraction", "kd_scale", "teacher_weight/", "teacher_seconds", "generation_seconds", "skipped_steps",
)  # fmt: skip
SECTIONS = ("Held-out text", "Losses", "Rollouts", "Training")
METRIC_UNITS = {
    "eval_bits_per_byte": "bits per byte", "eval_ce": "nats per token", "ce": "nats per token",
    "peak_memory_gib": "GiB", "eval_top1_agreement": "fraction", "tokens_per_second": "tokens per second",
    "data_wait_fraction": "fraction of the time", "rollout_entropy": "nats per token",
    "rollout_length": "tokens", "rollout_truncated_fraction": "fraction",
    "rollout_repeated_4gram_fraction": "fraction", "rollout_unusable_fraction": "fraction",
    "rollout_environment_token_fraction": "fraction", "staleness_steps": "steps",
    "teacher_seconds": "s", "generation_seconds": "s", "skipped_steps": "steps",
}  # fmt: skip

REPORT_STYLE = """
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
class ReportedRun:
    """A run of the report.

    Attributes:
        name: unique short name.
        path: its folder, as given.
        state: finished or unfinished, with the step, as text.
        fingerprint: fingerprint of its recipe.
        recipe: its options and inputs.
        metrics: records of metrics.jsonl, in the order of steps.
        samples: a completion per batch of rollouts.
        command: the command that repeats the run.
        best_step: the step of its weights, if early stopping chose them.
    """

    name: str
    path: str
    state: str
    fingerprint: str
    recipe: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]] = field(default=())
    command: str = ""
    best_step: int | None = None

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric."""
        return [(one["step"], one[metric]) for one in self.metrics if finite_number(one.get(metric)) is not None]

    def last_values(self) -> dict[str, float]:
        """Return the last value of each metric, up to the step of the student's weights."""
        return {
            name: value
            for one in self.metrics
            if self.best_step is None or one["step"] <= self.best_step
            for name, value in one.items()
            if finite_number(value) is not None
        }

    def first_step_values(self) -> dict[str, float]:
        """Return the values of `FIRST_STEP_METRICS`, by name; with several teachers the names end in `/TEACHER`."""
        return {name: value for name, value in self.last_values().items() if name.startswith(FIRST_STEP_METRICS)}

    def initial_value(self, metric: str) -> float | None:
        """Return a held-out metric before the first step; None if it was not evaluated."""
        first = self.metrics[0] if self.metrics else {}
        if first.get("step") or not metric.startswith("eval_") or finite_number(first.get(metric)) is None:
            return None
        return float(first[metric])


@dataclass(frozen=True)
class ReportCell:
    """A number of a table.

    Attributes:
        value: the number.
        standard_error: its standard error; None if unknown.
        baselines: (value, name) of the models or runs to compare with.
    """

    value: float
    standard_error: float | None
    baselines: Sequence[tuple[float, str]]


def report_page(
    runs: Sequence[ReportedRun],
    results: Sequence[EvaluationResult],
    baselines: Sequence[str],
    samples: Sequence[GeneratedSample],
    extra_sections: Iterable[str],
    style: str,
    request: str,
) -> Iterator[str]:
    """Yield the HTML of the page.

    Args:
        runs: the runs; the others are compared with the first.
        results: evaluation results.
        baselines: names of models in `results` with which the others are compared.
        samples: completions of several models for the same prompts.
        extra_sections: further sections, as HTML.
        style: CSS of the extra sections.
        request: fingerprint of the inputs, stored in the head of the page.

    Yields:
        HTML.
    """
    title = ("Runs " if len(runs) > 1 else "Run ") + ", ".join(run.name for run in runs)
    yield page_start(title, style + svg_curves.CURVE_STYLE + completions_html.SAMPLES_STYLE + REPORT_STYLE, request)
    yield from _runs_table(runs)
    if len(runs) > 1:
        legend = "".join(f"<span>{_swatch(at)}{escape(run.name)}</span>" for at, run in enumerate(runs))
        yield f'<p class="legend">{legend}</p>\n'
    yield from _curves(runs)
    yield from _last_metrics_table(runs)
    yield from _evaluations(results, baselines)
    yield from completions_html.samples_section(samples, svg_curves.format_number)
    for at, run in enumerate(runs):
        if run.samples:
            yield f"<section>\n<h2>{_swatch(at)}Completions of {escape(run.name)}</h2>\n"
            yield from completions_html.samples_over_time(run.samples, svg_curves.format_number)
            yield "</section>\n"
    yield from extra_sections
    yield from _recipes(runs)
    yield PAGE_END


def _swatch(number: int) -> str:
    return f'<span class="swatch" style="background: {svg_curves.curve_color(number)}"></span>'


def _runs_table(runs: Sequence[ReportedRun]) -> Iterator[str]:
    yield '<div class="scroll"><table>\n<tr>' + "".join(
        f'<th scope="col">{head}</th>' for head in ("run", "state", "losses", "bits per byte, first step", "recipe")
    )
    yield "</tr>\n"
    for at, run in enumerate(runs):
        losses = ", ".join(map(str, run.recipe["losses"]))
        levels = "<br>".join(
            f"{escape(name.replace('_bits_per_byte', ''))} {svg_curves.format_number(value)}"
            for name, value in run.first_step_values().items()
        )
        cells = (escape(run.state), escape(losses), levels, f"<code>{run.fingerprint[:23]}</code>")
        yield (
            f'<tr><th scope="row" title="{escape(run.path)}">{_swatch(at)}{escape(run.name)}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>\n"
        )
    yield "</table></div>\n"


def _metric_section(metric: str) -> str:
    if metric.startswith("eval_"):
        return SECTIONS[0]
    if metric.startswith(GENERATION_METRICS):
        return SECTIONS[2]
    return SECTIONS[3] if metric.startswith(TRAINING_METRICS) else SECTIONS[1]


def curve_metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of all plotted metrics, in the order in which runs log them."""
    names = dict.fromkeys(name for run in runs for one in run.metrics for name in one
                          if name not in CLOCK_METRICS and not name.endswith("_error")
                          and not name.startswith(FIRST_STEP_METRICS))  # fmt: skip
    found = {name: [value for run in runs for _, value in run.points(name)] for name in names}
    return [name for name, values in found.items() if values and (name != "skipped_steps" or any(values))]


def _curves(runs: Sequence[ReportedRun]) -> Iterator[str]:
    metrics = curve_metrics(runs)
    for section in SECTIONS:
        here = [metric for metric in metrics if _metric_section(metric) == section]
        if not here:
            continue
        yield f'<section>\n<h2>{section}</h2>\n<div class="pictures">\n'
        for metric in here:
            curves = [svg_curves.MetricCurve(run.name, at, run.points(metric)) for at, run in enumerate(runs)]
            yield svg_curves.curves_figure(
                metric, METRIC_UNITS.get(metric, ""), [curve for curve in curves if curve.points]
            )
        yield "</div>\n</section>\n"


def _last_metrics_table(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Yield a table of the last values, with differences to the first run and to the untrained student."""
    last = [run.last_values() for run in runs]
    every = dict.fromkeys(name for values in last for name in values)
    names = [name for name in every if name != "step" and not name.startswith(FIRST_STEP_METRICS)]
    if not names:
        return
    rows = []
    for name in names:
        cells: list[ReportCell | None] = []
        for run, values in zip(runs, last, strict=True):
            before = run.initial_value(name)
            others = [] if run is runs[0] or name not in last[0] else [(last[0][name], runs[0].name)]
            others += [] if before is None else [(before, "untrained")]
            cells.append(ReportCell(values[name], None, others) if name in values else None)
        rows.append((name, cells))
    yield "<section>\n<h2>Last metrics</h2>\n"
    yield _comparison_table([run.name for run in runs], rows)
    yield "</section>\n"


def _evaluations(results: Sequence[EvaluationResult], baselines: Sequence[str]) -> Iterator[str]:
    """Yield a table of evaluation results, with differences to the baselines."""
    if not results:
        return
    models = list(dict.fromkeys(one.model for one in results))
    for name in baselines:
        if name not in models:
            raise unknown_name_error("model of --baseline", name, models)
    compared = list(baselines) or models[:1]
    called = shorten_names(models)
    table: list[tuple[str, list[ReportCell | None]]] = []
    for row in result_rows(results):
        cells: list[ReportCell | None] = []
        for model in models:
            others = [
                (row.by_model[other].value, called[other])
                for other in compared
                if other in row.by_model and other != model
            ]
            cells.append(
                ReportCell(row.by_model[model].value, row.by_model[model].error, others)
                if model in row.by_model
                else None
            )
        table.append((f"{row.data}: {row.metric}" if row.data else row.metric, cells))
    yield "<section>\n<h2>Evaluations</h2>\n"
    yield _comparison_table([called[model] for model in models], table)
    yield "</section>\n"


def _comparison_table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[ReportCell | None]]]) -> str:
    """Return a table of numbers with differences to their baselines."""
    named = "".join(f'<th scope="col" class="number">{escape(head)}</th>' for head in heads)
    parts = [f'<div class="scroll"><table class="compared">\n<tr><th scope="col"></th>{named}</tr>\n']
    for name, cells in rows:
        parts.append(f'<tr><th scope="row">{escape(name)}</th>')
        for cell in cells:
            if cell is None:
                parts.append('<td class="number"></td>')
                continue
            error = "" if cell.standard_error is None else f" ± {svg_curves.format_number(cell.standard_error)}"
            differences = "".join(
                f" <small>{_signed(cell.value - other)} to {escape(model)}</small>"
                for other, model in cell.baselines
                if other != cell.value
            )
            parts.append(f'<td class="number">{svg_curves.format_number(cell.value)}{error}{differences}</td>')
        parts.append("</tr>\n")
    return "".join([*parts, "</table></div>\n"])


def _signed(difference: float) -> str:
    return ("+" if difference > 0 else "\N{MINUS SIGN}") + svg_curves.format_number(abs(difference))


def _recipes(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Yield the options of the runs; those that differ come first."""
    flat = [dict(_flatten_recipe(run.recipe)) for run in runs]
    names = sorted({name for one in flat for name in one})
    differing = [name for name in names if len({one.get(name, "") for one in flat}) > 1]
    summary = f"{len(differing)} of {len(names)} options differ" if len(runs) > 1 else f"{len(names)} options"
    opened_at_once = " open" if differing else ""
    yield f"<section>\n<h2>Recipes</h2>\n<details{opened_at_once}><summary>{summary}</summary>\n"
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
    yield f"<h3>Commands to repeat the runs</h3>\n<pre>{escape(again)}</pre>\n</section>\n" if again else "</section>\n"


def _flatten_recipe(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flatten_recipe(value, f"{before}{name}.")
        else:
            yield before + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
