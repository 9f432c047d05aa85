"""Several HTTP servers that answer the same questions: many requests at once, retries, failover.

What a question means, and whether an answer is one, is said elsewhere (`xtk.teachers.server`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from xtk.errors import XtkError

KEYS = ("XTK_API_KEY", "OPENAI_API_KEY")  # the environment variables that may hold a key
BUSY = frozenset({408, 425, 429})
T = TypeVar("T")


class BadAnswer(Exception):
    """An answer that is none: asked again, it may be better."""


class Refused(Exception):
    """An answer that will not change, however often the question is asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


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
        connect: seconds until a server takes a connection.
        first_pause: seconds before the second attempt; twice as long before the third, and so on.
        longest_pause: the end of that.
    """

    attempts: int = 20
    bad_answers: int = 3
    seconds: float = 1200.0
    answer: float = 600.0
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
    """

    url: str
    wanted_model: str = ""
    model: str = ""
    running: int = 0
    failures: int = 0
    rests_until: float = field(default=0.0, repr=False)

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
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, concurrency: int, weight: float, patience: Patience) -> None:
        self.endpoints = list(endpoints)
        self._concurrency, self._weight, self._patience = concurrency, weight, patience

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Hold connections open, and close them."""
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        # The seconds of a whole attempt are counted around it: a server that sends a byte now and then hangs as well.
        timeout = httpx.Timeout(None, connect=self._patience.connect)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as self._client:
            self._gate = _Gate(self._concurrency, self._weight)
            for endpoint in self.endpoints:
                endpoint.running, endpoint.failures, endpoint.rests_until = 0, 0, 0.0
            yield

    async def ask_one(
        self, endpoint: Endpoint, path: str, question: dict[str, Any] | None, read: Callable[[Any], T], *, attempts: int
    ) -> T:
        """Ask this server and no other: GET without a question, POST with one.

        Raises:
            Refused: what it says to that.
            XtkError: it does not answer.
        """
        for attempt in range(1, attempts + 1):
            try:
                return await self._attempt(endpoint, path, question, read)
            except (BadAnswer, _NoAnswer) as wrong:
                if attempt == attempts:
                    raise XtkError(f"this server gives no answer: {wrong}", where=str(endpoint)) from None
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
    ) -> T:
        """Ask whichever server is free, and another one if it fails, until one answers or patience ends.

        Args:
            path: behind `/v1`.
            question: the body, for a server.
            read: makes something of the JSON that comes, or raises BadAnswer.
            what: the question is about, for errors.
            weight: of the request.

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
                    return await self._attempt(endpoint, path, question(endpoint), read)
                except (BadAnswer, _NoAnswer) as wrong:
                    failed, last = endpoint, f"{endpoint}: {wrong}"
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
        self, endpoint: Endpoint, path: str, question: dict[str, Any] | None, read: Callable[[Any], T]
    ) -> T:
        endpoint.running += 1
        try:
            async with asyncio.timeout(self._patience.answer):
                raw = await self._once(endpoint, path, question)
        except TimeoutError:
            self._rest(endpoint, 0.0)
            raise _NoAnswer(f"no answer within {self._patience.answer:g} seconds") from None
        except httpx.HTTPError as wrong:
            self._rest(endpoint, 0.0)
            raise _NoAnswer(f"{type(wrong).__name__} {wrong}".strip()) from None
        except _NoAnswer as wrong:
            self._rest(endpoint, wrong.pause)
            raise
        finally:
            endpoint.running -= 1
        endpoint.failures = 0
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError) as wrong:
            raise BadAnswer(f"an answer that is no JSON: {wrong}") from None
        return read(answer)

    async def _once(self, endpoint: Endpoint, path: str, question: dict[str, Any] | None) -> bytes:
        if question is None:
            answer = await self._client.get(endpoint.url + path)
        else:
            answer = await self._client.post(endpoint.url + path, json=question)
        if answer.status_code == 200:
            return answer.content
        message = _message(answer)
        if answer.status_code >= 500 or answer.status_code in BUSY:
            asked = answer.headers.get("retry-after", "")
            raise _NoAnswer(f"{answer.status_code} {message}", float(asked) if asked.isdecimal() else 0.0)
        raise Refused(answer.status_code, message)

    def _rest(self, endpoint: Endpoint, asked: float) -> None:
        now = asyncio.get_running_loop().time()
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


def _message(answer: httpx.Response) -> str:
    """Return what a server says about an error, in a line."""
    try:
        content = answer.json()
        error = content.get("error", content)
        text = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text or answer.reason_phrase).split())[:500]
