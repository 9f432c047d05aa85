"""Decoding and alignment of sampled tokens: a rollout keeps the ids that the student sampled, without retokenization.

The text of a run of sampled tokens ends before the first token without text: a special token, or bytes that are not
UTF-8. Tokens after it are part of the sequence but not aligned.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.text.document import Document
from xtk.text.document_token_ids import SampledTokens
from xtk.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DecodedTokens:
    """The text of tokens."""

    text: str  # text up to the first token without text
    byte_ends: NDArray[np.int32]  # [n], the byte ends of the tokens in the text
    end_token: int  # index of the stop token after the text; -1 without one


def decode_tokens(tokenizer: Tokenizer, ids: NDArray[np.int32], *, at_text_start: bool = False) -> DecodedTokens:
    """Return the text of consecutively sampled tokens, int32 [n].

    `at_text_start`: whether no text precedes them; then a space that the tokenizer prepends is not part of the text.
    """
    control = tokenizer.vocabulary.special_mask[ids] | np.isin(ids, list(tokenizer.turn_end_ids))
    count = int(control.argmax()) if control.any() else len(ids)
    raw = b"".join(map(tokenizer.vocabulary.bytes_by_id.__getitem__, ids[:count].tolist()))
    space = int(at_text_start and tokenizer.adds_prefix_space and raw.startswith(b" "))
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw[space:])
    except UnicodeDecodeError as error:
        text = raw[space : space + error.start].decode()
    ends = np.maximum(np.cumsum(tokenizer.vocabulary.byte_lengths[ids[:count]]) - space, 0).astype(np.int32)
    ends = ends[: int(np.searchsorted(ends, len(text.encode()), side="right"))]
    complete = len(ends) == count and count == len(ids) - 1
    return DecodedTokens(text, ends, count if complete and int(ids[count]) in tokenizer.turn_end_ids else -1)


def completion_text(tokenizer: Tokenizer, ids: NDArray[np.int32], *, at_text_start: bool = False) -> str:
    """Return all text of sampled tokens, as rewards and environments read it; `at_text_start` as in `decode_tokens`.

    Special tokens inside of it, such as marks of reasoning, are written by name; the stop token at its end is left out.
    """
    sampled = ids.tolist()
    if sampled and sampled[-1] in tokenizer.stop_ids:
        sampled = sampled[:-1]
    names, spellings = tokenizer.special_token_names, tokenizer.vocabulary.bytes_by_id
    raw = b"".join(names[token].encode() if token in names else spellings[token] for token in sampled)
    space = int(at_text_start and tokenizer.adds_prefix_space and raw.startswith(b" "))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(raw[space:])


def sampled_tokens_for(tokenizer: Tokenizer, document: Document) -> SampledTokens | None:
    """Return the sampled tokens of a document if tokenizer and template are those of its student; else None."""
    sampled = document.sampled_tokens
    if sampled is None or sampled.tokenizer_fingerprint != tokenizer.fingerprint:
        return None
    size = len(tokenizer.vocabulary)
    if len(sampled.ids) and int(sampled.ids.max()) >= size:
        raise XtkError(
            f"student_ids of a rollout contains token id {int(sampled.ids.max())}, but this tokenizer has ids 0 to "
            f"{size - 1:,}",
            where=f"{tokenizer.name}; the rollout that begins {document.text[:40]!r}",
            hint="use the rollouts of xtk rollout with this student, unchanged",
        )
    template = tokenizer.template_fingerprint if document.conversation is not None else ""
    return sampled if sampled.template_fingerprint == template else None


def _decode_run(tokenizer: Tokenizer, ids: NDArray[np.int32], text: str, *, is_first: bool) -> DecodedTokens:
    """Return a decoded run of sampled tokens, the first of a document without the space in front if its text has none.

    The document does not record whether its student had a prompt: it may have that of a teacher now.
    """
    decoded = decode_tokens(tokenizer, ids)
    return decode_tokens(tokenizer, ids, at_text_start=True) if is_first and decoded.text != text else decoded


def sequence_fields_from_sampled(tokenizer: Tokenizer, document: Document, sampled: SampledTokens) -> dict[str, Any]:
    """Return the fields of a `TokenSequence` of sampled tokens, not aligned in prompts, templates and tool messages."""
    ids, size = sampled.ids, len(sampled.ids)
    edges = np.cumsum([0, *(len(segment.text.encode()) for segment in document.segments)])
    numbers = [number for number, segment in enumerate(document.segments) if segment.train]
    ends, end_tokens = np.zeros(size, np.int32), np.full(len(document.segments), -1, np.int32)
    text_runs: list[tuple[int, int, int]] = []
    runs = sampled.sampled_runs()
    if len(runs) != len(numbers):
        raise _text_mismatch_error(
            tokenizer, f"{len(runs):,} runs of sampled tokens, but {len(numbers):,} trained segments"
        )
    for (start, stop), number in zip(runs.tolist(), numbers, strict=True):
        begin, text = int(edges[number]), document.segments[number].text
        decoded = _decode_run(tokenizer, ids[start:stop], text, is_first=number == numbers[0])
        if decoded.text != text:
            raise _text_mismatch_error(
                tokenizer, f"the tokens decode to {decoded.text[:60]!r}, but the text is {text[:60]!r}"
            )
        if start:
            ends[start - 1] = begin
        past = start + len(decoded.byte_ends)
        ends[start:past] = begin + decoded.byte_ends
        if past > start:
            text_runs.append((start, past, begin))
        if decoded.end_token >= 0:
            end_tokens[number] = start + decoded.end_token
    trained = sampled.sampled_mask.copy()
    trained[:1] = False
    return {
        "ids": ids,
        "byte_ends": np.maximum.accumulate(ends) if size else ends,
        "train_mask": trained,
        "text_runs": np.array(text_runs, np.int32).reshape(-1, 3),
        "segment_end_tokens": end_tokens,
    }


def _text_mismatch_error(tokenizer: Tokenizer, what: str) -> XtkError:
    return XtkError(
        f"a rollout's text does not match its student_ids: {what}",
        where=tokenizer.name,
        hint="use the output of xtk rollout unchanged, or remove student_ids to tokenize the text again",
    )


def replace_prompt(tokenizer: Tokenizer, prompt: str, document: Document) -> SampledTokens | None:
    """Return the sampled tokens of a text after another prompt; None if they are of another tokenizer or template."""
    sampled = sampled_tokens_for(tokenizer, document)
    if sampled is None or not sampled.sampled_mask.any():
        return None
    first = int(sampled.sampled_mask.argmax())
    before = np.concatenate([np.array(tokenizer.start_ids, np.int32), tokenizer.encode([prompt])[0].ids])
    return replace(
        sampled,
        ids=np.concatenate([before, sampled.ids[first:]]),
        sampled_mask=np.concatenate([np.zeros(len(before), np.bool_), sampled.sampled_mask[first:]]),
        logprobs=np.concatenate([np.zeros(len(before), np.float32), sampled.logprobs[first:]]),
    )


def splice_sampled_tokens(
    tokenizer: Tokenizer, document: Document, sampled: SampledTokens, sequence_fields: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a `TokenSequence` with sampled tokens in place of tokenized text, after another prompt.

    A run is replaced only if it begins and ends on token boundaries. `sequence_fields`: those of the tokenized text.
    """
    edges = np.cumsum([0, *(len(segment.text.encode()) for segment in document.segments)])
    numbers = [number for number, segment in enumerate(document.segments) if segment.train]
    ids, ends, trained = sequence_fields["ids"], sequence_fields["byte_ends"], sequence_fields["train_mask"]
    text_runs, end_tokens = sequence_fields["text_runs"].tolist(), sequence_fields["segment_end_tokens"].copy()
    for (start, stop), number in reversed(list(zip(sampled.sampled_runs().tolist(), numbers, strict=True))):
        first, last = int(edges[number]), int(edges[number + 1])
        text = document.segments[number].text
        decoded = _decode_run(tokenizer, sampled.ids[start:stop], text, is_first=number == numbers[0])
        if not len(decoded.byte_ends) or decoded.byte_ends[-1] != last - first:
            continue
        for at, (low, high, begin) in enumerate(text_runs):
            starts = np.concatenate([np.array([begin], np.int32), ends[low : high - 1]])
            left = int(np.searchsorted(starts, first)) + low
            right = int(np.searchsorted(ends[low:high], last)) + low + 1
            if not (left < right <= high and starts[left - low] == first and ends[right - 1] == last):
                continue
            if document.conversation is not None and decoded.byte_ends[0] > 0:
                # A separate space token of the template before the content is not one of the sampled tokens.
                space = int(np.searchsorted(ends[left:right], first, side="right"))
                trained[left : left + space] = False
                low, left = low + space * (left == low), left + space
            own = sampled.ids[start : start + len(decoded.byte_ends)]
            more = len(own) - (right - left)
            ids = np.concatenate([ids[:left], own, ids[right:]])
            ends = np.concatenate([ends[:left], first + decoded.byte_ends, ends[right:]]).astype(np.int32)
            trained = np.concatenate([trained[:left], np.ones(len(own), np.bool_), trained[right:]])
            text_runs[at] = [low, high + more, begin]
            text_runs[at + 1 :] = [
                [text_run + more, other + more, byte] for text_run, other, byte in text_runs[at + 1 :]
            ]
            end_tokens[end_tokens >= right] += more
            break
    trained[:1] = False
    return {
        "ids": ids,
        "byte_ends": ends,
        "train_mask": trained,
        "text_runs": np.array(text_runs, np.int32).reshape(-1, 3),
        "segment_end_tokens": end_tokens,
    }
