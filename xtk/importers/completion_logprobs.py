"""Answers of OpenAI-compatible services with log-probabilities, and their tokens by their bytes."""

from __future__ import annotations

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
_ROW_HINT = "remove this row, or use --skip-invalid"


@dataclass(frozen=True)
class ListedToken:
    """A token of an answer.

    Attributes:
        spelling: its bytes; None: it is special, or they are unknown.
        logprob: its log-probability, nats; None: of the first token of a scored text.
    """

    spelling: bytes | None
    logprob: float | None


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer of a service, with log-probabilities.

    Attributes:
        document: the prompt and the answer, which is its last segment.
        tokens: the tokens of the answer; the last may be the end token. Of a scored text, the first has no
            log-probability, and may be the start token.
        top: for each of them the most likely tokens.
        model: the name of the model; "": unknown.
        fingerprint: of the service's configuration; "": unknown. Services change it without another model.
        num_joined: number of characters that the service wrote for several tokens, without their log-probabilities.
        num_bounded: number of tokens without a log-probability, for which an upper bound is used.
        num_unknown: number of tokens without one, of which nothing is known.
    """

    document: Document
    tokens: tuple[ListedToken, ...]
    top: tuple[tuple[ListedToken, ...], ...]
    model: str
    fingerprint: str = ""
    num_joined: int = 0
    num_bounded: int = 0
    num_unknown: int = 0

    @property
    def spellings(self) -> Iterator[bytes]:
        """All bytes of tokens that it lists."""
        listed = [*self.tokens, *(one for position in self.top for one in position)]
        return (entry.spelling for entry in listed if entry.spelling)

    def tokenized(self, token_id: Callable[[bytes], int], start_id: int, end_id: int) -> TokenSequence:
        """Return the answer as the teacher's tokens, after a start token.

        Args:
            token_id: the id of a token's bytes; -1: none.
        """
        first_is_start = bool(self.tokens) and self.tokens[0].logprob is None and self.tokens[0].spelling is None
        spellings = [token.spelling for token in self.tokens[first_is_start:]]
        ids = [end_id if spelling is None else token_id(spelling) for spelling in spellings]
        scored = [token.logprob is not None for token in self.tokens[first_is_start:]]
        has_end = bool(spellings) and spellings[-1] is None
        size = len(self.document.segments[-1].text.encode())
        first = len(self.document.text.encode()) - size
        ends = first + np.cumsum([0, *(len(spelling or b"") for spelling in spellings)])
        closers = np.full(len(self.document.segments), -1, np.int32)
        closers[-1] = len(ids) if has_end else -1
        num_text = len(ids) - has_end
        return TokenSequence(
            ids=np.array([start_id, *ids], np.int32),
            byte_ends=ends.astype(np.int32),
            train_mask=np.array([False, *scored], np.bool_),
            text_runs=np.array([[1, 1 + num_text, first]] if num_text else [], np.int32).reshape(-1, 3),
            segment_end_tokens=closers,
        )


def is_completion_record(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an answer of a service, alone or with its request."""
    return _response_of(record) is not None


