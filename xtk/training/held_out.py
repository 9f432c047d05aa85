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
from xtk.evaluation.agreement import Meeting
from xtk.evaluation.bits import BATCH_TOKENS, Window, counted_bytes, windows_of_text
from xtk.evaluation.rows import read_rows
from xtk.losses.ce import CrossEntropy
from xtk.losses.cells import FORWARD_KL
from xtk.losses.objective import Objective
from xtk.models.head import Head
from xtk.tokens.document import Document
from xtk.tokens.sequence import sequences
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batches import BatchMaker, Order, ahead, grouped, laid_out
from xtk.training.combining import Weighing
from xtk.training.layout import Layout
from xtk.training.metrics import metric
from xtk.training.sources import Source, TextSource
from xtk.training.student import read_student, reshard
from xtk.training.whole_step import WholeStep

CE = "ce"
READ_AT_ONCE = 256


@dataclass(frozen=True)
class HeldOut:
    """What a student is asked while it learns.

    Attributes:
        source: the documents, with the teachers' words on them where they are caches.
        objectives: those of the run; the cross-entropy of the text alone, if there are no teachers' words.
        teachers: how metrics call them.
        weighing: how weights of teachers come from what they say; None: they do not.
        meetings: how tokens of each teacher can be those of the student; None of one whose cache does not tell which
            are the likeliest.
    """

    source: Source
    objectives: tuple[Objective, ...]
    teachers: tuple[str, ...] = ()
    weighing: Weighing | None = None
    meetings: tuple[Meeting | None, ...] = ()

    @classmethod
    def of_documents(cls, documents: Sequence[Document]) -> HeldOut:
        """Ask for the cross-entropy of plain text."""
        return cls(TextSource(documents), ())


@dataclass(frozen=True)
class _Rest:
    """Windows of long documents behind their first ones: tokens, and the rows that count."""

    input_ids: NDArray[np.int64]
    lengths: tuple[int, ...] | None
    places: NDArray[np.int64]


@dataclass(frozen=True)
class _Counts:
    """What the micro-batches of a process add up to."""

    counts: NDArray[np.float64]


class _Look:
    """Reads the rows of one pass, as far as they are here."""

    def __init__(self, targets: NDArray[np.int64], *, likeliest: bool) -> None:
        self._targets, self._likeliest = targets, likeliest
        self.here = np.zeros(0, np.int64)
        self.nats = np.zeros(0)
        self.tokens = np.full(len(targets), -1, np.int64)

    def __call__(self, states: Tensor, here: NDArray[np.int64], head: Head) -> None:
        targets = torch.from_numpy(self._targets[here]).to(states.device)
        logprobs, tokens = read_rows(states, head, targets, likeliest=self._likeliest)
        self.here, self.nats = here, -logprobs.cpu().numpy()
        if self._likeliest:
            self.tokens[here] = tokens.cpu().numpy()


