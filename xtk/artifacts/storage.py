"""Folders that caches lie in: one protocol for local ones and remote ones."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from xtk.artifacts.atomic_files import atomic_write, remove_stale_temporary_files
from xtk.artifacts.safe_file_access import open_regular_file, read_regular_file
from xtk.artifacts.write_locks import remove_stale_locks
from xtk.errors import XtkError

MAX_FILE_BYTES = 1 << 29  # of a tokenizer, or of the frequencies of ten million tokens
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class StorageFolder(Protocol):
    """A folder of files that are written whole."""

    @property
    def name(self) -> str:
        """How messages call it."""

    def path_of(self, file: str) -> str:
        """Return how messages call a file in it."""

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file; none if there is no folder."""

    def read(self, file: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return what a file holds.

        Args:
            file: its name.
            max_bytes: bytes; a larger file is refused before it is read.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: it is larger, or not a regular file.
        """

    def local_path(self, file: str) -> Path:
        """Return a file to map into memory: itself, or a copy on this machine.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: it is not a regular file.
        """

    def prefetch(self, files: Sequence[str]) -> None:
        """Have at hand, at once, what `local` is going to be asked for."""

    def write(self, file: str, *, exclusive: bool = False) -> AbstractContextManager[Path]:
        """Give a path on this machine; what is written there becomes the file, whole, when the block ends well.

        Args:
            file: its name.
            exclusive: refuse to replace what another writer has put there, as far as the store can tell.
        """

    def copy_from(self, source: StorageFolder, files: Mapping[str, str]) -> None:
        """Make files of another folder files of this one too, by links or copies; those that are there are replaced.

        Args:
            source: the other folder.
            files: their names there, and the names that they get.
        """

    def remove(self, *files: str) -> None:
        """Remove files, those that are there."""

    def remove_stale_temporary_files(self) -> None:
        """Remove what killed writers left."""

    def remove_stale_locks(self) -> None:
        """Remove the locks of writers that were killed."""


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

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file; none if there is no folder."""
        if not self.path.is_dir():
            if self.path.exists():
                raise XtkError("a cache is a folder, and there is a file of this name", where=self.name)
            return {}
        sizes = {}
        with os.scandir(self.path) as entries:  # a hundred thousand files, without as many Path objects
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # of another writer, who has just renamed or removed it
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def read(self, file: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return what a regular file of at most `limit` bytes holds."""
        return read_regular_file(self.path, file, max_bytes)

    def local_path(self, file: str) -> Path:
        """Return the file itself, once it is seen to be a regular one."""
        os.close(open_regular_file(self.path, file))
        return self.path / file

    def prefetch(self, files: Sequence[str]) -> None:
        """Do nothing: all of it is here."""

    @contextlib.contextmanager
    def write(self, file: str, *, exclusive: bool = False) -> Iterator[Path]:
        """Give a path beside the file; synced and renamed when the block ends well."""
        with atomic_write(
            self.path / file, clean=False
        ) as temporary:  # `remove_stale_temporary_files` cleans the whole folder
            yield temporary

    def copy_from(self, source: StorageFolder, files: Mapping[str, str]) -> None:
        """Make files of another folder files of this one too: hard links on one file system, else copies.

        The links are on the disk with the next file that is written; the manifest, the last one, is never without them.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        source.prefetch(list(files))
        for theirs, ours in files.items():
            source.local_path(theirs)  # a link to a link would be read through
            if isinstance(source, LocalFolder) and _try_hard_link(f"{source.path}/{theirs}", f"{self.path}/{ours}"):
                continue
            with self.write(ours) as temporary:
                shutil.copyfile(source.local_path(theirs), temporary)

    def remove(self, *files: str) -> None:
        """Remove files, those that are there."""
        for file in files:
            (self.path / file).unlink(missing_ok=True)

    def remove_stale_temporary_files(self) -> None:
        """Remove what killed writers left."""
        remove_stale_temporary_files(self.path)

    def remove_stale_locks(self) -> None:
        """Remove the locks of writers that were killed."""
        remove_stale_locks(self.path)


def is_remote(location: str | Path) -> bool:
    """Say whether a place is named by a URL: `s3://bucket/folder`."""
    return isinstance(location, str) and bool(_URL.match(location))


def open_folder(location: str | Path) -> StorageFolder:
    """Return the folder of a name: a path, or a URL that fsspec knows.

    Raises:
        XtkError: nobody knows its protocol, or the package for it is missing.
    """
    if is_remote(location):
        from xtk.artifacts.remote_storage import RemoteFolder

        return RemoteFolder(str(location))
    return LocalFolder(Path(location))


def _try_hard_link(path: str, name: str) -> bool:
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
