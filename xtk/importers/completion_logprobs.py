"""Answers of OpenAI-compatible services with log-probabilities, and their tokens by their bytes."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.text.chat.parts import REASONING_KEYS
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence

# Spellings of special tokens in answers: services name them, although they are not part of the text.
_SPECIAL = re.compile(
    r"<\|[^|<>]{1,40}\|>|<\uff5c[^\uff5c<>]{1,60}\uff5c>|</?s>|<(eos|bos|pad|unk|end_of_turn|start_of_turn)>"
)
_LEGACY_BYTES = re.compile(r"bytes:((?:\\x[0-9a-fA-F]{2})+)")
COMPLETE = (None, "stop", "eos", "eos_token", "end_turn")  # finish reasons of an answer that was not truncated
FILTERED = "content_filter"  # finish reason of an answer that a filter of the service has cut or replaced
_UNKNOWN = "\ufffd".encode()
_LOWEST = -sys.float_info.max
MAX_LOGPROB = 1e-3  # rounding of services
UNLISTED_LOGPROB = -9999.0  # OpenAI's value for a token outside of the most likely 20; vLLM's for probability 0
MIN_REMAINDER = 1e-5  # a smaller one is a rounding error: the log-probabilities were normalized over the listed tokens
ROW_HINT = "remove this row, or use --skip-invalid"


@contextlib.contextmanager
def row_errors(where: str) -> Iterator[None]:
    """Raise what is wrong with a row as an error that names the row.

    Readers of rows raise ValueError with a sentence; other exceptions come from values of other types.
    """
    try:
        yield
    except XtkError as failure:
        raise XtkError(failure.what, where=where, hint=failure.hint) from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as failure:
        what = str(failure) if type(failure) is ValueError else "a value of the row has another type than its format"
        raise XtkError(what, where=where, hint=ROW_HINT) from None


@dataclass(frozen=True)
class ListedToken:
    """A token of an answer, or one that is listed at its position."""

    spelling: bytes | None  # its bytes; None: it is special, or they are unknown
    logprob: float | None  # its log-probability, nats; None: of the first token of a scored text
    top: tuple[ListedToken, ...] = ()  # of a token of an answer, the most likely tokens at its position


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer of a service, with log-probabilities."""

    document: Document  # the prompt and the answer, which is its last segment
    # Its tokens; the last may be the end token. Of a scored text, the first has no log-probability, and may be the
    # start token.
    tokens: tuple[ListedToken, ...]
    model: str  # the name of the model; "": unknown
    fingerprint: str = ""  # of the service's configuration; "": unknown. Services change it without another model.
    num_joined: int = 0  # characters that the service wrote for several tokens, without their log-probabilities
    num_bounded: int = 0  # number of tokens without a log-probability, for which an upper bound is used
    num_unknown: int = 0  # number of tokens without one, of which nothing is known

    @property
    def spellings(self) -> Iterator[bytes]:
        """All bytes of tokens that it lists."""
        listed = [*self.tokens, *(other for token in self.tokens for other in token.top)]
        return (entry.spelling for entry in listed if entry.spelling)

    def tokenized(self, token_id: Callable[[bytes], int], start_id: int, end_id: int) -> TokenSequence:
        """Return the answer as the teacher's tokens, after a start token; `token_id` gives the id of bytes, or -1."""
        tokens = self.tokens[_starts_with_start_token(self.tokens) :]
        ids = [end_id if token.spelling is None else token_id(token.spelling) for token in tokens]
        has_end = bool(tokens) and tokens[-1].spelling is None
        size = len(self.document.segments[-1].text.encode())
        first = len(self.document.text.encode()) - size
        ends = first + np.cumsum([0, *(len(token.spelling or b"") for token in tokens)])
        closers = np.full(len(self.document.segments), -1, np.int32)
        closers[-1] = len(ids) if has_end else -1
        num_text = len(ids) - has_end
        return TokenSequence(
            ids=np.array([start_id, *ids], np.int32),
            byte_ends=ends.astype(np.int32),
            train_mask=np.array([False, *(token.logprob is not None for token in tokens)], np.bool_),
            text_runs=np.array([[1, 1 + num_text, first]] if num_text else [], np.int32).reshape(-1, 3),
            segment_end_tokens=closers,
        )


