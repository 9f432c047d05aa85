"""Several HTTP servers that answer the same questions: many requests at once, retries, failover.

What a question means, and whether an answer is one, is said elsewhere (`xtk.teachers.server`).
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

KEYS = ("XTK_API_KEY", "OPENAI_API_KEY")  # the environment variables that may hold a key
BUSY = frozenset({408, 425, 429})
SLACK = 1 << 20  # bytes of an answer beside what is counted: its frame, the list of models
MESSAGE = 1 << 16  # bytes of an error's text that are read
BYTES_OF_AN_ENTRY = 72  # of JSON, measured: "12345":{"logprob":-1.2345678,"rank":1,"decoded_token":" word"},
ROOM = 4  # times as many bytes may come: tokens differ in length
SECONDS_BETWEEN_LINES = 30.0
T = TypeVar("T")


class BadAnswer(Exception):
    """An answer that is none: asked again, it may be better."""


class Refused(Exception):
    """An answer that will not change, however often the question is asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class NoAnswer(XtkError):
    """A server did not answer, however often it was asked."""


class _NoAnswer(Exception):
    """Nobody is there, or too busy. `pause`: seconds for which the server asks to be left alone."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


@dataclass(frozen=True)
class Patience:
    """How long an answer is waited for.

    Attributes:
        attempts: at one question, on all servers together.
        bad_answers: of them, so many may end in an answer that is none.
        seconds: for one question, all attempts and pauses together.
        answer: seconds for one attempt, from the connection to the last byte.
        status: the same for a question without a body (which model, which weights), for which nothing is computed.
        connect: seconds until a server takes a connection.
        first_pause: seconds before the second attempt; twice as long before the third, and so on.
        longest_pause: the end of that.
    """

    attempts: int = 20
    bad_answers: int = 3
    seconds: float = 1200.0
    answer: float = 600.0
    status: float = 60.0
    connect: float = 10.0
    first_pause: float = 0.5
    longest_pause: float = 30.0

    def pause(self, failures: int) -> float:
        """Return a pause after so many failures in a row, drawn, so that requests that failed together part."""
        longest = min(self.longest_pause, self.first_pause * 2 ** min(max(0, failures - 1), 30))
        return random.uniform(longest / 2, longest)


@dataclass
class Endpoint:
    """A server, and how it is doing.

    Attributes:
        url: up to and with `/v1`.
        wanted_model: what stands behind `#` in what the user gave; "" if nothing does.
        model: as it calls the model, once it was asked.
        running: requests in flight.
        failures: in a row.
        rests_until: on the loop's clock.
        lost: whether it failed since it was last known to be as it should be: it may have been restarted.
        silent_since: on the loop's clock, when it answered last, or was asked first; None: nothing is waited for.
        reported_at: on the loop's clock, when a line about it was printed last.
        reported: whether a line was printed since it answered last.
        answers_as: the model that its answers name; "" before the first one that names any.
    """

    url: str
    wanted_model: str = ""
    model: str = ""
    running: int = 0
    failures: int = 0
    rests_until: float = field(default=0.0, repr=False)
    lost: bool = field(default=False, repr=False)
    silent_since: float | None = field(default=None, repr=False)
    reported_at: float = field(default=-math.inf, repr=False)
    answers_as: str = field(default="", repr=False)
    reported: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, text: str) -> Endpoint:
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
    def root(self) -> str:
        """The address without `/v1`."""
        return self.url.removesuffix("/v1")

    def __str__(self) -> str:
        """Return the address without a password."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Endpoints:
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
        weight: float,
        patience: Patience,
        restore: Callable[[Endpoint], Awaitable[None]] | None = None,
    ) -> None:
        self.endpoints = list(endpoints)
        self._concurrency, self._weight, self._patience, self._restore = concurrency, weight, patience, restore

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Hold connections open, and close them."""
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        # The seconds of a whole attempt are counted around it: a server that sends a byte now and then hangs as well.
        timeout = httpx.Timeout(None, connect=self._patience.connect)
        # A compressed answer could be a thousand times larger than what comes: it is refused.
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as self._client:
            self._gate = _Gate(self._concurrency, self._weight)
            for endpoint in self.endpoints:
                endpoint.running, endpoint.failures, endpoint.rests_until = 0, 0, 0.0
                endpoint.silent_since = None
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
            await asyncio.sleep(min(1.0, SECONDS_BETWEEN_LINES / 4))
            now = asyncio.get_running_loop().time()
            for one in self.endpoints:
                since = one.silent_since
                if since is not None and now - since >= SECONDS_BETWEEN_LINES:
                    doing = "trying again" if one.failures else f"{one.running} request(s) wait"
                    self._report(one, f"no answer for {terminal.duration(now - since)}; {doing}")

    def _report(self, endpoint: Endpoint, why: str) -> None:
        """Print a line about a server, but no more than one every `SECONDS_BETWEEN_LINES`."""
        now = asyncio.get_running_loop().time()
        if now - endpoint.reported_at >= SECONDS_BETWEEN_LINES:
            endpoint.reported_at, endpoint.reported = now, True
            terminal.note(f"{endpoint}: {why}")

    async def ask_one(
        self,
        endpoint: Endpoint,
        path: str,
        question: dict[str, Any] | None,
        read: Callable[[Any], T],
        *,
        attempts: int,
        most: int = SLACK,
        at_root: bool = False,
    ) -> T:
        """Ask this server and no other: GET without a question, POST with one.

        Args:
            endpoint: the server.
            path: behind `/v1`.
            question: the body.
            read: as in `ask`.
            attempts: at most.
            most: bytes of an answer.
            at_root: whether the path is behind the address without `/v1`.

        Raises:
            Refused: what it says to that.
            NoAnswer: it does not answer.
        """
        url = (endpoint.root if at_root else endpoint.url) + path
        for attempt in range(1, attempts + 1):
            try:
                return await self._attempt(endpoint, url, question, read, most)
            except (BadAnswer, _NoAnswer) as wrong:
                if attempt == attempts:
                    raise NoAnswer(f"this server gives no answer: {wrong}", where=str(endpoint)) from None
                await asyncio.sleep(self._patience.pause(attempt))
        raise AssertionError("at least one attempt")

    async def ask(
        self,
        path: str,
        question: Callable[[Endpoint], dict[str, Any]],
        read: Callable[[Any], T],
        *,
        what: str,
        weight: float,
        most: int,
    ) -> T:
        """Ask whichever server is free, and another one if it fails, until one answers or patience ends.

        Args:
            path: behind `/v1`.
            question: the body, for a server.
            read: makes something of the JSON that comes, or raises BadAnswer.
            what: the question is about, for errors.
            weight: of the request.
            most: bytes of an answer.

        Raises:
            Refused: what a server says to that.
            XtkError: none answers.
        """
        async with self._gate.passed(weight):
            loop = asyncio.get_running_loop()
            end = loop.time() + self._patience.seconds
            last, attempts, bad = "", 0, 0
            failed: Endpoint | None = None
            while attempts < self._patience.attempts and bad < self._patience.bad_answers and loop.time() < end:
                endpoint = self._freest(failed)
                await asyncio.sleep(max(0.0, min(endpoint.rests_until, end) - loop.time()))
                attempts += 1
                try:
                    if endpoint.lost and self._restore is not None:
                        await self._restore(endpoint)
                    endpoint.lost = False
                    return await self._attempt(endpoint, endpoint.url + path, question(endpoint), read, most)
                except (BadAnswer, _NoAnswer, NoAnswer) as wrong:
                    failed, last = endpoint, f"{endpoint}: {wrong.what if isinstance(wrong, NoAnswer) else wrong}"
                    bad += isinstance(wrong, BadAnswer)
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
                max(0.0, one.rests_until - now),
                one is failed,
                one.failures > 0 and one.running > 0,
                one.running,
            ),
        )

    async def _attempt(
        self, endpoint: Endpoint, url: str, question: dict[str, Any] | None, read: Callable[[Any], T], most: int
    ) -> T:
        now = asyncio.get_running_loop().time
        longest = self._patience.answer if question is not None else min(self._patience.status, self._patience.answer)
        endpoint.running += 1
        if endpoint.silent_since is None:
            endpoint.silent_since = now()
        try:
            async with asyncio.timeout(longest):
                raw = await self._once(url, question, most)
        except TimeoutError:
            why = f"no answer within {longest:g} seconds"
            self._rest(endpoint, 0.0, why)
            raise _NoAnswer(why) from None
        except (httpx.HTTPError, httpx.InvalidURL) as wrong:
            why = f"{type(wrong).__name__} {wrong}".strip()
            self._rest(endpoint, 0.0, why)
            raise _NoAnswer(why) from None
        except _NoAnswer as wrong:
            self._rest(endpoint, wrong.pause, str(wrong))
            raise
        except BadAnswer as wrong:
            self._report(endpoint, f"{wrong}; trying again")
            raise
        finally:
            endpoint.running -= 1
        if endpoint.reported:
            silent = now() - (endpoint.silent_since or now())
            terminal.note(f"{endpoint}: answers again, after {terminal.duration(silent)}")
        endpoint.failures, endpoint.reported = 0, False
        endpoint.silent_since = now() if endpoint.running else None
        try:
            answer = read_answer(raw)
            if question is not None:
                _check_model(endpoint, answer)
            return read(answer)
        except BadAnswer as wrong:
            self._report(endpoint, f"{wrong}; trying again")
            raise

    async def _once(self, url: str, question: dict[str, Any] | None, most: int) -> bytes:
        method = "GET" if question is None else "POST"
        async with self._client.stream(method, url, json=question) as answer:
            if answer.status_code == 200:
                packed = answer.headers.get("content-encoding", "identity")
                if packed != "identity":
                    raise BadAnswer(f"an answer compressed by {packed}, which was not asked for")
                raw, is_whole = await _body(answer, most)
                if not is_whole:
                    raise BadAnswer(f"an answer of more than {most:,} bytes, the most that this request can have")
                return raw
            message = _message(answer, (await _body(answer, MESSAGE))[0])
            if answer.status_code >= 500 or answer.status_code in BUSY:
                asked = answer.headers.get("retry-after", "")
                pause = float(asked) if asked.isascii() and asked.isdecimal() else 0.0
                raise _NoAnswer(f"{answer.status_code} {message}", pause)
            raise Refused(answer.status_code, message)

    def _rest(self, endpoint: Endpoint, asked: float, why: str) -> None:
        now = asyncio.get_running_loop().time()
        endpoint.lost = True
        self._report(endpoint, f"{why}; trying again")
        if now >= endpoint.rests_until:  # else this one failed together with others, and is one failure with them
            endpoint.failures += 1
            endpoint.rests_until = now + self._patience.pause(endpoint.failures)
        endpoint.rests_until = max(endpoint.rests_until, now + min(asked, self._patience.longest_pause))


class _Gate:
    """Lets so many through at once, and so much weight; one that is too heavy goes alone."""

    def __init__(self, places: int, weight: float) -> None:
        self._places, self._weight = places, weight
        self._inside, self._held = 0, 0.0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def passed(self, weight: float) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: not self._inside or (self._inside < self._places and self._held + weight <= self._weight)
            )
            self._inside += 1
            self._held += weight
        try:
            yield
        finally:
            self._inside -= 1
            self._held -= weight
            async with self._changed:
                self._changed.notify_all()


def most_bytes(entries: int, tokens: int = 0) -> int:
    """Return how many bytes an answer may have.

    Args:
        entries: log-probabilities that are asked for.
        tokens: whose ids, and text, come back beside them.
    """
    return SLACK + ROOM * BYTES_OF_AN_ENTRY * (entries + tokens)


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


def read_answer(raw: bytes) -> Any:
    """Read JSON that a server sent.

    Raises:
        BadAnswer: it is none, names a key twice, or holds a number that JSON has not (NaN, Infinity).
    """
    try:
        return json.loads(raw, object_pairs_hook=_once_each, parse_constant=_no_number)
    except (ValueError, RecursionError) as wrong:
        raise BadAnswer(f"an answer that is no JSON: {wrong}"[:500]) from None


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


def _message(answer: httpx.Response, raw: bytes) -> str:
    """Return what a server says about an error, in a line."""
    if answer.is_redirect:
        return (
            f"{answer.reason_phrase}, to {answer.headers.get('location', 'nowhere')[:200]}; redirects are not followed"
        )
    try:
        content = read_answer(raw)
        error = content.get("error", content)
        text = error.get("message") if isinstance(error, dict) else str(error)
    except (BadAnswer, AttributeError):
        text = raw.decode(errors="replace")
    return " ".join(str(text or answer.reason_phrase).split())[:500]
