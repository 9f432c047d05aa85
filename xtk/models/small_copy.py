"""Small random copies of models.

How a model computes its logits, and whether its attention separates packed documents, follows from its code and its
configuration. Tests of them on a small copy need neither the weights nor their dtype or device.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

# Integers of a configuration by name, and their largest value in a copy. A window is shorter than a tested document.
LIMITS = {"vocab_size|intermediate|ffn|^n_inner$": 32, "^(sliding_window|attention_chunk_size)$": 3}
_LAYER_NUMBER = re.compile("idx|index|number|_id$")  # attributes that differ between layers of one kind


def small_copy(model: Any, device: torch.device) -> Any:
    """Return a small model of the same class with random float32 weights, in evaluation mode.

    Its layers are the first ones of the model, as many as include one of each kind. Vocabulary, MLPs and windows are
    smaller; it has the default attention implementation. The weights of the model, without peft's wrapper, are not read
    and may be on the meta device. A class that does not support such a configuration raises any exception.
    """
    configuration = copy.deepcopy(model.config)
    configuration._attn_implementation = None
    if hasattr(configuration, "quantization_config"):
        del configuration.quantization_config
    text = configuration.get_text_config()
    _reduce(text, _num_layers(model, text.num_hidden_layers))
    for part in (getattr(configuration, name) for name in configuration.sub_configs):
        for name in ("num_hidden_layers", "depth", "encoder_layers") if part is not text else ():  # images or sound
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 1)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        small = type(model)._from_config(configuration, dtype=torch.float32)
    return small.to(device).eval()


def _reduce(configuration: Any, num_layers: int) -> None:
    full_depth = configuration.num_hidden_layers
    for name, value in list(vars(configuration).items()):
        is_list = isinstance(value, list | tuple)
        given = list(value) if is_list else [value]
        reduced = given[:num_layers] if is_list and len(given) == full_depth else given
        for pattern, limit in LIMITS.items():
            if re.search(pattern, name):
                reduced = [min(size, limit) if type(size) is int else size for size in reduced]
        if reduced != given:
            setattr(configuration, name, reduced if is_list else reduced[0])
    configuration.num_hidden_layers = num_layers
    if (getattr(configuration, "pad_token_id", None) or 0) >= configuration.vocab_size:
        configuration.pad_token_id = 0


def _num_layers(model: Any, full_depth: int) -> int:
    """Return the number of first layers, at least two, that include one of each kind."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == full_depth]
    kinds = [_kind(layer) for layer in lists[-1]] if lists else []
    return max([min(2, full_depth), *(kinds.index(kind) + 1 for kind in kinds)]) if kinds else full_depth


def _kind(layer: nn.Module) -> list[Any]:
    """Return types and scalar attributes of the modules of a layer."""
    kind: list[Any] = []
    for name, module in layer.named_modules():
        scalars = [item for item in vars(module).items() if isinstance(item[1], bool | int | float | str)]
        kind.append((name, type(module), [item for item in scalars if not _LAYER_NUMBER.search(item[0])]))
    return kind
