"""Writing so that a file exists whole or not at all."""

from __future__ import annotations

import contextlib
import filecmp
import glob
import hashlib
import itertools
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xtk.artifacts.safe_file_access import read_regular_file
from xtk.errors import CorruptError, XtkError
from xtk.safe_json import parse_json

TEMPORARY_PREFIX = ".xtk-tmp-"
MAX_JSON_BYTES = 1 << 28  # of a recipe, or of what a run or an index of weights states
MAX_JSON_LINES_BYTES = 1 << 34  # of metrics and rollouts


def canonical_json(content: Any) -> str:
    """Return JSON that is the same for the same content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256(content: bytes | str) -> str:
    """Return "sha256:..." of bytes or text."""
    # Paths that are not UTF-8 are text with halves of character pairs.
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return "sha256:" + hashlib.sha256(raw).hexdigest()


FileState = tuple[int, ...] | None
UNKNOWN_STATE: FileState = ()


def sha256_of_file(path: Path) -> str:
    """Return "sha256:..." of a file's bytes."""
    with path.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_write(
    path: Path, *, keep_others: bool = False, before: FileState = UNKNOWN_STATE, clean: bool = True
) -> Iterator[Path]:
    """Yield a temporary path next to `path`; it is synced and renamed when the block succeeds, and removed when not.

    Args:
        path: of the file.
        keep_others: keep a file that another program wrote at `path` in the meantime.
        before: what was at `path` when it was checked (`file_state`), by default what is there now.
        clean: remove what killed writers of this file left, for which the folder is listed.

    Raises:
        XtkError: there is a folder, or, with `keep_others`, a file that was not there; it names where the result is.
    """
    if path.is_dir():
        raise XtkError("this is to be a file, and there is a folder of this name", where=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if clean:
        remove_stale_temporary_files(path.parent, path.name)
    temporary = path.parent / temporary_name(path.name)
    before = file_state(path) if before == UNKNOWN_STATE else before
    try:
        yield temporary
        _fsync(temporary)
        if keep_others and not _may_replace(temporary, path, before) and not has_same_content(temporary, path):
            kept = next_free_path(path, ".")
            temporary.replace(kept)
            raise XtkError(
                "another program wrote this file while the command ran",
                where=str(path),
                hint=f"the result is in {kept}",
            )
        temporary.replace(path)
        _fsync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _may_replace(temporary: Path, path: Path, before: FileState) -> bool:
    """Say whether a path is as it was before; one that was free is taken at once, where the disk has hard links."""
    if before is not None:
        return file_state(path) == before
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        return file_state(path) is None
    return True


def next_free_path(path: Path, separator: str) -> Path:
    """Return the path with the first number after its name that no file has."""
    names = (path.with_name(f"{path.name}{separator}{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def has_same_content(one: Path, other: Path) -> bool:
    """Return whether the second is a regular file, no link, with the bytes of the first."""
    return other.is_file() and not other.is_symlink() and filecmp.cmp(one, other, shallow=False)


def file_state(path: Path) -> FileState:
    """Return device, inode, size and modification time of a file; None if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def set_default_permissions(*paths: Path) -> None:
    """Give files of a folder the permissions that a new file has there; safetensors 0.8 writes for the owner alone."""
    if not paths:
        return
    usual = paths[0].parent / temporary_name("mode")
    usual.touch()
    mode = usual.stat().st_mode & 0o777
    usual.unlink()
    for path in paths:
        path.chmod(mode)


_named_here: set[str] = set()  # temporary names that this process gave
# What YAML 1.1 does not read as JSON does, and what UTF-8 cannot hold: written as escapes.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON, whole; as YAML it reads the same."""
    with atomic_write(path) as temporary:
        text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False)
        text = _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        temporary.write_text(text + "\n", encoding="utf-8")


def parse_json_object(content: bytes, where: str, hint: str | None = None) -> dict[str, Any]:
    """Return the JSON object that a file contains.

    Args:
        content: of the file.
        where: the file, for errors.
        hint: what to do about a damaged one.

    Raises:
        Damaged: it is not JSON, not UTF-8, nested too deep, or not an object.
    """
    try:
        found = parse_json(content.decode("utf-8"), what="this file", where=where)
    except UnicodeDecodeError as wrong:
        raise CorruptError(f"this file is not JSON: {wrong}", where=where, hint=hint) from None
    except XtkError as wrong:
        raise CorruptError(wrong.what, where=where, hint=hint) from None
    if not isinstance(found, dict):
        raise CorruptError("this file holds no JSON object", where=where, hint=hint)
    return found


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a regular file of an artifact; links and devices are not followed.

    Raises:
        Damaged: it is none, or larger than `limit` bytes.
    """
    return parse_json_object(read_regular_file(path.parent, path.name, max_bytes), str(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, a line each; none if there is no file. A last line may be cut short by a kill.

    Raises:
        Damaged: another line is no JSON object, or this is not a regular file.
    """
    try:
        content = read_regular_file(path.parent, path.name, MAX_JSON_LINES_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Not splitlines, which would cut at U+2028 too, which texts may hold.
    lines = content.decode("utf-8", "replace").rstrip("\n").split("\n")
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            if number + 1 < len(lines):
                raise CorruptError("this line is no JSON object", where=f"{path}, line {number + 1}") from None
    return found


def remove_stale_temporary_files(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers left in a folder, of one file or of all.

    Those of other living processes stay, and those of other machines, of which nobody here knows whether they live.
    """
    for path in folder.glob(f"{TEMPORARY_PREFIX}*" if name is None else f"{TEMPORARY_PREFIX}*-{glob.escape(name)}"):
        if is_stale_temporary_file(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def temporary_name(name: str) -> str:
    """Return a name for a file while it is written."""
    # Threads, and machines that share a folder, write at once: the process alone is no name.
    temporary = f"{TEMPORARY_PREFIX}{os.getpid()}@{_host_hash()}-{secrets.token_hex(4)}-{name}"
    _named_here.add(temporary)
    return temporary


def is_stale_temporary_file(name: str) -> bool:
    """Say whether a name is that of a file whose writer, on this machine, has ended.

    A container may give the number of a killed process to the next one.
    """
    if not name.startswith(TEMPORARY_PREFIX):
        return False
    process, _, host = name.removeprefix(TEMPORARY_PREFIX).partition("-")[0].partition("@")
    if host not in ("", _host_hash()):
        return False
    if not process.isdigit():
        return True
    return name not in _named_here if int(process) == os.getpid() else not Path(f"/proc/{process}").exists()


def _host_hash() -> str:
    """Return a short name of this machine, of letters that any file system takes."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
