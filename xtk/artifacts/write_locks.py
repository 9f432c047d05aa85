"""One writer at a time: a lock that the kernel releases when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from xtk.errors import XtkError

LOCK_PREFIX = ".xtk-lock-"
MAX_HOLDER_BYTES = 200
LONGEST_NAME = 255  # bytes
# File systems without locks; and what is no folder, or cannot be written to, of which the writer tells better.
LOCKS_UNAVAILABLE_ERRNOS = {
    errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC,
    errno.EDQUOT, errno.EEXIST, errno.ENOTDIR,
}  # fmt: skip


@contextlib.contextmanager
def exclusive_write_lock(folder: Path, what: str, writer_index: int = 0) -> Iterator[None]:
    """Hold a folder, so that no other process writes the same into it; where there are no locks, go on without.

    The lock is a file in the folder, and is removed at the end, as are those of writers that were killed. A folder
    that was made for it and stays empty is removed too.

    Args:
        folder: where it is written.
        what: how messages call it.
        writer_index: which of several writers that may write at once.

    Raises:
        XtkError: another process holds it.
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
    """Hold a path at which one file, or a folder that is renamed into place, is written: by a file next to it.

    Args:
        path: of the output.
        what: how messages call it.

    Raises:
        XtkError: another process holds it.
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
            hint="wait until it ends, or end it and run this command again; or another -o",
        ) from None
    except OSError as wrong:
        if wrong.errno not in LOCKS_UNAVAILABLE_ERRNOS:
            raise
        descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            _release(lock, descriptor)


def remove_stale_locks(folder: Path) -> None:
    """Remove the locks of writers that were killed; those that are held stay."""
    for path in folder.glob(f"{LOCK_PREFIX}*"):
        _remove_stale_lock(path)


def _acquire(path: Path) -> int:
    """Lock a file, and write who holds it; return its descriptor.

    Raises:
        BlockingIOError: another process holds it.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another one has just removed the folder, which was empty
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same_file(path, descriptor):  # its holder removed it between opening and locking
                os.close(descriptor)
                continue
            with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode()[:MAX_HOLDER_BYTES])
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Say whether a path still names the file that is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    """Remove a lock while it is held, so that nobody locks a file that is about to go."""
    with contextlib.suppress(OSError):
        if _is_same_file(path, descriptor):
            path.unlink()
    os.close(descriptor)


def _remove_stale_lock(path: Path) -> None:
    """Remove the lock of a writer that was killed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return
        _release(path, descriptor)


def _lock_holder(path: Path) -> str:
    with contextlib.suppress(OSError):
        if told := path.read_bytes()[:MAX_HOLDER_BYTES].decode(errors="replace"):
            return told
    return f"who holds {path.name} is not known"
