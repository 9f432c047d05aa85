"""Local cache of downloaded remote files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import (
    TEMPORARY_PREFIX,
    atomic_write,
    remove_stale_temporary_files,
    sha256,
    temporary_name,
)
from xtk.files.safe_artifact_files import check_file_name
from xtk.writable_cache_folders import user_cache_folder

# Allowed names of remote files.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LIMIT_VARIABLE = "XTK_REMOTE_CACHE_GB"
TAG_FOLDER = "tags"


class DownloadCache:
    """Local copies of the files of one remote folder, in `remote/HASH_OF_ITS_NAME` of the user's cache folder.

    `XTK_REMOTE_CACHE_GB` limits the size of `remote`; the least recently used files are removed first. A removed file
    stays readable for processes that have mapped it.
    """

    def __init__(self, name: str) -> None:
        try:
            self._all = user_cache_folder() / "remote"
        except RuntimeError as failure:
            raise XtkError(
                f"the cache folder for downloaded files cannot be found: {failure}", hint="set XTK_CACHE=FOLDER"
            ) from None
        self.folder = self._all / sha256(name).removeprefix("sha256:")[:24]
        self._limit = _size_limit()
        self._lock = Lock()
        self._cached_tags: dict[str, str] = {}

    def get(self, file: str, size: int, version_tag: str, fetch: Callable[[Path], None], where: str) -> Path:
        """Return the local copy of a file; download it unless a copy with this size and tag exists.

        Args:
            size: its size in bytes in the remote storage.
            version_tag: identifies the version of the content, such as an ETag; "" if the storage has none.
            fetch: downloads the file to a path.
            where: name of the file in messages.

        Raises:
            CorruptError: the download does not have `size` bytes.
        """
        path = self.folder / check_file_name(file, (FILE_NAME,), where=where)
        mark = f"{size} {version_tag}"
        if self._is_cached(path, size, mark):
            return path
        self._evict(size)
        marked = self.folder / TAG_FOLDER / file
        marked.unlink(missing_ok=True)  # a tag must never be combined with another content
        with atomic_write(path) as temporary:
            fetch(temporary)
            came = temporary.stat().st_size
            if came != size:
                raise CorruptError(
                    f"the download of this file is incomplete: it has {came:,} of {size:,} bytes",
                    where=where,
                    hint="run the same command again",
                )
        with atomic_write(marked) as temporary:
            temporary.write_text(mark, encoding="utf-8")
        self._cached_tags[file] = mark
        return path

    @contextlib.contextmanager
    def upload_path(self, file: str) -> Iterator[Path]:
        """Yield a temporary path for a file to upload; it is removed when the block ends."""
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
                os.utime(path)  # the least recently used files are removed first
        except OSError:
            return False
        return True

    def _evict(self, size: int) -> None:
        if self._limit is None:
            return
        with self._lock:
            # List again: other processes write copies here too.
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
            f"{LIMIT_VARIABLE} is {given}, but must be a positive number of gigabytes",
            hint=f"set, for example, {LIMIT_VARIABLE}=200",
        )
    return int(limit * 1e9)
