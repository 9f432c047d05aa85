"""Estimates with their standard errors: means over problems, ratios over documents, and paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Estimate:
    """A number, and how far it may be off.

    Attributes:
        value: the number.
        error: its standard error, over problems or documents: what belongs to one of them is not independent of each
            other (Miller 2024, Adding Error Bars to Evals). nan of a single one.
    """

    value: float
    error: float

    @classmethod
    def mean_of(cls, values: NDArray[np.float64]) -> Estimate:
        """Take the mean of one value a problem, float64 [P]."""
        count = len(values)
        error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(values.mean()), error)

    @property
    def finite_error(self) -> float | None:
        """The error as JSON holds it; None: there is none."""
        return self.error if math.isfinite(self.error) else None


@dataclass(frozen=True)
class Ratio:
    """A sum over a count, both over documents: bits over bytes, agreements over places.

    Long documents weigh more than short ones, as in the sum. The error is that of a ratio estimator with a cluster a
    document: each document's residual is linear in what it adds (Cochran 1977, Sampling Techniques, chapter 6).

    Attributes:
        sums: float64 [D], of each document.
        counts: float64 [D], what they are divided by; 0 of a document that has no part.
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.float64]

    @property
    def value(self) -> float:
        """The sum over the count; nan without any."""
        count = float(self.counts.sum())
        return float(self.sums.sum()) / count if count else math.nan

    def estimate(self) -> Estimate:
        """Return the value with its error."""
        return Estimate(self.value, _standard_error(self._residuals(), self.counts > 0))

    def difference(self, other: Ratio) -> Estimate:
        """Return by how much it is above another one of the same documents.

        Paired: what is hard for both is left out of the error (Miller 2024).

        Raises:
            ValueError: there are not as many documents.
        """
        if len(self.sums) != len(other.sums):
            raise ValueError(f"{len(self.sums)} documents cannot be paired with {len(other.sums)}")
        return Estimate(
            self.value - other.value,
            _standard_error(self._residuals() - other._residuals(), (self.counts > 0) | (other.counts > 0)),
        )

    def _residuals(self) -> NDArray[np.float64]:
        """Return float64 [D], of sum 0: how much each document moves the value."""
        count = float(self.counts.sum())
        if not count or not math.isfinite(self.value):
            return np.full(len(self.sums), math.nan)
        residuals: NDArray[np.float64] = (self.sums - self.value * self.counts) / count
        return residuals


def _standard_error(residuals: NDArray[np.float64], present: NDArray[np.bool_]) -> float:
    """Return the standard error of a sum of residuals, one a document, of those that have a part."""
    count = int(present.sum())
    return math.sqrt(float((residuals[present] ** 2).sum()) * count / (count - 1)) if count > 1 else math.nan
