"""Copies of remote files on this machine: made whole, seen to be of the size that the store tells, used again."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

from xtk.artifacts.atomic_files import (
    TEMPORARY_PREFIX,
    atomic_write,
    remove_stale_temporary_files,
    sha256,
    temporary_name,
)
from xtk.artifacts.projection_cache import user_cache_folder
from xtk.artifacts.safe_file_access import check_file_name
from xtk.errors import CorruptError, XtkError

# Names that a store lists, of files of caches.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LIMIT_VARIABLE = "XTK_REMOTE_CACHE_GB"
TAG_FOLDER = "tags"


class DownloadCache:
    """The copies of one remote folder: `remote/HASH OF ITS NAME` in the user's cache folder.

    `XTK_REMOTE_CACHE_GB` bounds what lies in `remote`, all folders together: what was used longest ago goes first. A
    file that a process has mapped stays readable to it, and its bytes are free when it is closed.

    Args:
        name: of the remote folder.

    Raises:
        XtkError: nobody knows where the cache folder is, or the limit is no number.
    """

    def __init__(self, name: str) -> None:
        try:
            self._all = user_cache_folder() / "remote"
        except RuntimeError as wrong:
            raise XtkError(
                f"there is no folder for copies of remote files: {wrong}", hint="XTK_CACHE=FOLDER xtk ..."
            ) from None
        self.folder = self._all / sha256(name).removeprefix("sha256:")[:24]
        self._limit = _size_limit()
        self._lock = Lock()
        self._cached_tags: dict[str, str] = {}

    def get(self, file: str, size: int, version_tag: str, fetch: Callable[[Path], None], where: str) -> Path:
        """Return the copy of a file, made if there is none of this tag.

        Args:
            file: its name.
            size: its bytes, as the store tells.
            version_tag: what tells its content from that of other times, as far as the store knows one.
            fetch: writes its bytes to a path.
            where: how messages call it.

        Raises:
            Damaged: other than `size` bytes came.
        """
        path = self.folder / check_file_name(file, (FILE_NAME,), where=where)
        mark = f"{size} {version_tag}"
        if self._is_cached(path, size, mark):
            return path
        self._evict(size)
        marked = self.folder / TAG_FOLDER / file
        marked.unlink(missing_ok=True)  # never a mark of one content beside another
        with atomic_write(path) as temporary:
            fetch(temporary)
            came = temporary.stat().st_size
            if came != size:
                raise CorruptError(f"{came:,} of {size:,} bytes came", where=where, hint="run the same command again")
        with atomic_write(marked) as temporary:
            temporary.write_text(mark, encoding="utf-8")
        self._cached_tags[file] = mark
        return path

    @contextlib.contextmanager
    def upload_path(self, file: str) -> Iterator[Path]:
        """Give a path for a file that is to be sent; it goes when the block ends."""
        folder = self.folder / "sent"
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_temporary_files(folder, file)
        temporary = folder / temporary_name(file)
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _is_cached(self, path: Path, size: int, mark: str) -> bool:
        try:
            if path.stat().st_size != size:
                return False
            if self._cached_tags.get(path.name) != mark:
                if (self.folder / TAG_FOLDER / path.name).read_text(encoding="utf-8") != mark:
                    return False
                self._cached_tags[path.name] = mark
            if self._limit is not None:
                os.utime(path)  # what is used stays longest
        except OSError:
            return False
        return True

    def _evict(self, size: int) -> None:
        if self._limit is None:
            return
        with self._lock:
            # Counted anew: other processes keep copies here too.
            held = sorted(
                (status.st_mtime_ns, status.st_size, path)
                for path in self._all.glob("*/*")
                if not path.name.startswith(TEMPORARY_PREFIX) and path.is_file() and (status := path.stat())
            )
            used = sum(bytes_ for _, bytes_, _ in held)
            for _, bytes_, path in held:
                if used + size <= self._limit:
                    break
                path.unlink(missing_ok=True)
                used -= bytes_


def _size_limit() -> int | None:
    given = os.environ.get(LIMIT_VARIABLE)
    if not given:
        return None
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise XtkError(
            f"{LIMIT_VARIABLE} is {given}; it is a number of gigabytes", hint=f"{LIMIT_VARIABLE}=200 xtk ..."
        )
    return int(limit * 1e9)
