"""Regions of trained tokens: answer, reasoning, its end, tool calls, the end of a turn, and other template text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error
from xtk.text.alignment import align_sequences
from xtk.text.chat.conversation_tokens import (
    END_OF_TURN,
    MARKUP_REGION,
    NO_REGION,
    REGIONS,
    first_regions,
    region_of_role,
)
from xtk.text.chat.parts import CONTENT, REASONING, REASONING_END, TOOL_START
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence as TokenSequence

_END = REGIONS.index(END_OF_TURN)

# What models write into a completion for which no parts are known: rollouts, and data with the marks in contents.
_REASONING = re.compile(r"(?:<think>|\[THINK\])?.*?(?P<end></think>|\[/THINK\])", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|(?:\[TOOL_CALLS\]|<\|python_tag\|>).*", re.DOTALL)
_MARKS = ("</think>", "[/THINK]", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


def token_regions(document: Document, sequence: TokenSequence) -> NDArray[np.uint8]:
    """Return the region of each token on which a loss is computed, uint8 [T], indices of `REGIONS`.

    It is the region in which the token begins, see `first_regions`. All other tokens have `NO_REGION`. Contents are
    answers, except for reasoning and tool calls between the marks that models write, such as `</think>`.
    """
    regions, trained = sequence.template_regions.copy(), sequence.train_mask
    of_bytes = byte_regions(document)
    if len(of_bytes):
        regions[trained] = first_regions(of_bytes, sequence.byte_starts[trained], sequence.byte_ends[trained])
    regions[trained & (regions == NO_REGION)] = region_of_role(CONTENT)  # tokens without text
    for end, segment in zip(sequence.segment_end_tokens.tolist(), document.segments, strict=False):
        if end >= 0 and trained[end]:
            is_mark = segment.role in (REASONING_END, TOOL_START)
            regions[end] = region_of_role(segment.role) if is_mark else _END
    return regions


def byte_regions(document: Document) -> NDArray[np.uint8]:
    """Return the region of each byte of a document's text, uint8 [bytes]; `NO_REGION` in parts that are not trained."""
    parts = []
    for segment in document.segments:
        size = len(segment.text.encode())
        regions = np.full(size, region_of_role(segment.role) if segment.train else NO_REGION, np.uint8)
        if (
            segment.train
            and segment.role in ("assistant", "completion")
            and any(mark in segment.text for mark in _MARKS)
        ):
            for start, stop, role in _parts_of_content(segment.text):
                first = len(segment.text[:start].encode())
                regions[first : first + len(segment.text[start:stop].encode())] = region_of_role(role)
        parts.append(regions)
    return np.concatenate([np.zeros(0, np.uint8), *parts])


def _parts_of_content(text: str) -> list[tuple[int, int, str]]:
    """Return (start, stop, role) of the reasoning, its end, and the tool calls in a content, in characters."""
    parts, start = list[tuple[int, int, str]](), 0
    if thought := _REASONING.match(text):
        start = thought.end()
        parts += [(0, thought.start("end"), REASONING), (thought.start("end"), start, REASONING_END)]
    return parts + [(*call.span(), TOOL_START) for call in _TOOL_CALL.finditer(text, start)]


class RegionWeights:
    """The weight of each trained region, 1 by default, and bounds in nats of the teacher's advantage in it."""

    def __init__(
        self,
        train_on: Sequence[str] = REGIONS,
        weights: Mapping[str, float] | None = None,
        advantage_bounds: Mapping[str, float] | None = None,
    ) -> None:
        self.weights = np.zeros(len(REGIONS))  # float64 [regions]; 0: not trained
        self.weights[[_region_index(name) for name in train_on]] = 1
        for name, weight in (weights or {}).items():
            if not self.weights[_region_index(name)]:
                raise XtkError(
                    f"--region-weights sets a weight for the region {name!r}, but --train-on leaves it out",
                    hint=f"add {name} to --train-on, or remove its weight",
                )
            self.weights[_region_index(name)] = weight
        # float32 [regions], the largest size of the teacher's advantage, in nats; infinite: unbounded.
        self.advantage_bounds = np.full(len(REGIONS), np.inf, np.float32)
        for name, bound in (advantage_bounds or {}).items():
            if not self.weights[_region_index(name)]:
                raise XtkError(
                    f"--advantage-clip sets a bound for the region {name!r}, but --train-on leaves it out",
                    hint=f"add {name} to --train-on, or remove its bound",
                )
            self.advantage_bounds[_region_index(name)] = bound

    def select(self, sequence: TokenSequence, regions: NDArray[np.uint8], *, with_template: bool) -> TokenSequence:
        """Return a sequence in which only tokens of trained regions are trained; `regions`: uint8 [T].

        `with_template`: whether losses without a teacher are computed on text of the model's own chat template.
        """
        is_trained = np.append(self.weights > 0, np.zeros(NO_REGION + 1 - len(REGIONS), np.bool_))[regions]
        template = np.where(is_trained & with_template, sequence.template_regions, np.uint8(NO_REGION))
        if is_trained[sequence.train_mask].all() and np.array_equal(template, sequence.template_regions):
            return sequence
        return replace(sequence, train_mask=sequence.train_mask & is_trained, template_regions=template)


