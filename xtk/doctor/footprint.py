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

from xtk.doctor import heap
from xtk.errors import XtkError
from xtk.models import attention
from xtk.models.causal_lm import DTYPES, load_configuration
from xtk.models.preparation import ALL_LINEAR, Origin, Preparation, with_trained_adapter


class Unforeseen(XtkError):
    """No mistake of anybody's: a model of which nothing is known before it is run."""


@dataclass(frozen=True)
class Footprint:
    """Bytes, of one process that has all of the model.

    Attributes:
        weights: parameters and buffers, each storage once.
        trained: those of them that are trained.
        head: the matrix that makes logits.
        learns: whether that is trained.
        tied: whether it is the embedding too.
        largest: the weights of the largest block of layers, or of embedding and head.
        width: V, rows of the head.
        states: the hidden states that the body gives.
        kept: what the forward pass of the body leaves for the backward pass, hidden states among it; gradients of the
            passes before too, but for that of the head.
        forward: the most that the forward pass holds, without weights.
        backward: the most that the backward pass holds, with gradients of the weights, but for that of the head.
        holes: what a heap on this machine keeps beyond that, if these passes are made again and again; 0 on a GPU, and
            where nothing is trained.
    """

    weights: int
    trained: int
    head: int
    learns: bool
    tied: bool
    largest: int
    width: int
    states: int
    kept: int
    forward: int
    backward: int
    holes: int


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()
        self.events: list[tuple[int, int]] = []

    def know(self, tensor: Tensor) -> None:
        """Leave a tensor that was there before out of the count."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return found

    def _hold(self, storage: Any) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known.add(name)
        self.now += size
        self.most = max(self.most, self.now)
        number = len(self.events)
        self.events.append((number, size))
        weakref.finalize(storage, self._drop, name, number, size)

    def _drop(self, name: int, number: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size
        self.events.append((number, -1))


def footprint(
    folder: Path,
    tokens: int,
    *,
    rows: int = 1,
    dtype: str = "float32",
    mixed_precision: str = "no",
    gradient_checkpointing: bool = False,
    backward: bool = True,
    passes: int = 1,
    attn_implementation: str = "",
    lora_r: int = 0,
    lora_target_modules: tuple[str, ...] = ALL_LINEAR,
) -> Footprint:
    """Run a model on fake tensors of the device that a run would take.

    Args:
        folder: with its configuration.
        tokens: T of a forward pass.
        rows: B, rows of so many tokens.
        dtype: of its weights.
        mixed_precision: "bf16" or "no".
        gradient_checkpointing: as in training.
        backward: whether it is trained.
        passes: how many there are before gradients are used; what is told is of the last.
        attn_implementation: transformers' name; "": as training would have it.
        lora_r: rank of adapters, which are trained instead of the model; 0: the model.
        lora_target_modules: what gets them.

    Raises:
        Unforeseen: transformers does not know the model, or it cannot be run so.
    """
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(device, torch.bfloat16) if mixed_precision == "bf16" else contextlib.nullcontext()
    told = ""
    # As `Cut.pack` has it: xtk's own attention where the model can take it. It makes no mask [T, T], which transformers
    # makes of tensors without content.
    for own in [attn_implementation] if attn_implementation else [attention.NAME, "sdpa", "eager"]:
        try:
            with warnings.catch_warnings(), torch.device("meta"), torch.set_grad_enabled(backward):
                warnings.simplefilter("ignore")
                configuration = load_configuration(folder)
                model = transformers.AutoModelForCausalLM.from_config(
                    configuration, dtype=DTYPES[dtype], attn_implementation=own
                )
                if lora_r:
                    prepared = Preparation(dtype, lora_r=lora_r, lora_target_modules=lora_target_modules)
                    model = with_trained_adapter(model, Origin(folder), prepared)
                if gradient_checkpointing:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with (
                warnings.catch_warnings(), FakeTensorMode(), torch.device(device), torch.set_grad_enabled(backward)
            ):  # fmt: skip
                warnings.simplefilter("ignore")
                _put(model, device)
                return _run(model.train(backward), (rows, tokens), autocast, passes if backward else 0)
        except Exception as wrong:  # whatever a model does that tensors without content cannot
            told = told or " ".join(str(wrong).split())[:200]
    raise Unforeseen(f"this model cannot be run without its weights: {told}", where=str(folder))


def _put(model: Any, device: str) -> None:
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


def _run(model: Any, shape: tuple[int, int], autocast: Any, passes: int) -> Footprint:
    live = _Live()
    held = {one.untyped_storage()._cdata: one for one in (*model.parameters(), *model.buffers())}
    for tensor in held.values():
        live.know(tensor)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of what peft puts around it
    embedding, head = inner.get_input_embeddings().weight, inner.get_output_embeddings().weight
    ids = torch.zeros(shape, dtype=torch.int64)
    kept = forward = most = size = 0
    with live:
        for _ in range(max(1, passes)):
            live.most = live.now
            with autocast:
                states = inner.base_model(input_ids=ids, use_cache=False).last_hidden_state
            kept, forward, size = live.now, live.most, _bytes(states)
            if passes:
                live.most = live.now
                states.backward(torch.ones_like(states))
                most = live.most
            del states
    return Footprint(
        weights=sum(one.untyped_storage().nbytes() for one in held.values()),
        trained=sum(_bytes(one) for one in model.parameters() if one.requires_grad),
        head=_bytes(head),
        learns=head.requires_grad,
        tied=head is embedding,
        largest=_largest(inner),
        width=len(head),
        states=size,
        kept=kept,
        forward=forward,
        backward=most,
        holes=heap.kept(live.events) if passes and embedding.device.type == "cpu" else 0,
    )


def _largest(model: Any) -> int:
    blocks = [block for some in model.modules() if isinstance(some, torch.nn.ModuleList) for block in some]
    ends = {id(one): one for one in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
    return max([sum(map(_bytes, ends.values())), *(sum(map(_bytes, block.parameters())) for block in blocks)])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
