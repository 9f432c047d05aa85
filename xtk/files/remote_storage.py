"""Remote storage through fsspec: file systems, names in listings, errors of libraries, local copies of files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import atomic_write, remove_stale_temporary_files, sha256, temporary_name
from xtk.files.output import writer_lock
from xtk.files.safe_artifact_files import check_file_name
from xtk.writable_cache_folders import user_cache_folder

# Keys of a listing that identify the version of a file's content, in different stores.
VERSION_TAG_KEYS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "blob_id", "oid", "LastModified", "mtime",
                    "created")  # fmt: skip
# Allowed names of remote files.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
TAG_FOLDER = "tags"


def open_file_system(place: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it."""
    from fsspec.core import url_to_fs

    protocol = place.partition("://")[0]
    try:
        fs, root = url_to_fs(place)
    except ImportError as failure:
        cause = failure.__cause__ or failure
        package = getattr(cause, "name", None) or protocol
        raise XtkError(
            f"{protocol}:// needs the Python package {package}, which is not installed",
            where=place,
            hint=f"run pip install {package}",
        ) from None
    except Exception as failure:  # of the storage library, or ValueError for an unknown protocol
        raise XtkError(
            f"this remote folder cannot be opened: {_error_line(failure)}",
            where=place,
            hint=_error_hint(failure, protocol),
        ) from None
    return fs, str(root).rstrip("/")


@contextlib.contextmanager
def store_errors(what: str, where: str, protocol: str, *, missing: bool = False) -> Iterator[None]:
    """Convert exceptions of storage libraries, which have many classes, into an XtkError."""
    try:
        yield
    except XtkError:
        raise
    except Exception as failure:
        if missing and isinstance(failure, FileNotFoundError):
            raise
        raise XtkError(f"{what}: {_error_line(failure)}", where=where, hint=_error_hint(failure, protocol)) from failure


def listed_name(path: object, root: str) -> str:
    """Return the file name of a path in a listing, after a check that it is one."""
    name = str(path).rstrip("/").rpartition("/")[2]
    if name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise CorruptError(
            f"this remote folder contains a file named {name!r}; names must not be empty, '.' or '..', or contain "
            "backslashes or zero bytes",
            where=root,
            hint="move this file away, or use a folder with only the files of the cache",
        )
    return name


def version_tag(entry: Mapping[str, Any]) -> str:
    """Return what identifies the version of the content of a listed file; "" if the store has nothing of this kind."""
    return next((f"{key} {entry[key]}" for key in VERSION_TAG_KEYS if entry.get(key) is not None), "")


def _error_line(failure: BaseException) -> str:
    text = str(failure).strip()
    return text.splitlines()[0] if text else type(failure).__name__


def _error_hint(failure: BaseException, protocol: str) -> str:
    name = type(failure).__name__
    if isinstance(failure, PermissionError) or "Credential" in name or "Token" in name or "Forbidden" in str(failure):
        return {
            "s3": "set credentials with permission: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            "gs": "set credentials with permission: gcloud auth application-default login",
            "hf": "run hf auth login with a token that has the needed permission",
        }.get(protocol, "set credentials with permission, as the tools of the storage provider read them")
    if isinstance(failure, FileNotFoundError):
        return "check the spelling; create a missing bucket with the tools of the storage provider"
    return "check the network and the address, and run the same command again; finished parts are kept"


class DownloadCache:
    """Local copies of the files of one remote folder, in `remote/HASH_OF_ITS_NAME` of the user's cache folder."""

    def __init__(self, name: str) -> None:
        try:
            all_copies = user_cache_folder() / "remote"
        except RuntimeError as failure:
            raise XtkError(
                f"the cache folder for downloaded files cannot be found: {failure}", hint="set XTK_CACHE=FOLDER"
            ) from None
        self.folder = all_copies / sha256(name).removeprefix("sha256:")[:24]
        self._cached_tags: dict[str, str] = {}
        self._is_clean = False

    def get(self, file: str, size: int, version_tag: str, fetch: Callable[[Path], None], where: str) -> Path:
        """Return the local copy of a file; download it unless a copy with this size and tag exists.

        Args:
            size: in bytes, in the remote storage; a download of another size is refused.
            version_tag: identifies the version of the content, such as an ETag; "" if the storage has none.
            fetch: downloads the file to a path.
        """
        path = self.folder / check_file_name(file, (FILE_NAME,), where=where)
        mark = f"{size} {version_tag}"
        if self._is_cached(path, size, mark):
            return path
        if not self._is_clean:  # once: listing the folder for each of thousands of files takes minutes
            self._is_clean = True
            for folder in (self.folder, self.folder / TAG_FOLDER):
                remove_stale_temporary_files(folder)
        with writer_lock(path, "download", seconds=-1):  # one of the processes of a run downloads it
            if not self._is_cached(path, size, mark):
                self._download(path, size, mark, fetch, where)
        return path

    def _download(self, path: Path, size: int, mark: str, fetch: Callable[[Path], None], where: str) -> None:
        marked = self.folder / TAG_FOLDER / path.name
        marked.unlink(missing_ok=True)  # a tag must never be combined with another content
        with atomic_write(path, clean=False) as temporary:
            fetch(temporary)
            came = temporary.stat().st_size
            if came != size:
                raise CorruptError(
                    f"the download of this file is incomplete: it has {came:,} of {size:,} bytes",
                    where=where,
                    hint="run the same command again",
                )
        with atomic_write(marked, clean=False) as temporary:
            temporary.write_text(mark, encoding="utf-8")
        self._cached_tags[path.name] = mark

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
        except OSError:
            return False
        return True
