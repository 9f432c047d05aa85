"""Generation by vLLM servers over HTTP, with token ids as input and output."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from xtk import terminal
from xtk.engines.backend import BackendConfig
from xtk.engines.http_client_pool import Endpoint, EndpointPool, NoResponseError, RetryPolicy
from xtk.engines.server_responses import (
    VLLM_SERVER_HINT,
    PermanentError,
    RetryableError,
    checked_logprobs,
    checked_token_ids,
    parse_token_ids,
)
from xtk.engines.vllm_servers import (
    COMPLETIONS_PATH,
    STARTUP_ATTEMPTS,
    check_same_tokenizer,
    connect_servers,
    gather_responses,
    only_choice,
    parse_models,
    refusal_error,
    run_coroutine,
    tokenizer_probe,
)
from xtk.errors import XtkError
from xtk.rollouts.engine_request_checks import (
    MAX_LOGIT_BIASES,
    check_temperature,
    checked_completion,
    max_new_tokens,
    num_requested_top_ids,
    seed_from_key,
)
from xtk.rollouts.engine_weight_files import WeightNames
from xtk.rollouts.generator_interface import Completion, GenerationRequest, Generator, SamplingConfig

DEFAULT_CONCURRENCY = 128
FORBIDDEN_BIAS = -100.0  # the lowest that the API accepts
TOKEN_ID_PREFIX = "token_id:"
MAX_WEIGHT_LOSSES = 5  # how often a server may lose the weights during one request


class ServerGenerator(Generator):
    """Generates completions with vLLM servers, many requests at a time.

    Options: `servers`, addresses (`http://host:8000/v1`, followed by `#model` where a server has several models);
    `concurrency`, requests in flight on all servers together; `patience`, the `RetryPolicy`.
    """

    uses_servers: ClassVar[bool] = True

    def __init__(self, config: BackendConfig) -> None:
        servers = [Endpoint.parse(text) for text in config.options.get("servers") or ()]
        if not servers:
            raise XtkError(
                "the backend server needs a server address",
                hint="add --server http://localhost:8000/v1 (xtk distill: --rollout-server)",
            )
        self._name, self._tokenizer = config.model.name, config.tokenizer
        self._names = WeightNames.from_folder(config.model.folder)
        self._endpoints = EndpointPool(
            servers,
            concurrency=config.options.get("concurrency") or DEFAULT_CONCURRENCY,
            retry_policy=config.options.get("patience") or RetryPolicy(),
            on_recovered=self._restore_weights,
        )
        self._sent: Path | None = None
        self._version = ""
        self._locks: dict[str, asyncio.Lock] = {}
        self._num_sends = dict.fromkeys((server.url for server in servers), 0)  # weight updates sent to each server
        self._attempts = (config.options.get("patience") or RetryPolicy()).max_attempts
        padding = range(len(self._tokenizer), self._tokenizer.embedding_rows)
        self._padding_bias = (
            {str(token): FORBIDDEN_BIAS for token in padding} if 0 < len(padding) <= MAX_LOGIT_BIASES else None
        )
        self._context, _ = connect_servers(self._endpoints, self._name, self._check_tokenizer, refusal_error)

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion together, the minimum over the servers; None if not reported."""
        return self._context

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""
        check_temperature(sampling)
        self._locks = {}
        return gather_responses(self._endpoints, (self._generate_one(request, sampling) for request in requests))

    def update_weights(self, folder: Path) -> None:
        """Load new weights into each server and clear its prefix cache.

        Args:
            folder: the servers see it under the same path. Keep it until the next update: a server that is restarted
                meanwhile starts with its old weights and is sent these again.
        """
        folder = folder.resolve()
        self._names.check_complete(WeightNames.from_folder(folder), str(folder))
        self._sent, self._version = folder, f"xtk-{secrets.token_hex(8)}"
        run_coroutine(self._update_all())

    async def _check_tokenizer(self, endpoint: Endpoint, context_length: int | None) -> None:
        # With another tokenizer the probe may be many more tokens.
        probe = tokenizer_probe(self._tokenizer, context_length and context_length // 4)
        (ours,) = self._tokenizer.encode([probe])
        payload = {
            "model": endpoint.model,
            "prompt": probe,
            "add_special_tokens": False,
            "return_token_ids": True,
            "max_tokens": 1,
        }
        choice = await self._endpoints.request_one(
            endpoint, COMPLETIONS_PATH, payload, only_choice, max_attempts=STARTUP_ATTEMPTS
        )
        theirs = choice.get("prompt_token_ids")
        if not isinstance(theirs, list) or not isinstance(choice.get("token_ids"), list):
            raise XtkError(
                "the server's response has no token ids, which training on its completions needs",
                where=str(endpoint),
                hint="use vLLM 0.11 or newer",
            )
        if theirs != ours.ids.tolist():
            check_same_tokenizer(ours.ids.tolist(), theirs, self._tokenizer, endpoint, "rollout")

    async def _generate_one(self, request: GenerationRequest, sampling: SamplingConfig) -> Completion:
        num_top_ids = num_requested_top_ids(sampling, self._tokenizer, self._tokenizer.embedding_rows)
        payload = self._payload(request, sampling, num_top_ids)
        where = f"a prompt of {len(request.input_ids):,} tokens, sent to {self._name}"
        attempts: list[tuple[Endpoint, int]] = []

        def payload_for(endpoint: Endpoint) -> dict[str, Any]:
            attempts.append((endpoint, self._num_sends[endpoint.url]))
            return {"model": endpoint.model, **payload}

        try:
            for _ in range(MAX_WEIGHT_LOSSES):
                completion = await self._endpoints.request(
                    COMPLETIONS_PATH,
                    payload_for,
                    lambda response: self._completion(response, sampling, num_top_ids),
                    what=where,
                )
                endpoint, sends = attempts[-1]
                # After an update meanwhile, the completion is at least partly from older weights.
                if await self._kept_weights(endpoint) and sends == self._num_sends[endpoint.url]:
                    self.num_sampled += len(completion.ids)
                    return completion
            raise XtkError(
                f"the server lost the student's weights {MAX_WEIGHT_LOSSES} times during one completion",
                where=f"{attempts[-1][0]}, {where}",
                hint="check the server's log for restarts, and stop other runs that send weights to it",
            )
        except PermanentError as error:
            hint = None
            if "logprobs" in error.message:
                hint = f"start the vLLM server with --max-logprobs {num_top_ids}, or use a smaller --top-logprobs"
            raise refusal_error(error, where, hint) from None

    def _payload(self, request: GenerationRequest, sampling: SamplingConfig, num_top_ids: int) -> dict[str, Any]:
        return {
            "prompt": request.input_ids.tolist(),
            "max_tokens": max_new_tokens(request, sampling, self._context, self._name),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed_from_key(request.seed_key),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": True,
            "ignore_eos": True,
            "stop_token_ids": sorted(self._tokenizer.stop_ids),
            "logprobs": num_top_ids,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({"logit_bias": self._padding_bias} if self._padding_bias else {}),
        }

    def _completion(self, response: Any, sampling: SamplingConfig, num_top_ids: int) -> Completion:
        """Parse a response; RetryableError: it is malformed."""
        choice = only_choice(response)
        try:
            ids = checked_token_ids(choice["token_ids"])
            values = checked_logprobs(choice["logprobs"]["token_logprobs"])
            if len(values) != len(ids):
                raise RetryableError(
                    f"the server's response has {len(values):,} log-probabilities for {len(ids):,} tokens",
                    VLLM_SERVER_HINT,
                )
            tops = choice["logprobs"]["top_logprobs"] if num_top_ids else []
            top_ids = np.array(
                [_top_token_ids(top, token, num_top_ids) for top, token in zip(tops, ids, strict=bool(num_top_ids))]
            )
            return checked_completion(
                ids,
                values,
                top_ids.astype(np.int32).reshape(-1, num_top_ids) if num_top_ids else np.zeros((len(ids), 0), np.int32),
                isinstance(choice.get("stop_reason"), str),
                sampling,
                self._tokenizer,
            )
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise RetryableError(
                f"the server's response is not a completion with log-probabilities: {error!r}"[:500], VLLM_SERVER_HINT
            ) from None

    async def _update_all(self) -> None:
        async with self._endpoints.connected():
            for endpoint in self._endpoints.endpoints:
                # A server that is being restarted is waited for, as in every request.
                await self._endpoints.request_one(endpoint, "/models", None, parse_models, max_attempts=self._attempts)
                try:
                    await self._send_weights(endpoint)
                except NoResponseError as error:
                    raise XtkError(
                        f"the server failed while loading the student's weights: {error.what}",
                        where=f"{endpoint}, weights in {self._sent}",
                        hint="check the server's log: it must be able to read this folder",
                    ) from None

    async def _has_weights(self, endpoint: Endpoint) -> bool:
        """Return whether a server has the weights that were sent last; a restarted one has those of its start."""
        try:
            version = await self._endpoints.request_one(
                endpoint, "/weight_info", None, _parse_weight_version, max_attempts=1, at_root=True
            )
        except PermanentError as error:
            raise _weight_update_error(error, endpoint) from None
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
        """Send the weights again if a server lost them after a failure; NoResponseError: the request fails again."""
        if self._sent is None:
            return
        async with self._locks.setdefault(endpoint.url, asyncio.Lock()):
            await self._endpoints.request_one(endpoint, "/models", None, parse_models, max_attempts=1)
            if not await self._has_weights(endpoint):
                await self._send_weights(endpoint)
                terminal.note(f"{endpoint}: was restarted without the student's weights; sent them again")

    async def _send_weights(self, endpoint: Endpoint) -> None:
        request_one = self._endpoints.request_one
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._sent)}}
        version = {"new_version": self._version}
        self._num_sends[endpoint.url] += 1
        try:
            await request_one(endpoint, "/collective_rpc", reload, _check_reload_response, max_attempts=1, at_root=True)
            await request_one(
                endpoint, "/reset_prefix_cache", {}, _check_prefix_cache_reset, max_attempts=3, at_root=True
            )
            await request_one(
                endpoint, "/update_weight_version", version, _check_version_update, max_attempts=3, at_root=True
            )
        except PermanentError as error:
            raise _weight_update_error(error, endpoint) from None


