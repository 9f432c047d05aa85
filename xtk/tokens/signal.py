"""What a teacher said at the tokens of one document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Signal:
    """The teacher's next-token distributions at the trained tokens of a document, from a support.

    P trained positions, K ids in the support. All log-probabilities are natural and normalised over
    the teacher's whole vocabulary, never over the support.

    Attributes:
        positions: int32 [P], rising: the index of the token that the distribution predicts.
        support_ids: int32 [P, K], most likely first.
        support_logprobs: float32 [P, K].
        tail_mass: float32 [P], the probability outside of the support.
        realised_logprobs: float32 [P], of the token that stands there, in the support or not.
        entropy: float32 [P], nats.
    """

    positions: NDArray[np.int32]
    support_ids: NDArray[np.int32]
    support_logprobs: NDArray[np.float32]
    tail_mass: NDArray[np.float32]
    realised_logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.positions)
