"""Packed batches in models of other training loops."""

from __future__ import annotations

from typing import Any

from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import GENERAL_ATTENTION_NAME


def enable_packing(model: Any) -> None:
    """Make a model compute attention by document, for batches of `DistillationCollator(..., packing=True)`.

    A packed batch is one sequence [1, T] of several documents, whose `position_ids` restart at 0. Without this, models
    of transformers compute a mask [T, T] for it, which costs time and memory. Other inputs, padded batches and
    generation have the same results as before.

    Args:
        model: a causal language model of transformers; its attention implementation is changed.

    Raises:
        XtkError: the architecture cannot separate packed documents.
    """
    split_packed_model(model)


def split_packed_model(model: Any) -> BackboneWithHead:
    """Return backbone and head of a model, on which packing was enabled as by `enable_packing`."""
    split = BackboneWithHead(model)
    if not split.enable_packing():
        raise XtkError(
            "the student's architecture does not support packing",
            where=type(model).__name__,
            hint="use DistillationCollator(..., packing=False)",
        )
    if split.supports_context_parallel:
        model.set_attn_implementation(GENERAL_ATTENTION_NAME)
    return split
