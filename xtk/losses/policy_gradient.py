"""policy-gradient: what the student drew, made likelier or less likely by what a teacher, or a reward, says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from xtk.errors import XtkError
from xtk.losses.divergences import DIVERGENCES
from xtk.losses.loss_cells import (
    ClippedSurrogate,
    ComparisonSpace,
    ItemRanges,
    LossCells,
    LossInputs,
    observed_token_cells,
    range_sums,
    span_ranges,
)
from xtk.registry import unknown_name_error

OBSERVED_ADVANTAGE = "observed"


@dataclass(frozen=True)
class PolicyGradient:
    """policy-gradient: `-min(ratio a, clip(ratio, 1 - epsilon, 1 + epsilon_high) a)`, averaged over spans.

    `a = c clip(ln P_t - ln P_old, -clip, clip) + r A`, a constant, and `ratio = P_s / P_old`. `P` is the product of the
    probabilities of a span's own tokens: the teacher's, the student's, and those at which the student drew them. `A` is
    the document's advantage, its reward beside those of its group; 0 without rewards. Spans that the student did not
    draw are left out. The value is a surrogate and no distance: it can be negative, and its gradient is what counts.
    Unclipped and at `ratio = 1`, A aside, that is on average the gradient of `c KL(P_s | P_t)` over what may stand in
    the span, the text before it held fixed. A ratio above e^20 counts as that. Options: `clip`, 5 nats; `epsilon`, 0.2;
    `epsilon_high`, the same; `teacher_weight`, c, 1; `reward_weight`, r, 1: `teacher_weight=0` is GRPO; `advantage`,
    `observed` alone, since a divergence is the same whichever token was drawn, and has no gradient on average as an
    advantage. PPO, Schulman et al., arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300.
    """

    clip: float = 5.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    teacher_weight: float = 1.0
    reward_weight: float = 1.0
    advantage: str = OBSERVED_ADVANTAGE

    comparison_space = "spans"
    averaged_over = "spans that the student drew"
    unit = "nats, a surrogate"
    requires = "observed"

    def __post_init__(self) -> None:
        """Refuse what makes no sense, and advantages that teach nothing."""
        if not 0 < self.clip < float("inf"):
            raise XtkError(f"clip of the loss policy-gradient is {self.clip}", hint="nats, above 0: clip=5")
        if not 0 < self.epsilon <= 1:
            raise XtkError(f"epsilon of the loss policy-gradient is {self.epsilon}", hint="above 0, and at most 1")
        if not 0 < self._upper_epsilon < float("inf"):
            raise XtkError(
                f"epsilon_high of the loss policy-gradient is {self._upper_epsilon}", hint="a number above 0"
            )
        for name, factor in (("teacher_weight", self.teacher_weight), ("reward_weight", self.reward_weight)):
            if not 0 <= factor < float("inf"):
                raise XtkError(f"{name} of the loss policy-gradient is {factor}", hint="0 or a number above it")
        if self.teacher_weight == self.reward_weight == 0:
            raise XtkError(
                "teacher_weight and reward_weight of the loss policy-gradient are both 0", hint="one of them above 0"
            )
        if self.advantage != OBSERVED_ADVANTAGE:
            raise self._advantage_error()

    @property
    def _upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def _advantage_error(self) -> XtkError:
        from xtk.losses import LOSSES

        if self.advantage not in {*LOSSES, *DIVERGENCES}:
            return unknown_name_error("advantage", self.advantage, [OBSERVED_ADVANTAGE])
        return XtkError(
            f"{self.advantage} cannot be an advantage: it is the same whichever token was drawn, so that its gradient, "
            "held constant and times that of ln P, is 0 on average",
            hint=f"--loss {self.advantage} beside --loss policy-gradient, which differentiates it",
        )

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a span that the student drew."""
        ranges, signal = span_ranges(example), example.teacher_logprobs
        assert signal is not None
        nothing = np.zeros(len(example.positions), np.float32)
        logprobs = nothing + np.nan if example.sampling_logprobs is None else example.sampling_logprobs
        rewards = nothing if example.advantages is None else example.advantages
        old = range_sums(logprobs, ranges.row_start, ranges.row_stop)
        drawn = np.isfinite(old)
        old, ranges = old[drawn], ItemRanges(*(part[drawn] for part in vars(ranges).values()))
        theirs = range_sums(signal.observed_logprobs, ranges.position_start, ranges.position_stop)
        advantages = self.teacher_weight * np.clip(theirs - old, -self.clip, self.clip)
        advantages += self.reward_weight * rewards[ranges.row_start].astype(np.float64)
        return replace(
            observed_token_cells(example, ranges, np.ones(len(old))),
            surrogate=ClippedSurrogate(old, advantages, 1 - self.epsilon, 1 + self._upper_epsilon),
            outside_mode="ignored",
        )
