"""Checks of weight files: missing, unexpected, misshapen and non-finite weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtk.errors import CorruptError
from xtk.models.safetensors_headers import WeightMismatches, format_names, read_weight_headers
from xtk.parallel import process_group
from xtk.parallel.fsdp_and_tensor_parallel import to_local_tensor

_HINT = "copy or download the model again"
# safetensors dtypes of quantized weights; their tensor names depend on the quantization library.
QUANTIZED_DTYPES = ("U8", "I8", "I4", "F8_E4M3", "F8_E5M2", "I32")


def check_adapter_weights(model: Any, adapter: Path) -> None:
    """Refuse an adapter whose files lack weights of the peft model, or have others or ones that are not finite."""
    stored = {name: shape for name, (_, shape) in read_weight_headers(adapter).items()}
    _compare_adapter_weights(model, stored).check(adapter)
    check_weights_finite(model, adapter)


def _compare_adapter_weights(model: Any, stored: Mapping[str, tuple[int, ...]]) -> WeightMismatches:
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        needed = get_peft_model_state_dict(model, save_embedding_layers=False)
    # An adapter file may also contain the embeddings, which peft loads into the base model.
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return WeightMismatches(
        tuple(sorted(needed.keys() - stored.keys())),
        tuple(sorted(name for name in stored if name not in needed and name not in own)),
        tuple(
            (name, stored[name], tuple(needed[name].shape))
            for name in sorted(needed.keys() & stored.keys())
            if stored[name] != tuple(needed[name].shape)
        ),
    )


def compare_headers_with_config(
    configuration: Any, headers: Mapping[Path, Mapping[str, tuple[str, tuple[int, ...]]]]
) -> dict[Path, WeightMismatches]:
    """Return {folder: mismatches} between file headers and the model of a configuration, without reading weights.

    transformers loads meta tensors, because it knows which weights are tied and their names in older files. Quantized
    weights and models with their own Python code are not checked.
    `headers`: {folder: result of `read_weight_headers`}, first of the model, then of its adapters.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    name = NAMES.get(getattr(configuration, "model_type", ""))
    known = getattr(transformers, name, None) if isinstance(name, str) else None
    (folder, stored), *adapters = headers.items()
    packed = getattr(configuration, "quantization_config", None) or any(
        kind in QUANTIZED_DTYPES for kind, _ in stored.values()
    )
    if known is None or packed:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, loading_info = known.from_pretrained(
                None,
                config=configuration,
                state_dict={name: torch.empty(shape, device="meta") for name, (_, shape) in stored.items()},
                dtype=torch.float32,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            mismatches = {folder: WeightMismatches.from_loading_info(loading_info)}
            for adapter, entries in adapters:
                import peft

                with torch.device("meta"):
                    adapted = peft.PeftModel(
                        model, peft.PeftConfig.from_pretrained(str(adapter)), low_cpu_mem_usage=True
                    )
                shapes = {name: shape for name, (_, shape) in entries.items()}
                mismatches[adapter] = _compare_adapter_weights(adapted, shapes)
    except Exception:  # some models cannot be built from meta tensors; then there is nothing to check
        return {}
    return mismatches


def non_finite_parameters(model: Any) -> list[str]:
    """Return the names of a model's parameters with NaN or infinity in this process's shards.

    One pass over memory, without a copy; quantized weights and meta tensors are skipped.
    """
    return [name for name, parameter in model.named_parameters() if not _is_finite(to_local_tensor(parameter))]


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return True
    return all(bool(torch.isfinite(one)) for one in torch.aminmax(tensor.detach()))  # both are NaN if any value is


def check_weights_finite(model: Any, folder: Path) -> None:
    """Refuse weights with NaN or infinity in their dtype in memory; collective if they are sharded."""
    names = non_finite_parameters(model)
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        names = sorted(set().union(*process_group.all_gather_object(names)))
    if names:
        dtype = str(model.get_parameter(names[0]).dtype).removeprefix("torch.")
        raise CorruptError(
            f"the model has weights that are NaN or infinite in {dtype}: {len(names):,} ({format_names(names)})",
            where=str(folder),
            hint="use --dtype bfloat16 or --dtype float32" if dtype == "float16" else _HINT,
        )
