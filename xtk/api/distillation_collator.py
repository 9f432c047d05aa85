"""Collator: documents of a teacher cache as batches for a student, with the teacher aligned by bytes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtk.api.distillation_batch import DistillationBatch, make_batch
from xtk.api.distillation_loss import DistillationLoss
from xtk.api.tokenizer_argument import to_tokenizer
from xtk.batches.combine_teachers import parse_ensemble
from xtk.batches.data_sources import TextDocuments
from xtk.batches.losses_per_teacher import as_cache, assign_losses, open_teachers
from xtk.batches.micro_batches import BatchBuilder
from xtk.batches.teacher_losses import TeacherLosses, combined_losses
from xtk.cache.reader import TeacherCache
from xtk.cache.shard import CachedDocument
from xtk.cache.teacher_document import TeacherDocument
from xtk.errors import MismatchError, XtkError
from xtk.projection.projection import SparseProjection
from xtk.text.chat.conversation_tokens import REGIONS
from xtk.text.chat.regions import RegionWeights

DOCUMENT_KEY, TEXT_KEY = "document", "text"


class DistillationCollator:
    """Makes batches for a student from documents of a teacher cache; a `collate_fn` of DataLoader and Trainer.

    Each call tokenizes the documents with the student's tokenizer, aligns them with the teacher's tokens, and prepares
    what the losses compare. It can run in DataLoader workers.

    Args:
        tokenizer: the student's: a folder, a hub id, or a fast tokenizer of transformers.
        cache: a `TeacherCache` or its path.
        loss: the losses; the same object computes them in the training loop.
        projection: a `Projection` or its path, for losses that use one; None: it is built if a loss needs it.
        max_length: maximum number of tokens of a document, at least 2; longer ones are truncated. None: no limit.
        packing: concatenate the documents of a batch into one sequence [1, T] with `position_ids` that restart, instead
            of padding. Call `enable_packing` for the model.
        sample_set: index of the set of sampled tokens, modulo the number of sets; change it every epoch.
        train_on: the trained regions of conversations, as in `xtk distill --train-on`.
        region_weights: {region: weight}; 1 for others.

    Raises:
        XtkError: a loss cannot be computed from this cache, the projection is for other tokenizers, or `max_length` is
            below 2.
    """

    def __init__(
        self,
        tokenizer: Any,
        cache: TeacherCache | str | Path,
        loss: DistillationLoss,
        *,
        projection: SparseProjection | str | Path | None = None,
        max_length: int | None = None,
        packing: bool = False,
        sample_set: int = 0,
        train_on: Sequence[str] = REGIONS,
        region_weights: Mapping[str, float] | None = None,
    ) -> None:
        if max_length is not None and max_length < 2:  # the first token is not trained
            raise XtkError(
                f"DistillationCollator: max_length is {max_length}, but must be at least 2, or None",
                hint="use max_length=None: no limit",
            )
        self._student, self.cache = to_tokenizer(tokenizer), as_cache(cache)
        # Trainer saves the tokenizer of its collator with each checkpoint.
        self.tokenizer = tokenizer if hasattr(tokenizer, "save_pretrained") else None
        self.max_length, self.packing, self.sample_set = max_length, packing, sample_set
        self._regions = RegionWeights(train_on, region_weights)
        given = [] if projection is None else [Path(projection) if isinstance(projection, str) else projection]
        combination = parse_ensemble("sum", "", 1)
        teachers = open_teachers([self.cache], given, self._student)
        assigned, _ = assign_losses(loss.specs, teachers)
        parts = TeacherLosses(self._student, combination, teachers, combined_losses(combination, teachers, assigned))
        self._objectives, self._names = parts.objectives, parts.names
        self._losses = tuple(str(assignment.loss) for assignment in assigned)
        loss.bind(self._losses, self._objectives, self._names)
        self.loss: DistillationLoss = loss

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "loss"}  # workers need no modules

    def __call__(self, features: Sequence[Any]) -> DistillationBatch:
        """Return the batch of some documents.

        Args:
            features: documents of a cache of this teacher: items of a `TeacherCache`, indices into `cache`, or mappings
                with the index as "document" and optionally the text as "text", which is compared with the cache.

        Raises:
            XtkError: a document is not in the cache, has another text, or is from a cache whose teacher has another
                tokenizer, with another support, or with other values of sampled tokens.
        """
        stored = [self._stored(feature) for feature in features]
        documents = TextDocuments([row.document for row in stored], [_Teacher(stored)])
        builder = BatchBuilder(
            documents,
            self._student,
            self._objectives,
            self.max_length,
            teacher_names=self._names,
            packing_multiple=1 if self.packing else 0,
            region_weights=self._regions,
        )
        batch = builder.build(range(len(documents)), self.sample_set)
        return make_batch(batch, self._losses, len(self._student))

    def _stored(self, feature: Any) -> CachedDocument:
        if isinstance(feature, CachedDocument):
            self._check_teacher(feature)
            return feature
        text = None
        if isinstance(feature, Mapping):
            if DOCUMENT_KEY not in feature:
                raise XtkError(
                    f'a row of the dataset has no "{DOCUMENT_KEY}", the index of its document in the cache',
                    where=f"columns: {', '.join(map(str, feature))}",
                    hint="use the TeacherCache itself as the dataset, or add this column; Trainer: "
                    "remove_unused_columns=False",
                )
            feature, text = feature[DOCUMENT_KEY], feature.get(TEXT_KEY)
        try:
            if isinstance(feature, bool):
                raise TypeError
            stored = self.cache.read_document(operator.index(feature))
        except (IndexError, TypeError, ValueError):
            raise XtkError(
                f"{feature!r} is not the index of a document in this cache",
                where=f"{self.cache.folder.name} has the documents 0 to {len(self.cache) - 1:,}",
                hint="use the cache that the dataset was made for",
            ) from None
        if text is not None and text != stored.document.text:
            raise MismatchError(
                f"document {stored.index} of this cache has another text than the dataset",
                where=f"{self.cache.folder.name}: {stored.document.text[:40]!r}; the dataset: {str(text)[:40]!r}",
                hint="use the cache of this dataset: xtk cache-teacher, or xtk.cache_teacher",
            )
        return stored

    def _check_teacher(self, stored: CachedDocument) -> None:
        """Refuse a document of a cache of another tokenizer or support, or with other values of sampled tokens."""
        both = []
        for header in (stored.header, self.cache.header):
            samples = "with" if header["codec"].get("sample_logprobs") else "without"
            contents = f"{header['options'].get('support')} {samples} log-probabilities of samples"
            both.append((header["teacher"]["tokenizer"], contents, header["teacher"]["name"]))
        (*document, name), (*own, own_name) = both
        if document != own:
            raise MismatchError(
                "a document is from a cache of another teacher or support than the collator's",
                where=f"{name}, {document[1]}; {own_name}, {own[1]}",
                hint="create a DistillationCollator with that cache",
            )


class _Teacher:
    """The teacher's outputs for the documents of one batch."""

    def __init__(self, documents: Sequence[CachedDocument]) -> None:
        self._documents = documents

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return the teacher's outputs for some documents."""
        return [self._documents[number].with_sample_set(sample_set) for number in documents]
