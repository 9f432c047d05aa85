"""Models without weights, which each process of a sharded run reads after sharding: its shards only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.models.safetensors_headers import read_weight_headers
from xtk.models.small_copy import small_copy

_FLOATS = ("F64", "F32", "F16", "BF16")


def load_without_weights(ref: ModelRef, options: Mapping[str, Any]) -> Any | None:
    """Return a model on the meta device whose weights are tensors of its files; None if there is no such model.

    The files of some models have other names or shapes than the model, which transformers converts while it reads them.
    Buffers that are in no file are on the CPU and have their values.
    `options`: arguments of `from_pretrained`.
    """
    try:
        model = load_causal_lm(ref, options={**options, "device_map": {"": "meta"}})
        small_copy(model, torch.device("cpu"))
    except Exception:  # loading the weights fails with the same error; or tests need the model itself
        return None
    is_plain = not getattr(model, "quantization_method", None) and not getattr(model, "_weight_conversions", None)
    return model if is_plain and _matches_files(model, ref) and _compute_buffers(model) else None


def _matches_files(model: Any, ref: ModelRef) -> bool:
    """Return whether the files have each tensor of the model once: of tied ones, under one of their names."""
    stored = read_weight_headers(ref.folder)
    counts: dict[int, int] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kind, shape = stored.get(name, ("", ()))
        is_same = kind in _FLOATS and shape == tuple(tensor.shape) and tensor.is_meta
        if kind and not is_same:
            return False
        counts[id(tensor)] = counts.get(id(tensor), 0) + bool(kind)
    tied = getattr(model, "all_tied_weights_keys", {}).items()
    return set(counts.values()) == {1} and not any({name, source} <= stored.keys() for name, source in tied)


def _compute_buffers(model: Any) -> bool:
    """Compute the buffers that are in no file; return whether transformers determines each of their values."""
    computed: list[list[Tensor]] = []
    for initial in (0, 1):
        buffers = []
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                if (buffer := module._buffers[name]) is not None:
                    module._buffers[name] = torch.full_like(buffer, initial, device="cpu")
                    module._is_hf_initialized = False
                    buffers.append((module, name))
        with torch.random.fork_rng(devices=[]):
            model.initialize_weights()
        computed.append([module._buffers[name] for module, name in buffers])
    return all(itertools.starmap(torch.equal, zip(*computed, strict=True)))
