"""Reading of server responses: JSON, errors, token ids and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

BYTES_PER_ENTRY = 72  # of JSON, measured: "12345":{"logprob":-1.2345678,"rank":1,"decoded_token":" word"},
VLLM_SERVER_HINT = "check that a vLLM server with the model of this command answers at the address"
MAX_TOKEN_ID = np.iinfo(np.int32).max
# Nats above 0 that a log-probability may have: a softmax in bfloat16 or float16 is not exactly normalized.
LOGPROB_TOLERANCE = 1e-4
_NOT_FINITE = "check that the server's model has no NaN weights, or start the server with --dtype float32"
_ABOVE_0 = "start the vLLM server with --logprobs-mode raw_logprobs"


class RetryableError(Exception):
    """An invalid response; a retry may succeed. `hint`: what to try if all retries fail; None: that of the pool."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.hint = hint


class PermanentError(Exception):
    """A response that refuses the request; a retry would not change it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def parse_response(text: str) -> Any:
    """Return the value of JSON from a server; raise ValueError also for NaN and Infinity, which JSON does not have."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError as failure:
        raise ValueError(str(failure)) from None


def _reject_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def error_message(response: httpx.Response) -> str:
    """Return a server's error message as one line of any length; a key in it is still there."""
    if response.is_redirect:
        location = response.headers.get("location", "an unknown address")
        return f"{response.reason_phrase}: xtk does not follow the redirect to {location}"
    text: Any = response.content.decode(errors="replace")
    with suppress(ValueError, AttributeError):
        content = parse_response(text)
        error = content.get("error", content)
        text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or response.reason_phrase).split())


def parse_token_ids(names: Sequence[str]) -> NDArray[np.int32]:
    """Return token ids from the keys of a JSON object; only plain decimal digits are accepted."""
    try:
        ids = [int(name) for name in names]
    except ValueError:
        ids = []
    if list(map(str, ids)) != list(names):  # `int` also accepts "1_2", " 3 " and digits of other scripts
        raise RetryableError("the server's response has token ids that are not decimal numbers")
    return checked_token_ids(ids)


def checked_token_ids(values: Any) -> NDArray[np.int32]:
    """Return token ids as int32, from a list of integers from 0 to `MAX_TOKEN_ID`."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise RetryableError("the token ids in the server's response are not a list of integers")
    if values and not (min(values) >= 0 and max(values) <= MAX_TOKEN_ID):
        raise RetryableError(f"the server's response has a token id that is below 0 or above {MAX_TOKEN_ID}")
    return np.array(values, np.int32)


def checked_logprobs(values: Iterable[Any]) -> NDArray[np.float32]:
    """Return log-probabilities as float32: numbers (NumPy would convert null and text), finite and not above 0."""
    values = list(values)
    if not set(map(type, values)) <= {float, int}:
        raise RetryableError("the server's response has a log-probability that is not a number")
    try:
        logprobs = np.array(values, np.float64)
    except OverflowError:
        raise RetryableError("the server's response has a log-probability that is not finite", _NOT_FINITE) from None
    if not np.isfinite(logprobs).all():
        raise RetryableError("the server's response has a log-probability that is not finite", _NOT_FINITE)
    if (logprobs > LOGPROB_TOLERANCE).any():
        raise RetryableError(f"the server's response has a log-probability above 0: {logprobs.max():.4g}", _ABOVE_0)
    return logprobs.astype(np.float32)
