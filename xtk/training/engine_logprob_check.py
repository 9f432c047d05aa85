"""Comparison of a generation engine's log-probabilities with the student's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtk.batches.micro_batches import pad_or_pack
from xtk.errors import MismatchError, XtkError
from xtk.models.output_head import OutputHead, compute_token_logprobs
from xtk.parallel.parallel_config import ParallelConfig
from xtk.rollouts.rollout_record import Rollout
from xtk.training.student_with_losses import forward_student, reshard_weights

ROLLOUTS_TO_COMPARE = 4
# Mean absolute differences, nats per token. Measured with equal weights: float32 1e-7 to 1e-6, an engine in bfloat16
# 0.034 on small models with random weights. The output head of one step before: 0.004 to 0.01 there, up to 2 later.
MAX_DIFFERENCE, MAX_DIFFERENCE_FLOAT32 = 0.1, 0.001
FLOAT32_DIFFERENCE = 1e-4  # an engine this close computes in float32: from then on the stricter bound applies


@dataclass(frozen=True)
class _Tokens:
    """A rollout as a batch for the student; implements `xtk.training.student_with_losses.TokenBatch`."""

    input_ids: NDArray[np.int64]
    document_lengths: tuple[int, ...] | None
    loss_positions: NDArray[np.int64]


class LogprobCheck:
    """Checks the engine's log-probabilities on a few rollouts of each batch, before the first step (collective).

    Args:
        model: the student, wrapped for its parallel layout.
        packing_multiple: with packing, the length of a packed sequence is a multiple of this; 0: no packing.
    """

    def __init__(self, model: nn.Module, parallel: ParallelConfig, packing_multiple: int, device: torch.device) -> None:
        self._model, self._layout, self._packing, self._device = model, parallel, packing_multiple, device
        self.max_difference = MAX_DIFFERENCE

    def __call__(self, rollouts: Sequence[Rollout]) -> float | None:
        """Return the mean absolute difference in nats over the sampled tokens of a few rollouts; None: no tokens.

        Args:
            rollouts: a rollout batch, the same in every process.
        """
        usable = [rollout for rollout in rollouts if rollout.unusable_reason != "not finite"]
        step = max(1, (len(usable) - 1) // (ROLLOUTS_TO_COMPARE - 1))
        some = usable[::step][:ROLLOUTS_TO_COMPARE]
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        total, count = 0.0, 0.0
        with torch.no_grad():
            for rollout in some:
                one_difference, tokens = self._difference(rollout)
                total, count = total + one_difference, count + tokens
        for module, mode in modes.items():
            module.training = mode
        reshard_weights(self._model)
        sums = torch.tensor([total, count], dtype=torch.float64, device=self._device)
        total, count = self._layout.all_reduce_sum(sums, "copies").tolist()
        if not count:
            return None
        difference: float = total / count
        if not math.isfinite(difference):
            raise XtkError(
                "the student's log-probabilities of its rollouts are not finite",
                where=f"{len(some)} compared rollouts, before the first training step on them",
                hint="use a smaller --learning-rate, or --mixed-precision no",
            )
        if not difference <= self.max_difference:
            raise MismatchError(
                f"the engine's log-probabilities differ from the student's by {difference:.3g} nats per token "
                f"on average, more than {self.max_difference:g}: the engine does not have the student's weights",
                where=f"{len(some)} compared rollouts, before the first training step on them",
                hint="check that no other run sends weights to this server and that --rollout-dtype and "
                "--rollout-engine do not quantize or change the model; or use --rollout-backend transformers",
            )
        if difference <= FLOAT32_DIFFERENCE:
            self.max_difference = MAX_DIFFERENCE_FLOAT32
        return difference

    def _difference(self, rollout: Rollout) -> tuple[float, int]:
        """Return the sum of absolute differences (nats) over this process's sampled tokens, and their number."""
        stored = rollout.document.sampled_tokens
        assert stored is not None
        sampled = np.flatnonzero(stored.sampled_mask)
        sampled = sampled[sampled > 0]
        ids, (start,), lengths = pad_or_pack([stored.ids], self._packing)
        expected = stored.logprobs[sampled].astype(np.float64)
        targets = stored.ids[sampled].astype(np.int64)
        differences: list[float] = []

        def compare(states: Tensor, here: NDArray[np.int64], head: OutputHead) -> None:
            logprobs, _ = compute_token_logprobs(states, head, torch.from_numpy(targets[here]).to(states.device))
            differences.extend(np.abs(logprobs.cpu().numpy() - expected[here]).tolist())

        forward_student(
            self._model, _Tokens(ids, lengths, sampled - 1 + start), (), self._layout, self._device, compare
        )
        return float(np.sum(differences)), len(differences)
