"""The teachers of a run, and the assignment of losses to teachers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xtk import terminal
from xtk.batches.top1_agreement import SUPPORTS_WITH_TOP1, ByProjection, BySpelling, TokenMatching
from xtk.cache.columns import optional_columns
from xtk.cache.reader import TeacherCache
from xtk.errors import MismatchError, XtkError
from xtk.losses import AUTO_LOSS, LOSSES, SURROGATE_LOSSES
from xtk.losses.cells.stop_classes import StopClasses, ordinary_stops_message
from xtk.losses.divergences import DIVERGENCES
from xtk.losses.interface import ComparisonSpace, Loss
from xtk.losses.spec import LossSpec, parse_losses
from xtk.name_registry import load_registered
from xtk.projection.build import tokenizer_identity
from xtk.projection.disk_cache import cached_next_bytes, cached_projection, cached_projection_path
from xtk.projection.file import read_projection
from xtk.projection.projection import IDENTITY_KEYS, SparseProjection, format_tokenizer
from xtk.projection.special_tokens import MATCH_BY_ROLE
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.text.tokenizer import Tokenizer

DEFAULT_PROJECTION_METHOD = "multitoken"  # without --projection
PAIR_PROJECTION_METHOD = "exact"  # pairs of tokens with equal bytes

# The losses of `--loss auto` (the default), by what the cache and its tokenizer allow.
AUTO_LOSSES = {
    "tokens": ["ce", "forward-kl"],
    "bytes": ["ce:weight=0.3", "byte-kl"],
    "bytes, on-policy": ["ce:weight=0.3", "bpm"],  # the student's completions have no cross-entropy
    "projection": ["ce", "p-kl:weight=2"],
    "observed": ["alm"],
}


@dataclass(frozen=True)
class DistillationTeacher:
    """One teacher of a run: its cache or model, and how its vocabulary is compared with the student's."""

    name: str  # its name in metrics and routes
    path: str  # path of its cache or model
    source: TeacherCache | OnlineTeacher  # its cache, or the online teacher that scores during training
    student: Tokenizer  # the student's tokenizer
    # Path and projection, if the user gave one for this teacher.
    named_projection: tuple[Path, SparseProjection] | None = None
    _comparison_spaces: dict[str, ComparisonSpace] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """Its name, tokenizer and other metadata from the header."""
        return dict(self.source.header["teacher"])

    @property
    def is_online(self) -> bool:
        """Whether it scores documents during training."""
        return isinstance(self.source, OnlineTeacher)

    @property
    def support(self) -> str:
        """The kind of support: which tokens of its distributions are stored."""
        return str(self.source.header["options"].get("support"))

    @property
    def has_listed_vocabulary(self) -> bool:
        """Whether its vocabulary has only tokens that a service listed, because its tokenizer is not known."""
        return "vocabulary" in self.source.header["options"]

    @property
    def has_exact_top1(self) -> bool:
        """Whether its support always includes the exact top-1 token."""
        return self.support in SUPPORTS_WITH_TOP1 and self.source.header["options"].get("top_k") != 0

    @property
    def has_full_support(self) -> bool:
        """Whether its support is the whole vocabulary."""
        top_k = self.source.header["options"].get("top_k")
        return self.support == "top-k" and int(top_k or 0) >= int(self.identity["embedding_rows"])

    @property
    def has_rollouts(self) -> bool:
        """Whether some of its documents were sampled from a student."""
        return "sampled_tokens" in optional_columns(self.source.header)

    @property
    def has_sample_logprobs(self) -> bool:
        """Whether its sampled tokens have log-probabilities; those of older caches do not."""
        return bool(self.source.header["codec"].get("sample_logprobs"))

    @property
    def has_students_tokenizer(self) -> bool:
        """Whether it has the student's tokenizer, perhaps with another start token."""
        if self.identity["tokenizer"] == self.student.fingerprint:
            return True
        with contextlib.suppress(XtkError):  # a cache without its tokenizer; reported where that is needed
            return self.tokenizer.text_fingerprint == self.student.text_fingerprint
        return False

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.source.teacher_tokenizer

    @cached_property
    def projection(self) -> SparseProjection:
        """The given projection, or else one that is built (or loaded from the projection cache)."""
        if self.named_projection is not None:
            return self.named_projection[1]
        projection = cached_projection(self.student, self.tokenizer, DEFAULT_PROJECTION_METHOD)
        path = cached_projection_path(self.student, self.tokenizer, DEFAULT_PROJECTION_METHOD)
        audit = projection.header["audit"]
        terminal.note(
            f"distill: projection to {self.name}: method {DEFAULT_PROJECTION_METHOD}; {audit['rows']['exact']:,} of "
            f"{len(self.student):,} student tokens exact, unmapped mass {audit['unmapped_mass']:.2%}; "
            + (f"saved as {path}" if path is not None and path.is_file() else "not saved")
        )
        return projection

    def refusal(self, loss: LossSpec, *, in_mixture: bool = False) -> XtkError | None:
        """Return the error of a loss that cannot be computed from this teacher; None if it can.

        `in_mixture`: from its mixture with others, whose probabilities of the tokens that it sampled are not known.
        """
        rule, where = loss.make_loss(), f"{self.path} has the support {self.support}"
        if rule.comparison_space == "tokens" and not self.has_students_tokenizer:
            return MismatchError(
                f"the loss {loss.name} needs a teacher with the student's tokenizer",
                where=f"{self.student.name} has the tokenizer {self.student.fingerprint[:15]}; {self.description}",
                hint="use --loss byte-kl, p-kl or boundary-kl",
            )
        if self.has_listed_vocabulary and rule.comparison_space in ("projection", "pairs"):
            return XtkError(
                f"the loss {loss.name} needs the teacher's whole vocabulary, and this cache has only the tokens that "
                "its service listed",
                where=self.path,
                hint="use --loss byte-kl, bpm, escd or alm; or import it again with --tokenizer",
            )
        if rule.requires == "ranks" and not self.has_exact_top1:
            return XtkError(
                f"the loss {loss} needs the teacher's top-k tokens with their exact probabilities",
                where=where,
                hint=self._support_hint("top-k+sample, top-k or top-p"),
            )
        if rule.requires in ("exact", "candidates") and self.support in ("none", "sample"):
            return XtkError(
                f"the loss {loss} needs exact probabilities of several tokens per position",
                where=where,
                hint=self._support_hint("top-k+sample, top-k, top-p or candidates") + "; or use --loss alm",
            )
        if (
            rule.requires == "candidates"
            and not (self.support == "candidates" or self.has_full_support)
            and dict(loss.options).get("divergence", rule.default_divergence) != "forward-kl"
        ):
            return XtkError(
                f"the loss {loss} needs the teacher's probabilities of the student's most likely tokens, which this "
                "support need not contain",
                where=where,
                hint=f"use --loss {loss.name}:divergence=forward-kl; or " + self._support_hint("candidates"),
            )
        if rule.requires == "distribution" and self.support == "none":
            return XtkError(
                f"the loss {loss} needs several log-probabilities per position, not only those of the observed tokens",
                where=where,
                hint=self._support_hint("top-k+sample or top-k") + "; or use --loss alm",
            )
        if self.support == "sample" and rule.requires == "distribution":
            return self._refusal_of_samples(loss, rule, in_mixture=in_mixture)
        return None

    def _refusal_of_samples(self, loss: LossSpec, rule: Loss, *, in_mixture: bool) -> XtkError | None:
        """Return the error of a loss that sampled tokens alone estimate with a bias; None if they do not."""
        divergence, has_logprobs = loss.make_divergence(), self.has_sample_logprobs and not in_mixture
        if divergence.accepts_samples(rule.compares_single_tokens and has_logprobs):
            return None
        linear = "--loss forward-kl" if loss.name in DIVERGENCES else "divergence=forward-kl"
        what, instead = "with sampled tokens only forward-kl at temperature 1 is unbiased", f"{linear}, temperature 1"
        if rule.compares_single_tokens and in_mixture:
            what = "a token that one teacher of a mixture sampled has no known probability under the others"
        elif rule.compares_single_tokens and not has_logprobs:
            what = "this cache, made by an older xtk, has no log-probabilities of sampled tokens"
        elif rule.compares_single_tokens:
            what, instead = "with sampled tokens only temperature 1 is unbiased", "temperature 1"
        return XtkError(
            f"the loss {loss} would be biased: {what}",
            where=f"{self.path} has the support {self.support}",
            hint=f"{self._support_hint('top-k+sample or top-k')}; or use {instead}",
        )

    @property
    def description(self) -> str:
        """Path, tokenizer and name, for errors."""
        cache_description = f"the cache {self.path} is from {_teacher_description(self.identity)}"
        return f"{self.path} has {_teacher_description(self.identity)}" if self.is_online else cache_description

    def _support_hint(self, supports: str) -> str:
        """Return the hint to use another support."""
        online = f"use --teacher {self.path}:support=... with {supports}"
        return online if self.is_online else f"run cache-teacher with --support {supports}"

    def comparison_space(self, name: str) -> ComparisonSpace:
        """Return the space of a name in `COMPARISON_SPACES`, in which student and teacher are compared; cached."""
        if name not in self._comparison_spaces:
            self._comparison_spaces[name] = self._make_comparison_space(name)
        return self._comparison_spaces[name]

    @cached_property
    def stop_classes(self) -> StopClasses | None:
        """The stop tokens of student and teacher, which are compared as one; None: each token by itself.

        A projection with other pairs of special tokens than those by role is used as it is.
        """
        own_pairs = (
            self.named_projection is not None
            and self.named_projection[1].header.get("special_tokens", MATCH_BY_ROLE) != MATCH_BY_ROLE
        )
        for side in (self.student, self.tokenizer):
            if side.ordinary_stop_tokens:
                terminal.note_once(f"{side.name}: {ordinary_stops_message(side)}")
        return None if own_pairs else StopClasses.from_tokenizers(self.student, self.tokenizer)

    def _make_comparison_space(self, kind: str) -> ComparisonSpace:
        if kind in ("text", "spans"):
            return None
        space = self._space_of_single_tokens(kind)
        return space if self.stop_classes is None else self.stop_classes.in_space(space)

    def _space_of_single_tokens(self, kind: str) -> ComparisonSpace:
        """Return a space in which stop tokens are compared one by one."""
        if kind == "bytes":
            return cached_next_bytes(self.student, self.tokenizer)
        if kind == "pairs":
            projection = cached_projection(self.student, self.tokenizer, PAIR_PROJECTION_METHOD)
        elif kind == "tokens":
            projection = SparseProjection.identity(len(self.student))
        else:
            projection = self.projection
        byte_fallback = np.flatnonzero(self.student.vocabulary.byte_fallback_mask).astype(np.int32)
        columns = replace(projection.columns, byte_fallback_ids=byte_fallback)
        return columns.pad_columns(int(self.identity["embedding_rows"]))

    def token_matching(self, comparison_spaces: Collection[str]) -> TokenMatching:
        """Return how its tokens match the student's, for top-1 agreement; by projection only if given or needed."""
        if self.has_students_tokenizer:
            return ByProjection(
                np.arange(max(self.student.embedding_rows, int(self.identity["embedding_rows"])), dtype=np.int32)
            )
        if self.named_projection is not None or "projection" in comparison_spaces:
            return ByProjection.from_projection(self.projection)
        return BySpelling.from_tokenizers(self.student, self.tokenizer)

    def auto_losses(self, *, on_policy: bool = False) -> tuple[list[str], str]:
        """Return the losses that `--loss auto` chooses, and why; `on_policy`: for the student's completions."""
        if self.support == "none":
            return AUTO_LOSSES["observed"], f"{self.name} has log-probabilities of the observed tokens only"
        if self.named_projection is not None:
            return AUTO_LOSSES["projection"], f"--projection is given for {self.name}"
        if self.has_students_tokenizer:
            return AUTO_LOSSES["tokens"], f"{self.name} has the student's tokenizer"
        own, theirs = (set(side.vocabulary.bytes_by_id) for side in (self.student, self.tokenizer))
        common = len(own & theirs) / len(own)
        if self.has_listed_vocabulary:
            return AUTO_LOSSES["bytes"], f"the tokens of {self.name} are known by their bytes"
        losses = AUTO_LOSSES["bytes, on-policy" if on_policy else "bytes"]
        if any(self.refusal(loss) for loss in parse_losses(losses)[1:]):
            losses = AUTO_LOSSES["bytes"]
        return losses, f"{self.name} has another tokenizer, with {common:.0%} of the student's tokens"


