"""Outputs of commands: checked before any work, locked, written under a temporary name, renamed into place.

Nothing at an output path is ever deleted. `--force` moves it aside, to the sibling NAME.replaced-1.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from xtk import terminal
from xtk.errors import XtkError, path_exists
from xtk.files.atomic_files import (
    TEMPORARY_PREFIX,
    atomic_write,
    fsync,
    link_into_place,
    remove_stale_temporary_files,
    temporary_name,
)

LOCK_PREFIX = ".xtk-lock-"
MAX_NAME_BYTES = 240  # of 255; temporary names are longer
MAX_NAMES_SHOWN, MAX_HOLDER_LENGTH = 5, 200
LOCK_SECONDS = 0.2  # a process that ends holds its lock for microseconds after the end of its work
OTHER_PATH_HINT = "use another output path (-o)"
Finished = TypeVar("Finished", covariant=True)


@dataclass(frozen=True)
class OutputKind(Generic[Finished]):
    """A kind of output, and how its command recognizes it."""

    name: str  # in messages, such as "a projection"
    is_own: Callable[[Path], bool] = lambda path: True  # whether an existing file, or full folder, is of this kind
    # Returns the output at a path if a request made it, and refuses that of another request.
    finished: Callable[[Path, Any], Finished | None] = lambda path, request: None
    is_folder: bool = False  # whether it is a folder
    has_force: bool = True  # whether the command has the option --force


class Output(Generic[Finished]):
    """The output of a command. Its path is checked here: a path that cannot be created, or is an input, is refused.

    Args:
        path: of the output; it does not have to exist. A link to a folder means that folder.
        force: move aside what is there, whatever it is.
        inputs: paths among the inputs of the command.
    """

    def __init__(
        self, path: Path, kind: OutputKind[Finished], *, force: bool = False, inputs: Iterable[str | Path] = ()
    ) -> None:
        self.path, self.kind, self.force = path, kind, force
        if kind.is_folder:
            check_output_folder(path, kind.name, inputs, force=force)
        else:
            self._check_file(inputs)

    def find_finished(self, request: Any = None) -> Finished | None:
        """Refuse what the command did not write, or for another request; return a finished one of this request."""
        names = list_folder(self.path) if self.kind.is_folder else [self.path.name] if self.path.exists() else []
        if not names or self.force:
            return None
        if self.kind.is_own(self.path):
            return None if request is None else self.kind.finished(self.path, request)
        if self.kind.is_folder:
            raise foreign_files_error(names, str(self.path), has_force=self.kind.has_force)
        raise XtkError(
            f"the output path is an existing file, which is not {self.kind.name} of xtk",
            where=str(self.path),
            hint=f"{OTHER_PATH_HINT}, or move this file away" + ("; --force moves it aside" * self.kind.has_force),
        )

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Refuse a second process that writes this output."""
        return writer_lock(self.path, self.kind.name.partition(" ")[2])

    def _check_file(self, inputs: Iterable[str | Path]) -> None:
        path = self.path
        check_output_path(path)
        if path.exists() and not path.is_file():
            what = f"the output must be a file, but this path is a {'folder' if path.is_dir() else 'device or a pipe'}"
            raise XtkError(what, where=str(path), hint=OTHER_PATH_HINT)
        for name in filter(path_exists, map(str, inputs if path.exists() else ())):
            inside = Path(name).resolve() in path.resolve().parents
            if path.samefile(name) or (inside and not self.kind.is_own(path)):
                raise XtkError("the output file is one of the input files", where=str(path), hint=OTHER_PATH_HINT)


@contextlib.contextmanager
def write_output(path: Path) -> Iterator[Path]:
    """Yield a temporary path that gets the name `path` if the block succeeds; another file there is moved aside."""

    def publish(temporary: Path, path: Path) -> None:
        while not link_into_place(temporary, path):
            move_aside(path)

    with atomic_write(path, publish=publish) as temporary:
        yield temporary


@contextlib.contextmanager
def write_output_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets the name `path` if the block succeeds; what is there is moved aside."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temporary_files(path.parent, path.name)
    temporary = path.parent / temporary_name(path.name)
    temporary.mkdir()
    try:
        yield temporary
        fsync(temporary)
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            move_aside(path)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the next free NAME.replaced-1, NAME.replaced-2 ..., print that, and return it."""
    names = (path.with_name(f"{path.name}.replaced-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        path.rename(aside)
    except OSError as failure:
        raise XtkError(
            f"the old output cannot be moved aside: {failure.strerror}",
            where=f"{path} to {aside.name}",
            hint="move it to another folder, or use another output path (-o)",
        ) from None
    fsync(path.parent)
    terminal.note(f"moved {path} to {aside.name}; xtk does not need it any more")
    return aside


def move_folder_aside(folder: Path) -> None:
    """Move aside a folder with files; what it is a link to, if it is one. An empty folder takes its place."""
    if list_folder(folder):
        folder = folder.resolve()
        move_aside(folder)
        folder.mkdir()


def fsync_folder(folder: Path) -> None:
    """Fsync a folder with all its files and subfolders."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