def _region_index(given: str) -> int:
    name = given.replace("_", "-")
    if name not in REGIONS:
        raise unknown_name_error("region", name, REGIONS)
    return REGIONS.index(name)


class RegionStatistics:
    """Sizes of the regions of documents: bytes, or tokens where a region has no bytes of the documents' text.

    An end of a turn is one token, which has no bytes of the text; so has markup. Documents are conversations.
    """

    def __init__(self) -> None:
        # in_data: int64 [regions], of trained messages.
        # trained: int64 [regions], of these, those that the model trains.
        # aligned: int64 [regions], of these, those that are in a span with the other model's text.
        self.in_data, self.trained, self.aligned = (np.zeros(len(REGIONS), np.int64) for _ in range(3))

    def add(self, document: Document, sequence: TokenSequence, other: TokenSequence | None = None) -> None:
        """Count a document; `other`: the other model's tokens, None: nothing is aligned."""
        of_bytes, is_trained = byte_regions(document), _trained_bytes(document)
        self.in_data += np.bincount(of_bytes[is_trained], minlength=len(REGIONS))
        covered = _covered_bytes(document, sequence.byte_ranges(with_borders=True)) & is_trained
        self.trained += np.bincount(of_bytes[covered], minlength=len(REGIONS))
        ends = document.trained_messages
        if not document.is_complete and ends:
            ends[-1] = False
        self.in_data[_END] += sum(ends)
        regions = token_regions(document, sequence)
        self.trained[_END] += int((regions[sequence.train_mask] == _END).sum())
        self.in_data[MARKUP_REGION] += int((sequence.template_regions == MARKUP_REGION).sum())
        marks = self._special_marks(document, sequence, regions)
        for _, region, size in marks:
            self.trained[region] += size
        if other is None:
            return
        spans = align_sequences(sequence, other)
        spans = spans[sequence.train_mask[spans[:, 1] - 1]]
        is_end = np.isin(spans[:, 0], sequence.segment_end_tokens)
        self.aligned[_END] += int((regions[spans[is_end, 0]] == _END).sum())
        starts = sequence.byte_ends[np.maximum(spans[:, 0] - 1, 0)] * (spans[:, 0] > 0)
        ranges = np.column_stack([starts, sequence.byte_ends[spans[:, 1] - 1]])[~is_end]
        covered = _covered_bytes(document, ranges) & is_trained
        self.aligned += np.bincount(of_bytes[covered], minlength=len(REGIONS))
        paired = set(spans[is_end, 0].tolist())
        for token, region, size in marks:
            self.aligned[region] += size if token in paired else 0

    @staticmethod
    def _special_marks(
        document: Document, sequence: TokenSequence, regions: NDArray[np.uint8]
    ) -> list[tuple[int, int, int]]:
        """Return (token, region, bytes in the document's text) of marks that are trained special tokens."""
        return [
            (end, int(regions[end]), len(segment.text.encode()))
            for end, segment in zip(sequence.segment_end_tokens.tolist(), document.segments, strict=True)
            if end >= 0 and sequence.train_mask[end] and regions[end] != _END
        ]

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return `{region: {"size", "trained_fraction", "aligned_fraction"}}` of the regions that the data has."""
        return {
            name: {
                "size": int(size),
                "trained_fraction": round(min(1.0, float(trained / size)), 4),
                "aligned_fraction": round(min(1.0, float(aligned / size)), 4),
            }
            for name, size, trained, aligned in zip(REGIONS, self.in_data, self.trained, self.aligned, strict=True)
            if size
        }


def _trained_bytes(document: Document) -> NDArray[np.bool_]:
    sizes = [len(segment.text.encode()) for segment in document.segments]
    return np.repeat(np.array([segment.train for segment in document.segments], np.bool_), sizes)


def _covered_bytes(document: Document, ranges: NDArray[np.int32]) -> NDArray[np.bool_]:
    covered = np.zeros(len(document.text.encode()), np.bool_)
    for start, stop in ranges.tolist():
        covered[start:stop] = True
    return covered
