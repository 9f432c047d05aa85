"""Losses for a teacher with the student's own tokenizer: one divergence each, token by token."""

from __future__ import annotations

from xtk.losses.cells import Cells, Example, Ground, projected_cells, span_ranges
from xtk.projection.projection import Columns


class OfTokens:
    """What all have: one item a token, whose cells are the tokens of the teacher's support."""

    ground = "tokens"
    item = "tokens"
    unit = "nats"
    asks = "distribution"

    def cells(self, example: Example, ground: Ground) -> Cells:
        """Return one item a token; `ground` is the identity."""
        assert isinstance(ground, Columns)
        return projected_cells(example, span_ranges(example), ground)


class ForwardKL(OfTokens):
    """forward-kl: `sum_A t ln(t/s) + t_rest ln(t_rest/s_rest)` at each token, averaged over tokens.

    The exact KL of the coarsening to `A` and one other cell: a lower bound of the full KL, equal to it when
    the support holds the whole vocabulary.
    """


class ReverseKL(OfTokens):
    """reverse-kl: `sum_A s ln(s/t) + s_rest ln(s_rest/t_rest)` at each token, averaged over tokens.

    It asks the teacher about what the student finds likely, so it wants a support that has it: `given`, or much of the
    vocabulary. A rest of the teacher that is empty counts as 1e-6, what fp32 can tell.
    """


class JSD(OfTokens):
    """jsd: `beta KL(t|m) + (1 - beta) KL(s|m)`, `m = beta t + (1 - beta) s`, at each token, averaged over tokens.

    Generalised Jensen-Shannon divergence over the support and one other cell, with beta as in TRL: 0 is forward-kl, 1
    reverse-kl. `rescale=true` divides by `beta (1 - beta)`, so that both ends are reached without a jump.
    """


class SkewForwardKL(OfTokens):
    """skew-forward-kl: `KL(t | a t + (1 - a) s)` at each token, averaged over tokens; a is `skew`.

    After DistiLLM, arXiv 2402.03898, over the support and one other cell.
    """


class SkewReverseKL(OfTokens):
    """skew-reverse-kl: `KL(s | a s + (1 - a) t)` at each token, averaged over tokens; a is `skew`.

    After DistiLLM, arXiv 2402.03898, over the support and one other cell.
    """


class TVD(OfTokens):
    """tvd: `1/2 (sum_A |t - s| + |t_rest - s_rest|)`, the total variation at each token, averaged over tokens."""

    unit = "probability"
