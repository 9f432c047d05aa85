"""Losses for a teacher with the student's own tokenizer: one divergence each, token by token."""

from __future__ import annotations

from xtk.losses.loss_cells import ComparisonSpace, LossCells, LossInputs, projected_cells, span_ranges
from xtk.projection.projection import ProjectionColumns


class TokenDivergenceLoss:
    """What all have: one item a token, whose cells are the tokens of the teacher's support."""

    comparison_space = "tokens"
    averaged_over = "tokens"
    unit = "nats"
    requires = "distribution"

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item a token; `ground` is the identity."""
        assert isinstance(comparison_space, ProjectionColumns)
        return projected_cells(example, span_ranges(example), comparison_space)


class ForwardKL(TokenDivergenceLoss):
    """forward-kl: `sum_A t ln(t/s) + t_rest ln(t_rest/s_rest)` at each token, averaged over tokens.

    The exact KL of the coarsening to `A` and one other cell: a lower bound of the full KL, equal to it when
    the support holds the whole vocabulary.
    """


class ReverseKL(TokenDivergenceLoss):
    """reverse-kl: `sum_A s ln(s/t) + s_rest ln(s_rest/t_rest)` at each token, averaged over tokens.

    It asks the teacher about what the student finds likely, so it wants a support that has it: `given`, or much of the
    vocabulary. A rest of the teacher that is empty counts as 1e-6, what fp32 can tell.
    """


class JSD(TokenDivergenceLoss):
    """jsd: `beta KL(t|m) + (1 - beta) KL(s|m)`, `m = beta t + (1 - beta) s`, at each token, averaged over tokens.

    Generalised Jensen-Shannon divergence over the support and one other cell, with beta as in TRL: 0 is forward-kl, 1
    reverse-kl. `rescale=true` divides by `beta (1 - beta)`, so that both ends are reached without a jump.
    """


class SkewForwardKL(TokenDivergenceLoss):
    """skew-forward-kl: `KL(t | a t + (1 - a) s)` at each token, averaged over tokens; a is `skew`.

    After DistiLLM, arXiv 2402.03898, over the support and one other cell.
    """


class SkewReverseKL(TokenDivergenceLoss):
    """skew-reverse-kl: `KL(s | a s + (1 - a) t)` at each token, averaged over tokens; a is `skew`.

    After DistiLLM, arXiv 2402.03898, over the support and one other cell.
    """


class TVD(TokenDivergenceLoss):
    """tvd: `1/2 (sum_A |t - s| + |t_rest - s_rest|)`, the total variation at each token, averaged over tokens."""

    unit = "probability"
