"""Regions of trained tokens: answer, reasoning, its end, tool calls, the end of a turn, and other template text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.name_registry import unknown_name_error
from xtk.text.chat.conversation_tokens import (
    END_OF_TURN,
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
    """The weight of each region in training.

    Attributes:
        weights: float64 [regions]; 0: not trained.
        advantage_bounds: float32 [regions], the largest size of the teacher's advantage, in nats; infinite: unbounded.

    Args:
        weights: {region: weight}, of trained regions; 1 for others.
        advantage_bounds: {region: nats}.
    """

    def __init__(
        self,
        train_on: Sequence[str] = REGIONS,
        weights: Mapping[str, float] | None = None,
        advantage_bounds: Mapping[str, float] | None = None,
    ) -> None:
        self.weights = np.zeros(len(REGIONS))
        self.weights[[_region_index(name) for name in train_on]] = 1
        for name, weight in (weights or {}).items():
            if not self.weights[_region_index(name)]:
                raise XtkError(
                    f"--region-weights has a weight of {name}, which is not trained",
                    hint=f"add {name} to --train-on, or remove its weight",
                )
            self.weights[_region_index(name)] = weight
        self.advantage_bounds = np.full(len(REGIONS), np.inf, np.float32)
        for name, bound in (advantage_bounds or {}).items():
            if not self.weights[_region_index(name)]:
                raise XtkError(
                    f"--advantage-clip has a bound of {name}, which is not trained",
                    hint=f"add {name} to --train-on, or remove its bound",
                )
            self.advantage_bounds[_region_index(name)] = bound

    def select(self, sequence: TokenSequence, regions: NDArray[np.uint8], *, with_template: bool) -> TokenSequence:
        """Return a sequence in which only tokens of trained regions are trained.

        Args:
            regions: uint8 [T], their regions.
            with_template: whether losses without a teacher are computed on text of the model's own chat template.
        """
        is_trained = np.append(self.weights > 0, np.zeros(NO_REGION + 1 - len(REGIONS), np.bool_))[regions]
        template = np.where(is_trained & with_template, sequence.template_regions, np.uint8(NO_REGION))
        if is_trained[sequence.train_mask].all() and np.array_equal(template, sequence.template_regions):
            return sequence
        return sequence.with_training(sequence.train_mask & is_trained, template)


def _region_index(given: str) -> int:
    name = given.replace("_", "-")
    if name not in REGIONS:
        raise unknown_name_error("region", name, REGIONS)
    return REGIONS.index(name)
