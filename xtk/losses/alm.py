"""alm: how likely each side finds the tokens with which it spells a span, whatever they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xtk.errors import XtkError
from xtk.losses.cells import Cells, Chain, Example, Ground, span_ranges


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

    ground = "spans"
    item = "spans"
    unit = "nats"
    asks = "realised"

    def __post_init__(self) -> None:
        """Refuse what is no temperature."""
        if not 0 < self.temperature < float("inf"):
            raise XtkError(f"temperature of the loss alm is {self.temperature}", hint="a number above 0")

    def cells(self, example: Example, ground: Ground) -> Cells:
        """Return one item a span: its last token in a cell, those before it as links."""
        ranges, signal = span_ranges(example), example.signal
        assert signal is not None
        sizes = ranges.row_stop - ranges.row_start
        ends = np.cumsum(sizes)
        rows = np.arange(ends[-1] if len(ends) else 0) + np.repeat(ranges.row_start - (ends - sizes), sizes)
        said = np.concatenate([np.zeros(1), np.cumsum(signal.realised_logprobs.astype(np.float64))])
        log_probs = np.minimum(said[ranges.position_stop] - said[ranges.position_start], 0) / self.temperature
        probs = np.zeros(len(rows))
        probs[ends - 1] = np.exp(log_probs)
        return Cells(
            cell_offsets=np.concatenate([np.zeros(1, np.int64), ends]),
            entry_offsets=np.arange(len(rows) + 1, dtype=np.int64),
            teacher_probs=probs,
            rows=rows.astype(np.int32),
            tokens=example.student_ids[example.rows[rows] + 1],
            log_weights=np.zeros(len(rows), np.float32),
            item_rows=ranges.row_start.astype(np.int32),
            chain=Chain(sizes - 1, self.temperature),
            rest_probs=-np.expm1(log_probs),
            factor=self.temperature,
        )
