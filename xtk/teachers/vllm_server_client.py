"""Teacher backend `server`: servers of vLLM, with `prompt_logprobs` of the completions API, and of SGLang.

Others (TGI, llama.cpp) do not return log-probabilities of prompts and are refused at the first response.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.engines.http_client_pool import Endpoint, EndpointPool, RetryPolicy
from xtk.engines.server_responses import (
    BYTES_PER_ENTRY,
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
    refusal_error,
    tokenizer_probe,
)
from xtk.errors import MismatchError, XtkError
from xtk.models.resolver import ModelRef
from xtk.teachers.backend_interface import TeacherBackend, TeacherConfig
from xtk.teachers.vllm_top_logprobs import (
    CLAMPED_LOGPROB,
    SUPPORTED_KINDS,
    TopLogprobs,
    check_document_lengths,
    empty_top_logprobs,
    num_tokens_to_read,
    num_top_ids,
    separate_observed,
    top_logprobs_to_stored,
)
from xtk.text.model_config_json import read_model_config
from xtk.text.token_sequence import TokenSequence

DEFAULT_CONCURRENCY = 32
MAX_BYTES_IN_FLIGHT = 1 << 29
SGLANG_PATH = "/generate"  # after the address without /v1
SGLANG_OWNER = "sglang"  # that SGLang's list of models states
SGLANG_HINT = "check that this is a server of SGLang (python -m sglang.launch_server), or use --backend transformers"
SAME_MODEL_TOLERANCE = 0.1  # mean difference in nats: five times that of bfloat16 on other GPUs or in other batches


class ServerTeacher(TeacherBackend):
    """Scores documents with servers of vLLM or SGLang, with many concurrent requests.

    Args:
        request: model and options; its folder needs only tokenizer and configuration. In `options`, `servers`
            are addresses (`http://host:8000/v1`, followed by `#model` if a server has several), `concurrency` is the
            number of requests in flight on all servers together, and `patience` is the `RetryPolicy`.
    """

    support_kinds: ClassVar[frozenset[str]] = SUPPORTED_KINDS
    uses_servers: ClassVar[bool] = True

    def __init__(self, request: TeacherConfig) -> None:
        servers = [Endpoint.parse(text) for text in request.options.get("servers") or ()]
        if not servers:
            raise XtkError(
                "--backend server needs --server", hint="add, for example, --server http://localhost:8000/v1"
            )
        self._name, self._support, self._tokenizer = request.model.name, request.support, request.tokenizer
        self._top_k = num_top_ids(request.support, self.vocab_size)
        self._endpoints = EndpointPool(
            servers,
            concurrency=request.options.get("concurrency") or DEFAULT_CONCURRENCY,
            retry_policy=request.options.get("patience") or RetryPolicy(),
        )
        self._limit, logprobs = connect_servers(self._endpoints, self._name, self._probe_logprobs, self._refusal_error)
        _check_same_model(self._endpoints.endpoints, logprobs)
        if len(kinds := {endpoint.owner == SGLANG_OWNER for endpoint in servers}) > 1:
            raise XtkError(
                "some servers are of SGLang, and others are not",
                where=", ".join(map(str, servers)),
                hint="use servers of one kind; the caches of two commands can be merged: xtk cache merge",
            )
        (self._is_sglang,) = kinds
        if self._is_sglang and self._limit is not None:
            self._limit -= 1  # its context must have space for a token after the prompt
        self.model = servers[0].model

    @classmethod
    def weights_identity(cls, model: ModelRef, options: dict[str, Any]) -> str:
        """Return the fingerprint of the configuration, and the model names after `#` in the addresses.

        The servers are not contacted, so that a finished cache is recognized while they are off.
        """
        named = sorted({Endpoint.parse(text).requested_model for text in options.get("servers") or ()} - {""})
        content = read_model_config(model.folder)
        content.pop("transformers_version", None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return " ".join([f"config:sha256:{digest}", *(f"served:{name}" for name in named)])

    @property
    def vocab_size(self) -> int:
        """U, the size of its distributions."""
        return self._tokenizer.embedding_rows

    @property
    def max_document_tokens(self) -> int | None:
        """Maximum tokens of a document: the shortest context of the servers; None if they do not report it."""
        return self._limit

    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return log-probabilities, see `TeacherBackend.score`; no candidate ids."""
        check_document_lengths(documents, self._limit, f"{self._name}, on {self._endpoints.endpoints[0]}")
        longest = max((num_tokens_to_read(document) for document in documents), default=0)
        largest_response = max(1, longest) * (self._top_k + 1) * BYTES_PER_ENTRY
        num_requests = max(1, MAX_BYTES_IN_FLIGHT // largest_response)
        return gather_responses(self._endpoints, map(self._score_and_report, documents), num_requests)

    async def _score_and_report(self, document: TokenSequence) -> StoredLogprobs:
        scored = await self._score(document)
        self.report_tokens(len(document))
        return scored

    async def _score(self, document: TokenSequence) -> StoredLogprobs:
        length = num_tokens_to_read(document)
        if not length:
            return self._to_stored_logprobs(document, empty_top_logprobs(self._top_k))
        ids = document.ids[:length].tolist()
        sglang = self._is_sglang
        body = _sglang_request_body(ids, self._top_k) if sglang else _request_body(ids, self._top_k, self._limit)
        parse = parse_sglang_response if sglang else _parse_response
        try:
            return await self._endpoints.request(
                SGLANG_PATH if sglang else COMPLETIONS_PATH,
                lambda endpoint: body if sglang else {"model": endpoint.model, **body},
                lambda response: self._to_stored_logprobs(document, parse(response, document, self._top_k)),
                at_root=sglang,
                what=self._describe_document(document),
            )
        except PermanentError as failure:
            raise self._refusal_error(failure, self._describe_document(document)) from None

    def _refusal_error(self, refusal: PermanentError, where: str) -> XtkError:
        """Return the error for a refused request, with a next step where the reason is known."""
        hint = None
        if "logprobs" in refusal.message and "max" in refusal.message:
            hint = f"start vLLM's server with --max-logprobs {self._top_k}, or use a smaller --top-k"
        elif "context length" in refusal.message or "max_tokens must be at least 1" in refusal.message:
            hint = "start vLLM's server with a larger --max-model-len, or use a smaller --max-length here"
        return refusal_error(refusal, where, hint)

    def _to_stored_logprobs(self, document: TokenSequence, heads: TopLogprobs) -> StoredLogprobs:
        try:
            return top_logprobs_to_stored(document, heads, self._support, self.vocab_size, self._name)
        except XtkError as failure:
            raise RetryableError(failure.what + (f" ({failure.hint})" if failure.hint else "")) from None

    def _describe_document(self, document: TokenSequence) -> str:
        text = b"".join(self._tokenizer.vocabulary.bytes_of(token) for token in document.ids[:40].tolist())
        return f"a document of {len(document):,} tokens that begins {text.decode(errors='replace')[:60]!r}"

    async def _probe_logprobs(self, endpoint: Endpoint, context_length: int | None) -> NDArray[np.float64] | None:
        """Return a server's log-probabilities of the tokens of a text; None if it tokenizes the text differently.

        Requests the top K already here, so that a server with a smaller maximum refuses before the work begins.
        """
        probe = tokenizer_probe(self._tokenizer, context_length)
        (ours,) = self._tokenizer.encode([probe])
        ids = ours.ids.tolist()
        if endpoint.owner == SGLANG_OWNER:
            return await self._probe_sglang(endpoint, probe, ids)
        body = {"model": endpoint.model, "prompt": probe, "add_special_tokens": False, "return_token_ids": True}
        choice = await self._endpoints.request_one(
            endpoint,
            COMPLETIONS_PATH,
            {**body, **_sampling_parameters(self._top_k)},
            _response_choice,
            max_attempts=STARTUP_ATTEMPTS,
        )
        theirs, entries = choice.get("prompt_token_ids"), choice["prompt_logprobs"]
        if not isinstance(theirs, list):
            terminal.note(
                f"cache-teacher: {endpoint} does not return token ids, so that its tokenizer cannot be checked"
            )
            return None
        if theirs != ids:
            check_same_tokenizer(ids, theirs, self._tokenizer, endpoint, "cache-teacher")
            return None
        return np.array([_entry_logprob(entry, token) for entry, token in zip(entries[1:], ids[1:], strict=False)])

    async def _probe_sglang(self, endpoint: Endpoint, probe: str, ids: list[int]) -> NDArray[np.float64] | None:
        """Do the same with a server of SGLang, which may put a start token before the text."""
        own, _ = await self._endpoints.request_one(
            endpoint,
            SGLANG_PATH,
            _sglang_request_body(probe, self._top_k),
            _sglang_prompt_entries,
            at_root=True,
            max_attempts=STARTUP_ATTEMPTS,
        )
        if own and own[0][1] == self._tokenizer.special_token_ids.get("bos") != ids[0]:
            own = own[1:]
        theirs = [entry[1] for entry in own]
        if theirs != ids:
            check_same_tokenizer(ids, theirs, self._tokenizer, endpoint, "cache-teacher")
            return None
        return np.array([np.nan if entry[0] is None else float(entry[0]) for entry in own[1:]])


def _sampling_parameters(top_k: int) -> dict[str, Any]:
    return {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}


def _request_body(ids: list[int], top_k: int, limit: int | None) -> dict[str, Any]:
    """Return the body of the request for a document.

    The context must also hold one generated token: if a document fills it, its last token is generated.
    """
    if limit is None or len(ids) < limit:
        return {"prompt": ids, **_sampling_parameters(top_k)}
    return {
        "prompt": ids[:-1],
        **_sampling_parameters(top_k),
        "logprobs": max(1, top_k),
        "allowed_token_ids": ids[-1:],
        "return_tokens_as_token_ids": True,
    }


def _response_choice(answer: Any) -> dict[str, Any]:
    """Return the only choice of a response, with its `prompt_logprobs`."""
    choice = only_choice(answer)
    if not isinstance(choice.get("prompt_logprobs"), list):
        raise RetryableError(
            "the server's response has no prompt_logprobs; only servers of vLLM and SGLang return them",
            "serve the teacher with vLLM (vllm serve MODEL), or use --backend transformers",
        )
    return choice


def _parse_response(answer: Any, document: TokenSequence, top_k: int) -> TopLogprobs:
    """Return the top log-probabilities at the trained tokens of a document."""
    choice = _response_choice(answer)
    returned = choice["prompt_logprobs"]
    length = num_tokens_to_read(document)
    if len(returned) == length - 1:
        returned = [*returned, _last_token_logprobs(choice, top_k)]
    if len(returned) != length:
        raise RetryableError(
            f"the server's response has log-probabilities of {len(returned):,} tokens instead of {length:,}"
        )
    at = np.flatnonzero(document.train_mask)
    entries = [returned[position] for position in at.tolist()]
    if not all(isinstance(entry, dict) and len(entry) in (top_k, top_k + 1) and entry for entry in entries):
        raise RetryableError(
            f"the server's response does not have {top_k:,} log-probabilities for each token",
            f"start the vLLM server with --max-logprobs {top_k} or more, or use a smaller --top-k",
        )
    ids = parse_token_ids([token for entry in entries for token in entry])
    try:
        values = [value["logprob"] for entry in entries for value in entry.values()]
    except (TypeError, KeyError):
        raise RetryableError("the server's response has a token without a log-probability", VLLM_SERVER_HINT) from None
    logprobs = checked_logprobs(values)
    lengths = np.array([len(entry) for entry in entries])
    return separate_observed(ids, logprobs, lengths, document.ids[at], top_k)


def _last_token_logprobs(choice: dict[str, Any], top_k: int) -> dict[str, dict[str, float]]:
    """Return the log-probabilities of the generated token, in the form of `prompt_logprobs`."""
    try:
        logprobs = choice["logprobs"]
        (entry,), (own,) = logprobs["top_logprobs"], logprobs["tokens"]
        ruled_out = sum(value <= CLAMPED_LOGPROB for token, value in entry.items() if token != own)
        by_token = {token.removeprefix("token_id:"): {"logprob": value} for token, value in entry.items()}
        own = own.rpartition(":")[2]
    except (TypeError, KeyError, ValueError, AttributeError):
        raise RetryableError(
            "the server's response has no log-probability for the last token", VLLM_SERVER_HINT
        ) from None
    if ruled_out and ruled_out == len(entry) - 1:
        raise XtkError(
            "the server returns log-probabilities after sampling restrictions instead of those of the model",
            hint="start vLLM's server with --logprobs-mode raw_logprobs (its default)",
        )
    return by_token if top_k else {token: value for token, value in by_token.items() if token == own}


def _entry_logprob(entry: Any, token: int) -> float:
    try:
        return float(entry[str(token)]["logprob"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return float("nan")


def _check_same_model(endpoints: Sequence[Endpoint], probes: Sequence[NDArray[np.float64] | None]) -> None:
    """Refuse servers with different log-probabilities of the same text."""
    first = probes[0]
    for endpoint, logprobs in zip(endpoints[1:], probes[1:], strict=True):
        if first is None or logprobs is None or len(logprobs) != len(first):
            continue
        difference = float(np.abs(logprobs - first).mean())
        if not difference <= SAME_MODEL_TOLERANCE:
            raise MismatchError(
                f"two servers do not have the same model: their log-probabilities of one text differ by "
                f"{difference:.2g} nats per token",
                where=f"{endpoints[0]} ({endpoints[0].model}) and {endpoint} ({endpoint.model})",
                hint="use servers with the same model; with several models per server, name it: --server URL#MODEL",
            )


def _sglang_request_body(prompt: str | list[int], top_k: int) -> dict[str, Any]:
    """Return the body of a request that scores a prompt and generates nothing."""
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    sampling = {"max_new_tokens": 0, "temperature": 0}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
    return {**given, "sampling_params": sampling, **logprobs}


def _sglang_prompt_entries(answer: Any) -> tuple[list[Any], list[Any]]:
    """Return (log-probability, id, text) of each token of the prompt, and the lists of the most likely ones."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    own = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    top = meta.get("input_top_logprobs") if isinstance(meta, dict) else None
    if not isinstance(own, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in own):
        raise RetryableError("the server's response has no input_token_logprobs", SGLANG_HINT)
    if top is not None and not isinstance(top, list):
        raise RetryableError("the server's response has no valid input_top_logprobs", SGLANG_HINT)
    return own, top or [None] * len(own)


def parse_sglang_response(answer: Any, document: TokenSequence, top_k: int) -> TopLogprobs:
    """Return the top log-probabilities at the trained tokens of a document."""
    own, top = _sglang_prompt_entries(answer)
    length = num_tokens_to_read(document)
    if not len(own) == len(top) == length:
        raise RetryableError(
            f"the server's response has log-probabilities of {len(own):,} tokens instead of {length:,}"
        )
    at = np.flatnonzero(document.train_mask)
    ids: list[Any] = []
    values: list[Any] = []
    lengths = []
    for position in at.tolist():
        listed = (top[position] or []) if top_k else []
        if not isinstance(listed, list) or len(listed) != top_k or not all(isinstance(entry, list) for entry in listed):
            raise RetryableError(
                f"the server's response does not have {top_k:,} log-probabilities for each token", SGLANG_HINT
            )
        entries = [entry[:2] for entry in listed]
        value, token = own[position][:2]
        if all(other != token for _, other in entries):
            entries.append([value, token])
        values += [logprob for logprob, _ in entries]
        ids += [token for _, token in entries]
        lengths.append(len(entries))
    table = (checked_token_ids(ids), checked_logprobs(values), np.array(lengths, np.int64))
    return separate_observed(*table, document.ids[at], top_k)
