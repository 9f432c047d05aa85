"""The metrics file (`metrics.jsonl`): writing and reading; metric names and peak memory."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from xtk.files.atomic_files import atomic_write, read_json_lines


def metric_name(name: str, teacher: str, teachers: Sequence[str]) -> str:
    """Return the name of a teacher's metric: `byte-kl`, or `byte-kl/TEACHER` with several teachers."""
    return name if len(teachers) == 1 else f"{name}/{teacher.encode(errors='backslashreplace').decode()}"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of the GPU, or without one of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


class MetricsFile:
    """Writer of JSON lines, one per logged step; lines after step `last_step`, at which a run resumes, are removed."""

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = [record for record in read_metrics(path) if record.get("step", 0) <= last_step]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept]
        with atomic_write(path) as temporary:  # a kill must not truncate it
            temporary.write_text("".join(lines), encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record without values that are not finite, which JSON cannot represent."""
        record = {key: value for key, value in record.items() if not isinstance(value, float) or math.isfinite(value)}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; none if there is no file."""
    return read_json_lines(path)


def last_values(path: Path, through: int | None = None) -> dict[str, Any]:
    """Return the last value of each metric, of steps up to `through`; None: of all."""
    values: dict[str, Any] = {}
    for record in read_metrics(path):
        if through is None or record["step"] <= through:
            values.update(record)
    return values


def first_values(path: Path) -> dict[str, Any]:
    """Return the first value of each metric."""
    values: dict[str, Any] = {}
    for record in reversed(read_metrics(path)):
        values.update(record)
    return values
