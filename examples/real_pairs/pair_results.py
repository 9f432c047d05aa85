"""Results of the real pairs: one JSON line per measurement, and intervals of paired differences."""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "benchmarks"))
from measurement import half_interval

Key = tuple[str, str, int, str]  # pair, line with its settings, seed, measure


class Results:
    """Measurements in `results.jsonl` of a folder; each is made once.

    Attributes:
        figures: {key: {name: value}}.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._settings = folder / "results.jsonl", folder / "settings.json"
        self.figures: dict[Key, dict[str, Any]] = {}
        self.seconds = 0.0
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []:
            row = json.loads(line)
            self.figures[row["pair"], row["line"], row["seed"], row["measure"]] = row["figures"]
            self.seconds += row["seconds"]

    @property
    def settings(self) -> dict[str, Any]:
        """The sizes, the seeds and the teacher of these results."""
        return dict(json.loads(self._settings.read_text(encoding="utf-8")))

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Store the settings, or refuse a folder with results of others; sizes that may grow are free."""
        settings = json.loads(json.dumps(settings))
        if self._settings.is_file():
            free = ("seeds", "problems", "weights", "learning_rates", "teacher_answers", "python")
            own = self.settings
            changed = [name for name in settings if own.get(name) != settings[name] and name not in free]
            if changed:
                raise SystemExit(f"{self._settings}: made with other {', '.join(changed)}; choose another folder")
        self._settings.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    def add(self, key: Key, figures: dict[str, Any], started: float) -> None:
        """Store a measurement with its duration, unless it is stored already.

        Args:
            started: `time.monotonic()` before it.
        """
        if key in self.figures:
            return
        self.figures[key] = figures
        seconds = round(time.monotonic() - started, 1)
        self.seconds += seconds
        pair, line, seed, measure = key
        row = {"pair": pair, "line": line, "seed": seed, "measure": measure, "figures": figures, "seconds": seconds,
               "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
               "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")}  # fmt: skip
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def values(self, pair: str, line: str, measure: str, figure: str) -> dict[int, float]:
        """Return {seed: value} of a figure."""
        return {
            seed: float(values[figure])
            for (one, name, seed, kind), values in self.figures.items()
            if (one, name, kind) == (pair, line, measure) and figure in values
        }


def file_name_part(text: str) -> str:
    """Return a text with `-` for other characters than letters, digits, dots and `=`."""
    return "".join(character if character.isalnum() or character in ".=" else "-" for character in text)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval by Student's t; infinite with one value."""
    if len(values) < 2:
        return statistics.mean(values), math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), float(half_interval(error, len(values)))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> tuple[float, float] | None:
    """Return the mean and half interval of the differences of the seeds that both have; None without any."""
    seeds = values.keys() & reference.keys()
    return interval([values[seed] - reference[seed] for seed in sorted(seeds)]) if seeds else None
