"""Several HTTP servers that answer the same questions: many requests at once, retries, failover.

What a question means, and whether an answer is one, is said elsewhere (`xtk.teachers.vllm_server_client`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from xtk import terminal
from xtk.errors import XtkError

API_KEY_VARIABLES = ("XTK_API_KEY", "OPENAI_API_KEY")  # the environment variables that may hold a key
BUSY_STATUS_CODES = frozenset({408, 425, 429})
RESPONSE_OVERHEAD_BYTES = 1 << 20  # bytes of an answer beside what is counted: its frame, the list of models
MAX_ERROR_BYTES = 1 << 16  # bytes of an error's text that are read
BYTES_PER_ENTRY = 72  # of JSON, measured: "12345":{"logprob":-1.2345678,"rank":1,"decoded_token":" word"},
RESPONSE_SIZE_MARGIN = 4  # times as many bytes may come: tokens differ in length
REPORT_INTERVAL_SECONDS = 30.0
T = TypeVar("T")


class RetryableError(Exception):
    """An answer that is none: asked again, it may be better."""


class PermanentError(Exception):
    """An answer that will not change, however often the question is asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NoResponseError(XtkError):
    """A server did not answer, however often it was asked."""


class _NoAnswer(Exception):
    """Nobody is there, or too busy. `pause`: seconds for which the server asks to be left alone."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after = pause


@dataclass(frozen=True)
class RetryPolicy:
    """How long an answer is waited for.

    Attributes:
        max_attempts: at one question, on all servers together.
        max_bad_responses: of them, so many may end in an answer that is none.
        total_seconds: for one question, all attempts and pauses together.
        attempt_seconds: seconds for one attempt, from the connection to the last byte.
        status_seconds: the same for a question without a body (which model, which weights), for which nothing is
            computed.
        connect_seconds: seconds until a server takes a connection.
        initial_backoff: seconds before the second attempt; twice as long before the third, and so on.
        max_backoff: the end of that.
    """

    max_attempts: int = 20
    max_bad_responses: int = 3
    total_seconds: float = 1200.0
    attempt_seconds: float = 600.0
    status_seconds: float = 60.0
    connect_seconds: float = 10.0
    initial_backoff: float = 0.5
    max_backoff: float = 30.0

    def backoff(self, failures: int) -> float:
        """Return a pause after so many failures in a row, drawn, so that requests that failed together part."""
        longest = min(self.max_backoff, self.initial_backoff * 2 ** min(max(0, failures - 1), 30))
        return random.uniform(longest / 2, longest)


@dataclass
class Endpoint:
    """A server, and how it is doing.

    Attributes:
        url: up to and with `/v1`.
        requested_model: what stands behind `#` in what the user gave; "" if nothing does.
        model: as it calls the model, once it was asked.
        num_inflight: requests in flight.
        consecutive_failures: in a row.
        backoff_until: on the loop's clock.
        may_have_restarted: whether it failed since it was last known to be as it should be: it may have been restarted.
        waiting_since: on the loop's clock, when it answered last, or was asked first; None: nothing is waited for.
        last_report_time: on the loop's clock, when a line about it was printed last.
        has_reported: whether a line was printed since it answered last.
        answers_as: the model that its answers name; "" before the first one that names any.
    """

    url: str
    requested_model: str = ""
    model: str = ""
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
        """Read `http://host:port/v1`, or `http://host:port/v1#model`.

        Raises:
            XtkError: this is no such address.
        """
        try:
            parts = urlsplit(text.strip())
            right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        except ValueError:  # its port is no number
            right = False
        if not right:
            raise XtkError(f"--server {text!r} is no address of a server", hint="--server http://localhost:8000/v1")
        path = parts.path.rstrip("/") or "/v1"
        return cls(urlunsplit((parts.scheme, parts.netloc, path, "", "")), parts.fragment)

    @property
    def root_url(self) -> str:
        """The address without `/v1`."""
        return self.url.removesuffix("/v1")

    def __str__(self) -> str:
        """Return the address without a password."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class EndpointPool:
    """Servers that stand for each other. Used inside `async with opened()`, within one event loop.

    Args:
        endpoints: at least one.
        concurrency: requests in flight at most.
        weight: of all requests in flight together, at most; a heavier one flies alone.
        patience: with each of them.
        restore: called before a server that had failed is asked again, which may have been restarted; NoAnswer: it
            has failed again.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        concurrency: int,
        max_weight: float,
        retry_policy: RetryPolicy,
        on_recovered: Callable[[Endpoint], Awaitable[None]] | None = None,
    ) -> None:
        self.endpoints = list(endpoints)
        self._concurrency, self._weight, self._patience, self._on_recovered = (
            concurrency,
            max_weight,
            retry_policy,
            on_recovered,
        )

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Hold connections open, and close them."""
        key = next((os.environ[name] for name in API_KEY_VARIABLES if os.environ.get(name)), "")
        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        # The seconds of a whole attempt are counted around it: a server that sends a byte now and then hangs as well.
        timeout = httpx.Timeout(None, connect=self._patience.connect_seconds)
        # A compressed answer could be a thousand times larger than what comes: it is refused.
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as self._client:
            self._gate = _Gate(self._concurrency, self._weight)
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
        """Print a line for each server that has not answered for `SECONDS_BETWEEN_LINES`, and as often from then on."""
        while True:
            await asyncio.sleep(min(1.0, REPORT_INTERVAL_SECONDS / 4))
            now = asyncio.get_running_loop().time()
            for one in self.endpoints:
                since = one.waiting_since
                if since is not None and now - since >= REPORT_INTERVAL_SECONDS:
                    doing = "trying again" if one.consecutive_failures else f"{one.num_inflight} request(s) wait"
                    self._report(one, f"no answer for {terminal.format_duration(now - since)}; {doing}")

    def _report(self, endpoint: Endpoint, why: str) -> None:
        """Print a line about a server, but no more than one every `SECONDS_BETWEEN_LINES`."""
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
        """Ask this server and no other: GET without a question, POST with one.

        Args:
            endpoint: the server.
            path: behind `/v1`.
            body: the body.
            parse: as in `ask`.
            max_attempts: at most.
            max_bytes: bytes of an answer.
            at_root: whether the path is behind the address without `/v1`.

        Raises:
            Refused: what it says to that.
            NoAnswer: it does not answer.
        """
        url = (endpoint.root_url if at_root else endpoint.url) + path
        for attempt in range(1, max_attempts + 1):
            try:
                return await self._attempt(endpoint, url, body, parse, max_bytes)
            except (RetryableError, _NoAnswer) as wrong:
                if attempt == max_attempts:
                    raise NoResponseError(f"this server gives no answer: {wrong}", where=str(endpoint)) from None
                await asyncio.sleep(self._patience.backoff(attempt))
        raise AssertionError("at least one attempt")

    async def request(
        self,
        path: str,
        body_for: Callable[[Endpoint], dict[str, Any]],
        parse: Callable[[Any], T],
        *,
        what: str,
        weight: float,
        max_bytes: int,
    ) -> T:
        """Ask whichever server is free, and another one if it fails, until one answers or patience ends.

        Args:
            path: behind `/v1`.
            body_for: the body, for a server.
            parse: makes something of the JSON that comes, or raises BadAnswer.
            what: the question is about, for errors.
            weight: of the request.
            max_bytes: bytes of an answer.

        Raises:
            Refused: what a server says to that.
            XtkError: none answers.
        """
        async with self._gate.acquired(weight):
            loop = asyncio.get_running_loop()
            end = loop.time() + self._patience.total_seconds
            last, attempts, bad = "", 0, 0
            failed: Endpoint | None = None
            while (
                attempts < self._patience.max_attempts and bad < self._patience.max_bad_responses and loop.time() < end
            ):
                endpoint = self._freest(failed)
                await asyncio.sleep(max(0.0, min(endpoint.backoff_until, end) - loop.time()))
                attempts += 1
                try:
                    if endpoint.may_have_restarted and self._on_recovered is not None:
                        await self._on_recovered(endpoint)
                    endpoint.may_have_restarted = False
                    return await self._attempt(endpoint, endpoint.url + path, body_for(endpoint), parse, max_bytes)
                except (RetryableError, _NoAnswer, NoResponseError) as wrong:
                    failed, last = (
                        endpoint,
                        f"{endpoint}: {wrong.what if isinstance(wrong, NoResponseError) else wrong}",
                    )
                    bad += isinstance(wrong, RetryableError)
            raise XtkError(
                f"no answer after {attempts} attempts, the last one at {last}",
                where=what,
                hint="see what the server's log says; the same command goes on, finished shards are kept",
            )

    def _freest(self, failed: Endpoint | None) -> Endpoint:
        """Return the server that rests least; of those that do not, another one than failed, with the least to do.

        One that failed last time gets one request at a time, while there is another one.
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
        self, endpoint: Endpoint, url: str, question: dict[str, Any] | None, read: Callable[[Any], T], most: int
    ) -> T:
        now = asyncio.get_running_loop().time
        longest = (
            self._patience.attempt_seconds
            if question is not None
            else min(self._patience.status_seconds, self._patience.attempt_seconds)
        )
        endpoint.num_inflight += 1
        if endpoint.waiting_since is None:
            endpoint.waiting_since = now()
        try:
            async with asyncio.timeout(longest):
                raw = await self._once(url, question, most)
        except TimeoutError:
            why = f"no answer within {longest:g} seconds"
            self._back_off(endpoint, 0.0, why)
            raise _NoAnswer(why) from None
        except (httpx.HTTPError, httpx.InvalidURL) as wrong:
            why = f"{type(wrong).__name__} {wrong}".strip()
            self._back_off(endpoint, 0.0, why)
            raise _NoAnswer(why) from None
        except _NoAnswer as wrong:
            self._back_off(endpoint, wrong.retry_after, str(wrong))
            raise
        except RetryableError as wrong:
            self._report(endpoint, f"{wrong}; trying again")
            raise
        finally:
            endpoint.num_inflight -= 1
        if endpoint.has_reported:
            silent = now() - (endpoint.waiting_since or now())
            terminal.note(f"{endpoint}: answers again, after {terminal.format_duration(silent)}")
        endpoint.consecutive_failures, endpoint.has_reported = 0, False
        endpoint.waiting_since = now() if endpoint.num_inflight else None
        try:
            answer = parse_response(raw)
            if question is not None:
                _check_model(endpoint, answer)
            return read(answer)
        except RetryableError as wrong:
            self._report(endpoint, f"{wrong}; trying again")
            raise

    async def _once(self, url: str, question: dict[str, Any] | None, most: int) -> bytes:
        method = "GET" if question is None else "POST"
        async with self._client.stream(method, url, json=question) as answer:
            if answer.status_code == 200:
                packed = answer.headers.get("content-encoding", "identity")
                if packed != "identity":
                    raise RetryableError(f"an answer compressed by {packed}, which was not asked for")
                raw, is_whole = await _body(answer, most)
                if not is_whole:
                    raise RetryableError(f"an answer of more than {most:,} bytes, the most that this request can have")
                return raw
            message = _error_message(answer, (await _body(answer, MAX_ERROR_BYTES))[0])
            if answer.status_code >= 500 or answer.status_code in BUSY_STATUS_CODES:
                asked = answer.headers.get("retry-after", "")
                pause = float(asked) if asked.isascii() and asked.isdecimal() else 0.0
                raise _NoAnswer(f"{answer.status_code} {message}", pause)
            raise PermanentError(answer.status_code, message)

    def _back_off(self, endpoint: Endpoint, asked: float, why: str) -> None:
        now = asyncio.get_running_loop().time()
        endpoint.may_have_restarted = True
        self._report(endpoint, f"{why}; trying again")
        if now >= endpoint.backoff_until:  # else this one failed together with others, and is one failure with them
            endpoint.consecutive_failures += 1
            endpoint.backoff_until = now + self._patience.backoff(endpoint.consecutive_failures)
        endpoint.backoff_until = max(endpoint.backoff_until, now + min(asked, self._patience.max_backoff))


class _Gate:
    """Lets so many through at once, and so much weight; one that is too heavy goes alone."""

    def __init__(self, max_inflight: int, max_weight: float) -> None:
        self._max_inflight, self._weight = max_inflight, max_weight
        self._num_inflight, self._inflight_weight = 0, 0.0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def acquired(self, weight: float) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    not self._num_inflight
                    or (self._num_inflight < self._max_inflight and self._inflight_weight + weight <= self._weight)
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


def max_response_bytes(entries: int, tokens: int = 0) -> int:
    """Return how many bytes an answer may have.

    Args:
        entries: log-probabilities that are asked for.
        tokens: whose ids, and text, come back beside them.
    """
    return RESPONSE_OVERHEAD_BYTES + RESPONSE_SIZE_MARGIN * BYTES_PER_ENTRY * (entries + tokens)


def _check_model(endpoint: Endpoint, answer: Any) -> None:
    """Refuse an answer that names another model than those before it.

    Raises:
        XtkError: names both.
    """
    model = answer.get("model") if isinstance(answer, dict) else None
    if isinstance(model, str) and model != endpoint.answers_as:
        if endpoint.answers_as:
            raise XtkError(
                f"the answers of this server name the model {model!r} after {endpoint.answers_as!r}",
                where=str(endpoint),
                hint="an address that serves one model to the end; finished shards are kept",
            )
        endpoint.answers_as = model


def parse_response(raw: bytes) -> Any:
    """Read JSON that a server sent.

    Raises:
        BadAnswer: it is none, names a key twice, or holds a number that JSON has not (NaN, Infinity).
    """
    try:
        return json.loads(raw, object_pairs_hook=_once_each, parse_constant=_no_number)
    except (ValueError, RecursionError) as wrong:
        raise RetryableError(f"an answer that is no JSON: {wrong}"[:500]) from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("an object names a key twice")
    return content


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


async def _body(answer: httpx.Response, most: int) -> tuple[bytes, bool]:
    """Return the bytes of an answer as they come, at most so many, and whether these are all."""
    parts, size = [], 0
    async for part in answer.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > most:
            return b"".join(parts)[:most], False
    return b"".join(parts), True


def _error_message(answer: httpx.Response, raw: bytes) -> str:
    """Return what a server says about an error, in a line."""
    if answer.is_redirect:
        return (
            f"{answer.reason_phrase}, to {answer.headers.get('location', 'nowhere')[:200]}; redirects are not followed"
        )
    try:
        content = parse_response(raw)
        error = content.get("error", content)
        text = error.get("message") if isinstance(error, dict) else str(error)
    except (RetryableError, AttributeError):
        text = raw.decode(errors="replace")
    return " ".join(str(text or answer.reason_phrase).split())[:500]
