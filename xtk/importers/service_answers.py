"""Answers of a service with the OpenAI interface, with log-probabilities, in a file that grows and can be continued."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtk import terminal
from xtk.engines.http_client_pool import Endpoint, EndpointPool, RetryPolicy
from xtk.engines.server_responses import PermanentError, RetryableError
from xtk.engines.vllm_servers import gather_responses
from xtk.errors import ResumableStop, XtkError
from xtk.files.atomic_files import atomic_write, canonical_json, sha256
from xtk.files.output import OutputKind
from xtk.importers.completion_logprobs import read_answer, row_errors
from xtk.options.shared import CHAT, ECHO, TEXT, ServiceOptions
from xtk.progress import Progress
from xtk.text.document import Document

_PATHS = {CHAT: "/chat/completions", TEXT: "/completions", ECHO: "/completions"}
# What OpenAI and most services with its interface list at most; servers of vLLM and llama.cpp list more.
USUAL_LIMITS = {CHAT: 20, TEXT: 5, ECHO: 5}
BYTES_PER_TOKEN = 3.5  # for estimates before the first answer
_MAX_TOKENS = 1e12  # of an answer
NUM_CHECKED_ANSWERS = 3  # the command stops if none of these can be used
_SERVICE_HINT = "check that a service with the OpenAI interface answers at this URL"


@dataclass(frozen=True)
class ServiceRequest:
    """The request of document `index`, with an estimate of its tokens and the maximum of its answer's."""

    index: int
    body: dict[str, Any]
    prompt_tokens: float
    answer_tokens: int

    @property
    def key(self) -> str:
        """Identifies the request in a file."""
        return sha256(canonical_json(self.body))


def make_requests(documents: Iterable[Document], server: str, options: ServiceOptions) -> list[ServiceRequest]:
    """Return the requests of documents to `URL#MODEL`: prompts, or texts with `echo`."""
    endpoint = Endpoint.parse(server)
    if not endpoint.requested_model:
        raise XtkError(
            "the URL of a service needs the name of a model",
            where=str(endpoint),
            hint="use for example https://api.example.com/v1#model-name",
        )
    return [_make_request(*document, endpoint.requested_model, options) for document in enumerate(documents)]


def _make_request(number: int, document: Document, model: str, options: ServiceOptions) -> ServiceRequest:
    body: dict[str, Any] = {"model": model}
    conversation, where = document.conversation, f"document {number}"
    if document.teacher_prompt is not None:
        raise XtkError(
            "this document has a teacher_prompt, which query-teacher cannot send",
            where=where,
            hint="use cache-teacher for a teacher with more information, or remove the column",
        )
    if options.mode == ECHO and not all(segment.train for segment in document.segments):
        raise XtkError(
            "--mode echo scores whole texts, and this document has a prompt, which is not trained",
            where=where,
            hint="use --mode chat or text for answers to prompts, or data with text",
        )
    if options.mode == CHAT:
        if conversation is None:
            body["messages"] = [{"role": "user", "content": document.text}]
        else:
            body["messages"] = [_service_message(message) for message in conversation.messages]
            if conversation.tools:
                body["tools"] = list(conversation.tools)
        body |= {"logprobs": True, "top_logprobs": options.top_logprobs, "max_tokens": options.max_completion_length}
    elif conversation is not None:
        raise XtkError(
            f"--mode {options.mode} needs texts, and this document has messages",
            where=where,
            hint="use --mode chat, or data with text",
        )
    else:
        is_echo = options.mode == ECHO
        body |= {"prompt": document.text, "logprobs": options.top_logprobs}
        body |= {"echo": True, "max_tokens": 1} if is_echo else {"max_tokens": options.max_completion_length}
    if options.mode != ECHO:
        body["temperature"] = options.temperature
    size = len(document.text.encode()) / BYTES_PER_TOKEN + 16
    return ServiceRequest(number, body, size, 1 if options.mode == ECHO else options.max_completion_length)


