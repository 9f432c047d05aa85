"""Divergences between two distributions over cells: `--loss NAME:divergence=jsd,beta=0.5`.

`p` is the teacher's and `q` the student's probability of a cell; the remainder is one of the cells. The sum over the
cells of an item is never negative, and 0 only for equal distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.cache.teacher_logprobs import MIN_REMAINDER
from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.options.spec_parsing import from_pairs, option_names

DIVERGENCES = {
    "forward-kl": "xtk.losses.divergences:ForwardKLDivergence",
    "reverse-kl": "xtk.losses.divergences:ReverseKLDivergence",
    "jsd": "xtk.losses.divergences:JensenShannonDivergence",
    "skew-forward-kl": "xtk.losses.divergences:SkewForwardKLDivergence",
    "skew-reverse-kl": "xtk.losses.divergences:SkewReverseKLDivergence",
    "tvd": "xtk.losses.divergences:TotalVariationDistance",
}

MIN_PROB = 1e-37


@dataclass(frozen=True)
class Divergence:
    """Base class of all divergences."""

    # tau; both distributions are raised to 1 / tau and normalized, and the loss is multiplied by tau^2. Over the full
    # vocabulary this divides both logits by tau; the remainder counts as one token.
    temperature: float = 1.0

    @property
    def is_linear_in_teacher(self) -> bool:
        """Whether it is linear in p, up to terms that do not depend on the student.

        Then unbiased estimates of p give unbiased gradients, and cells with p = 0 add nothing.
        """
        return False

    def accepts_samples(self, has_sample_logprobs: bool) -> bool:
        """Return whether sampled tokens give unbiased estimates of it.

        If the teacher's probability of each sampled cell is known, the divergence is linear in the samples, unless both
        distributions are raised to a power and normalized.
        """
        return self.is_linear_in_teacher or (has_sample_logprobs and self.temperature == 1)

    @property
    def min_remainder(self) -> float:
        """Probability to which an empty remainder of the teacher is raised."""
        return 0.0

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return [cells], terms from the teacher's probabilities and the student's finite log-probabilities."""
        raise NotImplementedError


@dataclass(frozen=True)
class ForwardKLDivergence(Divergence):
    """forward-kl: `p ln(p / q)`."""

    @property
    def is_linear_in_teacher(self) -> bool:
        """Whether the temperature is 1: otherwise p is raised to a power."""
        return self.temperature == 1

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return `p ln(p / q)`."""
        return torch.xlogy(probs, probs) - probs * log_probs


FORWARD_KL = ForwardKLDivergence()


@dataclass(frozen=True)
class ReverseKLDivergence(Divergence):
    """reverse-kl: `q ln(q / p)`; an empty remainder of the teacher counts as 1e-6, the resolution of fp32."""

    @property
    def min_remainder(self) -> float:
        """Probability that fp32 can distinguish from rounding errors, 1e-6."""
        return MIN_REMAINDER

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return `q ln(q / p)`."""
        return log_probs.exp() * (log_probs - probs.clamp_min(MIN_PROB).log())


@dataclass(frozen=True)
class JensenShannonDivergence(Divergence):
    """jsd: `beta p ln(p / m) + (1 - beta) q ln(q / m)`, `m = beta p + (1 - beta) q`, as in TRL."""

    beta: float = 0.5  # 0 is forward-kl, 1 reverse-kl
    # Divide by `beta (1 - beta)`. Without it the gradient vanishes as beta approaches 0 or 1, where the value jumps to
    # the full KL; with it the limits are continuous.
    rescale: bool = False

    @property
    def min_remainder(self) -> float:
        """As for reverse-kl if beta is 1, else 0."""
        return MIN_REMAINDER if self.beta == 1 else 0.0

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return the weighted sum of both KL terms against the mixture."""
        if self.beta in (0, 1):
            return (ForwardKLDivergence() if self.beta == 0 else ReverseKLDivergence()).cell_values(probs, log_probs)
        mixture = _log_mixture(self.beta, probs, log_probs)
        teacher_terms = torch.xlogy(probs, probs) - probs * mixture
        value = self.beta * teacher_terms + (1 - self.beta) * log_probs.exp() * (log_probs - mixture)
        return value / (self.beta * (1 - self.beta)) if self.rescale else value


@dataclass(frozen=True)
class SkewForwardKLDivergence(Divergence):
    """skew-forward-kl: `p ln(p / (a p + (1 - a) q))`; DistiLLM, arXiv 2402.03898."""

    skew: float = 0.1  # a, the teacher's fraction of the mixture

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return the KL terms against the mixture."""
        return torch.xlogy(probs, probs) - probs * _log_mixture(self.skew, probs, log_probs)


@dataclass(frozen=True)
class SkewReverseKLDivergence(Divergence):
    """skew-reverse-kl: `q ln(q / (a q + (1 - a) p))`; DistiLLM, arXiv 2402.03898."""

    skew: float = 0.1  # a, the student's fraction of the mixture

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return the KL terms against the mixture."""
        return log_probs.exp() * (log_probs - _log_mixture(1 - self.skew, probs, log_probs))


@dataclass(frozen=True)
class TotalVariationDistance(Divergence):
    """tvd: `|p - q| / 2`, the total variation distance."""

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return half of the absolute difference."""
        return (probs - log_probs.exp()).abs() / 2


def _log_mixture(fraction: float, probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return the logarithm of `fraction p + (1 - fraction) q`."""
    return torch.logaddexp(probs.log() + math.log(fraction), log_probs + math.log1p(-fraction))


def make_divergence(name: str, options: dict[str, str], loss_text: str) -> Divergence:
    """Return the divergence of a key of `DIVERGENCES`, with its options as text; `loss_text`: --loss, for messages."""
    return _check_divergence(
        from_pairs(load_registered(DIVERGENCES, name, "divergence"), options.items(), f"the loss {loss_text}"),
        loss_text,
    )


def divergence_options(name: str) -> list[str]:
    """Return the option names of a divergence."""
    return option_names(load_registered(DIVERGENCES, name, "divergence"))


def _check_divergence(divergence: Divergence, place: str) -> Divergence:
    if not 0 < divergence.temperature < math.inf:
        raise XtkError(
            f"--loss {place}: temperature must be above 0 and finite, not {divergence.temperature}",
            hint="use temperature=1 for unscaled logits",
        )
    if isinstance(divergence, JensenShannonDivergence):
        if not 0 <= divergence.beta <= 1:
            raise XtkError(
                f"--loss {place}: beta must be from 0 to 1, not {divergence.beta}",
                hint="use beta=0 for forward KL, beta=0.5 for Jensen-Shannon, beta=1 for reverse KL",
            )
        if divergence.rescale and divergence.beta in (0, 1):
            raise XtkError(
                f"--loss {place}: rescale=true needs a beta strictly between 0 and 1",
                hint="remove rescale=true: at beta 0 and 1 the loss is the full KL already",
            )
    if isinstance(divergence, SkewForwardKLDivergence | SkewReverseKLDivergence) and not 0 < divergence.skew < 1:
        raise XtkError(
            f"--loss {place}: skew must be above 0 and below 1, not {divergence.skew}",
            hint="use skew=0.1; for a KL without skew use divergence=forward-kl or divergence=reverse-kl",
        )
    return divergence
