"""Shared parts of backends: length limits, and for vLLM and servers seeds and checks of returned completions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.engines.server_responses import LOGPROB_TOLERANCE
from xtk.errors import XtkError
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.token_sampling import StopStringDetector, position_seeds
from xtk.text.tokenizer import Tokenizer

EXTRA_TOP_IDS = 8  # top ids requested in addition: some may be embedding rows without a token
MAX_TEMPERATURE = 2.0  # of vLLM
MAX_LOGIT_BIASES = 1024  # per request, of vLLM


def seed_from_key(key: tuple[int, ...]) -> int:
    """Return a 63-bit seed for a request."""
    return int(position_seeds(key, 1)[0]) & (2**63 - 1)


def max_new_tokens(request: GenerationRequest, sampling: SamplingConfig, context_length: int | None, name: str) -> int:
    """Return the maximum tokens of a completion."""
    limits = [
        sampling.max_completion_length,
        request.max_length,
        None if context_length is None else context_length - len(request.input_ids),
    ]
    length = min(limit for limit in limits if limit is not None)
    if not len(request.input_ids):
        raise XtkError("a prompt is empty: it has no tokens", where=name, hint="remove this prompt, or add text to it")
    if length < 1:
        raise XtkError(
            f"a prompt of {len(request.input_ids):,} tokens leaves no space for a completion; "
            f"the context length is {context_length}",
            where=name,
            hint="shorten or remove this prompt",
        )
    return length


def check_temperature(sampling: SamplingConfig) -> None:
    """Refuse temperatures above the limit of vLLM."""
    if sampling.temperature > MAX_TEMPERATURE:
        raise XtkError(
            f"--temperature is {sampling.temperature}, but vLLM allows at most {MAX_TEMPERATURE:g}",
            hint="use a lower --temperature, or generate with the backend transformers",
        )


def num_requested_top_ids(sampling: SamplingConfig, tokenizer: Tokenizer, vocab_size: int) -> int:
    """Return how many top ids to request at each position."""
    spare = min(EXTRA_TOP_IDS, max(0, vocab_size - len(tokenizer)))
    return min(sampling.top_logprobs, len(tokenizer)) + spare if sampling.top_logprobs else 0


def checked_completion(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    sorted_top_ids: NDArray[np.int32],
    hit_stop_string: bool,
    sampling: SamplingConfig,
    tokenizer: Tokenizer,
) -> Completion:
    """Return a completion of an engine or a server after checking it; a log-probability of nan is kept.

    `sorted_top_ids`: int32 [n, K], most likely first; K is `num_requested_top_ids`.
    """
    if not len(ids):
        raise XtkError(
            "vLLM returned a completion without tokens",
            where=tokenizer.name,
            hint="run pip install '.[vllm]' in xtk's repository for a supported version, or use another --backend",
        )
    if ids.min() < 0 or ids.max() >= len(tokenizer):
        raise XtkError(
            f"a generated completion contains token id {int(ids[(ids < 0) | (ids >= len(tokenizer))][0])}, "
            f"but the tokenizer has ids from 0 to {len(tokenizer) - 1:,}",
            where=tokenizer.name,
            hint="give the engine and xtk the same model folder",
        )
    if (logprobs > LOGPROB_TOLERANCE).any():
        raise XtkError(
            "a generated completion has log-probabilities above 0",
            where=tokenizer.name,
            hint="start a vLLM server with --logprobs-mode raw_logprobs",
        )
    count = _until_text(ids, sampling, tokenizer)
    if count is not None:  # vLLM detects a stop string only at complete characters, maybe some tokens later
        ids, logprobs, sorted_top_ids, hit_stop_string = ids[:count], logprobs[:count], sorted_top_ids[:count], True
    ended = int(ids[-1]) in tokenizer.stop_ids
    finish = "stop" if ended else "stop-string" if hit_stop_string else "length"
    count = min(sampling.top_logprobs, len(tokenizer))
    top_ids = valid_top_ids(sorted_top_ids, count, tokenizer) if count else None
    return Completion(ids, np.minimum(logprobs, 0), finish, top_ids)


def _until_text(ids: NDArray[np.int32], sampling: SamplingConfig, tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens up to the first stop string; None without one."""
    if not sampling.stop:
        return None
    watch = StopStringDetector(tokenizer, sampling.stop)
    return next((at + 1 for at, token in enumerate(ids.tolist()) if watch.add_token(token)), None)


def valid_top_ids(top_ids: NDArray[np.int32], count: int, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return int32 [n, G], the first G ids of each row [n, K] that belong to a token."""
    known = top_ids < len(tokenizer)
    if (known.sum(1) < count).any():
        raise XtkError(
            f"more than {EXTRA_TOP_IDS} of the most likely ids at a position are padding rows without a token",
            where=tokenizer.name,
            hint="use a smaller --top-logprobs, or --backend transformers",
        )
    order = np.argsort(~known, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(top_ids, order, 1)
