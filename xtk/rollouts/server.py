"""A student behind HTTP servers of vLLM, which writes there: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xtk import terminal
from xtk.engines.answers import id_numbers, logprobs, token_ids
from xtk.engines.endpoints import BadAnswer, Endpoint, Endpoints, NoAnswer, Patience, Refused, most_bytes
from xtk.engines.servers import (
    ATTEMPTS_AT_FIRST,
    COMPLETIONS,
    TOKENS_AT_MOST,
    chosen_model,
    compare_tokens,
    first_of,
    models_of,
    probe_of,
    refused,
    run,
)
from xtk.errors import XtkError
from xtk.rollouts.completions import BIASES, completion_of, length_of, refuse_hotter, seed_of, told_ids
from xtk.rollouts.weights import Names
from xtk.rollouts.writer import Ask, Completion, Sampling, WriterRequest

CONCURRENCY = 128
NEVER = -100.0  # the lowest that the API takes
NAMED = "token_id:"
LOSSES_AT_MOST = 5  # of its weights, by a server, while it is asked for one completion


class ServerWriter:
    """Writes through servers of vLLM, many requests at a time.

    Args:
        request: its folder needs the tokenizer and the configuration. Of its options `servers` are addresses
            (`http://host:8000/v1`, with `#model` behind it where a server has several), `concurrency` is how many
            requests are in flight on all of them together, `patience` how long they are waited for.

    Raises:
        XtkError: a server does not answer, or has another tokenizer.
    """

    def __init__(self, request: WriterRequest) -> None:
        servers = [Endpoint.of(text) for text in request.options.get("servers") or ()]
        if not servers:
            raise XtkError("--backend server needs the address of a server", hint="--server http://localhost:8000/v1")
        self._name, self._tokenizer = request.name, request.tokenizer
        self._names = Names.of(request.folder)
        self._endpoints = Endpoints(
            servers,
            concurrency=request.options.get("concurrency") or CONCURRENCY,
            weight=float("inf"),
            patience=request.options.get("patience") or Patience(),
            restore=self._restore,
        )
        self._sent: Path | None = None
        self._version = ""
        self._locks: dict[str, asyncio.Lock] = {}
        self._sends = dict.fromkeys((one.url for one in servers), 0)  # how often each was sent weights
        self._attempts = (request.options.get("patience") or Patience()).attempts
        padding = range(len(self._tokenizer), self._tokenizer.width)
        self._never = {str(token): NEVER for token in padding} if 0 < len(padding) <= BIASES else None
        self._context = run(self._look_at_servers())

    @classmethod
    def open(cls, request: WriterRequest) -> Self:
        """Reach the servers, as the class says."""
        return cls(request)

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and completion together: the shortest of the servers; None: they do not say."""
        return self._context

    def write(self, asks: Sequence[Ask], sampling: Sampling) -> list[Completion]:
        """Return a completion of each, in order.

        Raises:
            XtkError: a prompt leaves no room, or no server answers, or one refuses.
        """
        refuse_hotter(sampling)
        return run(self._write_all(asks, sampling))

    def update(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Have each server take new weights, and forget what it kept of the old ones.

        Args:
            weights: a folder that the servers see under the same name. It has to stay until the next one is sent: a
                server that is restarted meanwhile begins with its old weights, and gets these again.

        Raises:
            XtkError: these are no folder, or a server does not take them. Then others may have.
        """
        if not isinstance(weights, str | Path):
            raise XtkError(
                "a server takes new weights from a folder",
                where=self._name,
                hint="one that it sees under the same name",
            )
        folder = Path(weights).resolve()
        self._names.check(Names.of(folder), str(folder))
        self._sent, self._version = folder, f"xtk-{secrets.token_hex(8)}"
        run(self._update_all())

    def rest(self) -> None:
        """Do nothing: servers have devices of their own."""

    def wake(self) -> None:
        """Go on."""

    async def _look_at_servers(self) -> int | None:
        """Ask each server for its model, and whether its tokens are ours; return the shortest context."""
        limits = []
        async with self._endpoints.opened():
            for endpoint in self._endpoints.endpoints:
                try:
                    models = await self._endpoints.ask_one(
                        endpoint, "/models", None, models_of, attempts=ATTEMPTS_AT_FIRST
                    )
                    model = chosen_model(models, endpoint, self._name)
                    endpoint.model = model["id"]
                    limits.append(model.get("max_model_len"))
                    # Of another tokenizer it may be many more tokens.
                    limit = limits[-1] and limits[-1] // 4
                    await self._compare_tokens(probe_of(self._tokenizer, limit), endpoint)
                except Refused as wrong:
                    raise refused(wrong, str(endpoint), None) from None
        known = [limit for limit in limits if isinstance(limit, int)]
        return min(known) if known else None

    async def _compare_tokens(self, probe: str, endpoint: Endpoint) -> None:
        (ours,) = self._tokenizer.encode([probe])
        question = {
            "model": endpoint.model,
            "prompt": probe,
            "add_special_tokens": False,
            "return_token_ids": True,
            "max_tokens": 1,
        }
        most = most_bytes(0, TOKENS_AT_MOST * len(ours.ids))
        choice = await self._endpoints.ask_one(
            endpoint, COMPLETIONS, question, _choice, attempts=ATTEMPTS_AT_FIRST, most=most
        )
        theirs = choice.get("prompt_token_ids")
        if not isinstance(theirs, list) or not isinstance(choice.get("token_ids"), list):
            raise XtkError(
                "this server does not tell token ids, without which nothing can be trained from what it writes",
                where=str(endpoint),
                hint="vLLM 0.11 or newer",
            )
        if theirs != ours.ids.tolist():
            compare_tokens(ours.ids.tolist(), theirs, self._tokenizer, endpoint, "rollout")

    async def _write_all(self, asks: Sequence[Ask], sampling: Sampling) -> list[Completion]:
        self._locks = {}
        async with self._endpoints.opened():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._write(ask, sampling)) for ask in asks]
            except BaseExceptionGroup as several:
                raise first_of(several) from None
        return [task.result() for task in tasks]

    async def _write(self, ask: Ask, sampling: Sampling) -> Completion:
        told = told_ids(sampling, self._tokenizer, self._tokenizer.width)
        question = self._question(ask, sampling, told)
        where = f"a prompt of {len(ask.ids):,} tokens, sent to {self._name}"
        asked: list[tuple[Endpoint, int]] = []

        def question_for(endpoint: Endpoint) -> dict[str, Any]:
            asked.append((endpoint, self._sends[endpoint.url]))
            return {"model": endpoint.model, **question}

        try:
            for _ in range(LOSSES_AT_MOST):
                completion = await self._endpoints.ask(
                    COMPLETIONS,
                    question_for,
                    lambda answer: self._completion(answer, sampling, told),
                    what=where,
                    weight=0.0,
                    most=most_bytes(question["max_tokens"] * (told + 2), question["max_tokens"] + len(ask.ids)),
                )
                endpoint, sends = asked[-1]
                # Weights that were sent meanwhile came after a part of it, or all.
                if await self._kept_weights(endpoint) and sends == self._sends[endpoint.url]:
                    return completion
            raise XtkError(
                f"this server lost its weights {LOSSES_AT_MOST} times while it generated one completion",
                where=f"{asked[-1][0]}, {where}",
                hint="see its log: it is restarted again and again, or another run sends it weights",
            )
        except Refused as wrong:
            hint = None
            if "logprobs" in wrong.message:
                hint = f"start vLLM's server with --max-logprobs {told}, or ask for fewer: --given"
            raise refused(wrong, where, hint) from None

    def _question(self, ask: Ask, sampling: Sampling, told: int) -> dict[str, Any]:
        return {
            "prompt": ask.ids.tolist(),
            "max_tokens": length_of(ask, sampling, self._context, self._name),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed_of(ask.key),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": True,
            "ignore_eos": True,
            "stop_token_ids": sorted(self._tokenizer.end_ids),
            "logprobs": told,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({"logit_bias": self._never} if self._never else {}),
        }

    def _completion(self, answer: Any, sampling: Sampling, told: int) -> Completion:
        """Read an answer.

        Raises:
            BadAnswer: it is none.
        """
        choice = _choice(answer)
        try:
            ids = id_numbers(choice["token_ids"])
            values = logprobs(choice["logprobs"]["token_logprobs"])
            if len(values) != len(ids):
                raise BadAnswer("an answer with other log-probabilities than one for each token")
            tops = choice["logprobs"]["top_logprobs"] if told else []
            likeliest = np.array([_likeliest(top, token, told) for top, token in zip(tops, ids, strict=bool(told))])
            return completion_of(
                ids,
                values,
                likeliest.astype(np.int32).reshape(-1, told) if told else np.zeros((len(ids), 0), np.int32),
                isinstance(choice.get("stop_reason"), str),
                sampling,
                self._tokenizer,
            )
        except (TypeError, ValueError, KeyError, OverflowError) as wrong:
            raise BadAnswer(f"an answer that cannot be read: {wrong!r}"[:500]) from None

    async def _update_all(self) -> None:
        async with self._endpoints.opened():
            for endpoint in self._endpoints.endpoints:
                # One that is being restarted is waited for, like everywhere.
                await self._endpoints.ask_one(endpoint, "/models", None, models_of, attempts=self._attempts)
                try:
                    await self._send(endpoint)
                except NoAnswer as wrong:
                    raise XtkError(
                        f"the server does not take these weights: {wrong.what}",
                        where=f"{endpoint}, {self._sent}",
                        hint="check in its log whether it can read this folder",
                    ) from None

    async def _has_weights(self, endpoint: Endpoint) -> bool:
        """Return whether a server holds the weights that were sent last; a restarted one has those of its start.

        Raises:
            NoAnswer: it fails.
            XtkError: it knows no version of its weights.
        """
        try:
            version = await self._endpoints.ask_one(
                endpoint, "/weight_info", None, _version_of, attempts=1, at_root=True
            )
        except Refused as wrong:
            raise _refused_weights(wrong, endpoint) from None
        return version == self._version

    async def _kept_weights(self, endpoint: Endpoint) -> bool:
        if self._sent is None:
            return True
        try:
            kept = await self._has_weights(endpoint)
        except NoAnswer:
            kept = False
        endpoint.lost |= not kept
        return kept

    async def _restore(self, endpoint: Endpoint) -> None:
        """Send the weights again if a server that had failed lost them.

        Raises:
            NoAnswer: it fails again.
            XtkError: it refuses them.
        """
        if self._sent is None:
            return
        async with self._locks.setdefault(endpoint.url, asyncio.Lock()):
            await self._endpoints.ask_one(endpoint, "/models", None, models_of, attempts=1)
            if not await self._has_weights(endpoint):
                await self._send(endpoint)
                terminal.note(f"{endpoint}: was restarted without the student's weights; sent them again")

    async def _send(self, endpoint: Endpoint) -> None:
        ask_one = self._endpoints.ask_one
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._sent)}}
        version = {"new_version": self._version}
        self._sends[endpoint.url] += 1
        try:
            await ask_one(endpoint, "/collective_rpc", reload, _done, attempts=1, at_root=True)
            await ask_one(endpoint, "/reset_prefix_cache", {}, _forgotten, attempts=3, at_root=True)
            await ask_one(endpoint, "/update_weight_version", version, _accepted, attempts=3, at_root=True)
        except Refused as wrong:
            raise _refused_weights(wrong, endpoint) from None


def _refused_weights(wrong: Refused, endpoint: Endpoint) -> XtkError:
    return XtkError(
        f"the server takes no new weights: {wrong.status} {wrong.message}",
        where=str(endpoint),
        hint="start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1, where only trusted machines reach it",
    )


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer("an answer without the one choice that was asked for")
    return choices[0]


def _likeliest(top: dict[str, float], own: int, count: int) -> list[int]:
    """Return the likeliest ids of a position, in order; the sampled token may be one more."""
    names = [name.removeprefix(NAMED) for name in top]
    known = dict(zip(token_ids(names).tolist(), logprobs(top.values()).tolist(), strict=True))
    if len(known) > count:
        del known[int(own)]
    if len(known) != count:
        raise BadAnswer(f"an answer with {len(known):,} likeliest tokens of {count:,}")
    return sorted(known, key=lambda token: -known[token])


def _done(answer: Any) -> None:
    if not isinstance(answer, dict) or "results" not in answer:
        raise BadAnswer("an answer that tells no results")


def _forgotten(answer: Any) -> None:
    if answer != {"success": True}:
        raise BadAnswer("its cache of prompts is in use, by whom xtk does not know")


def _accepted(answer: Any) -> None:
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise BadAnswer("it does not keep the version of its weights")


def _version_of(answer: Any) -> str:
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        raise BadAnswer("it does not report the version of its weights (weight_version)")
    return version
