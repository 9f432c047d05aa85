"""Folders in remote storage: s3://, gs://, hf://, sftp:// and every other protocol of fsspec."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from xtk.artifacts.atomic_files import is_stale_temporary_file, temporary_name
from xtk.artifacts.local_and_remote_folders import MAX_FILE_BYTES
from xtk.artifacts.remote_file_cache import DownloadCache
from xtk.errors import CorruptError, XtkError

# In these stores an object is visible only when it is complete; elsewhere readers see a growing file.
ATOMIC_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "hf", "memory"})
BUCKET_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
# Keys of a listing that identify the version of a file's content, in different stores.
VERSION_TAG_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "content_md5",
    "blob_id",
    "oid",
    "LastModified",
    "mtime",
    "created",
)
TRANSFER_THREADS = 16


class RemoteFolder:
    """A remote folder, through fsspec. Files are written and read completely; mapped files are local copies.

    Args:
        url: its URL.

    Raises:
        XtkError: the protocol is unknown, or its Python package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._name = url.rstrip("/")
        self.protocol = url.partition("://")[0]
        self._download_cache = DownloadCache(self._name)
        self._listing: dict[str, dict[str, Any]] = {}
        self._fs, self._root = _file_system(self._name)

    @property
    def name(self) -> str:
        """The URL, for messages."""
        return self._name

    def path_of(self, file: str) -> str:
        """Return the URL of a file in it, for messages."""
        return f"{self._name}/{file}"

    def file_sizes(self) -> dict[str, int]:
        """Return the current size of each file in bytes; {} if there is no folder.

        Raises:
            XtkError: the path is a file, the bucket is missing, or the storage cannot be accessed.
        """
        with self._store_errors("this remote folder cannot be listed"):
            self._fs.invalidate_cache(self._root)
            try:
                found = self._fs.ls(self._root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = []
                self._refuse_missing_bucket()
        # Some stores list a folder among its own files, as an empty object.
        itself = [entry for entry in found if str(entry["name"]).rstrip("/") == self._root]
        if any(entry["type"] == "file" and entry.get("size") for entry in itself):
            raise XtkError(
                "a cache must be a folder, but this path is a file", where=self._name, hint="use another path"
            )
        self._listing = {_listed_name(entry["name"], self._root): entry for entry in found if entry not in itself}
        return {file: int(entry.get("size") or 0) for file, entry in self._listing.items()}

    def read(self, file: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptError: it is larger than `max_bytes`.
        """
        with self._store_errors("this remote file cannot be read", file, missing=True):
            size = int(self._fs.size(self._path(file)) or 0)
            if size <= max_bytes:
                content: bytes = self._fs.cat_file(self._path(file))
                size = len(content)
        if size > max_bytes:
            raise CorruptError(
                f"this file has {size:,} bytes; files of this kind have at most {max_bytes:,}",
                where=self.path_of(file),
                hint="copy the file again, or create it again with the command that wrote it",
            )
        return content

    def local_path(self, file: str) -> Path:
        """Return a local copy of a file; download it unless the current version is already cached.

        Raises:
            FileNotFoundError: the file does not exist.
            CorruptError: the download is incomplete.
        """
        entry = self._listing.get(file)
        if entry is None:
            self.file_sizes()
            entry = self._listing.get(file)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path_of(file))
        tag = next((f"{key} {entry[key]}" for key in VERSION_TAG_KEYS if entry.get(key) is not None), "")

        def fetch(path: Path) -> None:
            with self._store_errors("this remote file cannot be downloaded", file, missing=True):
                self._fs.get_file(self._path(file), str(path))

        return self._download_cache.get(file, int(entry["size"]), tag, fetch, self.path_of(file))

    def prefetch(self, files: Sequence[str]) -> None:
        """Download files in parallel.

        Raises:
            FileNotFoundError: a file does not exist.
            CorruptError: a download is incomplete.
        """
        with ThreadPoolExecutor(TRANSFER_THREADS) as threads:
            for _ in threads.map(self.local_path, files):
                pass

    @contextlib.contextmanager
    def write(self, file: str, *, exclusive: bool = False) -> Iterator[Path]:
        """Yield a local path; the file is uploaded when the block succeeds.

        Args:
            file: its name.
            exclusive: refuse to replace a file that another writer wrote.

        Raises:
            XtkError: the file already exists, or the upload fails.
        """
        with self._download_cache.upload_path(file) as temporary:
            yield temporary
            self._listing.pop(file, None)
            with self._store_errors("this file cannot be uploaded", file):
                if exclusive and self._exists(file):
                    raise self._already_exists_error(file)
                if self.protocol in ATOMIC_PROTOCOLS:
                    self._upload(temporary, file, exclusive=exclusive)
                else:
                    self._upload_and_rename(temporary, file)

    def copy_from(self, source: object, files: Mapping[str, str]) -> None:
        """Copy files of another folder, within the storage if possible, else through this machine.

        Args:
            source: the other folder.
            files: {name in the source: name in this folder}.
        """

        def copy(pair: tuple[str, str]) -> None:
            theirs, ours = pair
            if isinstance(source, RemoteFolder) and source._fs is self._fs:
                with self._store_errors("this file cannot be copied within the storage", ours):
                    self._fs.cp_file(source._path(theirs), self._path(ours))
            else:
                with self._store_errors("this file cannot be uploaded", ours):
                    self._upload(source.local_path(theirs), ours, exclusive=False)  # type: ignore[attr-defined]

        if self.protocol not in ATOMIC_PROTOCOLS:
            with self._store_errors("this folder cannot be created"):
                self._fs.makedirs(self._root, exist_ok=True)
        with ThreadPoolExecutor(TRANSFER_THREADS) as threads:
            for _ in threads.map(copy, files.items()):
                pass

    def remove(self, *files: str) -> None:
        """Remove files; missing ones are ignored."""
        for file in files:
            self._listing.pop(file, None)
        with self._store_errors("files in this folder cannot be removed"):
            if len(files) > 1:
                # One request for many files, in stores that support it.
                self._fs.rm([self._path(file) for file in files])
            else:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(self._path(file))

    def remove_stale_temporary_files(self) -> None:
        """Remove temporary files of killed writers on this machine; those of other machines cannot be checked."""
        if self.protocol in ATOMIC_PROTOCOLS:
            return
        self.remove(*filter(is_stale_temporary_file, self.file_sizes()))

    def remove_stale_locks(self) -> None:
        """Do nothing: stores have no locks."""

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    def _exists(self, file: str) -> bool:
        self._fs.invalidate_cache(self._root)
        return bool(self._fs.exists(self._path(file)))

    @cached_property
    def _supports_exclusive_create(self) -> bool:
        """Whether the storage can refuse to replace an existing object."""
        put = getattr(self._fs, "_put_file", None) or self._fs.put_file
        return "mode" in inspect.signature(put).parameters

    def _upload(self, path: Path, file: str, *, exclusive: bool) -> None:
        try:
            self._fs.put_file(
                str(path),
                self._path(file),
                **({"mode": "create"} if exclusive and self._supports_exclusive_create else {}),
            )
        except FileExistsError:
            # Written since the check: by another writer, or by our own upload, whose response was lost and which was
            # sent again.
            if self._fs.cat_file(self._path(file)) != path.read_bytes():
                raise self._already_exists_error(file) from None
        except OSError as wrong:
            if not exclusive or wrong.errno != errno.ENOSYS:
                raise
            self._upload(path, file, exclusive=False)  # a store without conditional writes

    def _upload_and_rename(self, path: Path, file: str) -> None:
        self._fs.makedirs(self._root, exist_ok=True)
        temporary = self._path(temporary_name(file))
        try:
            self._fs.put_file(str(path), temporary)
            self._fs.mv(temporary, self._path(file))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _already_exists_error(self, file: str) -> XtkError:
        return XtkError(
            "another process is writing this cache: this file already exists",
            where=self.path_of(file),
            hint="wait until the other process ends, or stop it and run the same command again; nothing was replaced",
        )

    def _refuse_missing_bucket(self) -> None:
        bucket, slash, _ = self._root.partition("/")
        if self.protocol in BUCKET_PROTOCOLS and slash and not self._fs.exists(bucket):
            raise XtkError(
                f"the bucket {bucket} does not exist, or these credentials cannot access it",
                where=self._name,
                hint="create the bucket with the tools of the storage provider, or use other credentials",
            )

    @contextlib.contextmanager
    def _store_errors(self, what: str, file: str | None = None, *, missing: bool = False) -> Iterator[None]:
        """Convert exceptions of storage libraries, which have many classes, into an XtkError."""
        try:
            yield
        except XtkError:
            raise
        except Exception as wrong:
            if missing and isinstance(wrong, FileNotFoundError):
                raise
            where = self._name if file is None else self.path_of(file)
            raise XtkError(
                f"{what}: {_error_line(wrong)}", where=where, hint=_error_hint(wrong, self.protocol)
            ) from wrong


def _file_system(place: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it.

    Raises:
        XtkError: the protocol is unknown, or its Python package is not installed.
    """
    from fsspec.core import url_to_fs

    protocol = place.partition("://")[0]
    try:
        fs, root = url_to_fs(place)
    except ImportError as wrong:
        cause = wrong.__cause__ or wrong
        package = getattr(cause, "name", None) or protocol
        raise XtkError(
            f"{protocol}:// needs the Python package {package}, which is not installed",
            where=place,
            hint=f"run pip install {package}",
        ) from None
    except Exception as wrong:  # of the storage library, or ValueError for an unknown protocol
        raise XtkError(
            f"this remote folder cannot be opened: {_error_line(wrong)}", where=place, hint=_error_hint(wrong, protocol)
        ) from None
    return fs, str(root).rstrip("/")


def _listed_name(path: object, root: str) -> str:
    """Return the file name of a path in a listing.

    Raises:
        CorruptError: it is not a valid name of a file in this folder.
    """
    name = str(path).rstrip("/").rpartition("/")[2]
    if name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise CorruptError(
            f"this remote folder contains a file named {name!r}; names must not be empty, '.' or '..', or contain "
            "backslashes or zero bytes",
            where=root,
            hint="rename or remove this file, or use a folder with only the files of the cache",
        )
    return name


def _error_line(wrong: BaseException) -> str:
    text = str(wrong).strip()
    return text.splitlines()[0] if text else type(wrong).__name__


def _error_hint(wrong: BaseException, protocol: str) -> str:
    name = type(wrong).__name__
    if isinstance(wrong, PermissionError) or "Credential" in name or "Token" in name or "Forbidden" in str(wrong):
        return {
            "s3": "set credentials with permission: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            "gs": "set credentials with permission: gcloud auth application-default login",
            "hf": "run hf auth login with a token that has the needed permission",
        }.get(protocol, "set credentials with permission, as the tools of the storage provider read them")
    if isinstance(wrong, FileNotFoundError):
        return "check the spelling; create a missing bucket with the tools of the storage provider"
    return "check the network and the address, and run the same command again; finished parts are kept"
