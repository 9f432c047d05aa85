"""Standard errors of means over problems, ratios over documents, and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error."""

    value: float
    # Its standard error, clustered by problem or document, because values of one problem are not independent (Miller
    # 2024, Adding Error Bars to Evals); nan for a single problem or document.
    error: float

    @classmethod
    def mean_of(cls, values: NDArray[np.float64]) -> Estimate:
        """Return the mean of one value per problem, float64 [P]."""
        count = len(values)
        error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(values.mean()), error)

    @property
    def finite_error(self) -> float | None:
        """The standard error; None if it is not finite, as JSON requires."""
        return self.error if math.isfinite(self.error) else None


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sums over documents: bits over bytes, agreements over compared tokens.

    Long documents weigh more than short ones. The error is that of a ratio estimator with documents as clusters
    (Cochran 1977, Sampling Techniques, chapter 6).
    """

    sums: NDArray[np.float64]  # [D], numerator of each document
    counts: NDArray[np.float64]  # [D], denominator of each document; 0: the document is not included

    @property
    def value(self) -> float:
        """The total of the sums over the total of the counts; nan if the counts are 0."""
        count = float(self.counts.sum())
        return float(self.sums.sum()) / count if count else math.nan

    def estimate(self) -> Estimate:
        """Return the value with its standard error."""
        return Estimate(self.value, _standard_error(self._residuals(), self.counts > 0))

    def difference(self, other: Ratio) -> Estimate:
        """Return the difference to another ratio over the same documents, paired by document.

        Pairing removes the difficulty of documents from the standard error (Miller 2024).
        """
        if len(self.sums) != len(other.sums):
            raise ValueError(
                f"two results over {len(self.sums)} and {len(other.sums)} documents cannot be paired by document"
            )
        return Estimate(
            self.value - other.value,
            _standard_error(self._residuals() - other._residuals(), (self.counts > 0) | (other.counts > 0)),
        )

    def _residuals(self) -> NDArray[np.float64]:
        """Return float64 [D], of sum 0: each document's linear contribution to the deviation of the ratio."""
        count = float(self.counts.sum())
        if not count or not math.isfinite(self.value):
            return np.full(len(self.sums), math.nan)
        residuals: NDArray[np.float64] = (self.sums - self.value * self.counts) / count
        return residuals


def _standard_error(residuals: NDArray[np.float64], present: NDArray[np.bool_]) -> float:
    """Return the standard error of a sum of residuals, one per included document; nan for fewer than two."""
    count = int(present.sum())
    return math.sqrt(float((residuals[present] ** 2).sum()) * count / (count - 1)) if count > 1 else math.nan
