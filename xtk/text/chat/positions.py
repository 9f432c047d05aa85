"""Positions of the parts of messages in a rendered conversation.

A conversation is rendered a second time with a placeholder for each part, and for each leaf of a tool call's arguments.
Between the placeholders is the template's own text, so walking along it finds where each part is in the first
rendering, whichever text the parts have. Only where a template looks into the parts (for example, it splits
a content at `</think>`) this fails; then each part is searched for in the range that depends on it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.text.chat.parts import (
    CONTENT,
    MARKS,
    REASONING,
    REASONING_END,
    REASONING_KEY,
    TOOL_ARGUMENTS,
    TOOL_NAME,
    MessagePart,
    json_escaped,
    replace_leaves,
)
from xtk.text.different_text_alignment import matching_runs

# Characters that Unicode never assigns; templates neither strip them nor split at them.
PLACEHOLDER_CHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_FIRST_NUMBER = 73_100_000_001  # placeholder of the first number of a conversation

Run = tuple[int, int, int]


@dataclass(frozen=True)
class PartPosition:
    """Position of a message's part in a rendered conversation."""

    # [R, 3], ascending: characters `[a, a + n)` of the part are `[b, b + n)` of the text, as (a, b, n). One run if the
    # template copies the part unchanged.
    runs: NDArray[np.int32]
    start: int  # the first character of the part
    stop: int  # the character after the part

    @classmethod
    def from_runs(cls, runs: Sequence[Run], start: int, stop: int) -> PartPosition:
        """Return a position."""
        return cls(np.array(runs, np.int32).reshape(-1, 3), start, stop)


@dataclass
class Placeholders:
    """Messages with placeholders, and what stands for what."""

    messages: list[dict[str, Any]]  # the messages
    # For each part its placeholders with their values: one, or one for each leaf of arguments.
    marks: list[list[tuple[str, str | int | float]]] = field(default_factory=list)


def insert_placeholders(messages: Sequence[Mapping[str, Any]], parts: Sequence[MessagePart]) -> Placeholders:
    """Return the messages with a placeholder instead of each part that is not empty; marks have none.

    An empty content stays empty: templates render messages without a content differently.
    """
    mark = unused_character(part.text for part in parts)
    letters = _unused_letters([part.text for part in parts])
    result = Placeholders([dict(message) for message in messages])
    for count, part in enumerate(parts):
        message, marks = result.messages[part.message], list[tuple[str, str | int | float]]()
        if part.kind in (CONTENT, REASONING) and part.text:
            message[CONTENT if part.kind == CONTENT else REASONING_KEY] = f"{mark}{count}{mark}"
            marks = [(f"{mark}{count}{mark}", part.text)]
        elif part.kind in (TOOL_NAME, TOOL_ARGUMENTS):
            calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
            message["tool_calls"] = calls
            if part.kind == TOOL_NAME:
                marks = [(f"{letters}{count}x", part.text)] if part.text else []
                calls[part.call]["function"]["name"] = marks[0][0] if marks else part.text
            else:
                texts: dict[Any, Any] = {}
                for number, leaf in enumerate(part.leaves):
                    as_text = isinstance(leaf.value, str)
                    own: Any = f"{letters}{count}x{number}x" if as_text else _FIRST_NUMBER + 100_000 * count + number
                    texts[leaf.path, leaf.is_key] = own
                    marks.append((str(own), leaf.value))
                function = calls[part.call]["function"]
                function["arguments"] = replace_leaves(function["arguments"], texts)
        result.marks.append(marks)
    return result


def locate_parts(
    parts: Sequence[MessagePart], marks: Sequence[Sequence[tuple[str, str | int | float]]], text: str, skeleton: str
) -> list[PartPosition | None] | None:
    """Return the position of each part, None where the template omits it; None if the skeleton does not fit the text.

    The parts are in the order of the template; the skeleton is the text rendered with placeholders.
    """
    flat = [pair for of_part in marks for pair in of_part]
    places = _walk(flat, text, skeleton)
    if places is None:
        return None
    remaining = iter(places)
    result = list[PartPosition | None]()
    for part, of_part in zip(parts, marks, strict=True):
        own = [next(remaining) for _ in of_part]
        if part.kind == TOOL_ARGUMENTS:
            result.append(_position_of_arguments(part, own, text))
        elif own and own[0] is not None:
            result.append(_position_of_content(part.text, *own[0]))
        else:
            result.append(None)
    _locate_empty_arguments(parts, result, text)
    return locate_marks(parts, result, text)


