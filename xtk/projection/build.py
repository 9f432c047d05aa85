"""Builds a projection from two tokenizers with one of the methods of `--method`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.projection.coverage_audit import audit_projection
from xtk.projection.methods.byte_partition import partition_vocabularies
from xtk.projection.projection import SparseProjection
from xtk.projection.special_tokens import MATCH_BY_ROLE, SpecialTokenMatching, match_special_tokens
from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair, concatenate_entries
from xtk.text.tokenizer import Tokenizer

METHODS = {
    "exact": "xtk.projection.methods.exact_match:ExactMatchMethod",
    "first-token": "xtk.projection.methods.first_token:FirstTokenMethod",
    "multitoken": "xtk.projection.methods.multitoken:MultitokenMethod",
    "partition": "xtk.projection.methods.byte_partition:PartitionMethod",
    "cooccurrence": "xtk.projection.methods.cooccurrence:CooccurrenceMethod",
}

# Increased when the same request gives other numbers, so that older projections are not reused.
ALGORITHM_VERSION = 6


class ProjectionMethod(Protocol):
    """A method that builds the entries of ordinary tokens. A dataclass; its fields are its options."""

    stores_cells: bool  # whether the projection also stores the cells of both vocabularies

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary tokens, including those of equal bytes."""


def build_projection(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str = "multitoken",
    *,
    special_tokens: SpecialTokenMatching = MATCH_BY_ROLE,
    **options: Any,
) -> SparseProjection:
    """Return the projection [V, U] of two tokenizers, with the request and the audit in its header.

    Tokens of equal bytes get one entry of weight 1 (except with `cooccurrence`); special tokens are matched by role,
    then by name. The method decides about the others: `exact` leaves their rows empty, `first-token` puts all weight on
    the first token of their teacher tokenization, `multitoken` distributes it over up to four, `partition` is
    `first-token` with the partition of both vocabularies, `cooccurrence` counts in a corpus. Every entry of an ordinary
    token shares bytes with it. `special_tokens`: "role", "none" or a table {student token: teacher token}.
    """
    made = make_method(method, options)
    pair = VocabularyPair(student, teacher)
    if not len(pair.exact_entries.rows):
        raise XtkError(
            "the student and the teacher have no token in common: no two tokens have the same bytes",
            where=f"{student.name} and {teacher.name}",
            hint="check STUDENT and TEACHER; use models whose tokenizers share tokens",
        )
    rows, columns = match_special_tokens(student, teacher, special_tokens)
    special = SparseEntries(rows, columns, np.ones(len(rows), np.float32))
    projection = assemble_projection(*concatenate_entries(made.build_entries(pair), special), pair.shape, {})
    if made.stores_cells:
        cells = partition_vocabularies(pair, rows, columns)
        projection = dataclasses.replace(projection, student_cells=cells[0], teacher_cells=cells[1])
    header = projection_header(student, teacher, method, special_tokens, **options)
    return dataclasses.replace(
        projection, header={**header, "audit": audit_projection(projection, pair, rows, columns)}
    )


def check_method_options(method: str, options: Iterable[str]) -> Any:
    """Return the class of a method after checking that it has these options."""
    kind = load_registered(METHODS, method, "method")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in options:
        if name not in known:
            raise XtkError(
                f"--method {method} does not support --{name.replace('_', '-')}",
                hint=f"remove this option; options of the method: {', '.join(sorted(known)) or 'none'}",
            )
    return kind


def make_method(method: str, options: Mapping[str, Any]) -> ProjectionMethod:
    """Return a method with its options."""
    kind = check_method_options(method, options)
    lacking = [field.name for field in dataclasses.fields(kind)
               if field.default is dataclasses.MISSING and field.name not in options]  # fmt: skip
    if lacking:
        raise XtkError(
            f"the method {method} of build_projection needs the arguments {', '.join(lacking)}",
            hint="pass them, or use the command xtk build-projection, which sets them",
        )
    made: ProjectionMethod = kind(**options)
    return made


def projection_header(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str = "multitoken",
    special_tokens: SpecialTokenMatching = MATCH_BY_ROLE,
    **options: Any,
) -> dict[str, Any]:
    """Return the header of `build_projection` for the same arguments, without the audit."""
    made: Any = make_method(method, options)
    method_options = made.header_options() if hasattr(made, "header_options") else dataclasses.asdict(made)
    return {
        "kind": "projection",
        "algorithm_version": ALGORITHM_VERSION,
        "method": method,
        "options": method_options,
        "special_tokens": special_tokens if isinstance(special_tokens, str) else dict(special_tokens),
        "student": tokenizer_identity(student),
        "teacher": tokenizer_identity(teacher),
        "prunings": [],
        "merges": [],
    }


def tokenizer_identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the properties of a tokenizer that W depends on; neither its path nor its chat template.

    Special tokens come from a configuration that the tokenizer's fingerprint does not cover.
    """
    return {
        "tokenizer": tokenizer.fingerprint,
        "special_tokens": dict(tokenizer.special_token_ids),
        "tokens": len(tokenizer),
        "embedding_rows": tokenizer.embedding_rows,
    }


def assemble_projection(
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
    weights: NDArray[np.floating[Any]],
    shape: tuple[int, int],
    header: dict[str, Any],
) -> SparseProjection:
    """Return a projection of entries in any order; duplicate entries are added, sums of 0 in float32 dropped."""
    keys = rows.astype(np.int64) * shape[1] + columns
    places, inverse = np.unique(keys, return_inverse=True)
    summed = np.bincount(inverse, weights.astype(np.float64), minlength=len(places))
    kept = np.minimum(summed, 1).astype(np.float32)
    places, kept = places[kept > 0], kept[kept > 0]
    counts = np.bincount(places // shape[1], minlength=shape[0]) if len(places) else np.zeros(shape[0], np.int64)
    return SparseProjection(
        row_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
        teacher_ids=(places % shape[1]).astype(np.int32),
        weights=kept,
        student_cells=np.full(shape[0], -1, np.int32),
        teacher_cells=np.full(shape[1], -1, np.int32),
        header=header,
    )
