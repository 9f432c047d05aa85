"""Scaled rotary position embeddings of GGUF models, which transformers' loader ignores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from xtk.errors import XtkError
from xtk.models.gguf_header import GgufHeader

FREQUENCY_FACTORS = "rope_freqs.weight"  # what each frequency is divided by; llama.cpp's form of Llama 3's scaling
LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3's scaling: no public model has other values of these, and a file has only their result.
_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR = 1.0, 4.0
_ORIGINAL_CONTEXTS = tuple(2**power for power in range(11, 18))
_TOLERANCE = 1e-3


def rope_scaling(path: Path, header: GgufHeader, *, theta: float) -> dict[str, Any] | None:
    """Return the scaling of a GGUF model's rotary embedding as transformers' `rope_parameters`; None without any."""
    stated = header.rope_scaling
    kind = str(stated.get("type", "none"))
    factor = float(stated.get("factor", 1.0))
    if any(name in header.tensor_sizes for name in LONG_ROPE):
        raise _unknown(path, "longrope")
    if FREQUENCY_FACTORS in header.tensor_sizes:
        factors = _read_tensor(path, FREQUENCY_FACTORS)
        if not np.allclose(factors, 1.0):
            if kind != "none":
                raise _unknown(path, f"{kind} with a factor for each frequency")
            return _llama3(path, factors, theta)
    if kind == "none" or factor in (0.0, 1.0):  # 0: not scaled, as in llama.cpp
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    usual = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    if kind != "yarn" or any(not math.isclose(float(stated.get(name, value)), value) for name, value in usual.items()):
        raise _unknown(path, kind)
    if "original_context_length" not in stated:
        raise _unknown(path, "yarn without the original context length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(stated["original_context_length"]),
        "beta_fast": float(stated.get("yarn_beta_fast", 32.0)),
        "beta_slow": float(stated.get("yarn_beta_slow", 1.0)),
    }


def _llama3(path: Path, factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling that give these factors."""
    largest = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    for context in _ORIGINAL_CONTEXTS:
        parts = (context / wavelengths - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
        smooth = np.clip(parts, 0.0, 1.0)
        if np.allclose(1 / ((1 - smooth) / largest + smooth), factors, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW_FREQUENCY_FACTOR,
                "high_freq_factor": _HIGH_FREQUENCY_FACTOR,
                "original_max_position_embeddings": context,
            }
    raise _unknown(path, "other factors of the frequencies than Llama 3's")


def _read_tensor(path: Path, name: str) -> np.ndarray:
    from gguf import GGUFReader, dequantize

    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float64).reshape(-1)


def _unknown(path: Path, what: str) -> XtkError:
    return XtkError(
        f"transformers cannot read this GGUF model's scaling of rotary positions ({what})",
        where=str(path),
        hint="use the model's original folder or hub id instead of the GGUF file",
    )
