"""Folders in object stores and on other machines: s3://, gs://, hf://, sftp://, whatever fsspec knows."""

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

from xtk.artifacts.copies import Copies
from xtk.artifacts.files import is_leftover, temporary_name
from xtk.artifacts.folders import FILE_BYTES
from xtk.errors import Damaged, XtkError

# There an object is seen when it is whole, and not before. Elsewhere a file grows under the eyes of its readers.
WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "hf", "memory"})
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})
# What tells one content of a name from another, in the words of one store or another.
TAGS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "blob_id", "oid", "LastModified", "mtime", "created")
AT_ONCE = 16


class RemoteFolder:
    """A folder that fsspec reaches. Files come and go whole; what is mapped into memory is a copy on this machine.

    Args:
        place: its URL.

    Raises:
        XtkError: nobody knows its protocol, or the package for it is missing.
    """

    def __init__(self, place: str) -> None:
        self._name = place.rstrip("/")
        self.protocol = place.partition("://")[0]
        self._copies = Copies(self._name)
        self._listed: dict[str, dict[str, Any]] = {}
        self._fs, self._root = _file_system(self._name)

    @property
    def name(self) -> str:
        """How messages call it."""
        return self._name

    def path_of(self, file: str) -> str:
        """Return how messages call a file in it."""
        return f"{self._name}/{file}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file, as they are now; none if there is no folder.

        Raises:
            XtkError: there is a file of this name, no bucket, no permission, no network.
        """
        with self._told("the store does not tell what is there"):
            self._fs.invalidate_cache(self._root)
            try:
                found = self._fs.ls(self._root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = []
                self._refuse_missing_bucket()
        # Some stores list a folder among its own files, as an object of no bytes.
        itself = [entry for entry in found if str(entry["name"]).rstrip("/") == self._root]
        if any(entry["type"] == "file" and entry.get("size") for entry in itself):
            raise XtkError("a cache is a folder, and there is a file of this name", where=self._name)
        self._listed = {_listed_name(entry["name"], self._root): entry for entry in found if entry not in itself}
        return {file: int(entry.get("size") or 0) for file, entry in self._listed.items()}

    def read(self, file: str, limit: int = FILE_BYTES) -> bytes:
        """Return what a file holds.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: it has more than `limit` bytes.
        """
        with self._told("the store does not give a file", file, missing=True):
            size = int(self._fs.size(self._path(file)) or 0)
            if size <= limit:
                content: bytes = self._fs.cat_file(self._path(file))
                size = len(content)
        if size > limit:
            raise Damaged(f"this file has {size:,} bytes; at most {limit:,} are expected", where=self.path_of(file))
        return content

    def local(self, file: str) -> Path:
        """Return a copy on this machine, made now if there is none of what the store holds.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: it did not come whole.
        """
        entry = self._listed.get(file)
        if entry is None:
            self.sizes()
            entry = self._listed.get(file)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path_of(file))
        tag = next((f"{key} {entry[key]}" for key in TAGS if entry.get(key) is not None), "")

        def fetch(path: Path) -> None:
            with self._told("the store does not give a file", file, missing=True):
                self._fs.get_file(self._path(file), str(path))

        return self._copies.get(file, int(entry["size"]), tag, fetch, self.path_of(file))

    def fetch(self, files: Sequence[str]) -> None:
        """Have copies of files on this machine, several fetched at once.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: one did not come whole.
        """
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for _ in threads.map(self.local, files):
                pass

    @contextlib.contextmanager
    def write(self, file: str, *, new: bool = False) -> Iterator[Path]:
        """Give a path on this machine; sent whole when the block ends well.

        Args:
            file: its name.
            new: refuse to replace what another writer has put there.

        Raises:
            XtkError: there is such a file already, or it cannot be sent.
        """
        with self._copies.room_to_write(file) as temporary:
            yield temporary
            self._listed.pop(file, None)
            with self._told("the store does not take a file", file):
                if new and self._is_there(file):
                    raise self._clash(file)
                if self.protocol in WHOLE:
                    self._send(temporary, file, new=new)
                else:
                    self._send_and_move(temporary, file)

    def take(self, source: object, files: Mapping[str, str]) -> None:
        """Copy files of another folder, on the store where it can, else through this machine.

        Args:
            source: the other folder.
            files: their names there, and the names that they get.
        """

        def copy(pair: tuple[str, str]) -> None:
            theirs, ours = pair
            if isinstance(source, RemoteFolder) and source._fs is self._fs:
                with self._told("the store does not copy a file", ours):
                    self._fs.cp_file(source._path(theirs), self._path(ours))
            else:
                with self._told("the store does not take a file", ours):
                    self._send(source.local(theirs), ours, new=False)  # type: ignore[attr-defined]

        if self.protocol not in WHOLE:
            with self._told("the store makes no folder"):
                self._fs.makedirs(self._root, exist_ok=True)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for _ in threads.map(copy, files.items()):
                pass

    def remove(self, *files: str) -> None:
        """Remove files, those that are there."""
        for file in files:
            self._listed.pop(file, None)
        with self._told("the store does not remove files"):
            if len(files) > 1:
                # Some stores take a thousand names in a request.
                self._fs.rm([self._path(file) for file in files])
            else:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(self._path(file))

    def remove_leftovers(self) -> None:
        """Remove what killed writers on this machine left; of others nobody here knows whether they live."""
        if self.protocol in WHOLE:
            return
        self.remove(*filter(is_leftover, self.sizes()))

    def remove_stale_locks(self) -> None:
        """Do nothing: stores have no locks."""

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    def _is_there(self, file: str) -> bool:
        self._fs.invalidate_cache(self._root)
        return bool(self._fs.exists(self._path(file)))

    @cached_property
    def _creates(self) -> bool:
        """Whether the store itself refuses a second object of a name."""
        put = getattr(self._fs, "_put_file", None) or self._fs.put_file
        return "mode" in inspect.signature(put).parameters

    def _send(self, path: Path, file: str, *, new: bool) -> None:
        try:
            self._fs.put_file(str(path), self._path(file), **({"mode": "create"} if new and self._creates else {}))
        except FileExistsError:
            # It was not there a moment ago: another writer's, or our own, whose answer was lost and which was sent
            # again.
            if self._fs.cat_file(self._path(file)) != path.read_bytes():
                raise self._clash(file) from None
        except OSError as wrong:
            if not new or wrong.errno != errno.ENOSYS:
                raise
            self._send(path, file, new=False)  # a store that knows no such condition

    def _send_and_move(self, path: Path, file: str) -> None:
        self._fs.makedirs(self._root, exist_ok=True)
        temporary = self._path(temporary_name(file))
        try:
            self._fs.put_file(str(path), temporary)
            self._fs.mv(temporary, self._path(file))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _clash(self, file: str) -> XtkError:
        return XtkError(
            "another process writes this cache too: what was to be written now is there already",
            where=self.path_of(file),
            hint="let the other one go on, or end it and run the same command again; nothing was replaced",
        )

    def _refuse_missing_bucket(self) -> None:
        bucket, slash, _ = self._root.partition("/")
        if self.protocol in BUCKETS and slash and not self._fs.exists(bucket):
            raise XtkError(
                f"there is no bucket {bucket}, or none that these credentials see",
                where=self._name,
                hint="make it with the tools of the store; xtk makes none",
            )

    @contextlib.contextmanager
    def _told(self, what: str, file: str | None = None, *, missing: bool = False) -> Iterator[None]:
        """Tell the errors of stores, which have a hundred classes, in xtk's form."""
        try:
            yield
        except XtkError:
            raise
        except Exception as wrong:
            if missing and isinstance(wrong, FileNotFoundError):
                raise
            where = self._name if file is None else self.path_of(file)
            raise XtkError(f"{what}: {_reason(wrong)}", where=where, hint=_hint(wrong, self.protocol)) from wrong


