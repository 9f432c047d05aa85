"""Evaluation while training, on all processes: how the student does on text that it does not learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import BATCH_TOKENS, ScoringWindow, document_windows, num_predicted_bytes
from xtk.evaluation.token_logprobs import compute_token_logprobs
from xtk.evaluation.top1_agreement import TokenMatching
from xtk.losses.cross_entropy import CrossEntropy
from xtk.losses.loss_cells import FORWARD_KL
from xtk.losses.loss_term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import DocumentSource, TextSource
from xtk.training.metrics_file import metric_name
from xtk.training.micro_batches import BatchBuilder, BatchSampler, group_by_tokens, pad_or_pack, prefetch_in_thread
from xtk.training.parallel_config import ParallelConfig
from xtk.training.step_reduction import StepReduction
from xtk.training.student_module import forward_student, reshard_weights
from xtk.training.teacher_ensemble import ScoreWeighting

CE_METRIC = "ce"
DOCUMENTS_PER_READ = 256


@dataclass(frozen=True)
class HeldOutData:
    """What a student is asked while it learns.

    Attributes:
        source: the documents, with the teachers' words on them where they are caches.
        objectives: those of the run; the cross-entropy of the text alone, if there are no teachers' words.
        teachers: how metrics call them.
        score_weighting: how weights of teachers come from what they say; None: they do not.
        token_matchings: how tokens of each teacher can be those of the student; None of one whose cache does not tell
            which
            are the likeliest.
    """

    source: DocumentSource
    objectives: tuple[LossTerm, ...]
    teachers: tuple[str, ...] = ()
    score_weighting: ScoreWeighting | None = None
    token_matchings: tuple[TokenMatching | None, ...] = ()

    @classmethod
    def of_documents(cls, documents: Sequence[Document]) -> HeldOutData:
        """Ask for the cross-entropy of plain text."""
        return cls(TextSource(documents), ())


@dataclass(frozen=True)
class _Rest:
    """Windows of long documents behind their first ones: tokens, and the rows that count."""

    input_ids: NDArray[np.int64]
    document_lengths: tuple[int, ...] | None
    loss_positions: NDArray[np.int64]


@dataclass(frozen=True)
class _Counts:
    """What the micro-batches of a process add up to."""

    counts: NDArray[np.float64]


class _LogprobHook:
    """Reads the rows of one pass, as far as they are here."""

    def __init__(self, targets: NDArray[np.int64], *, likeliest: bool) -> None:
        self._targets, self._likeliest = targets, likeliest
        self.positions = np.zeros(0, np.int64)
        self.nats = np.zeros(0)
        self.top1_ids = np.full(len(targets), -1, np.int64)

    def __call__(self, states: Tensor, here: NDArray[np.int64], head: OutputHead) -> None:
        targets = torch.from_numpy(self._targets[here]).to(states.device)
        logprobs, tokens = compute_token_logprobs(states, head, targets, return_top1=self._likeliest)
        self.positions, self.nats = here, -logprobs.cpu().numpy()
        if self._likeliest:
            self.top1_ids[here] = tokens.cpu().numpy()


class HeldOutEvaluator:
    """Held-out documents, dealt to the processes; every process has to make one, and to call it as often.

    Each document is read once, up to the student's context: what its text costs, and what the losses say. What is
    behind that is read in the windows of `evaluate_bits_per_byte`, and counts for bits per byte alone.

    Args:
        asked: the documents, and what is asked about them.
        model: the student, wrapped for its layout.
        tokenizer: the student's.
        limit: tokens that the student can read.
        packing: how many tokens a row of documents is a multiple of; 0: each document has a row of its own.
        layout: of the processes.
        device: of this one.

    Raises:
        XtkError: there is no text.
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
        if not any(objective.name == CE_METRIC for objective in data.objectives):
            self._objectives = (*data.objectives, LossTerm(CrossEntropy(), FORWARD_KL, None, CE_METRIC, weight=0.0))
        self._maker = BatchBuilder(data.source, tokenizer, self._objectives, context_length, data.score_weighting,
            data.teachers,
                                 packing_multiple, with_top1=any(data.token_matchings))  # fmt: skip
        sizes = data.source.text_bytes()
        everything = np.flatnonzero(sizes > 0)
        own = BatchSampler(everything, sizes, len(everything), 0).documents_of_rank(
            0, parallel.data_shard, parallel.num_data_shards
        )
        lengths: list[int] = []
        rest: list[ScoringWindow] = []
        read = 0
        for start in range(0, len(own), DOCUMENTS_PER_READ):
            documents = [data.source.document(number) for number in own[start : start + DOCUMENTS_PER_READ]]
            for document, sequence in zip(documents, tokenize_documents(tokenizer, documents), strict=True):
                lengths.append(len(sequence) if context_length is None else min(len(sequence), context_length))
                rest += document_windows(sequence, context_length)[1:]
                read += num_predicted_bytes(document, sequence)
        self._groups = [
            [own[at] for at in group] for group in group_by_tokens(lengths, BATCH_TOKENS, padded=not packing_multiple)
        ]
        windows = group_by_tokens([len(window.ids) for window in rest], BATCH_TOKENS, padded=not packing_multiple)
        self._overflow = [self._laid_out([rest[at] for at in group]) for group in windows]
        self._passes = [parallel.all_reduce_max(len(some), device) for some in (self._groups, self._overflow)]
        self._bytes = float(
            parallel.all_reduce_sum(torch.tensor(float(read), dtype=torch.float64, device=device), "data")
        )
        if not self._bytes:
            raise XtkError("there is no text to evaluate on: its documents are empty", hint="another --eval-data")

    def _laid_out(self, windows: Sequence[ScoringWindow]) -> _Rest:
        ids, starts, lengths = pad_or_pack([window.ids for window in windows], self._packing)
        places = [np.flatnonzero(window.is_scored) - 1 + at for window, at in zip(windows, starts, strict=True)]
        return _Rest(ids, lengths, np.concatenate([np.zeros(0, np.int64), *places]))

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Return what metrics are called, and what they are; the same in every process."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            nats, sums, agreed, counts = self._read()
        for module, mode in modes.items():
            module.training = mode
        reshard_weights(self._model)
        told = np.concatenate([[nats], sums, agreed.reshape(-1)])
        nats, *rest = self._layout.all_reduce_sum(torch.from_numpy(told).to(self._device), "copies").tolist()
        agreed = np.array(rest[len(sums) :]).reshape(-1, 2)
        whole = StepReduction(self._objectives, self._maker.score_weighting, self._maker.teachers, [_Counts(counts)],
                          self._layout, self._device)  # fmt: skip
        losses = whole.loss_metrics(rest[: len(sums)], 1.0)
        found = {"bits_per_byte": nats / math.log(2) / self._bytes, "ce": losses[CE_METRIC]}
        if self._with_teachers:
            found |= losses
        for name, meeting, (same, of) in zip(
            self._maker.teachers, self._token_matchings, agreed.tolist(), strict=False
        ):
            if meeting is not None:
                found[metric_name("top1_agreement", name, self._maker.teachers)] = same / max(of, 1)
        return {f"eval_{name}": value for name, value in found.items()}

    def _read(self) -> tuple[float, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return what is of this process: nats of text, sums of terms, how many tokens agree of how many; counts."""
        nats, sums = 0.0, np.zeros(len(self._objectives))
        agreed = np.zeros((len(self._token_matchings), 2))
        counts = self._maker.build([]).counts
        passes, passes_of_rest = self._passes
        groups = [*self._groups, *([[]] * (passes - len(self._groups)))]
        for batch in prefetch_in_thread(lambda number: self._maker.build(groups[number]), range(passes)):
            look = _LogprobHook(_targets(batch.input_ids, batch.loss_positions), likeliest=bool(batch.teacher_top1))
            terms = [term.to(self._device, 1.0) for term in batch.terms]
            _, parts = forward_student(self._model, batch, terms, self._layout, self._device, look)
            sums += parts.double().cpu().numpy()
            counts = counts + batch.counts
            nats += float(look.nats[batch.is_text[look.positions]].sum())
            for number, (meeting, theirs) in enumerate(zip(self._token_matchings, batch.teacher_top1, strict=False)):
                if meeting is not None:
                    agreed[number] += theirs.count_agreements(look.top1_ids[theirs.student_rows], meeting)
        for at in range(passes_of_rest):
            rest = self._overflow[at] if at < len(self._overflow) else self._laid_out([])
            look = _LogprobHook(_targets(rest.input_ids, rest.loss_positions), likeliest=False)
            forward_student(self._model, rest, (), self._layout, self._device, look)
            nats += float(look.nats.sum())
        return nats, sums, agreed, counts


def _targets(input_ids: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens that rows predict: those behind them."""
    targets: NDArray[np.int64] = input_ids.reshape(-1)[places + 1]
    return targets
