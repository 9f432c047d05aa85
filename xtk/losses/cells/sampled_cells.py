"""Divergences from sampled cells whose teacher probabilities are known: unbiased, with a control variate.

Tokens are sampled from the teacher's tail, all tokens that are not exact. `M` and `S` are the masses of the tail under
teacher and student, `w_v` the mass that a sampled cell represents (an unbiased estimate of its teacher probability
`t(v)`), `q_v = s(v) / t(v)`, `h = S / M`. A divergence `sum t f(s / t)` is estimated by

    sum over exact cells of t f(s / t)  +  sum_v w_v f(q_v)  +  c (S - sum_v w_v q_v)

The last term is the control variate: the expectation of `w_v q_v` over samples is `s(v)`, whose sum is `S`. So the
estimate is unbiased for any slope `c` that does not depend on the samples. The best slope is that of the regression of
`f(q)` on `q` over the tail: `f'(h)` for close models, for which all noise cancels, another one for distant ones. It is
computed from the exact cells and `h`, so that it depends on nothing but the position itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xtk.losses.divergences import Divergence
from xtk.parallel.host_to_device import to_device

# Nodes and weights of the Gauss-Hermite quadrature for a standard normal variable.
QUADRATURE_NODES = (-2.8569700138728056, -1.3556261799742657, 0.0, 1.3556261799742657, 2.8569700138728056)
QUADRATURE_WEIGHTS = (0.011257411327720691, 0.2220759220056126, 0.5333333333333333, 0.2220759220056126,
                      0.011257411327720691)  # fmt: skip
# The log ratio varies more in the tail than between the exact cells, by about this factor of the variance. For the
# forward KL a slope that is too steep costs more than one that is too flat, since ratios have a heavy upper tail.
TAIL_VARIANCE_RATIO, FORWARD_KL_VARIANCE_RATIO = 3.0, 6.0
MIN_VARIANCE, MAX_VARIANCE = 1e-5, 16.0


class SampledCells:
    """Cells of items, of which some were sampled from the teacher's tail.

    Args:
        cell_items: int64 [n], the item of each cell.
        cell_probs: [n], the teacher's probabilities; of sampled cells, the mass that they represent.
        sampled_probs: [n], the teacher's probabilities of sampled cells; minus the exact mass of cells with exact and
            sampled tokens, whose samples have no control variate; 0 for other cells.
        log_probs: [n], the student's log-probabilities.
        num_items: number of items.
    """

    def __init__(
        self, cell_items: Tensor, cell_probs: Tensor, sampled_probs: Tensor, log_probs: Tensor, num_items: int
    ) -> None:
        self.is_sampled = sampled_probs > 0
        self.items, self.log_probs, self.num_items = cell_items, log_probs, num_items
        probs = cell_probs.to(log_probs.dtype)
        self.probs = torch.where(self.is_sampled, sampled_probs, probs)
        # [n], w / t(v): how many times a sampled cell counts.
        self.factors = torch.where(self.is_sampled, probs / self.probs.clamp_min(torch.finfo(probs.dtype).tiny), 1.0)
        exact = torch.where(self.is_sampled, 0.0, probs)
        self.exact = torch.where(sampled_probs < 0, -sampled_probs, exact)
        self.tail_mass = self._sum(probs - self.exact)
        self.has_samples = self._sum((sampled_probs != 0).to(probs.dtype)) > 0

    def item_values(
        self, divergence: Divergence, remainder_items: Tensor, remainder_probs: Tensor, log_remainders: Tensor
    ) -> Tensor:
        """Return the estimated divergence of each item, [C].

        `remainder_probs`: [r], the teacher's remainders of `remainder_items`. With samples they are only mass that the
        student cannot reach, which is a cell for divergences that are linear in the teacher, and dropped for others.
        """
        values = divergence.cell_values(self.probs, self.log_probs) * self.factors
        of_remainders = divergence.cell_values(remainder_probs.clamp_min(divergence.min_remainder), log_remainders)
        if not divergence.is_linear_in_teacher:
            of_remainders = of_remainders.masked_fill(self.has_samples[remainder_items], 0.0)
        student_probs = torch.where(self.is_sampled, self.log_probs.exp(), 0.0)
        student_tail = self._sum(student_probs).index_add(0, remainder_items, log_remainders.exp())
        unreachable = torch.zeros_like(self.tail_mass).index_add(0, remainder_items, remainder_probs.to(values.dtype))
        tail_mass = self.tail_mass + unreachable
        slopes = self._slopes(divergence, student_tail.detach(), tail_mass).masked_fill(~self.has_samples, 0.0)
        # Samples of tokens in no cell, such as rows of padding, count with the mean ratio h.
        h = student_tail / tail_mass.clamp_min(torch.finfo(values.dtype).tiny)
        variates = slopes * (student_tail - self._sum(student_probs * self.factors) - h * unreachable)
        return (self._sum(values) + variates).index_add(0, remainder_items, of_remainders)

    def _sum(self, of_cells: Tensor) -> Tensor:
        """Return the sum over the cells of each item, [C]."""
        return of_cells.new_zeros(self.num_items).index_add(0, self.items, of_cells)

    @torch.no_grad()
    def _slopes(self, divergence: Divergence, student_tail: Tensor, tail_mass: Tensor) -> Tensor:
        """Return [C], slopes of the regression of `f(q)` on `q` for a log-normal `q` of mean `h`, from S and M [C]."""
        tiny = torch.finfo(student_tail.dtype).tiny
        log_h = student_tail.clamp_min(tiny).log() - tail_mass.clamp_min(tiny).log()
        ratio = FORWARD_KL_VARIANCE_RATIO if divergence.is_linear_in_teacher else TAIL_VARIANCE_RATIO
        deviations = self._log_ratio_variances(log_h, tail_mass, ratio).clamp(MIN_VARIANCE, MAX_VARIANCE).sqrt()
        nodes, weights = (
            to_device(torch.tensor(values, dtype=log_h.dtype), log_h.device)
            for values in (QUADRATURE_NODES, QUADRATURE_WEIGHTS)
        )
        log_q = deviations[:, None] * nodes
        log_q = log_q - (log_q + weights.log()).logsumexp(1, keepdim=True)  # relative to h: of mean 1
        deltas = log_q.expm1()
        values = divergence.cell_values(torch.ones_like(log_q), log_q + log_h[:, None])
        values = values - values[:, len(QUADRATURE_NODES) // 2, None]
        return (weights * deltas * values).sum(1) / ((weights * deltas.square()).sum(1) * log_h.exp())

    def _log_ratio_variances(self, log_h: Tensor, tail_mass: Tensor, ratio: float) -> Tensor:
        """Return an estimate of the variance of `ln(s / t)` in the tail of each item, [C].

        It is `ratio` times the one between the exact cells and the tail (`log_h`, M: [C]) as one cell. Of few exact
        cells it may be small by chance: their mean squared distance from the tail over their squared number is added.
        """
        tiny = torch.finfo(log_h.dtype).tiny
        exact = self.exact
        ratios = torch.where(exact > 0, self.log_probs.detach() - exact.clamp_min(tiny).log(), 0.0)
        totals = (self._sum(exact) + tail_mass).clamp_min(tiny)
        means = (self._sum(exact * ratios) + tail_mass * log_h) / totals
        squares = self._sum(exact * (ratios - means[self.items]).square()) + tail_mass * (log_h - means).square()
        is_exact = (exact > 0).to(exact.dtype)
        counts, distances = self._sum(is_exact), self._sum(is_exact * (ratios - log_h[self.items]).square())
        return ratio * squares / totals + distances / counts.clamp_min(1).pow(3)
