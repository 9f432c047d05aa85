"""Documents that a student wrote: its tokens are kept as it drew them, never tokenised anew.

The text of a stretch that was drawn is what its tokens spell, up to the first that spells no text: a control token, or
bytes that are no UTF-8. What comes behind is drawn too, and is compared with nothing.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.tokens.document import Document
from xtk.tokens.ids import DrawnTokens
from xtk.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Spelled:
    """What some tokens spell.

    Attributes:
        text: up to the first token that spells none.
        ends: int32 [n], the byte of the text where each of the tokens that spell it ends.
        closer: which token says that it has ended; -1: none does.
    """

    text: str
    ends: NDArray[np.int32]
    closer: int


def spelled(tokenizer: Tokenizer, ids: NDArray[np.int32], *, first: bool = False) -> Spelled:
    """Return what tokens spell that a model drew in a row.

    Args:
        tokenizer: its.
        ids: int32 [n].
        first: whether no text is before them; then a space that the tokenizer puts in front is none of theirs.
    """
    control = tokenizer.vocabulary.special[ids] | np.isin(ids, list(tokenizer.end_ids))
    count = int(control.argmax()) if control.any() else len(ids)
    raw = b"".join(map(tokenizer.vocabulary.spellings.__getitem__, ids[:count].tolist()))
    space = int(first and tokenizer.puts_space and raw.startswith(b" "))
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw[space:])
    except UnicodeDecodeError as wrong:
        text = raw[space : space + wrong.start].decode()
    ends = np.maximum(np.cumsum(tokenizer.vocabulary.lengths[ids[:count]]) - space, 0).astype(np.int32)
    ends = ends[: int(np.searchsorted(ends, len(text.encode()), side="right"))]
    whole = len(ends) == count and count == len(ids) - 1
    return Spelled(text, ends, count if whole and int(ids[count]) in tokenizer.end_ids else -1)


def drawn_by(tokenizer: Tokenizer, document: Document) -> DrawnTokens | None:
    """Return the tokens of a document that a model with this tokenizer wrote, as it reads them; None for others."""
    drawn = document.drawn
    if drawn is None or drawn.tokenizer != tokenizer.fingerprint:
        return None
    template = tokenizer.template_fingerprint if document.conversation is not None else ""
    return drawn if drawn.template == template else None


def read_drawn(tokenizer: Tokenizer, document: Document, drawn: DrawnTokens) -> dict[str, Any]:
    """Return the parts of a `Sequence` of drawn tokens. Prompts, templates and what tools answer are no text of it.

    Raises:
        XtkError: the trained segments are not what the tokens spell.
    """
    ids, size = drawn.ids, len(drawn.ids)
    edges = np.cumsum([0, *(len(segment.text.encode()) for segment in document.segments)])
    numbers = [number for number, segment in enumerate(document.segments) if segment.train]
    ends, closers = np.zeros(size, np.int32), np.full(len(document.segments), -1, np.int32)
    pieces: list[tuple[int, int, int]] = []
    runs = drawn.runs()
    if len(runs) != len(numbers):
        raise _other_text(tokenizer, f"{len(runs):,} stretches of tokens were drawn, and {len(numbers):,} are trained")
    for (start, stop), number in zip(runs.tolist(), numbers, strict=True):
        begin, text = int(edges[number]), document.segments[number].text
        said = spelled(tokenizer, ids[start:stop], first=begin == 0)
        if said.text != text:
            raise _other_text(tokenizer, f"the tokens spell {said.text[:60]!r}, and the text is {text[:60]!r}")
        if start:
            ends[start - 1] = begin
        past = start + len(said.ends)
        ends[start:past] = begin + said.ends
        if past > start:
            pieces.append((start, past, begin))
        if said.closer >= 0:
            closers[number] = start + said.closer
    trained = drawn.drawn.copy()
    trained[:1] = False
    return {
        "ids": ids,
        "ends": np.maximum.accumulate(ends) if size else ends,
        "trained": trained,
        "pieces": np.array(pieces, np.int32).reshape(-1, 3),
        "closers": closers,
    }


def _other_text(tokenizer: Tokenizer, what: str) -> XtkError:
    return XtkError(
        f"the text of a rollout is not that of its tokens: {what}",
        where=tokenizer.name,
        hint="rollouts as xtk rollout wrote them; without their student_ids they are data as any other",
    )


def behind(tokenizer: Tokenizer, prompt: str, document: Document) -> DrawnTokens | None:
    """Return the tokens of a text that a model with this tokenizer wrote, behind another prompt; None for others."""
    drawn = drawn_by(tokenizer, document)
    if drawn is None or not drawn.drawn.any():
        return None
    first = int(drawn.drawn.argmax())
    front = np.array([] if tokenizer.start_id is None else [tokenizer.start_id], np.int32)
    before = np.concatenate([front, tokenizer.encode([prompt])[0].ids])
    return replace(
        drawn,
        ids=np.concatenate([before, drawn.ids[first:]]),
        drawn=np.concatenate([np.zeros(len(before), np.bool_), drawn.drawn[first:]]),
        logprobs=np.concatenate([np.zeros(len(before), np.float32), drawn.logprobs[first:]]),
    )


def spliced(tokenizer: Tokenizer, document: Document, drawn: DrawnTokens, parts: dict[str, Any]) -> dict[str, Any]:
    """Put drawn tokens into what a model with the writer's tokenizer read behind another prompt or template.

    A stretch is put in where it begins and ends at the edge of a token; elsewhere it stays as it was tokenised.

    Args:
        tokenizer: the writer's.
        document: what the student wrote.
        drawn: its tokens.
        parts: of the `Sequence` that was read, in bytes of the document.

    Returns:
        The parts of another `Sequence`.
    """
    edges = np.cumsum([0, *(len(segment.text.encode()) for segment in document.segments)])
    numbers = [number for number, segment in enumerate(document.segments) if segment.train]
    ids, ends, trained = parts["ids"], parts["ends"], parts["trained"]
    pieces, closers = parts["pieces"].tolist(), parts["closers"].copy()
    for (start, stop), number in reversed(list(zip(drawn.runs().tolist(), numbers, strict=True))):
        first, last = int(edges[number]), int(edges[number + 1])
        said = spelled(tokenizer, drawn.ids[start:stop], first=first == 0)
        if not len(said.ends) or said.ends[-1] != last - first:
            continue
        for at, (low, high, begin) in enumerate(pieces):
            starts = np.concatenate([np.array([begin], np.int32), ends[low : high - 1]])
            left = int(np.searchsorted(starts, first)) + low
            right = int(np.searchsorted(ends[low:high], last)) + low + 1
            if not (left < right <= high and starts[left - low] == first and ends[right - 1] == last):
                continue
            own = drawn.ids[start : start + len(said.ends)]
            more = len(own) - (right - left)
            ids = np.concatenate([ids[:left], own, ids[right:]])
            ends = np.concatenate([ends[:left], first + said.ends, ends[right:]]).astype(np.int32)
            trained = np.concatenate([trained[:left], np.ones(len(own), np.bool_), trained[right:]])
            pieces[at] = [low, high + more, begin]
            pieces[at + 1 :] = [[one + more, other + more, byte] for one, other, byte in pieces[at + 1 :]]
            closers[closers >= right] += more
            break
    trained[:1] = False
    return {
        "ids": ids,
        "ends": ends,
        "trained": trained,
        "pieces": np.array(pieces, np.int32).reshape(-1, 3),
        "closers": closers,
    }