def open_teachers(
    caches_or_models: Sequence[str | TeacherCache],
    projections: Sequence[Path | SparseProjection],
    student: Tokenizer,
    online_teachers: Sequence[OnlineTeacher] = (),
) -> list[DistillationTeacher]:
    """Return the teachers of a run, with their caches opened and the given projections matched to them.

    With `online_teachers`, which have read the data, `caches_or_models` is ignored.
    """
    caches: list[TeacherCache | OnlineTeacher] = [*(online_teachers or map(as_cache, caches_or_models))]
    paths = [teacher.request.teacher.name for teacher in online_teachers]
    paths = paths or [
        teacher.folder.name if isinstance(teacher, TeacherCache) else teacher for teacher in caches_or_models
    ]
    names = number_duplicate_names([str(cache.header["teacher"]["name"]) for cache in caches])
    teachers = [DistillationTeacher(*three, student) for three in zip(names, paths, caches, strict=True)]
    for given in projections:
        if isinstance(given, SparseProjection):
            path, projection = Path("projection"), given
        else:
            path, projection = given, read_projection(given)
        refusals = [_projection_mismatch(path, projection, teacher) for teacher in teachers]
        if all(refusals):
            raise next(filter(None, refusals))
        teachers = [
            teacher
            if refusal
            else DistillationTeacher(teacher.name, teacher.path, teacher.source, student, (path, projection))
            for teacher, refusal in zip(teachers, refusals, strict=True)
        ]
    note_missing_sample_logprobs(teachers)
    return teachers


