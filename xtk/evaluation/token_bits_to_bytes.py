"""Attribution of a token's bits to its bytes, for bits per byte by text category."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.numba_kernel import numba_kernel

BATCH_ROWS = 64  # rows of float64 prefix sums at a time


class TokenByteCosts:
    """Cost in nats of each byte of a token, given the token's earlier bytes.

    With M(b) the mass of all tokens that begin with the bytes b, byte j of a token costs `ln M(first j - 1) -
    ln M(first j)`. The last byte also costs `ln M(all) - ln P(token)`, because no longer token was chosen. The costs
    sum to `-ln P(token)`. So a space before a word costs what predicting a space costs, not an equal fraction of the
    word's cost.

    This is exact for the observed tokenization; it does not sum over other tokenizations of the same bytes, as the
    probability of the next byte would (Phan et al. 2024, arXiv 2410.09303).

    Args:
        spellings: the bytes of each token; empty for control tokens.
    """

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        order = sorted((token for token, spelling in enumerate(spellings) if spelling), key=spellings.__getitem__)
        self._sorted = [spellings[token] for token in order]
        self._order = torch.tensor(order, dtype=torch.int64)
        self._ranges: dict[int, NDArray[np.int64]] = {}

    def prefix_ranges(self, token: int) -> NDArray[np.int64]:
        """Return int64 [bytes, 2]: for each prefix of a token, the range of tokens in byte order with that prefix.

        For a token without bytes this is one range: all tokens with bytes.
        """
        if token not in self._ranges:
            spelling = self._spellings[token] if token < len(self._spellings) else b""
            ranges = [
                (bisect_left(self._sorted, spelling[:size]), self._range_end(spelling[:size]))
                for size in range(1, len(spelling) + 1)
            ]
            self._ranges[token] = np.array(ranges or [(0, len(self._sorted))], np.int64)
        return self._ranges[token]

    def _range_end(self, beginning: bytes) -> int:
        """Return the end of the range of tokens, in byte order, that begin with some bytes."""
        kept = beginning.rstrip(b"\xff")
        if not kept:
            return len(self._sorted)
        return bisect_left(self._sorted, kept[:-1] + bytes([kept[-1] + 1]))

    def prefix_masses(self, exps: Tensor, tokens: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the probability mass of each prefix of some tokens.

        Args:
            exps: [n, V], proportional to the probabilities of each row.
            tokens: [n], the token of each row.

        Returns:
            float64 [prefixes], concatenated over tokens, at least one each; and int64 [n + 1], the range of each token.
        """
        self._order = self._order.to(exps.device)
        ranges = [self.prefix_ranges(token) for token in tokens]
        offsets = np.cumsum([0, *map(len, ranges)])
        prefix_sums = np.zeros(int(offsets[-1]))
        for start in range(0, len(tokens), BATCH_ROWS):
            part = exps[start : start + BATCH_ROWS]
            sums = torch.zeros(len(part), len(self._order) + 1, dtype=torch.float64, device=exps.device)
            torch.cumsum(part[:, self._order], 1, dtype=torch.float64, out=sums[:, 1:])
            edges = offsets[start : start + len(part) + 1]
            rows = torch.from_numpy(np.repeat(np.arange(len(part)), np.diff(edges))).to(exps.device)
            byte_indices = torch.from_numpy(np.concatenate(ranges[start : start + len(part)])).to(exps.device)
            masses = (sums[rows, byte_indices[:, 1]] - sums[rows, byte_indices[:, 0]]) / part.double().sum(1)[rows]
            prefix_sums[edges[0] : edges[-1]] = masses.cpu().numpy()
        return prefix_sums, offsets


@numba_kernel
def attribute_to_bytes(
    masses: NDArray[np.float64],
    offsets: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the cost of each byte of some tokens, and the byte of the text to which it belongs.

    Most tokens have as many bytes as their range of the text. If a token has more (a space added by the tokenizer), the
    excess goes to the first byte of its range; if it has fewer (normalization removed some), the last bytes of the
    range get nothing. The cost of a token with an empty range goes to the next byte.

    Args:
        masses: float64 [prefixes], from `TokenByteCosts.prefix_masses`.
        offsets: int64 [n + 1], the prefixes of each token.
        logprobs: float64 [n], log-probabilities of the tokens, in nats.
        starts: int64 [n], byte offset in the text where each token begins.
        stops: int64 [n], byte offset where it ends.

    Returns:
        float64 [prefixes], costs in nats, which sum to minus the log-probability for each token; and int64 [prefixes].
    """
    costs, byte_indices = np.zeros(len(masses)), np.zeros(len(masses), np.int64)
    for token in range(len(logprobs)):
        first, last = offsets[token], offsets[token + 1] - 1
        ahead = max(0, last + 1 - first - (stops[token] - starts[token]))
        for at in range(first, last + 1):
            byte_indices[at] = starts[token] + max(0, at - first - ahead)
        if logprobs[token] == -np.inf:  # unknown which of its bytes was impossible
            costs[last] = np.inf
            continue
        if np.isnan(logprobs[token]):
            costs[first : last + 1] = np.nan
            continue
        # Differences of prefix sums have rounding errors; a prefix is at least as likely as its continuation.
        next_logprob = logprobs[token]
        for at in range(last, first - 1, -1):
            prefix_logprob = next_logprob if masses[at] <= 0 else min(0.0, max(next_logprob, math.log(masses[at])))
            if at == last:
                costs[at] += prefix_logprob - next_logprob
            else:
                costs[at + 1] += prefix_logprob - next_logprob
            next_logprob = prefix_logprob
        costs[first] -= next_logprob
    return costs, byte_indices
