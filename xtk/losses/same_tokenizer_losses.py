"""Losses for a teacher with the student's own tokenizer: one divergence each, token by token."""

from __future__ import annotations

from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.cells.projected_cells import projected_cells
from xtk.losses.interface import ComparisonSpace, Loss, LossInputs, span_ranges
from xtk.projection.projection import ProjectionColumns


class TokenDivergenceLoss(Loss):
    """Base class: one item per token, whose cells are the tokens of the teacher's support."""

    comparison_space = "tokens"
    averaged_over = "tokens"
    compares_single_tokens = True
    compares_cells = True

    def build_cells(self, example: LossInputs, comparison_space: ComparisonSpace) -> LossCells:
        """Return one item per token; `comparison_space` is the identity projection."""
        assert isinstance(comparison_space, ProjectionColumns)
        return projected_cells(example, span_ranges(example), comparison_space, is_projection=False)


class ForwardKL(TokenDivergenceLoss):
    """forward-kl: `sum_A t ln(t/s) + t_rem ln(t_rem/s_rem)` at each token, averaged over tokens.

    `A` is the teacher's support; `t_rem` and `s_rem` are the remainders, the probabilities outside of `A`. With sampled
    tokens, an unbiased estimate of the full KL; without, a lower bound, equal to it if `A` is the full vocabulary.
    """


class ReverseKL(TokenDivergenceLoss):
    """reverse-kl: `sum_A s ln(s/t) + s_rem ln(s_rem/t_rem)` at each token, averaged over tokens.

    With sampled tokens, an unbiased estimate of the full KL at temperature 1; without, it works best with the support
    `candidates` or a large part of the vocabulary. An empty remainder of the teacher counts as 1e-6, fp32's resolution.
    """


class JSD(TokenDivergenceLoss):
    """jsd: `beta KL(t|m) + (1 - beta) KL(s|m)`, `m = beta t + (1 - beta) s`, at each token, averaged over tokens.

    Generalized Jensen-Shannon divergence over the support and the remainder, with beta as in TRL: 0 is forward-kl, 1
    reverse-kl. `rescale=true` divides by `beta (1 - beta)`, which makes the limits at 0 and 1 continuous.
    """


class SkewForwardKL(TokenDivergenceLoss):
    """skew-forward-kl: `KL(t | a t + (1 - a) s)` at each token, averaged over tokens; a is `skew`.

    After DistiLLM, arXiv 2402.03898, over the support and the remainder.
    """


class SkewReverseKL(TokenDivergenceLoss):
    """skew-reverse-kl: `KL(s | a s + (1 - a) t)` at each token, averaged over tokens; a is `skew`.

    After DistiLLM, arXiv 2402.03898, over the support and the remainder.
    """


class TVD(TokenDivergenceLoss):
    """tvd: `1/2 (sum_A |t - s| + |t_rem - s_rem|)`, the total variation at each token, averaged over tokens."""

    unit = "probability"
