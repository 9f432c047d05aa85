"""Bytes of conversations by region: in the data, trained by the student, and aligned with the teacher."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xtk.text.alignment import align_sequences
from xtk.text.chat.conversation_tokens import END_OF_TURN, MARKUP, REGIONS
from xtk.text.chat.regions import byte_regions, token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence as TokenSequence

_END, _MARKUP = REGIONS.index(END_OF_TURN), REGIONS.index(MARKUP)


class RegionStatistics:
    """Sizes of the regions of documents: bytes, or tokens where a region has no bytes of the documents' text.

    An end of a turn is one token, which has no bytes of the text; so has markup. Documents are conversations.

    Attributes:
        in_data: int64 [regions], of trained messages.
        trained: int64 [regions], of these, those that the model trains.
        aligned: int64 [regions], of these, those that are in a span with the other model's text.
    """

    def __init__(self) -> None:
        self.in_data, self.trained, self.aligned = (np.zeros(len(REGIONS), np.int64) for _ in range(3))

    def add(self, document: Document, sequence: TokenSequence, other: TokenSequence | None = None) -> None:
        """Count a document.

        Args:
            other: the other model's tokens; None: nothing is aligned.
        """
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
        self.in_data[_MARKUP] += int((sequence.template_regions == _MARKUP).sum())
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
