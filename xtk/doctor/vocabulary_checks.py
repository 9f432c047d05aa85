"""Tokenizers against the rows of their models, and special tokens of both sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from xtk.doctor.inputs import DoctorInputs, DoctorModel, Finding
from xtk.projection.special_tokens import match_special_tokens
from xtk.tokens.tokenizer import SPECIAL_TOKEN_ROLES


def embedding_rows(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare a tokenizer's tokens with the rows of the embedding, and these with what the configuration says."""
    for side in inputs.models:
        tokens, said = len(side.tokenizer), side.text_config.get("vocab_size")
        embedding = side.embedding
        held = said if embedding is None else embedding[1]
        figures = {"tokens": tokens, "embedding_rows": held, "vocab_size": said}
        if not side.config or not side.tensor_headers:
            missing = "are no weights (*.safetensors)" if side.config else "is no configuration (config.json)"
            # A cache needs no teacher any more; what is on the hub is not fetched for this.
            level = "note" if side.is_remote or (side.role == "teacher" and inputs.cache is not None) else "error"
            yield Finding(
                "embedding_rows", level, f"there {missing} in this folder", side.name, "the whole model's folder"
            )
        elif not isinstance(held, int):
            yield Finding("embedding_rows", "note", "the rows of the embedding were not found", side.name)
        elif embedding is not None and said is not None and held != said:
            what = f"the embedding has {held:,} rows, and the configuration says {said:,}"
            hint = f"vocab_size: {held} in config.json, if the weights are right"
            yield Finding("embedding_rows", "error", what, side.name, hint, figures)
        elif held < tokens:
            what = f"the model has {held:,} rows; its tokenizer names {tokens:,} tokens"
            hint = "the tokenizer that the model was trained with"
            hint += "; or xtk distill --resize-vocabulary, which adds rows" if side.role == "student" else ""
            yield Finding("embedding_rows", "error", what, side.name, hint, figures)
        else:
            spare = f", {held - tokens:,} rows without a token" if held > tokens else ""
            yield Finding(
                "embedding_rows", "ok", f"{tokens:,} tokens, {held:,} rows{spare}", side.name, figures=figures
            )


def special_tokens(inputs: DoctorInputs) -> Iterator[Finding]:
    """Look at the special tokens of each side, and at which of them meet."""
    for side in inputs.models:
        yield from _check_roles(side)
    student, teacher = (side.tokenizer for side in inputs.models)
    pairs = list(zip(*(ids.tolist() for ids in match_special_tokens(student, teacher)), strict=True))
    named = [
        f"{student.special_token_names.get(one, one)} = {teacher.special_token_names.get(other, other)}"
        for one, other in pairs
    ]
    ends = any(one in student.end_ids and other in teacher.end_ids for one, other in pairs)
    told = "; ".join(named[:6]) + (f"; and {len(named) - 6:,} more" if len(named) > 6 else "")
    if ends:
        yield Finding("special_tokens", "ok", f"they meet: {told}", figures={"matched": len(pairs)})
    else:
        yield Finding(
            "special_tokens",
            "warning",
            f"no token that ends a text meets one of the other side ({told or 'none meets'})",
            hint='build-projection --special-tokens \'{"STUDENT": "TEACHER"}\', or eos_token in tokenizer_config.json',
            figures={"matched": len(pairs)},
        )


def _check_roles(side: DoctorModel) -> Iterator[Finding]:
    tokenizer = side.tokenizer
    roles = {
        role: tokenizer.special_token_ids[role] for role in SPECIAL_TOKEN_ROLES if role in tokenizer.special_token_ids
    }
    told = ", ".join(f"{role} {tokenizer.special_token_names.get(token, token)}" for role, token in roles.items())
    if "eos" not in roles:
        what = f"no token has the role eos ({told or 'none has any role'}): nothing tells where a text ends"
        hint = "eos_token in tokenizer_config.json"
        yield Finding("special_tokens", "warning", what, side.name, hint, {"special_tokens": roles})
        return
    yield Finding("special_tokens", "ok", told, side.name, figures={"special_tokens": roles})
    if roles.get("pad") == roles["eos"]:
        what = "pad is the token that eos is: trainers that leave pad out of the loss teach no end; xtk trains it"
        yield Finding("special_tokens", "note", what, side.name, "a pad token of its own, for other tools")
    said = _token_id_list(_generation_config(side).get("eos_token_id", side.text_config.get("eos_token_id")))
    if said and roles["eos"] not in said:
        names = ", ".join(str(tokenizer.special_token_names.get(token, token)) for token in said)
        what = (
            f"the model stops at {names}, and its tokenizer's eos is {tokenizer.special_token_names.get(roles['eos'])}"
        )
        hint = "eos_token_id in generation_config.json and config.json: all tokens that end an answer"
        yield Finding("special_tokens", "warning", what, side.name, hint, {"eos_token_id": said})


def _generation_config(side: DoctorModel) -> dict[str, Any]:
    path = side.folder / "generation_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _token_id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]
