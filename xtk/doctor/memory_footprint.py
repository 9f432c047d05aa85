"""What a forward and a backward pass hold in memory: the model itself is run, on tensors that have no content.

torch's FakeTensorMode gives every tensor its shape, dtype and device and no memory, so weights need not be there, and
whatever the model does (its attention, its norms, checkpoints, mixed precision) is counted as it does it.
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

from xtk.doctor import heap_fragmentation
from xtk.errors import XtkError
from xtk.models import packed_attention
from xtk.models.causal_lm import DTYPES, load_model_config
from xtk.models.student_model import ALL_LINEAR, StudentModelConfig, StudentSource, attach_trainable_adapter


class UnsupportedModel(XtkError):
    """No mistake of anybody's: a model of which nothing is known before it is run."""


@dataclass(frozen=True)
class MemoryFootprint:
    """Bytes, of one process that has all of the model.

    Attributes:
        weights: parameters and buffers, each storage once.
        trained_weights: those of them that are trained.
        head_bytes: the matrix that makes logits.
        head_is_trained: whether that is trained.
        head_is_tied: whether it is the embedding too.
        largest_block: the weights of the largest block of layers, or of embedding and head.
        vocab_size: V, rows of the head.
        hidden_states: the hidden states that the body gives.
        kept_activations: what the forward pass of the body leaves for the backward pass, hidden states among it;
            gradients of the
            passes before too, but for that of the head.
        forward_peak: the most that the forward pass holds, without weights.
        backward_peak: the most that the backward pass holds, with gradients of the weights, but for that of the head.
        heap_fragmentation: what a heap on this machine keeps beyond that, if these passes are made again and again; 0
            on a GPU, and
            where nothing is trained.
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
    heap_fragmentation: int


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._ignored: set[int] = set()
        self.events: list[tuple[int, int]] = []

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor that was there before out of the count."""
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
        number = len(self.events)
        self.events.append((number, size))
        weakref.finalize(storage, self._drop, name, number, size)

    def _drop(self, name: int, number: int, size: int) -> None:
        self._ignored.discard(name)
        self.live_bytes -= size
        self.events.append((number, -1))


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
    """Run a model on fake tensors of the device that a run would take.

    Args:
        folder: with its configuration.
        num_tokens: T of a forward pass.
        batch_size: B, rows of so many tokens.
        dtype: of its weights.
        mixed_precision: "bf16" or "no".
        gradient_checkpointing: as in training.
        train: whether it is trained.
        num_passes: how many there are before gradients are used; what is told is of the last.
        attn_implementation: transformers' name; "": as training would have it.
        lora_r: rank of adapters, which are trained instead of the model; 0: the model.
        lora_target_modules: what gets them.

    Raises:
        Unforeseen: transformers does not know the model, or it cannot be run so.
    """
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed_attention.register_attention()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(device, torch.bfloat16) if mixed_precision == "bf16" else contextlib.nullcontext()
    told = ""
    # As `Cut.pack` has it: xtk's own attention where the model can take it. It makes no mask [T, T], which transformers
    # makes of tensors without content.
    for own in [attn_implementation] if attn_implementation else [packed_attention.ATTENTION_NAME, "sdpa", "eager"]:
        try:
            with warnings.catch_warnings(), torch.device("meta"), torch.set_grad_enabled(train):
                warnings.simplefilter("ignore")
                configuration = load_model_config(folder)
                model = transformers.AutoModelForCausalLM.from_config(
                    configuration, dtype=DTYPES[dtype], attn_implementation=own
                )
                if lora_r:
                    prepared = StudentModelConfig(dtype, lora_r=lora_r, lora_target_modules=lora_target_modules)
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
        except Exception as wrong:  # whatever a model does that tensors without content cannot
            told = told or " ".join(str(wrong).split())[:200]
    raise UnsupportedModel(f"this model cannot be run without its weights: {told}", where=str(folder))


def _materialize(model: Any, device: str) -> None:
    """Give a model that is nowhere tensors of a device; what was one tensor stays one."""
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
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of what peft puts around it
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
        heap_fragmentation=heap_fragmentation.fragmentation_bytes(live.events)
        if passes and embedding.device.type == "cpu"
        else 0,
    )


def _largest_block_bytes(model: Any) -> int:
    blocks = [block for some in model.modules() if isinstance(some, torch.nn.ModuleList) for block in some]
    ends = {id(one): one for one in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    return max(
        [sum(map(_tensor_bytes, ends.values())), *(sum(map(_tensor_bytes, block.parameters())) for block in blocks)]
    )


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
