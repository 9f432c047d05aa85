"""How the bits of a token are shared among its bytes, so that kinds of text can be told apart."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

BATCH_ROWS = 64  # of prefix sums in float64


class TokenByteCosts:
    """What each byte of a token costs, given the bytes of the same token before it.

    With M(b) the mass of all tokens that begin with the bytes b, byte j of a token costs `ln M(first j - 1) -
    ln M(first j)`, and the last one the rest, `ln M(all) - ln P(token)`, beside that: nothing goes on from here. The
    sum is what the token costs. A space before a word so costs what it costs to know that there is a space, and not
    its share of the word's letters.

    This is exact for the tokens that stand there; it does not sum over other tokens that spell the same, as the
    probability of the next byte would (Phan et al. 2024, arXiv 2410.09303).

    Args:
        spellings: the bytes of each token; nothing for control tokens.
    """

    def __init__(self, spellings: Sequence[bytes]) -> None:
        self._spellings = spellings
        order = sorted((token for token, spelling in enumerate(spellings) if spelling), key=spellings.__getitem__)
        self._sorted = [spellings[token] for token in order]
        self._order = torch.tensor(order, dtype=torch.int64)
        self._ranges: dict[int, NDArray[np.int64]] = {}

    def prefix_ranges(self, token: int) -> NDArray[np.int64]:
        """Return int64 [bytes, 2]: for each beginning of a token, the tokens in sorted order that begin with it.

        Of a token that spells nothing it is one range, of all tokens that spell something.
        """
        if token not in self._ranges:
            spelling = self._spellings[token] if token < len(self._spellings) else b""
            found = [
                (bisect_left(self._sorted, spelling[:size]), self._range_end(spelling[:size]))
                for size in range(1, len(spelling) + 1)
            ]
            self._ranges[token] = np.array(found or [(0, len(self._sorted))], np.int64)
        return self._ranges[token]

    def _range_end(self, beginning: bytes) -> int:
        """Return where the tokens end that begin with some bytes."""
        kept = beginning.rstrip(b"\xff")
        if not kept:
            return len(self._sorted)
        return bisect_left(self._sorted, kept[:-1] + bytes([kept[-1] + 1]))

    def prefix_masses(self, exps: Tensor, tokens: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the mass behind each beginning of some tokens.

        Args:
            exps: [n, V], what is proportional to the probabilities of each row.
            tokens: [n], whose beginnings are asked about.

        Returns:
            float64 [beginnings], one token's behind the other's, at least one each; and int64 [n + 1], where each
            token's are.
        """
        self._order = self._order.to(exps.device)
        ranges = [self.prefix_ranges(token) for token in tokens]
        offsets = np.cumsum([0, *map(len, ranges)])
        found = np.zeros(int(offsets[-1]))
        for start in range(0, len(tokens), BATCH_ROWS):
            part = exps[start : start + BATCH_ROWS]
            sums = torch.zeros(len(part), len(self._order) + 1, dtype=torch.float64, device=exps.device)
            torch.cumsum(part[:, self._order], 1, dtype=torch.float64, out=sums[:, 1:])
            edges = offsets[start : start + len(part) + 1]
            rows = torch.from_numpy(np.repeat(np.arange(len(part)), np.diff(edges))).to(exps.device)
            places = torch.from_numpy(np.concatenate(ranges[start : start + len(part)])).to(exps.device)
            masses = (sums[rows, places[:, 1]] - sums[rows, places[:, 0]]) / part.double().sum(1)[rows]
            found[edges[0] : edges[-1]] = masses.cpu().numpy()
        return found, offsets


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def attribute_to_bytes(
    masses: NDArray[np.float64],
    offsets: NDArray[np.int64],
    logprobs: NDArray[np.float64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return what each byte of some tokens costs, and the byte of the text on which that lies.

    Most tokens spell the bytes where they stand. One that spells more (a space that the tokenizer puts in front) lays
    what is too much on its first byte there; one that spells fewer (a normaliser took some) leaves the last ones free.
    A token that stands on no byte is laid on the next one.

    Args:
        masses: float64 [beginnings],
        offsets: int64 [n + 1], as `BytesOfTokens.masses` returns them.
        logprobs: float64 [n], natural, of the tokens.
        starts: int64 [n], where each token begins in the text,
        stops: int64 [n], and where it ends.

    Returns:
        float64 [beginnings], nats, those of a token summing to minus its log-probability; and int64 [beginnings].
    """
    costs, places = np.zeros(len(masses)), np.zeros(len(masses), np.int64)
    for token in range(len(logprobs)):
        first, last = offsets[token], offsets[token + 1] - 1
        ahead = max(0, last + 1 - first - (stops[token] - starts[token]))
        for at in range(first, last + 1):
            places[at] = starts[token] + max(0, at - first - ahead)
        if logprobs[token] == -np.inf:  # nothing tells which of its bytes was impossible
            costs[last] = np.inf
            continue
        if np.isnan(logprobs[token]):
            costs[first : last + 1] = np.nan
            continue
        # Differences of prefix sums round; no beginning is less likely than what begins with it.
        behind = logprobs[token]
        for at in range(last, first - 1, -1):
            known = behind if masses[at] <= 0 else min(0.0, max(behind, math.log(masses[at])))
            if at == last:
                costs[at] += known - behind
            else:
                costs[at + 1] += known - behind
            behind = known
        costs[first] -= behind
    return costs, places
