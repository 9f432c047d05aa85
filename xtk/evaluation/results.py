"""Results of evaluations, which cards and pages show: of `xtk evaluate --json`, and of lm-evaluation-harness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk.errors import Damaged

# Of how much was measured, not what was found.
COUNTS = frozenset(
    {
        "bits", "bytes", "documents", "tokens", "windows", "window", "stride", "seconds", "samples", "seed", "n",
        "count", "sample_len", "temperature", "problems", "unjudged", "without_room", "num_generations", "num_fewshot",
        "limit",
    }
)  # fmt: skip
# How a standard error is named after its metric: by xtk, and by lm-evaluation-harness.
ERRORS = ("_error", "_stderr")
# Of a model beside another one: who shows several of them takes differences itself.
DIFFERENCE = "difference"


@dataclass(frozen=True)
class Result:
    """One number of an evaluation.

    Attributes:
        model: of which it is; the name of the file if it does not say.
        data: a task, or what was read.
        metric: what it is.
        value: the number.
        error: its standard error; None: nobody told.
    """

    model: str
    data: str
    metric: str
    value: float
    error: float | None = None


def read_results(path: Path) -> list[Result]:
    """Read a file of results: a JSON object, a list of them, or one a line.

    Each is an object with `model`, `data` (or `task`) and numbers, or with `results`: {task: {metric: number}}. Numbers
    may lie in objects of their own, whose names are put before theirs. `NAME_error`, or `NAME_stderr`, is the standard
    error of `NAME`. Differences to another model are left out.

    Raises:
        Damaged: it is no such file, or holds no number.
    """
    found = [result for record in _records(path) for result in _of(record, path.stem)]
    if not found:
        raise Damaged("there is no result in this file", where=str(path), hint="xtk evaluate MODEL DATA --json > FILE")
    return found


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        try:
            whole = json.loads(text)
        except ValueError:
            whole = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as wrong:
        raise Damaged(f"this file of results is no JSON: {wrong}", where=str(path)) from None
    records = whole if isinstance(whole, list) else [whole]
    if not all(isinstance(record, dict) for record in records):
        raise Damaged("results are JSON objects, and there is something else", where=str(path))
    return records


def _of(record: Mapping[str, Any], name: str) -> Iterator[Result]:
    model = next((str(record[key]) for key in ("model", "model_name") if record.get(key)), name)
    tasks = record.get("results")
    if isinstance(tasks, dict):
        for task, figures in tasks.items():
            yield from _figures(model, str(task), figures if isinstance(figures, dict) else {"value": figures})
        return
    data = record.get("task", record.get("data", ""))
    yield from _figures(model, ", ".join(map(str, data)) if isinstance(data, list) else str(data), record)


def _figures(model: str, data: str, record: Mapping[str, Any]) -> Iterator[Result]:
    numbers = dict(_numbers(record))
    for name, value in numbers.items():
        if name.endswith((DIFFERENCE, *ERRORS)):
            continue
        error = next((numbers[name + ending] for ending in ERRORS if name + ending in numbers), None)
        yield Result(model, data, name, value, error)


def _numbers(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        # lm-evaluation-harness: the metric and its filter, and acc_stderr,FILTER beside acc,FILTER
        metric, comma, chosen = str(key).removesuffix(",none").partition(",")
        of_error = "_stderr" if comma and metric.endswith("_stderr") else ""
        name = before + metric.removesuffix(of_error) + comma + chosen + of_error
        if isinstance(value, dict):
            yield from _numbers(value, f"{name}.")
        elif key not in COUNTS and type(value) in (int, float) and math.isfinite(value):
            yield name, float(value)


def shown(result: Result) -> str:
    """Return a number as tables show it, with its standard error."""
    return f"{result.value:.4f}" + (f" ± {result.error:.4f}" if result.error is not None else "")


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return what a page calls models or data: of an absolute path the shortest end by which it is told apart."""
    known = list(dict.fromkeys(names))
    parts = [Path(name).parts if Path(name).is_absolute() else (name,) for name in known]
    for length in range(1, max(map(len, parts), default=0)):
        ends = ["/".join(one[-length:]) for one in parts]
        if len(set(ends)) == len(known):
            return dict(zip(known, ends, strict=True))
    return dict(zip(known, known, strict=True))
