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
from xtk.files.output import OutputKind

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


def run_record(run: PlannedRun, varies: dict[str, str], exit_code: int) -> dict[str, Any]:
    """Return the JSON record of a run.

    Args:
        varies: its options that differ between runs.
        exit_code: exit code of `xtk distill`; 0: finished.
    """
    from xtk.runs.folder import METRICS_FILE, read_run_manifest
    from xtk.runs.metrics_file import read_metrics

    entry: dict[str, Any] = {"path": str(run.folder), "kind": "student", "name": run.name, "varied_options": varies}
    if exit_code:
        return {**entry, "state": "failed", "exit_code": exit_code, "log": str(run_log_path(run))}
    content = read_run_manifest(run.folder)
    metrics = dict(content.get("metrics", {}))
    if "best" in content:  # the best evaluation is the student
        metrics["eval_bits_per_byte"] = content["best"]["eval_bits_per_byte"]
    try:
        lines = read_metrics(run.folder / METRICS_FILE)
    except CorruptError as error:  # the student is complete; only its speed is unknown
        terminal.error(name_run_in_error(run.name, error))
        lines = []
    metrics |= {"steps": content["steps"], "training_seconds": total_seconds(lines) if lines else math.nan}
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
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


LOG = OutputKind[None]("the log of a run", _is_log, has_force=False)


def total_seconds(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of a run, over all processes that went on with it: each counts from its own beginning."""
    seconds = [line["training_seconds"] for line in metrics if "training_seconds" in line]
    ends = [now for now, after in zip(seconds, [*seconds[1:], -math.inf], strict=True) if after < now]
    return float(sum(ends))


def add_seed_means(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the records grouped by options other than the seed.

    Those of a group of more than one run get `seed_means`: of each figure the mean and its standard error, None of a
    single run.
    """
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    for record in records:
        key = tuple((name, value) for name, value in record["varied_options"].items() if name != SEED_OPTION)
        groups.setdefault(key, []).append(record)
    for group in groups.values():
        finished = [record for record in group if record["state"] == "finished"]
        means: dict[str, Any] = {"runs": len(finished)}
        for name in COLUMN_TITLES:
            if values := [record[name] for record in finished if name in record]:
                error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
                means[name] = {"mean": statistics.fmean(values), "standard_error": error}
        for record in group if len(group) > 1 else ():
            record["seed_means"] = means
    return list(groups.values())


def sweep_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and rows of the table: a row for all seeds of one recipe, or for one run."""
    rows = []
    names = [name for name in records[0]["varied_options"] if name != SEED_OPTION]
    for group in add_seed_means(records):
        first = group[0]
        finished = [record for record in group if record["state"] == "finished"]
        seeds = " ".join(record["varied_options"].get(SEED_OPTION, "") for record in finished)
        figures = [_figure(first.get("seed_means", first).get(name), name) for name in COLUMN_TITLES]
        failed = len(group) - len(finished)
        varied = [first["varied_options"][name] for name in names]
        rows.append([*varied, seeds, *figures, f"{failed} failed" if failed else ""])
    return [*names, SEED_OPTION, *COLUMN_TITLES.values(), "state"], rows


def _figure(value: Any, name: str) -> str:
    """Return a number, or a mean with its standard error, as text."""
    if value is None:
        return ""
    shown = ",.0f" if name in INTEGER_METRICS else ".4f"
    mean, error = (value["mean"], value["standard_error"]) if isinstance(value, dict) else (value, None)
    if not error:
        return f"{mean:{shown}}"
    return f"{mean:{shown}} ± " + (f"{error:{shown}}" if error >= MIN_SHOWN_ERROR else f"{error:.0e}")
