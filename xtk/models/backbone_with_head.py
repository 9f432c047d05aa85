"""Split of a causal language model into a backbone and an output head.

Logits `[B, T, V]` are the largest tensor in distillation. The backbone returns hidden states; losses compute the logits
of a few rows at a time with the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xtk import terminal
from xtk.errors import XtkError
from xtk.models import packed_attention
from xtk.models.output_head import HeadAdapter, HeadShard, OutputHead
from xtk.models.packed_attention import PackedSequence
from xtk.models.small_copy import small_copy
from xtk.parallel.fsdp_and_tensor_parallel import apply_tensor_parallel, to_local_tensor
from xtk.parallel.host_to_device import to_device

RELATIVE_TOLERANCE = 1e-3


class BackboneWithHead(nn.Module):
    """A causal language model split into a backbone, which returns hidden states, and an output head.

    A forward pass of a small copy finds how the model transforms its head's output: a scale, a soft cap, or not at all.
    If it is another transformation, or the head is not a matrix, logits replace the hidden states: correct, but with
    more memory. The model may have peft's LoRA, also on its head.
    """

    def __init__(self, model: Any, device: torch.device | None = None) -> None:
        """`device`: on which the model will run; None: its present one."""
        super().__init__()
        self.model = model
        self._device = device or torch.device("cpu" if model.device.type == "meta" else model.device)
        self._logit_transform = self._find_logit_transform()
        self._shard: HeadShard | None = None
        self._packing: str | None = None  # the attention implementation for packed sequences, once found

    @property
    def _base_model(self) -> Any:
        """The transformers model, without peft's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def _backbone(self) -> Any:
        return _backbone_of(self._base_model)

    def _find_logit_transform(self) -> LogitTransform | None:
        """Return the transformation of `head(backbone(ids))` to logits; None if the model cannot be split there."""
        inner = self._base_model
        head = inner.get_output_embeddings()
        if head is None or self._backbone is inner or _split_head(head) is None:
            return None
        failures: list[Exception] = []
        for is_small in (True, False):  # a class may refuse other sizes
            try:
                return _logit_transform_of(small_copy(inner, self._device) if is_small else inner)
            except Exception as failure:
                failures.append(failure)
        cause = " ".join(str(failures[0]).split())[:300]
        raise XtkError(
            f"the model's forward pass fails: {type(failures[0]).__name__}: {cause}",
            where=str(getattr(inner, "name_or_path", "") or type(inner).__name__),
            hint="check that config.json belongs to these weights; if memory is short, use a smaller model",
        ) from failures[0]

    @property
    def head(self) -> OutputHead:
        """The output head with the model's parameters; without a weight if the model cannot be split."""
        if (transform := self._logit_transform) is None:
            return OutputHead(None)
        split_head = _split_head(self._base_model.get_output_embeddings(), shared=True)
        assert split_head is not None
        linear, adapters = split_head
        bias = None if linear.bias is None else to_local_tensor(linear.bias)
        weight = to_local_tensor(linear.weight)
        return OutputHead(weight, bias, transform.scale, transform.softcap, adapters, self._shard)

    def compile_backbone(self, backend: str = "inductor") -> None:
        """Compile the backbone in place, for sequences of any length; parameter names do not change."""
        (self.model if self._logit_transform is None else self._backbone).compile(dynamic=True, backend=backend)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        """Shard matrices, and the vocabulary of the head, over the processes of a one-dimensional mesh."""
        if self._logit_transform is None:
            raise XtkError(
                f"--parallel tp does not support {type(self._base_model).__name__}: its output head is not separable",
                where=str(getattr(self._base_model, "name_or_path", "") or "--parallel"),
                hint="use --parallel fsdp instead of tp",
            )
        apply_tensor_parallel(self.model, mesh)
        weight = self.head.weight
        assert weight is not None
        self._shard = HeadShard.from_group(len(weight), mesh.get_group())

    def enable_packing(self, attention: str = "") -> bool:
        """Enable several documents per sequence without attention between them; return whether the model can.

        Tested by forward passes of a small copy of the model on its device. A model's own attention may separate
        documents by position ids. Eager attention does too, but keeps scores [T, T] of all documents together, so that
        a document per row takes less memory.
        `attention`: the attention implementation to prefer; "": xtk's attention by document, else the model's own.
        """
        if self._packing is None:
            inner = self._base_model
            packed_attention.register_attention()
            own = inner.config._attn_implementation
            names = [attention, packed_attention.ATTENTION_NAME, own if own != "eager" else ""]
            is_split = self._logit_transform is not None
            self._packing = _find_packing(inner, self._device, filter(None, names), is_split=is_split)
            if self._packing is not None:
                self.model.set_attn_implementation(self._packing)
            if attention and self._packing not in (None, attention):
                terminal.note(
                    f"warning: {attention} does not separate packed documents of {type(inner).__name__}: "
                    f"the attention implementation is {self._packing}; --no-packing keeps {attention}"
                )
        return self._packing is not None

    @property
    def supports_context_parallel(self) -> bool:
        """Whether a sequence can be split over processes: `enable_packing` was called and chose xtk's attention."""
        return self._packing == packed_attention.ATTENTION_NAME

    def forward(self, input_ids: Tensor, packed: PackedSequence | None = None) -> Tensor:
        """Return hidden states [B, T, H] (or logits [B, T, V] if the head cannot be separated).

        Args:
            input_ids: [B, T], padded on the right: attention is causal, so no mask is needed. With `packed` [1, T],
                this process's tokens of the packed sequence.
            packed: the documents of a packed sequence; needs `enable_packing`.
        """
        if self._logit_transform is None:
            return _run(self.model, input_ids, packed, self._packing)
        states = _run(self._backbone, input_ids, packed, self._packing)
        return states.to(self._base_model.get_output_embeddings().weight.device)


