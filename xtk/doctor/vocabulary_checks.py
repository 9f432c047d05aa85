"""Checks of vocabularies: embedding sizes, and special tokens of student and teacher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.projection.special_tokens import match_special_tokens
from xtk.text.tokenizer_files import SPECIAL_TOKEN_ROLES


def embedding_rows(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the sizes of tokenizer, embedding and `vocab_size` in config.json."""
    for side in inputs.models:
        tokens, configured = len(side.tokenizer), side.text_config.get("vocab_size")
        embedding = side.embedding
        rows = configured if embedding is None else embedding[1]
        figures = {"tokens": tokens, "embedding_rows": rows, "vocab_size": configured}
        if not side.config or not side.tensor_headers:
            missing = "weights (*.safetensors)" if side.config else "configuration (config.json)"
            # With a cache the teacher is not needed; weights on the Hub are not downloaded.
            level = "note" if side.is_remote or (side.role == "teacher" and inputs.cache is not None) else "error"
            yield Finding(
                "embedding_rows", level, f"the folder has no {missing}", side.name, "use the complete model folder"
            )
        elif not isinstance(rows, int):
            yield Finding("embedding_rows", "note", "the size of the embedding is unknown", side.name)
        elif embedding is not None and configured is not None and rows != configured:
            what = f"the embedding has {rows:,} rows, but vocab_size in config.json is {configured:,}"
            hint = f"if the weights are right, set vocab_size to {rows} in config.json"
            yield Finding("embedding_rows", "error", what, side.name, hint, figures)
        elif rows < tokens:
            what = f"the embedding has {rows:,} rows, but the tokenizer has {tokens:,} tokens"
            hint = "use the tokenizer that the model was trained with"
            hint += ", or xtk distill --resize-vocabulary to add rows" if side.role == "student" else ""
            yield Finding("embedding_rows", "error", what, side.name, hint, figures)
        else:
            spare = f" ({rows - tokens:,} without a token)" if rows > tokens else ""
            yield Finding(
                "embedding_rows", "ok", f"{tokens:,} tokens, {rows:,} embedding rows{spare}", side.name, figures=figures
            )


def special_tokens(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report the special tokens of each model, and which of them match."""
    for side in inputs.models:
        yield from _check_roles(side)
    student, teacher = (side.tokenizer for side in inputs.models)
    pairs = list(zip(*(ids.tolist() for ids in match_special_tokens(student, teacher)), strict=True))
    named = [
        f"{student.special_token_names.get(pair, pair)} = {teacher.special_token_names.get(other, other)}"
        for pair, other in pairs
    ]
    ends = any(pair in student.end_ids and other in teacher.end_ids for pair, other in pairs)
    shown = "; ".join(named[:6]) + (f"; and {len(named) - 6:,} more" if len(named) > 6 else "")
    if ends:
        yield Finding("special_tokens", "ok", f"matched special tokens: {shown}", figures={"matched": len(pairs)})
    else:
        yield Finding(
            "special_tokens",
            "warning",
            f"the end-of-text tokens of student and teacher do not match (matched special tokens: {shown or 'none'})",
            hint='match them with build-projection --special-tokens FILE, with {"STUDENT": "TEACHER"} in it, '
            "or set eos_token in tokenizer_config.json",
            figures={"matched": len(pairs)},
        )


def _check_roles(side: DoctorModel) -> Iterator[Finding]:
    tokenizer = side.tokenizer
    roles = {
        role: tokenizer.special_token_ids[role] for role in SPECIAL_TOKEN_ROLES if role in tokenizer.special_token_ids
    }
    shown = ", ".join(f"{role} {tokenizer.special_token_names.get(token, token)}" for role, token in roles.items())
    if "eos" not in roles:
        what = f"the tokenizer has no eos token (special tokens: {shown or 'none'}), so the end of a text is not marked"
        hint = "set eos_token in tokenizer_config.json"
        yield Finding("special_tokens", "warning", what, side.name, hint, {"special_tokens": roles})
        return
    yield Finding("special_tokens", "ok", shown, side.name, figures={"special_tokens": roles})
    if roles.get("pad") == roles["eos"]:
        what = "pad and eos are the same token: xtk trains eos, but trainers that mask pad do not"
        yield Finding("special_tokens", "note", what, side.name, "for other tools, add a separate pad token")
    stop_ids = _token_id_list(_generation_config(side).get("eos_token_id", side.text_config.get("eos_token_id")))
    if stop_ids and roles["eos"] not in stop_ids:
        names = ", ".join(str(tokenizer.special_token_names.get(token, token)) for token in stop_ids)
        what = f"eos_token_id is {names}, but the tokenizer's eos is {tokenizer.special_token_names.get(roles['eos'])}"
        hint = "list all tokens that end an answer as eos_token_id in generation_config.json and config.json"
        yield Finding("special_tokens", "warning", what, side.name, hint, {"eos_token_id": stop_ids})


def _generation_config(side: DoctorModel) -> dict[str, Any]:
    path = side.folder / "generation_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        config = {}
    return config if isinstance(config, dict) else {}


def _token_id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]
