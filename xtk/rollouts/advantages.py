"""Group-relative advantages of rollouts (GRPO)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-4  # TRL, GRPOTrainer


def group_advantages(rewards: Sequence[float], *, scale: bool = True) -> NDArray[np.float64]:
    """Return the advantages of the rollouts of one prompt: reward minus mean, in standard deviations.

    Shao et al., "DeepSeekMath", 2024, section 4.1 (GRPO); without `scale` Liu et al., "Understanding R1-Zero-like
    training", 2025. The standard deviation is that of a sample (n - 1), as in TRL.

    Args:
        rewards: [G]; nan for unscored rollouts, which get 0 and are excluded from mean and deviation.
        scale: whether to divide by the standard deviation.

    Returns:
        float64 [G]. All 0 if fewer than two rollouts are scored, or all rewards are equal.
    """
    values = np.asarray(rewards, np.float64)
    judged = np.isfinite(values)
    advantages = np.zeros(len(values))
    if judged.sum() < 2 or np.ptp(values[judged]) == 0:
        return advantages
    advantages[judged] = values[judged] - values[judged].mean()
    return advantages / (values[judged].std(ddof=1) + STD_EPSILON) if scale else advantages