def is_completion_record(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an answer of a service, alone or with its request."""
    return _response_of(record) is not None


def read_answer(record: Mapping[str, Any]) -> ScoredAnswer:
    """Return the answer in a record, within `row_errors`.

    Args:
        record: a chat or text completion object with "messages" or "prompt" added, or {"request", "response"}, both
            also as the body of a batch.
    """
    response = _response_of(record)
    assert response is not None
    request = record.get("request") or record
    request = request.get("body", request)
    choices = response["choices"]
    if len(choices) != 1:
        raise ValueError(f"the answer has {len(choices)} choices, but must have one")
    choice = choices[0]
    if choice.get("finish_reason") == FILTERED:
        raise ValueError(f"a filter of the service has cut or replaced the answer (finish_reason {FILTERED})")
    is_chat, is_echo = "message" in choice, bool(request.get("echo"))
    message = choice["message"] if is_chat else choice
    # The log-probabilities of the content follow from the other parts of an answer.
    for part, keys in {"a tool call": ("tool_calls", "function_call"), "reasoning": REASONING_KEYS}.items():
        if any(message.get(key) for key in keys):
            raise ValueError(f"the answer has {part} apart from its content")
    content = str((request.get("prompt") if is_echo else message.get("content" if is_chat else "text")) or "")
    logprobs = choice.get("logprobs") or {}
    num_joined, complete = 0, choice.get("finish_reason") in COMPLETE
    if entries := logprobs.get("content"):
        tokens = [_token(entry) for entry in entries]
        usage = response.get("usage")
        num_tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        has_unlisted_end = complete and tokens[-1].spelling is not None
        tokens, num_joined = _without_joined(entries, tokens, num_tokens, has_unlisted_end)
    elif logprobs.get("tokens"):
        tokens = _read_text_logprobs(logprobs, is_echo=is_echo)
        if is_echo:
            tokens = _without_generated(content, tokens)
    elif not content:
        raise ValueError("the answer is empty")
    else:
        raise ValueError("the answer has no log-probabilities; request them with logprobs and top_logprobs")
    if not complete and not is_echo:
        content, tokens = _without_cut_character(content, tokens)
    tokens, num_bounded, num_unknown = _with_bounds(tokens)
    _check_spellings(content, tokens)
    model, fingerprint = str(response.get("model") or ""), str(response.get("system_fingerprint") or "")
    document = Document.from_text(content) if is_echo else _document(request, content, is_chat, complete)
    return ScoredAnswer(document, tuple(tokens), model, fingerprint, num_joined, num_bounded, num_unknown)


def _response_of(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    response = record.get("response", record)
    for key in ("body", "response"):
        if isinstance(response, Mapping) and key in response and "choices" not in response:
            response = response[key]
    return response if isinstance(response, Mapping) and isinstance(response.get("choices"), list) else None


def _document(request: Mapping[str, Any], content: str, is_chat: bool, complete: bool) -> Document:
    messages, prompt = request.get("messages"), request.get("prompt")
    if messages:
        answer = {"role": "assistant", "content": content}
        document = Document.from_messages(
            [*messages, answer], tools=request.get("tools"), num_prompt_messages=len(messages)
        )
    elif isinstance(prompt, str) and not is_chat:
        document = Document.from_completion(prompt, content)
    else:
        raise ValueError("the row has no messages or prompt of its request; write them into each row")
    return Document(document.segments, is_complete=complete, conversation=document.conversation)


def _with_bounds(tokens: Sequence[ListedToken]) -> tuple[list[ListedToken], int, int]:
    """Return the tokens with bounds instead of `UNLISTED_LOGPROB`, and how many are bounded and how many unknown.

    A token outside of a list has at most the probability of the remainder, and that of the least likely listed token.
    """
    bounded: list[ListedToken] = []
    num_bounded = num_unknown = 0
    for token in tokens:
        top = tuple(entry for entry in token.top if entry.logprob is None or entry.logprob > UNLISTED_LOGPROB)
        logprob = token.logprob
        if logprob is not None and logprob <= UNLISTED_LOGPROB:
            logprob = upper_bound(np.array([entry.logprob for entry in top if entry.logprob is not None], np.float64))
            num_bounded += logprob is not None
            num_unknown += logprob is None
        bounded.append(ListedToken(token.spelling, logprob, top))
    return bounded, num_bounded, num_unknown


def upper_bound(listed: NDArray[np.floating]) -> float | None:
    """Return the largest log-probability that a token outside of a list can have.

    None if nothing is known: the list is empty, or has all probability.
    """
    remainder = 1 - float(np.exp(listed).sum())
    if not len(listed) or remainder < MIN_REMAINDER:
        return None
    return float(min(listed.min(), np.log(remainder)))


def _without_joined(
    entries: Sequence[Mapping[str, Any]], tokens: Sequence[ListedToken], num_tokens: Any, has_unlisted_end: bool
) -> tuple[list[ListedToken], int]:
    """Return the tokens without the log-probabilities of characters that are several tokens, and their number.

    llama.cpp holds tokens back until a character is complete, and writes one entry with the bytes of the character and
    the log-probability and list of its last token. Such an entry becomes tokens of one byte that are not scored.

    Args:
        num_tokens: that the service counted; None: it did not.
        has_unlisted_end: whether one of them may be the end token, which has no entry.
    """
    is_short = isinstance(num_tokens, int) and num_tokens > len(tokens) + has_unlisted_end
    kept: list[ListedToken] = []
    num_joined = 0
    for entry, token in zip(entries, tokens, strict=True):
        others = entry.get("top_logprobs") or []
        same = [other.get("bytes") for other in others if "id" in entry and other.get("id") == entry["id"]]
        is_unlisted = bool(token.top) and all(other.spelling != token.spelling for other in token.top)
        is_joined = token.spelling is not None and not token.spelling.isascii() and (
            any(given != entry.get("bytes") for given in same) or (is_short and is_unlisted)
        )  # fmt: skip
        num_joined += is_joined
        kept += [ListedToken(bytes([byte]), None) for byte in token.spelling or b""] if is_joined else [token]
    return kept, num_joined


def _token(entry: Mapping[str, Any]) -> ListedToken:
    return replace(_listed(entry), top=tuple(_listed(other) for other in entry.get("top_logprobs") or ()))


def _listed(entry: Mapping[str, Any]) -> ListedToken:
    text, given = entry.get("token"), entry.get("bytes")
    spelling = bytes([*given]) if given else None
    if spelling is None and isinstance(text, str) and "\ufffd" not in text:
        legacy = _LEGACY_BYTES.fullmatch(text)
        spelling = bytes.fromhex(legacy[1].replace("\\x", "")) if legacy else text.encode("utf-8", "replace") or None
    # vLLM states the bytes of U+FFFD for tokens that end inside of a character.
    if spelling is not None and (_UNKNOWN in spelling or _SPECIAL.fullmatch(spelling.decode("utf-8", "replace"))):
        spelling = None
    return ListedToken(spelling, _checked_logprob(entry.get("logprob")))


def _read_text_logprobs(logprobs: Mapping[str, Any], *, is_echo: bool) -> list[ListedToken]:
    names, values = logprobs["tokens"], logprobs.get("token_logprobs") or []
    lists = logprobs.get("top_logprobs") or [{}] * len(names)
    if not len(names) == len(values) == len(lists):
        raise ValueError("tokens, token_logprobs and top_logprobs have different lengths")
    entries = [
        {"token": name, "logprob": value, "top_logprobs": [
            {"token": other, "logprob": other_value} for other, other_value in (listed or {}).items()]}
        for name, value, listed in zip(names, values, lists, strict=True)
    ]  # fmt: skip
    if is_echo and values and values[0] is None:
        first = replace(_token(entries[0] | {"logprob": 0.0}), logprob=None)
        return [first, *map(_token, entries[1:])]
    return [*map(_token, entries)]


def _without_cut_character(content: str, tokens: list[ListedToken]) -> tuple[str, list[ListedToken]]:
    """Return a truncated answer without tokens of an incomplete character at its end."""
    for dropped in range(min(4, len(tokens) + 1)):
        kept = tokens[: len(tokens) - dropped]
        try:
            text = b"".join(token.spelling or b"" for token in kept).decode()
        except UnicodeDecodeError:
            continue
        # Services write U+FFFD for what is left of the character; llama.cpp has no entry for it.
        is_same = content.startswith(text) and not content[len(text) :].strip("\ufffd")
        return (text, kept) if is_same else (content, tokens)
    return content, tokens


def _without_generated(content: str, tokens: list[ListedToken]) -> list[ListedToken]:
    """Return the tokens of a scored text, without those that the service generated after it."""
    left, size = len(content.encode()), 0
    for count, token in enumerate(tokens):
        if size >= left and count:
            return tokens[:count]
        size += len(token.spelling or b"")
    return tokens


def _checked_logprob(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _LOWEST <= value <= MAX_LOGPROB:  # NaN is neither
        raise ValueError(f"a log-probability is {value!r:.40}, but must be a number of at most 0")
    return min(float(value), 0.0)


def _starts_with_start_token(tokens: Sequence[ListedToken]) -> bool:
    """Return whether the first token is the start token of a scored text."""
    return bool(tokens) and tokens[0].logprob is None and tokens[0].spelling is None


def _check_spellings(content: str, tokens: Sequence[ListedToken]) -> None:
    """Refuse tokens whose bytes are not those of the content; the last one may be the end token."""
    inner = tokens[:-1] if tokens and tokens[-1].spelling is None else tokens
    inner = inner[_starts_with_start_token(inner) :]
    if any(token.spelling is None for token in inner):
        raise ValueError("the bytes of a token are missing")
    written = b"".join(token.spelling or b"" for token in inner)
    if written != content.encode():
        raise ValueError(
            f"the log-probabilities are of another text than the answer: {written[:40]!r} and {content[:40]!r}"
        )
