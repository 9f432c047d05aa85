"""Method `embedding`: the teacher tokens with the most similar input embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair, concatenate_entries

DEFAULT_NEIGHBORS = 8
# Chosen by us: cosines of neighbors differ by hundredths, so at 0.1 the nearest weighs a few times the eighth.
DEFAULT_TEMPERATURE = 0.1
# Student tokens per matrix product: 256 rows of 151,646 cosines are 155 MB.
BATCH_TOKENS = 256


@dataclass(frozen=True)
class EmbeddingSimilarityMethod:
    """Initialization from embeddings: equal bytes first; other tokens are mapped to their nearest neighbors.

    Tokens of equal bytes are anchors. The rotation that maps the student's anchors closest to the teacher's (orthogonal
    Procrustes: Schoenemann 1966; for embeddings: Xing et al., NAACL 2015) is applied to all of the student's
    embeddings; it keeps cosines and, with fewer parameters than a least-squares map, overfits less to the anchors.
    Weights are a softmax of the cosines with the nearest teacher tokens.

    It shows which tokens are used alike, not which bytes come next: "seven" may be mapped to "eight", and mass goes to
    tokens that share no byte with the student's. A starting point for training, not a probability.

    Attributes:
        student_embedding: float32 [V, H].
        teacher_embedding: float32 [U, G]; G need not be H.
        num_neighbors: teacher tokens per row.
        temperature: temperature of the softmax.
        student_weights: fingerprint of the model that the embedding is from.
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
            raise XtkError(
                f"--num-neighbors is {self.num_neighbors}, but must be at least 1",
                hint="use, for example, --num-neighbors 4",
            )
        if not self.temperature > 0:
            raise XtkError(
                f"--temperature is {self.temperature}, but must be above 0", hint="use, for example, --temperature 0.1"
            )

    def header_options(self) -> dict[str, Any]:
        """Return the options for the header."""
        names = ("num_neighbors", "temperature", "student_weights", "teacher_weights")
        return {name: getattr(self, name) for name in names}

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary tokens."""
        for side, matrix in ((pair.student, self.student_embedding), (pair.teacher, self.teacher_embedding)):
            if len(matrix) < len(side):
                raise XtkError(
                    f"the model's embedding has {len(matrix):,} rows, but its tokenizer has {len(side):,} tokens",
                    where=side.name,
                    hint="use the tokenizer that belongs to the model",
                )
            if any(not np.isfinite(matrix[start : start + 8192]).all() for start in range(0, len(side), 8192)):
                raise XtkError(
                    "the model's input embedding contains NaN or infinite values, which --method embedding cannot use",
                    where=side.name,
                    hint="download the weights again, or use another --method, which needs only the tokenizers",
                )
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
        entries = SparseEntries(rows, candidates[places.ravel()].astype(np.int32), weights.ravel().astype(np.float32))
        return concatenate_entries(pair.exact_entries, entries)

    def _rotation(
        self, pair: VocabularyPair, student_middle: NDArray[np.float32], teacher_middle: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return [H, G] with orthonormal rows or columns, fitted to the anchors in chunks."""
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
        """Return indices [n, k] of the nearest targets, ascending, and their weights."""
        count = min(self.num_neighbors, len(targets))
        cosines = rows @ targets.T
        places = np.sort(np.argpartition(-cosines, count - 1, axis=1)[:, :count], axis=1)
        near = np.take_along_axis(cosines, places, axis=1).astype(np.float64)
        raw = np.exp((near - near.max(1, keepdims=True)) / self.temperature)
        return places, raw / raw.sum(1, keepdims=True)


def _normalize_vectors(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), np.float32)