def _file_system(place: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    Raises:
        XtkError: nobody knows its protocol, or the package for it is missing.
    """
    from fsspec.core import url_to_fs

    protocol = place.partition("://")[0]
    try:
        fs, root = url_to_fs(place)
    except ImportError as wrong:
        cause = wrong.__cause__ or wrong
        package = getattr(cause, "name", None) or protocol
        raise XtkError(
            f"the package for {protocol}:// is not installed ({package})", where=place, hint=f"pip install {package}"
        ) from None
    except Exception as wrong:  # of the store's own kind, or ValueError for a protocol that nobody knows
        raise XtkError(
            f"this folder cannot be reached: {_reason(wrong)}", where=place, hint=_hint(wrong, protocol)
        ) from None
    return fs, str(root).rstrip("/")


def _listed_name(path: object, root: str) -> str:
    """Return the name of a file that a store lists.

    Raises:
        Damaged: it cannot be the name of a file in this folder.
    """
    name = str(path).rstrip("/").rpartition("/")[2]
    if name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise Damaged(f"the store lists {name!r}, which cannot be a file of this folder", where=root)
    return name


def _reason(wrong: BaseException) -> str:
    text = str(wrong).strip()
    return text.splitlines()[0] if text else type(wrong).__name__


def _hint(wrong: BaseException, protocol: str) -> str:
    name = type(wrong).__name__
    if isinstance(wrong, PermissionError) or "Credential" in name or "Token" in name or "Forbidden" in str(wrong):
        return {
            "s3": "credentials with permission: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            "gs": "credentials with permission: gcloud auth application-default login",
            "hf": "hf auth login, with a token that may write",
        }.get(protocol, "credentials with permission, as the store's own tools read them")
    if isinstance(wrong, FileNotFoundError):
        return "check the spelling; what is missing, the bucket say, is made with the tools of the store"
    return "check the network and the address, and run the same command again; finished parts are kept"
