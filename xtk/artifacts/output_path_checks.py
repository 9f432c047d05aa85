"""Checks of output paths: files that xtk did not write are never replaced; `--force` replaces only xtk's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from xtk.artifacts.atomic_files import TEMPORARY_PREFIX, record_state
from xtk.artifacts.write_locks import LOCK_PREFIX
from xtk.errors import XtkError, path_exists

MAX_NAME_BYTES = 240  # of 255; temporary names are longer
MAX_NAMES_SHOWN = 5
HEAD_BYTES = 4096


def check_output_path(path: Path, *, require_utf8: bool = False) -> None:
    """Refuse an output path that cannot be created, before any work.

    Args:
        path: of the output; it does not have to exist.
        require_utf8: the libraries that write there accept only UTF-8 paths.

    Raises:
        XtkError: with the reason.
    """
    shown = str(path)
    if "\0" in shown or not shown:
        problem = "contains a NUL character" if shown else "is empty"
        raise XtkError(f"the output path {problem}", where=repr(shown), hint="use another output path (-o)")
    if require_utf8:
        try:
            shown.encode("utf-8")
        except UnicodeEncodeError:
            raise XtkError(
                "this output path is not UTF-8, which Arrow and safetensors require",
                where=ascii(os.fsencode(path))[2:-1],
                hint="use another output path (-o)",
            ) from None
    parent = _resolve_path(path)
    while not parent.exists():
        if len(os.fsencode(parent.name)) > MAX_NAME_BYTES:
            raise XtkError(
                f"a name in the output path is too long; must have at most {MAX_NAME_BYTES} bytes",
                where=parent.name[:60] + "...",
                hint="use a shorter output path (-o)",
            )
        parent = parent.parent
    if parent == _resolve_path(path):
        return
    if not parent.is_dir():
        raise XtkError(
            f"this output path cannot be created: {parent} is a file, not a folder",
            where=shown,
            hint="use another output path (-o)",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise XtkError(
            f"this output path cannot be created: there is no permission to write to {parent}",
            where=shown,
            hint="use another output path (-o)",
        )


def check_output_file(path: Path, kind: str, is_xtk_file: Callable[[Path], bool], inputs: Iterable[str] = ()) -> bool:
    """Refuse an output path with a file that xtk did not write, `--force` or not.

    A file that appears there later is kept as well, by `atomic_write` with `keep_others`.

    Args:
        path: of the output.
        kind: plural name of such files in messages, such as "projections".
        is_xtk_file: returns whether xtk wrote a file of this kind; called for regular files only.
        inputs: of the command.

    Returns:
        Whether a file of this kind exists at `path`.

    Raises:
        XtkError: the path is a folder, a device, a broken link, another file or an input.
    """
    if path.is_dir():
        raise XtkError(
            "the output must be a file, but this path is a folder",
            where=str(path),
            hint="use another output path (-o)",
        )
    check_output_path(path)
    record_state(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise _broken_link_error(path) from None
        return False
    if not stat.S_ISREG(status.st_mode):
        raise XtkError(
            "the output must be a file, but this path is a device or a pipe",
            where=str(path),
            hint="use another output path (-o)",
        )
    if any(path_exists(name) and path.samefile(name) for name in inputs):
        raise XtkError(
            "the output file is one of the input files", where=str(path), hint="use another output path (-o)"
        )
    if not is_xtk_file(path):
        raise XtkError(
            f"the output path is an existing file, which is not one of xtk's {kind}",
            where=str(path),
            hint="use another output path (-o), or remove this file; --force does not replace it",
        )
    return True


def check_output_folder(path: Path, what: str, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse an output folder that cannot be created, or that is or contains an input, `--force` or not.

    Args:
        path: of the output. A link to a folder means that folder.
        what: the kind of output, such as "a cache".
        inputs: paths among the inputs of the command.

    Raises:
        XtkError: with the reason.
    """
    if path.is_symlink() and not path.exists():
        raise _broken_link_error(path)
    if path.exists() and not path.is_dir():
        raise XtkError(
            f"{what} must be a folder, but this path is a file",
            where=str(path),
            hint="use another output path (-o)",
        )
    check_output_path(path, require_utf8=True)
    here = _resolve_path(path)
    if here in (Path("/"), _home_folder()) or here.is_mount():
        raise XtkError(
            f"{what} needs a separate folder, but this is a home folder or a mount point",
            where=str(here),
            hint=f"use a folder in it: -o {path / 'NAME'}",
        )
    for name in inputs:
        if path_exists(str(name)) and here in ((there := _resolve_path(Path(name))), *there.parents):
            raise XtkError(
                "the output folder is one of the inputs, or contains one",
                where=str(name),
                hint="use another output path (-o)",
            )


def list_folder(folder: Path) -> list[str]:
    """Return the sorted names in a folder without locks and temporary files; [] if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)))


def foreign_files_error(names: Sequence[str], where: str) -> XtkError:
    """Return the error for a folder with files that xtk did not write; xtk never removes these."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return XtkError(
        f"this folder contains files that xtk did not write ({', '.join(names[:MAX_NAMES_SHOWN])}{more})",
        where=where,
        hint="use a new output folder (-o), or move these files; xtk removes only files that it wrote",
    )


def _broken_link_error(path: Path) -> XtkError:
    return XtkError("this output path is a broken symbolic link", where=str(path), hint="use another output path (-o)")


def _resolve_path(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        raise XtkError(
            "this output path is a loop of symbolic links", where=str(path), hint="use another output path (-o)"
        ) from None


def _home_folder() -> Path | None:
    try:
        return Path.home().resolve()
    except (RuntimeError, OSError):
        return None
