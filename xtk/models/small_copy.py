"""Small random copies of models.

How a model computes its logits, and whether its attention separates packed documents, follows from its code and its
configuration. Tests of them on a small copy need neither the weights nor their dtype or device.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

LARGEST_SIZE = 32  # of the vocabulary, and of the hidden layers of MLPs and experts
WINDOW = 3  # tokens of sliding windows and chunks of attention: less than a document of the tests
_SIZE = re.compile("vocab_size|intermediate|ffn|^n_inner$")
_WINDOW = re.compile("^(sliding_window|attention_chunk_size)$")
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers")
_POSITION_IN_MODEL = re.compile("idx|index|number|_id$")  # attributes of layers that count them


def small_copy(model: Any, device: torch.device) -> Any:
    """Return a transformers model of the same class and configuration, but small: random float32, for evaluation.

    Its layers are the first ones of the model, as many as have one of each kind. Vocabulary, MLPs and windows are
    smaller. It has the default attention implementation.

    Args:
        model: without peft's wrapper; its weights are not read, and may be on the meta device.
        device: device of the copy.

    Raises:
        Exception: of any type, if the class does not support such a configuration.
    """
    configuration = copy.deepcopy(model.config)
    configuration._attn_implementation = None
    if hasattr(configuration, "quantization_config"):
        del configuration.quantization_config
    text = configuration.get_text_config()
    for part in _parts(configuration):
        if part is text:
            _reduce_text(part, _num_layers(model, text.num_hidden_layers))
        elif hasattr(part, "get_text_config") and part.get_text_config() is part:  # images or sound
            for name in _DEPTHS:
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(model)._from_config(configuration, dtype=torch.float32)
    return small.to(device).eval()


def _parts(configuration: Any) -> Iterator[Any]:
    """Return a configuration and those in it."""
    yield configuration
    for part in vars(configuration).values():
        if hasattr(part, "to_dict"):
            yield from _parts(part)


def _reduce_text(configuration: Any, num_layers: int) -> None:
    full_depth = configuration.num_hidden_layers
    for name, value in list(vars(configuration).items()):
        reduced = value
        if isinstance(value, list | tuple) and len(value) == full_depth:
            reduced = value[:num_layers]
        if limit := WINDOW if _WINDOW.search(name) else LARGEST_SIZE if _SIZE.search(name) else 0:
            if type(reduced) is int:
                reduced = min(reduced, limit)
            elif isinstance(reduced, list | tuple) and all(type(size) is int for size in reduced):
                reduced = [min(size, limit) for size in reduced]
        if reduced is not value:
            setattr(configuration, name, reduced)
    configuration.num_hidden_layers = num_layers
    if (getattr(configuration, "pad_token_id", None) or 0) >= LARGEST_SIZE:
        configuration.pad_token_id = 0


def _num_layers(model: Any, full_depth: int) -> int:
    """Return the number of first layers, at least two, that include one of each kind."""
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == full_depth]
    kinds = [_kind(layer) for layer in lists[-1]] if lists else list(range(full_depth))
    return max([min(2, full_depth), *(kinds.index(kind) + 1 for kind in kinds)])


def _kind(layer: nn.Module) -> list[Any]:
    """Return types and scalar attributes of the modules of a layer."""
    return [
        (name, type(module).__name__, [
            (key, value) for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not _POSITION_IN_MODEL.search(key)
        ])
        for name, module in layer.named_modules()
    ]  # fmt: skip


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products without TF32."""
    settings = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", False)
    before = getattr(settings, name)
    setattr(settings, name, exact)
    try:
        yield
    finally:
        setattr(settings, name, before)
