"""Checks of the two models: embedding sizes, special tokens, weights, attention and dtypes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.losses.cells.stop_classes import StopClasses, ordinary_stops_message
from xtk.models.causal_lm import load_model_config
from xtk.models.resolver import ModelRef
from xtk.models.safetensors_headers import INDEX_FILE, SINGLE_FILE, format_names, read_weight_headers, read_weight_index
from xtk.models.student_model_setup import TRAINABLE_DTYPES
from xtk.models.weight_validation import QUANTIZED_DTYPES, compare_headers_with_config
from xtk.projection.special_tokens import match_special_tokens
from xtk.text.tokenizer import Tokenizer
from xtk.text.tokenizer_files import SPECIAL_TOKEN_ROLES

# transformers' name of each implementation, and the attribute of the classes that support it.
ATTENTION_FLAGS = {
    "sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn", "flex_attention": "_supports_flex_attn",
}  # fmt: skip


def embedding_rows(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the sizes of tokenizer, embedding and `vocab_size` in config.json."""
    for side in inputs.models:
        tokens, configured = len(side.tokenizer), side.text_config.get("vocab_size")
        rows = side.embedding[1] if side.embedding else configured
        figures = {"tokens": tokens, "embedding_rows": rows, "vocab_size": configured}
        if not side.config or not side.tensor_headers:
            missing = "weights (*.safetensors)" if side.config else "configuration (config.json)"
            # With a cache the teacher is not needed; weights on the Hub are not downloaded.
            level = "note" if side.is_remote or (side.role == "teacher" and inputs.cache is not None) else "error"
            yield Finding(level, f"the folder has no {missing}", side.name, "use the complete model folder")
        elif not isinstance(rows, int):
            yield Finding("note", "the size of the embedding is unknown", side.name)
        elif configured is not None and rows != configured:
            what = f"the embedding has {rows:,} rows, but vocab_size in config.json is {configured:,}"
            hint = f"if the weights are right, set vocab_size to {rows} in config.json"
            yield Finding("error", what, side.name, hint, figures)
        elif rows < tokens:
            what = f"the embedding has {rows:,} rows, but the tokenizer has {tokens:,} tokens"
            hint = "use the tokenizer that the model was trained with"
            if side.role == "student":
                hint += ", or add rows with model.resize_token_embeddings(len(tokenizer)) and save_pretrained"
            yield Finding("error", what, side.name, hint, figures)
        else:
            spare = f" ({rows - tokens:,} without a token)" if rows > tokens else ""
            yield Finding("ok", f"{tokens:,} tokens, {rows:,} embedding rows{spare}", side.name, figures=figures)


