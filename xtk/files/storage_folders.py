"""Folders of caches, local or in remote storage (s3://, gs://, hf://, sftp:// and all protocols of fsspec)."""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.errors import XtkError
from xtk.files.atomic_files import (
    atomic_write,
    is_stale_temporary_file,
    publish_exclusively,
    remove_stale_temporary_files,
    temporary_name,
)
from xtk.files.output import check_output_folder, move_folder_aside, writer_lock
from xtk.files.remote_storage import DownloadCache, listed_name, open_file_system, store_errors, version_tag
from xtk.files.safe_artifact_files import regular_file

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

# In these stores an object is visible only when it is complete; elsewhere readers see a growing file.
ATOMIC_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "hf", "memory"})
BUCKET_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
TRANSFER_THREADS = 16


class LocalFolder:
    """A local folder, which need not exist; files are written atomically. `RemoteFolder` has the same methods."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)  # for messages

    def path_of(self, file: str) -> str:
        """Return the path or URL of a file in it, for messages."""
        return str(self.path / file)

    def check_as_output(self, what: str, inputs: Iterable[str | Path], *, force: bool) -> None:
        """Refuse a path that cannot be created, a home folder, and a folder that is or contains an input."""
        check_output_folder(self.path, what, inputs, force=force)

    def lock(self, what: str, writer_index: int = 0) -> AbstractContextManager[None]:
        """Lock the folder against a second writer of the same output; arguments as for `writer_lock`."""
        return writer_lock(self.path, what, writer_index)

    def move_aside(self) -> None:
        """Rename a folder with files to the next free NAME.replaced-1."""
        move_folder_aside(self.path)

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

    def read(self, file: str) -> bytes:
        """Return the content of a file, which must be a regular one, or raise FileNotFoundError."""
        return regular_file(self.path, file).read_bytes()

    def local_path(self, file: str) -> Path:
        """Return the path of a regular file, which can be memory-mapped, or raise FileNotFoundError."""
        path = regular_file(self.path, file)
        path.stat()
        return path

    def check_regular(self, files: Iterable[str]) -> None:
        """Refuse links, devices and folders with these names."""
        for file in files:
            self.local_path(file)

    def prefetch(self, files: Sequence[str]) -> None:
        """Do nothing: all files are local."""

    @contextlib.contextmanager
    def write(self, file: str, *, exclusive: bool = False) -> Iterator[Path]:
        """Yield a temporary path in the folder; it is synced and renamed, with `exclusive` never over another file."""
        # `remove_stale_temporary_files` cleans the whole folder.
        publish = publish_exclusively if exclusive else Path.replace
        with atomic_write(self.path / file, publish=publish, clean=False) as temporary:
            yield temporary

    def copy_from(self, source: StorageFolder, files: Mapping[str, str]) -> None:
        """Hard-link files of another folder on the same file system into this one; else copy them.

        The next written file syncs the links to disk: the manifest, the last file, never exists without them.
        `files`: {name in the source: name in this folder}; existing files are replaced.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        source.prefetch(list(files))
        for theirs, ours in files.items():
            source.local_path(theirs)  # refuses symbolic links
            if isinstance(source, LocalFolder) and _try_hard_link(source.path / theirs, self.path / ours):
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


def _try_hard_link(path: Path, name: Path) -> bool:
    """Create a hard link, replacing an existing file; return False if the file system does not support it."""
    try:
        name.unlink(missing_ok=True)
        name.hardlink_to(path)
    except OSError as failure:
        if isinstance(failure, FileNotFoundError) or failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