def as_cache(cache: str | Path | TeacherCache) -> TeacherCache:
    """Return a cache, opened if it is a path."""
    return cache if isinstance(cache, TeacherCache) else TeacherCache(cache)


def number_duplicate_names(names: list[str]) -> list[str]:
    """Return the names, with a number appended to duplicates: name-1, name-2."""
    return [
        name if names.count(name) == 1 else f"{name}-{names[: at + 1].count(name)}" for at, name in enumerate(names)
    ]


def _projection_mismatch(
    path: Path, projection: SparseProjection, teacher: DistillationTeacher
) -> MismatchError | None:
    """Return the error of a projection for another pair; chat templates may differ, as they do not matter."""
    hint = "run xtk build-projection STUDENT TEACHER -o ... with this student and the teacher of this cache"
    built_for, student = projection.header["student"], tokenizer_identity(teacher.student)
    if any(built_for.get(key) != student[key] for key in IDENTITY_KEYS):
        return MismatchError(
            "the projection was built for another student than this command's",
            where=f"{path} is for {format_tokenizer(built_for)}; "
            f"{teacher.student.name} has {format_tokenizer(student)}",
            hint=hint,
        )
    built_for = projection.header["teacher"]
    # A cache may lack the special tokens. Its number of embedding rows may differ: padding tokens are never mapped.
    if any(
        built_for.get(key) != teacher.identity[key]
        for key in ("tokenizer", "special_tokens")
        if key in teacher.identity
    ):
        return MismatchError(
            "the projection was built for another teacher than this command's",
            where=f"{path} is for {format_tokenizer(built_for)}; {teacher.description}",
            hint=hint,
        )
    return None


