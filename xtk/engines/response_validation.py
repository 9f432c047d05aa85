"""Validation of token ids and log-probabilities in responses of servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.engines.http_client_pool import VLLM_SERVER_HINT, RetryableError

MAX_TOKEN_ID = np.iinfo(np.int32).max
# Nats above 0 that a log-probability may have: a softmax in bfloat16 or float16 is not exactly normalized.
LOGPROB_TOLERANCE = 1e-4
_NOT_FINITE = "check that the server's model has no NaN weights, or start the server with --dtype float32"
_ABOVE_0 = "start the vLLM server with --logprobs-mode raw_logprobs"


def parse_token_ids(names: Sequence[str]) -> NDArray[np.int32]:
    """Return token ids from the keys of a JSON object; only plain decimal digits are accepted.

    Raises:
        RetryableError: a key is not a token id. (`int` would also accept "1_2", " 3 " and digits of other scripts.)
    """
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10 and (name[0] != "0" or len(name) == 1)):
            raise RetryableError(
                f"the server's response has the token id {name[:40]!r}, which is not an integer of at least 0",
                VLLM_SERVER_HINT,
            )
    return checked_token_ids([int(name) for name in names])


def checked_token_ids(values: Any) -> NDArray[np.int32]:
    """Return token ids as an int32 array.

    Raises:
        RetryableError: not a list of integers, or an id is negative or above `MAX_TOKEN_ID`.
    """
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise RetryableError("the token ids in the server's response are not a list of integers", VLLM_SERVER_HINT)
    if values and not (min(values) >= 0 and max(values) <= MAX_TOKEN_ID):
        raise RetryableError(
            f"the server's response has a token id that is below 0 or above {MAX_TOKEN_ID}", VLLM_SERVER_HINT
        )
    return np.array(values, np.int32)


def checked_logprobs(values: Iterable[Any]) -> NDArray[np.float32]:
    """Return log-probabilities as a float32 array.

    Raises:
        RetryableError: one is not a number (NumPy would convert null and text), not finite, or above 0.
    """
    values = list(values)
    if not set(map(type, values)) <= {float, int}:
        raise RetryableError("the server's response has a log-probability that is not a number", VLLM_SERVER_HINT)
    try:
        found = np.array(values, np.float64)
    except OverflowError:
        raise RetryableError("the server's response has a log-probability that is not finite", _NOT_FINITE) from None
    if not np.isfinite(found).all():
        raise RetryableError("the server's response has a log-probability that is not finite", _NOT_FINITE)
    if (found > LOGPROB_TOLERANCE).any():
        raise RetryableError(f"the server's response has a log-probability above 0: {found.max():.4g}", _ABOVE_0)
    return found.astype(np.float32)
