"""Evaluation on held-out documents during training: losses, bits per byte and agreement with teachers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtk.batches.combine_teachers import ScoreWeighting
from xtk.batches.cross_process_reduction import StepReduction
from xtk.batches.data_sources import DocumentSource, TextDocuments
from xtk.batches.micro_batches import BatchBuilder, BatchSampler, group_by_tokens, pad_or_pack, prefetch_in_thread
from xtk.batches.top1_agreement import TokenMatching
from xtk.data.corpus_reader import CorpusFingerprint
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import BATCH_TOKENS, ScoringWindow, document_windows, num_predicted_bytes
from xtk.losses.cross_entropy import CrossEntropy
from xtk.losses.divergences import FORWARD_KL
from xtk.losses.interface import KEEP
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead, compute_token_logprobs
from xtk.parallel.parallel_config import ParallelConfig
from xtk.runs.metrics_file import metric_name
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer
from xtk.training.student_with_losses import TokenBatch, forward_student, predicted_tokens, reshard_weights

CE_METRIC = "ce"
DOCUMENTS_PER_READ = 256


@dataclass(frozen=True)
class HeldOutData:
    """Held-out documents and the losses to compute on them."""

    source: DocumentSource  # the documents, with teacher outputs if they come from caches
    objectives: tuple[LossTerm, ...]  # the losses of the run; none for plain text
    teachers: tuple[str, ...] = ()  # the teachers' names in metrics
    # How teacher weights follow from their log-probabilities; None: the weights are fixed
    score_weighting: ScoreWeighting | None = None
    # For each teacher, how its tokens match those of the student; None if its cache does not store exact top-1 tokens
    token_matchings: tuple[TokenMatching | None, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the documents."""
        return str(CorpusFingerprint.of(map(self.source.document, range(len(self.source)))))

    @classmethod
    def of_documents(cls, documents: Sequence[Document]) -> HeldOutData:
        """Return data that evaluates cross-entropy on plain text."""
        return cls(TextDocuments(documents), ())


@dataclass(frozen=True)
class _Counts:
    """Summed counts of a process's micro-batches, as `StepReduction` expects them."""

    counts: NDArray[np.float64]


class _LogprobHook:
    """Computes log-probabilities of target tokens, and top-1 tokens, at this process's positions of a forward pass."""

    def __init__(self, targets: NDArray[np.int64], *, with_top1: bool) -> None:
        self._targets, self._with_top1 = targets, with_top1
        self.positions = np.zeros(0, np.int64)
        self.nats = np.zeros(0)
        self.top1_ids = np.full(len(targets), -1, np.int64)

    def __call__(self, states: Tensor, here: NDArray[np.int64], head: OutputHead) -> None:
        targets = torch.from_numpy(self._targets[here]).to(states.device)
        logprobs, tokens = compute_token_logprobs(states, head, targets, return_top1=self._with_top1)
        self.positions, self.nats = here, -logprobs.cpu().numpy()
        if self._with_top1:
            self.top1_ids[here] = tokens.cpu().numpy()


