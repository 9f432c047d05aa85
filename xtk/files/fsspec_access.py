"""Access to remote storage through fsspec: file systems, names in listings, and errors of storage libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from xtk.errors import CorruptError, XtkError

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
    """Convert exceptions of storage libraries, which have many classes, into an XtkError.

    Args:
        what: the error, such as "this remote file cannot be read".
        where: URL of the file or folder.
    """
    try:
        yield
    except XtkError:
        raise
    except Exception as failure:
        if missing and isinstance(failure, FileNotFoundError):
            raise
        raise XtkError(f"{what}: {_error_line(failure)}", where=where, hint=_error_hint(failure, protocol)) from failure


def listed_name(path: object, root: str) -> str:
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
