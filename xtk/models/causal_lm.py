"""Loading of causal language models, and checks of their files."""

from __future__ import annotations

import gc
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from xtk import terminal
from xtk.errors import CorruptError, XtkError, require_package
from xtk.models.resolver import ModelRef
from xtk.models.safetensors_headers import ADAPTER_FILE, WeightMismatches, read_weight_headers, weight_files
from xtk.models.weight_validation import (
    check_adapter_weights,
    check_weights_finite,
    compare_headers_with_config,
)
from xtk.progress import phase
from xtk.text.model_config_json import hub_kernel_repositories, read_model_config
from xtk.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Arguments of `from_pretrained` that determine the devices of weights.
PLACEMENT_OPTIONS = frozenset({"device_map", "max_memory", "offload_folder"})


def silence_transformers() -> None:
    """Disable warnings and progress bars of transformers, and warnings of bitsandbytes; errors are still shown."""
    import transformers

    # On a CPU it warns that it has no kernel of the hub, also if nothing is quantized.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def default_device() -> torch.device:
    """Return the CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free_device_memory() -> None:
    """Free the memory of models that are no longer used, also of those in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_causal_lm(
    ref: ModelRef, *, device: torch.device | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Load a model; an adapter is merged into its weights, or loaded without merging if these are quantized.

    `device`: None: the CPU; ignored if `options`, further arguments of `from_pretrained`, determine the devices.
    """
    folder, options = ref.folder, dict(options or {})
    configuration = load_model_config(ref)
    options |= quantized_placement(configuration, options, device)
    _check_weight_files(folder)
    _reject_hub_kernels([str(options.get("attn_implementation", ""))], "attn_implementation", ref)
    try:
        with warnings.catch_warnings(), phase(f"loading {ref.name or folder}"):
            warnings.simplefilter("ignore")
            model, loading_info = auto_model_class(configuration).from_pretrained(
                folder,
                dtype=getattr(torch, ref.dtype),
                local_files_only=True,
                trust_remote_code=ref.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                **options,
            )
    except Exception as failure:
        raise loading_error(folder, failure) from failure
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
    return model if ref.adapter is None else _load_adapter(model, ref.adapter)


def quantized_placement(
    configuration: Any, options: Mapping[str, Any], device: torch.device | None
) -> dict[str, dict[str, Any]]:
    """Return the `device_map` that loads a quantized model on a GPU; empty for other models and devices.

    Quantized weights are not moved after loading. Without it, transformers leaves those of most methods on the CPU.
    """
    is_quantized = any(
        getattr(source, "quantization_config", None) for source in (configuration, configuration.get_text_config())
    )
    is_quantized = is_quantized or options.get("quantization_config") is not None
    if device is None or device.type == "cpu" or not is_quantized or PLACEMENT_OPTIONS.intersection(options):
        return {}
    return {"device_map": {"": device}}


def auto_model_class(configuration: Any) -> Any:
    """Return transformers' loader that keeps all weights of a model.

    For some models with images, such as Qwen 3.5, that of causal language models takes a class for text alone, which
    drops the weights of images without a message.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kind = getattr(configuration, "model_type", "")
    text_class = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    full_class = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    drops_weights = text_class not in (None, full_class) and full_class in (configuration.architectures or ())
    return transformers.AutoModelForImageTextToText if drops_weights else transformers.AutoModelForCausalLM


def _fix_tied_head_flag(model: Any, folder: Path) -> None:
    """Set tie_word_embeddings to false where the weight files contain a separate output head.

    transformers uses the head in the files then; vLLM, which reads the configuration, would use the embedding.
    """
    parts = (model.config, model.config.get_text_config())
    stated = [part for part in parts if getattr(part, "tie_word_embeddings", False)]
    if not stated:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight and not head.weight.is_meta:
        terminal.note_once(
            f"warning: {folder}: config.json has tie_word_embeddings true, but the weights contain a separate output "
            "head; xtk uses the head, other programs may use the embedding"
        )
        for part in stated:
            part.tie_word_embeddings = False


def check_loadable(ref: ModelRef, tokenizer: Tokenizer) -> None:
    """Check that a model can be loaded, without reading its weights, so that errors come before hours of other work."""
    configuration = load_model_config(ref)
    _check_weight_files(ref.folder)
    headers = {ref.folder: read_weight_headers(ref.folder)}
    if ref.adapter is not None:
        check_adapter(ref.adapter)
        headers[ref.adapter] = read_weight_headers(ref.adapter)
    rows = getattr(configuration.get_text_config(), "vocab_size", None)
    if isinstance(rows, int):
        _check_row_count(rows, tokenizer)
    for place, differences in compare_headers_with_config(configuration, headers).items():
        differences.check(place, quiet=True)


def load_model_config(ref: ModelRef) -> Any:
    """Return the transformers configuration of a model."""
    import transformers

    silence_transformers()
    folder = ref.folder
    content = read_model_config(folder)
    if not content:
        raise XtkError(
            "the folder contains no model: config.json is missing",
            where=str(folder),
            hint="use a folder written by save_pretrained, or a hub id",
        )
    _reject_hub_kernels(hub_kernel_repositories(content), str(folder / "config.json"), ref)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=ref.trust_remote_code
            )
    except Exception as failure:
        raise loading_error(folder, failure) from failure


