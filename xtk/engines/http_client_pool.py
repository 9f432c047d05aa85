"""HTTP client for several equivalent servers: concurrent requests, retries, failover.

Requests and the parsing of responses are defined by callers (`xtk.teachers.vllm_server_client`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import httpx

from xtk import terminal
from xtk.engines.server_responses import VLLM_SERVER_HINT, PermanentError, RetryableError, error_message, parse_response
from xtk.errors import XtkError

API_KEY_VARIABLES = ("XTK_API_KEY", "OPENAI_API_KEY")  # the environment variables that may hold a key
MIN_SECRET_LENGTH = 16  # a shorter secret may be a word of a response: it is removed only after the name of its scheme
AUTH_SCHEMES = ("Bearer", "Basic")
# A server or a gateway before it is busy or being restarted (520 to 530: gateways of Cloudflare and others).
BUSY_STATUS_CODES = frozenset({408, 425, 429, 502, 503, 504, *range(520, 531)})
MAX_MESSAGE_LENGTH = 500  # characters of an error message of a server
REPORT_INTERVAL_SECONDS = 30.0
T = TypeVar("T")


class NoResponseError(XtkError):
    """A server gave no valid response in all attempts."""


class _UnavailableError(RetryableError):
    """The server is unreachable or busy. `retry_after`: seconds; `is_internal`: the server has an internal error."""

    def __init__(self, what: str, retry_after: float = 0.0, *, is_internal: bool = False) -> None:
        super().__init__(what)
        self.retry_after, self.is_internal = retry_after, is_internal


@dataclass(frozen=True)
class RetryPolicy:
    """Limits and pauses of retries. Times are in seconds."""

    max_attempts: int = 20  # per request, over all servers
    max_bad_responses: int = 3  # invalid responses per request
    max_internal_errors: int = 5  # HTTP 500 and similar errors per request, which often do not go away
    total_seconds: float = 1200.0  # per request, including all attempts and pauses
    attempt_seconds: float = 600.0  # per attempt, from the connection to the last byte
    status_seconds: float = 60.0  # the same for a request without a body (models, version of weights), which is cheap
    connect_seconds: float = 10.0  # until a server accepts a connection
    initial_backoff: float = 0.5  # before the second attempt; it doubles with each failure
    max_backoff: float = 30.0
    max_retry_after: float = 300.0  # longest pause that a server can request

    def backoff(self, failures: int) -> float:
        """Return a pause in seconds after consecutive failures, with jitter to spread requests that failed together."""
        longest = min(self.max_backoff, self.initial_backoff * 2 ** min(max(0, failures - 1), 30))
        return random.uniform(longest / 2, longest)


@dataclass
class Endpoint:
    """A server, and its current state. Times are those of the event loop's clock."""

    url: str  # up to and including `/v1`
    requested_model: str = ""  # the text after `#` in the user's address
    model: str = ""  # the server's name of the model, once known
    owner: str = ""  # the kind of server that its list of models states, such as "vllm" or "sglang"
    num_inflight: int = 0
    consecutive_failures: int = 0  # since the last response
    backoff_until: float = field(default=0.0, repr=False)
    may_have_restarted: bool = field(default=False, repr=False)  # it failed since its state was last checked
    waiting_since: float | None = field(default=None, repr=False)  # last response, or first request; None: none pending
    last_report_time: float = field(default=-math.inf, repr=False)
    answers_as: str = field(default="", repr=False)  # the model named in its responses

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
    def secrets(self) -> list[str]:
        """The password in the address, and the header that is made of it; empty: there is none."""
        parts = urlsplit(self.url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return [password, b64encode(f"{user}:{password}".encode()).decode()] if password else []

    @property
    def root_url(self) -> str:
        """The address without `/v1`."""
        return self.url.removesuffix("/v1")

    def __str__(self) -> str:
        """Return the address without a password."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class EndpointPool:
    """Equivalent servers that share requests. Use inside `async with connected()`, in one event loop."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        concurrency: int,  # largest number of requests in flight
        retry_policy: RetryPolicy,
        # awaited before the first request to a server that had failed and may have been restarted; NoResponseError: it
        # failed again
        on_recovered: Callable[[Endpoint], Awaitable[None]] | None = None,
        # environment variable with the key; "": the first of `API_KEY_VARIABLES` that is set
        api_key_variable: str = "",
        response_hint: str = VLLM_SERVER_HINT,  # the next step if responses are not valid
    ) -> None:
        self.endpoints, self._concurrency, self._retry_policy = list(endpoints), concurrency, retry_policy
        self._on_recovered, self._response_hint = on_recovered, response_hint
        self._key_variables = (api_key_variable,) if api_key_variable else API_KEY_VARIABLES

    @asynccontextmanager
    async def connected(self, max_concurrency: int | None = None) -> AsyncIterator[None]:
        """Keep HTTP connections open within the context; `max_concurrency`: fewer in flight, for large responses."""
        key = _read_key(self._key_variables)
        self._secrets = _forms_of_secrets(
            [key, *(secret for endpoint in self.endpoints for secret in endpoint.secrets)]
        )
        concurrency = min(self._concurrency, max_concurrency or self._concurrency)
        self._inflight_limit = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        # The timeout of an attempt is measured around it: a server that sends a byte now and then hangs as well.
        timeout = httpx.Timeout(None, connect=self._retry_policy.connect_seconds)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as self._client:
            for endpoint in self.endpoints:
                endpoint.num_inflight, endpoint.consecutive_failures, endpoint.backoff_until = 0, 0, 0.0
                endpoint.waiting_since = None
            watch = asyncio.create_task(self._report_silence())
            try:
                yield
            finally:
                watch.cancel()

    async def _report_silence(self) -> None:
        """Print a line for each server without a response for `REPORT_INTERVAL_SECONDS`, and again at this interval."""
        while True:
            await asyncio.sleep(min(1.0, REPORT_INTERVAL_SECONDS / 4))
            for endpoint in self.endpoints:
                silent = _now() - (_now() if endpoint.waiting_since is None else endpoint.waiting_since)
                if silent >= REPORT_INTERVAL_SECONDS:
                    pending = f"{endpoint.num_inflight} request(s) pending"
                    state = "retrying" if endpoint.consecutive_failures else pending
                    self._report(endpoint, f"no response for {terminal.format_duration(silent)}; {state}")

    def _report(self, endpoint: Endpoint, why: str) -> None:
        """Print a line about a server, at most once per `REPORT_INTERVAL_SECONDS`."""
        if _now() - endpoint.last_report_time >= REPORT_INTERVAL_SECONDS:
            endpoint.last_report_time = _now()
            terminal.note(f"{endpoint}: {why}")

    async def request_one(
        self,
        endpoint: Endpoint,
        path: str,  # path after `/v1`; `at_root`: after the address without `/v1`
        body: dict[str, Any] | None,
        parse: Callable[[Any], T],  # converts the response's JSON, or raises RetryableError
        *,
        max_attempts: int,
        at_root: bool = False,
    ) -> T:
        """Return the response of this server, or raise PermanentError or NoResponseError; without body: GET."""
        for attempt in range(1, max_attempts + 1):
            try:
                return await self._attempt(endpoint, path, body, parse, at_root)
            except RetryableError as failure:
                if attempt == max_attempts:
                    raise NoResponseError(
                        f"no valid response from the server: {failure}",
                        where=str(endpoint),
                        hint=failure.hint or self._response_hint,
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
        at_root: bool = False,
    ) -> T:
        """Return the parsed response of the least busy server; on failure retry on others within the retry policy.

        Args:
            path, parse, at_root: as in `request_one`.
            body_for: returns the JSON body for a server.
            what: subject of the request, for errors.

        Raises:
            PermanentError: a server refuses the request.
        """
        policy = self._retry_policy
        async with self._inflight_limit:
            end = _now() + policy.total_seconds
            last, hint, attempts, bad, internal = "", None, 0, 0, 0
            failed: Endpoint | None = None
            while (
                attempts < policy.max_attempts
                and bad < policy.max_bad_responses
                and internal < policy.max_internal_errors
                and _now() < end
            ):
                endpoint = self._freest(failed)
                await asyncio.sleep(max(0.0, min(endpoint.backoff_until, end) - _now()))
                attempts += 1
                try:
                    if endpoint.may_have_restarted and self._on_recovered is not None:
                        await self._on_recovered(endpoint)
                    endpoint.may_have_restarted = False
                    return await self._attempt(endpoint, path, body_for(endpoint), parse, at_root)
                except (RetryableError, NoResponseError) as failure:
                    failed, hint = endpoint, failure.hint
                    last = f"{endpoint}: {failure.what if isinstance(failure, NoResponseError) else failure}"
                    if isinstance(failure, _UnavailableError):
                        internal += failure.is_internal
                    elif isinstance(failure, RetryableError):
                        bad, hint = bad + 1, hint or self._response_hint
            raise XtkError(
                f"no server gave a valid response in {attempts} attempts; last error: {last}",
                where=what,
                hint=hint or "check the server or service, then run the same command again; finished parts are kept",
            )

    def _freest(self, failed: Endpoint | None) -> Endpoint:
        """Return the server with the shortest backoff; on ties not `failed`, then the one with fewest requests.

        A server that failed last time gets one request at a time if there is another server.
        """
        return min(
            self.endpoints,
            key=lambda one: (
                max(0.0, one.backoff_until - _now()),
                one is failed,
                one.consecutive_failures > 0 and one.num_inflight > 0,
                one.num_inflight,
            ),
        )

    async def _attempt(
        self, endpoint: Endpoint, path: str, body: dict[str, Any] | None, parse: Callable[[Any], T], at_root: bool
    ) -> T:
        policy = self._retry_policy
        seconds = policy.attempt_seconds
        if body is None:
            seconds = min(policy.status_seconds, seconds)
        endpoint.num_inflight += 1
        if endpoint.waiting_since is None:
            endpoint.waiting_since = _now()
        try:
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._exchange((endpoint.root_url if at_root else endpoint.url) + path, body)
            except TimeoutError:
                raise _UnavailableError(f"no response within {seconds:g} seconds") from None
            finally:
                endpoint.num_inflight -= 1
            self._count_response(endpoint)
            if body is not None:
                _check_model(endpoint, answer)
            return parse(answer)
        except RetryableError as failure:
            self._report(endpoint, f"{failure}; retrying")
            if isinstance(failure, _UnavailableError):
                self._back_off(endpoint, failure.retry_after)
            raise

    async def _exchange(self, url: str, body: dict[str, Any] | None) -> Any:
        """Return the JSON value of a response. All texts of servers pass here, and have no key afterwards.

        Raises:
            RetryableError: the response is not valid, or the server is unreachable or busy.
            PermanentError: the server refuses the request.
        """
        try:
            response = await self._client.request("GET" if body is None else "POST", url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise _UnavailableError(self._message(f"{type(failure).__name__} {failure}".strip())) from None
        if response.status_code == 200:
            try:
                return parse_response(self._without_secrets(response.content.decode("utf-8-sig", "surrogatepass")))
            except ValueError as failure:
                raise RetryableError(self._message(f"the server's response is not valid JSON: {failure}")) from None
        message = self._message(error_message(response))
        if response.status_code >= 500 or response.status_code in BUSY_STATUS_CODES:
            raise _UnavailableError(
                f"HTTP {response.status_code} {message}",
                _retry_after(response.headers.get("retry-after", "")),
                is_internal=response.status_code not in BUSY_STATUS_CODES,
            )
        raise PermanentError(response.status_code, message)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _message(self, text: str) -> str:
        return self._without_secrets(text)[:MAX_MESSAGE_LENGTH]

    def _count_response(self, endpoint: Endpoint) -> None:
        since = _now() if endpoint.waiting_since is None else endpoint.waiting_since
        if endpoint.last_report_time >= since:
            terminal.note(f"{endpoint}: responding again after {terminal.format_duration(_now() - since)}")
        endpoint.consecutive_failures = 0
        endpoint.waiting_since = _now() if endpoint.num_inflight else None

    def _back_off(self, endpoint: Endpoint, retry_after: float) -> None:
        endpoint.may_have_restarted = True
        if _now() >= endpoint.backoff_until:  # else it failed together with others, which count as one failure
            endpoint.consecutive_failures += 1
            endpoint.backoff_until = _now() + self._retry_policy.backoff(endpoint.consecutive_failures)
        pause = min(retry_after, self._retry_policy.max_retry_after)
        endpoint.backoff_until = max(endpoint.backoff_until, _now() + pause)


def _now() -> float:
    return asyncio.get_running_loop().time()


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


def _forms_of_secrets(secrets: Sequence[str]) -> list[str]:
    """Return keys and passwords as they are, and escaped as in JSON, JSON in JSON, and URLs; the longest first."""
    texts = [secret for secret in secrets if len(secret) >= MIN_SECRET_LENGTH]
    texts += [
        f"{scheme} {secret}" for secret in secrets if 0 < len(secret) < MIN_SECRET_LENGTH for scheme in AUTH_SCHEMES
    ]
    forms = {text.replace("/", slash) for text in texts for slash in ("/", r"\/", r"\\/")}
    forms |= {form for text in texts for form in (json.dumps(text)[1:-1], quote(text, ""))}
    return sorted(forms, key=len, reverse=True)


def _retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0: there is none, or no valid one."""
    with suppress(ValueError, TypeError, OverflowError):
        seconds = float(header)
        return seconds if 0 < seconds < math.inf else 0.0
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return 0.0


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
