"""Methods of `xtk transplant --method`: which old rows a new token's row is combined from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.projection.projection import Projection
from xtk.projection.vocabulary_pair import SparseEntries
from xtk.transplant.orthogonal_matching_pursuit import combine_donor_rows
from xtk.transplant.token_sources import TokenSources

# Measured on SmolLM2-135M with the tokenizers of GPT-2 and Qwen: docs/explanation/numbers.md.
DEFAULT_DECAY = 0.5


class RowWeights(NamedTuple):
    """Weights of old tokens in the rows of new ones, for tokens that are not copied.

    Attributes:
        embedding: of the input embedding.
        head: of an output head that is separate from the embedding.
    """

    embedding: SparseEntries
    head: SparseEntries


class RowMethod(Protocol):
    """A method. A dataclass; its fields are its options.

    Attributes:
        draws_rows: rows without weights are drawn from the distribution of the old rows; otherwise they are its mean.
    """

    draws_rows: ClassVar[bool]

    def weights(self, sources: TokenSources) -> RowWeights:
        """Return the weights of old tokens for the new tokens that are not copied."""


@dataclass(frozen=True)
class MeanOfSpelling:
    """fvt: the mean of the rows of the tokens that spell the new token (fast vocabulary transfer, arXiv 2402.09977)."""

    draws_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> RowWeights:
        """Return equal weights."""
        entries = _spelling_entries(sources, lambda place, back, sizes: np.ones(len(place)))
        return RowWeights(entries, entries)


@dataclass(frozen=True)
class WeightedSpelling:
    """subword: weighted by length in bytes; the first token is heaviest, in a separate embedding the last.

    The head of a model predicts the first token of the spelling, and attention reads the others from the embedding of
    the last. Where one matrix is both, the first token is heaviest.

    Attributes:
        decay: weight of each token relative to its heavier neighbor, before the length.
    """

    decay: float = DEFAULT_DECAY
    tied: bool = True

    draws_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> RowWeights:
        """Return weights by length and position."""
        first = _spelling_entries(sources, lambda place, back, sizes: sizes * self.decay**place)
        last = _spelling_entries(sources, lambda place, back, sizes: sizes * self.decay**back)
        return RowWeights(first if self.tied else last, first)


@dataclass(frozen=True)
class ProjectedRows:
    """projection: `W E` with a projection of the new tokenizer to the old one; rows of W are scaled to sum 1."""

    projection: Projection = field(repr=False)

    draws_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> RowWeights:
        """Return the rows of the projection."""
        rows, masses = self.projection.entry_rows, self.projection.row_masses
        wanted = (rows < len(sources.new)) & (self.projection.teacher_ids < len(sources.old))
        wanted[wanted] = sources.copied[rows[wanted]] < 0
        kept = rows[wanted]
        entries = SparseEntries(
            kept, self.projection.teacher_ids[wanted], (self.projection.weights[wanted] / masses[kept])
        )
        return RowWeights(entries, entries)


@dataclass(frozen=True)
class DonorCombination:
    """omp: a combination of shared tokens that reproduces the row in a donor with the new tokenizer.

    Orthogonal matching pursuit, arXiv 2506.06607.

    Attributes:
        donor: float32 [at least V, G], the donor's input embedding.
    """

    donor: NDArray[np.float32] = field(repr=False)

    draws_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> RowWeights:
        """Return at most 64 weights per token."""
        shared = np.flatnonzero(sources.pair.equal_ids >= 0)
        missing = np.flatnonzero((sources.copied < 0) & (sources.new.vocabulary.byte_lengths > 0))
        found = combine_donor_rows(self.donor, missing, shared)
        entries = SparseEntries(found.rows, sources.pair.equal_ids[found.columns], found.weights)
        return RowWeights(entries, entries)


@dataclass(frozen=True)
class MeanRow:
    """mean: the mean of all old rows; a baseline."""

    draws_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> RowWeights:
        """Return no weights."""
        return RowWeights(_no_entries(), _no_entries())


@dataclass(frozen=True)
class RandomRow(MeanRow):
    """random: drawn from the normal distribution with mean and covariance of the old rows; a baseline."""

    draws_rows: ClassVar[bool] = True


METHODS: dict[str, str] = {
    "fvt": "xtk.transplant.row_methods:MeanOfSpelling",
    "subword": "xtk.transplant.row_methods:WeightedSpelling",
    "projection": "xtk.transplant.row_methods:ProjectedRows",
    "omp": "xtk.transplant.row_methods:DonorCombination",
    "mean": "xtk.transplant.row_methods:MeanRow",
    "random": "xtk.transplant.row_methods:RandomRow",
}


def _no_entries() -> SparseEntries:
    return SparseEntries(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float64))


def _spelling_entries(sources: TokenSources, weigh: Any) -> SparseEntries:
    """Return an entry for each token of each spelling, the weights of a spelling scaled to sum 1.

    Args:
        sources: the tokens.
        weigh: function of int64 [n] places from the first token, places from the last, and lengths in bytes.
    """
    spelled = sources.spellings
    at = np.repeat(np.arange(len(spelled.token_ids)), spelled.lengths)
    place = np.arange(len(spelled.spelling_ids)) - spelled.offsets[at]
    sizes = sources.old.vocabulary.byte_lengths[spelled.spelling_ids].astype(np.float64)
    weights = weigh(place, spelled.lengths[at] - 1 - place, sizes)
    weights = weights / np.bincount(at, weights, minlength=1)[at]
    wanted = sources.copied[spelled.token_ids[at]] < 0
    return SparseEntries(spelled.token_ids[at][wanted], spelled.spelling_ids[wanted], weights[wanted])
