"""What the backends that are no model of ours share: how long, from which seed, and what an answer tells."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.rollouts.drawing import seeds_of
from xtk.rollouts.stop_strings import Watch
from xtk.rollouts.writer import Ask, Completion, Sampling
from xtk.tokens.tokenizer import Tokenizer

ROUNDING = 1e-4
SPARE = 8  # likeliest ids asked for beyond those that are wanted: some may be rows that no token has
HOTTEST = 2.0  # vLLM draws at no higher temperature
BIASES = 1024  # of logits, that vLLM takes with one request


def seed_of(key: tuple[int, ...]) -> int:
    """Return a seed of 63 bits."""
    return int(seeds_of(key, 1)[0]) & (2**63 - 1)


def length_of(ask: Ask, sampling: Sampling, context: int | None, name: str) -> int:
    """Return how many tokens a completion may have.

    Raises:
        XtkError: none.
    """
    limits = [sampling.max_completion_length, ask.length, None if context is None else context - len(ask.ids)]
    length = min(limit for limit in limits if limit is not None)
    if not len(ask.ids):
        raise XtkError("a prompt has no token, and the model needs one to go on from", where=name)
    if length < 1:
        raise XtkError(f"a prompt of {len(ask.ids):,} tokens leaves no room in a context of {context:,}", where=name)
    return length


def refuse_hotter(sampling: Sampling) -> None:
    """Refuse a temperature that vLLM refuses.

    Raises:
        XtkError: it is above `HOTTEST`.
    """
    if sampling.temperature > HOTTEST:
        raise XtkError(
            f"--temperature is {sampling.temperature}; vLLM draws at {HOTTEST:g} at most",
            hint="a lower one, or --backend transformers",
        )


def told_ids(sampling: Sampling, tokenizer: Tokenizer, width: int) -> int:
    """Return of how many likeliest ids a model is asked at each place."""
    spare = min(SPARE, max(0, width - len(tokenizer)))
    return min(sampling.given, len(tokenizer)) + spare if sampling.given else 0


def completion_of(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    likeliest: NDArray[np.int32],
    stopped_by_text: bool,
    sampling: Sampling,
    tokenizer: Tokenizer,
) -> Completion:
    """Return a completion that was told, once it is one.

    Args:
        ids: int32 [n].
        logprobs: float32 [n]; nan of a model that has none stays.
        likeliest: int32 [n, K], ids, the likeliest first; K is `told_ids`.
        stopped_by_text: whether one of `sampling.stop` ended it.
        sampling: as it was asked.
        tokenizer: of the model.

    Raises:
        XtkError: it has ids that no token has, or numbers that are no log-probabilities.
    """
    if not len(ids) or ids.min() < 0 or ids.max() >= len(tokenizer):
        raise XtkError(f"the model wrote ids that are none of its tokenizer's {len(tokenizer):,}", where=tokenizer.name)
    if (logprobs > ROUNDING).any():
        raise XtkError("the model tells numbers that are no log-probabilities", where=tokenizer.name)
    count = _until_text(ids, sampling, tokenizer)
    if count is not None:  # vLLM reads a text where its characters are whole, which may be some tokens later
        ids, logprobs, likeliest, stopped_by_text = ids[:count], logprobs[:count], likeliest[:count], True
    ended = int(ids[-1]) in tokenizer.end_ids
    finish = "stop" if ended else "stop-string" if stopped_by_text else "length"
    top_ids = known_ids(likeliest, min(sampling.given, len(tokenizer)), tokenizer) if sampling.given else None
    return Completion(ids, np.minimum(logprobs, 0), finish, top_ids)


def _until_text(ids: NDArray[np.int32], sampling: Sampling, tokenizer: Tokenizer) -> int | None:
    """Return how many tokens complete one of the texts that end; None: they do not."""
    watch = Watch(tokenizer, sampling.stop)
    if not sampling.stop:
        return None
    return next((at + 1 for at, token in enumerate(ids.tolist()) if watch.ends(token)), None)


def known_ids(likeliest: NDArray[np.int32], given: int, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return [n, G], of [n, K] ids the first G that a token has.

    Raises:
        XtkError: there are fewer.
    """
    known = likeliest < len(tokenizer)
    if (known.sum(1) < given).any():
        raise XtkError(
            f"more than {SPARE} of the ids that the model holds for likeliest are none of its tokenizer's",
            where=tokenizer.name,
            hint="a smaller --given, or --backend transformers",
        )
    order = np.argsort(~known, axis=1, kind="stable")[:, :given]
    return np.take_along_axis(likeliest, order, 1)