def _run(module: Any, input_ids: Tensor, packed: PackedSequence | None, packing: str | None) -> Tensor:
    """Return the hidden states of a backbone, or the logits of a model, for `BackboneWithHead.forward`."""
    more: dict[str, Any] = {}
    if packed is not None:
        positions = packed.position_ids()[packed.token_indices(packed.rank)]
        more["position_ids"] = to_device(torch.from_numpy(positions), input_ids.device)[None]
        if packing == packed_attention.ATTENTION_NAME:
            more["packed"] = packed
            packed.prepare(input_ids.device)
    output = module(input_ids=input_ids, use_cache=False, **more)
    states: Tensor = output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits
    return states


@torch.no_grad()
def _find_packing(model: Any, device: torch.device, names: Iterable[str], *, is_split: bool) -> str | None:
    """Return the first attention implementation that separates documents, tested on a small copy; None if none does."""
    products = torch.backends.cuda.matmul
    setting, exact = ("fp32_precision", "ieee") if hasattr(products, "fp32_precision") else ("allow_tf32", False)
    before = getattr(products, setting)
    setattr(products, setting, exact)
    try:
        small = small_copy(model, device)
        return next((name for name in names if _is_packed(small, name, is_split)), None)
    except Exception:  # the class refuses other sizes
        return None
    finally:
        setattr(products, setting, before)


def _is_packed(small: Any, attention: str, is_split: bool) -> bool:
    """Return whether two documents, of 5 and 7 tokens, give the same output packed as separately.

    Tested in float32, or in bf16 where the attention does not support float32 (FlashAttention). Rounding to bf16 may
    hide a difference, so the error must also be far smaller than that of documents that are not separated.
    """
    module, default = _backbone_of(small) if is_split else small, small.config._attn_implementation
    for dtype in (torch.float32, torch.bfloat16):
        try:
            small.to(dtype)
            ids = _test_tokens(small, 12)
            alone = torch.cat([_run(module, ids[:, :5], None, None), _run(module, ids[:, 5:], None, None)], dim=1)
            joined = _run(module, ids, None, None)
            small.set_attn_implementation(attention)
            packed = _run(module, ids, PackedSequence((5, 7)), attention)
        except Exception:  # of the model, or of an attention that may be a kernel of another library
            continue
        finally:
            small.set_attn_implementation(default)
        tolerance = max(RELATIVE_TOLERANCE, 16 * torch.finfo(dtype).eps)
        error, effect = (float((states - alone).abs().max()) for states in (packed, joined))
        return _is_close(packed, alone, tolerance) and 10 * error < effect
    return False


