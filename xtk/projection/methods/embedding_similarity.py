"""embedding: the teacher's tokens whose input embeddings are nearest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair, concatenate_entries

DEFAULT_NEIGHBORS = 8
# Ours: cosines of neighbours differ by hundredths, so that at 0.1 the nearest weighs a few times the eighth.
DEFAULT_TEMPERATURE = 0.1
# Student tokens compared at once: 256 rows of 151,646 cosines are 155 MB.
BATCH_TOKENS = 256


@dataclass(frozen=True)
class EmbeddingSimilarityMethod:
    """A seed from what the models learnt: tokens of equal bytes first; any other is spread over its neighbours.

    Tokens of equal bytes are anchors. The rotation that brings the student's anchors nearest to the teacher's
    (orthogonal Procrustes: Schoenemann 1966; for embeddings: Xing et al., NAACL 2015) maps the whole space of the
    student; it keeps cosines and, with fewer free numbers than a least-squares map, leans less on the anchors.
    Weights are a softmax of the cosines with the nearest teacher's tokens.

    It says which tokens are used alike, not which bytes come next: "seven" may land on "eight". Mass
    goes to tokens that share no byte with the student's. A start for further work, not a measure of probability.

    Attributes:
        student_embedding: float32 [V, H].
        teacher_embedding: float32 [U, G]; G need not be H.
        num_neighbors: teacher's tokens a row.
        temperature: of the softmax.
        student_weights: the fingerprint of the model that the embedding is from.
        teacher_weights: likewise.
    """

    student_embedding: NDArray[np.float32] = field(repr=False)
    teacher_embedding: NDArray[np.float32] = field(repr=False)
    num_neighbors: int = DEFAULT_NEIGHBORS
    temperature: float = DEFAULT_TEMPERATURE
    student_weights: str = ""
    teacher_weights: str = ""

    stores_cells = False

    def __post_init__(self) -> None:
        if self.num_neighbors < 1:
            raise XtkError(f"--num-neighbors is {self.num_neighbors}; a row has at least one entry")
        if not self.temperature > 0:
            raise XtkError(f"--temperature is {self.temperature}; it is above 0")

    def header_options(self) -> dict[str, Any]:
        """Return what the header tells of the options."""
        names = ("num_neighbors", "temperature", "student_weights", "teacher_weights")
        return {name: getattr(self, name) for name in names}

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary rows.

        Raises:
            XtkError: an embedding has fewer rows than its tokenizer has tokens, or numbers that are none.
        """
        for side, matrix in ((pair.student, self.student_embedding), (pair.teacher, self.teacher_embedding)):
            if len(matrix) < len(side):
                raise XtkError(
                    f"the embedding has {len(matrix):,} rows, and the tokenizer {len(side):,} tokens", where=side.name
                )
            if any(not np.isfinite(matrix[start : start + 8192]).all() for start in range(0, len(side), 8192)):
                raise XtkError("the embedding holds numbers that are not finite", where=side.name)
        candidates = np.flatnonzero(pair.teacher.vocabulary.byte_lengths > 0)
        others = np.flatnonzero((pair.student.vocabulary.byte_lengths > 0) & (pair.equal_ids < 0))
        anchors = (
            (self.student_embedding, pair.exact_entries.rows),
            (self.teacher_embedding, pair.exact_entries.columns),
        )
        middle = [matrix[rows].mean(0) for matrix, rows in anchors]
        rotation = self._rotation(pair, *middle)
        targets = _normalize_vectors(self.teacher_embedding[candidates] - middle[1])
        nearest = [self._nearest(_normalize_vectors((self.student_embedding[some] - middle[0]) @ rotation), targets)
                   for some in np.array_split(others, range(BATCH_TOKENS, len(others), BATCH_TOKENS))]  # fmt: skip
        places, weights = (np.concatenate(parts) for parts in zip(*nearest, strict=True))
        rows = np.repeat(others, places.shape[1]).astype(np.int32)
        found = SparseEntries(rows, candidates[places.ravel()].astype(np.int32), weights.ravel().astype(np.float32))
        return concatenate_entries(pair.exact_entries, found)

    def _rotation(
        self, pair: VocabularyPair, student_middle: NDArray[np.float32], teacher_middle: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return [H, G] with orthonormal rows or columns, fitted on the anchors chunk by chunk."""
        product = np.zeros((self.student_embedding.shape[1], self.teacher_embedding.shape[1]))
        for start in range(0, len(pair.exact_entries.rows), 8192):
            some = slice(start, start + 8192)
            left = _normalize_vectors(self.student_embedding[pair.exact_entries.rows[some]] - student_middle)
            right = _normalize_vectors(self.teacher_embedding[pair.exact_entries.columns[some]] - teacher_middle)
            product += left.T @ right
        left, _, right = np.linalg.svd(product, full_matrices=False)
        return np.asarray(left @ right, np.float32)

    def _nearest(
        self, rows: NDArray[np.float32], targets: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return places [n, k] of the nearest targets, rising, and their weights."""
        count = min(self.num_neighbors, len(targets))
        cosines = rows @ targets.T
        places = np.sort(np.argpartition(-cosines, count - 1, axis=1)[:, :count], axis=1)
        near = np.take_along_axis(cosines, places, axis=1).astype(np.float64)
        raw = np.exp((near - near.max(1, keepdims=True)) / self.temperature)
        return places, raw / raw.sum(1, keepdims=True)


def _normalize_vectors(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), np.float32)
