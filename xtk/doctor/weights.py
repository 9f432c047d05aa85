"""What kind of model it is, how its attention is computed, and in which dtype its weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from xtk.doctor.case import Case, Finding, Side
from xtk.errors import XtkError
from xtk.models.causal_lm import load_configuration
from xtk.models.headers import INDEX, WHOLE, indexed, some, weight_headers
from xtk.models.preparation import TRAINED_IN
from xtk.models.stored_weights import PACKED, differences_of_headers


def attention(case: Case) -> Iterator[Finding]:
    """Ask transformers whether it knows the model, and how it can attend."""
    for side in case.sides:
        if not side.configuration:
            continue
        kind = side.configuration.get("model_type")
        known = class_of(side)
        if known is None and side.configuration.get("auto_map"):
            what = f"{kind} is Python code that comes with the model"
            yield Finding("attention", "warning", what, side.name, "--trust-remote-code, once you have read it")
        elif known is None:
            what = f"this transformers knows no causal language model of the type {kind}"
            yield Finding("attention", "error", what, side.name, "a newer transformers; or another model")
        else:
            yield _attention(side, known, case.plan.attn_implementation)


def _attention(side: Side, known: Any, asked: str) -> Finding:
    ways = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    able = ["eager", *(name for name, flag in ways.items() if getattr(known, flag, False))]
    told = f"{known.__name__}, attention by {', '.join(able)}"
    if side.role == "student" and asked in ways and asked not in able:
        hint = "--attn-implementation " + able[-1]
        return Finding(
            "attention", "error", f"{known.__name__} has no {asked}, only {', '.join(able)}", side.name, hint
        )
    if "sdpa" not in able:
        what = f"{told}: its memory grows with the square of a row's length"
        return Finding("attention", "warning", what, side.name, "shorter documents: --max-length, --max-batch-tokens")
    return Finding("attention", "ok", told, side.name, figures={"attention": able})


def class_of(side: Side) -> Any:
    """Return transformers' class of a model; None if it knows none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    name = NAMES.get(side.configuration.get("model_type"))
    return getattr(transformers, name, None) if isinstance(name, str) else None


def tensors(case: Case) -> Iterator[Finding]:
    """Find files and tensors of the weights that are not there, which transformers would make up or fail at."""
    for side in case.sides:
        if not side.tensors:
            continue
        # A cache needs no teacher any more.
        level = "note" if side.role == "teacher" and case.cache is not None else "error"
        hint = "copy or download the model again"
        named = _named(side)
        files = sorted({file for file in named.values() if not (side.folder / file).is_file()})
        if files:
            lost = sum(file in files for file in named.values())
            what = f"missing files of weights: {len(files)} of {len(set(named.values()))} ({some(files)})"
            yield Finding("tensors", level, what, side.name, hint, {"files": files, "tensors": lost})
            continue
        yield from _compared(side, level, hint)


def _compared(side: Side, level: str, hint: str) -> Iterator[Finding]:
    """Compare the headers of the files with the model, and with the adapter, that the configurations describe."""
    headers = {side.folder: side.tensors}
    if side.adapter is not None:
        headers[side.adapter] = weight_headers(side.adapter)
    try:
        configuration = load_configuration(side.folder)
    except XtkError as wrong:
        if "auto_map" not in side.configuration:  # of its own code `attention` tells
            yield Finding("tensors", level, wrong.what, side.name, wrong.hint or "")
        return
    rows = side.embedding[1] if side.embedding else None
    for folder, found in differences_of_headers(configuration, headers).items():
        of = "adapter" if folder == side.adapter else "model"
        if missing := list(found.missing):
            what = f"missing tensors of the {of}: {len(missing):,} ({some(missing)})"
            yield Finding("tensors", level, what, side.name, hint, {"tensors": len(missing)})
        # Of embedding and head `rows` tells.
        if others := [name for name, shape, _ in found.reshaped if of == "adapter" or not shape or shape[0] != rows]:
            what = f"tensors of other shapes than the configuration gives them: {len(others):,} ({some(others)})"
            yield Finding("tensors", level, what, side.name, "config.json of this very model", {"shapes": len(others)})
        if more := list(found.unexpected):
            what = f"tensors that the {of} does not use: {len(more):,} ({some(more)})"
            yield Finding("tensors", "note", what, side.name, "", {"unexpected": len(more)})


def _named(side: Side) -> dict[str, str]:
    """Return {tensor: file} as the index of the weights has it; empty where transformers reads none."""
    return {} if (side.folder / WHOLE).is_file() or not (side.folder / INDEX).is_file() else indexed(side.folder)


def _is_packed(side: Side) -> bool:
    return "quantization_config" in side.configuration or any(kind in PACKED for kind, _ in side.tensors.values())


def dtypes(case: Case) -> Iterator[Finding]:
    """Compare the dtype of the weights with that of the run."""
    import torch

    cuda = torch.cuda.is_available()
    for side in case.sides:
        if not side.tensors:
            continue
        kinds = Counter(kind for kind, _ in side.tensors.values())
        told = ", ".join(f"{count:,} in {kind}" for kind, count in kinds.most_common())
        if _is_packed(side) and side.role == "student":
            what = f"packed weights are not trained ({told})"
            yield Finding("dtypes", "error", what, side.name, "the model as it was before; --load-in-4bit packs it")
        else:
            yield Finding("dtypes", "ok", f"weights: {told}", side.name, figures={"tensors": dict(kinds)})
    plan = case.plan
    if plan.dtype not in TRAINED_IN:
        what, hint = f"no student is trained in {plan.dtype}", f"--dtype {' or '.join(TRAINED_IN)}"
        yield Finding("dtypes", "error", what, case.student.name, hint)
    elif plan.dtype == "bfloat16":
        what = "weights held in bfloat16 lose updates below a 256th of their size"
        yield Finding("dtypes", "warning", what, case.student.name, "--dtype float32 --mixed-precision bf16")
    wants = plan.mixed_precision == "bf16" or "bfloat16" in (plan.dtype, plan.teacher_dtype)
    if wants and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("dtypes", "error", "this GPU has no bfloat16", "", "--mixed-precision no")
    elif plan.mixed_precision == "no" and cuda:
        what = "all is computed in float32 on a GPU, at a fraction of its speed"
        yield Finding("dtypes", "note", what, "", "--mixed-precision bf16")
