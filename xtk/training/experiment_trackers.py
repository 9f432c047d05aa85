"""Trackers: metrics that go to TensorBoard, Weights & Biases, Trackio and others that Accelerate knows."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xtk.artifacts.atomic_files import canonical_json
from xtk.errors import XtkError
from xtk.registry import unknown_name_error

TRACKER_PROJECT, RUN_NAME_FILE = "xtk", "name"


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed.

    Raises:
        XtkError: tells which.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    here = {str(tracker.value) for tracker in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise unknown_name_error("tracker", name, list(LOGGER_TYPE_TO_CLASS))
        if name not in here:
            raise XtkError(f"the tracker {name} is not installed", hint=f"pip install {name}, or another --report-to")


def start_trackers(accelerator: Any, folder: Path, step: int, identity: dict[str, Any]) -> None:
    """Start the trackers of a run in its first process, or go on with those that it had.

    Args:
        accelerator: Accelerate's, which knows their names.
        folder: where they keep what they have on this machine.
        step: that the run goes on from; what TensorBoard has of later ones is dropped.
        identity: what makes two runs the same run.
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
