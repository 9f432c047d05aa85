"""Weights of a model folder without torch: names, dtypes, shapes, differences from the model, the input embedding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import CorruptError, XtkError

SINGLE_FILE, INDEX_FILE, ADAPTER_FILE = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_HINT = "copy or download the model again"


def weight_files(folder: Path, *, allow_missing: bool = False) -> list[Path]:
    """Return the safetensors files from which transformers or peft loads the weights of a folder; may be empty.

    That is `model.safetensors`, else the shards in the index, else the adapter's file, else all safetensors files.
    `allow_missing`: leave out files that are in the index but do not exist, instead of an error.
    """
    for path in folder.glob("*.safetensors"):
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise CorruptError("the weight file is not a regular file", where=str(path), hint=_HINT)
    for name in (SINGLE_FILE,) if (folder / INDEX_FILE).is_file() else (SINGLE_FILE, ADAPTER_FILE):
        if (folder / name).is_file():
            return [folder / name]
    if not (folder / INDEX_FILE).is_file():
        return sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    names = sorted(set(read_weight_index(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and allow_missing:
        return [folder / name for name in names if name not in missing]
    if missing:
        what = f"{len(missing):,} of {len(names):,} weight files in the index do not exist: {format_names(missing)}"
        raise CorruptError(what, where=str(folder / INDEX_FILE), hint=_HINT)
    return [folder / name for name in names]


def read_weight_index(folder: Path) -> dict[str, str]:
    """Return {tensor: file} from the index of sharded weights."""
    path = folder / INDEX_FILE
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(file) for name, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptError("the index of the model's weight files is not valid", where=str(path), hint=_HINT) from None
    for file in pairs.values():
        if Path(file).name != file or "\0" in file:
            what = f"the index of the model's weight files has a path outside of the model folder: {file!r}"
            raise CorruptError(what, where=str(path), hint=_HINT)
    return pairs


def read_weight_headers(folder: Path, *, allow_missing: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (safetensors dtype, shape)} of the weights of a model or an adapter; see `weight_files`."""
    files = weight_files(folder, allow_missing=allow_missing)
    return {name: entry for path in files for name, entry in read_file_header(path).items()}


def read_file_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype, shape)}."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            slices = {str(name): file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as failure:
        raise CorruptError(f"the weight file cannot be read: {failure}", where=str(path), hint=_HINT) from None
    return {name: (str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}


def format_names(names: list[str]) -> str:
    """Return the first three names as text, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class WeightMismatches:
    """Weights that differ between files and model, sorted by name."""

    missing: tuple[str, ...] = ()  # in the model but not in the files: transformers initializes them randomly
    unexpected: tuple[str, ...] = ()  # in the files but not in the model
    # (name, shape in the file, shape in the model) where the shapes differ.
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @classmethod
    def from_loading_info(cls, loading_info: Mapping[str, Any]) -> Self:
        """Return the mismatches in transformers' loading info, which leaves out tied heads and known buffers."""
        reshaped = {(str(name), tuple(stored), tuple(own)) for name, stored, own in loading_info["mismatched_keys"]}
        missing, unexpected = (tuple(sorted(loading_info[name])) for name in ("missing_keys", "unexpected_keys"))
        return cls(missing, unexpected, tuple(sorted(reshaped)))

    def check(self, folder: Path, *, quiet: bool = False) -> None:
        """Refuse missing weights and other shapes; print a note on unexpected weights, once per folder."""
        if self.missing:
            missing = format_names(list(self.missing))
            what = f"the model's files lack {len(self.missing):,} of its weights: {missing}"
            raise CorruptError(what, where=str(folder), hint=_HINT)
        if self.reshaped:
            shapes = [f"{name} {list(stored)} instead of {list(own)}" for name, stored, own in self.reshaped]
            raise CorruptError(
                f"{len(shapes):,} weights do not have the shapes of the configuration: {format_names(shapes)}",
                where=str(folder),
                hint="use the config.json that belongs to these weights, or download the model again",
            )
        if self.unexpected and not quiet:
            names = format_names(list(self.unexpected))
            terminal.note_once(f"warning: {folder}: the model does not use {len(self.unexpected):,} weights ({names})")


# Tensor names in different model families, after any prefix ("model.", "language_model.model.", "transformer.", none).
EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_DTYPES = ("F32", "F16", "BF16")


def read_input_embedding(folder: Path) -> NDArray[np.float32]:
    """Return float32 [V, H], the input embedding matrix of a model folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise XtkError(
            "this folder contains no weights (*.safetensors), which this method needs for the input embedding",
            where=str(folder),
            hint="use a model folder with weights, or another --method, which needs only the tokenizers",
        )
    entries = [(file, name, *entry) for file in files for name, entry in read_file_header(file).items()
               if name.endswith(EMBEDDING_NAMES) and len(entry[1]) == 2]  # fmt: skip
    if not entries:
        raise XtkError(
            "the weights of this model contain no input embedding",
            where=str(folder),
            hint=f"use a model whose embedding tensor has a name that ends in {', '.join(EMBEDDING_NAMES)}",
        )
    # If a model has several (such as a vision tower), the text embedding has the most rows.
    file, name, dtype, _ = max(entries, key=lambda entry: entry[3][0])
    if dtype not in _DTYPES:
        raise XtkError(
            f"this model's input embedding has dtype {dtype}, which this method does not support",
            where=f"{file}: {name}",
            hint=f"convert the weights to one of {', '.join(_DTYPES)}",
        )
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        embedding: NDArray[np.float32] = stream.get_tensor(name).float().numpy()
    return embedding
