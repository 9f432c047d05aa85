"""References: small models of a teacher's family, whose log-probabilities are subtracted from the teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_document import StyleScores, TeacherDocument
from xtk.cache.teacher_logprobs import MIN_REMAINDER, TeacherLogprobs, entry_keys, sizes_to_offsets
from xtk.errors import MismatchError, XtkError
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.teachers.source import TeacherSource

Reference = OnlineTeacher | TeacherCache

# Bound of log-probabilities, so that cells of both models exist alike: no probability of a cell is rounded to 0.
MIN_SHIFTED_LOGPROB = np.float32(-80)


class ShiftedTeacher:
    """A teacher whose outputs also have a reference's log-probabilities, at the tokens that both list exactly."""

    def __init__(self, teacher: TeacherSource, reference: TeacherSource) -> None:
        self._sources = teacher, reference

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return the teacher's outputs for some documents, without samples; None for one that it does not have."""
        scored = [source.outputs(documents, None) for source in self._sources]
        return [
            None if teacher is None or reference is None else _shifted(teacher, reference)
            for teacher, reference in zip(*scored, strict=True)
        ]


def _shifted(teacher: TeacherDocument, reference: TeacherDocument) -> TeacherDocument:
    _check_same_tokens(teacher, reference)
    both = teacher.teacher_logprobs, reference.teacher_logprobs
    keys, others = (entry_keys(some.offsets, some.ids) for some in both)
    chosen = [
        _select_entries(both[0], np.isin(keys, others), keys),
        _select_entries(both[1], np.isin(others, keys), others),
    ]
    # Where one of them has a remainder, both have, so that the same cells are in it.
    remainders = [some.remainder_mass for some in chosen]
    has_remainder = np.maximum(*remainders) > MIN_REMAINDER
    least = np.where(has_remainder, np.float32(1.1 * MIN_REMAINDER), np.float32(0))
    return teacher.with_shift_reference(
        *(replace(some, remainder_mass=np.maximum(some.remainder_mass, least)) for some in chosen)
    )


def _select_entries(logprobs: TeacherLogprobs, kept: NDArray[np.bool_], keys: NDArray[np.int64]) -> TeacherLogprobs:
    """Return log-probabilities with some entries, sorted by keys; the mass of the others is in the remainder."""
    owners, size = keys >> 32, len(logprobs)
    left_out = np.bincount(owners[~kept], np.exp(logprobs.logprobs[~kept].astype(np.float64)), minlength=size)
    order = np.flatnonzero(kept)
    order = order[np.argsort(keys[order])]
    return replace(
        logprobs,
        offsets=sizes_to_offsets(np.bincount(owners[kept], minlength=size)),
        ids=logprobs.ids[order],
        logprobs=np.maximum(logprobs.logprobs[order], MIN_SHIFTED_LOGPROB),
        remainder_mass=(logprobs.remainder_mass + left_out).astype(np.float32),
        observed_logprobs=np.maximum(logprobs.observed_logprobs, MIN_SHIFTED_LOGPROB),
    )


class StyledTeacher:
    """A teacher whose outputs also have the log-probabilities of its reference and of the frozen student."""

    def __init__(self, teacher: TeacherSource, reference: TeacherSource, frozen_student: TeacherSource) -> None:
        self._sources = teacher, reference, frozen_student

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return the teacher's outputs for some documents; None for a document that it does not have."""
        scored = [source.outputs(documents, sample_set) for source in self._sources]
        return [
            None if teacher is None or reference is None or frozen is None else _styled(teacher, reference, frozen)
            for teacher, reference, frozen in zip(*scored, strict=True)
        ]


def _styled(teacher: TeacherDocument, reference: TeacherDocument, frozen: TeacherDocument) -> TeacherDocument:
    _check_same_tokens(teacher, reference)
    return teacher.with_style_scores(StyleScores(_by_token(reference), frozen.tokens.ids, _by_token(frozen)))


def _check_same_tokens(teacher: TeacherDocument, reference: TeacherDocument) -> None:
    """Raise MismatchError if a reference reads or trains other tokens of a document than its teacher."""
    ours, theirs = (one.tokens.ids[one.tokens.train_mask] for one in (teacher, reference))
    if len(teacher.tokens) != len(reference.tokens) or not np.array_equal(ours, theirs):
        raise MismatchError(
            "--reference reads a document with other tokens than its teacher",
            where=f"{len(ours):,} and {len(theirs):,} trained tokens",
            hint="use a reference with the teacher's chat template and start token, or another reference",
        )


def _by_token(scored: TeacherDocument) -> NDArray[np.float32]:
    """Return float32 [tokens], the log-probability of each token; nan where there is none."""
    logprobs = np.full(len(scored.tokens), np.nan, np.float32)
    logprobs[scored.teacher_logprobs.positions] = scored.teacher_logprobs.observed_logprobs
    return logprobs


def check_references(references: Sequence[Reference], teachers: Sequence[Reference]) -> None:
    """Refuse references that do not fit the teachers: another number or tokenizer, or the teacher itself."""
    if len(references) != len(teachers):
        raise XtkError(
            f"--reference is given {len(references)} times for {len(teachers)} teachers",
            hint="give one --reference per teacher, in the same order",
        )
    for reference, teacher in zip(references, teachers, strict=True):
        where = f"reference {_name_of(reference)}; teacher {_name_of(teacher)}"
        if _tokenizer_of(reference) != _tokenizer_of(teacher):
            raise MismatchError(
                "a --reference has another tokenizer than its teacher",
                where=where,
                hint="use a model of the teacher's family with the same tokenizer, such as its base model",
            )
        if _model_of(reference) == _model_of(teacher):
            raise XtkError(
                "a --reference is the teacher itself, so nothing but its style would be left to learn",
                where=where,
                hint="use a smaller model of the teacher's family, or its base model",
            )


def _name_of(teacher: Reference) -> str:
    return str(teacher.folder if isinstance(teacher, TeacherCache) else teacher.request.teacher.name)


def _tokenizer_of(teacher: Reference) -> str:
    if isinstance(teacher, TeacherCache):
        return str(teacher.header["teacher"]["tokenizer"])
    return teacher.teacher_tokenizer.fingerprint


def _model_of(teacher: Reference) -> tuple[object, ...]:
    if isinstance(teacher, TeacherCache):
        return (teacher.header["teacher"].get("weights") or teacher.folder,)
    model, servers = teacher.request.teacher, teacher.request.backend_options.get("servers") or ()
    return model.folder.resolve(), model.adapter, teacher.student_weights, tuple(sorted(servers))