class Evaluation:
    """Held-out documents, dealt to the processes; every process has to make one, and to call it as often.

    Each document is read once, up to the student's context: what its text costs, and what the losses say. What is
    behind that is read in the windows of `bits_per_byte`, and counts for bits per byte alone.

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
        asked: HeldOut,
        model: nn.Module,
        tokenizer: Tokenizer,
        limit: int | None,
        packing: int,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self._model, self._layout, self._device, self._packing = model, layout, device, packing
        self._teachers, self._meetings = asked.teachers, asked.meetings
        self._with_teachers = any(objective.distils for objective in asked.objectives)
        self._objectives = asked.objectives
        if not any(objective.name == CE for objective in asked.objectives):
            self._objectives = (*asked.objectives, Objective(CrossEntropy(), FORWARD_KL, None, CE, weight=0.0))
        self._maker = BatchMaker(asked.source, tokenizer, self._objectives, limit, asked.weighing, asked.teachers,
                                 packing, likeliest=any(asked.meetings))  # fmt: skip
        sizes = asked.source.text_bytes()
        everything = np.flatnonzero(sizes > 0)
        own = Order(everything, sizes, len(everything), 0).dealt(0, layout.data_rank, layout.data_ranks)
        lengths: list[int] = []
        rest: list[Window] = []
        read = 0
        for start in range(0, len(own), READ_AT_ONCE):
            documents = [asked.source.document(number) for number in own[start : start + READ_AT_ONCE]]
            for document, sequence in zip(documents, sequences(tokenizer, documents), strict=True):
                lengths.append(len(sequence) if limit is None else min(len(sequence), limit))
                rest += windows_of_text(sequence, limit)[1:]
                read += counted_bytes(document, sequence)
        self._groups = [[own[at] for at in group] for group in grouped(lengths, BATCH_TOKENS, padded=not packing)]
        windows = grouped([len(window.ids) for window in rest], BATCH_TOKENS, padded=not packing)
        self._rest = [self._laid_out([rest[at] for at in group]) for group in windows]
        self._passes = [layout.highest(len(some), device) for some in (self._groups, self._rest)]
        self._bytes = float(layout.add(torch.tensor(float(read), dtype=torch.float64, device=device), "data"))
        if not self._bytes:
            raise XtkError("there is no text to evaluate on: its documents are empty", hint="another --eval-data")

    def _laid_out(self, windows: Sequence[Window]) -> _Rest:
        ids, starts, lengths = laid_out([window.ids for window in windows], self._packing)
        places = [np.flatnonzero(window.counted) - 1 + at for window, at in zip(windows, starts, strict=True)]
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
        reshard(self._model)
        told = np.concatenate([[nats], sums, agreed.reshape(-1)])
        nats, *rest = self._layout.add(torch.from_numpy(told).to(self._device), "copies").tolist()
        agreed = np.array(rest[len(sums) :]).reshape(-1, 2)
        whole = WholeStep(self._objectives, self._maker.weighing, self._maker.teachers, [_Counts(counts)],
                          self._layout, self._device)  # fmt: skip
        losses = whole.losses(rest[: len(sums)], 1.0)
        found = {"bits_per_byte": nats / math.log(2) / self._bytes, "ce": losses[CE]}
        if self._with_teachers:
            found |= losses
        for name, meeting, (same, of) in zip(self._maker.teachers, self._meetings, agreed.tolist(), strict=False):
            if meeting is not None:
                found[metric("top1_agreement", name, self._maker.teachers)] = same / max(of, 1)
        return {f"eval_{name}": value for name, value in found.items()}

    def _read(self) -> tuple[float, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return what is of this process: nats of text, sums of terms, how many tokens agree of how many; counts."""
        nats, sums = 0.0, np.zeros(len(self._objectives))
        agreed = np.zeros((len(self._meetings), 2))
        counts = self._maker.make([]).counts
        passes, passes_of_rest = self._passes
        for batch in ahead(lambda at: self._maker.make(self._groups[at] if at < len(self._groups) else []),
                           range(passes)):  # fmt: skip
            look = _Look(_targets(batch.input_ids, batch.places), likeliest=bool(batch.likeliest))
            terms = [term.to(self._device, 1.0) for term in batch.terms]
            _, parts = read_student(self._model, batch, terms, self._layout, self._device, look)
            sums += parts.double().cpu().numpy()
            counts = counts + batch.counts
            nats += float(look.nats[batch.spells[look.here]].sum())
            for number, (meeting, theirs) in enumerate(zip(self._meetings, batch.likeliest, strict=False)):
                if meeting is not None:
                    agreed[number] += theirs.agreed(look.tokens[theirs.rows], meeting)
        for at in range(passes_of_rest):
            rest = self._rest[at] if at < len(self._rest) else self._laid_out([])
            look = _Look(_targets(rest.input_ids, rest.places), likeliest=False)
            read_student(self._model, rest, (), self._layout, self._device, look)
            nats += float(look.nats.sum())
        return nats, sums, agreed, counts


def _targets(input_ids: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens that rows predict: those behind them."""
    targets: NDArray[np.int64] = input_ids.reshape(-1)[places + 1]
    return targets
