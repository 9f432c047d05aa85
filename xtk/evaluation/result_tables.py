"""Results of evaluations, which cards and pages show: of `xtk evaluate --json`, and of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import CorruptError, XtkError

# Of how much was measured, not what was found.
NON_METRIC_KEYS = frozenset(
    {
        "bits", "bytes", "documents", "tokens", "windows", "window", "stride", "seconds", "samples", "seed", "n",
        "count", "sample_len", "temperature", "problems", "unscored", "prompts_too_long", "num_generations",
        "num_fewshot", "limit",
    }
)  # fmt: skip
# How a standard error is named after its metric: by xtk, and by lm-evaluation-harness.
ERROR_SUFFIXES = ("_error", "_stderr")
# Of a model beside another one: who shows several of them takes differences itself.
DIFFERENCE_SUFFIX = "difference"
# How it was measured, where numbers of different settings are no rivals: each setting has rows of its own.
SETTING_LABELS = {"reward": "{}", "temperature": "temperature {}", "num_fewshot": "{}-shot", "limit": "the first {}"}
# What else may tell two numbers of one model apart: told where it does.
OTHER_SETTING_LABELS = {
    "teacher": "teacher {}",
    "window": "window {}",
    "num_generations": "{} answers each",
    "seed": "seed {}",
}


@dataclass(frozen=True)
class EvaluationResult:
    """One number of an evaluation.

    Attributes:
        model: of which it is; the name of the file if it does not say.
        data: a task, or what was read.
        metric: what it is.
        value: the number.
        error: its standard error; None: nobody told.
        settings: how it was measured, of `SETTINGS`, as rows tell it.
        other_settings: {name: how rows tell it}, of `OTHERS`.
        file: where it was read.
    """

    model: str
    data: str
    metric: str
    value: float
    error: float | None = None
    settings: tuple[str, ...] = ()
    other_settings: Mapping[str, str] = field(default_factory=dict)
    file: str = ""


@dataclass(frozen=True)
class ResultRow:
    """What a table of results has in a row.

    Attributes:
        data: what was read, and how: "problems.jsonl, exact", "gsm8k, 5-shot".
        metric: what it is.
        by_model: {model: its number}.
    """

    data: str
    metric: str
    by_model: Mapping[str, EvaluationResult]


def read_results(path: Path) -> list[EvaluationResult]:
    """Read a file of results: a JSON object, a list of them, or one a line.

    Each is an object with `model`, `data` (or `task`) and numbers, or with `results`: {task: {metric: number}}. Numbers
    may lie in objects of their own, whose names are put before theirs. `NAME_error`, or `NAME_stderr`, is the standard
    error of `NAME`. Differences to another model are left out.

    Raises:
        Damaged: it is no such file, or holds no number.
    """
    found = [result for record in _read_records(path) for result in _results_of_record(record, path)]
    if not found:
        raise CorruptError(
            "there is no result in this file", where=str(path), hint="xtk evaluate MODEL DATA --json > FILE"
        )
    return found


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        try:
            whole = json.loads(text)
        except ValueError:
            whole = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as wrong:
        raise CorruptError(f"this file of results is no JSON: {wrong}", where=str(path)) from None
    records = whole if isinstance(whole, list) else [whole]
    if not all(isinstance(record, dict) for record in records):
        raise CorruptError("results are JSON objects, and there is something else", where=str(path))
    return records


def _results_of_record(record: Mapping[str, Any], path: Path) -> Iterator[EvaluationResult]:
    model = next((str(record[key]) for key in ("model", "model_name") if record.get(key)), path.stem)
    tasks = record.get("results")
    if isinstance(tasks, dict):
        shots = record.get("n-shot")  # as lm-evaluation-harness tells num_fewshot
        for task, figures in tasks.items():
            own = figures if isinstance(figures, dict) else {"value": figures}
            told = {"num_fewshot": shots.get(task) if isinstance(shots, dict) else None, **record, **own}
            yield from _results_of_metrics(model, str(task), own, told, path)
        return
    data = record.get("task", record.get("data", ""))
    named = ", ".join(map(str, data)) if isinstance(data, list) else str(data)
    yield from _results_of_metrics(model, named, record, record, path)


def _results_of_metrics(
    model: str, data: str, record: Mapping[str, Any], told: Mapping[str, Any], path: Path
) -> Iterator[EvaluationResult]:
    settings, others = (tuple(_setting_texts(told, names)) for names in (SETTING_LABELS, OTHER_SETTING_LABELS))
    numbers = dict(_flatten_metrics(record))
    for name, value in numbers.items():
        if name.endswith((DIFFERENCE_SUFFIX, *ERROR_SUFFIXES)):
            continue
        error = next((numbers[name + ending] for ending in ERROR_SUFFIXES if name + ending in numbers), None)
        yield EvaluationResult(
            model, data, name, value, error, tuple(text for _, text in settings), dict(others), str(path)
        )


def _setting_texts(record: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the settings that a record tells, but for those that mean "nothing special": 0, but for examples."""
    for name, form in names.items():
        value = record.get(name)
        if isinstance(value, str | int | float) and (value or (name == "num_fewshot" and value == 0)):
            yield name, form.format(Path(str(value)).name if name == "teacher" else value)


