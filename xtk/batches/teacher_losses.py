"""The losses of one or several teachers as terms of the total loss, and their caches as one source of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from xtk.batches.combine_teachers import TeacherEnsemble
from xtk.batches.data_sources import DocumentsFromCaches, TeacherMixture, match_documents, route_documents
from xtk.batches.losses_per_teacher import AssignedLoss, DistillationTeacher
from xtk.cache.reader import TeacherCache
from xtk.errors import MismatchError, XtkError
from xtk.losses.term import LossTerm
from xtk.runs.metrics_file import metric_name
from xtk.teachers.source import TeacherSource
from xtk.teachers.style_references import ShiftedTeacher
from xtk.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TeacherLosses:
    """The teachers of a student, how they are combined, and their losses."""

    tokenizer: Tokenizer  # the student's tokenizer
    combination: TeacherEnsemble  # how several teachers are combined
    teachers: Sequence[DistillationTeacher]  # the teachers
    losses: Sequence[AssignedLoss]  # the losses, each assigned to a teacher

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The teachers' names in metrics; a mixture has one."""
        return (
            ("mixture",) if self.combination.method == "mixture" else tuple(teacher.name for teacher in self.teachers)
        )

    @cached_property
    def objectives(self) -> tuple[LossTerm, ...]:
        """The terms of the loss."""
        return tuple(map(self._loss_term, self.losses))

    def combined(self, teachers: Sequence[TeacherSource]) -> Sequence[TeacherSource]:
        """Return the teachers as the losses see them: a mixture is one teacher."""
        is_mixture = self.combination.method == "mixture"
        return [TeacherMixture(teachers, self.combination.weights)] if is_mixture else teachers

    def cached_documents(
        self, teachers: Sequence[DistillationTeacher], references: Sequence[TeacherCache] = ()
    ) -> DocumentsFromCaches:
        """Return the documents of the teachers' caches, combined; `references`: of each, for `--teacher-shift`."""
        caches = [teacher.source for teacher in teachers if isinstance(teacher.source, TeacherCache)]
        if references:
            documents = DocumentsFromCaches(*caches, *references, rows=match_documents([*caches, *references]))
            sources = documents.teachers
            pairs = zip(sources[: len(caches)], sources[len(caches) :], strict=True)
            documents.teachers = [ShiftedTeacher(*both) for both in pairs]
            return documents
        if len(caches) == 1:
            return DocumentsFromCaches(*caches)
        is_routed = self.combination.method == "route"
        rows = route_documents(caches, [teacher.name for teacher in teachers]) if is_routed else match_documents(caches)
        documents = DocumentsFromCaches(*caches, rows=rows)
        documents.teachers = self.combined(documents.teachers)
        return documents

    def _loss_term(self, one: AssignedLoss) -> LossTerm:
        rule, divergence, loss = one.rule, one.loss.make_divergence(), one.loss
        if one.teacher is None:
            return LossTerm(rule, divergence, None, loss.name, loss.weight)
        method, is_weighted_later = self.combination.method, self.combination.score_weighting is not None
        return LossTerm(
            rule,
            divergence,
            self.teachers[one.teacher].comparison_space(rule.comparison_space),
            metric_name(loss.name, self.names[one.teacher], self.names),
            loss.weight,
            one.teacher,
            teacher_weight=1.0
            if is_weighted_later or method in ("mixture", "route")
            else self.combination.weights[one.teacher],
            # An id that one teacher of a mixture sampled has no known probability under the others.
            has_sample_logprobs=self.teachers[one.teacher].has_sample_logprobs and method != "mixture",
            denominator_group=("auto" if one.is_auto else loss.name) if method == "route" else "",
            stop_classes=self.teachers[one.teacher].stop_classes,
        )


def combined_losses(
    combination: TeacherEnsemble, teachers: Sequence[DistillationTeacher], losses: Sequence[AssignedLoss]
) -> list[AssignedLoss]:
    """Return the losses of combined teachers: those on the mixture, if the teachers are mixed."""
    if combination.method == "mixture":
        _check_mixable(teachers)
        losses = _losses_on_mixture(losses, teachers)
    if combination.score_weighting is not None:
        _check_score(combination.score_weighting.score, teachers)
    return list(losses)


def _check_score(score: str, teachers: Sequence[DistillationTeacher]) -> None:
    """Check that the score of --teacher-weights can be computed from each teacher."""
    lacking = next((teacher for teacher in teachers if score == "max-probability" and not teacher.has_exact_top1), None)
    if lacking is not None:
        raise XtkError(
            "--teacher-weights max-probability needs the exact most likely token of each position",
            where=f"{lacking.path} has the support {lacking.support}",
            hint="use --teacher-weights ce, or caches with the support top-k+sample, top-k or top-p",
        )


def _check_mixable(teachers: Sequence[DistillationTeacher]) -> None:
    first, *others = teachers
    for other in others:
        if other.identity["tokenizer"] != first.identity["tokenizer"]:
            raise MismatchError(
                "--combine-teachers mixture needs teachers with the same tokenizer",
                where=f"{first.path} and {other.path}",
                hint="use --combine-teachers sum",
            )


def _losses_on_mixture(assigned: Sequence[AssignedLoss], teachers: Sequence[DistillationTeacher]) -> list[AssignedLoss]:
    """Return the losses on the mixture: those of the teacher with the least support, if all teachers allow them."""
    least = next((number for number, teacher in enumerate(teachers) if teacher.support == "none"), 0)
    losses = [assignment for assignment in assigned if assignment.teacher in (None, least)]
    for loss in losses:
        for teacher in teachers:
            if refusal := teacher.refusal(loss.loss, in_mixture=True):
                raise refusal
    return [loss if loss.teacher is None else replace(loss, teacher=0) for loss in losses]
