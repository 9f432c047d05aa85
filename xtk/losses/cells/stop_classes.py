"""Stop tokens: all tokens at which a model's text may end are one event, on each side.

Of a class the first token stands for all. The teacher's other stop tokens are added to it before the cells are built;
the student's are added to its cells as further entries, so that the probability of the cell is their sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import TeacherLogprobs, sizes_to_offsets
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.interface import BOTH_STOP_CLASSES, NO_STOP_CLASS, ComparisonSpace, Loss, LossInputs
from xtk.text.tokenizer import Tokenizer


class StopClasses(NamedTuple):
    """The stop tokens of both models, ascending."""

    student: NDArray[np.int32]  # [n], at least one
    teacher: NDArray[np.int32]  # [m], at least one

    @classmethod
    def from_tokenizers(cls, student: Tokenizer, teacher: Tokenizer) -> StopClasses | None:
        """Return the stop tokens of two models; None if there is nothing to add up.

        That is if one side has none, or if both have one tokenizer and the same stop tokens: then each token is
        compared with itself. If they have one tokenizer and other stop tokens, both have those of either.
        """
        own, theirs = student.stop_ids, teacher.stop_ids
        if student.text_fingerprint == teacher.text_fingerprint:
            declared = [set(side.declared_stop_ids) for side in (student, teacher)]
            if (own, declared[0], student.end_id) == (theirs, declared[1], teacher.end_id):
                return None
            own = theirs = own | theirs
        if not own or not theirs:
            return None
        return cls(np.array(sorted(own), np.int32), np.array(sorted(theirs), np.int32))

    def in_space(self, space: ComparisonSpace) -> ComparisonSpace:
        """Return a space in which the first stop tokens of both sides correspond, and the others to nothing."""
        return None if space is None else space.with_stop_tokens(self.student, self.teacher)

    def merge_inputs(self, example: LossInputs, loss: Loss) -> LossInputs:
        """Return inputs in which the teacher's stop tokens are one, and the student's, if the loss compares classes."""
        if loss.stop_class == NO_STOP_CLASS or example.teacher_logprobs is None:
            return example
        merged = replace(
            example,
            teacher_ids=_first_of_class(example.teacher_ids, self.teacher),
            teacher_logprobs=merge_stop_tokens(example.teacher_logprobs, example.teacher_ids, self.teacher),
        )
        if loss.stop_class != BOTH_STOP_CLASSES:
            return merged
        return replace(merged, student_ids=_first_of_class(example.student_ids, self.student))

    def expand_cells(self, cells: LossCells, loss: Loss) -> LossCells:
        """Return cells in which an entry of the student's first stop token is one of each stop token.

        Those of byte-kl, which do not list their entries, have them from the partition.
        """
        if loss.stop_class != BOTH_STOP_CLASSES or len(self.student) == 1:
            return cells
        is_stop = cells.tokens == int(self.student[0])
        if not bool(is_stop.any()):
            return cells
        counts = torch.where(is_stop, len(self.student), 1)
        edges = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        source = torch.arange(len(counts)).repeat_interleave(counts)
        tokens = cells.tokens[source]
        tokens[is_stop[source]] = torch.from_numpy(self.student).to(tokens.dtype).repeat(int(is_stop.sum()))
        return replace(
            cells,
            entry_offsets=edges[cells.entry_offsets],
            entry_cells=cells.entry_cells[source],
            rows=cells.rows[source],
            tokens=tokens,
            log_weights=None if cells.log_weights is None else cells.log_weights[source],
            rows_averaged=cells.rows_averaged[source],
        )


def ordinary_stops_message(tokenizer: Tokenizer) -> str:
    """Return the note on stop tokens in a generation_config.json that are ignored."""
    stops = ", ".join(map(str, tokenizer.ordinary_stop_tokens))
    return f"generation_config.json names stop tokens that are not special tokens and are ignored: {stops}"


def merge_stop_tokens(
    logprobs: TeacherLogprobs, teacher_ids: NDArray[np.int32], stops: NDArray[np.int32]
) -> TeacherLogprobs:
    """Return log-probabilities in which the stop tokens of a position are one entry, the first stop token.

    Exact and sampled entries are added up separately. An observed stop token has the probability of all that are listed
    exactly. The entropy is that of the exact part after the addition. `teacher_ids`: int32 [S], the observed tokens.
    """
    entries = np.flatnonzero(np.isin(logprobs.ids, stops))
    if len(stops) == 1 or not len(entries):
        return logprobs
    sizes = np.diff(logprobs.offsets)
    exact_counts = sizes if logprobs.exact_counts is None else logprobs.exact_counts
    owners = np.searchsorted(logprobs.offsets, entries, side="right") - 1
    is_sampled = entries - logprobs.offsets[owners] >= exact_counts[owners]
    firsts = np.flatnonzero(np.diff(2 * owners + is_sampled, prepend=-1))
    old = logprobs.logprobs[entries].astype(np.float64)
    sums = np.minimum(np.logaddexp.reduceat(old, firsts), 0)
    ids, new = logprobs.ids.copy(), logprobs.logprobs.copy()
    ids[entries[firsts]], new[entries[firsts]] = stops[0], sums
    kept = np.ones(len(ids), np.bool_)
    kept[np.delete(entries, firsts)] = False
    of_exact = ~is_sampled[firsts]
    exact_owners = owners[firsts][of_exact]
    observed, entropy = logprobs.observed_logprobs.copy(), logprobs.entropy.copy()
    is_stop = np.isin(teacher_ids[logprobs.positions[exact_owners]], stops)
    observed[exact_owners[is_stop]] = np.maximum(sums[of_exact], observed[exact_owners])[is_stop]
    terms = np.add.reduceat(_plogp(old), firsts)
    entropy[exact_owners] += (terms - _plogp(sums))[of_exact]
    token_logprobs = logprobs.token_logprobs
    if token_logprobs is not None:
        # A sampled stop token represents its part of the class: the mean over samples is the student's probability.
        ratios = np.log(np.add.reduceat(np.exp(old - token_logprobs[entries]), firsts) / len(stops))
        token_logprobs = token_logprobs.copy()
        token_logprobs[entries[firsts]] = np.where(of_exact, sums, sums - ratios)
        token_logprobs = token_logprobs[kept]
    removed = np.bincount(np.delete(owners, firsts), minlength=len(sizes))
    removed_exact = np.bincount(np.delete(owners, firsts)[~np.delete(is_sampled, firsts)], minlength=len(sizes))
    return replace(
        logprobs,
        offsets=sizes_to_offsets(sizes - removed),
        ids=ids[kept],
        logprobs=new[kept],
        observed_logprobs=observed,
        entropy=np.maximum(entropy, 0),
        token_logprobs=token_logprobs,
        exact_counts=None if logprobs.exact_counts is None else logprobs.exact_counts - removed_exact,
    )


def _plogp(logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `p ln p`, 0 where p is 0."""
    values: NDArray[np.float64] = np.exp(logprobs) * np.maximum(logprobs, -1e4)
    return values


def _first_of_class(ids: NDArray[np.int32], stops: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.where(np.isin(ids, stops), stops[0], ids).astype(np.int32)
