"""policy-gradient: clipped policy gradient on sampled completions, with advantages from a teacher and from rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.losses.cells.clipped_surrogate import ClippedSurrogateCells
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import (
    TEACHER_STOP_CLASS,
    ComparisonSpace,
    ItemRanges,
    Loss,
    LossInputs,
    range_indices,
    range_sums,
    span_ranges,
)
from xtk.options.declaration import option

# What is credited with the teacher's advantage: a span as a whole, or each of its tokens.
SPAN_CREDIT, TOKEN_CREDIT = "span", "dpca"
# Source of the advantage: the teacher's log-probabilities, or none (a control for tables).
SCORING_TEACHER, NO_TEACHER = "scored", "none"
CONTROL_GAIN = -1.0  # nats, of tokens that are unlikely


@dataclass(frozen=True)
class PolicyGradient(Loss):
    """policy-gradient: `-min(ratio a, clip(ratio, 1 - epsilon, 1 + epsilon_high) a)`, averaged over spans.

    `a = c clip(ln P_t - ln P_old, -clip, clip) + r A` is a constant, and `ratio = P_s / P_old`. `P` is the product of
    the probabilities of a span's own tokens: by the teacher, by the student, and by the student when it sampled them.
    `A` is the document's advantage, its reward relative to its group; 0 without rewards. Spans that the student did not
    sample are left out. The value is a surrogate, not a distance: it can be negative, and only its gradient matters.
    Without clipping, with `ratio = 1` and `A = 0`, the expected gradient is that of `c KL(P_s | P_t)` over the possible
    contents of the span, given the text before it. With `credit=dpca` the items are the tokens of these spans, with
    `P_s`, `P_old` and a ratio of each token, and token i has `a = c clip((L_t / L_old - 1) ln p_i, -clip, clip) + r A`:
    `L_t` and `L_old` are the sums of the log-probabilities of the span, and `p_i` is the student's probability of the
    token when it sampled it. Without clipping the tokens of a span add up to its `L_t - L_old`. Ratios above e^20 count
    as e^20. Options: `clip` (5 nats); `epsilon` (0.2); `epsilon_high` (as `epsilon`); `teacher_weight` (c, 1);
    `reward_weight` (r, 1); `teacher_weight=0` is GRPO; `credit` (`span` or `dpca`); `teacher` (`scored`, or `none`: a
    control without the teacher's log-probabilities, whose items are the tokens of these spans, with `a = -c` where the
    student's probability was below `unlikely` when it sampled the token, and 0 elsewhere, + `r A`; arXiv 2608.31046);
    `unlikely` (0.1, only of that control; the threshold is ours); `offset` (a, with `--reference`: `ln P_t - ln P_old`
    is replaced by `(ln P_t - ln P_r) - a (ln P_old - ln P_0)`, without the style that the teacher shares with its
    reference `r`, and relative to the student 0 before the run; CompassOPD, arXiv 2609.10154, has 0.5). PPO, Schulman
    et al., arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300; DPCA, arXiv 2606.09456.
    """

    clip: float = 5.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    teacher_weight: float = 1.0
    reward_weight: float = 1.0
    teacher: str = option(
        SCORING_TEACHER, "Source of the advantage: the teacher, or none.", choices=(SCORING_TEACHER, NO_TEACHER)
    )
    unlikely: float = 0.1
    offset: float | None = None
    credit: str = option(SPAN_CREDIT, "What the teacher's advantage is of.", choices=(SPAN_CREDIT, TOKEN_CREDIT))

    comparison_space = "spans"
    averaged_over = "spans that the student sampled; with `credit=dpca`, their tokens"
    unit = "nats, a surrogate"
    requires = "observed"
    takes_divergence = False
    stop_class = TEACHER_STOP_CLASS

    def __post_init__(self) -> None:
        """Refuse options out of range."""
        upper, inf = self._upper_epsilon, float("inf")
        for name, value, is_valid, wanted, example in (
            ("clip", self.clip, 0 < self.clip < inf, "above 0 and finite", "5 (nats)"),
            ("epsilon", self.epsilon, 0 < self.epsilon <= 1, "above 0 and at most 1", "0.2"),
            ("epsilon_high", upper, 0 < upper < inf, "above 0 and finite", "0.28"),
            ("unlikely", self.unlikely, 0 < self.unlikely <= 1, "above 0 and at most 1", "0.1"),
            ("offset", self.offset or 0.0, 0 <= (self.offset or 0.0) < inf, "at least 0 and finite", "0.5"),
            ("teacher_weight", self.teacher_weight, 0 <= self.teacher_weight < inf, "at least 0 and finite", "1"),
            ("reward_weight", self.reward_weight, 0 <= self.reward_weight < inf, "at least 0 and finite", "1"),
        ):
            if not is_valid:
                raise XtkError(
                    f"{name} of the loss policy-gradient must be {wanted}, not {value}",
                    hint=f"use --loss policy-gradient:{name}={example}",
                )
        if self.teacher_weight == self.reward_weight == 0:
            raise XtkError(
                "teacher_weight and reward_weight of the loss policy-gradient are both 0, so nothing would be learned",
                hint="set at least one of them above 0",
            )
        others = ("unlikely",) if self.teacher == SCORING_TEACHER else ("offset", "credit")
        for name in (name for name in others if getattr(self, name) != getattr(type(self), name)):
            raise XtkError(
                f"{name}={getattr(self, name)} of the loss policy-gradient has no effect with teacher={self.teacher}",
                hint=f"remove {name}, or use teacher={NO_TEACHER if name == 'unlikely' else SCORING_TEACHER}",
            )

    @property
    def _upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def covers_spans(self) -> bool:
        """Whether an item is a span, and not a token of it."""
        return self.credit == SPAN_CREDIT and self.teacher != NO_TEACHER

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span that the student sampled, or per token of these spans."""
        ranges, teacher_logprobs = span_ranges(example), example.teacher_logprobs
        assert teacher_logprobs is not None
        nothing = np.zeros(len(example.positions), np.float32)
        logprobs = nothing + np.nan if example.sampling_logprobs is None else example.sampling_logprobs
        rewards = nothing if example.advantages is None else example.advantages
        old_sums = range_sums(logprobs, ranges.row_start, ranges.row_stop)
        sampled = np.isfinite(old_sums)
        old_sums, ranges = old_sums[sampled], ItemRanges(*(part[sampled] for part in ranges))
        teacher_sums = range_sums(teacher_logprobs.observed_logprobs, ranges.position_start, ranges.position_stop)
        gains = teacher_sums - old_sums
        if self.offset is not None:
            gains, kept = self._style_gains(example, ranges, teacher_sums, old_sums)
            gains, old_sums, ranges = gains[kept], old_sums[kept], ItemRanges(*(part[kept] for part in ranges))
        if not self.covers_spans:
            rows, sizes = range_indices(ranges.row_start, ranges.row_stop), ranges.row_stop - ranges.row_start
            old_sums, ranges = logprobs[rows].astype(np.float64), ItemRanges(rows, rows + 1, rows, rows + 1)
            is_control = self.teacher == NO_TEACHER
            gains = self._control_gains(old_sums) if is_control else _token_gains(gains, sizes, old_sums)
        bounds = np.full(len(gains), self.clip)
        if example.advantage_bounds is not None:
            bounds = np.minimum(bounds, example.advantage_bounds[ranges.row_start])
        advantages = self.teacher_weight * np.clip(gains, -bounds, bounds)
        advantages += self.reward_weight * rewards[ranges.row_start].astype(np.float64)
        return ClippedSurrogateCells.from_observed_tokens(
            example,
            ranges,
            np.ones(len(old_sums)),
            sampling_logprobs=old_sums,
            advantages=advantages,
            min_ratio=1 - self.epsilon,
            max_ratio=1 + self._upper_epsilon,
        )

    def _style_gains(
        self, example: LossInputs, ranges: ItemRanges, teacher_sums: NDArray[np.float64], old_sums: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return float64 [C], the gains of spans without the style of both sides; and bool [C], those that have one."""
        if example.reference_logprobs is None or example.frozen_logprobs is None:  # no document has a reference
            return teacher_sums, np.zeros(len(teacher_sums), np.bool_)
        assert self.offset is not None
        reference = example.reference_logprobs[ranges.row_start].astype(np.float64)
        frozen = range_sums(example.frozen_logprobs, ranges.row_start, ranges.row_stop)
        kept = np.isfinite(reference) & np.isfinite(frozen)
        return teacher_sums - reference - self.offset * (old_sums - frozen), kept

    def _control_gains(self, logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64 [tokens], a fixed negative gain of the tokens that the student sampled although unlikely."""
        return np.where(logprobs < np.log(self.unlikely), CONTROL_GAIN, 0.0)


def _token_gains(
    gains: NDArray[np.float64], sizes: NDArray[np.int64], logprobs: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each token's part of the gain [C] of its span, in proportion to its log-probability by the student.

    If the student was certain of all tokens of a span, they have equal parts. Log-probabilities [tokens] above 0
    (rounding of an engine) count as 0. `sizes`: [C], number of tokens of each span.
    """
    owners = np.repeat(np.arange(len(gains)), sizes)
    logprobs = np.minimum(logprobs, 0)
    old_sums = np.bincount(owners, logprobs, minlength=len(gains))
    is_sure = old_sums[owners] == 0
    parts = np.where(is_sure, 1 / sizes[owners], logprobs / np.where(is_sure, 1, old_sums[owners]))
    token_gains = np.zeros(len(parts))
    return np.multiply(gains[owners], parts, out=token_gains, where=parts > 0)  # a gain may be infinite