def read_answer(record: Mapping[str, Any], where: str) -> ScoredAnswer:
    """Return the answer in a record.

    Args:
        record: a chat or text completion object with "messages" or "prompt" added, or {"request", "response"}, both
            also as the body of a batch.
        where: name of the record in errors.
    """
    response = _response_of(record)
    assert response is not None
    request = _mapping(record.get("request") or record, "request", where)
    request = _mapping(request.get("body", request), "body of the request", where)
    choices = response["choices"]
    if len(choices) != 1:
        raise XtkError(f"the answer has {len(choices)} choices, but must have one", where=where, hint=_ROW_HINT)
    choice = _mapping(choices[0], "choice", where)
    if choice.get("finish_reason") == FILTERED:
        what = f"a filter of the service has cut or replaced the answer (finish_reason {FILTERED})"
        raise XtkError(what, where=where, hint=_ROW_HINT)
    is_chat = "message" in choice
    message = _mapping(choice["message"], "message", where) if is_chat else choice
    content = str(message.get("content" if is_chat else "text") or "")
    _refuse_parts_apart(message, where)
    logprobs = _mapping(choice.get("logprobs") or {}, "logprobs", where)
    is_echo = bool(request.get("echo"))
    if is_echo:
        content = str(request.get("prompt") or "")
    if logprobs.get("content"):
        tokens, top = _read_chat_logprobs(logprobs["content"], where)
    elif logprobs.get("tokens"):
        tokens, top = _read_text_logprobs(logprobs, where, is_echo=is_echo)
        if is_echo:
            tokens, top = _without_generated(content, tokens, top)
    elif not content:
        raise XtkError("the answer is empty", where=where, hint=_ROW_HINT)
    else:
        raise XtkError("the answer has no log-probabilities", where=where, hint="request them with logprobs and "
                       "top_logprobs")  # fmt: skip
    num_joined, complete = 0, choice.get("finish_reason") in COMPLETE
    if logprobs.get("content"):
        usage = response.get("usage")
        num_tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
        has_unlisted_end = complete and tokens[-1].spelling is not None
        tokens, top, num_joined = _without_joined(logprobs["content"], tokens, top, num_tokens, has_unlisted_end)
    if not complete and not is_echo:
        content, tokens, top = _without_cut_character(content, tokens, top)
    tokens, top, num_bounded, num_unknown = _with_bounds(tokens, top)
    checked = _checked_tokens(content, tokens, top, where)
    model, fingerprint = str(response.get("model") or ""), str(response.get("system_fingerprint") or "")
    document = Document.from_text(content) if is_echo else _document(request, content, is_chat, complete, where)
    return ScoredAnswer(document, *checked, model, fingerprint, num_joined, num_bounded, num_unknown)


def _refuse_parts_apart(message: Mapping[str, Any], where: str) -> None:
    """Refuse an answer with more than its content: the log-probabilities of the content follow from the other parts."""
    parts = {"a tool call": ("tool_calls", "function_call"), "reasoning": REASONING_KEYS}
    for part, keys in parts.items():
        if any(message.get(key) for key in keys):
            raise XtkError(f"the answer has {part} apart from its content", where=where, hint=_ROW_HINT)


