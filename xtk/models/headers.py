"""The weights of a model as the headers of its files describe them, without reading the weights."""

from __future__ import annotations

import json
from pathlib import Path

from xtk.errors import Damaged

WHOLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_HINT = "copy or download the model again"


def weight_files(folder: Path, *, partial: bool = False) -> list[Path]:
    """Return the files of safetensors from which transformers or peft loads the weights in a folder; none if none is.

    That is `model.safetensors`, else the shards that the index names, else an adapter's file, else all there are.

    Args:
        folder: of a model or of an adapter.
        partial: leave out files that the index names and that do not exist.

    Raises:
        Damaged: the index cannot be read, names a file of another folder, or names files that do not exist.
    """
    for name in (WHOLE,) if (folder / INDEX).is_file() else (WHOLE, ADAPTER):
        if (folder / name).is_file():
            return [folder / name]
    if not (folder / INDEX).is_file():
        return sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    names = sorted(set(indexed(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and partial:
        return [folder / name for name in names if name not in missing]
    if missing:
        what = f"missing files of weights: {len(missing):,} of {len(names):,} ({some(missing)})"
        raise Damaged(what, where=str(folder / INDEX), hint=_HINT)
    return [folder / name for name in names]


def indexed(folder: Path) -> dict[str, str]:
    """Return {tensor: file} of the index of sharded weights.

    Raises:
        Damaged: it cannot be read, or names a file of another folder.
    """
    path = folder / INDEX
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(name): str(file) for name, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged("the index of the weights cannot be read", where=str(path), hint=_HINT) from None
    for file in pairs.values():
        if Path(file).name != file or "\0" in file:
            raise Damaged(f"the index of the weights names a file of another folder: {file!r}", where=str(path))
    return pairs


def weight_headers(folder: Path, *, partial: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype as safetensors calls it, shape)} of the weights in a folder.

    Args:
        folder: of a model or of an adapter.
        partial: leave out files that the index names and that do not exist.

    Raises:
        Damaged: a file is missing, is no safetensors, or is cut short.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder, partial=partial):
        tensors |= _header(path)
    return tensors


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(size)) if 0 < size < 1 << 30 else None
        except (ValueError, RecursionError):
            header = None
    try:
        header.pop("__metadata__", None)  # type: ignore[union-attr]
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)  # type: ignore[union-attr]
        found = {
            str(name): (str(tensor["dtype"]), tuple(int(one) for one in tensor["shape"]))
            for name, tensor in header.items()  # type: ignore[union-attr]
        }
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise Damaged("the weights cannot be read", where=str(path), hint=_HINT) from None
    if path.stat().st_size != 8 + size + end:
        raise Damaged("the weights are cut short", where=str(path), hint=_HINT)
    return found


def some(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
