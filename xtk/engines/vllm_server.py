"""What is asked of any server of vLLM: which models it has, whether its tokens are ours."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from xtk import terminal
from xtk.engines.http_endpoints import Endpoint, PermanentError, RetryableError
from xtk.errors import MismatchError, XtkError
from xtk.tokens.tokenizer import Tokenizer

COMPLETIONS_PATH = "/completions"
STARTUP_ATTEMPTS = 3  # a server that is not there when the work begins is a mistake, not an accident
PROBE_TEXT = (
    "The quick brown fox, aged 12345.67, jumps over 3 lazy dogs; isn't it?\n\n\tdef f(x):  return x**2 != 0\n"
    "Ärger, café, naïve; Ωμέγα, привет; 日本語の文, 한국어, العربية, हिन्दी 😀👍🏽 100% €5\r\n"
)
PROBE_VOCABULARY_TOKENS = 256
MIN_CONTEXT = 256  # tokens that any server reads
MAX_TOKEN_RATIO = 8  # times as many as ours may be those of another tokenizer, which is then refused for that
T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run what waits, to its end, also where a loop is running already."""
    found: list[T] = []

    async def keep() -> None:
        # Not returned: asyncio leaves its task in a handler of signals, whose repr Python then writes, and with it that
        # of the result. Of arrays that takes longer than all requests.
        found.append(await coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(keep())
    else:
        with ThreadPoolExecutor(1) as other:  # inside a notebook, whose loop is running
            other.submit(asyncio.run, keep()).result()
    return found[0]


def first_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one of several errors."""
    one = group.exceptions[0]
    return first_exception(one) if isinstance(one, BaseExceptionGroup) else one


def parse_models(answer: Any) -> list[dict[str, Any]]:
    """Read what a server says of its models.

    Raises:
        BadAnswer: nothing.
    """
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not models:
        raise RetryableError("it names no models")
    if not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in models):
        raise RetryableError("it has a model whose id is no text")
    for length in (one.get("max_model_len") for one in models):
        if length is not None and (type(length) is not int or length < 1):
            raise RetryableError(f"it has a model whose max_model_len is no number of tokens: {str(length)[:40]!r}")
    return models


def select_model(models: list[dict[str, Any]], endpoint: Endpoint, name: str) -> dict[str, Any]:
    """Return the model that is meant: the one that was named, or the only one, or the one called as it is here.

    Raises:
        XtkError: it has several, or none of that name.
    """
    names = ", ".join(one["id"] for one in models)[:500]
    if endpoint.requested_model:
        found = [one for one in models if one["id"] == endpoint.requested_model]
        if not found:
            raise XtkError(f"the server has no model {endpoint.requested_model!r}", where=str(endpoint), hint=names)
        return found[0]
    called_so = [one for one in models if name in (one["id"], one.get("root"))]
    roots = {str(one.get("root") or one["id"]) for one in models}
    if not called_so and len(roots) > 1:
        raise XtkError(
            f"the server has several models: {names}",
            where=str(endpoint),
            hint=f"name one: --server {endpoint}#{models[0]['id']}",
        )
    return (called_so or models)[0]


def tokenizer_probe(tokenizer: Tokenizer, limit: int | None) -> str:
    """Return a text in which tokenizers differ: several scripts, numbers, and words from all over the vocabulary."""
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
    """Refuse a server for which the ids stand for other tokens; note one that only cuts a text elsewhere."""
    vocabulary = tokenizer.vocabulary
    known = all(isinstance(token, int) and 0 <= token < len(vocabulary) for token in theirs)
    if known and b"".join(map(vocabulary.bytes_of, theirs)) == b"".join(map(vocabulary.bytes_of, ours)):
        terminal.note(
            f"{command}: {endpoint} has the tokens of {tokenizer.name} and cuts texts into other ones; "
            "it reads those of this tokenizer"
        )
        return
    at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    raise MismatchError(
        "the server has another tokenizer",
        where=f"{endpoint} makes {str(theirs[at : at + 5])[:100]} where {tokenizer.name} makes {ours[at : at + 5]}, "
        f"at token {at} of a text",
        hint="the folder or hub id of the model that the server has is what is to be named",
    )


def refusal_error(refusal: PermanentError, where: str, hint: str | None) -> XtkError:
    """Return what is to be told of a refusal: with `hint`, but for what every server refuses."""
    if refusal.status in (401, 403):
        hint = "put its key into XTK_API_KEY (or OPENAI_API_KEY)"
    elif refusal.status == 404:
        hint = "the address ends with /v1: --server http://localhost:8000/v1"
    return XtkError(f"the server refuses: {refusal.status} {refusal.message}", where=where, hint=hint)
