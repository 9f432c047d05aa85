"""Comparison of a model with a cached teacher on the same documents: losses and top-1 agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.batches.top1_agreement import TeacherTopTokens, TokenMatching
from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import BATCH_TOKENS, READ_BATCH_SIZE, max_input_tokens
from xtk.evaluation.standard_errors import Ratio
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.term import LossTerm, make_loss_inputs, masks_whitespace
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.output_head import compute_token_logprobs
from xtk.progress import Progress
from xtk.text.chat.regions import RegionWeights, token_regions
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

AGREEMENT_METRIC = "top1_agreement"


class DocumentsOfCache:
    """The documents of a cache, as a re-iterable."""

    def __init__(self, cache: TeacherCache) -> None:
        self._cache = cache

    def __iter__(self) -> Iterator[Document]:
        for number in range(len(self._cache)):
            yield self._cache.read_document(number).document


@dataclass(frozen=True)
class _PreparedDocument:
    """A document of the cache, prepared for the model: at most its context."""

    row_number: int
    ids: NDArray[np.int32]
    rows: NDArray[np.int64]  # [N], positions of the hidden states that are compared
    terms: tuple[LossCells, ...]
    teacher_top: TeacherTopTokens | None  # the teacher's most likely tokens; None: agreement is not computed


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
    """Return losses and top-1 agreement of a model with a cached teacher.

    Each document is processed once, truncated to the model's context. Documents have equal weights, independent of
    their weights in training. Losses use sampled tokens where they do in training.

    Args:
        model: the model, on its device.
        objectives: one or more loss terms that fit the cache and the model.
        matching: decides whether a student token and a teacher token are the same; None: do not compute the agreement.
        max_length: a smaller limit than the model's context, in tokens.

    Returns:
        {name of the loss: each document's sum over items, and number of items}. Under `AGREEMENT_METRIC`: the number of
        shared boundaries with the same most likely token, and the number of shared boundaries.
    """
    limit = max_input_tokens(model, max_length)
    training = model.training
    model.eval()
    names = [*(objective.name for objective in objectives), *([AGREEMENT_METRIC] if matching is not None else [])]
    sums, counts = np.zeros((2, len(names), len(cache)))
    with Progress("evaluate", len(cache), "documents against the teacher") as progress:
        for start in range(0, len(cache), READ_BATCH_SIZE):
            numbers = range(start, min(start + READ_BATCH_SIZE, len(cache)))
            read = _prepare_documents(
                tokenizer, cache, numbers, objectives, limit, with_top_tokens=matching is not None
            )
            progress.advance(len(numbers) - len(read))
            for batch, states in _hidden_states(model, read, batch_tokens):
                for prepared, own in zip(batch, states, strict=True):
                    _, losses = fused_loss(own, model.head, [term.to(own.device, 1.0) for term in prepared.terms])
                    sums[: len(objectives), prepared.row_number] = losses.double().cpu().numpy()
                    counts[: len(objectives), prepared.row_number] = [term.denominator for term in prepared.terms]
                    if matching is not None:
                        sums[-1, prepared.row_number], counts[-1, prepared.row_number] = _count_agreements(
                            model, prepared, own, matching
                        )
                progress.advance(len(batch))
    model.train(training)
    if not counts.any():
        raise XtkError(
            "student and teacher cannot be compared: no token or span of the documents is scored by both",
            hint="use a cache of documents with trained text, and a --max-length that includes it",
        )
    return {name: Ratio(*of_name) for name, *of_name in zip(names, sums, counts, strict=True)}


def _prepare_documents(
    tokenizer: Tokenizer,
    cache: TeacherCache,
    numbers: range,
    objectives: Sequence[LossTerm],
    limit: int | None,
    *,
    with_top_tokens: bool,
) -> list[_PreparedDocument]:
    """Return prepared documents of a cache; those without a trained token are left out."""
    documents = [cache.read_document(number).document for number in numbers]
    sampled = sorted({objective.accepts_samples for objective in objectives}, reverse=True)
    regions, with_template = RegionWeights(), not all(objective.uses_teacher for objective in objectives)
    prepared = []
    for number, document, sequence in zip(numbers, documents, tokenize_documents(tokenizer, documents), strict=True):
        student = sequence if limit is None else sequence.truncate(limit)
        student = regions.select(student, token_regions(document, student), with_template=with_template)
        mask = student.whitespace_mask(document.text) if masks_whitespace(objectives) else None
        examples = {}
        for use_samples in sampled:
            row = cache.read_document(number, 0 if use_samples else None)
            teacher = row.with_teacher_logprobs(row.teacher_logprobs.drop_nan_positions())
            examples[use_samples] = make_loss_inputs(student, document, teacher, mask)
        example = examples[sampled[0]]
        if len(example.positions):
            terms = tuple(objective.build_cells(examples[objective.accepts_samples]) for objective in objectives)
            prepared.append(
                _PreparedDocument(
                    number,
                    student.ids,
                    example.positions,
                    terms,
                    TeacherTopTokens.from_example(example) if with_top_tokens else None,
                )
            )
    return prepared


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
        for row, document in enumerate(batch):
            ids[row, : len(document.ids)] = torch.from_numpy(document.ids)
        states = model(ids.to(device))
        yield batch, [states[row, torch.from_numpy(document.rows).to(device)] for row, document in enumerate(batch)]
        start += len(batch)


def _count_agreements(
    model: BackboneWithHead, prepared: _PreparedDocument, states: torch.Tensor, matching: TokenMatching
) -> tuple[int, int]:
    """Return the number of agreements in the most likely token, and the number of comparisons."""
    assert prepared.teacher_top is not None
    if not len(prepared.teacher_top.student_rows):
        return 0, 0
    compared = states[torch.from_numpy(prepared.teacher_top.student_rows).to(states.device)]
    targets = torch.zeros(len(compared), dtype=torch.int64, device=compared.device)
    _, tokens = compute_token_logprobs(compared, model.head, targets, return_top1=True)
    return prepared.teacher_top.count_agreements(tokens.cpu().numpy(), matching)
