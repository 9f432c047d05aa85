"""Speculative decoding of one text at a time: a draft model proposes blocks of tokens, a target model verifies them.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023, algorithm 1.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.errors import XtkError
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.token_sampling import mask_unlikely

# How a token of a completion came about: an accepted proposal; the target's token instead of a rejected one; or the
# target's token after a block whose proposals were all accepted.
ACCEPTED, REPLACED, ADDED = range(3)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class SpeculativeCompletion:
    """A completion, and the blocks in which it was generated."""

    ids: NDArray[np.int32]  # [n], up to a stop token, else at least the maximum length: the last block is complete
    positions: NDArray[np.int16]  # [n], position of each token in its block; 0 begins a block
    origins: NDArray[np.int8]  # [n], ACCEPTED, REPLACED or ADDED
    seconds: float  # time of all blocks, without that of reading the prompt

    @property
    def num_blocks(self) -> int:
        """Number of verifications by the target."""
        return int((self.positions == 0).sum())

    def proposal_counts(self, num_draft_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return int64 [k] twice, by position in the block: verified proposals, and accepted ones.

        Proposals after a rejected one, or after a stop token, are not verified.
        """
        verified, accepted = self.origins != ADDED, self.origins == ACCEPTED
        first, second = (np.bincount(self.positions[some], minlength=num_draft_tokens) for some in (verified, accepted))
        return first, second


def _wait_for_device(values: Tensor) -> None:
    """Wait until values are computed, for times."""
    if values.device.type == "cuda":
        torch.cuda.synchronize(values.device)


@dataclass
class CachedModel:
    """A causal language model with the key-value cache of one text."""

    model: Any  # a transformers model with attention layers only, in eval mode
    vocab_size: int  # tokens of its tokenizer; further rows of its head are ignored
    length: int = 0  # number of tokens in the cache
    # {number of tokens of a forward pass: times}, without those of prompts.
    step_seconds: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_croppable(self.model)
        self._device = self.model.get_input_embeddings().weight.device
        parameters = inspect.signature(self.model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24
        self._cache: Any = None

    def read_prompt(self, ids: Sequence[int]) -> None:
        """Begin a text: clear the cache, and fill it with these tokens."""
        from transformers import DynamicCache

        # Layers of full length, also for sliding windows, whose masks come from the model: they can be cropped.
        self._cache, self.length = DynamicCache(), 0
        if ids:
            _wait_for_device(self._forward(ids, 1))

    def next_logits(self, ids: Sequence[int], rows: int) -> Tensor:
        """Append tokens, and return float32 logits [rows, V] after each of the last ones."""
        start = time.perf_counter()
        logits = self._forward(ids, rows)
        _wait_for_device(logits)
        self.step_seconds.setdefault(len(ids), []).append(time.perf_counter() - start)
        return logits

    def crop(self, length: int) -> None:
        """Remove the last tokens from the cache, so that at most `length` remain."""
        if length < self.length:
            self._cache.crop(length - self.length)
            self.length = length

    def _forward(self, ids: Sequence[int], rows: int) -> Tensor:
        options = {self._cache_argument: self._cache} | ({"logits_to_keep": rows} if self._keeps_rows else {})
        tokens = torch.tensor([list(ids)], device=self._device)
        logits: Tensor = self.model(input_ids=tokens, use_cache=True, **options).logits
        self.length += len(ids)
        return logits[0, -rows:, : self.vocab_size].float()


def check_croppable(model: Any) -> None:
    """Refuse a model whose state of a text cannot go back to an earlier token."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        raise XtkError(
            f"speculative decoding needs a model with attention layers only; {type(model).__name__} has a recurrent "
            f"state{' (' + ', '.join(sorted(kinds)) + ')' if kinds else ''}, which cannot go back after a rejection",
            hint="use another model",
        )


class SpeculativeDecoder:
    """Generates with a target, and a draft with the same vocabulary; the text has the target's distribution.

    Args:
        sampling: the temperature, then `top_k`, then `top_p`, for both models; stop strings are not supported.
        stop_ids: tokens that end a completion.
    """

    def __init__(
        self, target: CachedModel, draft: CachedModel, sampling: SamplingConfig, stop_ids: frozenset[int]
    ) -> None:
        self.target, self.draft, self._sampling, self._stop_ids = target, draft, sampling, stop_ids

    @torch.inference_mode()
    def generate(
        self, prompt: NDArray[np.int32], num_draft_tokens: int, max_length: int, seed: int
    ) -> SpeculativeCompletion:
        """Return a completion of a prompt [T] of at least one token; no block begins after `max_length` tokens.

        `num_draft_tokens`: proposals per block; 0: the target alone.
        """
        generator = torch.Generator(self.target.model.get_input_embeddings().weight.device).manual_seed(seed)
        ids: list[int] = prompt.tolist()
        self.target.read_prompt(ids[:-1])
        if num_draft_tokens:
            self.draft.read_prompt(ids[:-1])
        positions: list[int] = []
        origins: list[int] = []
        start = time.perf_counter()
        while len(positions) < max_length and not (positions and ids[-1] in self._stop_ids):
            tokens, num_accepted = self._next_block(ids, num_draft_tokens, generator)
            last = REPLACED if num_accepted < num_draft_tokens else ADDED
            stop = next((at + 1 for at, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
            ids += tokens[:stop]
            positions += range(stop)
            origins += ([ACCEPTED] * num_accepted + [last])[:stop]
            self.target.crop(len(ids) - 1)
            self.draft.crop(len(ids) - 1)
        seconds = time.perf_counter() - start
        return SpeculativeCompletion(
            np.array(ids[len(prompt) :], np.int32), np.array(positions, np.int16), np.array(origins, np.int8), seconds
        )

    def _next_block(self, ids: list[int], count: int, generator: torch.Generator) -> tuple[list[int], int]:
        """Return the tokens of a block: accepted proposals and one token of the target; and the number of the former.

        The target's cache has all of `ids` but the last one, that of the draft at most these.
        """
        proposals: list[int] = []
        draft_probs: list[Tensor] = []
        unread = ids[self.draft.length :]
        for _ in range(count):
            probs = next_token_probs(self.draft.next_logits(unread, 1), self._sampling)[0]
            unread = [_sample(probs, generator)]
            proposals += unread
            draft_probs.append(probs)
        target_probs = next_token_probs(self.target.next_logits([ids[-1], *proposals], count + 1), self._sampling)
        for at, (token, probs) in enumerate(zip(proposals, draft_probs, strict=True)):
            probs = probs.to(target_probs.device)
            uniform = torch.rand((), dtype=probs.dtype, device=probs.device, generator=generator)
            if not bool(uniform * probs[token] < target_probs[at, token]):
                left = (target_probs[at] - probs).clamp_min(0)
                return [*proposals[:at], _sample(left if bool(left.any()) else target_probs[at], generator)], at
        return [*proposals, _sample(target_probs[count], generator)], count


def next_token_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return float64 [N, V], the distribution that is sampled from; at temperature 0 all mass on the largest logit."""
    if sampling.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return mask_unlikely(logits.double() / sampling.temperature, sampling).softmax(-1)


def _sample(weights: Tensor, generator: torch.Generator) -> int:
    """Return a token, sampled in proportion to weights [V]."""
    return int(torch.multinomial(weights, 1, generator=generator))
