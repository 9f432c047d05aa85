"""The weights of a model as the headers of its files tell them, without reading them."""

from __future__ import annotations

import json
from pathlib import Path

from xtk.errors import Damaged


def weight_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {name: (dtype as safetensors calls it, shape)} of the weights in a folder.

    Raises:
        Damaged: a file is no safetensors, or cut short.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(size)) if 0 < size < 1 << 30 else None
            except ValueError:
                header = None
        if not isinstance(header, dict):
            raise Damaged("the weights cannot be read", where=str(path), hint="copy or download the model again")
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if path.stat().st_size != 8 + size + end:
            raise Damaged("the weights are cut short", where=str(path), hint="copy or download the model again")
        tensors |= {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in header.items()}
    return tensors
