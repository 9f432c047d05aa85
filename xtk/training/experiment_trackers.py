"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and others that Accelerate supports."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.files.atomic_files import canonical_json
from xtk.name_registry import unknown_name_error

TRACKER_PROJECT, RUN_NAME_FILE = "xtk", "name"


def check_trackers(names: Sequence[str]) -> None:
    """Raise XtkError for trackers that are unknown or not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(tracker.value) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise unknown_name_error("tracker", name, list(LOGGER_TYPE_TO_CLASS))
        if name not in installed:
            raise XtkError(
                f"the tracker {name} is not installed", hint=f"run pip install {name}, or change --report-to"
            )


def start_trackers(accelerator: Any, folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Start the trackers of a run in its main process, or resume those of an earlier start.

    Args:
        accelerator: Accelerate's accelerator, created with `log_with`.
        step: the step from which the run resumes; TensorBoard drops later ones.
        identity: options and fingerprints of the run, logged as its configuration.
    """
    name = ""
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / RUN_NAME_FILE
        if not kept.is_file():
            kept.write_text(f"{folder.parent.resolve().name}-{secrets.token_hex(4)}", encoding="utf-8")
        name = kept.read_text(encoding="utf-8")
    accelerator.init_trackers(
        TRACKER_PROJECT,
        config={"recipe": canonical_json(identity)},
        init_kwargs={
            "tensorboard": {"purge_step": step + 1} if step else {},
            "wandb": {"id": name, "name": name, "resume": "allow", "dir": str(folder)},
            "trackio": {"name": name, "resume": "allow"},
        },
    )
