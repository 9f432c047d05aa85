"""Names, dtypes and shapes of a model's weights, from safetensors headers only."""

from __future__ import annotations

import json
from pathlib import Path

from xtk.errors import CorruptError

SINGLE_FILE, INDEX_FILE, ADAPTER_FILE = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_HINT = "copy or download the model again"


def weight_files(folder: Path, *, allow_missing: bool = False) -> list[Path]:
    """Return the safetensors files from which transformers or peft loads the weights of a folder; may be empty.

    That is `model.safetensors`, else the shards in the index, else the adapter's file, else all safetensors files.

    Args:
        folder: folder of a model or an adapter.
        allow_missing: leave out files that are in the index but do not exist.

    Raises:
        CorruptError: the index cannot be read, contains a file of another folder or a missing file, or a weight file
            is a pipe or a device.
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
    """Return {tensor: file} from the index of sharded weights.

    Raises:
        CorruptError: it cannot be read, or contains a file of another folder.
    """
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
    """Return {name: (safetensors dtype, shape)} of the weights in a folder.

    Args:
        folder: folder of a model or an adapter.
        allow_missing: leave out files that are in the index but do not exist.

    Raises:
        CorruptError: a file is missing, not in safetensors format, or truncated.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder, allow_missing=allow_missing):
        tensors |= _read_header(path)
    return tensors


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(size)) if 0 < size < 1 << 30 else None
        except (ValueError, RecursionError):
            header = None
    try:
        header.pop("__metadata__", None)  # type: ignore[union-attr]
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)  # type: ignore[union-attr]
        tensors = {
            str(name): (str(tensor["dtype"]), tuple(int(size) for size in tensor["shape"]))
            for name, tensor in header.items()  # type: ignore[union-attr]
        }
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        what = "the weight file cannot be read: its safetensors header is invalid"
        raise CorruptError(what, where=str(path), hint=_HINT) from None
    if path.stat().st_size != 8 + size + end:
        actual, expected = path.stat().st_size, 8 + size + end
        what = f"the weight file has {actual:,} bytes, but its safetensors header requires {expected:,}"
        raise CorruptError(what, where=str(path), hint=_HINT)
    return tensors


def format_names(names: list[str]) -> str:
    """Return the first three names as text, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
