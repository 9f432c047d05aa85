"""Whole folders: written under a temporary name, synced with their files, renamed."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xtk.files.atomic_files import TEMPORARY_PREFIX, fsync, is_stale_temporary_file, temporary_name
from xtk.files.output_claims import FolderKind


@contextmanager
def replacing_folder(output: Path, kind: FolderKind[Any] | None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `output` if the block succeeds, and is removed if it fails.

    If `output` is a symbolic link, its target is replaced.

    Args:
        output: the folder; it does not have to exist.
        kind: refuses a folder with files that xtk did not write; None: a folder in xtk's own cache.
    """
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    for left in output.parent.glob(f"{TEMPORARY_PREFIX}*-{glob.escape(output.name)}"):
        if is_stale_temporary_file(left.name):
            shutil.rmtree(left, ignore_errors=True)
    temporary, old = (output.parent / temporary_name(output.name) for _ in range(2))
    temporary.mkdir()
    try:
        yield temporary
        fsync(temporary)
        if output.is_dir():
            if kind is not None:
                kind.refuse_foreign(output)  # again: files may have been added meanwhile
            output.replace(old)
        try:
            temporary.replace(output)
        except OSError:
            if old.is_dir():
                old.replace(output)
            raise
        fsync(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Fsync a folder with all its files and subfolders."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)
