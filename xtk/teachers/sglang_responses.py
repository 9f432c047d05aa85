"""SGLang's own interface, `/generate`, which returns log-probabilities of a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from xtk.engines.server_responses import RetryableError, checked_logprobs, checked_token_ids
from xtk.teachers.vllm_top_logprobs import TopLogprobs, num_tokens_to_read, separate_observed
from xtk.text.token_sequence import TokenSequence

GENERATE_PATH = "/generate"  # after the address without /v1
OWNER = "sglang"  # that SGLang's list of models states
_HINT = "check that this is a server of SGLang (python -m sglang.launch_server), or use --backend transformers"


def request_body(prompt: str | list[int], top_k: int) -> dict[str, Any]:
    """Return the body of a request that scores a prompt and generates nothing.

    Args:
        prompt: text, or token ids.
    """
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    sampling = {"max_new_tokens": 0, "temperature": 0}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
    return {**given, "sampling_params": sampling, **logprobs}


def prompt_entries(answer: Any) -> tuple[list[Any], list[Any]]:
    """Return (log-probability, id, text) of each token of the prompt, and the lists of the most likely ones.

    Raises:
        RetryableError: the response has none.
    """
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    own = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    top = meta.get("input_top_logprobs") if isinstance(meta, dict) else None
    if not isinstance(own, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in own):
        raise RetryableError("the server's response has no input_token_logprobs", _HINT)
    if top is not None and not isinstance(top, list):
        raise RetryableError("the server's response has no valid input_top_logprobs", _HINT)
    return own, top or [None] * len(own)


def parse_response(answer: Any, document: TokenSequence, top_k: int) -> TopLogprobs:
    """Return the top log-probabilities at the trained tokens of a document.

    Raises:
        RetryableError: the response has fewer or other tokens, or values that are not numbers.
    """
    own, top = prompt_entries(answer)
    length = num_tokens_to_read(document)
    if not len(own) == len(top) == length:
        raise RetryableError(
            f"the server's response has log-probabilities of {len(own):,} tokens instead of {length:,}"
        )
    at = np.flatnonzero(document.train_mask)
    ids: list[Any] = []
    values: list[Any] = []
    lengths = []
    for position in at.tolist():
        listed = (top[position] or []) if top_k else []
        if not isinstance(listed, list) or len(listed) != top_k or not all(isinstance(entry, list) for entry in listed):
            raise RetryableError(
                f"the server's response does not have {top_k:,} log-probabilities for each token", _HINT
            )
        entries = [entry[:2] for entry in listed]
        value, token = own[position][:2]
        if all(other != token for _, other in entries):
            entries.append([value, token])
        values += [logprob for logprob, _ in entries]
        ids += [token for _, token in entries]
        lengths.append(len(entries))
    table = (checked_token_ids(ids), checked_logprobs(values), np.array(lengths, np.int64))
    return separate_observed(*table, document.ids[at], top_k)
