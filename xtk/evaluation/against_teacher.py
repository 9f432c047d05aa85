"""A model against what a teacher said of the same documents, out of a cache: losses, and top-1 agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.evaluation.agreement import Likeliest, Meeting
from xtk.evaluation.bits import BATCH_TOKENS, READ_AT_ONCE, limit_of
from xtk.evaluation.estimates import Ratio
from xtk.evaluation.rows import read_rows
from xtk.losses.head import Term, fused_loss
from xtk.losses.objective import Heard, Objective, example_of
from xtk.models.causal_lm import Cut
from xtk.models.head import rows_in_a_chunk
from xtk.tokens.document import Document
from xtk.tokens.sequence import sequences
from xtk.tokens.tokenizer import Tokenizer

AGREEMENT = "top1_agreement"


class CachedDocuments:
    """The documents of a cache, readable as often as wanted."""

    def __init__(self, cache: TeacherCache) -> None:
        self._cache = cache

    def __iter__(self) -> Iterator[Document]:
        for number in range(len(self._cache)):
            yield self._cache.row(number).document


@dataclass(frozen=True)
class _Read:
    """A document on its way into a model.

    Attributes:
        number: which row of the cache.
        ids: int32 [T], as far as the model reads.
        rows: int64 [N], the hidden states that are compared.
        terms: one a loss.
        likeliest: what the teacher finds likeliest; None where nobody asks.
    """

    number: int
    ids: NDArray[np.int32]
    rows: NDArray[np.int64]
    terms: tuple[Term, ...]
    likeliest: Likeliest | None


@torch.no_grad()
def against_teacher(
    model: Cut,
    tokenizer: Tokenizer,
    cache: TeacherCache,
    objectives: Sequence[Objective],
    meeting: Meeting | None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_length: int | None = None,
) -> dict[str, Ratio]:
    """Compare a model with a teacher, document by document.

    Each document is read once, up to the model's context; what is behind that has no part. Documents count alike,
    whatever their weights in training are. Losses read sampled tokens where they do in training.

    Args:
        model: on its device.
        tokenizer: the model's.
        cache: what the teacher said.
        objectives: losses that fit the cache and the model, one or more.
        meeting: how a token of the model can be the teacher's; None: the cache does not tell which are the likeliest.
        batch_tokens: padded tokens in a forward pass.
        max_length: a smaller limit than the model's context.

    Returns:
        By the names of the losses, of each document its sum over items and how many it has; likewise under
        `AGREEMENT`, how often both find the same token likeliest, of how many places where both begin one.

    Raises:
        XtkError: nothing of the text is said by both.
    """
    limit = limit_of(model, max_length)
    training = model.training
    model.eval()
    names = [*(objective.name for objective in objectives), *([AGREEMENT] if meeting is not None else [])]
    sums, counts = np.zeros((2, len(names), len(cache)))
    with terminal.Progress("evaluate", len(cache), "documents against the teacher") as progress:
        for start in range(0, len(cache), READ_AT_ONCE):
            numbers = range(start, min(start + READ_AT_ONCE, len(cache)))
            read = _read(tokenizer, cache, numbers, objectives, limit, likeliest=meeting is not None)
            for batch, states in _states(model, read, batch_tokens):
                found = _losses(model, batch, states)
                for one, own, losses in zip(batch, states, found, strict=True):
                    sums[: len(objectives), one.number] = losses
                    counts[: len(objectives), one.number] = [term.items for term in one.terms]
                    if meeting is not None:
                        sums[-1, one.number], counts[-1, one.number] = _agreed(model, one, own, meeting)
            progress.advance(len(numbers))
    model.train(training)
    if not counts.any():
        raise XtkError("there is nothing to compare: the teacher and the model have no place of the text in common")
    return {name: Ratio(*of_name) for name, *of_name in zip(names, sums, counts, strict=True)}


def _read(
    tokenizer: Tokenizer,
    cache: TeacherCache,
    numbers: range,
    objectives: Sequence[Objective],
    limit: int | None,
    *,
    likeliest: bool,
) -> list[_Read]:
    """Read rows of a cache; those without a trained token are left out."""
    documents = [cache.row(number).document for number in numbers]
    sampled = sorted({objective.takes_draws for objective in objectives}, reverse=True)
    found = []
    for number, document, sequence in zip(numbers, documents, sequences(tokenizer, documents), strict=True):
        student = sequence if limit is None else sequence.cut(limit)
        examples = {}
        for takes in sampled:
            row = cache.row(number, 0 if takes else None)
            examples[takes] = example_of(student, document, Heard(row.tokens, row.signal.without_nan()))
        example = examples[sampled[0]]
        if len(example.rows):
            terms = tuple(objective.term(examples[objective.takes_draws]) for objective in objectives)
            found.append(_Read(number, student.ids, example.rows, terms, Likeliest.of(example) if likeliest else None))
    return found


def _states(model: Cut, read: list[_Read], batch_tokens: int) -> Iterator[tuple[list[_Read], list[torch.Tensor]]]:
    """Yield batches of documents, longest first, with the hidden states [N, H] of the rows of each."""
    ordered = sorted(read, key=lambda one: -len(one.ids))
    device = next(model.parameters()).device
    start = 0
    while start < len(ordered):
        batch = ordered[start : start + max(1, batch_tokens // len(ordered[start].ids))]
        ids = torch.zeros(len(batch), len(batch[0].ids), dtype=torch.int64)
        for row, one in enumerate(batch):
            ids[row, : len(one.ids)] = torch.from_numpy(one.ids)
        states = model(ids.to(device))
        yield batch, [states[row, torch.from_numpy(one.rows).to(device)] for row, one in enumerate(batch)]
        start += len(batch)


def _losses(model: Cut, batch: list[_Read], states: list[torch.Tensor]) -> list[NDArray[np.float64]]:
    """Return float64 [losses] of each document."""
    found = []
    for one, own in zip(batch, states, strict=True):
        terms = [term.to(own.device, 1.0) for term in one.terms]
        parts = fused_loss(own, model.head, terms, rows_in_a_chunk(model.head.width_of(own)))[1]
        found.append(parts.double().cpu().numpy())
    return found


def _agreed(model: Cut, one: _Read, states: torch.Tensor, meeting: Meeting) -> tuple[int, int]:
    """Return how often both find the same token likeliest, of how many."""
    assert one.likeliest is not None
    if not len(one.likeliest.rows):
        return 0, 0
    asked = states[torch.from_numpy(one.likeliest.rows).to(states.device)]
    targets = torch.zeros(len(asked), dtype=torch.int64, device=asked.device)
    _, tokens = read_rows(asked, model.head, targets, likeliest=True)
    return one.likeliest.agreed(tokens.cpu().numpy(), meeting)