def _reject_hub_kernels(names: Sequence[str], where: str, ref: ModelRef) -> None:
    """Refuse kernels that would be downloaded from a hub and run, without the user's consent."""
    if repositories := [] if ref.trust_remote_code else [name for name in names if "/" in name]:
        raise XtkError(
            f"the model needs the attention kernel {repositories[0]}, which is code from the Hugging Face hub",
            where=where,
            hint='use --trust-remote-code if you trust it, or set attn_implementation to "sdpa"',
        )


def _check_weight_files(folder: Path) -> None:
    """Refuse a folder without safetensors weights."""
    if weight_files(folder):
        return
    what = "the folder contains no weights (*.safetensors)"
    hint = "copy or download the model's *.safetensors files into it"
    if any(folder.glob("*.bin")):
        what = "the model's weights are pickle files (*.bin), which xtk does not load"
        hint = "load the model with transformers and save it with save_pretrained, which writes safetensors"
    raise XtkError(what, where=str(folder), hint=hint)


def _load_adapter(model: Any, adapter: Path) -> Any:
    """Return a model with an adapter, merged unless the model is quantized."""
    check_adapter(adapter)
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if getattr(model, "quantization_method", None):
                loading_info = model.load_adapter(str(adapter))
                WeightMismatches.from_loading_info(loading_info.to_dict()).check(adapter)
                return model
            # peft would read the weights through the first GPU in each process, and moves them to the model afterwards.
            adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
            check_adapter_weights(adapted, adapter)
            return adapted.merge_and_unload()
    except Exception as failure:
        raise loading_error(adapter, failure) from failure


def check_adapter(adapter: Path) -> None:
    """Refuse adapters without files, and missing peft, before peft reads."""
    for path in (adapter / "adapter_config.json", adapter / ADAPTER_FILE):
        if not path.is_file():  # peft would download weights from the hub, or read a pickle
            raise XtkError(
                f"the folder of the adapter has no file {path.name}",
                where=str(adapter),
                hint="save the adapter again with peft's save_pretrained, or download it again",
            )
    require_package("peft", "an adapter needs", where=str(adapter))


def loading_error(folder: Path, failure: Exception) -> XtkError:
    """Return an XtkError for an exception that transformers or peft raised while loading a folder."""
    if isinstance(failure, XtkError):
        return failure
    text = " ".join(str(failure).split())
    if "trust_remote_code" in text:
        return XtkError(
            "the model needs Python code from its own folder",
            where=str(folder),
            hint="use --trust-remote-code if you trust the code",
        )
    if unsupported := re.search(r"Unrecognized configuration class <class '[\w.]+?(\w+)Config'>", text):
        return XtkError(
            f"transformers has no causal language model for the configuration of this model ({unsupported[1]})",
            where=str(folder),
            hint="use a model for text alone, such as the language model from which this one was made",
        )
    if type(failure).__name__ == "SafetensorError" or "safetensors" in text.lower():
        return CorruptError(
            f"the model's weights cannot be read: {text}", where=str(folder), hint="copy or download the model again"
        )
    is_plain = isinstance(failure, ValueError | OSError | RuntimeError | ImportError)
    if not is_plain or isinstance(failure, RecursionError):
        text = f"{type(failure).__name__}: {text}"  # the text of other types may be a bare name, or empty
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
    """Refuse a model with fewer embedding rows than its tokenizer has tokens."""
    _check_row_count(model.get_input_embeddings().weight.shape[0], tokenizer)


def _check_row_count(rows: int, tokenizer: Tokenizer) -> None:
    if rows < len(tokenizer):
        raise XtkError(
            f"the model's embedding has only {rows:,} rows for the {len(tokenizer):,} tokens of its tokenizer",
            where=str(tokenizer.name),
            hint="use the model's original tokenizer, or "
            "add rows with model.resize_token_embeddings(len(tokenizer)) and save_pretrained",
        )
