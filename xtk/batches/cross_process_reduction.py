"""Reduction of a step over all processes and micro-batches: loss denominators, teacher weights and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.batches.combine_teachers import ScoreWeighting
from xtk.losses.policy_gradient import PolicyGradient
from xtk.losses.term import LossTerm
from xtk.parallel.parallel_config import ParallelConfig
from xtk.runs.metrics_file import metric_name
from xtk.text.chat.conversation_tokens import REGIONS

# The largest factor of `--scale-kd-to ce`. Close to the teacher, distance and gradient are mostly noise.
MAX_KD_SCALE = 100.0
REGION_METRICS = "region_"  # how the names of metrics by region begin


class CountedBatch(Protocol):
    """A micro-batch, or its counts."""

    @property
    def counts(self) -> NDArray[np.float64]:
        """As in `MicroBatch`."""


class StepReduction:
    """Factors of the losses of a step, from the counts of all its micro-batches.

    Args:
        score_weighting: how teacher weights follow from their log-probabilities; None: the weights are fixed.
        step_counts: sum of `MicroBatch.counts` over all micro-batches of all processes.
    """

    def __init__(
        self,
        objectives: Sequence[LossTerm],
        score_weighting: ScoreWeighting | None,
        teacher_names: Sequence[str],
        step_counts: NDArray[np.float64],
    ) -> None:
        # num_passes: largest number of micro-batches of a process; set by `of_step`.
        self._objectives, self._names, self.num_passes = objectives, teacher_names, 0
        sizes = [1, len(objectives), (1 + 2 * len(objectives)) * len(REGIONS)]
        (rows,), counts, region_counts, others = np.split(step_counts, np.cumsum(sizes))
        self._region_counts = region_counts.reshape(-1, len(REGIONS))
        teachers = len(others) // 4
        shares, tallies = others[:teachers] / (rows or 1), others[teachers:].reshape(teachers, 3)
        per_step = score_weighting is not None and score_weighting.scope == "batch" and teachers > 0
        if score_weighting is not None and per_step:
            shares = score_weighting.teacher_weights(tallies[:, None])[:, 0]
        self.teacher_weights = None if score_weighting is None else shares
        denominators = np.array([_denominator(objective, objectives, counts) for objective in objectives])
        self._is_empty = denominators == 0
        self._counts = np.where(self._is_empty, 1.0, denominators)
        self._weights = np.array(
            [
                objective.weight
                * (shares[objective.teacher_index] if per_step and objective.uses_teacher else objective.teacher_weight)
                for objective in objectives
            ]
        )
        self._distils = np.array([objective.uses_teacher for objective in objectives], np.bool_)

    @classmethod
    def of_step(
        cls,
        objectives: Sequence[LossTerm],
        score_weighting: ScoreWeighting | None,
        teacher_names: Sequence[str],
        micro_batches: Sequence[CountedBatch],
        parallel: ParallelConfig,
        device: torch.device,
    ) -> StepReduction:
        """Return the factors of a step (collective)."""
        # The number of passes of each data shard is summed with the counts: one collective operation, and one read.
        passes = np.zeros(parallel.num_data_shards)
        passes[parallel.data_shard] = len(micro_batches)
        local_counts = np.concatenate([passes, np.sum([batch.counts for batch in micro_batches], axis=0)])
        sums = parallel.all_reduce_sum_of_host(local_counts, "data", device)
        made = cls(objectives, score_weighting, teacher_names, np.array(sums[parallel.num_data_shards :]))
        made.num_passes = round(max(sums[: parallel.num_data_shards]))
        return made

    def term_scales(self, kd_scale: float = 1.0) -> list[float]:
        """Return the factor of each loss: its weight, for distillation times `kd_scale`, over its denominator."""
        scales: list[float] = (self._weights * np.where(self._distils, kd_scale, 1.0) / self._counts).tolist()
        return scales

    def kd_scale(self, sums: Sequence[float]) -> float:
        """Return the factor that makes the distillation loss, apart from its weights, as large as the CE loss.

        It is at most `MAX_KD_SCALE`, also if the distillation loss is 0 or a sampled estimate of it is negative.
        `sums`: [terms], over tokens or spans.
        """
        means = np.array(sums) / self._counts
        (ce,) = means[~self._distils]
        distilling = [objective for objective in self._objectives if objective.uses_teacher]
        shares = {objective.teacher_index: objective.teacher_weight for objective in distilling}
        weight = sum(objective.weight * objective.teacher_weight for objective in distilling) / sum(shares.values())
        distilled = float((means * self._weights)[self._distils].sum())
        if ce <= 0 or (distilled <= 0 and any(isinstance(objective.loss, PolicyGradient) for objective in distilling)):
            return 1.0
        return float(ce) * weight / max(distilled, float(ce) * weight / MAX_KD_SCALE)

    def loss_metrics(self, sums: Sequence[float], kd_scale: float) -> dict[str, float]:
        """Return the total loss, the mean of each loss, the weighted distillation loss and the teacher weights.

        A loss without items in the step (CE of a step on the student's own completions) has no mean.
        """
        means = np.array(sums) / self._counts
        weighted = means * self._weights
        metrics = {"loss": float((weighted * np.where(self._distils, kd_scale, 1.0)).sum())}
        metrics |= {
            objective.name: mean
            for objective, mean, is_empty in zip(self._objectives, means.tolist(), self._is_empty, strict=True)
            if not is_empty
        }
        if self._distils.any():
            metrics["distillation_loss"] = float(weighted[self._distils].sum())
        if self.teacher_weights is not None:
            metrics |= {
                f"teacher_weight/{name}": float(weight)
                for name, weight in zip(self._names, self.teacher_weights, strict=True)
            }
        return metrics

    def region_metrics(self, region_sums: NDArray[np.float64], kd_scale: float = 1.0) -> dict[str, float]:
        """Return metrics by region of conversations and rollouts: tokens, the mean loss, and the mean advantage.

        The mean loss is the weighted sum of the means of all losses over their items in a region. `region_sums`:
        [terms, regions + 1], of the losses.
        """
        tokens, items, advantages = np.split(self._region_counts, [1, 1 + len(self._objectives)])
        weights = self._weights * np.where(self._distils, kd_scale, 1.0)
        means = np.divide(region_sums[:, :-1], items, out=np.zeros(items.shape), where=items > 0)
        metrics: dict[str, float] = {}
        is_surrogate = np.array(
            [isinstance(objective.loss, PolicyGradient) for objective in self._objectives], np.bool_
        )
        for number, name in enumerate(REGIONS):
            if not tokens[0, number]:
                continue
            metrics[f"{REGION_METRICS}tokens/{name}"] = float(tokens[0, number])
            if items[:, number].any():
                metrics[f"{REGION_METRICS}loss/{name}"] = float((means[:, number] * weights).sum())
            if sampled := float(items[is_surrogate, number].sum()):
                metrics[f"{REGION_METRICS}advantage/{name}"] = float(advantages[is_surrogate, number].sum()) / sampled
        return metrics

    def surrogate_metrics(self, surrogate_sums: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return mean importance ratio and clipped fraction, from the sums [terms, 3] of `ratio_statistics`."""
        metrics: dict[str, float] = {}
        for objective, (items, ratios, clipped) in zip(self._objectives, surrogate_sums, strict=True):
            if items:
                teacher = self._names[objective.teacher_index]
                metrics[metric_name("importance_ratio", teacher, self._names)] = ratios / items
                metrics[metric_name("clip_fraction", teacher, self._names)] = clipped / items
        return metrics


def _denominator(objective: LossTerm, objectives: Sequence[LossTerm], counts: np.ndarray) -> float:
    """Return the denominator of a loss, summed over its denominator group."""
    same = [
        count
        for other, count in zip(objectives, counts.tolist(), strict=True)
        if other is objective
        or (objective.denominator_group and other.denominator_group == objective.denominator_group)
    ]
    return float(sum(same))
