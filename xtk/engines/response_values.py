"""Values in the answers of servers: token ids and log-probabilities, each of them checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.engines.http_endpoints import RetryableError

MAX_TOKEN_ID = np.iinfo(np.int32).max
LOGPROB_TOLERANCE = (
    1e-4  # nats above 0 that a log-probability may have: a softmax in bfloat16 or float16 is not normalized
)


def parse_token_ids(names: Sequence[str]) -> NDArray[np.int32]:
    """Return the token ids that keys of an object name, in decimal digits and no other way.

    Raises:
        BadAnswer: one is no id: `int` would also read "1_2", " 3 " and digits of other scripts.
    """
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) <= 10 and (name[0] != "0" or len(name) == 1)):
            raise RetryableError(f"an answer with a token id that is no number: {name[:40]!r}")
    return checked_token_ids([int(name) for name in names])


def checked_token_ids(values: Any) -> NDArray[np.int32]:
    """Return a list of token ids.

    Raises:
        BadAnswer: it is no list, or one of them is no whole number, negative, or larger than any id.
    """
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise RetryableError("an answer with token ids that are no whole numbers")
    if values and not (min(values) >= 0 and max(values) <= MAX_TOKEN_ID):
        raise RetryableError("an answer with a token id that no vocabulary has")
    return np.array(values, np.int32)


def checked_logprobs(values: Iterable[Any]) -> NDArray[np.float32]:
    """Return log-probabilities.

    Raises:
        BadAnswer: one is no number (NumPy would make one of null and of text), not finite, or above 0.
    """
    values = list(values)
    if not set(map(type, values)) <= {float, int}:
        raise RetryableError("an answer with a log-probability that is no number")
    try:
        found = np.array(values, np.float64)
    except OverflowError:
        raise RetryableError("an answer with a log-probability that is not finite") from None
    if not np.isfinite(found).all():
        raise RetryableError("an answer with a log-probability that is not finite")
    if (found > LOGPROB_TOLERANCE).any():
        raise RetryableError(f"an answer with a log-probability above 0: {found.max():.4g}")
    return found.astype(np.float32)
