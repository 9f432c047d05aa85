"""GGUF models as ordinary model folders, converted once into the user's cache folder."""

from __future__ import annotations

import contextlib
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import (
    canonical_json,
    read_json,
    set_default_permissions,
    sha256,
    sha256_of_file,
    write_json,
)
from xtk.files.output import fsync_folder, write_output_folder, writer_lock
from xtk.models.gguf_to_huggingface import convert_gguf
from xtk.models.weight_hash import hash_weights
from xtk.writable_cache_folders import user_cache_folder

GGUF_RECORD = "gguf.json"
CONVERSION_VERSION = 3  # increased when the conversion gives other files
_KEY_LENGTH = 24


def is_gguf_file(path: Path) -> bool:
    """Return whether a file is named .gguf, or begins as GGUF files do."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as stream:
        return stream.read(4) == b"GGUF"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a model argument means: a file, or the only one in a folder without other weights.

    Files with `mmproj` in their name are encoders of images or sound, which xtk does not use.
    """
    if not path.is_dir():
        return path if path.is_file() and is_gguf_file(path) else None
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    models = sorted(file for file in path.glob("*.gguf") if file.is_file() and "mmproj" not in file.name.lower())
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:5])
        raise XtkError(
            f"this folder contains {len(models)} GGUF models: {names}", where=str(path), hint=f"use one: {models[0]}"
        )
    return models[0] if models else None


def gguf_model_folder(path: Path) -> Path:
    """Return the model folder of a GGUF file; the first call converts it.

    The folder is in `gguf` of `user_cache_folder`, named by the file and its checksum.
    """
    status = path.stat()
    key = _checksum(path.resolve(), status.st_size, status.st_mtime_ns)
    try:
        cache = user_cache_folder() / "gguf"
    except RuntimeError as failure:
        raise XtkError(
            f"the cache folder for converted GGUF models cannot be found: {failure}", hint="set XTK_CACHE=FOLDER"
        ) from None
    short = f"{key.removeprefix('sha256:')[:_KEY_LENGTH]}-{CONVERSION_VERSION}"
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem).strip("-.")[:80] or "model"  # hidden folders are not searched
    folder = cache / f"{name}-{short}"
    if (converted := _find_converted(cache, short)) is not None:
        return converted
    cache.mkdir(parents=True, exist_ok=True)
    with writer_lock(cache / short, "converted model", seconds=-1):
        if (converted := _find_converted(cache, short)) is not None:  # by another process meanwhile
            return converted
        for incomplete in cache.glob(f"[!.]*-{short}"):  # files were removed from it
            shutil.rmtree(incomplete, ignore_errors=True)
        try:
            return _convert(path, key, folder)
        except OSError as failure:
            # Without locks, another process may have renamed its own.
            if (converted := _find_converted(cache, short)) is not None:
                return converted
            raise XtkError(
                f"the model folder of a GGUF file cannot be written: {str(failure.strerror or failure).lower()}",
                where=str(folder),
                hint="remove what is at this path, free some space, or set XTK_CACHE=FOLDER",
            ) from failure


def gguf_fingerprint(folder: Path, fingerprint: str) -> str | None:
    """Return the checksum of the GGUF file that a folder was converted from; None for other or changed weights."""
    record = _read_record(folder)
    return record["gguf"] if record is not None and record.get("weights") == fingerprint else None


def gguf_name(folder: Path) -> str | None:
    """Return the name of the GGUF file that a folder was converted from, without its suffix; None for other folders."""
    match = re.fullmatch(rf"(.+)-[0-9a-f]{{{_KEY_LENGTH}}}-\d+", folder.resolve().name)
    return match[1] if match and _read_record(folder) is not None else None


@lru_cache
def _checksum(path: Path, size: int, modified: int) -> str:
    return sha256_of_file(path)


def _find_converted(cache: Path, key: str) -> Path | None:
    """Return a complete conversion of a GGUF file; its name is that of the file at the first conversion."""
    for folder in sorted(cache.glob(f"[!.]*-{key}")):
        record = _read_record(folder)
        files = {} if record is None else record["files"]
        if files and all((folder / name).is_file() and (folder / name).stat().st_size == size
                         for name, size in files.items()):  # fmt: skip
            return folder
    return None


def _read_record(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, CorruptError):
        if (folder / GGUF_RECORD).is_file():
            record = read_json(folder / GGUF_RECORD)
            return record if isinstance(record.get("gguf"), str) and isinstance(record.get("files"), dict) else None
    return None


def _convert(path: Path, checksum: str, folder: Path) -> Path:
    """Convert a GGUF file to a temporary folder, and rename it."""
    terminal.note(f"converting {path} to a model folder, once: {folder}")
    with write_output_folder(folder) as temporary:
        scaling = convert_gguf(path, temporary)
        set_default_permissions(*temporary.glob("*.safetensors"))
        files = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        weights = hash_weights(temporary)
        if scaling is not None:  # earlier conversions left it out: other predictions with the same checksum
            checksum = sha256(checksum + canonical_json(scaling))
        write_json(temporary / GGUF_RECORD, {"gguf": checksum, "weights": weights, "files": files})
        fsync_folder(temporary)
    return folder
