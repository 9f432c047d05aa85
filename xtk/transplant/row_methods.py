"""Methods of `xtk transplant --method`: which old rows a new token's row is combined from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_pair import SparseEntries
from xtk.transplant.orthogonal_matching_pursuit import combine_donor_rows, no_entries
from xtk.transplant.token_sources import TokenSources


class RowMethod(Protocol):
    """A method. A dataclass; its fields are its options.

    Attributes:
        samples_rows: rows without weights are sampled from the distribution of the old rows; else they are its mean.
    """

    samples_rows: ClassVar[bool]

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return the weights of old tokens for the new tokens that are not copied."""


@dataclass(frozen=True)
class MeanOfSpelling:
    """fvt: the mean of the rows of the tokens that spell the new token (fast vocabulary transfer, arXiv 2402.09977)."""

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return equal weights."""
        return _spelling_entries(sources, np.ones(len(sources.old)))


@dataclass(frozen=True)
class WeightedSpelling:
    """subword: the same, weighted by length in bytes."""

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return weights by length."""
        return _spelling_entries(sources, sources.old.vocabulary.byte_lengths.astype(np.float64))


@dataclass(frozen=True)
class ProjectedRows:
    """projection: `W E` with a projection of the new tokenizer to the old one; rows of W are scaled to sum 1."""

    projection: SparseProjection = field(repr=False)

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return the rows of the projection."""
        rows, masses = self.projection.entry_rows, self.projection.row_masses
        wanted = (rows < len(sources.new)) & (self.projection.teacher_ids < len(sources.old))
        wanted[wanted] = sources.copied[rows[wanted]] < 0
        wanted &= ~np.isin(rows, sources.unused_ids)
        kept = rows[wanted]
        return SparseEntries(kept, self.projection.teacher_ids[wanted], self.projection.weights[wanted] / masses[kept])


@dataclass(frozen=True)
class DonorCombination:
    """omp: a combination of shared tokens that reproduces the row in a donor with the new tokenizer.

    Orthogonal matching pursuit, arXiv 2506.06607.

    Attributes:
        donor: float32 [at least V, G], the donor's input embedding.
    """

    donor: NDArray[np.float32] = field(repr=False)

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return at most 64 weights per token."""
        shared = np.setdiff1d(np.flatnonzero(sources.pair.equal_ids >= 0), sources.unused_ids)
        missing = np.flatnonzero((sources.copied < 0) & (sources.new.vocabulary.byte_lengths > 0))
        missing = np.setdiff1d(missing, sources.unused_ids)
        combined = combine_donor_rows(self.donor, missing, shared)
        return SparseEntries(combined.rows, sources.pair.equal_ids[combined.columns], combined.weights)


@dataclass(frozen=True)
class MeanRow:
    """mean: the mean of all old rows; a baseline."""

    samples_rows: ClassVar[bool] = False

    def weights(self, sources: TokenSources) -> SparseEntries:
        """Return no weights."""
        return no_entries()


@dataclass(frozen=True)
class RandomRow(MeanRow):
    """random: sampled from the normal distribution with mean and covariance of the old rows; a baseline."""

    samples_rows: ClassVar[bool] = True


METHODS: dict[str, str] = {
    "fvt": "xtk.transplant.row_methods:MeanOfSpelling",
    "subword": "xtk.transplant.row_methods:WeightedSpelling",
    "projection": "xtk.transplant.row_methods:ProjectedRows",
    "omp": "xtk.transplant.row_methods:DonorCombination",
    "mean": "xtk.transplant.row_methods:MeanRow",
    "random": "xtk.transplant.row_methods:RandomRow",
}


def _spelling_entries(sources: TokenSources, importance: NDArray[np.float64]) -> SparseEntries:
    """Return an entry for each token of each spelling; weights are `importance` [U], scaled to sum 1 in a spelling."""
    spelled = sources.pair.spellings  # without tokens that the old tokenizer cannot spell
    at = np.repeat(np.arange(len(spelled.token_ids)), spelled.lengths)
    weights = importance[spelled.spelling_ids]
    weights = weights / np.bincount(at, weights, minlength=1)[at]
    wanted = sources.copied[spelled.token_ids[at]] < 0
    return SparseEntries(spelled.token_ids[at][wanted], spelled.spelling_ids[wanted], weights[wanted])
