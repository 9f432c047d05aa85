"""Loading causal language models, and cutting them between hidden states and logits.

Logits `[B, T, V]` are the largest thing in distillation. Cut before the head, a model gives hidden
states, and whoever needs logits makes those of a few rows at a time.
"""

from __future__ import annotations

import importlib.util
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
from xtk.models.output_head import HeadAdapter, HeadShard, OutputHead
from xtk.models.packed_attention import PackedSequence
from xtk.models.safetensors_headers import ADAPTER_FILE, read_weight_headers, weight_files
from xtk.models.weight_sharding import apply_tensor_parallel, to_local_tensor
from xtk.models.weight_validation import (
    WeightMismatches,
    check_adapter_weights,
    check_weights_finite,
    compare_headers_with_config,
    note_once,
)
from xtk.safe_json import parse_json
from xtk.tokens.model_config import hub_kernel_repositories, read_model_config
from xtk.tokens.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RELATIVE_TOLERANCE = 1e-3
CONFIGURATION_BYTES = 1 << 24
LARGEST_RANK = 1024  # of adapters, that peft may allocate whatever their weights are
# Arguments of `from_pretrained` that say where weights go.
PLACEMENT_OPTIONS = frozenset({"device_map", "max_memory", "offload_folder", "distributed_config"})


def silence_transformers() -> None:
    """Silence transformers' advice and progress bars; its errors stay."""
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def default_device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
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
        folder: configuration and safetensors.
        dtype: of its weights.
        device: where it goes; the CPU if left out. Where `options` say where, it stays there.
        trust_remote_code: run the model's own Python code, which the user has to ask for.
        adapter: a folder of peft's, of an adapter of this model, which is merged into its weights (or stands beside
            them, where these are quantised).
        options: more arguments of `from_pretrained`.

    Raises:
        XtkError: there is no model, its files are damaged, weights of it are missing, of another shape or not finite,
            or it wants code of its own to be run.
    """
    import transformers

    options = dict(options or {})
    load_model_config(folder, trust_remote_code=trust_remote_code)
    _check_weight_files(folder)
    _reject_hub_kernels([str(options.get("attn_implementation", ""))], "attn_implementation", trust_remote_code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, told = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by their names
                **options,
            )
    except Exception as wrong:
        raise loading_error(folder, wrong) from wrong
    WeightMismatches.from_loading_info(told).check(folder)
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes 0.50 packs a matrix anew at its first pass in eval mode: for inference
        # alone, since no gradient comes through it from then on, and not at all below 64 columns.
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
    check_weights_finite(model, folder)
    _fix_tied_head_flag(model, folder)
    placed = PLACEMENT_OPTIONS.intersection(options) or getattr(model, "quantization_method", None)
    if device is not None and not placed:
        model = model.to(device)
    return model if adapter is None else _load_adapter(model, adapter)


def _fix_tied_head_flag(model: Any, folder: Path) -> None:
    """Correct a configuration that says that the output head is the embedding, where the files hold another head.

    transformers uses the head of the files then; vLLM, which reads the configuration, would use the embedding.
    """
    parts = (model.config, model.config.get_text_config())
    stated = [part for part in parts if getattr(part, "tie_word_embeddings", False)]
    if not stated:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        note_once(
            f"warning: {folder}: config.json has tie_word_embeddings true, but the weights hold an output head of "
            "their own, which is used; other programs may use the embedding instead"
        )
        for part in stated:
            part.tie_word_embeddings = False


def check_loadable(
    folder: Path, tokenizer: Tokenizer, *, trust_remote_code: bool = False, adapter: Path | None = None
) -> None:
    """Find out what can be known without reading a model's weights, before hours of other work: it can be loaded.

    Args:
        folder: as `load_causal_lm` is given it.
        tokenizer: the model's.
        trust_remote_code: run the model's own Python code.
        adapter: a folder of peft's.

    Raises:
        XtkError: there is no model, its files are damaged, weights of it are missing or of another shape, or it has
            fewer rows than its tokenizer has tokens.
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
    """Return the configuration of a model, as transformers has it.

    Args:
        folder: with config.json.
        trust_remote_code: run the model's own Python code, and kernels of a hub that its configuration names.

    Raises:
        XtkError: there is none, it cannot be read, it is larger than any model's, or it wants code of others to be run.
    """
    import transformers

    silence_transformers()
    content = read_model_config(folder)
    if not content:
        raise XtkError("there is no model in this folder (config.json)", where=str(folder))
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
    """Refuse to download and run code of a hub.

    Raises:
        XtkError: names the repository.
    """
    if found := [] if trust_remote_code else [name for name in names if "/" in name]:
        raise XtkError(
            f"this model runs a kernel from a hub: {found[0]}",
            where=where,
            hint="--trust-remote-code, if you trust it; or attn_implementation sdpa",
        )


