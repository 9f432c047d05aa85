"""Headers of GGUF files: architecture, tokenizer type, and whether the file is complete; weights are not read."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.errors import CorruptError, XtkError

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
# struct formats of the value types of the GGUF specification (ggml/docs/gguf.md); 8 is a string, 9 an array.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_HINT = "download or copy the file again"


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    architecture: str  # `general.architecture`, such as "llama"
    tokenizer: str  # `tokenizer.ggml.model`, such as "gpt2"; "" if the file has no tokenizer
    pre_tokenizer: str  # `tokenizer.ggml.pre`, such as "smollm"; "" if the file states none
    # The fields of `ARCHITECTURE.rope.scaling.`, such as {"type": "yarn", "factor": 4.0}.
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    tensor_sizes: dict[str, int] = field(default_factory=dict)  # {name: number of values} of all tensors


def is_gguf_file(path: Path) -> bool:
    """Return whether a file is named .gguf, or begins as GGUF files do."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as stream:
        return stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file after checking its values, and that all tensors are inside of the file."""
    size = path.stat().st_size
    if size < 24:
        raise CorruptError(f"this GGUF file is truncated: it has {size:,} bytes", where=str(path), hint=_HINT)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            fields, tensors, end_of_header = _parse(content, path)
            num_parts = int(fields.get("split.count", 1))
        except (struct.error, ValueError, TypeError, KeyError, OverflowError, IndexError):
            raise CorruptError(
                "this GGUF file is truncated or corrupt: its header cannot be read", where=str(path), hint=_HINT
            ) from None
    fault = next(header_faults(fields, tensors), None)
    if fault is not None:
        raise CorruptError(f"this GGUF file is corrupt: {fault}", where=str(path), hint=_HINT)
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    start = -(-end_of_header // alignment) * alignment
    end = start + max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
    if end > size:
        what = f"this GGUF file is truncated: it has {size:,} bytes, but its tensors need {end:,}"
        raise CorruptError(what, where=str(path), hint=_HINT)
    if num_parts > 1:
        raise XtkError(
            f"this GGUF file is one of {num_parts} parts of a model",
            where=str(path),
            hint="merge the parts with llama.cpp: llama-gguf-split --merge FIRST_PART model.gguf",
        )
    names = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    texts = [str(fields.get(name, "")) for name in names]
    prefix = f"{texts[0]}.rope.scaling."
    scaling = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    if f"{texts[0]}.rope.scale_linear" in fields:  # in old files
        scaling = {"type": "linear", "factor": fields[f"{texts[0]}.rope.scale_linear"], **scaling}
    tensor_sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    return GgufHeader(texts[0], texts[1], texts[2], scaling, tensor_sizes)


def _parse(content: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    """Return the fields of the header without arrays, {name: tensor} in the order of the file, and where it ends."""
    if content[:4] != GGUF_MAGIC:
        raise CorruptError("this is not a GGUF file: it does not begin with GGUF", where=str(path), hint=_HINT)
    version, num_tensors, num_fields = struct.unpack_from("<IQQ", content, 4)
    if version not in VERSIONS:
        raise XtkError(
            f"this GGUF file has version {version}; this xtk reads versions {' and '.join(map(str, VERSIONS))}",
            where=str(path),
            hint="convert the model again with a current llama.cpp",
        )
    at, fields, tensors = 24, dict[str, Any](), dict[str, GgufTensor]()
    for _ in range(num_fields):
        name, at = _read_string(content, at)
        (kind,) = struct.unpack_from("<I", content, at)
        if name in fields:  # libraries differ in the one they take
            raise ValueError(name)
        fields[name], at = _read_value(content, at + 4, kind)
    for _ in range(num_tensors):
        name, at = _read_string(content, at)
        (num_dimensions,) = struct.unpack_from("<I", content, at)
        if name in tensors or num_dimensions > MAX_DIMENSIONS:
            raise ValueError(name)
        shape = struct.unpack_from(f"<{num_dimensions}Q", content, at + 4)
        kind, offset = struct.unpack_from("<IQ", content, at + 4 + 8 * num_dimensions)
        at += 16 + 8 * num_dimensions
        tensors[name] = GgufTensor(shape, _tensor_bytes(kind, shape, path), offset)
    return fields, tensors, at


def _tensor_bytes(kind: int, shape: tuple[int, ...], path: Path) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise XtkError(
            f"this GGUF file has weights of type {kind}, which the package gguf does not know",
            where=str(path),
            hint="upgrade the package gguf, or use a GGUF of another type, such as Q8_0; or download the file again",
        ) from None
    if 0 in shape or (shape and shape[0] % int(block)):  # blocks of quantized weights do not cross rows
        raise ValueError(shape)
    return math.prod(shape) // int(block) * int(block_bytes)


def _read_string(content: mmap.mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", content, at)
    at += 8
    if at + length > len(content):
        raise IndexError(at)
    return content[at : at + length].decode("utf-8"), at + length


def _read_value(content: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """Return a value and where it ends; None for an array."""
    if kind == _STRING:
        return _read_string(content, at)
    if kind != _ARRAY:
        return struct.unpack_from(f"<{_FORMATS[kind]}", content, at)[0], at + struct.calcsize(f"<{_FORMATS[kind]}")
    of, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if of in _FORMATS:
        return None, at + count * struct.calcsize(f"<{_FORMATS[of]}")
    if of != _STRING or count > len(content):  # no writer makes arrays of arrays
        raise ValueError(of)
    for _ in range(count):
        at += 8 + int(struct.unpack_from("<Q", content, at)[0])
    return None, at


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
    """Yield what cannot be right in a header: a layout that llama.cpp refuses too, or a value outside of its range."""
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
