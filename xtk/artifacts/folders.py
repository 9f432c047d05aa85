"""Folders that caches lie in: one protocol for local ones and remote ones."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from xtk.artifacts.files import remove_leftovers, sync, written_whole
from xtk.errors import XtkError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class Folder(Protocol):
    """A folder of files that are written whole."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def path_of(self, file: str) -> str:
        """Return how messages call a file in it."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file; none if there is no folder."""

    def read(self, file: str) -> bytes:
        """Return what a file holds.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def local(self, file: str) -> Path:
        """Return a file to map into memory: itself, or a copy on this machine."""

    def write(self, file: str, *, new: bool = False) -> AbstractContextManager[Path]:
        """Give a path on this machine; what is written there becomes the file, whole, when the block ends well.

        Args:
            file: its name.
            new: refuse to replace what another writer has put there, as far as the store can tell.
        """

    def take(self, source: Folder, files: Mapping[str, str]) -> None:
        """Make files of another folder files of this one too, by links or copies; those that are there are replaced.

        Args:
            source: the other folder.
            files: their names there, and the names that they get.
        """

    def remove(self, *files: str) -> None:
        """Remove files, those that are there."""

    def remove_leftovers(self) -> None:
        """Remove what killed writers left."""


class LocalFolder:
    """A folder on this machine, or one that it has mounted.

    Args:
        path: where it is, or is to be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.path)

    def path_of(self, file: str) -> str:
        """Return how messages call a file in it."""
        return str(self.path / file)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file; none if there is no folder."""
        if not self.path.is_dir():
            if self.path.exists():
                raise XtkError("a cache is a folder, and there is a file of this name", where=self.name)
            return {}
        sizes = {}
        with os.scandir(self.path) as entries:  # a hundred thousand files, without as many Path objects
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # of another writer, who has just renamed or removed it
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def read(self, file: str) -> bytes:
        """Return what a file holds."""
        return (self.path / file).read_bytes()

    def local(self, file: str) -> Path:
        """Return the file itself."""
        return self.path / file

    @contextlib.contextmanager
    def write(self, file: str, *, new: bool = False) -> Iterator[Path]:
        """Give a path beside the file; synced and renamed when the block ends well."""
        with written_whole(self.path / file) as temporary:
            yield temporary

    def take(self, source: Folder, files: Mapping[str, str]) -> None:
        """Make files of another folder files of this one too: hard links on one file system, else copies."""
        self.path.mkdir(parents=True, exist_ok=True)
        for theirs, ours in files.items():
            if isinstance(source, LocalFolder) and _linked(f"{source.path}/{theirs}", f"{self.path}/{ours}"):
                continue
            with self.write(ours) as temporary:
                shutil.copyfile(source.local(theirs), temporary)
        sync(self.path)

    def remove(self, *files: str) -> None:
        """Remove files, those that are there."""
        for file in files:
            (self.path / file).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove what killed writers left."""
        remove_leftovers(self.path)


def is_remote(place: str | Path) -> bool:
    """Say whether a place is named by a URL: `s3://bucket/folder`."""
    return isinstance(place, str) and bool(_URL.match(place))


def folder_at(place: str | Path) -> Folder:
    """Return the folder of a name: a path, or a URL that fsspec knows.

    Raises:
        XtkError: nobody knows its protocol, or the package for it is missing.
    """
    if is_remote(place):
        from xtk.artifacts.remote import RemoteFolder

        return RemoteFolder(str(place))
    return LocalFolder(Path(place))


def _linked(path: str, name: str) -> bool:
    """Give a file a second name; say whether the file system can."""
    try:
        try:
            os.link(path, name)
        except FileExistsError:
            os.unlink(name)  # noqa: PTH108
            os.link(path, name)
    except OSError as wrong:
        if isinstance(wrong, FileNotFoundError) or wrong.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True
