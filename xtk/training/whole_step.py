"""What is known of a step over all processes and micro-batches: denominators, weights of teachers, means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.losses.objective import Objective
from xtk.losses.policy_gradient import PolicyGradient
from xtk.training.combining import Weighing
from xtk.training.layout import Layout
from xtk.training.metrics import metric

# The largest factor of `--balance ce`. Close to its teacher a student has a distance, and a gradient, of mostly noise.
LARGEST_BALANCE = 100.0


class Counted(Protocol):
    """A micro-batch, or what is known of one."""

    @property
    def counts(self) -> NDArray[np.float64]:
        """As in `MicroBatch`."""


class WholeStep:
    """Adds up the micro-batches of a step before the first of them is computed; every process has to make one.

    Args:
        objectives: the terms of the sum.
        weighing: how weights of teachers come from what they say; None: they do not.
        names: of the teachers.
        micro_batches: of this process.
        layout: which knows the others.
        device: on which processes talk.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        weighing: Weighing | None,
        names: Sequence[str],
        micro_batches: Sequence[Counted],
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._objectives, self._names = objectives, names
        told = np.sum([batch.counts for batch in micro_batches], axis=0)
        rows, *rest = layout.add(torch.from_numpy(told).to(device), "data").tolist()
        counts, others = np.array(rest[: len(objectives)]), np.array(rest[len(objectives) :])
        teachers = len(others) // 4
        shares, tallies = others[:teachers] / (rows or 1), others[teachers:].reshape(teachers, 3)
        of_step = weighing is not None and weighing.per == "batch" and teachers > 0
        if weighing is not None and of_step:
            shares = weighing.shares(tallies[:, None])[:, 0]
        self.teachers = None if weighing is None else shares
        self._counts = np.array([_pooled(objective, objectives, counts) for objective in objectives])
        self._weights = np.array(
            [objective.weight * (shares[objective.teacher] if of_step and objective.distils else objective.share)
             for objective in objectives]
        )  # fmt: skip
        self._distils = np.array([objective.distils for objective in objectives], np.bool_)

    def scales(self, balance: float = 1.0) -> list[float]:
        """Return what the items of each term are multiplied with.

        Args:
            balance: a factor of all that is about teachers.
        """
        scales: list[float] = (self._weights * np.where(self._distils, balance, 1.0) / self._counts).tolist()
        return scales

    def balance(self, sums: Sequence[float]) -> float:
        """Return the factor with which what is about teachers, weights aside, is as large as cross-entropy.

        It is at most `LARGEST_BALANCE`, also where the distance to the teachers is 0, or an estimate of it is below 0.

        Args:
            sums: [terms], over items.
        """
        means = np.array(sums) / self._counts
        (ce,) = means[~self._distils]
        distilling = [objective for objective in self._objectives if objective.distils]
        shares = {objective.teacher: objective.share for objective in distilling}
        weight = sum(objective.weight * objective.share for objective in distilling) / sum(shares.values())
        distilled = float((means * self._weights)[self._distils].sum())
        if ce <= 0 or (distilled <= 0 and any(isinstance(one.loss, PolicyGradient) for one in distilling)):
            return 1.0
        return float(ce) * weight / max(distilled, float(ce) * weight / LARGEST_BALANCE)

    def losses(self, sums: Sequence[float], balance: float) -> dict[str, float]:
        """Return the total, the mean of each term, the weighted sum of those about teachers, and the teachers' weights.

        Args:
            sums: [terms], over items.
            balance: of the step.
        """
        means = np.array(sums) / self._counts
        weighted = means * self._weights
        names = [objective.name for objective in self._objectives]
        told = {
            "loss": float((weighted * np.where(self._distils, balance, 1.0)).sum()),
            **dict(zip(names, means.tolist(), strict=True)),
        }
        if self._distils.any():
            told["kd"] = float(weighted[self._distils].sum())
        if self.teachers is not None:
            told |= {f"weight/{name}": float(share) for name, share in zip(self._names, self.teachers, strict=True)}
        return told

    def ratios(self, seen: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the mean ratio of the losses that have one, and which share of their items was clipped.

        Args:
            seen: [terms, 3], as `SurrogateOfTerm.seen`.
        """
        told: dict[str, float] = {}
        for objective, (items, ratios, clipped) in zip(self._objectives, seen, strict=True):
            if items:
                teacher = self._names[objective.teacher]
                told[metric("ratio", teacher, self._names)] = ratios / items
                told[metric("clipped", teacher, self._names)] = clipped / items
        return told


def _pooled(objective: Objective, objectives: Sequence[Objective], counts: np.ndarray) -> float:
    """Return what a term is averaged over; 1 where there is nothing to average."""
    same = [
        count
        for other, count in zip(objectives, counts.tolist(), strict=True)
        if other is objective or (objective.pool and other.pool == objective.pool)
    ]
    return float(sum(same)) or 1.0
