"""What is known of a step over all processes and micro-batches: denominators, weights of teachers, means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.losses.loss_term import LossTerm
from xtk.losses.policy_gradient import PolicyGradient
from xtk.training.metrics_file import metric_name
from xtk.training.parallel_config import ParallelConfig
from xtk.training.teacher_ensemble import ScoreWeighting

# The largest factor of `--scale-kd-to ce`. Close to the teacher, distance and gradient are mostly noise.
MAX_KD_SCALE = 100.0


class CountedBatch(Protocol):
    """A micro-batch, or what is known of one."""

    @property
    def counts(self) -> NDArray[np.float64]:
        """As in `MicroBatch`."""


class StepReduction:
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
        objectives: Sequence[LossTerm],
        score_weighting: ScoreWeighting | None,
        teacher_names: Sequence[str],
        micro_batches: Sequence[CountedBatch],
        parallel: ParallelConfig,
        device: torch.device,
    ) -> None:
        self._objectives, self._names = objectives, teacher_names
        told = np.sum([batch.counts for batch in micro_batches], axis=0)
        rows, *rest = parallel.all_reduce_sum(torch.from_numpy(told).to(device), "data").tolist()
        counts, others = np.array(rest[: len(objectives)]), np.array(rest[len(objectives) :])
        teachers = len(others) // 4
        shares, tallies = others[:teachers] / (rows or 1), others[teachers:].reshape(teachers, 3)
        of_step = score_weighting is not None and score_weighting.scope == "batch" and teachers > 0
        if score_weighting is not None and of_step:
            shares = score_weighting.teacher_weights(tallies[:, None])[:, 0]
        self.teacher_weights = None if score_weighting is None else shares
        self._counts = np.array([_pooled(objective, objectives, counts) for objective in objectives])
        self._weights = np.array(
            [
                objective.weight
                * (shares[objective.teacher_index] if of_step and objective.uses_teacher else objective.teacher_weight)
                for objective in objectives
            ]
        )
        self._distils = np.array([objective.uses_teacher for objective in objectives], np.bool_)

    def term_scales(self, kd_scale: float = 1.0) -> list[float]:
        """Return what the items of each term are multiplied with.

        Args:
            kd_scale: a factor of all that is about teachers.
        """
        scales: list[float] = (self._weights * np.where(self._distils, kd_scale, 1.0) / self._counts).tolist()
        return scales

    def kd_scale(self, sums: Sequence[float]) -> float:
        """Return the factor with which what is about teachers, weights aside, is as large as cross-entropy.

        It is at most `LARGEST_BALANCE`, also where the distance to the teachers is 0, or an estimate of it is below 0.

        Args:
            sums: [terms], over items.
        """
        means = np.array(sums) / self._counts
        (ce,) = means[~self._distils]
        distilling = [objective for objective in self._objectives if objective.uses_teacher]
        shares = {objective.teacher_index: objective.teacher_weight for objective in distilling}
        weight = sum(objective.weight * objective.teacher_weight for objective in distilling) / sum(shares.values())
        distilled = float((means * self._weights)[self._distils].sum())
        if ce <= 0 or (distilled <= 0 and any(isinstance(one.loss, PolicyGradient) for one in distilling)):
            return 1.0
        return float(ce) * weight / max(distilled, float(ce) * weight / MAX_KD_SCALE)

    def loss_metrics(self, sums: Sequence[float], kd_scale: float) -> dict[str, float]:
        """Return the total, the mean of each term, the weighted sum of those about teachers, and the teachers' weights.

        Args:
            sums: [terms], over items.
            kd_scale: of the step.
        """
        means = np.array(sums) / self._counts
        weighted = means * self._weights
        names = [objective.name for objective in self._objectives]
        told = {
            "loss": float((weighted * np.where(self._distils, kd_scale, 1.0)).sum()),
            **dict(zip(names, means.tolist(), strict=True)),
        }
        if self._distils.any():
            told["distillation_loss"] = float(weighted[self._distils].sum())
        if self.teacher_weights is not None:
            told |= {
                f"teacher_weight/{name}": float(share)
                for name, share in zip(self._names, self.teacher_weights, strict=True)
            }
        return told

    def surrogate_metrics(self, surrogate_sums: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the mean ratio of the losses that have one, and which share of their items was clipped.

        Args:
            surrogate_sums: [terms, 3], as `SurrogateOfTerm.seen`.
        """
        told: dict[str, float] = {}
        for objective, (items, ratios, clipped) in zip(self._objectives, surrogate_sums, strict=True):
            if items:
                teacher = self._names[objective.teacher_index]
                told[metric_name("importance_ratio", teacher, self._names)] = ratios / items
                told[metric_name("clip_fraction", teacher, self._names)] = clipped / items
        return told


def _pooled(objective: LossTerm, objectives: Sequence[LossTerm], counts: np.ndarray) -> float:
    """Return what a term is averaged over; 1 where there is nothing to average."""
    same = [
        count
        for other, count in zip(objectives, counts.tolist(), strict=True)
        if other is objective
        or (objective.denominator_group and other.denominator_group == objective.denominator_group)
    ]
    return float(sum(same)) or 1.0
