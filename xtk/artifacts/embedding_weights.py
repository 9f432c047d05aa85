"""The input embedding of a model folder, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import CorruptError, XtkError

# What families call it, under any prefix ("model.", "language_model.model.", "transformer.", none).
EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_DTYPES: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_input_embedding(folder: Path) -> NDArray[np.float32]:
    """Read the matrix from tokens to vectors.

    Returns:
        float32 [V, H].

    Raises:
        XtkError: the folder holds no weights in safetensors, or no input embedding among them.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise XtkError(
            "there are no weights in this folder (*.safetensors), and this method compares embeddings",
            where=str(folder),
            hint="another --method needs the tokenizers alone",
        )
    found = [(file, name, entry) for file in files for name, entry in _tensor_entries(file).items()
             if name.endswith(EMBEDDING_NAMES) and len(entry["shape"]) == 2]  # fmt: skip
    if not found:
        raise XtkError(
            "there is no input embedding among these weights",
            where=str(folder),
            hint=f"one of: {', '.join(EMBEDDING_NAMES)}",
        )
    # Of a model with several (a vision tower's, say), the text's is the one with the most rows.
    file, name, entry = max(found, key=lambda each: each[2]["shape"][0])
    if entry["dtype"] not in _DTYPES:
        raise XtkError(f"embeddings of type {entry['dtype']} cannot be read", where=f"{file}: {name}")
    kind = _DTYPES[entry["dtype"]]
    try:
        raw: Any = np.memmap(file, kind, "r", offset=entry["start"], shape=tuple(entry["shape"]))
    except ValueError:
        raise CorruptError("these weights are cut short", where=str(file)) from None
    if entry["dtype"] == "BF16":  # the upper half of a float32
        raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.array(raw, np.float32)


def _tensor_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and place of each tensor, from the header."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > 100_000_000:
                raise ValueError("not a safetensors file")
            header = json.loads(stream.read(size))
        return {
            name: {"dtype": entry["dtype"], "shape": entry["shape"], "start": 8 + size + entry["data_offsets"][0]}
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError("this file holds no weights, or it is cut short", where=str(file)) from None
