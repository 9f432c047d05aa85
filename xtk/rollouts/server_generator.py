"""A student behind HTTP servers of vLLM, which writes there: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xtk import terminal
from xtk.engines.http_endpoints import (
    Endpoint,
    EndpointPool,
    NoResponseError,
    PermanentError,
    RetryableError,
    RetryPolicy,
    max_response_bytes,
)
from xtk.engines.response_values import checked_logprobs, checked_token_ids, parse_token_ids
from xtk.engines.vllm_server import (
    COMPLETIONS_PATH,
    MAX_TOKEN_RATIO,
    STARTUP_ATTEMPTS,
    check_same_tokenizer,
    first_exception,
    parse_models,
    refusal_error,
    run_coroutine,
    select_model,
    tokenizer_probe,
)
from xtk.errors import XtkError
from xtk.rollouts.completion_checks import (
    MAX_LOGIT_BIASES,
    check_temperature,
    checked_completion,
    max_new_tokens,
    num_requested_top_ids,
    seed_from_key,
)
from xtk.rollouts.generator_interface import Completion, GenerationRequest, GeneratorConfig, SamplingConfig
from xtk.rollouts.weight_sync import WeightNames

DEFAULT_CONCURRENCY = 128
FORBIDDEN_BIAS = -100.0  # the lowest that the API takes
TOKEN_ID_PREFIX = "token_id:"
MAX_WEIGHT_LOSSES = 5  # of its weights, by a server, while it is asked for one completion


class ServerGenerator:
    """Writes through servers of vLLM, many requests at a time.

    Args:
        request: its folder needs the tokenizer and the configuration. Of its options `servers` are addresses
            (`http://host:8000/v1`, with `#model` behind it where a server has several), `concurrency` is how many
            requests are in flight on all of them together, `patience` how long they are waited for.

    Raises:
        XtkError: a server does not answer, or has another tokenizer.
    """

    def __init__(self, config: GeneratorConfig) -> None:
        servers = [Endpoint.parse(text) for text in config.options.get("servers") or ()]
        if not servers:
            raise XtkError("--backend server needs the address of a server", hint="--server http://localhost:8000/v1")
        self._name, self._tokenizer = config.name, config.tokenizer
        self._names = WeightNames.from_folder(config.folder)
        self._endpoints = EndpointPool(
            servers,
            concurrency=config.options.get("concurrency") or DEFAULT_CONCURRENCY,
            max_weight=float("inf"),
            retry_policy=config.options.get("patience") or RetryPolicy(),
            on_recovered=self._restore_weights,
        )
        self._sent: Path | None = None
        self._version = ""
        self._locks: dict[str, asyncio.Lock] = {}
        self._num_sends = dict.fromkeys((one.url for one in servers), 0)  # how often each was sent weights
        self._attempts = (config.options.get("patience") or RetryPolicy()).max_attempts
        padding = range(len(self._tokenizer), self._tokenizer.embedding_rows)
        self._padding_bias = (
            {str(token): FORBIDDEN_BIAS for token in padding} if 0 < len(padding) <= MAX_LOGIT_BIASES else None
        )
        self._context = run_coroutine(self._connect_servers())

    @classmethod
    def open(cls, config: GeneratorConfig) -> Self:
        """Reach the servers, as the class says."""
        return cls(config)

    @property
    def context_length(self) -> int | None:
        """The most tokens of prompt and completion together: the shortest of the servers; None: they do not say."""
        return self._context

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return a completion of each, in order.

        Raises:
            XtkError: a prompt leaves no room, or no server answers, or one refuses.
        """
        check_temperature(sampling)
        return run_coroutine(self._generate_all(requests, sampling))

    def update_weights(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
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
        self._names.check_complete(WeightNames.from_folder(folder), str(folder))
        self._sent, self._version = folder, f"xtk-{secrets.token_hex(8)}"
        run_coroutine(self._update_all())

    def sleep(self) -> None:
        """Do nothing: servers have devices of their own."""

    def wake_up(self) -> None:
        """Go on."""

    async def _connect_servers(self) -> int | None:
        """Ask each server for its model, and whether its tokens are ours; return the shortest context."""
        limits = []
        async with self._endpoints.connected():
            for endpoint in self._endpoints.endpoints:
                try:
                    models = await self._endpoints.request_one(
                        endpoint, "/models", None, parse_models, max_attempts=STARTUP_ATTEMPTS
                    )
                    model = select_model(models, endpoint, self._name)
                    endpoint.model = model["id"]
                    limits.append(model.get("max_model_len"))
                    # Of another tokenizer it may be many more tokens.
                    limit = limits[-1] and limits[-1] // 4
                    await self._compare_tokens(tokenizer_probe(self._tokenizer, limit), endpoint)
                except PermanentError as wrong:
                    raise refusal_error(wrong, str(endpoint), None) from None
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
        most = max_response_bytes(0, MAX_TOKEN_RATIO * len(ours.ids))
        choice = await self._endpoints.request_one(
            endpoint, COMPLETIONS_PATH, question, _only_choice, max_attempts=STARTUP_ATTEMPTS, max_bytes=most
        )
        theirs = choice.get("prompt_token_ids")
        if not isinstance(theirs, list) or not isinstance(choice.get("token_ids"), list):
            raise XtkError(
                "this server does not tell token ids, without which nothing can be trained from what it writes",
                where=str(endpoint),
                hint="vLLM 0.11 or newer",
            )
        if theirs != ours.ids.tolist():
            check_same_tokenizer(ours.ids.tolist(), theirs, self._tokenizer, endpoint, "rollout")

    async def _generate_all(self, asks: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        self._locks = {}
        async with self._endpoints.connected():
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._generate_one(ask, sampling)) for ask in asks]
            except BaseExceptionGroup as several:
                raise first_exception(several) from None
        return [task.result() for task in tasks]

    async def _generate_one(self, ask: GenerationRequest, sampling: SamplingConfig) -> Completion:
        told = num_requested_top_ids(sampling, self._tokenizer, self._tokenizer.embedding_rows)
        question = self._question(ask, sampling, told)
        where = f"a prompt of {len(ask.input_ids):,} tokens, sent to {self._name}"
        asked: list[tuple[Endpoint, int]] = []

        def question_for(endpoint: Endpoint) -> dict[str, Any]:
            asked.append((endpoint, self._num_sends[endpoint.url]))
            return {"model": endpoint.model, **question}

        try:
            for _ in range(MAX_WEIGHT_LOSSES):
                completion = await self._endpoints.request(
                    COMPLETIONS_PATH,
                    question_for,
                    lambda answer: self._completion(answer, sampling, told),
                    what=where,
                    weight=0.0,
                    max_bytes=max_response_bytes(
                        question["max_tokens"] * (told + 2), question["max_tokens"] + len(ask.input_ids)
                    ),
                )
                endpoint, sends = asked[-1]
                # Weights that were sent meanwhile came after a part of it, or all.
                if await self._kept_weights(endpoint) and sends == self._num_sends[endpoint.url]:
                    return completion
            raise XtkError(
                f"this server lost its weights {MAX_WEIGHT_LOSSES} times while it generated one completion",
                where=f"{asked[-1][0]}, {where}",
                hint="see its log: it is restarted again and again, or another run sends it weights",
            )
        except PermanentError as wrong:
            hint = None
            if "logprobs" in wrong.message:
                hint = f"start vLLM's server with --max-logprobs {told}, or ask for fewer: --top-logprobs"
            raise refusal_error(wrong, where, hint) from None

    def _question(self, ask: GenerationRequest, sampling: SamplingConfig, told: int) -> dict[str, Any]:
        return {
            "prompt": ask.input_ids.tolist(),
            "max_tokens": max_new_tokens(ask, sampling, self._context, self._name),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed_from_key(ask.seed_key),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": True,
            "ignore_eos": True,
            "stop_token_ids": sorted(self._tokenizer.end_ids),
            "logprobs": told,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({"logit_bias": self._padding_bias} if self._padding_bias else {}),
        }

    def _completion(self, answer: Any, sampling: SamplingConfig, told: int) -> Completion:
        """Read an answer.

        Raises:
            BadAnswer: it is none.
        """
        choice = _only_choice(answer)
        try:
            ids = checked_token_ids(choice["token_ids"])
            values = checked_logprobs(choice["logprobs"]["token_logprobs"])
            if len(values) != len(ids):
                raise RetryableError("an answer with other log-probabilities than one for each token")
            tops = choice["logprobs"]["top_logprobs"] if told else []
            likeliest = np.array([_top_token_ids(top, token, told) for top, token in zip(tops, ids, strict=bool(told))])
            return checked_completion(
                ids,
                values,
                likeliest.astype(np.int32).reshape(-1, told) if told else np.zeros((len(ids), 0), np.int32),
                isinstance(choice.get("stop_reason"), str),
                sampling,
                self._tokenizer,
            )
        except (TypeError, ValueError, KeyError, OverflowError) as wrong:
            raise RetryableError(f"an answer that cannot be read: {wrong!r}"[:500]) from None

    async def _update_all(self) -> None:
        async with self._endpoints.connected():
            for endpoint in self._endpoints.endpoints:
                # One that is being restarted is waited for, like everywhere.
                await self._endpoints.request_one(endpoint, "/models", None, parse_models, max_attempts=self._attempts)
                try:
                    await self._send(endpoint)
                except NoResponseError as wrong:
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
            version = await self._endpoints.request_one(
                endpoint, "/weight_info", None, _version_of, max_attempts=1, at_root=True
            )
        except PermanentError as wrong:
            raise _refused_weights(wrong, endpoint) from None
        return version == self._version

    async def _kept_weights(self, endpoint: Endpoint) -> bool:
        if self._sent is None:
            return True
        try:
            kept = await self._has_weights(endpoint)
        except NoResponseError:
            kept = False
        endpoint.may_have_restarted |= not kept
        return kept

    async def _restore_weights(self, endpoint: Endpoint) -> None:
        """Send the weights again if a server that had failed lost them.

        Raises:
            NoAnswer: it fails again.
            XtkError: it refuses them.
        """
        if self._sent is None:
            return
        async with self._locks.setdefault(endpoint.url, asyncio.Lock()):
            await self._endpoints.request_one(endpoint, "/models", None, parse_models, max_attempts=1)
            if not await self._has_weights(endpoint):
                await self._send(endpoint)
                terminal.note(f"{endpoint}: was restarted without the student's weights; sent them again")

    async def _send(self, endpoint: Endpoint) -> None:
        ask_one = self._endpoints.request_one
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._sent)}}
        version = {"new_version": self._version}
        self._num_sends[endpoint.url] += 1
        try:
            await ask_one(endpoint, "/collective_rpc", reload, _check_reload_response, max_attempts=1, at_root=True)
            await ask_one(endpoint, "/reset_prefix_cache", {}, _forgotten, max_attempts=3, at_root=True)
            await ask_one(endpoint, "/update_weight_version", version, _accepted, max_attempts=3, at_root=True)
        except PermanentError as wrong:
            raise _refused_weights(wrong, endpoint) from None


