"""Method `cooccurrence`: P(teacher's next token | student's next token), counted in a corpus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.projection.cooccurrence_numba import count_first_token_pairs, insert_counts
from xtk.projection.vocabulary_pair import SparseEntries, VocabularyPair, concatenate_entries
from xtk.text.alignment import align, tokenize_batches
from xtk.text.tokenizer import EncodedText, Tokenizer

DEFAULT_SMOOTHING = 1.0


@dataclass(frozen=True)
class CooccurrenceCounts:
    """Counts of (student token, teacher token) at the start of the same span."""

    student_ids: NDArray[np.int32]  # [n]
    teacher_ids: NDArray[np.int32]  # [n]; pairs are ascending by student, then teacher
    counts: NDArray[np.int64]  # [n], at least 1
    num_documents: int = 0  # number of documents in the corpus
    corpus_fingerprint: str = ""  # fingerprint of the corpus


@dataclass(frozen=True)
class CooccurrenceMethod:
    """`W[v, u] = (n(v, u) + a W0[v, u]) / (n(v) + a)`: P(teacher's next token | student's next token).

    `n` is counted at shared boundaries, `W0` is the first-token projection. Also correct where the student's token is a
    prefix of longer teacher tokens, which no rule on spellings can be: so tokens with equal bytes are counted too.
    """

    counts: CooccurrenceCounts  # n
    smoothing: float = DEFAULT_SMOOTHING  # a, weight of `W0` in spans; a token without occurrences has its row of `W0`

    stores_cells = False

    def __post_init__(self) -> None:
        if not (self.smoothing >= 0 and math.isfinite(self.smoothing)):
            raise XtkError(
                f"--smoothing is {self.smoothing}, but must be a finite number of at least 0",
                hint="use, for example, --smoothing 1",
            )

    def header_options(self) -> dict[str, Any]:
        """Return the options for the header."""
        return {
            "smoothing": self.smoothing,
            "documents": self.counts.num_documents,
            "corpus": self.counts.corpus_fingerprint,
        }

    def build_entries(self, pair: VocabularyPair) -> SparseEntries:
        """Return the entries of all ordinary tokens."""
        counts, prior = self.counts, pair.first_token_entries
        totals = np.bincount(counts.student_ids, counts.counts, minlength=pair.shape[0])
        seen = counts.counts / (totals + self.smoothing)[counts.student_ids]
        with np.errstate(invalid="ignore"):
            prior_weight = np.where(totals > 0, self.smoothing / (totals + self.smoothing), 1)[prior.rows]
        kept = prior_weight > 0
        return concatenate_entries(
            SparseEntries(counts.student_ids, counts.teacher_ids, seen),
            SparseEntries(prior.rows[kept], prior.columns[kept], prior_weight[kept]),
        )


class CooccurrenceCounter:
    """Counts cooccurrences of tokens in a growing hash table."""

    def __init__(self, student: Tokenizer, teacher: Tokenizer) -> None:
        self.student, self.teacher = student, teacher
        self._keys = np.full(1 << 16, -1, np.int64)
        self._counts = np.zeros(1 << 16, np.int64)
        self._used = 0

    def add(self, texts: Sequence[str], student: Sequence[EncodedText], teacher: Sequence[EncodedText]) -> None:
        """Count the spans of texts."""
        spans = [align(one, other) for one, other in zip(student, teacher, strict=True)]
        while self._used + sum(map(len, spans)) > len(self._keys) // 2:
            self._grow()
        raw = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        self._used = count_first_token_pairs(
            self._keys,
            self._counts,
            self._used,
            len(self.teacher),
            (np.concatenate(raw), _offsets(raw)),
            (np.concatenate(spans), _offsets(spans)),
            *((np.concatenate([count.ids for count in side]), np.concatenate([count.byte_ends for count in side]),
               _offsets([count.ids for count in side])) for side in (student, teacher)),
            *((side.vocabulary.token_bytes, side.vocabulary.offsets) for side in (self.student, self.teacher)),
        )  # fmt: skip

    def sorted_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pairs, `student * len(teacher) + teacher`, ascending, and their counts."""
        taken = np.flatnonzero(self._keys >= 0)
        order = taken[np.argsort(self._keys[taken])]
        return self._keys[order], self._counts[order]

    def to_counts(self, num_documents: int, corpus_fingerprint: str) -> CooccurrenceCounts:
        """Return the pairs as input of `CooccurrenceMethod`."""
        keys, times = self.sorted_counts()
        students, teachers = np.divmod(keys, len(self.teacher))
        return CooccurrenceCounts(
            students.astype(np.int32), teachers.astype(np.int32), times, num_documents, corpus_fingerprint
        )

    def _grow(self) -> None:
        keys, times = self.sorted_counts()
        size = 2 * len(self._keys)
        self._keys, self._counts = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        insert_counts(self._keys, self._counts, keys, times)


def count_cooccurrences(counter: CooccurrenceCounter, texts: Iterable[str]) -> Iterator[int]:
    """Tokenize texts and count cooccurrences, in constant memory; yield the number of texts after each batch."""
    done = 0
    for group, left, right in tokenize_batches(texts, str, counter.student.encode, counter.teacher.encode):
        counter.add(group, left, right)
        done += len(group)
        yield done


def _offsets(parts: Sequence[Sized]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)
