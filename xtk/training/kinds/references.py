"""References of a run (`--reference`): which options use them, whether they fit, and the teachers with them."""

from __future__ import annotations

from collections.abc import Sequence

from xtk.batches.combine_teachers import TeacherEnsemble
from xtk.cache.output import is_cache
from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError
from xtk.files.atomic_files import canonical_json, sha256
from xtk.losses import AUTO_LOSS
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.teachers.source import TeacherSource
from xtk.teachers.style_references import ShiftedTeacher, StyledTeacher, check_references
from xtk.training.kinds.teacher_setup import TeacherSetup, needs_no_teacher
from xtk.training.train_config import RunPaths, TrainConfig

SUPPORTS_WITHOUT_EXACT_TOKENS = ("none", "sample")


def check_reference_use(paths: RunPaths, recipe: TrainConfig) -> None:
    """Refuse `--reference` and the options that use it, `--teacher-shift` and `offset`, without each other."""
    offsets = [loss for loss in recipe.losses if dict(loss.options).get("offset") is not None]
    has_references = bool(paths.references or paths.reference_caches)
    if recipe.teacher_shift and not has_references:
        raise XtkError("--teacher-shift needs --reference", hint="add --reference with a model of the teacher's family")
    if recipe.teacher_shift and all(loss.name != AUTO_LOSS and needs_no_teacher(loss.name) for loss in recipe.losses):
        raise XtkError("--teacher-shift is given, but no --loss uses a teacher", hint="add --loss auto")
    if recipe.teacher_shift:
        return
    if offsets and recipe.on_policy is None:
        raise XtkError(f"the loss {offsets[0]} needs xtk distill-on-policy", hint="use it, or --teacher-shift")
    if bool(offsets) != has_references:
        what = f"the loss {offsets[0]} needs --reference" if offsets else "--reference has no effect without an offset"
        raise XtkError(
            what if offsets or recipe.on_policy else "--reference has no effect without --teacher-shift",
            hint="add --teacher-shift"
            if recipe.on_policy is None
            else "give both, for example --reference MODEL --loss policy-gradient:offset=0.5; or add --teacher-shift",
        )


def check_online_references(paths: RunPaths, recipe: TrainConfig, combination: TeacherEnsemble) -> None:
    """Refuse references in the process that do not fit the teachers."""
    if not paths.references:
        return
    _check_combination(combination, recipe.teacher_shift)
    references = paths.references if recipe.teacher_shift else paths.references[:-1]
    if any(reference.student_weights for reference in references):
        raise XtkError(
            "--reference self changes with the student, but a reference is a fixed model of the teacher's family",
            hint="give a folder, a file or a hub id",
        )
    check_references(references, paths.online_teachers)
    if recipe.teacher_shift:
        scoring = (*paths.online_teachers, *references)
        _check_supports([(model.request.teacher.name, model.request.support.kind) for model in scoring])


def open_reference_caches(paths: RunPaths, setup: TeacherSetup) -> list[TeacherCache]:
    """Return the opened caches of references, checked against the caches of the teachers."""
    if not paths.reference_caches:
        return []
    _check_combination(setup.combination, is_shift=True)
    if place := next((place for place in paths.reference_caches if not is_cache(place)), None):
        raise XtkError(
            "--reference is not a cache, but the teacher is one",
            where=place,
            hint="run xtk cache-teacher REFERENCE DATA -o CACHE with the data of the teacher's cache",
        )
    references = [TeacherCache(place) for place in paths.reference_caches]
    teachers = [teacher.source for teacher in setup.teachers if isinstance(teacher.source, TeacherCache)]
    check_references(references, teachers)
    caches = (*teachers, *references)
    _check_supports([(str(cache.folder), str(cache.header["options"].get("support"))) for cache in caches])
    return references


def online_sources(setup: TeacherSetup, paths: RunPaths) -> list[TeacherSource]:
    """Return the online teachers as the losses see them, with their references."""
    teachers = [*setup.combined(paths.online_teachers)]
    if not paths.references:
        return teachers
    if len(paths.references) == len(teachers):
        return [ShiftedTeacher(*both) for both in zip(teachers, paths.references, strict=True)]
    *references, frozen = paths.references
    return [StyledTeacher(*both, frozen) for both in zip(teachers, references, strict=True)]


def reference_fingerprints(references: Sequence[OnlineTeacher | TeacherCache]) -> dict[str, list[str]]:
    """Return what identifies the references of a run."""
    if not references:
        return {}
    return {"references": [sha256(canonical_json(reference.manifest)) for reference in references]}


def _check_supports(supports: Sequence[tuple[str, str]]) -> None:
    lacking = next((where for where in supports if where[1] in SUPPORTS_WITHOUT_EXACT_TOKENS), None)
    if lacking is not None:
        raise XtkError(
            "--teacher-shift needs exact probabilities of several tokens per position",
            where=f"{lacking[0]} has the support {lacking[1]}",
            hint="use the support top-k, top-p or candidates for teacher and reference",
        )


def _check_combination(combination: TeacherEnsemble, is_shift: bool) -> None:
    if combination.method in ("mixture", "route"):
        raise XtkError(
            f"--reference cannot be used with --combine-teachers {combination.method}",
            hint="use --combine-teachers sum or select, with one --reference per teacher",
        )
    weighting = combination.score_weighting
    if is_shift and weighting is not None and weighting.score == "max-probability":
        # The most likely token may be one that the reference does not list, which leaves the shifted distribution.
        raise XtkError(
            "--teacher-shift cannot be used with --teacher-weights max-probability",
            hint="use --teacher-weights ce or entropy",
        )
