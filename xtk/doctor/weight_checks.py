"""What kind of model it is, how its attention is computed, and in which dtype its weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from xtk.doctor.inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.models.causal_lm import load_model_config
from xtk.models.safetensors_headers import INDEX_FILE, SINGLE_FILE, format_names, read_weight_headers, read_weight_index
from xtk.models.student_model import TRAINABLE_DTYPES
from xtk.models.weight_validation import QUANTIZED_DTYPES, compare_headers_with_config


def attention(inputs: DoctorInputs) -> Iterator[Finding]:
    """Ask transformers whether it knows the model, and how it can attend."""
    for side in inputs.models:
        if not side.config:
            continue
        kind = side.config.get("model_type")
        known = transformers_class(side)
        if known is None and side.config.get("auto_map"):
            what = f"{kind} is Python code that comes with the model"
            yield Finding("attention", "warning", what, side.name, "--trust-remote-code, once you have read it")
        elif known is None:
            what = f"this transformers knows no causal language model of the type {kind}"
            yield Finding("attention", "error", what, side.name, "a newer transformers; or another model")
        else:
            yield _attention_finding(side, known, inputs.plan.attn_implementation)


def _attention_finding(side: DoctorModel, known: Any, requested: str) -> Finding:
    ways = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    able = ["eager", *(name for name, flag in ways.items() if getattr(known, flag, False))]
    told = f"{known.__name__}, attention by {', '.join(able)}"
    if side.role == "student" and requested in ways and requested not in able:
        hint = "--attn-implementation " + able[-1]
        return Finding(
            "attention", "error", f"{known.__name__} has no {requested}, only {', '.join(able)}", side.name, hint
        )
    if "sdpa" not in able:
        what = f"{told}: its memory grows with the square of a row's length"
        return Finding("attention", "warning", what, side.name, "shorter documents: --max-length, --max-batch-tokens")
    return Finding("attention", "ok", told, side.name, figures={"attention": able})


def transformers_class(model: DoctorModel) -> Any:
    """Return transformers' class of a model; None if it knows none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    name = NAMES.get(model.config.get("model_type"))
    return getattr(transformers, name, None) if isinstance(name, str) else None


def weight_tensors(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find files and tensors of the weights that are not there, which transformers would make up or fail at."""
    for side in inputs.models:
        if not side.tensor_headers:
            continue
        # A cache needs no teacher any more.
        level = "note" if side.role == "teacher" and inputs.cache is not None else "error"
        hint = "copy or download the model again"
        named = _tensor_files(side)
        files = sorted({file for file in named.values() if not (side.folder / file).is_file()})
        if files:
            lost = sum(file in files for file in named.values())
            what = f"missing files of weights: {len(files)} of {len(set(named.values()))} ({format_names(files)})"
            yield Finding(
                "weight_tensors", level, what, side.name, hint, {"missing_files": files, "missing_tensors": lost}
            )
            continue
        yield from _compare_headers(side, level, hint)


def _compare_headers(side: DoctorModel, level: str, hint: str) -> Iterator[Finding]:
    """Compare the headers of the files with the model, and with the adapter, that the configurations describe."""
    headers = {side.folder: side.tensor_headers}
    if side.adapter is not None:
        headers[side.adapter] = read_weight_headers(side.adapter)
    try:
        configuration = load_model_config(side.folder)
    except XtkError as wrong:
        if "auto_map" not in side.config:  # of its own code `attention` tells
            yield Finding("weight_tensors", level, wrong.what, side.name, wrong.hint or "")
        return
    rows = side.embedding[1] if side.embedding else None
    for folder, found in compare_headers_with_config(configuration, headers).items():
        of = "adapter" if folder == side.adapter else "model"
        if missing := list(found.missing):
            what = f"missing tensors of the {of}: {len(missing):,} ({format_names(missing)})"
            yield Finding("weight_tensors", level, what, side.name, hint, {"missing_tensors": len(missing)})
        # Of embedding and head `rows` tells.
        if others := [name for name, shape, _ in found.reshaped if of == "adapter" or not shape or shape[0] != rows]:
            what = (
                f"tensors of other shapes than the configuration gives them: {len(others):,} ({format_names(others)})"
            )
            yield Finding(
                "weight_tensors",
                level,
                what,
                side.name,
                "config.json of this very model",
                {"mismatched_tensors": len(others)},
            )
        if more := list(found.unexpected):
            what = f"tensors that the {of} does not use: {len(more):,} ({format_names(more)})"
            yield Finding("weight_tensors", "note", what, side.name, "", {"unexpected_tensors": len(more)})


def _tensor_files(side: DoctorModel) -> dict[str, str]:
    """Return {tensor: file} as the index of the weights has it; empty where transformers reads none."""
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
        told = ", ".join(f"{count:,} in {kind}" for kind, count in kinds.most_common())
        if _is_quantized(side) and side.role == "student":
            what = f"packed weights are not trained ({told})"
            yield Finding("dtypes", "error", what, side.name, "the model as it was before; --load-in-4bit packs it")
        else:
            yield Finding("dtypes", "ok", f"weights: {told}", side.name, figures={"tensors_by_dtype": dict(kinds)})
    plan = inputs.plan
    if plan.dtype not in TRAINABLE_DTYPES:
        what, hint = f"no student is trained in {plan.dtype}", f"--dtype {' or '.join(TRAINABLE_DTYPES)}"
        yield Finding("dtypes", "error", what, inputs.student.name, hint)
    elif plan.dtype == "bfloat16":
        what = "weights held in bfloat16 lose updates below a 256th of their size"
        yield Finding("dtypes", "warning", what, inputs.student.name, "--dtype float32 --mixed-precision bf16")
    wants = plan.mixed_precision == "bf16" or "bfloat16" in (plan.dtype, plan.teacher_dtype)
    if wants and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("dtypes", "error", "this GPU has no bfloat16", "", "--mixed-precision no")
    elif plan.mixed_precision == "no" and cuda:
        what = "all is computed in float32 on a GPU, at a fraction of its speed"
        yield Finding("dtypes", "note", what, "", "--mixed-precision bf16")
