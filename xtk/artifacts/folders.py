"""Folders that caches lie in: one protocol for local ones and remote ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from xtk.artifacts.files import remove_leftovers, written_whole
from xtk.errors import XtkError


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

    def write(self, file: str) -> AbstractContextManager[Path]:
        """Give a path on this machine; what is written there becomes the file, whole, when the block ends well."""

    def remove(self, file: str) -> None:
        """Remove a file, if it is there."""

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
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # of another writer, who has just renamed or removed it
                sizes[path.name] = path.stat().st_size
        return sizes

    def read(self, file: str) -> bytes:
        """Return what a file holds."""
        return (self.path / file).read_bytes()

    def local(self, file: str) -> Path:
        """Return the file itself."""
        return self.path / file

    @contextlib.contextmanager
    def write(self, file: str) -> Iterator[Path]:
        """Give a path beside the file; synced and renamed when the block ends well."""
        with written_whole(self.path / file) as temporary:
            yield temporary

    def remove(self, file: str) -> None:
        """Remove a file, if it is there."""
        (self.path / file).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Remove what killed writers left."""
        remove_leftovers(self.path)


def folder_at(place: str | Path) -> Folder:
    """Return the folder of a name."""
    return LocalFolder(Path(place))
