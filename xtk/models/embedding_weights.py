"""Reading of a model's input embedding matrix without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import CorruptError, XtkError

# Tensor names in different model families, after any prefix ("model.", "language_model.model.", "transformer.", none).
EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_DTYPES: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def read_input_embedding(folder: Path) -> NDArray[np.float32]:
    """Return float32 [V, H], the input embedding matrix of a model folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise XtkError(
            "this folder contains no weights (*.safetensors), which this method needs for the input embedding",
            where=str(folder),
            hint="use a model folder with weights, or another --method, which needs only the tokenizers",
        )
    entries = [(file, name, entry) for file in files for name, entry in _tensor_entries(file).items()
             if name.endswith(EMBEDDING_NAMES) and len(entry["shape"]) == 2]  # fmt: skip
    if not entries:
        raise XtkError(
            "the weights of this model contain no input embedding",
            where=str(folder),
            hint=f"use a model whose embedding tensor has a name that ends in {', '.join(EMBEDDING_NAMES)}",
        )
    # If a model has several (such as a vision tower), the text embedding has the most rows.
    file, name, entry = max(entries, key=lambda each: each[2]["shape"][0])
    if entry["dtype"] not in _DTYPES:
        raise XtkError(
            f"this model's input embedding has dtype {entry['dtype']}, which this method does not support",
            where=f"{file}: {name}",
            hint=f"convert the weights to one of {', '.join(_DTYPES)}",
        )
    kind = _DTYPES[entry["dtype"]]
    try:
        raw: Any = np.memmap(file, kind, "r", offset=entry["start"], shape=tuple(entry["shape"]))
    except ValueError:
        raise CorruptError("this weight file is truncated", where=str(file), hint="download or copy it again") from None
    if entry["dtype"] == "BF16":  # the upper half of a float32
        raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.array(raw, np.float32)


def _tensor_entries(file: Path) -> dict[str, dict[str, Any]]:
    """Return dtype, shape and byte offset of each tensor, from the header of a safetensors file."""
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
        raise CorruptError(
            "this is not a complete safetensors file", where=str(file), hint="download or copy it again"
        ) from None
