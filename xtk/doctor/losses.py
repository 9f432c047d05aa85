"""What of one vocabulary can be said in the other, and which loss suits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xtk.artifacts.hub import fingerprint_of_weights
from xtk.artifacts.projection_store import projection_for
from xtk.doctor.case import Case, Finding, Side
from xtk.projection.audit import warning
from xtk.tokens.signal import USUAL
from xtk.training.teachers import METHOD, Teacher


def caches(case: Case) -> Iterator[Finding]:
    """Compare the cache with the teacher that is named."""
    if case.cache is None:
        return
    identity, teacher = case.cache.header["teacher"], case.teacher.tokenizer
    support = case.cache.header["options"].get("support")
    where = f"cache of {identity['name']}"
    if identity["tokenizer"] != teacher.fingerprint:
        what = f"the cache is of a teacher with another tokenizer ({identity['tokenizer'][:15]})"
        hint = f"xtk cache-teacher {teacher.name} ...; or name the teacher of the cache"
        yield Finding("caches", "error", what, f"{where}; {case.teacher.name} has {teacher.fingerprint[:15]}", hint)
        return
    told = f"{len(case.cache):,} documents, support {support}"
    # Of a server's teacher a cache knows the configuration alone.
    said = [part for part in str(identity.get("weights")).split() if part.startswith("sha256:")]
    own = _fingerprints(case.teacher)
    if said and own and said != own:
        what = f"the cache is of a teacher with other weights or another configuration ({said[0][:15]})"
        hint = f"name the teacher of the cache, which distill learns from; or xtk cache-teacher {teacher.name} ..."
        yield Finding("caches", "warning", what, f"{where}; {case.teacher.name} has {own[0][:15]}", hint)
    elif case.read.documents and identity["template"] != teacher.template_fingerprint:
        what = "the cache was made with another chat template"
        yield Finding("caches", "warning", what, where, "--force caches again, if the data holds conversations")
    elif not said or not own:
        lacking = "no weights of the teacher are here" if said else "the cache does not name any"
        yield Finding("caches", "ok", f"{told}; weights were not compared: {lacking}", where)
    else:
        yield Finding("caches", "ok", f"{told}, of these very weights", where)


def _fingerprints(side: Side) -> list[str]:
    """Return what names the weights of a side and of its adapter, as caches have it; [] where there are none here."""
    folders = [side.folder, *([side.adapter] if side.adapter else [])]
    return [fingerprint_of_weights(folder) for folder in folders] if side.tensors else []


def projection(case: Case) -> Iterator[Finding]:
    """Audit the projection that `distill` would build."""
    student, teacher = (side.tokenizer for side in case.sides)
    if student.fingerprint == teacher.fingerprint:
        yield Finding("projection", "ok", "both sides have one tokenizer: no projection is needed")
        return
    audited = projection_for(student, teacher, METHOD).header["audit"]
    rows, tokens = audited["rows"], len(student)
    exact = (rows["exact"] + rows["special"]) / tokens
    what = (
        f"{exact:.1%} of the student's tokens are tokens of the teacher, {rows['spread'] / tokens:.1%} are spread over "
        f"several, {rows['empty'] / tokens:.1%} are none; missing mass {audited['missing_mass']:.4f}"
    )
    figures = {"rows": rows, "missing_mass": audited["missing_mass"], "unreached": audited["unreached"],
               "critical": audited["critical"]}  # fmt: skip
    told = warning(audited)
    if told is None:
        yield Finding("projection", "ok", what, figures=figures)
    else:
        yield Finding(
            "projection", "warning", f"{what}. {'; '.join(map(str.strip, told.splitlines()))}", figures=figures
        )


@dataclass(frozen=True)
class _Uncached:
    """A teacher that would be cached as `cache-teacher` does it."""

    header: dict[str, Any]
    teacher: Any


def chosen(case: Case) -> Iterator[Finding]:
    """Tell what `--loss auto` takes, and why."""
    side = case.teacher.tokenizer
    cache: Any = case.cache or _Uncached(
        {"teacher": {"name": side.name, "tokenizer": side.fingerprint, "width": side.width},
         "options": {"support": USUAL}},
        side,
    )  # fmt: skip
    name = str(cache.header["teacher"]["name"])
    losses, why = Teacher(name, name, cache, case.student.tokenizer).chosen()
    told = " and ".join(f"--loss {loss}" for loss in losses)
    yield Finding("chosen", "ok", f"--loss auto takes {told}, for {why}", figures={"losses": losses})
