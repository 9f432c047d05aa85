"""Names in a run folder of `xtk distill`: its recipe and its checkpoints. Models and data are recognized by them."""

from __future__ import annotations

import re
from pathlib import Path

RECIPE_FILE = "recipe.json"
CHECKPOINT, BEST = "checkpoint", "best"
_NUMBERS = {CHECKPOINT: re.compile(r"[1-9][0-9]*"), BEST: re.compile(r"0|[1-9][0-9]*")}


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is a run of `xtk distill`, finished or not."""
    return (folder / RECIPE_FILE).is_file()


def list_checkpoints(folder: Path, kind: str = CHECKPOINT) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints of a run, or of its weights of kind BEST, oldest first.

    Only real folders named `checkpoint-N` count: no links, no files, no other names.
    """
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, number = path.name.partition("-")
        if name == kind and _NUMBERS[kind].fullmatch(number) and path.is_dir() and not path.is_symlink():
            checkpoints.append((int(number), path))
    return sorted(checkpoints)
