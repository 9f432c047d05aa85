"""What kind of model it is, how its attention is computed, and in which dtype its weights are."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from xtk.artifacts.files import read_json
from xtk.doctor.case import Case, Finding, Side
from xtk.models.preparation import TRAINED_IN

# How safetensors calls what no optimizer updates.
PACKED = ("U8", "I8", "I4", "F8_E4M3", "F8_E5M2", "I32")


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
            what = f"missing files of weights: {len(files)} of {len(set(named.values()))} ({_some(files)})"
            yield Finding("tensors", level, what, side.name, hint, {"files": files, "tensors": lost})
            continue
        missing, others = _lacking(side, named)
        if missing:
            what = f"missing tensors of the model: {len(missing):,} ({_some(missing)})"
            yield Finding("tensors", level, what, side.name, hint, {"tensors": len(missing)})
        if others:
            what = f"tensors of other shapes than the configuration gives them: {len(others):,} ({_some(others)})"
            yield Finding("tensors", level, what, side.name, "config.json of this very model", {"shapes": len(others)})


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _named(side: Side) -> dict[str, str]:
    """Return {tensor: file} as the index of the weights has it; empty where transformers reads none."""
    index = side.folder / "model.safetensors.index.json"
    if not index.is_file() or (side.folder / "model.safetensors").is_file():
        return {}
    named = read_json(index).get("weight_map")
    return {str(name): str(file) for name, file in named.items()} if isinstance(named, dict) else {}


def _lacking(side: Side, named: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the tensors that the model has and its files have not, and those that have another shape there.

    transformers itself loads them, without content: it knows which are tied, and what older files call them. Of what
    it cannot load so, and of packed weights, nothing is said; of embedding and head `rows` tells.
    """
    import torch
    import transformers

    known = class_of(side)
    if known is None or _is_packed(side):
        return [], []
    stored = {name: shape for name, (_, shape) in side.tensors.items() if not named or name in named}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, told = known.from_pretrained(
                None,
                config=transformers.AutoConfig.from_pretrained(side.folder, local_files_only=True),
                state_dict={name: torch.empty(shape, device="meta") for name, shape in stored.items()},
                dtype=torch.float32,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception:  # whatever a model does that tensors without content cannot
        return [], []
    rows = side.embedding[1] if side.embedding else None
    others = [name for name, shape, _ in told["mismatched_keys"] if not shape or shape[0] != rows]
    return sorted(told["missing_keys"]), sorted(others)


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