def _walk(
    marks: Sequence[tuple[str, str | int | float]], text: str, skeleton: str
) -> list[tuple[int, str] | None] | None:
    """Return for each placeholder where its value begins in the text, and how it is written there."""
    at = place = 0
    places = list[tuple[int, str] | None]()
    rest = [(mark, value, skeleton.find(mark)) for mark, value in marks]
    present = [(mark, value, where) for mark, value, where in rest if where >= 0]
    if any(skeleton.find(mark, where + 1) >= 0 for mark, _, where in present):
        return None  # rendered twice
    if any(one[2] > other[2] for one, other in itertools.pairwise(present)):
        return None  # the template has another order
    following = {mark: where for (mark, _, _), (_, _, where) in itertools.pairwise(present)}
    for mark, value, where in rest:
        if where < 0:
            places.append(None)
            continue
        between = skeleton[at:where]
        if not text.startswith(between, place):
            return None
        place += len(between)
        at = where + len(mark)
        after = skeleton[at : following.get(mark, len(skeleton))]
        is_last = mark not in following
        written = next(
            (
                form
                for form in _written_forms(value)
                if text.startswith(form, place)
                and (text[place + len(form) :] == after if is_last else text.startswith(after, place + len(form)))
            ),
            None,
        )
        if written is None:
            return None
        places.append((place, written))
        place += len(written)
    return places if text[place:] == skeleton[at:] else None


def _written_forms(value: str | float) -> Iterator[str]:
    """Yield how templates write a text or a number: as it is, without white space at its ends, as in JSON."""
    if not isinstance(value, str):
        yield json.dumps(value)
        yield str(value)
        return
    forms = (value, json_escaped(value), json_escaped(value, ascii_only=True), value.strip(), value.strip("\n"),
             value.lstrip("\n"), value.rstrip("\n"), value.lstrip(), value.rstrip())  # fmt: skip
    yield from dict.fromkeys(forms)


def _position_of_content(own: str, at: int, written: str) -> PartPosition:
    """Return the position, from `at` on, of a content that a template writes as it is, in part, or as JSON."""
    if (first := own.find(written)) >= 0:
        return _single_run(first, at, len(written))
    ascii_only = written != json_escaped(own)
    runs, text_at = list[Run](), at
    for own_at, character in enumerate(own):
        form = json_escaped(character, ascii_only=ascii_only)
        if form == character and runs and own_at == runs[-1][0] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        elif form == character:
            runs.append((own_at, text_at, 1))
        text_at += len(form)
    return PartPosition.from_runs(runs, at, at + len(written))


def _position_of_arguments(
    part: MessagePart, leaves: Sequence[tuple[int, str] | None], text: str
) -> PartPosition | None:
    """Return the position of arguments from those of their leaves, with the punctuation that both texts share."""
    runs = list[Run]()
    for leaf, place in zip(part.leaves, leaves, strict=True):
        if place is not None:
            runs += _leaf_runs(part.text, leaf.start, leaf.stop, *place)
    if not runs:
        return None
    return _joined(part.text, runs, text)


def _joined(own: str, runs: Sequence[Run], text: str) -> PartPosition:
    """Return runs, joined where the texts between them are equal, and extended to the ends if these are."""
    merged = list[Run]()
    for a, b, size in runs:
        if merged:
            first, at, length = merged[-1]
            if own[first + length : a] == text[at + length : b]:
                merged[-1] = (first, at, b + size - at)
                continue
        merged.append((a, b, size))
    first, at, length = merged[0]
    if first and text[max(at - first, 0) : at] == own[:first]:
        merged[0] = (0, at - first, length + first)
    first, at, length = merged[-1]
    if (rest := own[first + length :]) and text.startswith(rest, at + length):
        merged[-1] = (first, at, length + len(rest))
    return PartPosition.from_runs(merged, merged[0][1], merged[-1][1] + merged[-1][2])


def _leaf_runs(own: str, start: int, stop: int, at: int, written: str) -> Iterator[Run]:
    """Yield the runs of a leaf, written at `at`: all of it, or what is equal between escaped characters."""
    escaped = own[start:stop]
    if written in escaped:
        yield start + escaped.find(written), at, len(written)
        return
    plain = json.loads(f'"{escaped}"') if "\\" in escaped else escaped
    skipped = plain.find(written) if written in plain else -1
    if skipped < 0:
        return
    own_at, text_at, run = start + len(json_escaped(plain[:skipped])), at, 0
    for character in written:
        size = len(json_escaped(character))
        if size == 1:
            run += 1
            continue
        if run:
            yield own_at, text_at, run
        own_at, text_at, run = own_at + run + size, text_at + run + 1, 0
    if run:
        yield own_at, text_at, run


def _locate_empty_arguments(parts: Sequence[MessagePart], positions: list[PartPosition | None], text: str) -> None:
    """Locate arguments without leaves, such as {}, in the template's text after the name, if they are there once."""
    for number, part in enumerate(parts):
        before = positions[number - 1] if number else None
        if part.kind == TOOL_ARGUMENTS and positions[number] is None and part.text and before is not None:
            following = next((position for position in positions[number + 1 :] if position is not None), None)
            stop = len(text) if following is None else following.start
            if text.count(part.text, before.stop, stop) == 1:
                at = text.index(part.text, before.stop, stop)
                positions[number] = _single_run(0, at, len(part.text))


