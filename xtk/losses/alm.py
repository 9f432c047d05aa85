"""alm: how likely each side finds the tokens with which it spells a span, whatever they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from xtk.errors import XtkError
from xtk.losses.loss_cells import ComparisonSpace, LossCells, LossInputs, observed_token_cells, range_sums, span_ranges


@dataclass(frozen=True)
class ALM:
    """alm: `tau KL((P_t, 1 - P_t) | (P_s, 1 - P_s))`, `P = exp(L / tau)`, averaged over spans.

    `L` is the sum of the log-probabilities, in nats, of the span's own tokens on each side. A large tau keeps the
    gradient of spans that are unlikely; as it grows the loss goes over into `a ln(a/b) + b - a`, with `a = -L_t` and
    `b = -L_s`. It needs no more of a cache than its realised log-probabilities. Options: `temperature`, tau, 100;
    `divergence` and what it has, but for a temperature. Approximate Likelihood Matching, Minixhofer et al., arXiv
    2503.20083, where there is no factor tau (a hundredth of this), and a cross-entropy, which adds a constant.
    """

    temperature: float = 100.0

    comparison_space = "spans"
    averaged_over = "spans"
    unit = "nats"
    requires = "observed"

    def __post_init__(self) -> None:
        """Refuse what is no temperature."""
        if not 0 < self.temperature < float("inf"):
            raise XtkError(f"temperature of the loss alm is {self.temperature}", hint="a number above 0")

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a span: its last token in a cell, those before it as links."""
        ranges, signal = span_ranges(example), example.teacher_logprobs
        assert signal is not None
        said = range_sums(signal.observed_logprobs, ranges.position_start, ranges.position_stop)
        log_probs = np.minimum(said, 0) / self.temperature
        cells = observed_token_cells(example, ranges, np.exp(log_probs), self.temperature)
        return replace(cells, remainder_probs=-np.expm1(log_probs), factor=self.temperature)
