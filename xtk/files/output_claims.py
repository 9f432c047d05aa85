"""Claims of output paths: files that xtk did not write are never replaced; `--force` replaces only xtk's own.

Every command calls `claim_output` before its work, and `find_finished` of the kind when it knows its request. Locks
(`write_locks.py`) and atomic renames (`atomic_files.py`) keep what other programs write there afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from xtk.errors import XtkError, path_exists
from xtk.files.atomic_files import TEMPORARY_PREFIX, record_state
from xtk.files.write_locks import LOCK_PREFIX

MAX_NAME_BYTES = 240  # of 255; temporary names are longer
MAX_NAMES_SHOWN = 5
Place = TypeVar("Place", contravariant=True)
Found = TypeVar("Found", covariant=True)


class OutputKind(Protocol[Place, Found]):
    """A kind of output: how xtk recognizes its own."""

    def check_place(self, place: Place, inputs: Iterable[str | Path]) -> None:
        """Refuse a path where the output cannot be created, or that is an input, `--force` or not."""

    def find_finished(self, place: Place, request: Any, *, force: bool = False) -> Found | None:
        """Refuse what xtk did not write, and the output of another request; arguments as for `claim_output`.

        Returns:
            The finished output of the request; None if there is nothing, it is unfinished, or with `force`.
        """


def claim_output(
    place: Place,
    kind: OutputKind[Place, Found],
    request: Any = None,
    *,
    force: bool = False,
    inputs: Iterable[str | Path] = (),
) -> Found | None:
    """Refuse an output path that this command must not write, before any work.

    Args:
        place: path or folder of the output; it does not have to exist.
        request: identifies inputs and options, as `kind` compares them; None if they are not known yet.
        force: replace the output of another request.

    Returns:
        The finished output of this request; None if the command has to write it, or without a request.
    """
    kind.check_place(place, inputs)
    return kind.find_finished(place, request, force=force)


@dataclass(frozen=True)
class FileKind(Generic[Found]):
    """A kind of output file. A file that appears after the claim is kept by `atomic_write` with `keep_others`.

    Attributes:
        plural: name of such files in messages, such as "projections".
        is_own: returns whether xtk wrote a regular file of this kind.
        finished: returns the output at a path if a request made it, and refuses that of another request.
    """

    plural: str
    is_own: Callable[[Path], bool]
    finished: Callable[[Path, Any], Found | None] = lambda path, request: None

    def check_place(self, place: Path, inputs: Iterable[str | Path]) -> None:
        """Refuse a folder, a device, a broken link and an input."""
        hint = "use another output path (-o)"
        if place.is_dir():
            raise XtkError("the output must be a file, but this path is a folder", where=str(place), hint=hint)
        check_output_path(place)
        record_state(place)
        if not place.exists():
            if place.is_symlink():
                raise _broken_link_error(place)
        elif not place.is_file():
            what = "the output must be a file, but this path is a device or a pipe"
            raise XtkError(what, where=str(place), hint=hint)
        elif any(path_exists(str(name)) and place.samefile(name) for name in inputs):
            raise XtkError("the output file is one of the input files", where=str(place), hint=hint)

    def find_finished(self, place: Path, request: Any, *, force: bool = False) -> Found | None:
        """Return the finished output of a request; a file of another kind is refused, `force` or not."""
        if not place.exists():
            return None
        if not self.is_own(place):
            raise XtkError(
                f"the output path is an existing file, which is not one of xtk's {self.plural}",
                where=str(place),
                hint="use another output path (-o), or move this file away; --force does not replace it",
            )
        return None if force or request is None else self.finished(place, request)


@dataclass(frozen=True)
class FolderKind(Generic[Found]):
    """A kind of output folder.

    Attributes:
        name: in messages, such as "a sweep".
        is_own: returns whether a folder with files is an output of this kind.
        refuse_foreign: refuses a folder of this kind with files that `--force` would remove although xtk did not
            write them.
        finished: returns the output at a path if a request made it, and refuses that of another request.
    """

    name: str
    is_own: Callable[[Path], bool] = lambda folder: True
    refuse_foreign: Callable[[Path], None] = lambda folder: None
    finished: Callable[[Path, Any], Found | None] = lambda folder, request: None

    def check_place(self, place: Path, inputs: Iterable[str | Path]) -> None:
        """Refuse a file, a home folder, and a folder that is or contains an input."""
        check_output_folder(place, self.name, inputs)

    def find_finished(self, place: Path, request: Any, *, force: bool = False) -> Found | None:
        """Return the finished output of a request; locks and temporary files do not count as files."""
        names = list_folder(place)
        if not names:
            return None
        if not self.is_own(place):
            raise foreign_files_error(names, str(place))
        if force:
            self.refuse_foreign(place)
        return None if force or request is None else self.finished(place, request)


def check_output_path(path: Path, *, require_utf8: bool = False) -> None:
    """Refuse an output path that cannot be created, before any work.

    Args:
        path: of the output; it does not have to exist.
        require_utf8: the libraries that write there accept only UTF-8 paths.
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


def check_output_folder(path: Path, what: str, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse an output folder that cannot be created, or that is or contains an input, `--force` or not.

    Args:
        path: of the output. A link to a folder means that folder.
        what: the kind of output, such as "a cache".
        inputs: paths among the inputs of the command.
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
