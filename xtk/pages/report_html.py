"""The HTML page of `xtk report`: runs, metric curves, final values, evaluations, samples and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from xtk.evaluation.evaluation_result_files import EvaluationResult, finite_number, result_rows, shorten_names
from xtk.name_registry import unknown_name_error
from xtk.pages.html_page import page, render
from xtk.pages.svg_curves import MetricCurve, curves_figure

MAX_SAMPLES = 6  # shown of a run
CLOCK_METRICS = ("step", "training_seconds", "tokens")  # not drawn as curves
# Teacher and student on the text of the first step: one value each, in the table of runs.
FIRST_STEP_METRICS = ("teacher_bits_per_byte", "student_bits_per_byte")
GENERATION_METRICS = ("reward", "is_on_policy_step", "staleness_steps", "rollout_")
TRAINING_METRICS = (
    "learning_rate", "gradient_norm", "tokens_per_second", "peak_memory_gib", "data_wait_fraction",
    "unaligned_fraction", "kd_scale", "teacher_weight/", "teacher_seconds", "generation_seconds", "skipped_steps",
)  # fmt: skip
HELD_OUT_BITS = "eval_bits_per_byte"
# Of different losses, these are sums of different things.
SUMS_OF_LOSSES = ("loss", "distillation_loss", "eval_loss", "eval_distillation_loss")
# Titles of metrics whose name is not one; of others, underscores become spaces.
METRIC_TITLES = {
    "bits_per_byte": "bits per byte", "top1_agreement": "top-1 agreement", "distillation_loss": "distillation loss",
    "peak_memory_gib": "peak memory", "data_wait_fraction": "waiting for data",
    "kd_scale": "scale of the distillation loss",
}  # fmt: skip
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


@dataclass(frozen=True)
class ReportedRun:
    """A run of the report."""

    name: str  # unique and short
    path: str  # its folder, as given
    state: str  # finished or unfinished, with the step, as text
    fingerprint: str  # of its recipe
    recipe: Mapping[str, Any]  # its options and inputs
    metrics: Sequence[Mapping[str, Any]]  # records of metrics.jsonl, in the order of steps
    samples: Sequence[Mapping[str, Any]] = ()  # a completion per batch of rollouts
    command: str = ""  # that repeats the run
    held_out: str = ""  # its --eval-data and their content, as text
    best_step: int | None = None  # the step of its weights, if early stopping chose them

    def shown_samples(self) -> list[Mapping[str, Any]]:
        """Return the first, the last and some samples between them."""
        places = {round(place * (len(self.samples) - 1) / (MAX_SAMPLES - 1)) for place in range(MAX_SAMPLES)}
        return [self.samples[place] for place in sorted(places)]

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric."""
        return [(line["step"], line[metric]) for line in self.metrics if finite_number(line.get(metric)) is not None]

    def last_values(self) -> dict[str, float]:
        """Return the last value of each metric, up to the step of the student's weights."""
        return {
            name: value
            for line in self.metrics
            if self.best_step is None or line["step"] <= self.best_step
            for name, value in line.items()
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
    """A number of a table."""

    value: float
    standard_error: float | None  # None: unknown
    baselines: Sequence[tuple[float, str]]  # value and name of the models or runs to compare with


# Title, heads, and the name and cells of each row.
ComparisonTable = tuple[str, Sequence[str], Sequence[tuple[str, Sequence[ReportCell | None]]]]


def report_page(
    runs: Sequence[ReportedRun],
    results: Sequence[EvaluationResult],
    baselines: Sequence[str],
    request: str,
    teacher_bits: float | None = None,
) -> str:
    """Return the page; runs are compared with the first, and results with those of the models `baselines`.

    `teacher_bits`: the teacher's bits per byte on the held-out text of the runs; None: unknown.
    """
    flat = [dict(_flatten_recipe(run.recipe)) for run in runs]
    names = sorted({name for options in flat for name in options})
    values = {name: [options.get(name, "") for options in flat] for name in names}
    differing = [name for name in values if len(set(values[name])) > 1]
    content = render(
        "report",
        runs=runs,
        headline=headline(runs, teacher_bits),
        teacher_bits=teacher_bits,
        HELD_OUT_BITS=HELD_OUT_BITS,
        curves=_curves(runs, teacher_bits),
        comparisons=[*_last_metrics(runs), *_evaluations(results, baselines)],
        options=[(name, values[name]) for name in [*differing, *(name for name in values if name not in differing)]],
        differing=differing,
        commands=[run.command for run in runs if run.command],
    )
    return page(("Runs " if len(runs) > 1 else "Run ") + ", ".join(run.name for run in runs), content, request)


def headline(runs: Sequence[ReportedRun], teacher_bits: float | None) -> str:
    """Return the result of the page in a sentence: the best run, its gain over the first, the teacher; "": unknown."""
    evaluated = [run for run in runs if HELD_OUT_BITS in run.last_values()]
    if len({run.held_out for run in evaluated}) != 1:
        return ""
    bits = {run.name: run.last_values()[HELD_OUT_BITS] for run in evaluated}
    (first, reference), best = next(iter(bits.items())), min(bits, key=bits.__getitem__)
    equal = [name for name, value in bits.items() if f"{value:.3f}" == f"{bits[best]:.3f}"]
    best = first if first in equal else best
    text = (
        f"{' and '.join(equal)} {'has' if len(equal) == 1 else 'have'} {bits[best]:.3f} bits per byte on held-out text"
    )
    before = evaluated[0].initial_value(HELD_OUT_BITS)
    if best != first:
        text += f", {reference - bits[best]:.3f} fewer than {first} ({reference:.3f})"
    elif len(bits) == 1 and before is not None:
        text += f", {before:.3f} before training"
    else:
        text += ", the fewest of these runs" if len(bits) > len(equal) else ""
    if teacher_bits is None:
        return text + "."
    text += f"; the teacher has {teacher_bits:.3f}"
    gap = reference - teacher_bits
    share = f": {(reference - bits[best]) / gap:.0%} of the gap between {first} and the teacher is closed"
    return text + (share if best != first and gap > 0 else "") + "."


def metric_title(metric: str) -> str:
    """Return a metric's title, such as `held-out bits per byte`; of `NAME/PART`, part is a teacher, region or score."""
    name, slash, part = metric.partition("/")
    of = name.removeprefix("eval_")
    is_task = bool(slash) and of != name and of not in METRIC_TITLES  # eval_TASK/METRIC
    title = of if is_task else METRIC_TITLES.get(of, of.replace("_", " "))
    return ("held-out " if of != name else "") + title + (f" ({part})" if slash else "")


def _repeated_sums(runs: Sequence[ReportedRun]) -> set[str]:
    """Return the sums of losses that equal another metric in all runs: those of a single loss of weight 1."""
    names = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    points = {name: [run.points(name) for run in runs] for name in names}
    repeated: set[str] = set()
    for name in reversed(SUMS_OF_LOSSES):
        others = points.keys() - {name} - repeated
        if name in points and any(points[other] == points[name] for other in others):
            repeated.add(name)
    return repeated


def _metric_section(metric: str) -> str:
    if metric.startswith("eval_"):
        return SECTIONS[0]
    if metric.startswith(GENERATION_METRICS):
        return SECTIONS[2]
    return SECTIONS[3] if metric.startswith(TRAINING_METRICS) else SECTIONS[1]


def curve_metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of all plotted metrics, in the order in which runs log them; constant ones are in a table."""
    repeated = _repeated_sums(runs)
    names = dict.fromkeys(name for run in runs for line in run.metrics for name in line
                          if name not in CLOCK_METRICS and name not in repeated and not name.endswith("_error")
                          and not name.startswith(FIRST_STEP_METRICS))  # fmt: skip
    plotted = {name: [value for run in runs for _, value in run.points(name)] for name in names}
    return [name for name, values in plotted.items() if len(set(values)) > 1]


def _curves(runs: Sequence[ReportedRun], teacher_bits: float | None) -> Iterator[tuple[str, list[Markup]]]:
    """Yield the titles of sections that have curves, with their figures."""
    figures: dict[str, list[Markup]] = {section: [] for section in SECTIONS}
    for metric in curve_metrics(runs):
        curves = [MetricCurve(run.name, at, run.points(metric)) for at, run in enumerate(runs) if run.points(metric)]
        if all(len(curve.points) < 2 for curve in curves):  # "Last metrics" has the numbers
            continue
        level = ("teacher", teacher_bits) if metric == HELD_OUT_BITS and teacher_bits is not None else None
        figures[_metric_section(metric)].append(
            curves_figure(metric_title(metric), METRIC_UNITS.get(metric, ""), curves, level=level, metric=metric)
        )
    yield from ((section, drawn) for section, drawn in figures.items() if drawn)


def _last_metrics(runs: Sequence[ReportedRun]) -> Iterator[ComparisonTable]:
    """Yield a table of the last values, with differences to the first run and to the untrained student."""
    last = [run.last_values() for run in runs]
    same_losses = len({str(run.recipe.get("losses")) for run in runs}) == 1
    repeated = _repeated_sums(runs)
    rows = []
    for name in dict.fromkeys(name for values in last for name in values):
        if name == "step" or name in repeated or name.startswith(FIRST_STEP_METRICS):
            continue
        cells: list[ReportCell | None] = []
        for run, values in zip(runs, last, strict=True):
            before = run.initial_value(name)
            is_comparable = _metric_section(name) != SECTIONS[3] and name not in CLOCK_METRICS
            is_comparable &= same_losses or name not in SUMS_OF_LOSSES
            is_compared = run is not runs[0] and name in last[0] and is_comparable
            others = [(last[0][name], runs[0].name)] if is_compared else []
            others += [] if before is None else [(before, "untrained")]
            cells.append(ReportCell(values[name], None, others) if name in values else None)
        unit = METRIC_UNITS.get(name, "")
        rows.append((metric_title(name) + (f", {unit}" if unit and unit not in metric_title(name) else ""), cells))
    if rows:
        yield "Last metrics", [run.name for run in runs], rows


def _evaluations(results: Sequence[EvaluationResult], baselines: Sequence[str]) -> Iterator[ComparisonTable]:
    """Yield a table of evaluation results, with differences to the baselines."""
    if not results:
        return
    models = list(dict.fromkeys(result.model for result in results))
    for name in baselines:
        if name not in models:
            raise unknown_name_error("model of --baseline", name, models)
    compared = list(baselines) or models[:1]
    names = shorten_names(models)
    rows = []
    for row in result_rows(results):
        known = row.by_model
        cells: list[ReportCell | None] = []
        for model in models:
            others = [(known[other].value, names[other]) for other in compared if other in known and other != model]
            cells.append(ReportCell(known[model].value, known[model].error, others) if model in known else None)
        title = METRIC_TITLES.get(row.metric, row.metric)
        rows.append((f"{row.data}: {title}" if row.data else title, cells))
    yield "Evaluations", [names[model] for model in models], rows


def _flatten_recipe(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flatten_recipe(value, f"{before}{name}.")
        else:
            yield before + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
