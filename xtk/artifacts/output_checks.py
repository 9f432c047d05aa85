"""One rule for outputs: what xtk did not write for the same request stays; `--force` replaces what xtk wrote."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from xtk.artifacts.atomic_files import TEMPORARY_PREFIX
from xtk.artifacts.write_locks import LOCK_PREFIX
from xtk.errors import XtkError, path_exists

MAX_NAME_BYTES = 240  # of 255, of which a temporary name needs some
MAX_NAMES_SHOWN = 5
HEAD_BYTES = 4096


def check_output_path(path: Path, *, require_utf8: bool = False) -> None:
    """Refuse an output path that cannot be made, before any work.

    Args:
        path: of the output; nothing has to be there.
        require_utf8: the libraries that write there take paths in UTF-8 alone.

    Raises:
        XtkError: tells why.
    """
    shown = str(path)
    if "\0" in shown or not shown:
        raise XtkError("this cannot be the path of an output", where=repr(shown), hint="-o PATH")
    if require_utf8:
        try:
            shown.encode("utf-8")
        except UnicodeEncodeError:
            raise XtkError(
                "the path of this output is not UTF-8, and Arrow and safetensors write to no other path",
                where=ascii(os.fsencode(path))[2:-1],
                hint="another -o",
            ) from None
    parent = _resolve_path(path)
    while not parent.exists():
        if len(os.fsencode(parent.name)) > MAX_NAME_BYTES:
            raise XtkError("this is too long for the name of a file", where=parent.name[:60] + "...")
        parent = parent.parent
    if parent == _resolve_path(path):
        return
    if not parent.is_dir():
        raise XtkError(f"this output cannot be made: {parent} is a file, not a folder", where=shown, hint="another -o")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise XtkError(f"this output cannot be made: {parent} cannot be written to", where=shown, hint="another -o")


def check_output_file(path: Path, kind: str, is_xtk_file: Callable[[Path], bool], inputs: Iterable[str] = ()) -> bool:
    """Refuse a file output that would replace what is not a file of its kind that xtk wrote, `--force` or not.

    Args:
        path: of the output.
        kind: how messages call such files, such as "projections".
        is_xtk_file: says whether xtk wrote a file; called for regular files only.
        inputs: of the command.

    Returns:
        Whether a file of this kind is there.

    Raises:
        XtkError: there is a folder, a device, a link that leads nowhere, another file or an input.
    """
    if path.is_dir():
        raise XtkError("this is to be a file, and there is a folder of this name", where=str(path))
    check_output_path(path)
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise _broken_link_error(path) from None
        return False
    if not stat.S_ISREG(status.st_mode):
        raise XtkError("this output is a device or a pipe, not a file", where=str(path), hint="another -o")
    if any(path_exists(name) and path.samefile(name) for name in inputs):
        raise XtkError("the output is one of the inputs", where=str(path), hint="another -o")
    if not is_xtk_file(path):
        raise XtkError("there is another file", where=str(path), hint=f"another -o; --force replaces {kind} alone")
    return True


def check_output_folder(path: Path, what: str, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse a folder output that cannot be one, or that is or holds an input, `--force` or not.

    Args:
        path: of the output. A link to a folder stands for that folder.
        what: the kind of output, such as "a cache".
        inputs: of the command, those that are paths.

    Raises:
        XtkError: tells why.
    """
    if path.is_symlink() and not path.exists():
        raise _broken_link_error(path)
    if path.exists() and not path.is_dir():
        raise XtkError(f"{what} is a folder, and there is a file of this name", where=str(path), hint="another -o")
    check_output_path(path, require_utf8=True)
    here = _resolve_path(path)
    if here in (Path("/"), _home_folder()) or here.is_mount():
        raise XtkError(
            f"{what} needs a folder that holds nothing else, and this is a home folder, or where a disk is mounted",
            where=str(here),
            hint=f"a folder in it: -o {path / 'NAME'}",
        )
    for name in inputs:
        if path_exists(str(name)) and here in ((there := _resolve_path(Path(name))), *there.parents):
            raise XtkError("the output is one of the inputs, or holds it", where=str(name), hint="another -o")


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder but for locks and what killed writers left, sorted; none if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)))


def foreign_files_error(names: Sequence[str], where: str) -> XtkError:
    """Return the error of a folder that holds files that xtk did not write: none of them is ever removed."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return XtkError(
        f"this folder holds other things ({', '.join(names[:MAX_NAMES_SHOWN])}{more})",
        where=where,
        hint="give a new folder to -o, or move what is yours; xtk removes only what it wrote",
    )


def _broken_link_error(path: Path) -> XtkError:
    return XtkError("this output is a link that leads nowhere", where=str(path), hint="another -o")


def _resolve_path(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        raise XtkError("this output is a link that leads to itself", where=str(path), hint="another -o") from None


def _home_folder() -> Path | None:
    try:
        return Path.home().resolve()
    except (RuntimeError, OSError):
        return None
