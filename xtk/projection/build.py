"""Filling a projection from two tokenizers: the rules of `--method`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.coverage_audit import audit_projection
from xtk.projection.projection import Projection
from xtk.projection.special_tokens import MATCH_BY_ROLE, SpecialTokenMatching, match_special_tokens
from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair, concatenate_entries
from xtk.registry import load_registered
from xtk.tokens.tokenizer import Tokenizer

METHODS = {
    "exact": "xtk.projection.methods.exact_match:ExactMatchMethod",
    "first-token": "xtk.projection.methods.first_token:FirstTokenMethod",
    "multitoken": "xtk.projection.methods.multitoken:MultitokenMethod",
    "partition": "xtk.projection.methods.partition:PartitionMethod",
    "cooccurrence": "xtk.projection.methods.cooccurrence:CooccurrenceMethod",
    "embedding": "xtk.projection.methods.embedding_similarity:EmbeddingSimilarityMethod",
}

# Raised when the same request gives other numbers, so that nothing built before is taken for it.
ALGORITHM_VERSION = 3


class ProjectionMethod(Protocol):
    """A way to fill the rows of ordinary tokens. A dataclass; its fields are its options.

    Attributes:
        stores_cells: whether the cells of both vocabularies are stored too.
    """

    stores_cells: bool

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary rows, those of equal bytes among them."""


def build_projection(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str = "multitoken",
    *,
    special_tokens: SpecialTokenMatching = MATCH_BY_ROLE,
    **options: Any,
) -> Projection:
    """Build W from both vocabularies.

    Tokens of equal bytes are one entry of weight 1 (`counts` knows better), special tokens are matched by role,
    then by name. What becomes of the others is the method's: `exact` leaves their rows empty, `first` puts all weight
    on the first piece of their spelling in the teacher's tokens, `multitoken` spreads it over up to four, `cells` is
    `first` with the partition of both vocabularies, `counts` is what a corpus says, `embedding` asks the models.

    Args:
        student: its tokens are the rows.
        teacher: its tokens are the columns.
        method: one of METHODS.
        special_tokens: "role", "none" or a table {student's token: teacher's token}.
        options: the method's own.

    Returns:
        [V, U] in compressed rows. Every entry of an ordinary row shares bytes with the row's token, but for
        `embedding`. The header holds the request and the audit.

    Raises:
        XtkError: no such method or option, or the two vocabularies have nothing in common.
    """
    made = make_method(method, options)
    pair = VocabularyPair(student, teacher)
    if not len(pair.exact_entries.rows):
        raise XtkError("the two vocabularies share no token", where=f"{student.name} and {teacher.name}")
    rows, columns = match_special_tokens(student, teacher, special_tokens)
    special = SparseEntries(rows, columns, np.ones(len(rows), np.float32))
    projection = assemble_projection(*concatenate_entries(made.build_entries(pair), special), pair.shape, {})
    if made.stores_cells:
        from xtk.projection.methods.partition import partition_vocabularies

        cells = partition_vocabularies(pair, rows, columns)
        projection = dataclasses.replace(projection, student_cells=cells[0], teacher_cells=cells[1])
    header = projection_header(student, teacher, method, special_tokens, **options)
    return dataclasses.replace(
        projection, header={**header, "audit": audit_projection(projection, pair, rows, columns)}
    )


def check_method_options(method: str, options: Iterable[str]) -> Any:
    """Return the class of a method that reads these options.

    Raises:
        XtkError: no such method, or an option that it does not read.
    """
    kind = load_registered(METHODS, method, "method")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in options:
        if name not in known:
            raise XtkError(
                f"--method {method} does not read --{name.replace('_', '-')}",
                hint=f"it reads: {', '.join(sorted(known)) or 'no option'}",
            )
    return kind


def make_method(method: str, options: Mapping[str, Any]) -> ProjectionMethod:
    """Return a method with its options.

    Raises:
        XtkError: no such method, an option that it does not read, or a value without meaning.
    """
    kind = check_method_options(method, options)
    lacking = [field.name for field in dataclasses.fields(kind)
               if field.default is dataclasses.MISSING and field.name not in options]  # fmt: skip
    if lacking:
        raise XtkError(f"--method {method} needs more than two tokenizers: {', '.join(lacking)}")
    made: ProjectionMethod = kind(**options)
    return made


def projection_header(
    student: Tokenizer,
    teacher: Tokenizer,
    method: str = "multitoken",
    special_tokens: SpecialTokenMatching = MATCH_BY_ROLE,
    **options: Any,
) -> dict[str, Any]:
    """Return the header of what `build_projection` gives for the same arguments, but for the audit."""
    made: Any = make_method(method, options)
    told = made.header_options() if hasattr(made, "header_options") else dataclasses.asdict(made)
    return {
        "kind": "projection",
        "rules": ALGORITHM_VERSION,
        "method": method,
        "options": told,
        "special_tokens": special_tokens if isinstance(special_tokens, str) else dict(special_tokens),
        "student": tokenizer_identity(student),
        "teacher": tokenizer_identity(teacher),
        "prunings": [],
        "merges": [],
    }


def tokenizer_identity(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return all that W depends on of a side, and nothing else: neither where it lies nor its chat template.

    The roles come from a configuration that the tokenizer's fingerprint does not cover.
    """
    return {
        "tokenizer": tokenizer.fingerprint,
        "roles": dict(tokenizer.special_token_ids),
        "tokens": len(tokenizer),
        "width": tokenizer.embedding_rows,
    }


def assemble_projection(
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
    weights: NDArray[np.floating[Any]],
    shape: tuple[int, int],
    header: dict[str, Any],
) -> Projection:
    """Put entries in any order into compressed rows; entries of the same place are added.

    What is 0 in float32 is no entry.
    """
    keys = rows.astype(np.int64) * shape[1] + columns
    places, inverse = np.unique(keys, return_inverse=True)
    summed = np.bincount(inverse, weights.astype(np.float64), minlength=len(places))
    kept = np.minimum(summed, 1).astype(np.float32)
    places, kept = places[kept > 0], kept[kept > 0]
    counts = np.bincount(places // shape[1], minlength=shape[0]) if len(places) else np.zeros(shape[0], np.int64)
    return Projection(
        row_offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int64),
        teacher_ids=(places % shape[1]).astype(np.int32),
        weights=kept,
        student_cells=np.full(shape[0], -1, np.int32),
        teacher_cells=np.full(shape[1], -1, np.int32),
        header=header,
    )
