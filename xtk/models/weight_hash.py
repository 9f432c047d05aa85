"""Hash of the weights of a model: every byte of its files, or of the tensors of a loaded model."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xtk.errors import CorruptError
from xtk.files.atomic_files import atomic_write, read_json
from xtk.text.model_config_json import ADAPTER_CONFIG, read_model_config
from xtk.writable_cache_folders import user_cache_folder

CHUNK_BYTES, _THREADS = 1 << 25, 8
MIN_REMEMBERED_BYTES = 1 << 28  # hashed in less than a second


def hash_weights(folder: Path) -> str:
    """Return "sha256:..." of the weights in a folder.

    Hashes the configuration, the names of the weight files and all of their bytes, and the Python files of a model
    that has its own. The hash of a large file is stored in xtk's cache folder, with the file's inode, size and times of
    change.
    """
    digest = hashlib.sha256()
    configuration = read_model_config(folder)
    has_code = "auto_map" in configuration
    adapter = read_json((folder / ADAPTER_CONFIG).resolve()) if (folder / ADAPTER_CONFIG).is_file() else {}
    for content in (configuration, adapter):
        if content:
            for name in ("transformers_version", "base_model_name_or_path"):  # do not depend on the weights
                content.pop(name, None)
            digest.update(json.dumps(content, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for file in files + (sorted(folder.glob("*.py")) if has_code else []):
        if not file.is_file():  # reading a pipe would block
            raise CorruptError(
                "a weight file of this model must be a regular file, not a pipe or a device",
                where=str(file),
                hint="replace it with a copy of the weight file",
            )
        digest.update(f"{file.name} {_hash_of_file(file)}\n".encode())
    return "sha256:" + digest.hexdigest()


def _hash_of_file(file: Path) -> str:
    status = file.stat()
    # Without the device, whose number differs between machines that mount the same storage.
    version = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    return _hash_of_version(file.resolve(), version, status.st_size)


@functools.lru_cache(maxsize=256)
def _hash_of_version(file: Path, version: str, size: int) -> str:
    if size < MIN_REMEMBERED_BYTES:
        return _read_hash(file, size)
    try:
        stored = user_cache_folder() / "weight-hashes" / hashlib.sha256(os.fsencode(file)).hexdigest()[:32]
    except RuntimeError:  # there is no cache folder
        return _read_hash(file, size)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known, _, stored_hash = stored.read_text().partition("\n")
        if known == version and len(stored_hash) == hashlib.sha256().digest_size * 2:
            return stored_hash
    stored_hash = _read_hash(file, size)
    with contextlib.suppress(OSError):  # if it cannot be stored, it is computed again
        stored.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(stored) as temporary:
            temporary.write_text(f"{version}\n{stored_hash}")
    return stored_hash


def _read_hash(file: Path, size: int) -> str:
    def read(start: int) -> bytes:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            return stream.read(CHUNK_BYTES)

    return hash_chunks(read, range(0, size, CHUNK_BYTES))


def hash_chunks(read: Callable[[int], bytes], starts: Iterable[int]) -> str:
    """Return the hash of the hashes of chunks, which threads read from their first bytes, `_THREADS` at a time."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="xtk-hash") as pool:
        hashes = pool.map(lambda start: hashlib.sha256(read(start)).digest(), starts)
        return hashlib.sha256(b"".join(hashes)).hexdigest()