class HeldOutEvaluator:
    """Evaluates the student on held-out documents; every process creates one and calls it at the same steps.

    Losses are computed on each document, truncated to the student's context. The text beyond it is scored with the
    windows of `evaluate_bits_per_byte`, and counts for bits per byte only.
    """

    def __init__(
        self,
        data: HeldOutData,
        model: nn.Module,
        tokenizer: Tokenizer,
        context_length: int | None,
        packing_multiple: int,
        parallel: ParallelConfig,
        device: torch.device,
    ) -> None:
        self._model, self._layout, self._device, self._packing = model, parallel, device, packing_multiple
        self._teachers, self._token_matchings = data.teachers, data.token_matchings
        self._with_teachers = any(objective.uses_teacher for objective in data.objectives)
        self._objectives = data.objectives
        if not any(objective.name == CE_METRIC and objective.loss.whitespace == KEEP for objective in data.objectives):
            # The last term of a name is the one that is reported: here the mean over all trained tokens.
            self._objectives = (*data.objectives, LossTerm(CrossEntropy(), FORWARD_KL, None, CE_METRIC, weight=0.0))
        self._batch_builder = BatchBuilder(data.source, tokenizer, self._objectives, context_length,
            data.score_weighting, data.teachers,
                                 packing_multiple, with_top1=any(data.token_matchings))  # fmt: skip
        sizes = data.source.text_bytes()
        documents_with_text = np.flatnonzero(sizes > 0)
        own = BatchSampler(documents_with_text, sizes, len(documents_with_text), 0).documents_of_rank(
            0, parallel.data_shard, parallel.num_data_shards
        )
        lengths: list[int] = []
        overflow: list[ScoringWindow] = []
        read = 0
        for start in range(0, len(own), DOCUMENTS_PER_READ):
            documents = [data.source.document(number) for number in own[start : start + DOCUMENTS_PER_READ]]
            for document, sequence in zip(documents, tokenize_documents(tokenizer, documents), strict=True):
                lengths.append(len(sequence) if context_length is None else min(len(sequence), context_length))
                overflow += document_windows(sequence, context_length, tokenizer.start_ids)[1:]
                read += num_predicted_bytes(document, sequence)
        self._groups = [
            [own[at] for at in group] for group in group_by_tokens(lengths, BATCH_TOKENS, padded=not packing_multiple)
        ]
        windows = group_by_tokens([len(window.ids) for window in overflow], BATCH_TOKENS, padded=not packing_multiple)
        self._overflow = [self._overflow_batch([overflow[at] for at in group]) for group in windows]
        self._passes = [parallel.all_reduce_max(len(some)) for some in (self._groups, self._overflow)]
        self._bytes = float(
            parallel.all_reduce_sum(torch.tensor(float(read), dtype=torch.float64, device=device), "data")
        )
        if not self._bytes:
            raise XtkError(
                "all documents of --eval-data are empty",
                hint="use --eval-data with at least one document that has text",
            )

    def _overflow_batch(self, windows: Sequence[ScoringWindow]) -> TokenBatch:
        """Return later windows of documents that are longer than the context, and the positions that count."""
        ids, starts, lengths = pad_or_pack([window.ids for window in windows], self._packing)
        positions = [np.flatnonzero(window.is_scored) - 1 + at for window, at in zip(windows, starts, strict=True)]
        return TokenBatch(ids, lengths, np.concatenate([np.zeros(0, np.int64), *positions]))

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return all metrics by name, the same in every process (collective)."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            nats, sums, agreed, counts = self._read()
        for module, mode in modes.items():
            module.training = mode
        reshard_weights(self._model)
        values = np.concatenate([[nats], sums, agreed.reshape(-1)])
        nats, *rest = self._layout.all_reduce_sum(torch.from_numpy(values).to(self._device), "copies").tolist()
        agreed = np.array(rest[len(sums) :]).reshape(-1, 2)
        reduction = StepReduction.of_step(self._objectives, self._batch_builder.score_weighting,
            self._batch_builder.teachers, [_Counts(counts)], self._layout, self._device)  # fmt: skip
        losses = reduction.loss_metrics(rest[: len(sums)], 1.0)
        metrics = {"bits_per_byte": nats / math.log(2) / self._bytes, "ce": losses.get(CE_METRIC, 0.0)}
        if self._with_teachers:
            metrics |= losses
        for name, matching, (same, total) in zip(
            self._batch_builder.teachers, self._token_matchings, agreed.tolist(), strict=False
        ):
            if matching is not None:
                metrics[metric_name("top1_agreement", name, self._batch_builder.teachers)] = same / max(total, 1)
        return {f"eval_{name}": value for name, value in metrics.items()}

    def _read(self) -> tuple[float, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return this process's sums: nats of text, losses, [teachers, 2] agreeing and compared tokens, counts."""
        nats, sums = 0.0, np.zeros(len(self._objectives))
        agreed = np.zeros((len(self._token_matchings), 2))
        counts = self._batch_builder.build([]).counts
        num_passes, num_overflow_passes = self._passes
        groups = [*self._groups, *([[]] * (num_passes - len(self._groups)))]
        for batch in prefetch_in_thread(lambda number: self._batch_builder.build(groups[number]), range(num_passes)):
            hook = _LogprobHook(predicted_tokens(batch), with_top1=bool(batch.teacher_top1))
            terms = [term.to(self._device, 1.0) for term in batch.terms]
            _, parts = forward_student(self._model, batch, terms, self._layout, self._device, hook)
            sums += parts.double().cpu().numpy()
            counts = counts + batch.counts
            nats += float(hook.nats[batch.is_text[hook.positions]].sum())
            for number, (matching, theirs) in enumerate(zip(self._token_matchings, batch.teacher_top1, strict=False)):
                if matching is not None:
                    agreed[number] += theirs.count_agreements(hook.top1_ids[theirs.student_rows], matching)
        for at in range(num_overflow_passes):
            batch_of_windows = self._overflow[at] if at < len(self._overflow) else self._overflow_batch([])
            hook = _LogprobHook(predicted_tokens(batch_of_windows), with_top1=False)
            forward_student(self._model, batch_of_windows, (), self._layout, self._device, hook)
            nats += float(hook.nats.sum())
        return nats, sums, agreed, counts
