"""Bit flips in the checkpoints of a run and in finished students."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bit_flips import Tally, flip_randomly

from xtk.errors import CorruptError
from xtk.files.atomic_files import read_json
from xtk.runs.folder import read_recipe, read_run_manifest, verify_files
from xtk.runs.resume_point import find_checkpoint


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder: parsed JSON files, and the bytes of other files."""
    return {str(path.relative_to(folder)): read_json(path) if path.suffix == ".json" else path.read_bytes()
            for path in files_of(folder)}  # fmt: skip


def flip_checkpoint(run: Path, step: int, count: int, seed: int = 0) -> Tally:
    """Flip bits in the newest checkpoint of an unfinished run; the run resumes from it or from the previous one."""
    folder, identity = run / f"checkpoint-{step}", read_recipe(run)

    def use() -> Any:
        resume_point = find_checkpoint(run, identity, needs_best=False)
        if resume_point.damaged:
            raise CorruptError("the one before is taken", where=str(resume_point.damaged[0]))
        assert resume_point.folder == folder
        return contents(folder)

    return flip_randomly(files_of(folder), use, count, seed)


def flip_student(run: Path, count: int, seed: int = 0) -> Tally:
    """Flip bits in the files of a finished student that its manifest lists, and in the manifest."""
    manifest = read_run_manifest(run)
    files = [run / "xtk.json", *(run / name for name in manifest["files"])]
    files += [run / folder / name for folder, names in manifest["folders"].items() for name in names]

    def use() -> Any:
        found_manifest = read_run_manifest(run, ("student",))
        verify_files(run, found_manifest)
        return found_manifest, [path.read_bytes() for path in files[1:]]

    return flip_randomly(files, use, count, seed)