def _teacher_description(side: dict[str, Any]) -> str:
    return f"{str(side['tokenizer'])[:15]} ({side['name']})"


# Assignment of losses.


@dataclass(frozen=True)
class AssignedLoss:
    """A loss, and the index of its teacher; None for a loss on the text only."""

    loss: LossSpec
    teacher: int | None
    is_auto: bool = False  # whether `--loss auto` chose it

    @property
    def rule(self) -> Loss:
        """The loss object, which compares student and teacher."""
        return self.loss.make_loss()


def assign_losses(
    requested: Sequence[LossSpec], teachers: Sequence[DistillationTeacher], *, on_policy: bool = False
) -> tuple[list[AssignedLoss], str]:
    """Return each loss with all teachers that it fits, and what `--loss auto` chose and why; "" without it."""
    for loss in requested:
        if loss.name in SURROGATE_LOSSES and not on_policy and not any(teacher.has_rollouts for teacher in teachers):
            raise XtkError(
                f"the loss {loss.name} needs rollouts of the student, but the training data has none",
                where=", ".join(teacher.path for teacher in teachers),
                hint="use xtk distill-on-policy; or run xtk rollout, then xtk cache-teacher; or use --loss alm",
            )
    assigned = [one for loss in requested if loss.name != AUTO_LOSS for one in _assign(loss, teachers)]
    if all(loss.name != AUTO_LOSS for loss in requested):
        idle = set(range(len(teachers))) - {assignment.teacher for assignment in assigned}
        if idle and any(assignment.teacher is not None for assignment in assigned):
            name = teachers[min(idle)].name
            raise XtkError(
                f"no --loss can be computed from the teacher {name}",
                hint="use --loss auto, or add --loss alm, which works for any teacher",
            )
        return assigned, ""
    reasons = [teacher.auto_losses(on_policy=on_policy) for teacher in teachers]
    for number, (names, _) in enumerate(reasons):
        for loss in parse_losses(names):
            teacher = None if load_registered(LOSSES, loss.name, "loss").comparison_space == "text" else number
            chosen = AssignedLoss(loss, teacher, is_auto=True)
            same = [
                at
                for at, assignment in enumerate(assigned)
                if (assignment.loss.name, assignment.teacher) == (loss.name, teacher)
            ]
            if not same:
                assigned.append(chosen)
            elif assigned[same[0]].is_auto and loss.weight < assigned[same[0]].loss.weight:
                assigned[same[0]] = chosen  # one CE for all teachers: the smallest weight, in any order of the teachers
    assigned.sort(key=lambda one: one.teacher is not None)
    return assigned, "; ".join(describe_auto_losses(assigned, [why for _, why in reasons]))


