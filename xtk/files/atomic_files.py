"""Atomic writing of files, JSON files, checksums and temporary names."""

from __future__ import annotations

import contextlib
import filecmp
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xtk.errors import CorruptError, XtkError
from xtk.files.safe_artifact_files import regular_file
from xtk.untrusted_json import parse_json

TEMPORARY_PREFIX = ".xtk-tmp-"


def canonical_json(content: Any) -> str:
    """Return canonical JSON: equal content gives equal text."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def nan_to_none(value: float) -> float | None:
    """Return a number for JSON, which has no NaN."""
    return None if math.isnan(value) else value


def sha256(content: bytes | str) -> str:
    """Return "sha256:..." of bytes or text."""
    # Python represents paths that are not UTF-8 as text with lone surrogates.
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return "sha256:..." of a file's bytes."""
    with path.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_write(
    path: Path,
    *,
    publish: Callable[[Path, Path], object] = Path.replace,  # gives the temporary file its final name
    clean: bool = True,  # list the folder and remove temporary files that killed writers of this file left
) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; it is synced and renamed if the block succeeds, else removed."""
    if path.is_dir():
        what = "the output must be a file, but this path is a folder"
        raise XtkError(what, where=str(path), hint="use another output path, or move the folder away")
    path.parent.mkdir(parents=True, exist_ok=True)
    if clean:
        remove_stale_temporary_files(path.parent, path.name)
    temporary = path.parent / temporary_name(path.name)
    try:
        yield temporary
        fsync(temporary)
        publish(temporary, path)
        fsync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish_exclusively(temporary: Path, path: Path) -> None:
    """Give a file its final name, for `atomic_write`; keep another file with this name, and raise."""
    if not link_into_place(temporary, path):
        raise XtkError(
            "this file already exists, and this command did not write it",
            where=str(path),
            hint="move it to another folder, and run the same command again; finished parts are kept",
        )


def link_into_place(temporary: Path, path: Path) -> bool:
    """Give a file another name; return False if that is the name of a file with other content, which is kept."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return has_same_content(temporary, path)
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            return has_same_content(temporary, path)
        temporary.replace(path)
    return True


def has_same_content(one: Path, other: Path) -> bool:
    """Return whether `other` is a regular file, not a link, with the same bytes as `one`."""
    return other.is_file() and not other.is_symlink() and filecmp.cmp(one, other, shallow=False)


def set_default_permissions(*paths: Path) -> None:
    """Give files the default permissions of their folder; safetensors 0.8 makes them readable by the owner only."""
    if not paths:
        return
    usual = paths[0].parent / temporary_name("mode")
    usual.touch()
    mode = usual.stat().st_mode & 0o777
    usual.unlink()
    for path in paths:
        path.chmod(mode)


_named_here: set[str] = set()  # temporary names that this process created
# Characters that YAML 1.1 reads differently from JSON or that UTF-8 cannot encode; written as escapes.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically; a YAML parser reads the same content."""
    with atomic_write(path) as temporary:
        text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False)
        text = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
        temporary.write_text(text + "\n", encoding="utf-8")


def parse_json_object(content: bytes, where: str, hint: str | None = None) -> dict[str, Any]:
    """Return the JSON object that a file contains."""
    try:
        parsed = parse_json(content.decode("utf-8"), what="this file", where=where)
    except UnicodeDecodeError as failure:
        raise CorruptError(f"this file is not UTF-8, as JSON must be: {failure}", where=where, hint=hint) from None
    except XtkError as failure:
        raise CorruptError(failure.what, where=where, hint=hint) from None
    if not isinstance(parsed, dict):
        raise CorruptError(
            "this file must contain a JSON object, but contains another JSON value", where=where, hint=hint
        )
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a regular file; links and devices are a CorruptError."""
    return parse_json_object(regular_file(path.parent, path.name).read_bytes(), str(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a JSON Lines file, [] if it does not exist; an incomplete last line is skipped."""
    try:
        content = regular_file(path.parent, path.name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Not splitlines: it also splits at U+2028, which texts may contain.
    lines = content.decode("utf-8", "replace").rstrip("\n").split("\n")
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            if number + 1 < len(lines):
                raise CorruptError(
                    "this line of a log file is not a JSON object",
                    where=f"{path}, line {number + 1}",
                    hint="remove this line, or restore the file from a copy",
                ) from None
    return records


def remove_stale_temporary_files(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders of killed writers from a folder, for one final name or for all.

    Temporary files of running processes stay, and those of other machines, whose processes cannot be checked.
    """
    for path in folder.glob(f"{TEMPORARY_PREFIX}*" if name is None else f"{TEMPORARY_PREFIX}*-{glob.escape(name)}"):
        if is_stale_temporary_file(path.name):
            shutil.rmtree(path, ignore_errors=True)  # a folder
            with contextlib.suppress(OSError):
                path.unlink()


def temporary_name(name: str) -> str:
    """Return a unique temporary name for a file while it is written."""
    # Threads and machines that share a folder write at the same time: the process id alone is not unique.
    temporary = f"{TEMPORARY_PREFIX}{os.getpid()}@{_host_hash()}-{secrets.token_hex(4)}-{name}"
    _named_here.add(temporary)
    return temporary


def is_stale_temporary_file(name: str) -> bool:
    """Return whether this is a temporary file of xtk whose writer ran on this machine and has ended."""
    if not name.startswith(TEMPORARY_PREFIX):
        return False
    process, _, host = name.removeprefix(TEMPORARY_PREFIX).partition("-")[0].partition("@")
    if host not in ("", _host_hash()):
        return False
    if not process.isdigit():
        return True
    # In a container, a process often has the id of a killed one before.
    return name not in _named_here if int(process) == os.getpid() else not Path(f"/proc/{process}").exists()


def _host_hash() -> str:
    """Return a short hash of this machine's host name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def fsync(path: Path) -> None:
    """Fsync a file, or the directory entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