@dataclass(frozen=True)
class LogitTransform:
    """Transformation of the head's output x to logits: `softcap tanh(scale x / softcap)`, or `scale x`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits after scale and soft cap."""
        logits = self.scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


# Configuration keys of the scale of logits. Some models multiply by it (Cohere, Falcon-H1, HyperCLOVA X), others divide
# (Granite): both are tested.
LOGIT_SCALE_KEYS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def _backbone_of(model: Any) -> Any:
    """Return the module of a transformers model that returns hidden states; the full model if it is unknown."""
    body = model.base_model
    # Llama 4 has a base_model_prefix that is not the name of its backbone.
    return getattr(model, "model", model) if body is model else body


def _test_tokens(model: Any, count: int) -> Tensor:
    """Return token ids [1, count] on the device of a model."""
    rows = model.get_input_embeddings().weight.shape[0]
    return torch.arange(1, count + 1, device=model.device).remainder(rows)[None]


@torch.no_grad()
def _logit_transform_of(model: Any) -> LogitTransform | None:
    """Return the transformation that a forward pass of a model applies to the output of its head; None: unknown."""
    ids, head, training = _test_tokens(model, 8), model.get_output_embeddings(), model.training
    model.eval()
    read: list[Tensor] = []

    def replace(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        read.append(arguments[0])
        ramp = torch.linspace(-90, 90, output.shape[-1], dtype=torch.float64, device=output.device)
        return ramp.to(output.dtype).expand_as(output)

    watch = head.register_forward_hook(replace)
    try:
        made = model(input_ids=ids, use_cache=False).logits
        states = _backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        watch.remove()
        model.train(training)
    if len(read) != 1 or not _is_close(states.to(read[0].device), read[0]):
        return None
    ramp = torch.linspace(-90, 90, made.shape[-1], dtype=torch.float64, device=made.device)
    ramp = ramp.to(read[0].dtype).expand_as(made).float()
    # The model computes its logits in its own dtype: two roundings of a soft cap or a scale.
    tolerance = max(RELATIVE_TOLERANCE, torch.finfo(made.dtype).eps)
    for after in _candidate_transforms(model.config):
        if _is_close(after.apply(ramp), made.float(), tolerance):
            return after
    return None


def _candidate_transforms(configuration: Any) -> list[LogitTransform]:
    configuration = configuration.get_text_config()
    values = [getattr(configuration, name, None) for name in LOGIT_SCALE_KEYS]
    numbers = [float(number) for number in values if isinstance(number, int | float) and number]
    scales = [1.0, *numbers, *(1 / number for number in numbers)]
    caps = [None, *(float(cap) for name in SOFTCAP_KEYS if (cap := getattr(configuration, name, None)))]
    return [LogitTransform(scale, softcap) for scale in scales for softcap in caps]


def _is_close(computed: Tensor, expected: Tensor, tolerance: float = RELATIVE_TOLERANCE) -> bool:
    scale = expected.abs().max().clamp_min(1)
    return computed.shape == expected.shape and bool((computed - expected).abs().max() <= tolerance * scale)


def _split_head(head: Any, *, shared: bool = False) -> tuple[nn.Linear, list[HeadAdapter]] | None:
    """Return a head's linear layer and its LoRA adapters; None for other heads.

    Offloaded and quantized matrices, sharded ones unless `shared`, and variants of LoRA are not supported.
    """
    if type(head).__name__ == "ModulesToSaveWrapper":
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    adapters: list[HeadAdapter] = []
    if hasattr(head, "lora_A") and hasattr(head, "base_layer"):
        if not (head.disable_adapters or head.merged):
            names = [name for name in head.active_adapters if name in head.lora_A]
            if head.lora_variant or any(head.lora_B[name].bias is not None for name in names):
                return None
            parts = [
                (head.lora_A[name], head.lora_B[name], head.scaling[name], head.lora_dropout[name]) for name in names
            ]
            adapters = [HeadAdapter(down.weight, up.weight, *others) for down, up, *others in parts]
        head = head.base_layer
    if type(head) is not nn.Linear or (head.weight.is_meta and hasattr(head, "_hf_hook")):
        return None
    if type(head.weight) is not nn.Parameter and not (shared and hasattr(head.weight, "to_local")):
        return None
    return head, adapters
