"""Hash of the weights of a model folder, from blocks of its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from xtk.artifacts.atomic_files import read_json
from xtk.errors import CorruptError
from xtk.tokens.model_config_json import read_model_config

ADAPTER_CONFIG = "adapter_config.json"
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 16, 64


def hash_weights(folder: Path) -> str:
    """Return "sha256:..." of the weights in a folder.

    Hashes the configuration, the names and sizes of the weight files and 64 evenly spaced blocks of 64 KiB of each
    (all of small files): training changes every block, and hashing hundreds of gigabytes would take minutes.

    Raises:
        CorruptError: a weight file is a pipe or a device.
    """
    digest = hashlib.sha256()
    for content in (
        read_model_config(folder),
        read_json(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else {},
    ):
        if content:
            for name in ("transformers_version", "base_model_name_or_path"):  # do not depend on the weights
                content.pop(name, None)
            digest.update(json.dumps(content, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    for file in files:
        if not file.is_file():  # reading a pipe would block
            raise CorruptError(
                "a weight file of this model must be a regular file, not a pipe or a device",
                where=str(file),
                hint="replace it with a copy of the weight file",
            )
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for offset in sorted({max(0, size - _BLOCK_BYTES) * at // (_NUM_BLOCKS - 1) for at in range(_NUM_BLOCKS)}):
                stream.seek(offset)
                digest.update(stream.read(_BLOCK_BYTES))
    return "sha256:" + digest.hexdigest()