def _weight_update_error(error: PermanentError, endpoint: Endpoint) -> XtkError:
    return XtkError(
        f"the server does not accept weight updates: HTTP {error.status} {error.message}",
        where=str(endpoint),
        hint="start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1, in a network that only trusted machines reach",
    )


def _top_token_ids(top: dict[str, float], own: int, count: int) -> list[int]:
    """Return the most likely ids of a position, in order; `top` may also contain the sampled token."""
    names = [name.removeprefix(TOKEN_ID_PREFIX) for name in top]
    known = dict(zip(parse_token_ids(names).tolist(), checked_logprobs(top.values()).tolist(), strict=True))
    if len(known) > count:
        del known[int(own)]
    if len(known) != count:
        raise RetryableError(
            f"the server returned only {len(known):,} top log-probabilities per token; {count:,} were requested",
            hint=f"use a smaller --top-logprobs, or restart the server with --max-logprobs {count}",
        )
    return sorted(known, key=lambda token: -known[token])


def _check_reload_response(response: Any) -> None:
    if not isinstance(response, dict) or "results" not in response:
        raise RetryableError("the server's response to /collective_rpc has no key 'results'", VLLM_SERVER_HINT)


def _check_prefix_cache_reset(response: Any) -> None:
    if response != {"success": True}:
        raise RetryableError(
            "the server could not reset its prefix cache: it is processing other requests",
            hint="stop other programs that use this server, and run the same command again",
        )


def _check_version_update(response: Any) -> None:
    if not isinstance(response, dict) or response.get("success") is not True:
        raise RetryableError(
            "the server did not store the version of the student's weights", hint="use vLLM 0.32 or newer"
        )


def _parse_weight_version(response: Any) -> str:
    version = response.get("weight_version") if isinstance(response, dict) else None
    if not isinstance(version, str):
        raise RetryableError(
            "the server's response to /weight_info has no weight_version", hint="use vLLM 0.32 or newer"
        )
    return version