class RemoteFolder:
    """A remote folder, through fsspec. Files are written and read completely; mapped files are local copies."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")  # for messages
        self.protocol = url.partition("://")[0]
        self._download_cache = DownloadCache(self.name)
        self._listing: dict[str, dict[str, Any]] = {}
        self._fs, self._root = open_file_system(self.name)

    def path_of(self, file: str) -> str:
        """Return the URL of a file in it, for messages."""
        return f"{self.name}/{file}"

    def check_as_output(self, what: str, inputs: Iterable[str | Path], *, force: bool) -> None:
        """Do nothing: only writing shows what a store allows."""

    def lock(self, what: str, writer_index: int = 0) -> AbstractContextManager[None]:
        """Lock nothing: stores have no locks."""
        return contextlib.nullcontext()

    def move_aside(self) -> None:
        """Move all files to the next free NAME.replaced-1: copied within the storage, then removed."""
        with self._store_errors("the old output cannot be moved aside"):
            self._fs.invalidate_cache()
            if not (files := self._fs.find(self._root)):
                return
            numbers = itertools.count(1)
            aside = next(end for number in numbers if not self._fs.exists(self._root + (end := f".replaced-{number}")))
            if self.protocol in ATOMIC_PROTOCOLS:
                names = [f"{self._root}{aside}{file.removeprefix(self._root)}" for file in files]
                with ThreadPoolExecutor(TRANSFER_THREADS) as threads:
                    list(threads.map(self._fs.cp_file, files, names))
                self._fs.rm(files)
            else:
                self._fs.mv(self._root, self._root + aside)
        self._listing = {}
        terminal.note(f"moved {self.name} to {self.name}{aside}; xtk does not need it any more")

    def file_sizes(self) -> dict[str, int]:
        """Return the current size of each file in bytes; {} if there is no folder."""
        with self._store_errors("this remote folder cannot be listed"):
            self._fs.invalidate_cache(self._root)
            try:
                entries = self._fs.ls(self._root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                entries = []
                self._refuse_missing_bucket()
        # Some stores list a folder among its own files, as an empty object.
        itself = [entry for entry in entries if str(entry["name"]).rstrip("/") == self._root]
        if any(entry["type"] == "file" and entry.get("size") for entry in itself):
            raise XtkError(
                "a cache must be a folder, but this path is a file", where=self.name, hint="use another path"
            )
        self._listing = {listed_name(entry["name"], self._root): entry for entry in entries if entry not in itself}
        return {file: int(entry.get("size") or 0) for file, entry in self._listing.items()}

    def read(self, file: str) -> bytes:
        """Return the content of a file."""
        with self._store_errors("this remote file cannot be read", file, missing=True):
            content: bytes = self._fs.cat_file(self._path(file))
            return content

    def local_path(self, file: str) -> Path:
        """Return a local copy of a file; download it unless the current version is already cached."""
        if file not in self._listing:
            self.file_sizes()
        if (entry := self._listing.get(file)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path_of(file))

        def fetch(path: Path) -> None:
            with self._store_errors("this remote file cannot be downloaded", file, missing=True):
                self._fs.get_file(self._path(file), str(path))

        return self._download_cache.get(file, int(entry["size"]), version_tag(entry), fetch, self.path_of(file))

    def check_regular(self, files: Iterable[str]) -> None:
        """Do nothing: stores have only files."""

    def prefetch(self, files: Sequence[str]) -> None:
        """Download files in parallel."""
        with ThreadPoolExecutor(TRANSFER_THREADS) as threads:
            list(threads.map(self.local_path, files))

    @contextlib.contextmanager
    def write(self, file: str, *, exclusive: bool = False) -> Iterator[Path]:
        """Yield a local path; the file is uploaded when the block succeeds."""
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

    def copy_from(self, source: StorageFolder, files: Mapping[str, str]) -> None:
        """Copy files of another folder, within the storage if possible, else through this machine."""

        def copy(pair: tuple[str, str]) -> None:
            theirs, ours = pair
            if isinstance(source, RemoteFolder) and source._fs is self._fs:
                with self._store_errors("this file cannot be copied within the storage", ours):
                    self._fs.cp_file(source._path(theirs), self._path(ours))
            else:
                with self._store_errors("this file cannot be uploaded", ours):
                    self._upload(source.local_path(theirs), ours, exclusive=False)

        if self.protocol not in ATOMIC_PROTOCOLS:
            with self._store_errors("this folder cannot be created"):
                self._fs.makedirs(self._root, exist_ok=True)
        with ThreadPoolExecutor(TRANSFER_THREADS) as threads:
            list(threads.map(copy, files.items()))

    def remove(self, *files: str) -> None:
        """Remove files; missing ones are ignored."""
        for file in files:
            self._listing.pop(file, None)
        with self._store_errors("files in this folder cannot be removed"):
            if len(files) > 1:  # one request, in stores that support it
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
        except OSError as failure:
            if not exclusive or failure.errno != errno.ENOSYS:
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
                where=self.name,
                hint="create the bucket with the tools of the storage provider, or use other credentials",
            )

    def _store_errors(
        self, what: str, file: str | None = None, *, missing: bool = False
    ) -> AbstractContextManager[None]:
        where = self.name if file is None else self.path_of(file)
        return store_errors(what, where, self.protocol, missing=missing)


StorageFolder = LocalFolder | RemoteFolder


def is_remote(location: str | Path) -> bool:
    """Return whether a location is a URL such as `s3://bucket/folder`."""
    return isinstance(location, str) and bool(_URL.match(location))


def absolute_location(location: str) -> str:
    """Return the absolute path of a local location; a URL without slashes at its end."""
    return location.rstrip("/") if is_remote(location) else str(Path(location).resolve())


def open_folder(location: str | Path) -> StorageFolder:
    """Return the folder at a local path or at a URL of fsspec."""
    if is_remote(location):
        return RemoteFolder(str(location))
    return LocalFolder(Path(location))
