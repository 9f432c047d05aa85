"""Style references: small models of a teacher's family, whose log-probabilities are subtracted from the teacher's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_document import StyleScores, TeacherDocument
from xtk.errors import MismatchError, XtkError
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.teachers.source import TeacherSource


class StyledTeacher:
    """A teacher whose outputs also have the log-probabilities of its reference and of the frozen student.

    Args:
        teacher: the teacher.
        reference: a model with the teacher's tokenizer, of support `none`.
        frozen_student: the student before the run, of support `none`.
    """

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
    scores = StyleScores(_by_token(reference), frozen.tokens.ids, _by_token(frozen))
    ours, theirs = (one.tokens.ids[one.tokens.train_mask] for one in (teacher, reference))
    if len(teacher.tokens) != len(reference.tokens) or not np.array_equal(ours, theirs):
        raise MismatchError(
            "--reference reads a document with other tokens than its teacher",
            where=f"{len(ours):,} and {len(theirs):,} trained tokens",
            hint="use a reference with the teacher's chat template and start token, or another reference",
        )
    return teacher.with_style_scores(scores)


def _by_token(scored: TeacherDocument) -> NDArray[np.float32]:
    """Return float32 [tokens], the log-probability of each token; nan where there is none."""
    logprobs = np.full(len(scored.tokens), np.nan, np.float32)
    logprobs[scored.teacher_logprobs.positions] = scored.teacher_logprobs.observed_logprobs
    return logprobs


def check_references(references: Sequence[OnlineTeacher], teachers: Sequence[OnlineTeacher]) -> None:
    """Refuse references that do not fit the teachers: another number or tokenizer, or the teacher itself."""
    if len(references) != len(teachers):
        raise XtkError(
            f"--reference is given {len(references)} times for {len(teachers)} teachers",
            hint="give one --reference per --teacher, in the same order",
        )
    for reference, teacher in zip(references, teachers, strict=True):
        where = f"reference {reference.request.teacher.name}; teacher {teacher.request.teacher.name}"
        if reference.teacher_tokenizer.fingerprint != teacher.teacher_tokenizer.fingerprint:
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


def _model_of(teacher: OnlineTeacher) -> tuple[object, ...]:
    model, servers = teacher.request.teacher, teacher.request.backend_options.get("servers") or ()
    return model.folder.resolve(), model.adapter, teacher.student_weights, tuple(sorted(servers))
