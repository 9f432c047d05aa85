"""Loading of causal language models, and their split into a backbone and an output head.

Logits `[B, T, V]` are the largest tensor in distillation. The backbone returns hidden states; losses compute the logits
of a few rows at a time with the head.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xtk.errors import CorruptError, XtkError
from xtk.models import packed_attention
from xtk.models.fsdp_and_tensor_parallel import apply_tensor_parallel, to_local_tensor
from xtk.models.output_head import HeadAdapter, HeadShard, OutputHead
from xtk.models.packed_attention import PackedSequence
from xtk.models.safetensors_headers import ADAPTER_FILE, read_weight_headers, weight_files
from xtk.models.weight_validation import (
    WeightMismatches,
    check_adapter_weights,
    check_weights_finite,
    compare_headers_with_config,
    note_once,
)
from xtk.tokens.model_config_json import hub_kernel_repositories, read_model_config
from xtk.tokens.tokenizer import Tokenizer
from xtk.untrusted_json import parse_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RELATIVE_TOLERANCE = 1e-3
CONFIGURATION_BYTES = 1 << 24
LARGEST_RANK = 1024  # LoRA rank up to which peft may allocate an adapter without a check of its weights
# Arguments of `from_pretrained` that determine the devices of weights.
PLACEMENT_OPTIONS = frozenset({"device_map", "max_memory", "offload_folder", "distributed_config"})


def silence_transformers() -> None:
    """Disable warnings and progress bars of transformers, and warnings of bitsandbytes; errors are still shown."""
    import transformers

    # On a CPU it warns that it has no kernel of the hub, also if nothing is quantized.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def default_device() -> torch.device:
    """Return the CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_causal_lm(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
    adapter: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a model from a local folder.

    Args:
        folder: contains config.json and safetensors files.
        dtype: dtype of the weights.
        device: device of the model; None: the CPU. Ignored if `options` determine the devices.
        trust_remote_code: run Python code that comes with the model; needs the user's consent.
        adapter: folder of a peft adapter of this model. It is merged into the weights, or loaded without merging if
            these are quantized.
        options: further arguments of `from_pretrained`.

    Raises:
        XtkError: there is no model, its files are corrupt, weights are missing, of another shape or not finite, or it
            needs its own Python code.
    """
    import transformers

    options = dict(options or {})
    load_model_config(folder, trust_remote_code=trust_remote_code)
    _check_weight_files(folder)
    _reject_hub_kernels([str(options.get("attn_implementation", ""))], "attn_implementation", trust_remote_code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **options,
            )
    except Exception as wrong:
        raise loading_error(folder, wrong) from wrong
    WeightMismatches.from_loading_info(loading_info).check(folder)
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks a matrix in its first eval-mode forward pass. This suits
        # inference only, because it stops gradients, and it does not work with fewer than 64 columns.
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
    check_weights_finite(model, folder)
    _fix_tied_head_flag(model, folder)
    placed = PLACEMENT_OPTIONS.intersection(options) or getattr(model, "quantization_method", None)
    if device is not None and not placed:
        model = model.to(device)
    return model if adapter is None else _load_adapter(model, adapter)


def _fix_tied_head_flag(model: Any, folder: Path) -> None:
    """Set tie_word_embeddings to false where the weight files contain a separate output head.

    transformers uses the head in the files then; vLLM, which reads the configuration, would use the embedding.
    """
    parts = (model.config, model.config.get_text_config())
    stated = [part for part in parts if getattr(part, "tie_word_embeddings", False)]
    if not stated:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        note_once(
            f"warning: {folder}: config.json has tie_word_embeddings true, but the weights contain a separate output "
            "head; xtk uses the head, other programs may use the embedding"
        )
        for part in stated:
            part.tie_word_embeddings = False


def check_loadable(
    folder: Path, tokenizer: Tokenizer, *, trust_remote_code: bool = False, adapter: Path | None = None
) -> None:
    """Check that a model can be loaded, without reading its weights, so that errors come before hours of other work.

    Args:
        folder: as for `load_causal_lm`.
        tokenizer: the model's tokenizer.
        trust_remote_code: run Python code that comes with the model.
        adapter: folder of a peft adapter.

    Raises:
        XtkError: there is no model, its files are corrupt, weights are missing or of another shape, or it has fewer
            embedding rows than its tokenizer has tokens.
    """
    configuration = load_model_config(folder, trust_remote_code=trust_remote_code)
    _check_weight_files(folder)
    headers = {folder: read_weight_headers(folder)}
    if adapter is not None:
        check_adapter(adapter)
        headers[adapter] = read_weight_headers(adapter)
    rows = getattr(configuration.get_text_config(), "vocab_size", None)
    if isinstance(rows, int):
        _check_row_count(rows, tokenizer)
    for place, differences in compare_headers_with_config(configuration, headers).items():
        differences.check(place, quiet=True)


def load_model_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the transformers configuration of a model.

    Args:
        folder: contains config.json.
        trust_remote_code: run Python code that comes with the model, and hub kernels that its configuration names.

    Raises:
        XtkError: there is no configuration, it cannot be read or is too large, or it needs remote code.
    """
    import transformers

    silence_transformers()
    content = read_model_config(folder)
    if not content:
        raise XtkError(
            "the folder contains no model: config.json is missing",
            where=str(folder),
            hint="use a folder written by save_pretrained, or a hub id",
        )
    _reject_hub_kernels(hub_kernel_repositories(content), str(folder / "config.json"), trust_remote_code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    except Exception as wrong:
        raise loading_error(folder, wrong) from wrong


def _reject_hub_kernels(names: Sequence[str], where: str, trust_remote_code: bool) -> None:
    """Refuse kernels that would be downloaded from a hub and run.

    Raises:
        XtkError: a name is a hub repository, and remote code is not trusted.
    """
    if found := [] if trust_remote_code else [name for name in names if "/" in name]:
        raise XtkError(
            f"the model needs the attention kernel {found[0]}, which is code from the Hugging Face hub",
            where=where,
            hint='use --trust-remote-code if you trust it, or set attn_implementation to "sdpa"',
        )


def _check_weight_files(folder: Path) -> None:
    """Refuse a folder without safetensors weights.

    Raises:
        XtkError: there are no weights, or only pickles.
    """
    if not weight_files(folder):
        if any(folder.glob("*.bin")):
            raise XtkError(
                "the model's weights are pickle files (*.bin), which xtk does not load",
                where=str(folder),
                hint="load the model with transformers and save it with save_pretrained, which writes safetensors",
            )
        raise XtkError(
            "the folder contains no weights (*.safetensors)",
            where=str(folder),
            hint="copy or download the model's *.safetensors files into it",
        )


def _load_adapter(model: Any, adapter: Path) -> Any:
    """Return a model with an adapter, merged unless the model is quantized.

    Raises:
        XtkError: peft is not installed, the adapter has no weights, or it belongs to another model.
    """
    check_adapter(adapter)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if getattr(model, "quantization_method", None):
                loading_info = model.load_adapter(str(adapter))
                WeightMismatches.from_loading_info(loading_info.to_dict()).check(adapter)
                return model
            adapted = PeftModel.from_pretrained(model, str(adapter))
            check_adapter_weights(adapted, adapter)
            return adapted.merge_and_unload()
    except Exception as wrong:
        raise loading_error(adapter, wrong) from wrong


def check_adapter(adapter: Path) -> None:
    """Refuse adapters without files or with an invalid rank, and missing peft, before peft reads the files.

    Raises:
        XtkError: a file is missing, or peft is not installed.
        CorruptError: the configuration is invalid, or its rank is larger than that of the weights.
    """
    configuration = adapter / "adapter_config.json"
    for path in (configuration, adapter / ADAPTER_FILE):
        if not path.is_file():  # peft would download weights from the hub, or read a pickle
            raise XtkError(
                f"the folder of the adapter has no file {path.name}",
                where=str(adapter),
                hint="save the adapter again with peft's save_pretrained, or download it again",
            )
    with configuration.open("rb") as stream:
        content = stream.read(CONFIGURATION_BYTES).decode(errors="replace")
    described = parse_json(content, what="the adapter's adapter_config.json", where=str(configuration))
    if not isinstance(described, dict):
        raise CorruptError(
            "the adapter's adapter_config.json is not a JSON object",
            where=str(configuration),
            hint="copy or download the adapter again",
        )
    patterns = described.get("rank_pattern")
    stated = [described.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    largest = max(
        (shape[0] for name, (_, shape) in read_weight_headers(adapter).items() if ".lora_A." in name), default=0
    )
    for rank in stated:
        if isinstance(rank, int | float) and rank > max(largest, LARGEST_RANK):
            what = f"adapter_config.json has rank {rank:,}, but the largest rank of its weights is {largest:,}"
            raise CorruptError(what, where=str(configuration), hint="copy or download the adapter again")
    if importlib.util.find_spec("peft") is None:
        raise XtkError(
            "an adapter needs the package peft, which is not installed",
            where=str(adapter),
            hint="run pip install 'xtk[peft]'",
        )


def loading_error(folder: Path, wrong: Exception) -> XtkError:
    """Return an XtkError for an exception that transformers or peft raised while loading a folder."""
    if isinstance(wrong, XtkError):
        return wrong
    text = " ".join(str(wrong).split())
    if "trust_remote_code" in text:
        return XtkError(
            "the model needs Python code from its own folder",
            where=str(folder),
            hint="use --trust-remote-code if you trust the code",
        )
    if type(wrong).__name__ == "SafetensorError" or "safetensors" in text.lower():
        return CorruptError(
            f"the model's weights cannot be read: {text}", where=str(folder), hint="copy or download the model again"
        )
    if not isinstance(wrong, ValueError | OSError | RuntimeError | ImportError) or isinstance(wrong, RecursionError):
        text = f"{type(wrong).__name__}: {text}"  # the text of other types may be a bare name, or empty
    return XtkError(
        f"transformers cannot load the model: {text[:300]}",
        where=str(folder),
        hint="check that the model's files are complete, and that the installed transformers supports the model",
    )


def max_context_length(configuration: Any) -> int | None:
    """Return a model's context length in tokens; None if its configuration does not contain it."""
    configuration = configuration.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        value = getattr(configuration, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_embedding_rows(model: Any, tokenizer: Tokenizer) -> None:
    """Refuse a model with fewer embedding rows than its tokenizer has tokens.

    Raises:
        XtkError: with both numbers.
    """
    _check_row_count(model.get_input_embeddings().weight.shape[0], tokenizer)


def _check_row_count(rows: int, tokenizer: Tokenizer) -> None:
    if rows < len(tokenizer):
        raise XtkError(
            f"the model's embedding has only {rows:,} rows for the {len(tokenizer):,} tokens of its tokenizer",
            where=str(tokenizer.name),
            hint="use the model's original tokenizer, or xtk distill --resize-vocabulary, which adds the missing rows",
        )


class BackboneWithHead(nn.Module):
    """A causal language model split into a backbone, which returns hidden states, and an output head.

    A forward pass at construction finds how the model transforms its head's output: a scale, a soft cap, or not at
    all. If it is another transformation, or the head is not a matrix, logits replace the hidden states: correct, but
    with more memory.

    Args:
        model: any causal language model of transformers, with or without peft's LoRA, also on its head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._logit_transform = self._find_logit_transform()
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
        except Exception as wrong:  # a configuration that fits its weights may still be impossible to run
            cause = " ".join(str(wrong).split())[:300]
            raise XtkError(
                f"the model's forward pass fails: {type(wrong).__name__}: {cause}",
                where=str(getattr(inner, "name_or_path", "") or type(inner).__name__),
                hint="check that config.json belongs to these weights; if memory is short, use a smaller model",
            ) from wrong
        finally:
            watch.remove()
        self.model.train(training)
        if len(read) != 1 or not _is_close(states.to(read[0].device), read[0]):
            return None
        ramp = torch.linspace(-90, 90, made.shape[-1], dtype=torch.float64, device=made.device)
        ramp = ramp.to(read[0].dtype).expand_as(made).float()
        return next(
            (after for after in _candidate_transforms(inner.config) if _is_close(after.apply(ramp), made.float())), None
        )

    @property
    def head(self) -> OutputHead:
        """The output head with the model's parameters; without a weight if the model cannot be split."""
        if self._logit_transform is None:
            return OutputHead(None)
        found = _split_head(self._base_model.get_output_embeddings(), shared=True)
        assert found is not None
        linear, adapters = found
        bias = None if linear.bias is None else to_local_tensor(linear.bias)
        weight = to_local_tensor(linear.weight)
        return OutputHead(
            weight, bias, self._logit_transform.scale, self._logit_transform.softcap, adapters, self._shard
        )

    def compile_backbone(self, backend: str = "inductor") -> None:
        """Compile the backbone in place, for sequences of any length; parameter names do not change.

        Args:
            backend: torch.compile backend.
        """
        (self.model if self._logit_transform is None else self._backbone).compile(dynamic=True, backend=backend)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        """Shard matrices, and the vocabulary of the head, over the processes of a one-dimensional mesh.

        Raises:
            XtkError: the model does not support tensor parallelism.
        """
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
        if self._packing is None:
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
            more["position_ids"] = torch.from_numpy(positions).to(input_ids.device)[None]
            if self._packing == packed_attention.ATTENTION_NAME:
                more["packed"] = packed
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


def _candidate_transforms(configuration: Any) -> list[LogitTransform]:
    configuration = configuration.get_text_config()
    values = [getattr(configuration, name, None) for name in LOGIT_SCALE_KEYS]
    numbers = [float(number) for number in values if isinstance(number, int | float) and number]
    scales = [1.0, *numbers, *(1 / number for number in numbers)]
    caps = [None, *(float(cap) for name in SOFTCAP_KEYS if (cap := getattr(configuration, name, None)))]
    return [LogitTransform(scale, softcap) for scale in scales for softcap in caps]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp_min(1)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= RELATIVE_TOLERANCE * scale)


def _split_head(head: Any, *, shared: bool = False) -> tuple[nn.Linear, list[HeadAdapter]] | None:
    """Return a head's linear layer and its LoRA adapters; None for other heads.

    Offloaded, quantized and sharded matrices, and variants of LoRA, are not supported.

    Args:
        head: the head's module.
        shared: accept a matrix that xtk has sharded over processes.
    """
    if type(head).__name__ == "ModulesToSaveWrapper":
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    adapters: list[HeadAdapter] = []
    if hasattr(head, "lora_A") and hasattr(head, "base_layer"):
        if not (head.disable_adapters or head.merged):
            names = [name for name in head.active_adapters if name in head.lora_A]
            if head.lora_variant or any(head.lora_B[name].bias is not None for name in names):
                return None
            adapters = [
                HeadAdapter(
                    head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name], head.lora_dropout[name]
                )
                for name in names
            ]
        head = head.base_layer
    if type(head) is not nn.Linear or head.weight.device.type == "meta":
        return None
    if type(head.weight) is not nn.Parameter and not (shared and hasattr(head.weight, "to_local")):
        return None
    return head, adapters
