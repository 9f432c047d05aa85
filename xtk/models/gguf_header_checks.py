"""Checks of the values and the layout that the header of a GGUF file states, before anything is allocated for them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")
# Keys of sizes that tensors have: embedding_length, head_count_kv, vocab_size. A context is not a size of a tensor.
_SIZE_KEY = re.compile(r"(?<!context)_(length|count)(_\w+)?$|\.vocab_size$")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the header of a GGUF file: its shape, its bytes, and its offset from the end of the header."""

    shape: tuple[int, ...]
    num_bytes: int
    offset: int


def header_faults(fields: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> Iterator[str]:
    """Yield what cannot be right in a header: a layout that llama.cpp refuses too, or a value outside of its range.

    Args:
        tensors: {name: tensor}, in the order of the file.
    """
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        yield f"general.alignment is {alignment!r}, not a power of 2"
        return
    end = 0
    for name, tensor in tensors.items():
        if tensor.offset != end:  # overlaps another tensor, is not aligned, or leaves a gap
            yield f"tensor {name!r} is at offset {tensor.offset:,}, but the one before it ends at {end:,}"
        end = -(-(tensor.offset + tensor.num_bytes) // alignment) * alignment
    num_blocks = len({block[1] for name in tensors if (block := _BLOCK.search(name))})
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    prefix = f"{fields.get('general.architecture', '')}."
    for key, value in fields.items():
        if not key.startswith(prefix):
            continue
        if isinstance(value, float):
            if (expected := _expected_float(key, value)) is not None:
                yield f"{key} is {value}, but must be {expected}"
        elif key.endswith("block_count"):
            if not 0 <= value <= num_blocks:
                yield f"{key} is {value:,}, but the file has the tensors of {num_blocks:,} blocks"
        elif _SIZE_KEY.search(key) and not 0 <= value <= largest:
            yield f"{key} is {value:,}, but the largest dimension of a tensor is {largest:,}"


def _expected_float(key: str, value: float) -> str | None:
    """Return what a value must be; None if it is."""
    if not math.isfinite(value):
        return "finite"
    if key.endswith("epsilon") and not 0 < value < 1:
        return "between 0 and 1"
    if "freq_base" in key and value <= 0:
        return "positive"
    return "at least 0" if key.endswith(("rope.scaling.factor", "rope.scale_linear")) and value < 0 else None