def _flatten_metrics(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        # lm-evaluation-harness: the metric and its filter, and acc_stderr,FILTER beside acc,FILTER
        metric, comma, chosen = str(key).removesuffix(",none").partition(",")
        of_error = "_stderr" if comma and metric.endswith("_stderr") else ""
        name = before + metric.removesuffix(of_error) + comma + chosen + of_error
        if isinstance(value, dict):
            yield from _flatten_metrics(value, f"{name}.")
        elif key not in NON_METRIC_KEYS and type(value) in (int, float) and math.isfinite(value):
            yield name, float(value)


def result_rows(results: Sequence[EvaluationResult]) -> list[ResultRow]:
    """Return the rows of a table of results, a column for each model: only what was measured alike shares one.

    Raises:
        XtkError: a model has two different numbers in one row.
    """
    called = shorten_names(one.data for one in results)  # no folders of a machine
    alike: dict[tuple[str, ...], list[EvaluationResult]] = {}
    for one in results:
        alike.setdefault((called[one.data], *one.settings, one.metric), []).append(one)
    rows: dict[tuple[str, str], dict[str, EvaluationResult]] = {}
    for (data, *settings, metric), group in alike.items():
        apart = [
            name
            for name in OTHER_SETTING_LABELS
            if len({one.other_settings.get(name) for one in group}) > 1 and _has_conflict(group)
        ]
        for one in group:
            name = ", ".join(filter(None, [data, *settings, *(one.other_settings.get(other) for other in apart)]))
            row = rows.setdefault((name, metric), {})
            if row.setdefault(one.model, one).value != one.value:
                raise _conflict_error(name, row[one.model], one)
    return [ResultRow(data, metric, row) for (data, metric), row in rows.items()]


def _has_conflict(group: Sequence[EvaluationResult]) -> bool:
    """Say whether a model has two different numbers among these."""
    return len({(one.model, one.value) for one in group}) > len({one.model for one in group})


def _conflict_error(name: str, one: EvaluationResult, other: EvaluationResult) -> XtkError:
    files = " and ".join(dict.fromkeys(file for file in (one.file, other.file) if file))
    return XtkError(
        f"two results of one name differ: {name}: {one.metric} of {one.model} is {format_result(one)}, and "
        f"{format_result(other)}",
        where=files or None,
        hint="leave one of them out, or write another name for its model or data into its file",
    )


def format_result(result: EvaluationResult) -> str:
    """Return a number as tables show it, with its standard error."""
    return f"{result.value:.4f}" + (f" ± {result.error:.4f}" if result.error is not None else "")


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Return what a page calls models or data: of an absolute path the shortest end by which it is told apart."""
    known = list(dict.fromkeys(names))
    parts = [Path(name).parts if Path(name).is_absolute() else (name,) for name in known]
    for length in range(1, max(map(len, parts), default=0)):
        ends = ["/".join(one[-length:]) for one in parts]
        if len(set(ends)) == len(known):
            return dict(zip(known, ends, strict=True))
    return dict(zip(known, known, strict=True))
