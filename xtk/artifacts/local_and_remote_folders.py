"""Local and remote folders of caches behind one interface."""

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
from xtk.artifacts.safe_artifact_files import open_regular_file, read_regular_file
from xtk.artifacts.write_locks import remove_stale_locks
from xtk.errors import XtkError

MAX_FILE_BYTES = 1 << 29  # enough for a tokenizer, or a vocabulary order of ten million tokens
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class StorageFolder(Protocol):
    """A folder whose files are written atomically."""

    @property
    def name(self) -> str:
        """The path or URL, for messages."""

    def path_of(self, file: str) -> str:
        """Return the path or URL of a file in it, for messages."""

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes; {} if there is no folder."""

    def read(self, file: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return the content of a file.

        Args:
            file: its name.
            max_bytes: maximum size; a larger file is refused before it is read.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptError: it is larger, or not a regular file.
        """

    def local_path(self, file: str) -> Path:
        """Return a local path that can be memory-mapped: the file itself, or a local copy.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptError: it is not a regular file.
        """

    def prefetch(self, files: Sequence[str]) -> None:
        """Download files in parallel, before `local_path` is called for them."""

    def write(self, file: str, *, exclusive: bool = False) -> AbstractContextManager[Path]:
        """Yield a local path; the file is stored atomically when the block succeeds.

        Args:
            file: its name.
            exclusive: refuse to replace a file that another writer wrote, if the storage supports this.
        """

    def copy_from(self, source: StorageFolder, files: Mapping[str, str]) -> None:
        """Copy or link files of another folder into this one; existing files are replaced.

        Args:
            source: the other folder.
            files: {name in the source: name in this folder}.
        """

    def remove(self, *files: str) -> None:
        """Remove files; missing ones are ignored."""

    def remove_stale_temporary_files(self) -> None:
        """Remove temporary files of killed writers."""

    def remove_stale_locks(self) -> None:
        """Remove locks of killed writers."""


class LocalFolder:
    """A folder in the local file system.

    Args:
        path: of the folder; it does not have to exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The path or URL, for messages."""
        return str(self.path)

    def path_of(self, file: str) -> str:
        """Return the path or URL of a file in it, for messages."""
        return str(self.path / file)

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each file in bytes; {} if there is no folder."""
        if not self.path.is_dir():
            if self.path.exists():
                raise XtkError(
                    "a cache must be a folder, but this path is a file", where=self.name, hint="use another path"
                )
            return {}
        sizes = {}
        with os.scandir(self.path) as entries:  # faster than Path objects for 100,000 files
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another writer has just renamed or removed it
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def read(self, file: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return the content of a regular file of at most `max_bytes` bytes."""
        return read_regular_file(self.path, file, max_bytes)

    def local_path(self, file: str) -> Path:
        """Return the path of a file after checking that it is a regular file."""
        os.close(open_regular_file(self.path, file))
        return self.path / file

    def prefetch(self, files: Sequence[str]) -> None:
        """Do nothing: all files are local."""

    @contextlib.contextmanager
    def write(self, file: str, *, exclusive: bool = False) -> Iterator[Path]:
        """Yield a temporary path in the folder; it is synced and renamed when the block succeeds."""
        # `remove_stale_temporary_files` cleans the whole folder.
        with atomic_write(self.path / file, exclusive=exclusive, clean=False) as temporary:
            yield temporary

    def copy_from(self, source: StorageFolder, files: Mapping[str, str]) -> None:
        """Hard-link files of another folder on the same file system into this one; else copy them.

        The next written file syncs the links to disk: the manifest, the last file, never exists without them.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        source.prefetch(list(files))
        for theirs, ours in files.items():
            source.local_path(theirs)  # refuses symbolic links
            if isinstance(source, LocalFolder) and _try_hard_link(f"{source.path}/{theirs}", f"{self.path}/{ours}"):
                continue
            with self.write(ours) as temporary:
                shutil.copyfile(source.local_path(theirs), temporary)

    def remove(self, *files: str) -> None:
        """Remove files; missing ones are ignored."""
        for file in files:
            (self.path / file).unlink(missing_ok=True)

    def remove_stale_temporary_files(self) -> None:
        """Remove temporary files of killed writers."""
        remove_stale_temporary_files(self.path)

    def remove_stale_locks(self) -> None:
        """Remove locks of killed writers."""
        remove_stale_locks(self.path)


def is_remote(location: str | Path) -> bool:
    """Return whether a location is a URL such as `s3://bucket/folder`."""
    return isinstance(location, str) and bool(_URL.match(location))


def open_folder(location: str | Path) -> StorageFolder:
    """Return the folder at a local path or at a URL of fsspec.

    Raises:
        XtkError: the protocol is unknown, or its Python package is not installed.
    """
    if is_remote(location):
        from xtk.artifacts.remote_storage import RemoteFolder

        return RemoteFolder(str(location))
    return LocalFolder(Path(location))


def _try_hard_link(path: str, name: str) -> bool:
    """Create a hard link, replacing an existing file; return False if the file system does not support it."""
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
