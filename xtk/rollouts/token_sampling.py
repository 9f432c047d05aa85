"""Sampling of tokens that depends only on the completion's key and the position, and detection of stop strings.

The argmax of logits plus Gumbel noise is a sample from the softmax (Gumbel 1954; Maddison, Tarlow and Minka, "A*
sampling", 2014). The noise of a token is a hash of key, position and id: no batch, process or order changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.rollouts.generator_interface import SamplingConfig
from xtk.text.tokenizer import Tokenizer

# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
SPLITMIX_INCREMENT, SPLITMIX_MULTIPLIER_1, SPLITMIX_MULTIPLIER_2 = (
    int(np.array(number, np.uint64).view(np.int64))
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

# Logits that are processed at a time: several float64 copies exist meanwhile. On a CPU they stay in its caches.
CHUNK_SIZE, CHUNK_SIZE_CPU = 1 << 25, 1 << 18


def position_seeds(key: tuple[int, ...], length: int) -> NDArray[np.int64]:
    """Return int64 [length], a seed for each position of a completion."""
    name = hashlib.sha256(repr(tuple(map(int, key))).encode()).digest()
    return np.random.Philox(key=int.from_bytes(name[:16], "little")).random_raw(length).view(np.int64)


def gumbel_noise(seeds: Tensor, vocab_size: int) -> Tensor:
    """Return float64 [B, V], Gumbel noise for each token, from int64 [B], the seed of a position of each completion."""
    steps = torch.arange(1, vocab_size + 1, device=seeds.device) * SPLITMIX_INCREMENT
    bits = seeds[:, None] + steps
    for shift, factor in ((30, SPLITMIX_MULTIPLIER_1), (27, SPLITMIX_MULTIPLIER_2)):
        bits = (bits ^ _shifted(bits, shift)) * factor
    bits = bits ^ _shifted(bits, 31)
    uniform = ((_shifted(bits, 11).double() + 0.5) * 2.0**-53).clamp_max(1 - 2.0**-53)  # 1 would be infinite noise
    return -(-uniform.log()).log()


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return bits shifted to the right, filled with zeros: torch would repeat the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def sample_tokens(logits: Tensor, seeds: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return int64 [B], a sampled token for each completion, from float32 logits and int64 seeds.

    The temperature is applied first, then `top_k`, then `top_p` to what remains.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    most = CHUNK_SIZE_CPU if logits.device.type == "cpu" else CHUNK_SIZE
    rows = max(1, most // logits.shape[-1])
    chosen = [
        (
            mask_unlikely(some.double() / sampling.temperature, sampling) + gumbel_noise(of_places, logits.shape[-1])
        ).argmax(-1)
        for some, of_places in zip(torch.split(logits, rows), torch.split(seeds, rows), strict=True)
    ]
    return torch.cat(chosen)


def mask_unlikely(scores: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return scores [B, V] with -inf for tokens outside of `top_k` and `top_p`."""
    if 0 < sampling.top_k < scores.shape[-1]:
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(sampling.top_k).indices, True)
        scores = scores.masked_fill(~kept, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        probs = ordered.softmax(-1)
        unlikely = probs.cumsum(-1) - probs >= sampling.top_p  # the tokens before it already have this mass
        scores = scores.masked_fill(torch.empty_like(unlikely).scatter_(1, order, unlikely), -torch.inf)
    return scores


class StopStringDetector:
    """Detects stop strings, none of them empty, in the tokens of one completion, one token at a time."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._stops = [text.encode() for text in stop]
        self._kept = max(map(len, self._stops), default=1) - 1
        self._tail = b""

    def add_token(self, token: int) -> bool:
        """Append a token; return whether it completes a stop string. Stop strings do not span special tokens."""
        if self._vocabulary.special_mask[token]:
            self._tail = b""
            return False
        text = self._tail + self._vocabulary.bytes_by_id[token]
        self._tail = text[max(0, len(text) - self._kept) :]
        return any(stop in text for stop in self._stops)