def _mapping(value: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise XtkError(f"the {name} of the row is not an object", where=where, hint=_ROW_HINT)
    return value


def _response_of(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    response = record.get("response", record)
    for key in ("body", "response"):
        if isinstance(response, Mapping) and key in response and "choices" not in response:
            response = response[key]
    return response if isinstance(response, Mapping) and isinstance(response.get("choices"), list) else None


def _document(request: Mapping[str, Any], content: str, is_chat: bool, complete: bool, where: str) -> Document:
    messages, prompt = request.get("messages"), request.get("prompt")
    if messages is not None and not isinstance(messages, list):
        raise XtkError("the messages of the row are not a list", where=where, hint=_ROW_HINT)
    try:
        if messages:
            answer = {"role": "assistant", "content": content}
            document = Document.from_messages(
                [*messages, answer], tools=request.get("tools"), num_prompt_messages=len(messages)
            )
        elif isinstance(prompt, str) and not is_chat:
            document = Document.from_completion(prompt, content)
        else:
            raise ValueError("the row has no messages or prompt of its request")
    except ValueError as failure:
        raise XtkError(str(failure), where=where, hint="write the request's messages or prompt into each row") from None
    return Document(document.segments, is_complete=complete, conversation=document.conversation)


def _read_chat_logprobs(content: Any, where: str) -> tuple[list[ListedToken], list[list[ListedToken]]]:
    entries = _list(content, "logprobs.content", where)
    tokens = [_listed(entry, where) for entry in entries]
    lists = [_list(entry.get("top_logprobs") or [], "top_logprobs", where) for entry in entries]
    return tokens, [[_listed(entry, where) for entry in listed] for listed in lists]


def _with_bounds(
    tokens: Sequence[ListedToken], top: Sequence[Sequence[ListedToken]]
) -> tuple[list[ListedToken], list[list[ListedToken]], int, int]:
    """Return the tokens with bounds instead of `UNLISTED_LOGPROB`, and how many are bounded and how many unknown.

    A token outside of a list has at most the probability of the remainder, and that of the least likely listed token.
    """
    lists = [[entry for entry in listed if entry.logprob is None or entry.logprob > UNLISTED_LOGPROB] for listed in top]
    bounded: list[ListedToken] = []
    num_bounded = num_unknown = 0
    for token, listed in zip(tokens, lists, strict=True):
        if token.logprob is None or token.logprob > UNLISTED_LOGPROB:
            bounded.append(token)
            continue
        logprobs = np.array([other.logprob for other in listed if other.logprob is not None], np.float64)
        bound = upper_bound(logprobs)
        num_bounded += bound is not None
        num_unknown += bound is None
        bounded.append(replace(token, logprob=bound))
    return bounded, lists, num_bounded, num_unknown


def upper_bound(listed: NDArray[np.floating]) -> float | None:
    """Return the largest log-probability that a token outside of a list can have.

    None if nothing is known: the list is empty, or has all probability.

    Args:
        listed: log-probabilities, nats.
    """
    remainder = 1 - float(np.exp(listed).sum())
    if not len(listed) or remainder < MIN_REMAINDER:
        return None
    return float(min(listed.min(), np.log(remainder)))


def _without_joined(
    entries: Sequence[Mapping[str, Any]],
    tokens: Sequence[ListedToken],
    top: Sequence[Sequence[ListedToken]],
    num_tokens: Any,
    has_unlisted_end: bool,
) -> tuple[list[ListedToken], list[list[ListedToken]], int]:
    """Return the tokens without the log-probabilities of characters that are several tokens, and their number.

    llama.cpp holds tokens back until a character is complete, and writes one entry with the bytes of the character and
    the log-probability and list of its last token. Such an entry becomes tokens of one byte that are not scored.

    Args:
        num_tokens: that the service counted; None: it did not.
        has_unlisted_end: whether one of them may be the end token, which has no entry.
    """
    is_short = isinstance(num_tokens, int) and num_tokens > len(tokens) + has_unlisted_end
    kept: list[ListedToken] = []
    lists: list[list[ListedToken]] = []
    num_joined = 0
    for entry, one, listed in zip(entries, tokens, top, strict=True):
        others = entry.get("top_logprobs") or []
        same = [other.get("bytes") for other in others if "id" in entry and other.get("id") == entry["id"]]
        is_unlisted = bool(listed) and all(other.spelling != one.spelling for other in listed)
        is_joined = one.spelling is not None and not one.spelling.isascii() and (
            any(given != entry.get("bytes") for given in same) or (is_short and is_unlisted)
        )  # fmt: skip
        num_joined += is_joined
        bytes_alone = [ListedToken(bytes([byte]), None) for byte in one.spelling or b""] if is_joined else []
        kept += bytes_alone or [one]
        lists += [[] for _ in bytes_alone] or [list(listed)]
    return kept, lists, num_joined


def _list(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise XtkError(f"{name} of the row is not a list", where=where, hint=_ROW_HINT)
    return value


def _listed(given_entry: Any, where: str) -> ListedToken:
    entry = _mapping(given_entry, "token", where)
    text, given = entry.get("token"), entry.get("bytes")
    spelling = None
    if isinstance(given, list) and given:
        if not all(isinstance(item, int) and 0 <= item < 256 for item in given):
            raise XtkError("the bytes of a token are not numbers from 0 to 255", where=where, hint=_ROW_HINT)
        spelling = bytes(given)
    if spelling is None and isinstance(text, str) and "\ufffd" not in text:
        spelling = _bytes_of_text(text)
    # vLLM states the bytes of U+FFFD for tokens that end inside of a character.
    if spelling is not None and (_UNKNOWN in spelling or _SPECIAL.fullmatch(spelling.decode("utf-8", "replace"))):
        spelling = None
    return ListedToken(spelling, _checked_logprob(entry.get("logprob"), where))


def _bytes_of_text(text: str) -> bytes | None:
    if legacy := _LEGACY_BYTES.fullmatch(text):
        return bytes.fromhex(legacy[1].replace("\\x", ""))
    return text.encode("utf-8", "replace") or None


def _read_text_logprobs(
    logprobs: Mapping[str, Any], where: str, *, is_echo: bool
) -> tuple[list[ListedToken], list[list[ListedToken]]]:
    names = _list(logprobs["tokens"], "tokens", where)
    values = _list(logprobs.get("token_logprobs") or [], "token_logprobs", where)
    listed = _list(logprobs.get("top_logprobs") or [{}] * len(names), "top_logprobs", where)
    if not len(names) == len(values) == len(listed):
        what = "tokens, token_logprobs and top_logprobs have different lengths"
        raise XtkError(what, where=where, hint=_ROW_HINT)
    pairs = [*zip(names, values, strict=True)]
    first = pairs[: int(is_echo and bool(values) and values[0] is None)]
    tokens = [replace(_listed({"token": name, "logprob": 0.0}, where), logprob=None) for name, _ in first]
    tokens += [_listed({"token": name, "logprob": value}, where) for name, value in pairs[len(first) :]]
    return tokens, [
        [
            _listed({"token": name, "logprob": value}, where)
            for name, value in _mapping(entry or {}, "top_logprobs", where).items()
        ]
        for entry in listed
    ]


def _without_cut_character(
    content: str, tokens: list[ListedToken], top: list[list[ListedToken]]
) -> tuple[str, list[ListedToken], list[list[ListedToken]]]:
    """Return a truncated answer without tokens of an incomplete character at its end."""
    for dropped in range(min(4, len(tokens) + 1)):
        kept = len(tokens) - dropped
        written = b"".join(token.spelling or b"" for token in tokens[:kept])
        try:
            text = written.decode()
        except UnicodeDecodeError:
            continue
        # Services write U+FFFD for what is left of the character; llama.cpp has no entry for it.
        is_same = content.startswith(text) and not content[len(text) :].strip("\ufffd")
        return (text, tokens[:kept], top[:kept]) if is_same else (content, tokens, top)
    return content, tokens, top


def _without_generated(
    content: str, tokens: list[ListedToken], top: list[list[ListedToken]]
) -> tuple[list[ListedToken], list[list[ListedToken]]]:
    """Return the tokens of a scored text, without those that the service generated after it."""
    left, size = len(content.encode()), 0
    for count, token in enumerate(tokens):
        if size >= left and count:
            return tokens[:count], top[:count]
        size += len(token.spelling or b"")
    return tokens, top


def _checked_logprob(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _LOWEST <= value <= MAX_LOGPROB:  # NaN is neither
        raise XtkError(
            f"a log-probability is {value!r:.40}, but must be a number of at most 0", where=where, hint=_ROW_HINT
        )
    return min(float(value), 0.0)


def _checked_tokens(
    content: str, tokens: Sequence[ListedToken], top: Sequence[Sequence[ListedToken]], where: str
) -> tuple[tuple[ListedToken, ...], tuple[tuple[ListedToken, ...], ...]]:
    """Return the tokens, if their bytes are those of the content; the last one may be the end token."""
    inner = tokens[:-1] if tokens and tokens[-1].spelling is None else tokens
    if inner and inner[0].logprob is None and inner[0].spelling is None:  # the start token of a scored text
        inner = inner[1:]
    if any(item.spelling is None for item in inner):
        raise XtkError("the bytes of a token are missing", where=where, hint=_ROW_HINT)
    written = b"".join(item.spelling or b"" for item in inner)
    if written != content.encode():
        raise XtkError(
            f"the log-probabilities are of another text than the answer: {written[:40]!r} and {content[:40]!r}",
            where=where,
            hint=_ROW_HINT,
        )
    return tuple(tokens), tuple(map(tuple, top))
