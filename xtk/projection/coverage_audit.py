"""Coverage audit of a projection: rows by kind, unmapped mass and unmatched tokens, by text category.

Stored in the header, so that `inspect` can print it without the tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.projection.projection import SparseProjection
from xtk.projection.token_categories import CATEGORIES, PARTIAL_UTF8, SPECIAL, token_categories
from xtk.projection.vocabulary_pair import VocabularyPair

# Chosen by us: from this fraction of unmatched tokens on, a 1:1 partition compares a category mostly by sorted
# probabilities.
CRITICAL_FRACTION = 0.5
MIN_CRITICAL_TOKENS = 20

# The fields of a category that depend on the two vocabularies only: they stay valid after pruning.
VOCABULARY_KEYS = ("student_tokens", "unmatched_student_tokens", "teacher_tokens", "unmatched_teacher_tokens")


def audit_projection(
    projection: SparseProjection,
    pair: VocabularyPair,
    student_special_ids: NDArray[np.int32],
    teacher_special_ids: NDArray[np.int32],
) -> dict[str, Any]:
    """Return the coverage audit of a projection; the special ids are those with a counterpart, int32 [n] each.

    `rows` by kind: exact (one entry of weight 1, with equal bytes), special (matched special tokens), composed (mapped
    to other tokens), unmapped (no entry), padding (rows without a token). `unmapped_mass`, the mean over the student's
    tokens. `unreachable_teacher_tokens`, teacher tokens in no row. `categories`: the same for each category, and the
    tokens of both sides without a token of equal bytes on the other side, which a 1:1 partition cannot match. The last
    key lists the categories where such a partition fails (see `critical_categories`).
    """
    students, teachers = len(pair.student), len(pair.teacher)
    masses, sizes = projection.row_masses[:students], np.diff(projection.row_offsets)[:students]
    reached = np.zeros(projection.teacher_width, np.bool_)
    reached[projection.teacher_ids] = True
    special = np.zeros(students, np.bool_)
    special[student_special_ids] = True
    unmatched = [_unmatched_mask(pair, student_special_ids), _unmatched_mask(pair.swapped, teacher_special_ids)]
    by_category = _sum_by_category(
        (token_categories(pair.student.vocabulary), token_categories(pair.teacher.vocabulary)),
        {"unmatched": unmatched[0], "unmapped": sizes == 0, "unmapped_mass": 1 - masses},
        {"unmatched": unmatched[1], "unreachable_teacher_tokens": ~reached[:teachers]},
    )
    exact = _exact_rows(projection, pair)
    return {
        "rows": {
            "exact": int(exact.sum()),
            "special": int((special & (sizes > 0)).sum()),
            "composed": int(((sizes > 0) & ~special & ~exact).sum()),
            "unmapped": int((sizes == 0).sum()),
            "padding": projection.student_width - students,
        },
        "unmapped_mass": projection.unmapped_mass(students),
        "unreachable_teacher_tokens": int((~reached[:teachers]).sum()),
        "categories": by_category,
        "poorly_matched_categories": critical_categories(by_category),
    }


def refresh_audit(projection: SparseProjection) -> dict[str, Any]:
    """Return the part of the audit of a pruned projection that needs no tokenizers.

    The number of exact rows, and the unmapped mass of each category, need both vocabularies and are left out. Fields
    that depend on the vocabularies only are copied.
    """
    earlier = projection.header.get("audit", {})
    students = projection.student_tokens
    teachers = int(projection.header.get("teacher", {}).get("tokens", projection.teacher_width))
    sizes = np.diff(projection.row_offsets)[:students]
    again: dict[str, Any] = {
        "rows": {
            "mapped": int((sizes > 0).sum()),
            "unmapped": int((sizes == 0).sum()),
            "padding": projection.student_width - students,
        },
        "unmapped_mass": projection.unmapped_mass(students),
        "unreachable_teacher_tokens": teachers - len(np.unique(projection.teacher_ids)),
    }
    if "categories" in earlier:
        again["categories"] = {
            name: {key: figures[key] for key in VOCABULARY_KEYS} for name, figures in earlier["categories"].items()
        }
        again["poorly_matched_categories"] = list(earlier["poorly_matched_categories"])
    return again


def critical_categories(by_category: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the categories where at least half of one side's tokens have no token of equal bytes on the other side."""
    names = [name for at, name in enumerate(CATEGORIES) if at not in (SPECIAL, PARTIAL_UTF8)]
    return [name for name in names if any(_is_critical(by_category[name], side) for side in ("student", "teacher"))]


def audit_warning(audited: Mapping[str, Any]) -> str | None:
    """Return a two-line warning to read before choosing a loss; None if no category is critical."""
    names = audited.get("poorly_matched_categories", [])
    if not names:
        return None
    parts = [f"{name} ({_format_unmatched(audited['categories'][name])})" for name in names]
    return (
        f"most tokens have no counterpart with equal bytes in these categories: {'; '.join(parts)}\n"
        "  losses that pair tokens 1:1 compare them by sorted probability only; the default loss compares bytes"
    )


def _format_unmatched(figures: Mapping[str, Any]) -> str:
    sides = [f"{figures[f'unmatched_{side}_tokens'] / figures[f'{side}_tokens']:.0%} of the {side}'s"
             for side in ("student", "teacher") if _is_critical(figures, side)]  # fmt: skip
    return " and ".join(sides)


def _is_critical(figures: Mapping[str, Any], side: str) -> bool:
    tokens, unmatched = figures[f"{side}_tokens"], figures[f"unmatched_{side}_tokens"]
    return bool(tokens >= MIN_CRITICAL_TOKENS and unmatched >= CRITICAL_FRACTION * tokens)


def _exact_rows(projection: SparseProjection, pair: VocabularyPair) -> NDArray[np.bool_]:
    students = len(pair.student)
    single = np.flatnonzero(np.diff(projection.row_offsets)[:students] == 1)
    entries = projection.row_offsets[single]
    exact = np.zeros(students, np.bool_)
    exact[single] = (projection.teacher_ids[entries] == pair.equal_ids[single]) & (projection.weights[entries] == 1)
    return exact


def _unmatched_mask(pair: VocabularyPair, matched: NDArray[np.int32]) -> NDArray[np.bool_]:
    unmatched = pair.equal_ids < 0
    unmatched[matched] = False
    return unmatched


def _sum_by_category(
    kinds: tuple[NDArray[np.int8], NDArray[np.int8]], student: Mapping[str, Any], teacher: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return sums of per-token figures by category; `unmapped_mass` is a mean."""
    results: dict[str, dict[str, Any]] = {name: {} for name in CATEGORIES}
    for side, kind, figures in (("student", kinds[0], student), ("teacher", kinds[1], teacher)):
        tokens = np.bincount(kind, minlength=len(CATEGORIES))
        sums = {name: np.bincount(kind, values, minlength=len(CATEGORIES)) for name, values in figures.items()}
        for at, name in enumerate(CATEGORIES):
            results[name][f"{side}_tokens"] = int(tokens[at])
            results[name][f"unmatched_{side}_tokens"] = int(sums["unmatched"][at])
            if side == "student":
                results[name]["unmapped"] = int(sums["unmapped"][at])
                missing = max(0.0, float(sums["unmapped_mass"][at])) / max(int(tokens[at]), 1)
                results[name]["unmapped_mass"] = max(0.0, round(missing, 6))
            else:
                results[name]["unreachable_teacher_tokens"] = int(sums["unreachable_teacher_tokens"][at])
    return results