@contextlib.contextmanager
def writer_lock(path: Path, what: str, writer_index: int = 0, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Lock an output path, with a lock file next to it, which the kernel releases when the process ends.

    Without permission for the lock file, or on a file system without locks, nothing is locked.

    Args:
        what: kind of output, for messages.
        writer_index: number of the writer, if several may write at the same time.
        seconds: how long to wait for another process; -1: until it ends.
    """
    from filelock import FileLock, Timeout

    path = path.resolve()
    name = f"{LOCK_PREFIX}{path.name}{f'.{writer_index}' if writer_index else ''}"
    if len(os.fsencode(name)) > MAX_NAME_BYTES:
        name = LOCK_PREFIX + hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    file = path.parent / name
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(file, seconds, mode=0o666, poll_interval=0.01, fallback_to_soft=False)
            held.enter_context(lock)
            held.callback(file.unlink, missing_ok=True)  # while it is held: who waits for it creates another one
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}"[:MAX_HOLDER_LENGTH], encoding="utf-8")
        except Timeout:
            holder = f"unknown process ({name})"
            with contextlib.suppress(OSError):  # it has just ended
                holder = file.read_text(encoding="utf-8", errors="replace")[:MAX_HOLDER_LENGTH] or holder
            raise XtkError(
                f"another process is writing this {what}",
                where=f"{path}: {holder}",
                hint="wait until it ends, or stop it and run this command again; or use another output path (-o)",
            ) from None
        except OSError:  # the writer itself raises a better error; on a full disk, the lock works without this text
            pass
        yield


def check_output_path(path: Path, *, require_utf8: bool = False) -> None:
    """Refuse an output path that cannot be created, before any work; with `require_utf8` also one that is not UTF-8."""
    shown, problem = str(path), ""
    if "\0" in shown or not shown:
        problem = f"the output path {'contains a NUL character' if shown else 'is empty'}"
        raise XtkError(problem, where=repr(shown), hint=OTHER_PATH_HINT)
    if require_utf8:
        try:
            shown.encode("utf-8")
        except UnicodeEncodeError:
            problem = "this output path is not UTF-8, which Arrow and safetensors require"
            raise XtkError(problem, where=ascii(os.fsencode(path))[2:-1], hint=OTHER_PATH_HINT) from None
    if path.is_symlink() and not path.exists():
        raise XtkError("this output path is a broken symbolic link", where=shown, hint=OTHER_PATH_HINT)
    parent = _real(path)
    while not parent.exists():
        if len(os.fsencode(parent.name)) > MAX_NAME_BYTES:
            raise XtkError(
                f"a name in the output path is too long; must have at most {MAX_NAME_BYTES} bytes",
                where=parent.name[:60] + "...",
                hint="use a shorter output path (-o)",
            )
        parent = parent.parent
    if not parent.is_dir() and parent != _real(path):
        problem = f"{parent} is a file, not a folder"
    elif not os.access(parent, os.W_OK | os.X_OK) and parent != _real(path):
        problem = f"there is no permission to write to {parent}"
    if problem:
        raise XtkError(f"this output path cannot be created: {problem}", where=shown, hint=OTHER_PATH_HINT)


def check_output_folder(path: Path, what: str, inputs: Iterable[str | Path] = (), *, force: bool = False) -> None:
    """Refuse a folder that cannot be created, or is or contains an input; with `force`, the working directory too."""
    if path.exists() and not path.is_dir():
        raise XtkError(f"{what} must be a folder, but this path is a file", where=str(path), hint=OTHER_PATH_HINT)
    check_output_path(path, require_utf8=True)
    here, problem = _real(path), ""
    if here in (Path("/"), _real(os.path.expanduser("~"))) or here.is_mount():  # noqa: PTH111 (without an error)
        problem = "this is a home folder or a mount point"
    elif force and here in (Path.cwd(), *Path.cwd().parents) and list_folder(here):
        problem = "this is or contains the working directory, which --force cannot move aside"
    if problem:
        raise XtkError(
            f"{what} needs a separate folder, but {problem}",
            where=str(here),
            hint=f"use a folder in it: -o {path / 'NAME'}",
        )
    for name in inputs:
        if path_exists(str(name)) and here in ((there := _real(Path(name))), *there.parents):
            what = "the output folder is one of the inputs, or contains one"
            raise XtkError(what, where=str(name), hint=OTHER_PATH_HINT)


def list_folder(folder: Path) -> list[str]:
    """Return the sorted names in a folder without locks and temporary files; [] if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith((TEMPORARY_PREFIX, LOCK_PREFIX)))


def foreign_files_error(names: Sequence[str], where: str, *, has_force: bool = True) -> XtkError:
    """Return the error for a folder with files that xtk did not write."""
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return XtkError(
        f"this folder contains files that xtk did not write ({', '.join(names[:MAX_NAMES_SHOWN])}{more})",
        where=where,
        hint="use a new output folder (-o), or move these files away"
        + ("; --force moves the whole folder aside" if has_force else ""),
    )


def _real(path: str | Path) -> Path:
    """Return a path without links; unlike `Path.resolve`, also of a loop of links."""
    return Path(os.path.realpath(path))
