"""Results of a sweep: a record per run, and a table with means over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.commands.sweep_plan import PlannedRun, name_run_in_error
from xtk.errors import CorruptError
from xtk.files.output_claims import FileKind

SEED_OPTION = "seed"
LOG_PREFIX = "$ "  # precedes the command of the run in its log
# Metrics shown in the table, and their column titles.
COLUMN_TITLES = {
    "steps": "steps",
    "loss": "loss",
    "ce": "ce",
    "reward": "reward",
    "eval_bits_per_byte": "bits per byte",
    "tokens_per_second": "tokens/s",
    "training_seconds": "seconds",
}
MIN_SHOWN_ERROR = 1e-4  # of errors that four decimals show
INTEGER_METRICS = ("steps", "tokens_per_second", "training_seconds")


def run_record(run: PlannedRun, varies: Mapping[str, str], exit_code: int) -> dict[str, Any]:
    """Return the JSON record of a run.

    Args:
        run: the planned run.
        varies: its options that differ between runs.
        exit_code: exit code of `xtk distill`; 0: finished.
    """
    from xtk.runs.folder import METRICS_FILE, read_run_manifest
    from xtk.runs.metrics_file import read_metrics

    entry: dict[str, Any] = {
        "path": str(run.folder),
        "kind": "student",
        "name": run.name,
        "varied_options": dict(varies),
    }
    if exit_code:
        return {**entry, "state": "failed", "exit_code": exit_code, "log": str(run_log_path(run))}
    content = read_run_manifest(run.folder)
    metrics = dict(content.get("metrics", {}))
    if "best" in content:  # the best evaluation is the student
        metrics["eval_bits_per_byte"] = content["best"]["eval_bits_per_byte"]
    try:
        lines = read_metrics(run.folder / METRICS_FILE)
    except CorruptError as wrong:  # the student is complete; only its speed is unknown
        terminal.error(name_run_in_error(run.name, wrong))
        lines = []
    metrics |= {"steps": content["steps"], "training_seconds": total_seconds(lines) if lines else math.nan}
    rates = [one["tokens_per_second"] for one in lines if "tokens_per_second" in one]
    # The median, since the first one includes compilation.
    metrics["tokens_per_second"] = statistics.median(rates or [math.nan])
    figures = {name: metrics[name] for name in COLUMN_TITLES if math.isfinite(metrics.get(name, math.nan))}
    return {**entry, "state": "finished", **figures, "metrics": content["metrics"]}


def run_log_path(run: PlannedRun) -> Path:
    """Return the path of a run's log."""
    return run.folder.with_name(f"{run.name}.log")


def _is_log(path: Path) -> bool:
    with path.open("rb") as stream:
        start = stream.read(len(LOG_PREFIX) + 4)
    return not start or start == f"{LOG_PREFIX}xtk ".encode()


LOG = FileKind[None]("logs", _is_log)


def total_seconds(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a run, over all processes that went on with it: each counts from its own beginning."""
    seconds = [one["training_seconds"] for one in metrics if "training_seconds" in one]
    ends = [now for now, after in zip(seconds, [*seconds[1:], -math.inf], strict=True) if after < now]
    return float(sum(ends))


def add_seed_means(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the records grouped by options other than the seed.

    Those of a group of more than one run get `seed_means`: of each figure the mean and its standard error, None of a
    single run.
    """
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for one in records:
        key = tuple((name, value) for name, value in one["varied_options"].items() if name != SEED_OPTION)
        groups.setdefault(key, []).append(one)
    for group in groups.values():
        if len(group) > 1:
            done = [one for one in group if one["state"] == "finished"]
            figures = {name: _mean([one[name] for one in done if name in one]) for name in COLUMN_TITLES}
            means = {"runs": len(done), **{name: figure for name, figure in figures.items() if figure is not None}}
            for one in group:
                one["seed_means"] = means
    return list(groups.values())


def _mean(values: Sequence[float]) -> dict[str, float | None] | None:
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def sweep_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table: a row for all seeds of one recipe, or for one run."""
    names = [name for name in records[0]["varied_options"] if name != SEED_OPTION]
    rows = []
    for group in add_seed_means(records):
        first = group[0]
        done = [one for one in group if one["state"] == "finished"]
        seeds = " ".join(one["varied_options"].get(SEED_OPTION, "") for one in done)
        failed = len(group) - len(done)
        figures = [
            _figure(first["seed_means"].get(name) if len(group) > 1 else first.get(name), name)
            for name in COLUMN_TITLES
        ]
        rows.append(
            [*(first["varied_options"][name] for name in names), seeds, *figures, f"{failed} failed" if failed else ""]
        )
    return [*names, SEED_OPTION, *COLUMN_TITLES.values(), "state"], rows


def _figure(value: Any, name: str) -> str:
    """Return a number, or a mean with its standard error, as text."""
    if value is None:
        return ""
    shown = ",.0f" if name in INTEGER_METRICS else ".4f"
    if not isinstance(value, dict):
        return f"{value:{shown}}"
    error = value["standard_error"]
    if not error:
        return f"{value['mean']:{shown}}"
    return f"{value['mean']:{shown}} ± " + (f"{error:{shown}}" if error >= MIN_SHOWN_ERROR else f"{error:.0e}")