def locate_marks(
    parts: Sequence[MessagePart], positions: Sequence[PartPosition | None], text: str
) -> list[PartPosition | None]:
    """Return the positions with those of the marks that the template writes as `MARKS` has them.

    The mark is the last one between its neighbors for the start of a call, the first one for the end of reasoning.
    """
    result = list(positions)
    for number, part in enumerate(parts):
        if part.kind not in MARKS:
            continue
        before = next((one for one in reversed(result[:number]) if one is not None), None)
        following = next((position for position in positions[number + 1 :] if position is not None), None)
        start, stop = (0 if before is None else before.stop), (len(text) if following is None else following.start)
        is_start = part.kind != REASONING_END
        neighbor = following if is_start else before
        at = text.rfind(part.text, start, stop) if is_start else text.find(part.text, start, stop)
        if at >= 0 and neighbor is not None and _belongs(parts, positions, number):
            result[number] = _single_run(0, at, len(part.text))
    return result


def _belongs(parts: Sequence[MessagePart], positions: Sequence[PartPosition | None], number: int) -> bool:
    """Return whether the part that a mark belongs to (the reasoning before, the name after) has a position."""
    return positions[number - 1 if parts[number].kind == REASONING_END else number + 1] is not None


def search_parts(
    parts: Sequence[MessagePart], regions: Sequence[tuple[int, int] | None], text: str
) -> list[PartPosition | None]:
    """Return the position of each part in the range of the text that depends on it; for tool calls, in their order.

    `regions`: the range of each content and each reasoning; None: it is omitted, or is no such part.
    """
    positions = [
        None if region is None else _locate_in_region(part.text, text, region)
        for part, region in zip(parts, regions, strict=True)
    ]
    positions = _drop_out_of_order_runs(positions)
    for number, part in enumerate(parts):
        if part.kind not in (TOOL_NAME, TOOL_ARGUMENTS):
            continue
        start = max((position.stop for position in positions[:number] if position is not None), default=0)
        stop = min((position.start for position in positions[number + 1 :] if position is not None), default=len(text))
        if part.kind == TOOL_NAME and part.text and (at := text.find(part.text, start, stop)) >= 0:
            positions[number] = _single_run(0, at, len(part.text))
        elif part.kind == TOOL_ARGUMENTS and positions[number - 1] is not None:
            places = _search_leaves(part, text, start, stop)
            positions[number] = None if places is None else _position_of_arguments(part, places, text)
    _locate_empty_arguments(parts, positions, text)
    return locate_marks(parts, positions, text)


def _search_leaves(part: MessagePart, text: str, start: int, stop: int) -> list[tuple[int, str] | None] | None:
    places = list[tuple[int, str] | None]()
    for leaf in part.leaves:
        forms = [(text.find(form, start, stop), form) for form in _written_forms(leaf.value) if form]
        there = [(at, form) for at, form in forms if at >= 0]
        if not there:
            return None
        places.append(there[0])
        start = there[0][0] + len(there[0][1])
    return places


def _locate_in_region(content: str, text: str, region: tuple[int, int]) -> PartPosition:
    """Return the position of a content in the range of the text that depends on it.

    Templates that drop text (reasoning, white space) keep the end of it, so the last of several matches is used.
    """
    start, stop = region
    part = text[start:stop]
    for candidate in (content, content.strip()):
        if candidate and (at := part.rfind(candidate)) >= 0:
            return _single_run(content.find(candidate), start + at, len(candidate))
    for kept in (part, part.strip()):
        if kept and (at := content.rfind(kept)) >= 0:
            return _single_run(at, start + part.find(kept), len(kept))
    back = matching_runs(content[::-1], part[::-1])[::-1]
    ends = np.array([len(content), len(part)]) - back[:, :2]
    runs = np.column_stack([ends - back[:, 2:], back[:, 2:]]) + np.array([0, start, 0])
    return PartPosition(runs.astype(np.int32), int(runs[0, 1]) if len(runs) else stop, stop)


def _single_run(own: int, at: int, size: int) -> PartPosition:
    return PartPosition.from_runs([(own, at, size)] if size else [], at, at + size)


def _drop_out_of_order_runs(places: Sequence[PartPosition | None]) -> list[PartPosition | None]:
    """Remove runs that do not come after those of the previous part.

    If a template changes one part depending on another, the range of the text that depends on it is too wide.
    """
    result: list[PartPosition | None] = []
    last = 0
    for place in places:
        if place is None:
            result.append(None)
            continue
        runs = place.runs[place.runs[:, 1] >= last]
        start = int(runs[0, 1]) if len(runs) else max(place.stop, last)
        last = int(runs[-1, 1] + runs[-1, 2]) if len(runs) else last
        result.append(PartPosition(runs, start, max(place.stop, last)))
    return result


def unused_character(texts: Iterable[str]) -> str:
    """Return a character that no text contains, and that templates copy."""
    read = list(texts)
    for mark in PLACEHOLDER_CHARACTERS:
        if not any(mark in text for text in read):
            return mark
    raise XtkError(
        "a conversation contains all Unicode noncharacters U+FDD0 to U+FDEF; at least one must be unused",
        hint="remove one of these characters from the messages",
    )


def _unused_letters(texts: Sequence[str]) -> str:
    """Return letters that no text contains: what stands in JSON must not be escaped."""
    number = 0
    while any((letters := f"Zq{number}k") in text for text in texts):
        number += 1
    return letters if texts else "Zq0k"
