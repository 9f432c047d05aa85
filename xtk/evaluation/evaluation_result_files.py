"""Tables of evaluation results, from files of `xtk evaluate --json` and of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk.errors import CorruptError, XtkError

# Keys that describe the amount of data or the settings; they are not metrics.
NON_METRIC_KEYS = frozenset(
    {
        "bits", "bytes", "documents", "tokens", "windows", "window", "stride", "seconds", "samples", "seed", "n",
        "count", "sample_len", "temperature", "problems", "unscored", "prompts_too_long", "num_generations",
        "num_fewshot", "limit", "skipped_bytes",
    }
)  # fmt: skip
# Suffix of a metric's standard error: of xtk, and of lm-evaluation-harness.
ERROR_SUFFIXES = ("_error", "_stderr")
# Suffix of a difference to another model; tables of several models leave it out.
DIFFERENCE_SUFFIX = "difference"
# Settings whose results are not comparable: each value gets separate rows.
SETTING_LABELS = {"reward": "{}", "temperature": "temperature {}", "num_fewshot": "{}-shot", "limit": "the first {}"}


@dataclass(frozen=True)
class EvaluationResult:
    """One metric of one model."""

    model: str  # the model's name; the file's name if the file does not contain it
    data: str
    metric: str
    value: float
    error: float | None = None  # its standard error; None: not in the file
    settings: tuple[str, ...] = ()  # labels of the settings in `SETTING_LABELS`
    file: str = ""


@dataclass(frozen=True)
class ResultRow:
    """One row of a table of results: data with settings ("problems.jsonl, exact"), metric, and {model: its result}."""

    data: str
    metric: str
    by_model: Mapping[str, EvaluationResult]


def read_results(path: Path) -> list[EvaluationResult]:
    """Return the results in a file: a JSON object, a list of objects, or one object per line.

    Each object has `model`, `data` (or `task`) and numbers, or `results`: {task: {metric: number}}. Nested objects give
    metrics named `OUTER.INNER`. `NAME_error`, or `NAME_stderr`, is the standard error of `NAME`. Differences to another
    model are left out.
    """
    read = [result for record in _read_records(path) for result in _results_of_record(record, path)]
    if not read:
        raise CorruptError(
            "the file of evaluation results has no result",
            where=str(path),
            hint="write one with xtk evaluate MODEL DATA --json > FILE",
        )
    return read


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        try:
            whole = json.loads(text)
        except ValueError:
            whole = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as failure:
        raise CorruptError(
            f"the file of evaluation results is not valid JSON: {failure}",
            where=str(path),
            hint="write it again with xtk evaluate MODEL DATA --json > FILE",
        ) from None
    records = whole if isinstance(whole, list) else [whole]
    if not all(isinstance(record, dict) for record in records):
        raise CorruptError(
            "the file of evaluation results has a JSON value that is not an object",
            where=str(path),
            hint="write it again with xtk evaluate MODEL DATA --json > FILE",
        )
    return records


def _results_of_record(record: Mapping[str, Any], path: Path) -> Iterator[EvaluationResult]:
    model = next((str(record[key]) for key in ("model", "model_name") if record.get(key)), path.stem)
    tasks = record.get("results")
    if isinstance(tasks, dict):
        shots = record.get("n-shot")  # lm-evaluation-harness's name of num_fewshot
        for task, figures in tasks.items():
            own = figures if isinstance(figures, dict) else {"value": figures}
            config = record.get("config")  # of lm-evaluation-harness
            limit = config.get("limit") if isinstance(config, dict) else None
            limit = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
            shot = shots.get(task) if isinstance(shots, dict) else None
            all_settings = {"num_fewshot": shot, "limit": limit, **record, **own}
            yield from _results_of_metrics(model, str(task), own, all_settings, path)
        return
    data = record.get("task", record.get("data", ""))
    named = ", ".join(map(str, data)) if isinstance(data, list) else str(data)
    yield from _results_of_metrics(model, named, record, record, path)


def _results_of_metrics(
    model: str, data: str, record: Mapping[str, Any], all_settings: Mapping[str, Any], path: Path
) -> Iterator[EvaluationResult]:
    settings = tuple(_setting_labels(all_settings))
    values = dict(_flatten_metrics(record))
    numbers = {name: value for name, value in values.items() if value is not None}
    for name, value in numbers.items():
        if name.endswith(DIFFERENCE_SUFFIX) or _is_error(name, values.keys()):
            continue
        error = next((numbers[name + ending] for ending in ERROR_SUFFIXES if name + ending in numbers), None)
        yield EvaluationResult(model, data, name, value, error, settings, str(path))


def _is_error(name: str, names: Collection[str]) -> bool:
    """Return whether a number is the standard error of another one, and not a metric such as mean_squared_error."""
    return any(name.endswith(ending) and name.removesuffix(ending) in names for ending in ERROR_SUFFIXES)


def _setting_labels(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield labels of the settings in a record, without defaults: 0, except for num_fewshot."""
    for name, form in SETTING_LABELS.items():
        value = record.get(name)
        if name == "reward" and not isinstance(value, str):  # a metric of another tool
            continue
        if isinstance(value, str | int | float) and (value or (name == "num_fewshot" and value == 0)):
            yield form.format(value)


