"""Split of a causal language model into a backbone and an output head.

Logits `[B, T, V]` are the largest tensor in distillation. The backbone returns hidden states; losses compute the logits
of a few rows at a time with the head.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xtk.errors import XtkError
from xtk.models import packed_attention
from xtk.models.output_head import HeadAdapter, HeadShard, OutputHead
from xtk.models.packed_attention import PackedSequence
from xtk.parallel.fsdp_and_tensor_parallel import apply_tensor_parallel, to_local_tensor
from xtk.parallel.host_to_device import to_device

RELATIVE_TOLERANCE = 1e-3


class BackboneWithHead(nn.Module):
    """A causal language model split into a backbone, which returns hidden states, and an output head.

    A forward pass at construction finds how the model transforms its head's output: a scale, a soft cap, or not at
    all. If it is another transformation, or the head is not a matrix, logits replace the hidden states: correct, but
    with more memory. The model may have peft's LoRA, also on its head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        # The same for every model of a configuration; without weights, a random model is tested.
        self._tested = _random_model(model) if model.device.type == "meta" else None
        self._logit_transform: LogitTransform | None = (
            self._tested._logit_transform if self._tested else self._find_logit_transform()
        )
        self._shard: HeadShard | None = None
        self._packing: str | None = None  # the attention implementation for packed sequences, once found

    @property
    def _base_model(self) -> Any:
        """The transformers model, without peft's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def _backbone(self) -> Any:
        """The module that returns hidden states; the full model if it is unknown."""
        inner = self._base_model
        body = inner.base_model
        # Llama 4 has a base_model_prefix that is not the name of its backbone.
        return getattr(inner, "model", inner) if body is inner else body

    @torch.no_grad()
    def _find_logit_transform(self) -> LogitTransform | None:
        """Return the transformation of `head(backbone(ids))` to logits; None if the model cannot be split there."""
        inner = self._base_model
        head, body = inner.get_output_embeddings(), self._backbone
        if head is None or body is inner or _split_head(head) is None:
            return None
        training = self.model.training
        self.model.eval()
        ids = torch.arange(1, 9, device=self.model.device).remainder(head.weight.shape[0])[None]
        read: list[Tensor] = []

        def replace(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            read.append(arguments[0])
            ramp = torch.linspace(-90, 90, output.shape[-1], dtype=torch.float64, device=output.device)
            return ramp.to(output.dtype).expand_as(output)

        watch = head.register_forward_hook(replace)
        try:
            made = self.model(input_ids=ids, use_cache=False).logits
            states = body(input_ids=ids, use_cache=False).last_hidden_state
        except Exception as failure:  # a configuration that fits its weights may still be impossible to run
            cause = " ".join(str(failure).split())[:300]
            raise XtkError(
                f"the model's forward pass fails: {type(failure).__name__}: {cause}",
                where=str(getattr(inner, "name_or_path", "") or type(inner).__name__),
                hint="check that config.json belongs to these weights; if memory is short, use a smaller model",
            ) from failure
        finally:
            watch.remove()
        self.model.train(training)
        if len(read) != 1 or not _is_close(states.to(read[0].device), read[0]):
            return None
        ramp = torch.linspace(-90, 90, made.shape[-1], dtype=torch.float64, device=made.device)
        ramp = ramp.to(read[0].dtype).expand_as(made).float()
        # The model computes its logits in its own dtype: two roundings of a soft cap or a scale.
        tolerance = max(RELATIVE_TOLERANCE, torch.finfo(made.dtype).eps)
        for after in _candidate_transforms(inner.config):
            if _is_close(after.apply(ramp), made.float(), tolerance):
                return after
        return None

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

    @torch.no_grad()
    def enable_packing(self) -> bool:
        """Enable several documents per sequence without attention between them; return whether the model can.

        Tested by forward passes: with xtk's attention by document, then with the model's own attention, which may
        separate documents by position ids.
        """
        if self._tested is not None:
            self._tested.enable_packing()
            self._packing, self._tested = self._tested._packing, None
            if self._packing is not None:
                self.model.set_attn_implementation(self._packing)
        elif self._packing is None:
            own, training = self._base_model.config._attn_implementation, self.model.training
            self.model.eval()
            packed_attention.register_attention()
            ids = torch.arange(1, 13, device=self.model.device)
            ids = ids.remainder(self.model.get_input_embeddings().weight.shape[0])[None]
            alone = torch.cat([self(ids[:, :5]), self(ids[:, 5:])], dim=1)
            for packing in (packed_attention.ATTENTION_NAME, own):
                self._packing = packing
                if self._is_packed(ids, alone):
                    break
                self._packing = None
            self.model.set_attn_implementation(own if self._packing is None else self._packing)
            self.model.train(training)
        return self._packing is not None

    @property
    def supports_context_parallel(self) -> bool:
        """Whether a sequence can be split over processes: `enable_packing` was called and chose xtk's attention."""
        return self._packing == packed_attention.ATTENTION_NAME

    def _is_packed(self, ids: Tensor, alone: Tensor) -> bool:
        """Return whether two documents, of 5 and 7 tokens, give the same output packed as separately."""
        row = PackedSequence((5, 7))
        try:
            self.model.set_attn_implementation(self._packing)
            together = self(ids, row)
        except (XtkError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, KeyError):
            return False
        configuration = self._base_model.config.get_text_config()
        if self._packing == packed_attention.ATTENTION_NAME and (
            getattr(configuration, "attention_chunk_size", None)
            or (getattr(configuration, "sliding_window", None) and row.seen_windows == {None})
        ):
            return False  # the layers use a shorter window than they pass to the attention
        return _is_close(together, alone)

    def forward(self, input_ids: Tensor, packed: PackedSequence | None = None) -> Tensor:
        """Return hidden states [B, T, H] (or logits [B, T, V] if the head cannot be separated).

        Args:
            input_ids: [B, T], padded on the right: attention is causal, so no mask is needed. With `packed` [1, T],
                this process's tokens of the packed sequence.
            packed: the documents of a packed sequence; needs `enable_packing`.
        """
        more: dict[str, Any] = {}
        if packed is not None:
            positions = packed.position_ids()[packed.token_indices(packed.rank)]
            more["position_ids"] = to_device(torch.from_numpy(positions), input_ids.device)[None]
            if self._packing == packed_attention.ATTENTION_NAME:
                more["packed"] = packed
                packed.prepare(input_ids.device)
        if self._logit_transform is not None:
            inner = self._base_model
            states: Tensor = self._backbone(input_ids=input_ids, use_cache=False, **more).last_hidden_state
            return states.to(inner.get_output_embeddings().weight.device)
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False, **more).logits
        return logits


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


def _random_model(model: Any) -> BackboneWithHead:
    """Return a model with the configuration of another one, two layers and random weights."""
    configuration = copy.deepcopy(model.config)
    text = configuration.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, 2)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        return BackboneWithHead(type(model)._from_config(configuration, dtype=torch.float32).eval())


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
