"""alm: the probability that each model assigns to its own tokens of a span."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtk.errors import XtkError
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.span_probability_products import SpanProductCells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs, range_sums, span_ranges


@dataclass(frozen=True)
class ALM(Loss):
    """alm: `tau KL((P_t, 1 - P_t) | (P_s, 1 - P_s))`, `P = exp(L / tau)`, averaged over spans.

    `L` is the sum of the log-probabilities, in nats, of each model's own tokens of the span. A large tau keeps the
    gradient of unlikely spans; as tau grows, the loss approaches `a ln(a/b) + b - a` with `a = -L_t` and `b = -L_s`.
    Of a cache it needs only the observed tokens' log-probabilities. Options: `temperature` (tau, 100); `divergence`
    and its options except `temperature`. Approximate Likelihood Matching, Minixhofer et al., arXiv 2503.20083, which
    has no factor tau (its values are a hundredth of these) and uses a cross-entropy, which adds a constant.
    """

    temperature: float = 100.0

    comparison_space = "spans"
    averaged_over = "spans"
    requires = "observed"
    items_are_spans = True

    def __post_init__(self) -> None:
        """Refuse a temperature that is not positive and finite."""
        if not 0 < self.temperature < float("inf"):
            raise XtkError(
                f"the temperature of the loss alm must be above 0 and finite, not {self.temperature}",
                hint="use --loss alm:temperature=100",
            )

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per span: a cell for its last token, prefix tokens for those before it."""
        ranges, teacher = span_ranges(example), example.teacher_logprobs
        assert teacher is not None
        span_logprobs = range_sums(teacher.observed_logprobs, ranges.position_start, ranges.position_stop)
        log_probs = np.minimum(span_logprobs, 0) / self.temperature
        return SpanProductCells.from_observed_tokens(
            example,
            ranges,
            np.exp(log_probs),
            remainder_probs=-np.expm1(log_probs),
            temperature=self.temperature,
            factor=self.temperature,
        )
