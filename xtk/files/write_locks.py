"""Exclusive locks for writers, which the kernel releases when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from xtk.errors import XtkError

LOCK_PREFIX = ".xtk-lock-"
MAX_HOLDER_BYTES = 200
MAX_ATTEMPTS = 1000  # to create a folder that other processes remove
LONGEST_NAME = 255  # bytes
REMOVAL_SECONDS = 0.2  # a process that removes stale locks holds each one for microseconds
# File systems without locks, and paths that cannot be written, for which the writer raises a better error.
LOCKS_UNAVAILABLE_ERRNOS = {
    errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC,
    errno.EDQUOT, errno.EEXIST, errno.ENOTDIR,
}  # fmt: skip


@contextlib.contextmanager
def exclusive_write_lock(folder: Path, what: str, writer_index: int = 0) -> Iterator[None]:
    """Lock a folder, so that no other process writes the same output into it; a no-op without lock support.

    The lock is a file in the folder. It is removed at the end, with the locks of killed writers; a folder that was
    created for it and stays empty is removed too.

    Args:
        what: kind of output, for messages.
        writer_index: number of the writer, if several may write at the same time.
    """
    made = not folder.exists()
    try:
        with _held(folder / f"{LOCK_PREFIX}{writer_index}", what, folder):
            yield
    finally:
        remove_stale_locks(folder)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def only_writer_of_path(path: Path, what: str) -> Iterator[None]:
    """Lock an output path, with a lock file next to it, while a file is written or a folder is renamed into place.

    Args:
        what: kind of output, for messages.
    """
    lock = path.parent / f"{LOCK_PREFIX}{path.name}"
    if len(os.fsencode(lock.name)) > LONGEST_NAME:
        lock = path.parent / f"{LOCK_PREFIX}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}"
    with _held(lock, what, path):
        yield


@contextlib.contextmanager
def _held(lock: Path, what: str, where: Path) -> Iterator[None]:
    try:
        descriptor = _acquire(lock)
    except BlockingIOError:
        raise XtkError(
            f"another process is writing this {what}",
            where=f"{where}: {_lock_holder(lock)}",
            hint="wait until it ends, or stop it and run this command again; or use another output path (-o)",
        ) from None
    except OSError as failure:
        if failure.errno not in LOCKS_UNAVAILABLE_ERRNOS:
            raise
        descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            _release(lock, descriptor)


def remove_stale_locks(folder: Path) -> None:
    """Remove the locks of killed writers; locks that are held stay."""
    with contextlib.suppress(FileNotFoundError):  # another process removes the empty folder
        for path in folder.glob(f"{LOCK_PREFIX}*"):
            _remove_stale_lock(path)


def _acquire(path: Path) -> int:
    """Lock a file, write process and host into it, and return its descriptor.

    Raises:
        BlockingIOError: another process holds the lock.
        FileNotFoundError: the folder cannot be created (in /proc).
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another process has just removed the empty folder
            if attempts == MAX_ATTEMPTS:
                raise
            continue
        except FileExistsError:  # a file is there, or another process removes the folder while `mkdir` looks at it
            if _blocked_by_file(path.parent):
                raise
            continue
        try:
            _lock_soon(descriptor)
            if not _is_same_file(path, descriptor):  # its holder removed it between opening and locking
                os.close(descriptor)
                continue
            with contextlib.suppress(OSError):  # on a full disk, the lock works without this text
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode()[:MAX_HOLDER_BYTES])
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _lock_soon(descriptor: int) -> None:
    """Lock an opened file; wait for a process that checks whether it is stale, but not for a writer.

    Raises:
        BlockingIOError: a writer holds the lock.
    """
    until = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.005)


def _blocked_by_file(folder: Path) -> bool:
    """Return whether a file or a broken link is where a folder, or one above it, would be."""
    for part in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = part.lstat().st_mode  # once: the folder may be removed and made again at any time
            return not stat.S_ISDIR(mode) and not (stat.S_ISLNK(mode) and part.is_dir())
    return False


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether a path is still the opened file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    """Remove a lock while it is held, so that no other process locks a file that is about to be removed."""
    with contextlib.suppress(OSError):
        if _is_same_file(path, descriptor):
            path.unlink()
    os.close(descriptor)


def _remove_stale_lock(path: Path) -> None:
    """Remove a lock file unless a process holds it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return
        _release(path, descriptor)


def _lock_holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        if holder := path.read_bytes()[:MAX_HOLDER_BYTES].decode(errors="replace"):
            return holder
    return f"unknown process ({path.name})"
