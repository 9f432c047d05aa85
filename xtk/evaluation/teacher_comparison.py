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
from xtk.evaluation.bits_per_byte import BATCH_TOKENS, READ_BATCH_SIZE, max_input_tokens
from xtk.evaluation.standard_errors import Ratio
from xtk.evaluation.token_logprobs import compute_token_logprobs
from xtk.evaluation.top1_agreement import TeacherTopTokens, TokenMatching
from xtk.losses.fused_loss import LossTensors, fused_loss
from xtk.losses.loss_term import LossTerm, TeacherOutput, make_loss_inputs
from xtk.models.causal_lm import BackboneWithHead
from xtk.models.output_head import chunk_rows
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

AGREEMENT_METRIC = "top1_agreement"


class CachedDocuments:
    """The documents of a cache, readable as often as wanted."""

    def __init__(self, cache: TeacherCache) -> None:
        self._cache = cache

    def __iter__(self) -> Iterator[Document]:
        for number in range(len(self._cache)):
            yield self._cache.read_document(number).document


@dataclass(frozen=True)
class _PreparedDocument:
    """A document on its way into a model.

    Attributes:
        row_number: which row of the cache.
        ids: int32 [T], as far as the model reads.
        rows: int64 [N], the hidden states that are compared.
        terms: one a loss.
        teacher_top: what the teacher finds likeliest; None where nobody asks.
    """

    row_number: int
    ids: NDArray[np.int32]
    rows: NDArray[np.int64]
    terms: tuple[LossTensors, ...]
    teacher_top: TeacherTopTokens | None


@torch.no_grad()
def compare_with_teacher(
    model: BackboneWithHead,
    tokenizer: Tokenizer,
    cache: TeacherCache,
    objectives: Sequence[LossTerm],
    matching: TokenMatching | None,
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
        matching: how a token of the model can be the teacher's; None: the cache does not tell which are the likeliest.
        batch_tokens: padded tokens in a forward pass.
        max_length: a smaller limit than the model's context.

    Returns:
        By the names of the losses, of each document its sum over items and how many it has; likewise under
        `AGREEMENT`, how often both find the same token likeliest, of how many places where both begin one.

    Raises:
        XtkError: nothing of the text is said by both.
    """
    limit = max_input_tokens(model, max_length)
    training = model.training
    model.eval()
    names = [*(objective.name for objective in objectives), *([AGREEMENT_METRIC] if matching is not None else [])]
    sums, counts = np.zeros((2, len(names), len(cache)))
    with terminal.Progress("evaluate", len(cache), "documents against the teacher") as progress:
        for start in range(0, len(cache), READ_BATCH_SIZE):
            numbers = range(start, min(start + READ_BATCH_SIZE, len(cache)))
            read = _prepare_documents(tokenizer, cache, numbers, objectives, limit, likeliest=matching is not None)
            for batch, states in _hidden_states(model, read, batch_tokens):
                found = _document_losses(model, batch, states)
                for one, own, losses in zip(batch, states, found, strict=True):
                    sums[: len(objectives), one.row_number] = losses
                    counts[: len(objectives), one.row_number] = [term.num_items for term in one.terms]
                    if matching is not None:
                        sums[-1, one.row_number], counts[-1, one.row_number] = _count_agreements(
                            model, one, own, matching
                        )
            progress.advance(len(numbers))
    model.train(training)
    if not counts.any():
        raise XtkError("there is nothing to compare: the teacher and the model have no place of the text in common")
    return {name: Ratio(*of_name) for name, *of_name in zip(names, sums, counts, strict=True)}


def _prepare_documents(
    tokenizer: Tokenizer,
    cache: TeacherCache,
    numbers: range,
    objectives: Sequence[LossTerm],
    limit: int | None,
    *,
    likeliest: bool,
) -> list[_PreparedDocument]:
    """Read rows of a cache; those without a trained token are left out."""
    documents = [cache.read_document(number).document for number in numbers]
    sampled = sorted({objective.accepts_samples for objective in objectives}, reverse=True)
    found = []
    for number, document, sequence in zip(numbers, documents, tokenize_documents(tokenizer, documents), strict=True):
        student = sequence if limit is None else sequence.truncate(limit)
        examples = {}
        for takes in sampled:
            row = cache.read_document(number, 0 if takes else None)
            examples[takes] = make_loss_inputs(
                student, document, TeacherOutput(row.tokens, row.teacher_logprobs.drop_nan_positions())
            )
        example = examples[sampled[0]]
        if len(example.positions):
            terms = tuple(objective.to_tensors(examples[objective.accepts_samples]) for objective in objectives)
            found.append(
                _PreparedDocument(
                    number,
                    student.ids,
                    example.positions,
                    terms,
                    TeacherTopTokens.from_example(example) if likeliest else None,
                )
            )
    return found


def _hidden_states(
    model: BackboneWithHead, read: list[_PreparedDocument], batch_tokens: int
) -> Iterator[tuple[list[_PreparedDocument], list[torch.Tensor]]]:
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


def _document_losses(
    model: BackboneWithHead, batch: list[_PreparedDocument], states: list[torch.Tensor]
) -> list[NDArray[np.float64]]:
    """Return float64 [losses] of each document."""
    found = []
    for one, own in zip(batch, states, strict=True):
        terms = [term.to(own.device, 1.0) for term in one.terms]
        parts = fused_loss(own, model.head, terms, chunk_rows(model.head.num_logits(own)))[1]
        found.append(parts.double().cpu().numpy())
    return found


def _count_agreements(
    model: BackboneWithHead, one: _PreparedDocument, states: torch.Tensor, meeting: TokenMatching
) -> tuple[int, int]:
    """Return how often both find the same token likeliest, of how many."""
    assert one.teacher_top is not None
    if not len(one.teacher_top.student_rows):
        return 0, 0
    asked = states[torch.from_numpy(one.teacher_top.student_rows).to(states.device)]
    targets = torch.zeros(len(asked), dtype=torch.int64, device=asked.device)
    _, tokens = compute_token_logprobs(asked, model.head, targets, return_top1=True)
    return one.teacher_top.count_agreements(tokens.cpu().numpy(), meeting)