def _refused_weights(wrong: PermanentError, endpoint: Endpoint) -> XtkError:
    return XtkError(
        f"the server takes no new weights: {wrong.status} {wrong.message}",
        where=str(endpoint),
        hint="start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1, where only trusted machines reach it",
    )


def _only_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RetryableError("an answer without the one choice that was asked for")
    return choices[0]


def _top_token_ids(top: dict[str, float], own: int, count: int) -> list[int]:
    """Return the likeliest ids of a position, in order; the sampled token may be one more."""
    names = [name.removeprefix(TOKEN_ID_PREFIX) for name in top]
    known = dict(zip(parse_token_ids(names).tolist(), checked_logprobs(top.values()).tolist(), strict=True))
    if len(known) > count:
        del known[int(own)]
    if len(known) != count:
        raise RetryableError(f"an answer with {len(known):,} likeliest tokens of {count:,}")
    return sorted(known, key=lambda token: -known[token])


def _check_reload_response(answer: Any) -> None:
    if not isinstance(answer, dict) or "results" not in answer:
        raise RetryableError("an answer that tells no results")


def _forgotten(answer: Any) -> None:
    if answer != {"success": True}:
        raise RetryableError("its cache of prompts is in use, by whom xtk does not know")


def _accepted(answer: Any) -> None:
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise RetryableError("it does not keep the version of its weights")


def _version_of(answer: Any) -> str:
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    if not isinstance(version, str):
        raise RetryableError("it does not report the version of its weights (weight_version)")
    return version
