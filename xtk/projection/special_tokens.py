"""Matching of the student's and the teacher's special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.name_registry import nearest_name
from xtk.text.tokenizer import (
    END_OF_TURN_TOKENS,
    NEXT_TURN_TOKENS,
    REASONING_END_TOKENS,
    TOOL_CALL_START_TOKENS,
    Tokenizer,
)

# A token with several roles (GPT-2's only special token) is matched by the first of them that the other side has:
# models are trained to predict eos.
ROLE_PRIORITY = ("eos", "bos", "unk", "pad")

MATCH_BY_ROLE, NO_MATCHING = "role", "none"
SpecialTokenMatching = str | Mapping[str, str]


def match_special_tokens(
    student: Tokenizer,
    teacher: Tokenizer,
    matching: SpecialTokenMatching = MATCH_BY_ROLE,
    *,
    repeats_roles: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return int32 [n] and int32 [n], pairs of special tokens, each student token with at most one teacher token.

    By role: eos, bos, unk and pad of both configurations; a teacher token with several of these roles (GPT-2's only
    special token) has the first. Then the end-of-turn token, if each side has exactly one of END_OF_TURN_TOKENS; then
    the first special token of each side that ends reasoning, and that starts a tool call; then equal names. Earlier
    matches win. `matching`: "role", "none", or a table {student token: teacher token} without other matches.
    `repeats_roles`: match a teacher token with several roles with the student's token of each.
    """
    if isinstance(matching, str):
        if matching not in (MATCH_BY_ROLE, NO_MATCHING):
            raise XtkError(
                f"--special-tokens is {matching!r}, but must be role, none or a JSON or YAML file with token pairs",
                hint='write, for example, {"<|im_end|>": "</s>"} (student token: teacher token) into this file',
            )
        matched = _match_by_role(student, teacher, repeats_roles) if matching == MATCH_BY_ROLE else {}
    else:
        matched = {
            _special_token_id(student, one): _special_token_id(teacher, other)
            for one, other in sorted(matching.items())
        }
    return np.array(list(matched), np.int32), np.array(list(matched.values()), np.int32)


def _match_by_role(student: Tokenizer, teacher: Tokenizer, repeats_roles: bool) -> dict[int, int]:
    matched: dict[int, int] = {}
    for role in ROLE_PRIORITY:
        if (
            role in student.special_token_ids
            and role in teacher.special_token_ids
            and _are_special(student, teacher, role)
            and (repeats_roles or teacher.special_token_ids[role] not in matched.values())
        ):
            matched.setdefault(student.special_token_ids[role], teacher.special_token_ids[role])
    ends = [side.special_ids(END_OF_TURN_TOKENS) or side.special_ids(NEXT_TURN_TOKENS) for side in (student, teacher)]
    if all(len(end) == 1 for end in ends):
        matched.setdefault(min(ends[0]), min(ends[1]))
    for names in (REASONING_END_TOKENS, TOOL_CALL_START_TOKENS):
        marks = [next((name for name in names if side.special_ids([name])), None) for side in (student, teacher)]
        if None not in marks:
            sides = zip((student, teacher), marks, strict=True)
            own, other = (min(side.special_ids([str(name)])) for side, name in sides)
            if own not in matched and other not in matched.values():
                matched[own] = other
    for name, token in student.vocabulary.special_tokens.items():
        if name in teacher.vocabulary.special_tokens:
            matched.setdefault(token, teacher.vocabulary.special_tokens[name])
    return matched


def _are_special(student: Tokenizer, teacher: Tokenizer, role: str) -> bool:
    return all(bool(side.vocabulary.special_mask[side.special_token_ids[role]]) for side in (student, teacher))


def _special_token_id(side: Tokenizer, token: str) -> int:
    known: Mapping[str, int] = side.vocabulary.special_tokens
    if token not in known:
        near = _nearest_name(token, known)
        suggestion = f"; did you mean {near}?" if near else ""
        raise XtkError(
            f"{side.name} has no special token {token!r}{suggestion}",
            where="the file of --special-tokens",
            hint=f"use one of: {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}",
        )
    return int(known[token])


def _nearest_name(token: str, known: Iterable[str]) -> str | None:
    return nearest_name(token, known) or nearest_name(token.strip("<|>[]/ "), known)