def note_missing_sample_logprobs(teachers: Sequence[DistillationTeacher]) -> None:
    """Print a note, once, if caches with sampled tokens, written by an older version, lack their log-probabilities."""
    older = [teacher.path for teacher in teachers if "sample" in teacher.support and not teacher.has_sample_logprobs]
    if older:
        terminal.note_once(
            f"{', '.join(older)}: sampled tokens have no log-probabilities, so forward-kl and byte-kl have "
            "more noise near the teacher, and other divergences ignore the samples; make the cache again to change this"
        )


def describe_auto_losses(losses: Sequence[AssignedLoss], reasons: Sequence[str]) -> Iterator[str]:
    """Yield the losses of `--loss auto` for each teacher, and why; with several teachers, the common ones first."""
    shared = [str(loss.loss) for loss in losses if loss.is_auto and loss.teacher is None]
    if len(reasons) > 1:
        yield from shared
        shared = []
    for number, why in enumerate(reasons):
        own = [str(loss.loss) for loss in losses if loss.is_auto and loss.teacher == number]
        yield f"{' and '.join(shared + own)}, because {why}"


def _assign(loss: LossSpec, teachers: Sequence[DistillationTeacher]) -> list[AssignedLoss]:
    if load_registered(LOSSES, loss.name, "loss").comparison_space == "text":
        return [AssignedLoss(loss, None)]
    refusals = [teacher.refusal(loss) for teacher in teachers]
    if all(refusals):
        raise next(filter(None, refusals))
    return [AssignedLoss(loss, number) for number, refusal in enumerate(refusals) if refusal is None]
