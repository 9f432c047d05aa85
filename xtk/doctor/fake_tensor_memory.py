"""Memory of a forward and a backward pass, measured by running the model on fake tensors.

With torch's FakeTensorMode tensors have shape, dtype and device but no data: weights are not needed, and everything
that the model does (attention, norms, gradient checkpointing, mixed precision) is counted.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xtk.errors import XtkError
from xtk.models import packed_attention
from xtk.models.causal_lm import DTYPES, auto_model_class, load_model_config
from xtk.models.student_model_setup import ALL_LINEAR, StudentModelConfig, StudentSource, attach_trainable_adapter


class UnsupportedModel(XtkError):
    """The memory of this model cannot be estimated; not a user error."""


@dataclass(frozen=True)
class MemoryFootprint:
    """Memory in bytes of one process with the unsharded model.

    Attributes:
        weights: parameters and buffers, each storage once.
        trained_weights: trainable parameters.
        head_bytes: weights of the output head.
        head_is_trained: whether the output head is trained.
        head_is_tied: whether the output head is tied to the embedding.
        largest_block: weights of the largest layer, or of embedding and output head.
        vocab_size: V, rows of the output head.
        hidden_states: the final hidden states of the backbone.
        kept_activations: what is live after the forward pass of the backbone, including the hidden states, and
            gradients of earlier passes except that of the output head.
        forward_peak: peak of the forward pass, without weights.
        backward_peak: peak of the backward pass, with gradients of the weights except that of the output head.
    """

    weights: int
    trained_weights: int
    head_bytes: int
    head_is_trained: bool
    head_is_tied: bool
    largest_block: int
    vocab_size: int
    hidden_states: int
    kept_activations: int
    forward_peak: int
    backward_peak: int


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensor storages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._ignored: set[int] = set()

    def ignore(self, tensor: Tensor) -> None:
        """Exclude an existing tensor from the count."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return found

    def _hold(self, storage: Any) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._ignored:
            return
        self._ignored.add(name)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, name, size)

    def _drop(self, name: int, size: int) -> None:
        self._ignored.discard(name)
        self.live_bytes -= size


def measure_footprint(
    folder: Path,
    num_tokens: int,
    *,
    batch_size: int = 1,
    dtype: str = "float32",
    mixed_precision: str = "no",
    gradient_checkpointing: bool = False,
    train: bool = True,
    num_passes: int = 1,
    attn_implementation: str = "",
    lora_r: int = 0,
    lora_target_modules: tuple[str, ...] = ALL_LINEAR,
) -> MemoryFootprint:
    """Return the memory footprint of a model, measured with fake tensors on the device of a run.

    Args:
        folder: the model folder.
        num_tokens: T, sequence length.
        batch_size: B, number of sequences.
        dtype: dtype of the weights.
        mixed_precision: "bf16" or "no".
        gradient_checkpointing: whether activations are recomputed.
        train: whether there is a backward pass.
        num_passes: passes per optimizer step; the last one is measured.
        attn_implementation: as in transformers; "": as in training.
        lora_r: rank of a trained LoRA adapter; 0: the model is trained.
        lora_target_modules: modules with adapters.

    Raises:
        UnsupportedModel: transformers does not support the model, or it fails on fake tensors.
        XtkError: the model has none of the modules, or not this attention.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed_attention.register_attention()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(device, torch.bfloat16) if mixed_precision == "bf16" else contextlib.nullcontext()
    first_error = ""
    # As in `BackboneWithHead.enable_packing`: xtk's attention if the model supports it. It needs no mask [T, T], which
    # transformers would build from fake tensors.
    for implementation in (
        [attn_implementation] if attn_implementation else [packed_attention.ATTENTION_NAME, "sdpa", "eager"]
    ):
        try:
            with warnings.catch_warnings(), torch.device("meta"), torch.set_grad_enabled(train):
                warnings.simplefilter("ignore")
                configuration = load_model_config(folder)
                model = auto_model_class(configuration).from_config(
                    configuration, dtype=DTYPES[dtype], attn_implementation=implementation
                )
                if lora_r:
                    prepared = StudentModelConfig(dtype=dtype, lora_r=lora_r, lora_target_modules=lora_target_modules)
                    model = attach_trainable_adapter(model, StudentSource(folder), prepared)
                if gradient_checkpointing:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with (
                warnings.catch_warnings(), FakeTensorMode(), torch.device(device), torch.set_grad_enabled(train)
            ):  # fmt: skip
                warnings.simplefilter("ignore")
                _materialize(model, device)
                return _measure_passes(
                    model.train(train), (batch_size, num_tokens), autocast, num_passes if train else 0
                )
        except Exception as wrong:  # models fail on fake tensors in many ways
            message = " ".join(str(wrong).split())[:200]
            if lora_r and isinstance(wrong, XtkError):
                raise
            if attn_implementation and isinstance(wrong, ValueError | ImportError) and "attn" in message:
                raise XtkError(
                    f"transformers cannot load the model: {message}",
                    where=f"--attn-implementation {attn_implementation}",
                    hint="use --attn-implementation sdpa or eager",
                ) from None
            first_error = first_error or message
    raise UnsupportedModel(
        f"the memory that the model needs cannot be estimated: {first_error}",
        where=str(folder),
        hint="measure it in a short run: xtk distill --max-steps 3",
    )


def _materialize(model: Any, device: str) -> None:
    """Replace a model's meta tensors by tensors on a device; tied tensors stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        made[id(tensor)] = torch.nn.Parameter(made[id(tensor)], tensor.requires_grad)
                table[name] = made[id(tensor)]


def _measure_passes(model: Any, shape: tuple[int, int], autocast: Any, passes: int) -> MemoryFootprint:
    live = _LiveBytes()
    held = {one.untyped_storage()._cdata: one for one in (*model.parameters(), *model.buffers())}
    for tensor in held.values():
        live.ignore(tensor)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # without the PEFT wrapper
    embedding, head = inner.get_input_embeddings().weight, inner.get_output_embeddings().weight
    ids = torch.zeros(shape, dtype=torch.int64)
    kept = forward = most = size = 0
    with live:
        for _ in range(max(1, passes)):
            live.peak_bytes = live.live_bytes
            with autocast:
                states = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state
            kept, forward, size = live.live_bytes, live.peak_bytes, _tensor_bytes(states)
            if passes:
                live.peak_bytes = live.live_bytes
                states.backward(torch.ones_like(states))
                most = live.peak_bytes
            del states
    return MemoryFootprint(
        weights=sum(one.untyped_storage().nbytes() for one in held.values()),
        trained_weights=sum(_tensor_bytes(one) for one in model.parameters() if one.requires_grad),
        head_bytes=_tensor_bytes(head),
        head_is_trained=head.requires_grad,
        head_is_tied=head is embedding,
        largest_block=_largest_block_bytes(inner),
        vocab_size=len(head),
        hidden_states=size,
        kept_activations=kept,
        forward_peak=forward,
        backward_peak=most,
    )


def _largest_block_bytes(model: Any) -> int:
    blocks = [block for some in model.modules() if isinstance(some, torch.nn.ModuleList) for block in some]
    ends = {id(one): one for one in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    return max(
        [sum(map(_tensor_bytes, ends.values())), *(sum(map(_tensor_bytes, block.parameters())) for block in blocks)]
    )


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
