"""vLLM servers: connection, concurrent requests, models, and a check of the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from xtk import terminal
from xtk.engines.http_client_pool import Endpoint, EndpointPool
from xtk.engines.server_responses import PermanentError, RetryableError
from xtk.errors import MismatchError, XtkError
from xtk.text.tokenizer import Tokenizer

COMPLETIONS_PATH = "/completions"
STARTUP_ATTEMPTS = 3  # few: a server that is unreachable at the start is probably a wrong address
PROBE_TEXT = (
    "The quick brown fox, aged 12345.67, jumps over 3 lazy dogs; isn't it?\n\n\tdef f(x):  return x**2 != 0\n"
    "Ärger, café, naïve; Ωμέγα, привет; 日本語の文, 한국어, العربية, हिन्दी 😀👍🏽 100% €5\r\n"
)
PROBE_VOCABULARY_TOKENS = 256
MIN_CONTEXT = 256  # context length in tokens that any server has
T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result, even if an event loop is already running."""
    returned: list[T] = []

    async def keep() -> None:
        # Not returned: asyncio leaves its task in a signal handler, whose repr Python computes, including that of the
        # result. For arrays that takes longer than all requests.
        returned.append(await coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(keep())
    else:
        with ThreadPoolExecutor(1) as other:  # inside a notebook, whose loop is running
            other.submit(asyncio.run, keep()).result()
    return returned[0]


def gather_responses(
    pool: EndpointPool, requests: Iterable[Coroutine[Any, Any, T]], max_concurrency: int | None = None
) -> list[T]:
    """Return the results of coroutines that send requests, in order; the first exception cancels the others."""

    async def gather() -> list[T]:
        async with pool.connected(max_concurrency):
            tasks = [asyncio.ensure_future(request) for request in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    return run_coroutine(gather())


def connect_servers(
    pool: EndpointPool,  # the servers; each gets the name of its model
    name: str,  # the model's name where the user has given none
    # tests a server of some context length in tokens; None: unknown
    probe: Callable[[Endpoint, int | None], Awaitable[T]],
    # returns the error for a refused request, from the refusal and the server
    refusal_error: Callable[[PermanentError, str], XtkError],
) -> tuple[int | None, list[T]]:
    """Return the minimum context length of servers in tokens, None if it is unknown, and the results of their tests."""

    async def connect() -> tuple[int | None, list[T]]:
        lengths, results = [], []
        async with pool.connected():
            for one in pool.endpoints:
                try:
                    models = await pool.request_one(one, "/models", None, parse_models, max_attempts=STARTUP_ATTEMPTS)
                    model = select_model(models, one, name)
                    one.model, one.owner = model["id"], str(model.get("owned_by") or "")
                    lengths.append(model.get("max_model_len"))
                    results.append(await probe(one, lengths[-1]))
                except PermanentError as error:
                    raise refusal_error(error, str(one)) from None
        return min((length for length in lengths if length is not None), default=None), results

    return run_coroutine(connect())


def only_choice(response: Any) -> dict[str, Any]:
    """Return the choice of a response to a completion request, which must have exactly one."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RetryableError("the server's response does not have exactly one completion (choices)")
    return choices[0]


def parse_models(answer: Any) -> list[dict[str, Any]]:
    """Return the models in a server's `/models` response."""
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not models:
        raise RetryableError("the server's response to /models is not a list of models")
    if not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
        raise RetryableError("the server's list of models has a model whose id is not a string")
    for length in (model.get("max_model_len") for model in models):
        if length is not None and (type(length) is not int or length < 1):
            raise RetryableError(
                f"the server's context length (max_model_len) is {str(length)[:40]!r}, but must be a positive integer"
            )
    return models


def select_model(models: list[dict[str, Any]], endpoint: Endpoint, name: str) -> dict[str, Any]:
    """Return the requested model; without a request the one named `name`, or the only one."""
    names = ", ".join(model["id"] for model in models)[:500]
    if endpoint.requested_model:
        requested = [model for model in models if model["id"] == endpoint.requested_model]
        if not requested:
            raise XtkError(
                f"the server has no model {endpoint.requested_model!r}",
                where=str(endpoint),
                hint=f"write one of its models after # in the server's URL: {names}",
            )
        return requested[0]
    same_name = [model for model in models if name in (model["id"], model.get("root"))]
    roots = {str(model.get("root") or model["id"]) for model in models}
    if not same_name and len(roots) > 1:
        raise XtkError(
            f"the server has several models: {names}",
            where=str(endpoint),
            hint=f"choose one: --server {endpoint}#{models[0]['id']}",
        )
    return (same_name or models)[0]


def tokenizer_probe(tokenizer: Tokenizer, limit: int | None) -> str:
    """Return a text on which tokenizers differ: several scripts, numbers, and tokens from the whole vocabulary."""
    vocabulary = tokenizer.vocabulary
    words = []
    for token in range(0, len(vocabulary), max(1, len(vocabulary) // PROBE_VOCABULARY_TOKENS)):
        word = vocabulary.bytes_of(token).decode(errors="replace")
        if word.isprintable() and "\ufffd" not in word:
            words.append(word)
    text = PROBE_TEXT + "".join(words)
    (encoded,) = tokenizer.encode([text])
    if len(encoded.ids) < (limit or MIN_CONTEXT):
        return text
    return text.encode()[: int(encoded.byte_ends[(limit or MIN_CONTEXT) // 2])].decode(errors="ignore")


def check_same_tokenizer(
    ours: list[int], theirs: list[int], tokenizer: Tokenizer, endpoint: Endpoint, command: str
) -> None:
    """Refuse a server whose token ids mean other tokens; print a note if it only splits the text differently."""
    vocabulary = tokenizer.vocabulary
    known = all(isinstance(token, int) and 0 <= token < len(vocabulary) for token in theirs)
    if known and b"".join(map(vocabulary.bytes_of, theirs)) == b"".join(map(vocabulary.bytes_of, ours)):
        terminal.note(
            f"{command}: {endpoint} has the vocabulary of {tokenizer.name} but splits text differently; "
            "xtk sends token ids of this tokenizer"
        )
        return
    at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    raise MismatchError(
        "the server's tokenizer differs from the tokenizer of the model that the command names",
        where=f"at token {at} of a test text: {endpoint} has the ids {str(theirs[at : at + 5])[:100]}, "
        f"{tokenizer.name} has {ours[at : at + 5]}",
        hint="pass the folder or hub id of the model that the server runs",
    )


def refusal_error(refusal: PermanentError, where: str, hint: str | None = None) -> XtkError:
    """Return an XtkError for a refused request, with `hint` unless the HTTP status implies a better one."""
    if refusal.status in (401, 403):
        hint = "set the server's API key in the environment variable XTK_API_KEY or OPENAI_API_KEY"
    elif refusal.status == 404:
        hint = "use the address that ends with /v1, such as --server http://localhost:8000/v1"
    return XtkError(f"the server refused the request: HTTP {refusal.status}: {refusal.message}", where=where, hint=hint)
