"""HTTP client for several equivalent servers: concurrent requests, retries, failover.

Requests and the parsing of responses are defined by callers (`xtk.teachers.vllm_server_client`).
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from xtk import terminal
from xtk.engines.secret_filter import SecretFilter
from xtk.engines.server_responses import (
    MAX_ERROR_BYTES,
    MAX_MESSAGE_LENGTH,
    RESPONSE_OVERHEAD_BYTES,
    VLLM_SERVER_HINT,
    PermanentError,
    RetryableError,
    error_message,
    parse_response,
    read_body,
)
from xtk.errors import XtkError

API_KEY_VARIABLES = ("XTK_API_KEY", "OPENAI_API_KEY")  # the environment variables that may hold a key
# A server or a gateway before it is busy or being restarted (520 to 530: gateways of Cloudflare and others).
BUSY_STATUS_CODES = frozenset({408, 425, 429, 502, 503, 504, *range(520, 531)})
REPORT_INTERVAL_SECONDS = 30.0
T = TypeVar("T")


class NoResponseError(XtkError):
    """A server gave no valid response in all attempts."""


class _NoResponse(Exception):
    """The server is unreachable or busy. `pause`: its Retry-After, in seconds; `failed`: it has an internal error."""

    def __init__(self, why: str, pause: float = 0.0, *, failed: bool = False) -> None:
        super().__init__(why)
        self.retry_after, self.failed = pause, failed


@dataclass(frozen=True)
class RetryPolicy:
    """Limits and pauses of retries.

    Attributes:
        max_attempts: attempts per request, over all servers.
        max_bad_responses: invalid responses per request.
        max_internal_errors: HTTP 500 and similar errors per request, which often do not go away.
        total_seconds: seconds per request, including all attempts and pauses.
        attempt_seconds: seconds per attempt, from the connection to the last byte.
        status_seconds: the same for a request without a body (list of models, version of weights), which is cheap.
        connect_seconds: seconds until a server accepts a connection.
        initial_backoff: seconds before the second attempt; it doubles with each failure.
        max_backoff: upper limit of the pause, in seconds.
        max_retry_after: the same for a pause that a server requests.
    """

    max_attempts: int = 20
    max_bad_responses: int = 3
    max_internal_errors: int = 5
    total_seconds: float = 1200.0
    attempt_seconds: float = 600.0
    status_seconds: float = 60.0
    connect_seconds: float = 10.0
    initial_backoff: float = 0.5
    max_backoff: float = 30.0
    max_retry_after: float = 300.0

    def backoff(self, failures: int) -> float:
        """Return a pause in seconds after consecutive failures, with jitter to spread requests that failed together."""
        longest = min(self.max_backoff, self.initial_backoff * 2 ** min(max(0, failures - 1), 30))
        return random.uniform(longest / 2, longest)


@dataclass
class Endpoint:
    """A server, and its current state. Times are those of the event loop's clock.

    Attributes:
        url: address up to and including `/v1`.
        requested_model: the text after `#` in the user's address; "" if there is none.
        model: the server's name of the model, once known.
        owner: the kind of server that its list of models states, such as "vllm" or "sglang"; "": none.
        num_inflight: requests in flight.
        consecutive_failures: number of failures since the last response.
        backoff_until: time before which no request is sent.
        may_have_restarted: whether it failed since its state was last checked: it may have been restarted.
        waiting_since: time of the last response, or of the first request without one; None: no request is pending.
        last_report_time: time of the last printed line about it.
        has_reported: whether a line was printed since the last response.
        answers_as: the model named in its responses; "" before the first one that names any.
    """

    url: str
    requested_model: str = ""
    model: str = ""
    owner: str = ""
    num_inflight: int = 0
    consecutive_failures: int = 0
    backoff_until: float = field(default=0.0, repr=False)
    may_have_restarted: bool = field(default=False, repr=False)
    waiting_since: float | None = field(default=None, repr=False)
    last_report_time: float = field(default=-math.inf, repr=False)
    answers_as: str = field(default="", repr=False)
    has_reported: bool = field(default=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse `http://host:port/v1`, or `http://host:port/v1#model`."""
        try:
            parts = urlsplit(text.strip())
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        except ValueError:  # the port is not a number
            is_valid = False
        if not is_valid:
            raise XtkError(
                f"the server {text!r} is not an http or https URL", hint="use a URL such as http://localhost:8000/v1"
            )
        path = parts.path.rstrip("/") or "/v1"
        return cls(urlunsplit((parts.scheme, parts.netloc, path, "", "")), parts.fragment)

    @property
    def password(self) -> str:
        """The password in the address; "": none."""
        return unquote(urlsplit(self.url).password or "")

    @property
    def root_url(self) -> str:
        """The address without `/v1`."""
        return self.url.removesuffix("/v1")

    def __str__(self) -> str:
        """Return the address without a password."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class EndpointPool:
    """Equivalent servers that share requests. Use inside `async with connected()`, in one event loop.

    Args:
        concurrency: largest number of requests in flight.
        max_weight: largest total weight of requests in flight; a heavier request is sent alone.
        api_key_variable: environment variable with the key; "": the first of `API_KEY_VARIABLES` that is set.
        response_hint: the next step if responses are not valid.
        on_recovered: awaited before the first request to a server that had failed and may have been restarted;
            NoResponseError: it failed again.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        concurrency: int,
        max_weight: float,
        retry_policy: RetryPolicy,
        on_recovered: Callable[[Endpoint], Awaitable[None]] | None = None,
        api_key_variable: str = "",
        response_hint: str = VLLM_SERVER_HINT,
    ) -> None:
        self.endpoints = list(endpoints)
        self._response_hint = response_hint
        self._key_variables = (api_key_variable,) if api_key_variable else API_KEY_VARIABLES
        self._concurrency, self._max_weight, self._retry_policy, self._on_recovered = (
            concurrency,
            max_weight,
            retry_policy,
            on_recovered,
        )

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keep HTTP connections open within the context."""
        key = _read_key(self._key_variables)
        self._secrets = SecretFilter([key, *(endpoint.password for endpoint in self.endpoints)])
        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        # The timeout of an attempt is measured around it: a server that sends a byte now and then hangs as well.
        timeout = httpx.Timeout(None, connect=self._retry_policy.connect_seconds)
        # A compressed response could be a thousand times larger than its transfer: it is refused.
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as self._client:
            self._inflight_limit = _InflightLimit(self._concurrency, self._max_weight)
            for endpoint in self.endpoints:
                endpoint.num_inflight, endpoint.consecutive_failures, endpoint.backoff_until = 0, 0, 0.0
                endpoint.waiting_since = None
            watch = asyncio.get_running_loop().create_task(self._report_silence())
            try:
                yield
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    async def _report_silence(self) -> None:
        """Print a line for each server without a response for `REPORT_INTERVAL_SECONDS`, and again at this interval."""
        while True:
            await asyncio.sleep(min(1.0, REPORT_INTERVAL_SECONDS / 4))
            now = asyncio.get_running_loop().time()
            for endpoint in self.endpoints:
                since = endpoint.waiting_since
                if since is not None and now - since >= REPORT_INTERVAL_SECONDS:
                    state = (
                        "retrying" if endpoint.consecutive_failures else f"{endpoint.num_inflight} request(s) pending"
                    )
                    self._report(endpoint, f"no response for {terminal.format_duration(now - since)}; {state}")

    def _report(self, endpoint: Endpoint, why: str) -> None:
        """Print a line about a server, at most once per `REPORT_INTERVAL_SECONDS`."""
        now = asyncio.get_running_loop().time()
        if now - endpoint.last_report_time >= REPORT_INTERVAL_SECONDS:
            endpoint.last_report_time, endpoint.has_reported = now, True
            terminal.note(f"{endpoint}: {why}")

    async def request_one(
        self,
        endpoint: Endpoint,
        path: str,
        body: dict[str, Any] | None,
        parse: Callable[[Any], T],
        *,
        max_attempts: int,
        max_bytes: int = RESPONSE_OVERHEAD_BYTES,
        at_root: bool = False,
    ) -> T:
        """Return the parsed response of this server: POST with a body, GET without.

        Args:
            path: path after `/v1`.
            body: JSON body; None: none.
            parse: as in `request`.
            at_root: whether the path follows the address without `/v1`.

        Raises:
            PermanentError: the server refuses the request.
            NoResponseError: no valid response.
        """
        url = (endpoint.root_url if at_root else endpoint.url) + path
        for attempt in range(1, max_attempts + 1):
            try:
                return await self._attempt(endpoint, url, body, parse, max_bytes)
            except (RetryableError, _NoResponse) as failure:
                if attempt == max_attempts:
                    raise NoResponseError(
                        f"no valid response from the server: {failure}",
                        where=str(endpoint),
                        hint=getattr(failure, "hint", None) or self._response_hint,
                    ) from None
                await asyncio.sleep(self._retry_policy.backoff(attempt))
        raise AssertionError("max_attempts must be at least 1")

    async def request(
        self,
        path: str,
        body_for: Callable[[Endpoint], dict[str, Any]],
        parse: Callable[[Any], T],
        *,
        what: str,
        weight: float,
        max_bytes: int,
        at_root: bool = False,
    ) -> T:
        """Return the parsed response of the least busy server; on failure retry on others within the retry policy.

        Args:
            path: path after `/v1`.
            body_for: returns the JSON body for a server.
            parse: converts the response's JSON, or raises RetryableError.
            what: subject of the request, for errors.
            at_root: whether the path follows the address without `/v1`.

        Raises:
            PermanentError: a server refuses the request.
        """
        async with self._inflight_limit.acquired(weight):
            loop = asyncio.get_running_loop()
            end = loop.time() + self._retry_policy.total_seconds
            last, hint, attempts, bad, internal = "", None, 0, 0, 0
            failed: Endpoint | None = None
            while (
                attempts < self._retry_policy.max_attempts
                and bad < self._retry_policy.max_bad_responses
                and internal < self._retry_policy.max_internal_errors
                and loop.time() < end
            ):
                endpoint = self._freest(failed)
                await asyncio.sleep(max(0.0, min(endpoint.backoff_until, end) - loop.time()))
                attempts += 1
                try:
                    if endpoint.may_have_restarted and self._on_recovered is not None:
                        await self._on_recovered(endpoint)
                    endpoint.may_have_restarted = False
                    address = (endpoint.root_url if at_root else endpoint.url) + path
                    return await self._attempt(endpoint, address, body_for(endpoint), parse, max_bytes)
                except (RetryableError, _NoResponse, NoResponseError) as failure:
                    failed, last = (
                        endpoint,
                        f"{endpoint}: {failure.what if isinstance(failure, NoResponseError) else failure}",
                    )
                    hint = getattr(failure, "hint", None)
                    bad += isinstance(failure, RetryableError)
                    internal += getattr(failure, "failed", False)
            raise XtkError(
                f"no server gave a valid response in {attempts} attempts; last error: {last}",
                where=what,
                hint=hint or "check the server or service, then run the same command again; finished parts are kept",
            )

    def _freest(self, failed: Endpoint | None) -> Endpoint:
        """Return the server with the shortest backoff; on ties not `failed`, then the one with fewest requests.

        A server that failed last time gets one request at a time if there is another server.
        """
        now = asyncio.get_running_loop().time()
        return min(
            self.endpoints,
            key=lambda one: (
                max(0.0, one.backoff_until - now),
                one is failed,
                one.consecutive_failures > 0 and one.num_inflight > 0,
                one.num_inflight,
            ),
        )

    async def _attempt(
        self, endpoint: Endpoint, url: str, body: dict[str, Any] | None, parse: Callable[[Any], T], most: int
    ) -> T:
        now = asyncio.get_running_loop().time
        timeout = (
            self._retry_policy.attempt_seconds
            if body is not None
            else min(self._retry_policy.status_seconds, self._retry_policy.attempt_seconds)
        )
        endpoint.num_inflight += 1
        if endpoint.waiting_since is None:
            endpoint.waiting_since = now()
        try:
            async with asyncio.timeout(timeout):
                answer = await self._exchange(url, body, most)
        except TimeoutError:
            why = f"no response within {timeout:g} seconds"
            self._back_off(endpoint, 0.0, why)
            raise _NoResponse(why) from None
        except _NoResponse as failure:
            self._back_off(endpoint, failure.retry_after, str(failure))
            raise
        except RetryableError as failure:
            self._report(endpoint, f"{failure}; retrying")
            raise
        finally:
            endpoint.num_inflight -= 1
        if endpoint.has_reported:
            silent = now() - (endpoint.waiting_since or now())
            terminal.note(f"{endpoint}: responding again after {terminal.format_duration(silent)}")
        endpoint.consecutive_failures, endpoint.has_reported = 0, False
        endpoint.waiting_since = now() if endpoint.num_inflight else None
        try:
            if body is not None:
                _check_model(endpoint, answer)
            return parse(answer)
        except RetryableError as failure:
            self._report(endpoint, f"{failure}; retrying")
            raise

    async def _exchange(self, url: str, body: dict[str, Any] | None, most: int) -> Any:
        """Return the JSON value of a response. All texts of servers pass here, and have no key afterwards.

        Raises:
            RetryableError: the response is not valid.
            PermanentError: the server refuses the request.
            _NoResponse: the server is unreachable or busy.
        """
        try:
            raw = await self._response_body(url, body, most)
            return self._secrets.answer(parse_response(raw), raw.decode("utf-8", "replace"))
        except RetryableError as failure:
            raise RetryableError(self._without_key(failure), failure.hint or self._response_hint) from None
        except PermanentError as failure:
            raise PermanentError(failure.status, self._without_key(failure)) from None
        except _NoResponse as failure:
            raise _NoResponse(self._without_key(failure), failure.retry_after, failed=failure.failed) from None
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise _NoResponse(f"{type(failure).__name__} {self._without_key(failure)}".strip()) from None

    def _without_key(self, error: Exception) -> str:
        return self._secrets.message(str(error))[:MAX_MESSAGE_LENGTH]

    async def _response_body(self, url: str, body: dict[str, Any] | None, most: int) -> bytes:
        method = "GET" if body is None else "POST"
        async with self._client.stream(method, url, json=body) as answer:
            if answer.status_code == 200:
                encoding = answer.headers.get("content-encoding", "identity")
                if encoding != "identity":
                    raise RetryableError(
                        f"the server's response is compressed ({encoding}), but xtk reads only uncompressed responses",
                        hint="turn off compression in the server or in the proxy before it",
                    )
                raw, is_whole = await read_body(answer, most)
                if not is_whole:
                    raise RetryableError(
                        f"the server's response is larger than {most:,} bytes, the limit for this request"
                    )
                return raw
            message = error_message(answer, (await read_body(answer, MAX_ERROR_BYTES))[0])
            if answer.status_code >= 500 or answer.status_code in BUSY_STATUS_CODES:
                pause = _retry_after(answer.headers.get("retry-after", ""))
                failed = answer.status_code not in BUSY_STATUS_CODES
                raise _NoResponse(f"HTTP {answer.status_code} {message}", pause, failed=failed)
            raise PermanentError(answer.status_code, message)

    def _back_off(self, endpoint: Endpoint, retry_after: float, why: str) -> None:
        now = asyncio.get_running_loop().time()
        endpoint.may_have_restarted = True
        self._report(endpoint, f"{why}; retrying")
        if now >= endpoint.backoff_until:  # else it failed together with others, which count as one failure
            endpoint.consecutive_failures += 1
            endpoint.backoff_until = now + self._retry_policy.backoff(endpoint.consecutive_failures)
        endpoint.backoff_until = max(endpoint.backoff_until, now + min(retry_after, self._retry_policy.max_retry_after))


def _read_key(variables: Sequence[str]) -> str:
    """Return the API key in the first of these environment variables that is set; "": none."""
    variable = next((name for name in variables if os.environ.get(name)), "")
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise XtkError(
            f"the API key in the environment variable {variable} has characters that are not printable ASCII",
            hint=f"copy the key again: export {variable}=...",
        )
    return key


def _retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0: there is none, or no valid one."""
    with suppress(ValueError, TypeError, OverflowError):
        seconds = float(header)
        return seconds if 0 < seconds < math.inf else 0.0
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0


class _InflightLimit:
    """Limits the number and the total weight of requests in flight; a request above the limit is sent alone."""

    def __init__(self, max_inflight: int, max_weight: float) -> None:
        self._max_inflight, self._max_weight = max_inflight, max_weight
        self._num_inflight, self._inflight_weight = 0, 0.0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def acquired(self, weight: float) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    not self._num_inflight
                    or (self._num_inflight < self._max_inflight and self._inflight_weight + weight <= self._max_weight)
                )
            )
            self._num_inflight += 1
            self._inflight_weight += weight
        try:
            yield
        finally:
            self._num_inflight -= 1
            self._inflight_weight -= weight
            async with self._changed:
                self._changed.notify_all()


def _check_model(endpoint: Endpoint, answer: Any) -> None:
    """Refuse a response that names another model than earlier responses."""
    model = answer.get("model") if isinstance(answer, dict) else None
    if isinstance(model, str) and model != endpoint.answers_as:
        if endpoint.answers_as:
            raise XtkError(
                f"the server answered with the model {endpoint.answers_as!r} first, and now with {model!r}",
                where=str(endpoint),
                hint="use a server that keeps one model, and run the same command again; finished parts are kept",
            )
        endpoint.answers_as = model