def finite_number(value: object) -> float | None:
    """Return a JSON number as a float; None for other values, and for numbers that are not finite or too large."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _flatten_metrics(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield names and values of metrics; None: not a finite number."""
    for key, value in record.items():
        # lm-evaluation-harness: metric and filter; acc_stderr,FILTER is the error of acc,FILTER
        metric, comma, chosen = str(key).removesuffix(",none").partition(",")
        of_error = "_stderr" if comma and metric.endswith("_stderr") else ""
        name = before + metric.removesuffix(of_error) + comma + chosen + of_error
        if isinstance(value, dict):
            yield from _flatten_metrics(value, f"{name}.")
        elif key not in NON_METRIC_KEYS:
            yield name, finite_number(value)


def result_rows(results: Sequence[EvaluationResult]) -> list[ResultRow]:
    """Return the rows of a table with one column per model; results with different settings are in different rows."""
    short_names = shorten_names(result.data for result in results)  # without local folders
    rows: dict[tuple[str, str], dict[str, EvaluationResult]] = {}
    for result in results:
        name = ", ".join(filter(None, [short_names[result.data], *result.settings]))
        row = rows.setdefault((name, result.metric), {})
        if row.setdefault(result.model, result).value != result.value:
            raise _conflict_error(name, row[result.model], result)
    return [ResultRow(data, metric, row) for (data, metric), row in rows.items()]


def _conflict_error(name: str, one: EvaluationResult, other: EvaluationResult) -> XtkError:
    files = " and ".join(dict.fromkeys(file for file in (one.file, other.file) if file))
    return XtkError(
        f"the model {one.model} has two different results for {one.metric} on {name}: {format_result(one)} and "
        f"{format_result(other)}",
        where=files or None,
        hint='remove one of the files, or change "model" or "data" in one of them',
    )


def format_result(result: EvaluationResult) -> str:
    """Return a result as text: its value with 4 decimals, and its standard error."""
    return f"{result.value:.4f}" + (f" ± {result.error:.4f}" if result.error is not None else "")


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: short name}; absolute paths are shortened to the shortest suffixes that are all different."""
    known = list(dict.fromkeys(names))
    parts = [Path(name).parts if Path(name).is_absolute() else (name,) for name in known]
    for length in range(1, max(map(len, parts), default=0)):
        ends = ["/".join(part[-length:]) for part in parts]
        if len(set(ends)) == len(known):
            return dict(zip(known, ends, strict=True))
    return dict(zip(known, known, strict=True))


def add_evaluation_table(card: str, results: Sequence[EvaluationResult]) -> str:
    """Return a model card with an evaluation table before its recipe; one column per model."""
    if not results:
        return card
    models = list(dict.fromkeys(result.model for result in results))
    short_names = shorten_names(models)  # without local paths
    rows = [
        f"| {row.data} | {row.metric} | "
        f"{' | '.join(format_result(row.by_model[model]) if model in row.by_model else '' for model in models)} |"
        for row in result_rows(results)
    ]
    heads = " | ".join(["data", "metric", *(["value"] if len(models) == 1 else short_names.values())])
    table = "\n".join(["## Evaluation", "", f"| {heads} |", "| --- " * (2 + len(models)) + "|", *rows, "", ""])
    head, recipe, rest = card.partition("## Recipe\n")
    return head + table + recipe + rest
