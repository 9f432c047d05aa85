"""Filling a projection from two tokenizers: the rules of `--method`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.lookup import lookup
from xtk.projection.projection import Projection
from xtk.tokens.tokenizer import Tokenizer

METHODS = {
    "exact": "xtk.projection.build:no_pieces",
    "first": "xtk.projection.build:first_piece",
    "multitoken": "xtk.projection.build:decaying_pieces",
}

# X-Token, arXiv 2605.21699: a token of up to 4 pieces, piece i weighs 0.9 * 0.1^i before normalisation.
MAX_PIECES = 4
FIRST_WEIGHT = 0.9
DECAY = 0.1

# A token of several roles (GPT-2's only special token) takes the first of them that the other side has:
# eos is the one that models predict.
ROLES_IN_ORDER = ("eos", "bos", "unk", "pad")

PieceWeights = Callable[[Sequence[NDArray[np.int32]]], tuple[list[int], list[int], list[float]]]


def build_projection(student: Tokenizer, teacher: Tokenizer, method: str = "multitoken") -> Projection:
    """Build W from the spelling of both vocabularies.

    Tokens of equal bytes are one entry of weight 1, special tokens are matched by role, then by name.
    What becomes of the others is the method's: `exact` leaves their rows empty, `first` puts all weight
    on the first piece of their spelling in the teacher's tokens, `multitoken` spreads it over up to four.

    Args:
        student: its tokens are the rows.
        teacher: its tokens are the columns.
        method: one of METHODS.

    Returns:
        [V, U] in compressed rows. Every entry of an ordinary row shares bytes with the row's token.

    Raises:
        XtkError: no such method, or the two vocabularies have nothing in common.
    """
    weigh: PieceWeights | None = lookup(METHODS, method, "method")
    rows, columns = _equal_bytes(student, teacher)
    special_rows, special_columns = _special_tokens(student, teacher)
    if not len(rows):
        raise XtkError("the two vocabularies share no token", where=f"{student.name} and {teacher.name}")
    entry_rows = [rows, special_rows]
    entry_columns = [columns, special_columns]
    entry_weights = [np.ones(len(rows) + len(special_rows), np.float32)]
    if weigh is not None:
        others = _ordinary_without(student, rows)
        spellings = student.vocabulary.spellings
        pieces = teacher.spell([spellings[token] for token in others])
        spelled = [(token, ids) for token, ids in zip(others, pieces, strict=True) if ids is not None]
        at, more_columns, more_weights = weigh([ids for _, ids in spelled])
        tokens = np.array([token for token, _ in spelled], np.int32)
        entry_rows.append(tokens[at] if len(at) else np.zeros(0, np.int32))
        entry_columns.append(np.array(more_columns, np.int32))
        entry_weights.append(np.array(more_weights, np.float32))
    return assemble(
        np.concatenate(entry_rows),
        np.concatenate(entry_columns),
        np.concatenate(entry_weights),
        (student.width, teacher.width),
        header={
            "kind": "projection",
            "method": method,
            "student": identity(student),
            "teacher": identity(teacher),
            "prunings": [],
        },
    )


def identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what names a tokenizer in a header: nothing that depends on the machine."""
    return {
        "name": tokenizer.folder.resolve().name,
        "tokenizer": tokenizer.fingerprint,
        "template": tokenizer.template_fingerprint,
        "tokens": len(tokenizer),
        "width": tokenizer.width,
    }


def assemble(
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
    weights: NDArray[np.float32],
    shape: tuple[int, int],
    header: dict[str, Any],
) -> Projection:
    """Put entries in any order into compressed rows; entries of the same place are added."""
    keys = rows.astype(np.int64) * shape[1] + columns
    places, inverse = np.unique(keys, return_inverse=True)
    summed = np.bincount(inverse, weights.astype(np.float64), minlength=len(places))
    counts = np.bincount(places // shape[1], minlength=shape[0]) if len(places) else np.zeros(shape[0], np.int64)
    return Projection(
        row_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
        teacher_ids=(places % shape[1]).astype(np.int32),
        weights=np.minimum(summed, 1).astype(np.float32),
        student_cells=np.full(shape[0], -1, np.int32),
        teacher_cells=np.full(shape[1], -1, np.int32),
        header=header,
    )


# `exact`: a token that the teacher does not have has no row.
no_pieces: PieceWeights | None = None


def first_piece(pieces: Sequence[NDArray[np.int32]]) -> tuple[list[int], list[int], list[float]]:
    """Put all weight on the first piece: at a boundary that is the teacher's next token.

    Args:
        pieces: the spelling of each token.

    Returns:
        Entries: which spelling, teacher id, weight.
    """
    return list(range(len(pieces))), [int(ids[0]) for ids in pieces], [1.0] * len(pieces)


def decaying_pieces(pieces: Sequence[NDArray[np.int32]]) -> tuple[list[int], list[int], list[float]]:
    """Spread the weight over up to four pieces, each a tenth of the one before; longer spellings get none.

    Source: X-Token, arXiv 2605.21699, pass 2.
    """
    patterns = {size: _decaying(size) for size in range(1, MAX_PIECES + 1)}
    at: list[int] = []
    columns: list[int] = []
    weights: list[float] = []
    for number, ids in enumerate(pieces):
        if len(ids) <= MAX_PIECES:
            at += [number] * len(ids)
            columns += ids.tolist()
            weights += patterns[len(ids)]
    return at, columns, weights


def _decaying(size: int) -> list[float]:
    raw = FIRST_WEIGHT * DECAY ** np.arange(size)
    return list((raw / raw.sum()).tolist())


def _equal_bytes(student: Tokenizer, teacher: Tokenizer) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    table = teacher.vocabulary.token_of_bytes
    found = np.fromiter((table.get(spelling, -1) for spelling in student.vocabulary.spellings), np.int32, len(student))
    if student.fingerprint == teacher.fingerprint:
        # Several tokens can spell the same ("s" and "##s", "." and "<0x2E>"): each is itself.
        found = np.where(student.vocabulary.lengths > 0, np.arange(len(student), dtype=np.int32), -1)
    rows = np.flatnonzero(found >= 0).astype(np.int32)
    return rows, found[rows]


def _special_tokens(student: Tokenizer, teacher: Tokenizer) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    matched: dict[int, int] = {}
    for role in ROLES_IN_ORDER:
        if role in student.roles and role in teacher.roles and _are_special(student, teacher, role):
            matched.setdefault(student.roles[role], teacher.roles[role])
    for name, token in student.vocabulary.special_tokens.items():
        if name in teacher.vocabulary.special_tokens:
            matched.setdefault(token, teacher.vocabulary.special_tokens[name])
    return np.array(list(matched), np.int32), np.array(list(matched.values()), np.int32)


def _are_special(student: Tokenizer, teacher: Tokenizer, role: str) -> bool:
    return all(bool(side.vocabulary.special[side.roles[role]]) for side in (student, teacher))


def _ordinary_without(student: Tokenizer, rows: NDArray[np.int32]) -> list[int]:
    others = student.vocabulary.lengths > 0
    others[rows] = False
    return [int(token) for token in np.flatnonzero(others)]
