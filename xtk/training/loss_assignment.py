"""The teachers of a run, and the losses that each of them takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.artifacts.cache_shard import optional_columns
from xtk.artifacts.projection_cache import cached_next_bytes, cached_projection, cached_projection_path
from xtk.artifacts.projection_file import read_projection
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import MismatchError, XtkError
from xtk.evaluation.top1_agreement import SUPPORTS_WITH_TOP1, ByProjection, BySpelling, TokenMatching
from xtk.losses import AUTO_LOSS, LOSSES, SURROGATE_LOSSES, LossSpec, parse_losses
from xtk.losses.loss_cells import ComparisonSpace, Loss
from xtk.projection.build import tokenizer_identity
from xtk.projection.projection import IDENTITY_KEYS, Projection, format_tokenizer
from xtk.registry import load_registered
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.tokens.tokenizer import Tokenizer

DEFAULT_PROJECTION_METHOD = "multitoken"  # of projections that nobody named
PAIR_PROJECTION_METHOD = "exact"  # of the pairs of tokens that spell the same

# What `--loss auto` takes, by what a cache and its tokenizer allow: the losses of a run in which nobody names one.
AUTO_LOSSES = {
    "tokens": ["ce", "forward-kl"],
    "bytes": ["ce:weight=0.3", "byte-kl"],
    "projection": ["ce", "p-kl"],
    "observed": ["alm"],
}


@dataclass(frozen=True)
class DistillationTeacher:
    """One teacher of a student: its cache, and how the two tokenizers meet.

    Attributes:
        name: how metrics and routes call it.
        path: where its cache lies, or it itself.
        source: what it said, or who says it while the student trains.
        student: the student's tokenizer.
        named_projection: the projection that the user named for it, if any, and its path.
    """

    name: str
    path: str
    source: TeacherCache | OnlineTeacher
    student: Tokenizer
    named_projection: tuple[Path, Projection] | None = None
    _comparison_spaces: dict[str, ComparisonSpace] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What is known of it without its weights."""
        return dict(self.source.header["teacher"])

    @property
    def is_online(self) -> bool:
        """Whether it scores while the student trains."""
        return isinstance(self.source, OnlineTeacher)

    @property
    def support(self) -> str:
        """Which tokens of its distributions there are."""
        return str(self.source.header["options"].get("support"))

    @property
    def has_exact_top1(self) -> bool:
        """Whether its cache holds the likeliest tokens for certain."""
        return self.support in SUPPORTS_WITH_TOP1

    @property
    def has_rollouts(self) -> bool:
        """Whether a student drew some of the documents that it read."""
        return "sampled_tokens" in optional_columns(self.source.header)

    @property
    def has_students_tokenizer(self) -> bool:
        """Whether it reads as the student does."""
        return bool(self.identity["tokenizer"] == self.student.fingerprint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.source.teacher_tokenizer

    @cached_property
    def projection(self) -> Projection:
        """The projection that was named, or else one that is built."""
        if self.named_projection is not None:
            return self.named_projection[1]
        made = cached_projection(self.student, self.tokenizer, DEFAULT_PROJECTION_METHOD)
        path = cached_projection_path(self.student, self.tokenizer, DEFAULT_PROJECTION_METHOD)
        audited = made.header["audit"]
        terminal.note(
            f"distill: projection to {self.name}: method {DEFAULT_PROJECTION_METHOD}; {audited['rows']['exact']:,} of "
            f"{len(self.student):,} student tokens exact, unmapped mass {audited['unmapped_mass']:.2%}; "
            + (f"kept as {path}" if path is not None and path.is_file() else "not kept")
        )
        return made

    def refusal(self, loss: LossSpec) -> XtkError | None:
        """Return why a loss cannot learn from it; None if it can."""
        rule, where = loss.make_loss(), f"{self.path} has the support {self.support}"
        if rule.comparison_space == "tokens" and not self.has_students_tokenizer:
            return MismatchError(
                f"the loss {loss.name} is for a teacher with the student's own tokenizer",
                where=f"{self.student.name} has {self.student.fingerprint[:15]}; {self.description}",
                hint="--loss byte-kl, p-kl or boundary-kl",
            )
        if rule.requires == "ranks" and not self.has_exact_top1:
            return XtkError(
                f"the loss {loss} asks for the likeliest tokens, with their exact probabilities",
                where=where,
                hint=self._support_hint("top-k+sample, top-k or top-p"),
            )
        if rule.requires == "distribution" and self.support == "none":
            return XtkError(
                f"the loss {loss} asks for distributions, not only for the tokens that stand there",
                where=where,
                hint=self._support_hint("top-k+sample or top-k") + ", or --loss alm",
            )
        if (
            self.support == "sample"
            and rule.requires == "distribution"
            and not loss.make_divergence().is_linear_in_teacher
        ):
            return XtkError(
                f"the loss {loss} cannot learn from draws: estimates have no bias for forward-kl at temperature 1 only",
                where=where,
                hint=self._support_hint("top-k+sample or top-k") + ", or the divergence forward-kl",
            )
        return None

    @property
    def description(self) -> str:
        """Where it is, and who."""
        of_cache = f"the cache {self.path} is from {_teacher_description(self.identity)}"
        return f"{self.path} has {_teacher_description(self.identity)}" if self.is_online else of_cache

    def _support_hint(self, supports: str) -> str:
        """Say what would have another support."""
        live = f"--teacher {self.path}:support=..., {supports}"
        return live if self.is_online else f"a cache with --support {supports}"

    def comparison_space(self, name: str) -> ComparisonSpace:
        """Return what a loss stands on, a key of `GROUNDS`; each is made once."""
        if name not in self._comparison_spaces:
            self._comparison_spaces[name] = self._make_comparison_space(name)
        return self._comparison_spaces[name]

    def _make_comparison_space(self, kind: str) -> ComparisonSpace:
        width = int(self.identity["embedding_rows"])
        if kind in ("text", "spans"):
            return None
        if kind == "pairs":
            return cached_projection(self.student, self.tokenizer, PAIR_PROJECTION_METHOD).columns.pad_columns(width)
        if kind == "bytes":
            return cached_next_bytes(self.student, self.tokenizer)
        if kind == "tokens":
            return Projection.identity(len(self.student)).columns.pad_columns(width)
        return self.projection.columns.pad_columns(width)

    def token_matching(self, comparison_spaces: Collection[str]) -> TokenMatching:
        """Return how its tokens can be those of the student.

        Args:
            comparison_spaces: of the losses that are about it: without a projection that is named or needed, none is
                made.
        """
        if self.has_students_tokenizer:
            return ByProjection(
                np.arange(max(self.student.embedding_rows, int(self.identity["embedding_rows"])), dtype=np.int32)
            )
        if self.named_projection is not None or "projection" in comparison_spaces:
            return ByProjection.from_projection(self.projection)
        return BySpelling.from_tokenizers(self.student, self.tokenizer)

    def auto_losses(self) -> tuple[list[str], str]:
        """Return what `--loss auto` takes, and why."""
        if self.support == "none":
            return AUTO_LOSSES["observed"], f"of {self.name} there are the tokens of the text alone"
        if self.named_projection is not None:
            return AUTO_LOSSES["projection"], f"a projection to {self.name} is named"
        if self.has_students_tokenizer:
            return AUTO_LOSSES["tokens"], f"{self.name} has the student's own tokenizer"
        own, theirs = (set(side.vocabulary.bytes_by_id) for side in (self.student, self.tokenizer))
        share = len(own & theirs) / len(own)
        return AUTO_LOSSES["bytes"], f"{self.name} has another tokenizer, with {share:.0%} of the student's tokens"


def open_teachers(
    caches_or_models: Sequence[str],
    projections: Sequence[Path],
    student: Tokenizer,
    online_teachers: Sequence[OnlineTeacher] = (),
) -> list[DistillationTeacher]:
    """Open the caches of a run, and deal the projections to the teachers that they were built for.

    Args:
        caches_or_models: of caches.
        projections: that were named.
        student: its tokenizer.
        online_teachers: teachers that need no caches, which have read the data; then `places` are none.

    Raises:
        XtkError: one of them cannot be read, or a projection belongs to no teacher.
    """
    caches: list[TeacherCache | OnlineTeacher] = [*(online_teachers or map(TeacherCache, caches_or_models))]
    named_places = [teacher.request.teacher_name for teacher in online_teachers] or caches_or_models
    names = number_duplicate_names([str(cache.header["teacher"]["name"]) for cache in caches])
    teachers = [DistillationTeacher(*three, student) for three in zip(names, named_places, caches, strict=True)]
    for path in projections:
        projection = read_projection(path)
        refusals = [_misfit(path, projection, teacher) for teacher in teachers]
        if all(refusals):
            raise next(filter(None, refusals))
        teachers = [
            teacher
            if refusal
            else DistillationTeacher(teacher.name, teacher.path, teacher.source, student, (path, projection))
            for teacher, refusal in zip(teachers, refusals, strict=True)
        ]
    return teachers


def number_duplicate_names(names: list[str]) -> list[str]:
    """Return names with a number behind those that come more than once: name-1, name-2."""
    return [
        name if names.count(name) == 1 else f"{name}-{names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]


def _misfit(path: Path, projection: Projection, teacher: DistillationTeacher) -> MismatchError | None:
    """Say why a projection is of another pair. Chat templates may differ: no projection depends on them."""
    hint = "xtk build-projection STUDENT TEACHER -o ..., with this student and the teacher of this cache"
    built_for, student = projection.header["student"], tokenizer_identity(teacher.student)
    if any(built_for.get(key) != student[key] for key in IDENTITY_KEYS):
        return MismatchError(
            "this projection was built for another student",
            where=f"{path} is for {format_tokenizer(built_for)}; "
            f"{teacher.student.name} has {format_tokenizer(student)}",
            hint=hint,
        )
    built_for = projection.header["teacher"]
    # A cache need not tell the roles; its width is no matter, padded rows are reached by nothing.
    if any(
        built_for.get(key) != teacher.identity[key]
        for key in ("tokenizer", "special_tokens")
        if key in teacher.identity
    ):
        return MismatchError(
            "this projection was built for another teacher",
            where=f"{path} is for {format_tokenizer(built_for)}; {teacher.description}",
            hint=hint,
        )
    return None


def _teacher_description(side: dict[str, Any]) -> str:
    return f"{str(side['tokenizer'])[:15]} ({side['name']})"


# Which losses.


@dataclass(frozen=True)
class AssignedLoss:
    """A loss, and the teacher whose word it is about; None of one on the student alone.

    Attributes:
        is_auto: nobody named it.
    """

    loss: LossSpec
    teacher: int | None
    is_auto: bool = False

    @property
    def rule(self) -> Loss:
        """What makes its cells."""
        return self.loss.make_loss()


def assign_losses(
    requested: Sequence[LossSpec], teachers: Sequence[DistillationTeacher], *, on_policy: bool = False
) -> tuple[list[AssignedLoss], str]:
    """Deal the losses of a run to its teachers: each to all that it fits.

    Args:
        requested: as they were written.
        teachers: of the run.
        on_policy: whether the student is going to write what they read.

    Returns:
        The losses, and what `--loss auto` took and why; "" where nobody asked for it.

    Raises:
        XtkError: a loss fits no teacher, or no loss fits a teacher, or one is for what the student drew, and it drew
            nothing.
    """
    for loss in requested:
        if loss.name in SURROGATE_LOSSES and not on_policy and not any(teacher.has_rollouts for teacher in teachers):
            raise XtkError(
                f"the loss {loss.name} is for documents that the student drew, and none of these was",
                where=", ".join(teacher.path for teacher in teachers),
                hint="rollouts of the student, through xtk rollout and xtk cache-teacher; or --loss alm",
            )
    taken = [one for loss in requested if loss.name != AUTO_LOSS for one in _taken(loss, teachers)]
    if all(loss.name != AUTO_LOSS for loss in requested):
        idle = set(range(len(teachers))) - {one.teacher for one in taken}
        if idle and any(one.teacher is not None for one in taken):
            name = teachers[min(idle)].name
            raise XtkError(f"none of the losses fits the teacher {name}", hint="--loss auto, or --loss byte-kl beside")
        return taken, ""
    reasons = [teacher.auto_losses() for teacher in teachers]
    for number, (names, _) in enumerate(reasons):
        for loss in parse_losses(names):
            about = None if load_registered(LOSSES, loss.name, "loss").comparison_space == "text" else number
            if (loss.name, about) not in [(one.loss.name, one.teacher) for one in taken]:
                taken.append(AssignedLoss(loss, about, is_auto=True))
    taken.sort(key=lambda one: one.teacher is not None)
    return taken, "; ".join(describe_auto_losses(taken, [why for _, why in reasons]))


def describe_auto_losses(losses: Sequence[AssignedLoss], reasons: Sequence[str]) -> Iterator[str]:
    """Yield the losses of `--loss auto` for each teacher, and why; before them those that all teachers share."""
    shared = [str(one.loss) for one in losses if one.is_auto and one.teacher is None]
    if len(reasons) > 1:
        yield from shared
        shared = []
    for number, why in enumerate(reasons):
        own = [str(one.loss) for one in losses if one.is_auto and one.teacher == number]
        yield f"{' and '.join(shared + own)}, for {why}"


def _taken(loss: LossSpec, teachers: Sequence[DistillationTeacher]) -> list[AssignedLoss]:
    if load_registered(LOSSES, loss.name, "loss").comparison_space == "text":
        return [AssignedLoss(loss, None)]
    refusals = [teacher.refusal(loss) for teacher in teachers]
    if all(refusals):
        raise next(filter(None, refusals))
    return [AssignedLoss(loss, number) for number, refusal in enumerate(refusals) if refusal is None]