def special_tokens(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report the special tokens of each model, and which of them match."""
    for side in inputs.models:
        yield from _check_roles(side)
    yield from _stop_tokens(inputs)
    student, teacher = (side.tokenizer for side in inputs.models)
    pairs = list(zip(*(ids.tolist() for ids in match_special_tokens(student, teacher)), strict=True))
    named = [f"{_token_name(student, own)} = {_token_name(teacher, other)}" for own, other in pairs]
    shown = "; ".join(named[:6]) + (f"; and {len(named) - 6:,} more" if len(named) > 6 else "")
    figures = {"matched": len(pairs)}
    if any(own in student.end_ids and other in teacher.end_ids for own, other in pairs):
        yield Finding("ok", f"matched special tokens: {shown}", figures=figures)
    else:
        what = f"the end-of-text tokens of student and teacher do not match (matched special tokens: {shown or 'none'})"
        hint = 'match them with build-projection --special-tokens FILE, with {"STUDENT": "TEACHER"} in it, '
        hint += "or set eos_token in tokenizer_config.json"
        yield Finding("warning", what, "", hint, figures)


def _stop_tokens(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report the stop tokens of both models, which losses compare as one event."""
    sides = [side.tokenizer for side in inputs.models]
    for side in sides:
        if side.ordinary_stop_tokens:
            hint = "list the ids of special tokens as eos_token_id in generation_config.json"
            yield Finding("warning", ordinary_stops_message(side), side.name, hint)
    named = [", ".join(_token_name(side, token) for token in sorted(side.stop_ids)) or "none" for side in sides]
    how = "one event" if StopClasses.from_tokenizers(*sides) else "each compared with itself"
    figures = {"student": sorted(sides[0].stop_ids), "teacher": sorted(sides[1].stop_ids)}
    yield Finding("ok", f"stop tokens, {how}: student {named[0]}; teacher {named[1]}", figures={"stop_tokens": figures})


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    return str(tokenizer.special_token_names.get(token, token))


def _check_roles(side: DoctorModel) -> Iterator[Finding]:
    tokenizer = side.tokenizer
    ids = tokenizer.special_token_ids
    roles = {role: ids[role] for role in SPECIAL_TOKEN_ROLES if role in ids}
    shown = ", ".join(f"{role} {_token_name(tokenizer, token)}" for role, token in roles.items())
    if "eos" not in roles:
        what = f"the tokenizer has no eos token (special tokens: {shown or 'none'}), so the end of a text is not marked"
        hint = "set eos_token in tokenizer_config.json"
        yield Finding("warning", what, side.name, hint, {"special_tokens": roles})
        return
    yield Finding("ok", shown, side.name, figures={"special_tokens": roles})
    stops = _generation_config(side).get("eos_token_id", side.text_config.get("eos_token_id"))
    stop_ids = [token for token in (stops if isinstance(stops, list) else [stops]) if isinstance(token, int)]
    if stop_ids and roles["eos"] not in stop_ids:
        names = ", ".join(_token_name(tokenizer, token) for token in stop_ids)
        what = f"eos_token_id is {names}, but the tokenizer's eos is {_token_name(tokenizer, roles['eos'])}"
        hint = "list all tokens that end an answer as eos_token_id in generation_config.json and config.json"
        yield Finding("warning", what, side.name, hint, {"eos_token_id": stop_ids})


def _generation_config(side: DoctorModel) -> dict[str, Any]:
    path = side.folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        config = {}
    return config if isinstance(config, dict) else {}


def attention(inputs: DoctorInputs) -> Iterator[Finding]:
    """Check that transformers supports the model and the attention implementation."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for side in inputs.models:
        if not side.config:
            continue
        kind = side.config.get("model_type")
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        known = getattr(transformers, name, None) if isinstance(name, str) else None
        if known is None and side.config.get("auto_map"):
            what = f"the model type {kind} runs Python code from the model folder"
            yield Finding("warning", what, side.name, "read the code, then use --trust-remote-code")
        elif known is None:
            what = f"the installed transformers does not support causal language models of type {kind}"
            yield Finding("error", what, side.name, "install a newer transformers, or use another model")
        else:
            yield _attention_finding(side, known, inputs.plan.attn_implementation)


def _attention_finding(side: DoctorModel, known: Any, requested: str) -> Finding:
    able = ["eager", *(name for name, flag in ATTENTION_FLAGS.items() if getattr(known, flag, False))]
    message = f"{known.__name__}, attention implementations: {', '.join(able)}"
    is_known = requested in ("", *able) or "/" in requested or requested == "flash_attention_3"  # not loaded here
    if side.role == "student" and not is_known:
        what = f"{known.__name__} does not support {requested}, only {', '.join(able)}"
        return Finding("error", what, side.name, f"use --attn-implementation {able[-1]}")
    if "sdpa" not in able:
        what = f"{message}: memory grows with the square of the sequence length"
        return Finding("warning", what, side.name, "use a smaller --max-length or --max-batch-tokens")
    return Finding("ok", message, side.name, figures={"attention": able})


def weight_tensors(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find missing weight files and tensors, which transformers would initialize randomly or fail on."""
    for side in inputs.models:
        if not side.tensor_headers:
            continue
        # With a cache the teacher's weights are not needed.
        level = "note" if side.role == "teacher" and inputs.cache is not None else "error"
        hint = "copy or download the model again"
        is_sharded = not (side.folder / SINGLE_FILE).is_file() and (side.folder / INDEX_FILE).is_file()
        named = read_weight_index(side.folder) if is_sharded else {}
        files = sorted({file for file in named.values() if not (side.folder / file).is_file()})
        if files:
            lost = sum(file in files for file in named.values())
            what = f"missing weight files: {len(files)} of {len(set(named.values()))} ({format_names(files)})"
            yield Finding(level, what, side.name, hint, {"missing_files": files, "missing_tensors": lost})
            continue
        yield from _compare_headers(side, level, hint)


def _compare_headers(side: DoctorModel, level: str, hint: str) -> Iterator[Finding]:
    """Compare the headers of weight files with the tensors that the configurations of model and adapter describe."""
    headers = {side.folder: side.tensor_headers}
    if side.adapter is not None:
        headers[side.adapter] = read_weight_headers(side.adapter)
    try:
        configuration = load_model_config(ModelRef(side.folder))
    except XtkError as failure:
        if "auto_map" not in side.config:  # the check `attention` reports models with custom code
            yield Finding(level, failure.what, side.name, failure.hint or "")
        return
    rows = side.embedding[1] if side.embedding else None
    for folder, mismatches in compare_headers_with_config(configuration, headers).items():
        part = "adapter" if folder == side.adapter else "model"
        if missing := list(mismatches.missing):
            what = f"missing tensors of the {part}: {len(missing):,} ({format_names(missing)})"
            yield Finding(level, what, side.name, hint, {"missing_tensors": len(missing)})
        # The check `embedding_rows` reports embedding and head.
        reshaped = mismatches.reshaped
        if others := [name for name, shape, _ in reshaped if part == "adapter" or not shape or shape[0] != rows]:
            what = f"tensors whose shape does not match config.json: {len(others):,} ({format_names(others)})"
            figures = {"mismatched_tensors": len(others)}
            yield Finding(level, what, side.name, "use the config.json of these weights", figures)
        if more := list(mismatches.unexpected):
            what = f"unused tensors in the {part}: {len(more):,} ({format_names(more)})"
            yield Finding("note", what, side.name, "", {"unexpected_tensors": len(more)})


def dtypes(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the dtype of the weights with that of the run."""
    import torch

    cuda = torch.cuda.is_available()
    for side in inputs.models:
        if not side.tensor_headers:
            continue
        kinds = Counter(kind for kind, _ in side.tensor_headers.values())
        counts = ", ".join(f"{count:,} in {kind}" for kind, count in kinds.most_common())
        is_quantized = "quantization_config" in side.config or any(kind in QUANTIZED_DTYPES for kind in kinds)
        if is_quantized and side.role == "student":
            what = f"the student has quantized weights, which cannot be trained ({counts})"
            yield Finding("error", what, side.name, "use the unquantized model; --load-in-4bit quantizes it for LoRA")
        else:
            yield Finding("ok", f"weight tensors: {counts}", side.name, figures={"tensors_by_dtype": dict(kinds)})
    plan = inputs.plan
    if plan.dtype not in TRAINABLE_DTYPES:
        what, hint = f"--dtype {plan.dtype} cannot be trained", f"use --dtype {' or '.join(TRAINABLE_DTYPES)}"
        yield Finding("error", what, inputs.student.name, hint)
    elif plan.dtype == "bfloat16":
        what = "bfloat16 weights lose updates that are smaller than 1/256 of a weight"
        yield Finding("warning", what, inputs.student.name, "use --dtype float32 --mixed-precision bf16")
    wants = plan.mixed_precision == "bf16" or "bfloat16" in (plan.dtype, plan.teacher_dtype)
    if wants and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("error", "this GPU does not support bfloat16", "", "use --mixed-precision no")
    elif plan.mixed_precision == "no" and cuda:
        what = "training in float32 is much slower than bfloat16 on this GPU"
        yield Finding("note", what, "", "use --mixed-precision bf16")
