"""Checks of weights: model type and attention, missing or mismatched tensors, and dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.models.causal_lm import load_model_config
from xtk.models.safetensors_headers import INDEX_FILE, SINGLE_FILE, format_names, read_weight_headers, read_weight_index
from xtk.models.student_model_setup import TRAINABLE_DTYPES
from xtk.models.weight_validation import QUANTIZED_DTYPES, compare_headers_with_config


def attention(inputs: DoctorInputs) -> Iterator[Finding]:
    """Check that transformers supports the model and the attention implementation."""
    for side in inputs.models:
        if not side.config:
            continue
        kind = side.config.get("model_type")
        known = transformers_class(side)
        if known is None and side.config.get("auto_map"):
            what = f"the model type {kind} runs Python code from the model folder"
            yield Finding("attention", "warning", what, side.name, "read the code, then use --trust-remote-code")
        elif known is None:
            what = f"the installed transformers does not support causal language models of type {kind}"
            yield Finding("attention", "error", what, side.name, "install a newer transformers, or use another model")
        else:
            yield _attention_finding(side, known, inputs.plan.attn_implementation)


def _attention_finding(side: DoctorModel, known: Any, requested: str) -> Finding:
    flags = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    able = ["eager", *(name for name, flag in flags.items() if getattr(known, flag, False))]
    message = f"{known.__name__}, attention implementations: {', '.join(able)}"
    if side.role == "student" and requested in flags and requested not in able:
        hint = "use --attn-implementation " + able[-1]
        return Finding(
            "attention",
            "error",
            f"{known.__name__} does not support {requested}, only {', '.join(able)}",
            side.name,
            hint,
        )
    if "sdpa" not in able:
        what = f"{message}: memory grows with the square of the sequence length"
        return Finding("attention", "warning", what, side.name, "use a smaller --max-length or --max-batch-tokens")
    return Finding("attention", "ok", message, side.name, figures={"attention": able})


def transformers_class(model: DoctorModel) -> Any:
    """Return transformers' class for a model; None if it has none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    name = NAMES.get(model.config.get("model_type"))
    return getattr(transformers, name, None) if isinstance(name, str) else None


def weight_tensors(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find missing weight files and tensors, which transformers would initialize randomly or fail on."""
    for side in inputs.models:
        if not side.tensor_headers:
            continue
        # With a cache the teacher's weights are not needed.
        level = "note" if side.role == "teacher" and inputs.cache is not None else "error"
        hint = "copy or download the model again"
        named = _tensor_files(side)
        files = sorted({file for file in named.values() if not (side.folder / file).is_file()})
        if files:
            lost = sum(file in files for file in named.values())
            what = f"missing weight files: {len(files)} of {len(set(named.values()))} ({format_names(files)})"
            yield Finding(
                "weight_tensors", level, what, side.name, hint, {"missing_files": files, "missing_tensors": lost}
            )
            continue
        yield from _compare_headers(side, level, hint)


def _compare_headers(side: DoctorModel, level: str, hint: str) -> Iterator[Finding]:
    """Compare the headers of weight files with the tensors that the configurations of model and adapter describe."""
    headers = {side.folder: side.tensor_headers}
    if side.adapter is not None:
        headers[side.adapter] = read_weight_headers(side.adapter)
    try:
        configuration = load_model_config(side.folder)
    except XtkError as failure:
        if "auto_map" not in side.config:  # the check `attention` reports models with custom code
            yield Finding("weight_tensors", level, failure.what, side.name, failure.hint or "")
        return
    rows = side.embedding[1] if side.embedding else None
    for folder, mismatches in compare_headers_with_config(configuration, headers).items():
        part = "adapter" if folder == side.adapter else "model"
        if missing := list(mismatches.missing):
            what = f"missing tensors of the {part}: {len(missing):,} ({format_names(missing)})"
            yield Finding("weight_tensors", level, what, side.name, hint, {"missing_tensors": len(missing)})
        # The check `embedding_rows` reports embedding and head.
        if others := [
            name for name, shape, _ in mismatches.reshaped if part == "adapter" or not shape or shape[0] != rows
        ]:
            what = f"tensors whose shape does not match config.json: {len(others):,} ({format_names(others)})"
            yield Finding(
                "weight_tensors",
                level,
                what,
                side.name,
                "use the config.json of these weights",
                {"mismatched_tensors": len(others)},
            )
        if more := list(mismatches.unexpected):
            what = f"unused tensors in the {part}: {len(more):,} ({format_names(more)})"
            yield Finding("weight_tensors", "note", what, side.name, "", {"unexpected_tensors": len(more)})


def _tensor_files(side: DoctorModel) -> dict[str, str]:
    """Return {tensor: file} from the index of sharded weights; empty if transformers uses no index."""
    return (
        {}
        if (side.folder / SINGLE_FILE).is_file() or not (side.folder / INDEX_FILE).is_file()
        else read_weight_index(side.folder)
    )


def _is_quantized(side: DoctorModel) -> bool:
    return "quantization_config" in side.config or any(
        kind in QUANTIZED_DTYPES for kind, _ in side.tensor_headers.values()
    )


def dtypes(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the dtype of the weights with that of the run."""
    import torch

    cuda = torch.cuda.is_available()
    for side in inputs.models:
        if not side.tensor_headers:
            continue
        kinds = Counter(kind for kind, _ in side.tensor_headers.values())
        counts = ", ".join(f"{count:,} in {kind}" for kind, count in kinds.most_common())
        if _is_quantized(side) and side.role == "student":
            what = f"the student has quantized weights, which cannot be trained ({counts})"
            yield Finding(
                "dtypes", "error", what, side.name, "use the unquantized model; --load-in-4bit quantizes it for LoRA"
            )
        else:
            yield Finding(
                "dtypes", "ok", f"weight tensors: {counts}", side.name, figures={"tensors_by_dtype": dict(kinds)}
            )
    plan = inputs.plan
    if plan.dtype not in TRAINABLE_DTYPES:
        what, hint = f"--dtype {plan.dtype} cannot be trained", f"use --dtype {' or '.join(TRAINABLE_DTYPES)}"
        yield Finding("dtypes", "error", what, inputs.student.name, hint)
    elif plan.dtype == "bfloat16":
        what = "bfloat16 weights lose updates that are smaller than 1/256 of a weight"
        yield Finding("dtypes", "warning", what, inputs.student.name, "use --dtype float32 --mixed-precision bf16")
    wants = plan.mixed_precision == "bf16" or "bfloat16" in (plan.dtype, plan.teacher_dtype)
    if wants and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("dtypes", "error", "this GPU does not support bfloat16", "", "use --mixed-precision no")
    elif plan.mixed_precision == "no" and cuda:
        what = "training in float32 is much slower than bfloat16 on this GPU"
        yield Finding("dtypes", "note", what, "", "use --mixed-precision bf16")
