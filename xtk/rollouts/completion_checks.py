"""What the backends that are no model of ours share: how long, from which seed, and what an answer tells."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.stop_strings import StopStringDetector
from xtk.rollouts.token_sampling import position_seeds
from xtk.tokens.tokenizer import Tokenizer

LOGPROB_TOLERANCE = 1e-4
EXTRA_TOP_IDS = 8  # likeliest ids asked for beyond those that are wanted: some may be rows that no token has
MAX_TEMPERATURE = 2.0  # vLLM draws at no higher temperature
MAX_LOGIT_BIASES = 1024  # of logits, that vLLM takes with one request


def seed_from_key(key: tuple[int, ...]) -> int:
    """Return a seed of 63 bits."""
    return int(position_seeds(key, 1)[0]) & (2**63 - 1)


def max_new_tokens(request: GenerationRequest, sampling: SamplingConfig, context_length: int | None, name: str) -> int:
    """Return how many tokens a completion may have.

    Raises:
        XtkError: none.
    """
    limits = [
        sampling.max_completion_length,
        request.max_length,
        None if context_length is None else context_length - len(request.input_ids),
    ]
    length = min(limit for limit in limits if limit is not None)
    if not len(request.input_ids):
        raise XtkError("a prompt has no token, and the model needs one to go on from", where=name)
    if length < 1:
        raise XtkError(
            f"a prompt of {len(request.input_ids):,} tokens leaves no room in a context of {context_length:,}",
            where=name,
        )
    return length


def check_temperature(sampling: SamplingConfig) -> None:
    """Refuse a temperature that vLLM refuses.

    Raises:
        XtkError: it is above `HOTTEST`.
    """
    if sampling.temperature > MAX_TEMPERATURE:
        raise XtkError(
            f"--temperature is {sampling.temperature}; vLLM draws at {MAX_TEMPERATURE:g} at most",
            hint="a lower one, or --backend transformers",
        )


def num_requested_top_ids(sampling: SamplingConfig, tokenizer: Tokenizer, vocab_size: int) -> int:
    """Return of how many likeliest ids a model is asked at each place."""
    spare = min(EXTRA_TOP_IDS, max(0, vocab_size - len(tokenizer)))
    return min(sampling.top_logprobs, len(tokenizer)) + spare if sampling.top_logprobs else 0


def checked_completion(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    likeliest_ids: NDArray[np.int32],
    hit_stop_string: bool,
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
) -> Completion:
    """Return a completion that was told, once it is one.

    Args:
        ids: int32 [n].
        logprobs: float32 [n]; nan of a model that has none stays.
        likeliest_ids: int32 [n, K], ids, the likeliest first; K is `num_requested_top_ids`.
        hit_stop_string: whether one of `sampling.stop` ended it.
        sampling: as it was asked.
        tokenizer: of the model.

    Raises:
        XtkError: it has ids that no token has, or numbers that are no log-probabilities.
    """
    if not len(ids) or ids.min() < 0 or ids.max() >= len(tokenizer):
        raise XtkError(f"the model wrote ids that are none of its tokenizer's {len(tokenizer):,}", where=tokenizer.name)
    if (logprobs > LOGPROB_TOLERANCE).any():
        raise XtkError("the model tells numbers that are no log-probabilities", where=tokenizer.name)
    count = _until_text(ids, sampling, tokenizer)
    if count is not None:  # vLLM reads a text where its characters are whole, which may be some tokens later
        ids, logprobs, likeliest_ids, hit_stop_string = ids[:count], logprobs[:count], likeliest_ids[:count], True
    ended = int(ids[-1]) in tokenizer.end_ids
    finish = "stop" if ended else "stop-string" if hit_stop_string else "length"
    top_ids = (
        valid_top_ids(likeliest_ids, min(sampling.top_logprobs, len(tokenizer)), tokenizer)
        if sampling.top_logprobs
        else None
    )
    return Completion(ids, np.minimum(logprobs, 0), finish, top_ids)


def _until_text(ids: NDArray[np.int32], sampling: SamplingConfig, tokenizer: Tokenizer) -> int | None:
    """Return how many tokens complete one of the texts that end; None: they do not."""
    watch = StopStringDetector(tokenizer, sampling.stop)
    if not sampling.stop:
        return None
    return next((at + 1 for at, token in enumerate(ids.tolist()) if watch.add_token(token)), None)


def valid_top_ids(top_ids: NDArray[np.int32], count: int, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return [n, G], of [n, K] ids the first G that a token has.

    Raises:
        XtkError: there are fewer.
    """
    known = top_ids < len(tokenizer)
    if (known.sum(1) < count).any():
        raise XtkError(
            f"more than {EXTRA_TOP_IDS} of the ids that the model holds for likeliest are none of its tokenizer's",
            where=tokenizer.name,
            hint="a smaller --top-logprobs, or --backend transformers",
        )
    order = np.argsort(~known, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(top_ids, order, 1)
