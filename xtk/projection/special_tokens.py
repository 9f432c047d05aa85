"""Which special token of the student plays the part of which special token of the teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.registry import nearest_name
from xtk.tokens.tokenizer import END_OF_TURN_TOKENS, Tokenizer

# A token of several roles (GPT-2's only special token) takes the first of them that the other side has:
# eos is the one that models predict.
ROLE_PRIORITY = ("eos", "bos", "unk", "pad")

MATCH_BY_ROLE, NO_MATCHING = "role", "none"
SpecialTokenMatching = str | Mapping[str, str]


def match_special_tokens(
    student: Tokenizer, teacher: Tokenizer, matching: SpecialTokenMatching = MATCH_BY_ROLE
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pair special tokens, each of the student's with at most one of the teacher's.

    By role: eos, bos, unk and pad as both configurations name them; then the end of a turn, where each side has
    exactly one of TURN_ENDS; then equal names. What is matched first stays.

    Args:
        student: its configuration names its roles.
        teacher: likewise.
        matching: "role", "none", or a table {student's token: teacher's token}, which is then all there is.

    Returns:
        int32 [n] and int32 [n], student's and teacher's ids.

    Raises:
        XtkError: the table names a token that is no special token of its side.
    """
    if isinstance(matching, str):
        if matching not in (MATCH_BY_ROLE, NO_MATCHING):
            raise XtkError(f"special tokens are matched by role, none or a table, not {matching!r}")
        matched = _match_by_role(student, teacher) if matching == MATCH_BY_ROLE else {}
    else:
        matched = {
            _special_token_id(student, one): _special_token_id(teacher, other)
            for one, other in sorted(matching.items())
        }
    return np.array(list(matched), np.int32), np.array(list(matched.values()), np.int32)


def _match_by_role(student: Tokenizer, teacher: Tokenizer) -> dict[int, int]:
    matched: dict[int, int] = {}
    for role in ROLE_PRIORITY:
        if (
            role in student.special_token_ids
            and role in teacher.special_token_ids
            and _are_special(student, teacher, role)
        ):
            matched.setdefault(student.special_token_ids[role], teacher.special_token_ids[role])
    ends = [
        [special_tokens[name] for name in END_OF_TURN_TOKENS if name in special_tokens]
        for special_tokens in (student.vocabulary.special_tokens, teacher.vocabulary.special_tokens)
    ]
    if all(len(end) == 1 for end in ends):
        matched.setdefault(ends[0][0], ends[1][0])
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
        question = f"; did you mean {near}?" if near else ""
        raise XtkError(
            f"{side.name} has no special token {token!r}{question}",
            where="the table of special tokens",
            hint=f"one of: {', '.join(sorted(known)[:12])}{', ...' if len(known) > 12 else ''}",
        )
    return int(known[token])


def _nearest_name(token: str, known: Iterable[str]) -> str | None:
    return nearest_name(token, known) or nearest_name(token.strip("<|>[]/ "), known)