def _service_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form, in which arguments of tool calls are text."""
    result = {key: value for key, value in message.items() if key != "reasoning_content"}
    calls = []
    for number, call in enumerate(result.get("tool_calls") or ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {**call["function"], "arguments": text}
        calls.append({"type": "function", "id": f"call_{number}", **call, "function": function})
    return result | {"tool_calls": calls} if calls else result


def estimate(requests: Sequence[ServiceRequest], options: ServiceOptions) -> dict[str, float]:
    """Return `requests`, estimated `prompt_tokens`, the largest number of `answer_tokens`, and the largest `cost`."""
    prompts = sum(request.prompt_tokens for request in requests)
    answers = sum(request.answer_tokens for request in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": round(prompts),
        "max_answer_tokens": answers,
        "max_cost": round(_cost(prompts, answers, options), 4),
    }


def note_usual_limit(options: ServiceOptions) -> None:
    """Print a note if a service may list fewer tokens than requested."""
    if options.top_logprobs > (limit := USUAL_LIMITS[options.mode]):
        terminal.note(
            f"query-teacher: many services list at most {limit} tokens in this mode, and refuse --top-logprobs "
            f"{options.top_logprobs}"
        )


def _num_listed(response: Mapping[str, Any]) -> int:
    """Return the largest number of tokens that an answer lists at a position."""
    logprobs = response["choices"][0].get("logprobs") or {}
    content = logprobs.get("content") or []
    lists = [item.get("top_logprobs") for item in content if isinstance(item, Mapping)] or logprobs.get("top_logprobs")
    return max((len(one) for one in lists or () if isinstance(one, list | Mapping)), default=0)


def _cost(prompt_tokens: float, answer_tokens: float, options: ServiceOptions) -> float:
    return (prompt_tokens * options.input_price + answer_tokens * options.output_price) / 1e6


_START = b'{"key": "sha256:'


def _is_answer_file(path: Path) -> bool:
    with path.open("rb") as stream:
        return _START.startswith(stream.read(len(_START)))  # a killed command may leave a part of it


ANSWERS = OutputKind[None]("a file of answers", _is_answer_file, has_force=False)


@dataclass(frozen=True)
class StoredAnswer:
    """A line of an answer file, its bytes `[start, start + size)`."""

    start: int
    size: int
    prompt_tokens: float  # reported by the service; 0: none
    answer_tokens: float  # likewise
    num_listed: int  # largest number of tokens that are listed at a position
    model: str  # that answered; "": unknown


class AnswerFile:
    """A file with a line for each answer, in the order in which they arrive; sorted when it is complete."""

    def __init__(self, path: Path, requests: Sequence[ServiceRequest]) -> None:
        self.path, self._requests = path, requests
        self.answers: dict[str, StoredAnswer] = {}  # {request key: its line}. The answers themselves stay in the file.
        self._lines: list[tuple[str, int]] = []  # key and index of each line
        if path.exists():
            self._read({request.key for request in requests})

    def _read(self, keys: set[str]) -> None:
        start = 0
        with self.path.open("rb") as stream:
            for number, line in enumerate(stream):
                if not line.endswith(b"\n"):  # a killed command leaves a part of a line
                    break
                try:
                    row = json.loads(line)
                    key, index = row["key"], int(row["index"])
                    response = _checked_response(row["response"])
                    _refuse_without_logprobs(response)
                except (ValueError, KeyError, TypeError, RecursionError, OverflowError, RetryableError, XtkError):
                    raise XtkError(
                        "a line of the output file is not an answer",
                        where=f"{self.path}, line {number + 1}",
                        hint="use another output path (-o), or remove this line: its request is sent again",
                    ) from None
                if key not in keys:
                    raise XtkError(
                        "the output file has answers to other requests",
                        where=f"{self.path}, line {number + 1}",
                        hint="use another output path (-o), or the options of the first command",
                    )
                self._append(key, index, start, len(line), response)
                start += len(line)
        if start < self.path.stat().st_size:
            with self.path.open("r+b") as stream:
                stream.truncate(start)

    def _append(self, key: str, index: int, start: int, size: int, response: Mapping[str, Any]) -> None:
        listed, model = _num_listed(response), str(response.get("model") or "")
        self.answers[key] = StoredAnswer(start, size, *_reported_tokens(response), listed, model)
        self._lines.append((key, index))

    def add(self, request: ServiceRequest, response: dict[str, Any]) -> None:
        """Append an answer; it is on disk when this returns."""
        row = {"key": request.key, "index": request.index, "request": request.body, "response": response}
        line = _to_line(row)
        with self.path.open("ab") as stream:
            start = stream.tell()
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self._append(request.key, request.index, start, len(line), response)

    def sort(self) -> None:
        """Sort the file, in which all requests have an answer; an answer to equal requests is repeated."""
        if self._lines == [(request.key, request.index) for request in self._requests]:
            return
        with (
            atomic_write(self.path) as temporary,  # which this process has locked
            self.path.open("rb") as source,
            temporary.open("wb") as stream,
        ):
            for request in self._requests:
                place = self.answers[request.key]
                source.seek(place.start)
                stream.write(_to_line({**json.loads(source.read(place.size)), "index": request.index}))


def _to_line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _reported_tokens(response: Mapping[str, Any]) -> tuple[float, float]:
    """Return the tokens of prompt and answer that a service reports; 0: it reports none, or no possible number."""
    usage = response.get("usage")
    values = [usage.get(f"{name}_tokens") if isinstance(usage, Mapping) else 0 for name in ("prompt", "completion")]
    prompt, answer = (
        float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_TOKENS else 0.0 for value in values
    )
    return prompt, answer


class ServiceClient:
    """Sends requests to a service, within the limits of the options."""

    def __init__(self, server: str, options: ServiceOptions) -> None:
        self._num_usable = 0
        self._unusable: list[XtkError] = []
        self._options, self._endpoint = options, Endpoint.parse(server)
        if options.api_key_env and not os.environ.get(options.api_key_env):
            raise XtkError(
                f"the environment variable {options.api_key_env} of --api-key-env is not set",
                hint=f"set it: export {options.api_key_env}=...",
            )
        self._pool = EndpointPool(
            [self._endpoint], concurrency=options.concurrency, retry_policy=RetryPolicy(),
            api_key_variable=options.api_key_env, response_hint=_SERVICE_HINT,
        )  # fmt: skip
        # cost: of all answers, also of those that were in the file.
        self.cost = self._reserved = self._next_request = 0.0
        self._num_inflight = 0
        self._stopped = ""
        self._error: XtkError | None = None
        self._failed = asyncio.Event()
        self._turn, self._slots = asyncio.Condition(), asyncio.Semaphore(options.concurrency)

    def request_answers(self, requests: Sequence[ServiceRequest], file: AnswerFile) -> None:
        """Request all answers that the file does not have; raise ResumableStop at the limit of the cost."""
        unique = {request.key: request for request in requests}
        for key, stored in file.answers.items():
            self._add_cost(stored.prompt_tokens, stored.answer_tokens, unique[key])
            # An answer of another model than those of the file is refused.
            self._endpoint.answers_as = self._endpoint.answers_as or stored.model
        left = {key: one for key, one in unique.items() if key not in file.answers}
        with Progress("query-teacher", len(requests), "answers", done=len(requests) - len(left)) as progress:
            gather_responses(self._pool, [self._request_answer(request, file, progress) for request in left.values()])
        self._note_unusable()
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise ResumableStop(self._stopped, where=str(file.path), hint="use a larger --max-cost to continue")
        file.sort()
        most = max((stored.num_listed for stored in file.answers.values()), default=0)
        if most < self._options.top_logprobs:
            terminal.note(
                f"query-teacher: the service lists at most {most} tokens per position, of --top-logprobs "
                f"{self._options.top_logprobs}; the rest is in the remainder"
            )

    async def _request_answer(self, request: ServiceRequest, file: AnswerFile, progress: Any) -> None:
        async with self._slots:
            if not await self._wait_for_turn(request):
                return
            try:
                if self._error is not None:
                    return
                response = await self._send(request)
                self._add_cost(*_reported_tokens(response), request)
                _refuse_without_logprobs(response)
                file.add(request, response)
                self._check_answer(request, response)
                progress.advance(1, f"cost {self.cost:.4f}" if self.cost else "")
            except XtkError as failure:  # answers in flight are paid for: they are awaited and kept
                self._error = self._error or failure
                self._failed.set()
            finally:
                async with self._turn:
                    self._reserved -= self._max_cost_of(request)
                    self._num_inflight -= 1
                    self._turn.notify_all()

    def _check_answer(self, request: ServiceRequest, response: dict[str, Any]) -> None:
        """Count whether cache import can use a stored answer."""
        try:
            with row_errors(f"document {request.index}"):
                read_answer({"request": request.body, "response": response})
            self._num_usable += 1
        except XtkError as failure:
            self._unusable.append(failure)
            if not self._num_usable and len(self._unusable) == NUM_CHECKED_ANSWERS:
                raise XtkError(
                    f"cache import can use none of the first {NUM_CHECKED_ANSWERS} answers: {self._unusable[0].what}",
                    where=f"{self._unusable[0].where}, {self._endpoint}",
                    hint="use another service, model or --mode; the same command requests further answers",
                ) from None

    def _note_unusable(self) -> None:
        if self._unusable:
            first = self._unusable[0]
            terminal.note(
                f"query-teacher: cache import cannot use {len(self._unusable):,} of "
                f"{self._num_usable + len(self._unusable):,} new answers; the first: {first.where}: {first.what}. "
                "cache import --skip-invalid leaves them out"
            )

    async def _send(self, request: ServiceRequest) -> dict[str, Any]:
        try:
            return await self._pool.request(
                _PATHS[self._options.mode],
                lambda endpoint: request.body,
                _checked_response,
                what=f"document {request.index}",
            )
        except PermanentError as failure:
            raise XtkError(
                f"the service refuses a request: HTTP {failure.status} {failure.message}",
                where=f"document {request.index}, {self._endpoint}",
                hint=_refusal_hint(failure, self._options),
            ) from None

    def _add_cost(self, prompt_tokens: float, answer_tokens: float, request: ServiceRequest) -> None:
        """Count an answer; a service that reports no usage (0) is counted by the estimate."""
        used = prompt_tokens or request.prompt_tokens, answer_tokens or request.answer_tokens
        self.cost += _cost(*used, self._options)

    def _max_cost_of(self, request: ServiceRequest) -> float:
        return _cost(request.prompt_tokens, request.answer_tokens, self._options)

    async def _wait_for_turn(self, request: ServiceRequest) -> bool:
        """Wait until the limits per minute and of the cost allow a request; return False if that of the cost does not.

        A request counts with its largest cost until its answer is there.
        """
        options, loop = self._options, asyncio.get_running_loop()
        own = self._max_cost_of(request)

        def is_allowed() -> bool:
            return not options.max_cost or self.cost + self._reserved + own <= options.max_cost

        async with self._turn:
            await self._turn.wait_for(
                lambda: self._error is not None or bool(self._stopped) or is_allowed() or not self._num_inflight
            )
            if self._error is not None:
                return False
            if self._stopped or not is_allowed():
                self._stopped = self._stopped or (
                    f"the cost is {self.cost:.4f}, and the next answer may exceed --max-cost {options.max_cost:g}"
                )
                self._turn.notify_all()
                return False
            self._reserved += own
            self._num_inflight += 1
            seconds = 60 / options.max_requests_per_minute if options.max_requests_per_minute else 0.0
            if options.max_tokens_per_minute:
                tokens = request.prompt_tokens + request.answer_tokens
                seconds = max(seconds, 60 * tokens / options.max_tokens_per_minute)
            start = max(loop.time(), self._next_request)
            self._next_request = start + seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), max(0.0, start - loop.time()))
        return True


def _checked_response(response: Any) -> dict[str, Any]:
    answer: dict[str, Any] = response if isinstance(response, dict) else {}
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    message = choice.get("message", choice) if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise RetryableError("the service's response has no choice", _SERVICE_HINT)
    logprobs = choice.get("logprobs") or {}
    is_object = isinstance(logprobs, dict)
    lists = [logprobs.get(key) for key in ("content", "tokens", "top_logprobs")] if is_object else []
    if not is_object or not all(entries is None or isinstance(entries, list) for entries in lists):
        raise RetryableError("the service's log-probabilities are not lists", _SERVICE_HINT)
    return answer


def _refuse_without_logprobs(response: Mapping[str, Any]) -> None:
    choice = response["choices"][0]
    message, logprobs = choice.get("message", choice), choice.get("logprobs") or {}
    has_text = bool(message.get("content") or message.get("text"))
    if has_text and not logprobs.get("content") and not logprobs.get("tokens"):
        raise XtkError(
            "the service's answer has no log-probabilities", hint="use a model and a service with log-probabilities"
        )


def _refusal_hint(failure: PermanentError, options: ServiceOptions) -> str:
    if failure.status in (401, 403):
        return "set the API key: --api-key-env NAME"
    if "logprob" in failure.message:
        return f"use a smaller --top-logprobs (now {options.top_logprobs}); services allow 5 or 20"
    return "check the data and the options; answers so far are kept"