def _check_weight_files(folder: Path) -> None:
    """Refuse a folder without weights.

    Raises:
        XtkError: what it lacks.
    """
    if not weight_files(folder):
        pickled = any(folder.glob("*.bin"))
        raise XtkError(
            "this model's weights are pickles" if pickled else "there are no weights in this folder (*.safetensors)",
            where=str(folder),
            hint="save it again with save_pretrained, which writes safetensors" if pickled else None,
        )


def _load_adapter(model: Any, adapter: Path) -> Any:
    """Put an adapter into a model.

    Raises:
        XtkError: peft is not there, the adapter's weights are not, or it belongs to another model.
    """
    check_adapter(adapter)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if getattr(model, "quantization_method", None):
                told = model.load_adapter(str(adapter))
                WeightMismatches.from_loading_info(told.to_dict()).check(adapter)
                return model
            adapted = PeftModel.from_pretrained(model, str(adapter))
            check_adapter_weights(adapted, adapter)
            return adapted.merge_and_unload()
    except Exception as wrong:
        raise loading_error(adapter, wrong) from wrong


def check_adapter(adapter: Path) -> None:
    """Refuse an adapter without weights, or any where peft is not there, before peft makes anything of its files.

    Raises:
        XtkError: tells which.
        Damaged: its configuration states a rank that its weights do not have.
    """
    configuration = adapter / "adapter_config.json"
    for path in (configuration, adapter / ADAPTER_FILE):
        if not path.is_file():  # peft would download weights from the hub, or read a pickle
            raise XtkError(f"there are no weights in this adapter ({path.name})", where=str(adapter))
    with configuration.open("rb") as stream:
        content = stream.read(CONFIGURATION_BYTES).decode(errors="replace")
    described = parse_json(content, what="this file", where=str(configuration))
    if not isinstance(described, dict):
        raise CorruptError("this file is no JSON object", where=str(configuration))
    patterns = described.get("rank_pattern")
    stated = [described.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    largest = max(
        (shape[0] for name, (_, shape) in read_weight_headers(adapter).items() if ".lora_A." in name), default=0
    )
    for rank in stated:
        if isinstance(rank, int | float) and rank > max(largest, LARGEST_RANK):
            what = f"this adapter states the rank {rank:,}, and the largest of its weights is {largest:,}"
            raise CorruptError(what, where=str(configuration), hint="copy or download the adapter again")
    if importlib.util.find_spec("peft") is None:
        raise XtkError("an adapter needs peft", where=str(adapter), hint="pip install 'xtk[peft]'")


def loading_error(folder: Path, wrong: Exception) -> XtkError:
    """Return what a user can act on for what transformers or peft raised over the files of a folder."""
    if isinstance(wrong, XtkError):
        return wrong
    text = " ".join(str(wrong).split())
    if "trust_remote_code" in text:
        return XtkError(
            "this model runs Python code of its own", where=str(folder), hint="--trust-remote-code, if you trust it"
        )
    if type(wrong).__name__ == "SafetensorError" or "safetensors" in text.lower():
        return CorruptError(
            f"the weights cannot be read: {text}", where=str(folder), hint="copy or download the model again"
        )
    if not isinstance(wrong, ValueError | OSError | RuntimeError | ImportError) or isinstance(wrong, RecursionError):
        text = f"{type(wrong).__name__}: {text}"  # whose text alone is a name, or nothing
    return XtkError(f"this model cannot be loaded: {text[:300]}", where=str(folder))


def max_context_length(configuration: Any) -> int | None:
    """Return the most tokens that a model was made to read; None if its configuration does not say."""
    configuration = configuration.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        value = getattr(configuration, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_embedding_rows(model: Any, tokenizer: Tokenizer) -> None:
    """Refuse a model that has no embedding row for a token of its tokenizer.

    Raises:
        XtkError: tells how many rows and tokens there are.
    """
    _check_row_count(model.get_input_embeddings().weight.shape[0], tokenizer)


def _check_row_count(rows: int, tokenizer: Tokenizer) -> None:
    if rows < len(tokenizer):
        raise XtkError(
            f"the model has {rows:,} vocabulary rows; its tokenizer names {len(tokenizer):,} tokens",
            where=str(tokenizer.name),
            hint="the tokenizer that the model was trained with; or xtk distill --resize-vocabulary, which adds rows",
        )


class BackboneWithHead(nn.Module):
    """A causal language model that gives hidden states, with its head apart.

    What the model makes of its head's output is tried once: a scale, a soft cap, nothing. Where it is something else,
    or the head is no matrix, logits stand in for hidden states: right, and larger.

    Args:
        model: any causal language model of transformers; with or without LoRA of peft, also on its head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._logit_transform = self._find_logit_transform()
        self._shard: HeadShard | None = None
        self._packing: str | None = None  # the attention with which rows of documents are read, once it was found

    @property
    def _base_model(self) -> Any:
        """The model itself, inside of what peft puts around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def _backbone(self) -> Any:
        """What makes hidden states; the whole model, if it does not say."""
        inner = self._base_model
        body = inner.base_model
        # Llama 4 calls its body otherwise than it says.
        return getattr(inner, "model", inner) if body is inner else body

    @torch.no_grad()
    def _find_logit_transform(self) -> LogitTransform | None:
        """Return what the model does to `head(body(ids))`; None if it cannot be cut there."""
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
        except Exception as wrong:  # a configuration that fits its weights may describe what cannot be computed
            told = " ".join(str(wrong).split())[:300]
            raise XtkError(
                f"this model cannot be run as its configuration describes it: {type(wrong).__name__}: {told}",
                where=f"{type(inner).__name__} of {getattr(inner, 'name_or_path', '')}",
                hint="config.json of this very model; or a smaller model, where memory is what is missing",
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
        """The head, as parameters."""
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
        """Compile what makes hidden states, in place, for rows of any length: names of parameters stay as they are.

        Args:
            backend: torch.compile's.
        """
        (self.model if self._logit_transform is None else self._backbone).compile(dynamic=True, backend=backend)

    def apply_tensor_parallel(self, mesh: Any) -> None:
        """Cut matrices, and the vocabulary of the head, over the processes of a mesh of one dimension.

        Raises:
            XtkError: this model cannot be cut so.
        """
        if self._logit_transform is None:
            raise XtkError(
                "a head that cannot be told from its model is not cut by its vocabulary",
                where=type(self._base_model).__name__,
                hint="--parallel fsdp instead of tp",
            )
        apply_tensor_parallel(self.model, mesh)
        weight = self.head.weight
        assert weight is not None
        self._shard = HeadShard.from_group(len(weight), mesh.get_group())

    @torch.no_grad()
    def enable_packing(self) -> bool:
        """Find how the model reads documents that stand in one row, each by itself; return whether it can.

        It is tried: with attention by document, then with the model's own, which learns of documents by positions.
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
        """Whether several processes can share a row, once `pack` was called: attention is by document, and is ours."""
        return self._packing == packed_attention.ATTENTION_NAME

    def _is_packed(self, ids: Tensor, alone: Tensor) -> bool:
        """Say whether two documents, of 5 and of 7 tokens, are read in one row as they are alone."""
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
            return False  # layers look back less far than they say
        return _is_close(together, alone)

    def forward(self, input_ids: Tensor, packed: PackedSequence | None = None) -> Tensor:
        """Return hidden states [B, T, H] (or logits [B, T, V] where the head cannot be cut off).

        Args:
            input_ids: [B, T], padded on the right: what stands after a token never changes it, so no mask is needed.
                With `row` [1, T], what this process has of a row of documents.
            packed: the documents, for a model that reads them so (`pack`).
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
    """What a model does to its head's output x: `cap tanh(scale x / cap)`, or `scale x`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits after scale and soft cap."""
        logits = self.scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


# How configurations call the scale of logits; whether it multiplies (Cohere, Falcon-H1, HyperCLOVA X) or divides
# (Granite) is found out by trying.
LOGIT_SCALE_KEYS = ("logit_scale", "logits_scaling", "lm_head_multiplier")
SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def _candidate_transforms(configuration: Any) -> list[LogitTransform]:
    configuration = configuration.get_text_config()
    said = [getattr(configuration, name, None) for name in LOGIT_SCALE_KEYS]
    numbers = [float(number) for number in said if isinstance(number, int | float) and number]
    scales = [1.0, *numbers, *(1 / number for number in numbers)]
    caps = [None, *(float(cap) for name in SOFTCAP_KEYS if (cap := getattr(configuration, name, None)))]
    return [LogitTransform(scale, softcap) for scale in scales for softcap in caps]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp_min(1)
    return found.shape == expected.shape and bool((found - expected).abs().max() <= RELATIVE_TOLERANCE * scale)


def _split_head(head: Any, *, shared: bool = False) -> tuple[nn.Linear, list[HeadAdapter]] | None:
    """Take a head apart, into its matrix and what LoRA adds to it; None for what is neither.

    A matrix that is offloaded, quantised or sharded is none, nor is LoRA in one of its variants.

    Args:
        head: a module.
        shared: whether it was taken apart before its matrix was shared by processes, by xtk.
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
