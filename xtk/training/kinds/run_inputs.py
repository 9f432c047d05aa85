"""The opened inputs of a run, in the form that all kinds of runs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.batches.combine_teachers import ScoreWeighting
from xtk.batches.data_sources import DocumentSource
from xtk.batches.micro_batches import BatchBuilder, BatchSampler
from xtk.errors import XtkError
from xtk.losses.term import LossTerm
from xtk.runs.model_card import Provenance
from xtk.text.chat.conversation_tokens import END_OF_TURN, NO_REGION, REGIONS
from xtk.text.chat.regions import RegionWeights, byte_regions, token_regions
from xtk.text.document import Document
from xtk.text.normalization_changes import count_normalization_loss
from xtk.text.token_sequence import TokenSequence, count_lost_bytes, format_lost_bytes, tokenize_documents
from xtk.text.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutData
from xtk.training.online_teacher_scoring import TeacherBlocks
from xtk.training.train_config import TrainConfig
from xtk.training.training_loop import TrainingRun

DOCUMENTS_PER_CHECK = 1000
MAX_NORMALIZED_GROWTH = 11  # of the bytes of a text: NFKC writes the 3 bytes of U+FDFA as 33


@dataclass(frozen=True)
class RunInputs:
    """The opened inputs of a run, checked against each other."""

    source: DocumentSource  # documents, with teacher outputs
    tokenizer: Tokenizer  # the student's tokenizer
    objectives: tuple[LossTerm, ...]  # the terms of the loss
    # Losses and input fingerprints, which decide with the options whether two runs are the same
    identity: dict[str, Any]
    teachers: tuple[str, ...] = ()  # the teachers' names in metrics
    # How teacher weights follow from their log-probabilities; None: the weights are fixed
    score_weighting: ScoreWeighting | None = None
    auto_loss_note: str = ""  # the losses that `--loss auto` chose and why; "": it was not used
    held_out: HeldOutData | None = None  # held-out caches for evaluation; None: there are none
    provenance: Provenance = field(default_factory=Provenance)  # base model, teachers and data, for the model card
    ce_on_data_only: bool = False  # whether losses without a teacher ignore documents that the student generated

    def batch_builder(
        self, max_length: int | None, packing_multiple: int = 0, region_weights: RegionWeights | None = None
    ) -> BatchBuilder:
        """Return the builder of micro-batches."""
        return BatchBuilder(
            self.source, self.tokenizer, self.objectives, max_length, self.score_weighting, self.teachers,
                packing_multiple,
            ce_on_data_only=self.ce_on_data_only, region_weights=region_weights,
        )  # fmt: skip

    def training_documents(self, recipe: TrainConfig, limit: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return int64 indices of the documents to train on, and the bytes of all; print notes on others."""
        sizes = self.source.text_bytes()
        weightless = self.source.weights() == 0
        documents = np.flatnonzero((sizes > 0) & ~weightless)
        if weightless.any():
            terminal.note(f"distill: skipping {weightless.sum():,} of {len(sizes):,} documents, whose weight is 0")
        sample = documents[:: -(-len(documents) // DOCUMENTS_PER_CHECK) or 1]
        read = self._read(sample)
        self._report_changed_text(read)
        self._report_untrained(documents, sample, read, recipe.regions)
        if limit is not None:
            documents = np.setdiff1d(documents, self.documents_to_skip(recipe, limit, np.arange(len(sizes)), sizes))
        if not len(documents):
            raise XtkError(
                "no document is left to train on: all are empty, have the weight 0 or are too long",
                hint="use other data or --weight-column, or --long-documents truncate",
            )
        return documents, sizes

    def sampler(
        self, recipe: TrainConfig, documents: NDArray[np.int64], sizes: NDArray[np.int64], documents_per_step: int
    ) -> BatchSampler:
        """Return the sampler of the documents of each step."""
        return BatchSampler(documents, sizes, documents_per_step, recipe.seed)

    def teacher_blocks(self, run: TrainingRun) -> TeacherBlocks | None:
        """Return the blocks of steps that online teachers score, and print their settings; None: no online teachers."""
        return None

    def _read(self, numbers: NDArray[np.int64]) -> list[tuple[Document, TokenSequence | None]]:
        """Return documents, conversations with their tokens as the student's chat template prints them."""
        documents = [self.source.document(int(number)) for number in numbers]
        conversations = [document for document in documents if document.conversation is not None]
        tokenized = iter(tokenize_documents(self.tokenizer, conversations))
        return [(document, None if document.conversation is None else next(tokenized)) for document in documents]

    def _report_changed_text(self, read: Sequence[tuple[Document, TokenSequence | None]]) -> None:
        """Print how much text the student's tokenizer or chat template changes in a sample of the documents."""
        texts = [document.text for document, tokens in read if tokens is None]
        if warning := count_normalization_loss(self.tokenizer, texts).warning():
            terminal.note(f"distill: {warning}")
        counts = [count_lost_bytes(document, tokens) for document, tokens in read if tokens is not None]
        if sum(counts):
            terminal.note("distill: " + format_lost_bytes(counts))

    def _report_untrained(
        self,
        documents: NDArray[np.int64],
        sample: NDArray[np.int64],
        read: Sequence[tuple[Document, TokenSequence | None]],
        regions: RegionWeights,
    ) -> None:
        """Print how many documents have nothing to train, in a sample of the documents that was read."""
        with_template = not all(objective.uses_teacher for objective in self.objectives)

        def count_trained(read: Sequence[tuple[Document, TokenSequence | None]]) -> int:
            return sum(_is_trained(*sequence, regions, with_template=with_template) for sequence in read)

        untrained = len(sample) - count_trained(read)
        if untrained == len(sample) and len(sample):
            others = np.setdiff1d(documents, sample)
            parts = (others[at : at + DOCUMENTS_PER_CHECK] for at in range(0, len(others), DOCUMENTS_PER_CHECK))
            if not any(count_trained(self._read(part)) for part in parts):
                raise XtkError(
                    f"none of the {len(documents):,} documents has text to train",
                    where=f"document {documents[0]}; {self.tokenizer.name}",
                    hint="check --train-on, the roles of messages (only assistant messages are trained), completions "
                    "that are empty, and that the student's chat template prints the assistant's messages",
                )
        if untrained:
            terminal.note(
                f"distill: {untrained:,} of {len(sample):,} checked documents have no text to train (only assistant "
                "messages and completions are trained)"
            )

    def documents_to_skip(
        self, recipe: TrainConfig, limit: int, numbers: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> list[int]:
        """Return indices into `numbers` of documents to skip for their length, and print how many are too long."""
        too_long = self._longer_than(limit, numbers, sizes)
        if not too_long:
            return []
        longest, place = max(too_long)
        message = f"{len(too_long):,} of {len(sizes):,} documents have more tokens than the limit of {limit:,}"
        if recipe.long_documents == "refuse":
            raise XtkError(
                message,
                where=f"the longest is document {place} with {longest:,} tokens",
                hint="use --long-documents truncate or --long-documents skip",
            )
        terminal.note(f"distill: {message}: --long-documents {recipe.long_documents}")
        return [place for _, place in too_long] if recipe.long_documents == "skip" else []

    def _longer_than(self, limit: int, numbers: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return (tokens, index into `numbers`) of the documents with more than `limit` tokens.

        A text has at most one token per byte after normalization, two special tokens and a prepended space, so only
        texts that may be longer are tokenized. The length of a conversation's template is not known.
        """
        too_long = []
        most = sizes * (MAX_NORMALIZED_GROWTH if self.tokenizer.has_normalizer else 1) + 3
        candidates = np.flatnonzero((most > limit) | self.source.conversations()[numbers])
        for start in range(0, len(candidates), DOCUMENTS_PER_CHECK):
            places = candidates[start : start + DOCUMENTS_PER_CHECK].tolist()
            documents = [self.source.document(int(numbers[place])) for place in places]
            for place, sequence in zip(places, tokenize_documents(self.tokenizer, documents), strict=True):
                if len(sequence) > limit:
                    too_long.append((len(sequence), place))
        return too_long


def _is_trained(
    document: Document, tokens: TokenSequence | None, regions: RegionWeights, *, with_template: bool
) -> bool:
    """Return whether a document has trained text in a trained region, or trained text of the chat template."""
    trained = [part.train for part in document.segments]
    if not any(part.text for part in document.segments if part.train):
        return False
    if tokens is not None:
        selected = regions.select(tokens, token_regions(document, tokens), with_template=with_template)
        return bool(selected.train_mask.any() or (selected.template_regions != NO_REGION).any())
    in_trained_part = np.repeat(trained, [len(part.text.encode()) for part in document.segments])
    weights = regions.weights[byte_regions(document)[in_trained_part]]
    return bool(weights.any() or regions.weights[REGIONS.index(END_OF_TURN)])
