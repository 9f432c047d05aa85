"""The teachers of a run, and the losses that each of them takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.artifacts.projection_file import read_projection
from xtk.artifacts.projection_store import next_bytes_for, projection_for, projection_path
from xtk.artifacts.shard import optional_columns
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import Mismatch, XtkError
from xtk.evaluation.agreement import SUPPORTS, ByImage, BySpelling, Meeting
from xtk.lookup import lookup
from xtk.losses import AUTO, LOSSES, SURROGATES, LossSpecification, parse_losses
from xtk.losses.cells import Ground, Loss
from xtk.projection.build import identity
from xtk.projection.projection import SIDE, Projection, named
from xtk.teachers.live import LiveTeacher
from xtk.tokens.tokenizer import Tokenizer

METHOD = "multitoken"  # of projections that nobody named
PAIRING = "exact"  # of the pairs of tokens that spell the same

# What `--loss auto` takes, by what a cache and its tokenizer allow: the losses of a run in which nobody names one.
CHOSEN = {
    "tokens": ["ce", "forward-kl"],
    "bytes": ["ce:weight=0.3", "byte-kl"],
    "projection": ["ce", "p-kl"],
    "realised": ["alm"],
}


@dataclass(frozen=True)
class Teacher:
    """One teacher of a student: its cache, and how the two tokenizers meet.

    Attributes:
        name: how metrics and routes call it.
        place: where its cache lies, or it itself.
        cache: what it said, or who says it while the student trains.
        student: the student's tokenizer.
        named_projection: the projection that the user named for it, if any, and its path.
    """

    name: str
    place: str
    cache: TeacherCache | LiveTeacher
    student: Tokenizer
    named_projection: tuple[Path, Projection] | None = None
    _grounds: dict[str, Ground] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What is known of it without its weights."""
        return dict(self.cache.header["teacher"])

    @property
    def live(self) -> bool:
        """Whether it scores while the student trains."""
        return isinstance(self.cache, LiveTeacher)

    @property
    def support(self) -> str:
        """Which tokens of its distributions there are."""
        return str(self.cache.header["options"].get("support"))

    @property
    def tells_likeliest(self) -> bool:
        """Whether its cache holds the likeliest tokens for certain."""
        return self.support in SUPPORTS

    @property
    def read_rollouts(self) -> bool:
        """Whether a student drew some of the documents that it read."""
        return "sampled_tokens" in optional_columns(self.cache.header)

    @property
    def has_students_tokenizer(self) -> bool:
        """Whether it reads as the student does."""
        return bool(self.identity["tokenizer"] == self.student.fingerprint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.cache.teacher

    @cached_property
    def projection(self) -> Projection:
        """The projection that was named, or else one that is built."""
        if self.named_projection is not None:
            return self.named_projection[1]
        made = projection_for(self.student, self.tokenizer, METHOD)
        path = projection_path(self.student, self.tokenizer, METHOD)
        audited = made.header["audit"]
        terminal.note(
            f"distill: projection to {self.name}: method {METHOD}; {audited['rows']['exact']:,} of "
            f"{len(self.student):,} student tokens exact, missing mass {audited['missing_mass']:.2%}; "
            + (f"kept as {path}" if path is not None and path.is_file() else "not kept")
        )
        return made

    def refusal(self, loss: LossSpecification) -> XtkError | None:
        """Return why a loss cannot learn from it; None if it can."""
        rule, where = loss.rule(), f"{self.place} has the support {self.support}"
        if rule.ground == "tokens" and not self.has_students_tokenizer:
            return Mismatch(
                f"the loss {loss.name} is for a teacher with the student's own tokenizer",
                where=f"{self.student.name} has {self.student.fingerprint[:15]}; {self.told_of}",
                hint="--loss byte-kl, p-kl or boundary-kl",
            )
        if rule.asks == "ranks" and not self.tells_likeliest:
            return XtkError(
                f"the loss {loss} asks for the likeliest tokens, with their exact probabilities",
                where=where,
                hint=self._other("top-k+sample, top-k or top-p"),
            )
        if rule.asks == "distribution" and self.support == "none":
            return XtkError(
                f"the loss {loss} asks for distributions, not only for the tokens that stand there",
                where=where,
                hint=self._other("top-k+sample or top-k") + ", or --loss alm",
            )
        if self.support == "sample" and rule.asks == "distribution" and not loss.divergence().linear:
            return XtkError(
                f"the loss {loss} cannot learn from draws: estimates have no bias for forward-kl at temperature 1 only",
                where=where,
                hint=self._other("top-k+sample or top-k") + ", or the divergence forward-kl",
            )
        return None

    @property
    def told_of(self) -> str:
        """Where it is, and who."""
        of_cache = f"the cache {self.place} is from {_short(self.identity)}"
        return f"{self.place} has {_short(self.identity)}" if self.live else of_cache

    def _other(self, supports: str) -> str:
        """Say what would have another support."""
        live = f"--teacher {self.place}:support=..., {supports}"
        return live if self.live else f"a cache with --support {supports}"

    def ground(self, kind: str) -> Ground:
        """Return what a loss stands on, a key of `GROUNDS`; each is made once."""
        if kind not in self._grounds:
            self._grounds[kind] = self._made(kind)
        return self._grounds[kind]

    def _made(self, kind: str) -> Ground:
        width = int(self.identity["width"])
        if kind in ("text", "spans"):
            return None
        if kind == "pairs":
            return projection_for(self.student, self.tokenizer, PAIRING).columns.widened(width)
        if kind == "bytes":
            return next_bytes_for(self.student, self.tokenizer)
        if kind == "tokens":
            return Projection.identity(len(self.student)).columns.widened(width)
        return self.projection.columns.widened(width)

    def meeting(self, grounds: Collection[str]) -> Meeting:
        """Return how its tokens can be those of the student.

        Args:
            grounds: of the losses that are about it: without a projection that is named or needed, none is made.
        """
        if self.has_students_tokenizer:
            return ByImage(np.arange(max(self.student.width, int(self.identity["width"])), dtype=np.int32))
        if self.named_projection is not None or "projection" in grounds:
            return ByImage.of(self.projection)
        return BySpelling.of(self.student, self.tokenizer)

    def chosen(self) -> tuple[list[str], str]:
        """Return what `--loss auto` takes, and why."""
        if self.support == "none":
            return CHOSEN["realised"], f"of {self.name} there are the tokens of the text alone"
        if self.named_projection is not None:
            return CHOSEN["projection"], f"a projection to {self.name} is named"
        if self.has_students_tokenizer:
            return CHOSEN["tokens"], f"{self.name} has the student's own tokenizer"
        own, theirs = (set(side.vocabulary.spellings) for side in (self.student, self.tokenizer))
        share = len(own & theirs) / len(own)
        return CHOSEN["bytes"], f"{self.name} has another tokenizer, with {share:.0%} of the student's tokens"


def open_teachers(
    places: Sequence[str],
    projections: Sequence[Path],
    student: Tokenizer,
    live: Sequence[LiveTeacher] = (),
) -> list[Teacher]:
    """Open the caches of a run, and deal the projections to the teachers that they were built for.

    Args:
        places: of caches.
        projections: that were named.
        student: its tokenizer.
        live: teachers that need no caches, which have read the data; then `places` are none.

    Raises:
        XtkError: one of them cannot be read, or a projection belongs to no teacher.
    """
    caches: list[TeacherCache | LiveTeacher] = [*(live or map(TeacherCache, places))]
    named_places = [teacher.request.name for teacher in live] or places
    names = distinct([str(cache.header["teacher"]["name"]) for cache in caches])
    teachers = [Teacher(*three, student) for three in zip(names, named_places, caches, strict=True)]
    for path in projections:
        projection = read_projection(path)
        refusals = [_misfit(path, projection, teacher) for teacher in teachers]
        if all(refusals):
            raise next(filter(None, refusals))
        teachers = [
            teacher if refusal else Teacher(teacher.name, teacher.place, teacher.cache, student, (path, projection))
            for teacher, refusal in zip(teachers, refusals, strict=True)
        ]
    return teachers


def distinct(names: list[str]) -> list[str]:
    """Return names with a number behind those that come more than once: name-1, name-2."""
    return [
        name if names.count(name) == 1 else f"{name}-{names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]


def _misfit(path: Path, projection: Projection, teacher: Teacher) -> Mismatch | None:
    """Say why a projection is of another pair. Chat templates may differ: no projection depends on them."""
    hint = "xtk build-projection STUDENT TEACHER -o ..., with this student and the teacher of this cache"
    built_for, student = projection.header["student"], identity(teacher.student)
    if any(built_for.get(key) != student[key] for key in SIDE):
        return Mismatch(
            "this projection was built for another student",
            where=f"{path} is for {named(built_for)}; {teacher.student.name} has {named(student)}",
            hint=hint,
        )
    built_for = projection.header["teacher"]
    # A cache need not tell the roles; its width is no matter, padded rows are reached by nothing.
    if any(built_for.get(key) != teacher.identity[key] for key in ("tokenizer", "roles") if key in teacher.identity):
        return Mismatch(
            "this projection was built for another teacher",
            where=f"{path} is for {named(built_for)}; {teacher.told_of}",
            hint=hint,
        )
    return None


def _short(side: dict[str, Any]) -> str:
    return f"{str(side['tokenizer'])[:15]} ({side['name']})"


# Which losses.


@dataclass(frozen=True)
class Taken:
    """A loss, and the teacher whose word it is about; None of one on the student alone.

    Attributes:
        auto: nobody named it.
    """

    loss: LossSpecification
    teacher: int | None
    auto: bool = False

    @property
    def rule(self) -> Loss:
        """What makes its cells."""
        return self.loss.rule()


def take_losses(
    asked: Sequence[LossSpecification], teachers: Sequence[Teacher], *, rollouts: bool = False
) -> tuple[list[Taken], str]:
    """Deal the losses of a run to its teachers: each to all that it fits.

    Args:
        asked: as they were written.
        teachers: of the run.
        rollouts: whether the student is going to write what they read.

    Returns:
        The losses, and what `--loss auto` took and why; "" where nobody asked for it.

    Raises:
        XtkError: a loss fits no teacher, or no loss fits a teacher, or one is for what the student drew, and it drew
            nothing.
    """
    for loss in asked:
        if loss.name in SURROGATES and not rollouts and not any(teacher.read_rollouts for teacher in teachers):
            raise XtkError(
                f"the loss {loss.name} is for documents that the student drew, and none of these was",
                where=", ".join(teacher.place for teacher in teachers),
                hint="rollouts of the student, through xtk rollout and xtk cache-teacher; or --loss alm",
            )
    taken = [one for loss in asked if loss.name != AUTO for one in _taken(loss, teachers)]
    if all(loss.name != AUTO for loss in asked):
        idle = set(range(len(teachers))) - {one.teacher for one in taken}
        if idle and any(one.teacher is not None for one in taken):
            name = teachers[min(idle)].name
            raise XtkError(f"none of the losses fits the teacher {name}", hint="--loss auto, or --loss byte-kl beside")
        return taken, ""
    reasons = [teacher.chosen() for teacher in teachers]
    for number, (names, _) in enumerate(reasons):
        for loss in parse_losses(names):
            about = None if lookup(LOSSES, loss.name, "loss").ground == "text" else number
            if (loss.name, about) not in [(one.loss.name, one.teacher) for one in taken]:
                taken.append(Taken(loss, about, auto=True))
    taken.sort(key=lambda one: one.teacher is not None)
    return taken, "; ".join(told_of_auto(taken, [why for _, why in reasons]))


def told_of_auto(taken: Sequence[Taken], reasons: Sequence[str]) -> Iterator[str]:
    """Yield the losses of `--loss auto` for each teacher, and why; before them those that all teachers share."""
    shared = [str(one.loss) for one in taken if one.auto and one.teacher is None]
    if len(reasons) > 1:
        yield from shared
        shared = []
    for number, why in enumerate(reasons):
        own = [str(one.loss) for one in taken if one.auto and one.teacher == number]
        yield f"{' and '.join(shared + own)}, for {why}"


def _taken(loss: LossSpecification, teachers: Sequence[Teacher]) -> list[Taken]:
    if lookup(LOSSES, loss.name, "loss").ground == "text":
        return [Taken(loss, None)]
    refusals = [teacher.refusal(loss) for teacher in teachers]
    if all(refusals):
        raise next(filter(None, refusals))
    return [Taken(loss, number) for number, refusal in enumerate(refusals) if refusal is None]
