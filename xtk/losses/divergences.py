"""Distances between two distributions over cells, cell by cell: `--loss NAME:divergence=jsd,beta=0.5`.

`p` is the teacher's, `q` the student's probability of a cell, the other cell among them. The sum over the cells of an
item is never negative, and 0 only for equal distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xtk.errors import XtkError
from xtk.option_specs import from_options, option_names
from xtk.registry import load_registered

DIVERGENCES = {
    "forward-kl": "xtk.losses.divergences:ForwardKLDivergence",
    "reverse-kl": "xtk.losses.divergences:ReverseKLDivergence",
    "jsd": "xtk.losses.divergences:JensenShannonDivergence",
    "skew-forward-kl": "xtk.losses.divergences:SkewForwardKLDivergence",
    "skew-reverse-kl": "xtk.losses.divergences:SkewReverseKLDivergence",
    "tvd": "xtk.losses.divergences:TotalVariationDistance",
}

# A teacher's probability below this is nothing that fp32 could tell from a rounding error.
MIN_REMAINDER = 1e-6
MIN_PROB = 1e-37


@dataclass(frozen=True)
class Divergence:
    """What all have.

    Attributes:
        temperature: tau; both sides are raised to 1 / tau and normalised, and the loss is multiplied by tau^2. Over the
            whole vocabulary this divides both logits by tau; the other cell counts as one token.
    """

    temperature: float = 1.0

    @property
    def is_linear_in_teacher(self) -> bool:
        """Whether it is linear in p, but for what does not move the student.

        Then estimates of p without bias give gradients without bias, and a cell that p leaves empty costs nothing.
        """
        return False

    @property
    def min_remainder(self) -> float:
        """What an empty other cell of the teacher counts as."""
        return 0.0

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return what each cell adds [cells].

        Args:
            probs: [cells], the teacher's.
            log_probs: [cells], the student's; finite.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ForwardKLDivergence(Divergence):
    """forward-kl: `p ln(p / q)`."""

    @property
    def is_linear_in_teacher(self) -> bool:
        """Say that it is, unless p is raised to a power."""
        return self.temperature == 1

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return `p ln(p / q)`."""
        return torch.xlogy(probs, probs) - probs * log_probs


@dataclass(frozen=True)
class ReverseKLDivergence(Divergence):
    """reverse-kl: `q ln(q / p)`; an other cell of the teacher that is empty counts as 1e-6, what fp32 can tell."""

    @property
    def min_remainder(self) -> float:
        """What fp32 can tell from nothing."""
        return MIN_REMAINDER

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return `q ln(q / p)`."""
        return log_probs.exp() * (log_probs - probs.clamp_min(MIN_PROB).log())


@dataclass(frozen=True)
class JensenShannonDivergence(Divergence):
    """jsd: `beta p ln(p / m) + (1 - beta) q ln(q / m)`, `m = beta p + (1 - beta) q`, as TRL has it.

    Attributes:
        beta: 0 is forward-kl, 1 reverse-kl.
        rescale: divided by `beta (1 - beta)`. Without it the gradient vanishes towards both ends, at which the formula
            jumps to the full divergence; with it both ends are reached continuously.
    """

    beta: float = 0.5
    rescale: bool = False

    @property
    def min_remainder(self) -> float:
        """As that of the reverse divergence, where it is one."""
        return MIN_REMAINDER if self.beta == 1 else 0.0

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return the weighted sum of both divergences from the mixture."""
        if self.beta in (0, 1):
            return (ForwardKLDivergence() if self.beta == 0 else ReverseKLDivergence()).cell_values(probs, log_probs)
        mixture = _log_mixture(self.beta, probs, log_probs)
        ours = torch.xlogy(probs, probs) - probs * mixture
        value = self.beta * ours + (1 - self.beta) * log_probs.exp() * (log_probs - mixture)
        return value / (self.beta * (1 - self.beta)) if self.rescale else value


@dataclass(frozen=True)
class SkewForwardKLDivergence(Divergence):
    """skew-forward-kl: `p ln(p / (a p + (1 - a) q))`; DistiLLM, arXiv 2402.03898.

    Attributes:
        skew: a, how much of the teacher is mixed into the student.
    """

    skew: float = 0.1

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return the divergence from the mixture."""
        return torch.xlogy(probs, probs) - probs * _log_mixture(self.skew, probs, log_probs)


@dataclass(frozen=True)
class SkewReverseKLDivergence(Divergence):
    """skew-reverse-kl: `q ln(q / (a q + (1 - a) p))`; DistiLLM, arXiv 2402.03898.

    Attributes:
        skew: a, how much of the student is mixed into the teacher.
    """

    skew: float = 0.1

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return the divergence from the mixture."""
        return log_probs.exp() * (log_probs - _log_mixture(1 - self.skew, probs, log_probs))


@dataclass(frozen=True)
class TotalVariationDistance(Divergence):
    """tvd: `|p - q| / 2`, the total variation."""

    def cell_values(self, probs: Tensor, log_probs: Tensor) -> Tensor:
        """Return half of the difference."""
        return (probs - log_probs.exp()).abs() / 2


def _log_mixture(share: float, probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return the logarithm of `share p + (1 - share) q`."""
    return torch.logaddexp(probs.log() + math.log(share), log_probs + math.log1p(-share))


def make_divergence(name: str, options: dict[str, str], loss_text: str) -> Divergence:
    """Return a divergence with its options.

    Args:
        name: of the table.
        options: as they were written.
        loss_text: how the whole was written, for messages.

    Raises:
        XtkError: there is no such divergence or option, or an option's value makes no sense.
    """
    return _check_divergence(
        from_options(load_registered(DIVERGENCES, name, "divergence"), options, loss_text), loss_text
    )


def divergence_options(name: str) -> list[str]:
    """Return the options of a divergence."""
    return option_names(load_registered(DIVERGENCES, name, "divergence"))


def _check_divergence(divergence: Divergence, place: str) -> Divergence:
    if not 0 < divergence.temperature < math.inf:
        raise XtkError(f"temperature of the loss {place} is {divergence.temperature}", hint="a number above 0")
    if isinstance(divergence, JensenShannonDivergence):
        if not 0 <= divergence.beta <= 1:
            raise XtkError(f"beta of the loss {place} is {divergence.beta}", hint="from 0, forward, to 1, reverse")
        if divergence.rescale and divergence.beta in (0, 1):
            raise XtkError(f"the loss {place} cannot be rescaled at its ends", hint="they are the limits already")
    if isinstance(divergence, SkewForwardKLDivergence | SkewReverseKLDivergence) and not 0 < divergence.skew < 1:
        raise XtkError(f"skew of the loss {place} is {divergence.skew}", hint="between 0 and 1; 0 is the KL itself")
    return divergence
