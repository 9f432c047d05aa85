"""What of one vocabulary can be said in the other, and which loss suits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xtk.artifacts.model_resolver import weights_fingerprint
from xtk.artifacts.projection_cache import cached_projection
from xtk.doctor.inputs import DoctorInputs, DoctorModel, Finding
from xtk.projection.coverage_audit import audit_warning
from xtk.tokens.teacher_logprobs import DEFAULT_SUPPORT
from xtk.training.loss_assignment import DEFAULT_PROJECTION_METHOD, DistillationTeacher


def cache_identity(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the cache with the teacher that is named."""
    if inputs.cache is None:
        return
    identity, teacher = inputs.cache.header["teacher"], inputs.teacher.tokenizer
    support = inputs.cache.header["options"].get("support")
    where = f"cache of {identity['name']}"
    if identity["tokenizer"] != teacher.fingerprint:
        what = f"the cache is of a teacher with another tokenizer ({identity['tokenizer'][:15]})"
        hint = f"xtk cache-teacher {teacher.name} ...; or name the teacher of the cache"
        yield Finding(
            "cache_identity", "error", what, f"{where}; {inputs.teacher.name} has {teacher.fingerprint[:15]}", hint
        )
        return
    told = f"{len(inputs.cache):,} documents, support {support}"
    # Of a server's teacher a cache knows the configuration alone.
    said = [part for part in str(identity.get("weights")).split() if part.startswith("sha256:")]
    own = _weights_fingerprints(inputs.teacher)
    if said and own and said != own:
        what = f"the cache is of a teacher with other weights or another configuration ({said[0][:15]})"
        hint = f"name the teacher of the cache, which distill learns from; or xtk cache-teacher {teacher.name} ..."
        yield Finding("cache_identity", "warning", what, f"{where}; {inputs.teacher.name} has {own[0][:15]}", hint)
    elif inputs.data_sample.documents and identity["template"] != teacher.template_fingerprint:
        what = "the cache was made with another chat template"
        yield Finding("cache_identity", "warning", what, where, "--force caches again, if the data holds conversations")
    elif not said or not own:
        lacking = "no weights of the teacher are here" if said else "the cache does not name any"
        yield Finding("cache_identity", "ok", f"{told}; weights were not compared: {lacking}", where)
    else:
        yield Finding("cache_identity", "ok", f"{told}, of these very weights", where)


def _weights_fingerprints(side: DoctorModel) -> list[str]:
    """Return what names the weights of a side and of its adapter, as caches have it; [] where there are none here."""
    folders = [side.folder, *([side.adapter] if side.adapter else [])]
    return [weights_fingerprint(folder) for folder in folders] if side.tensor_headers else []


def projection(inputs: DoctorInputs) -> Iterator[Finding]:
    """Audit the projection that `distill` would build."""
    student, teacher = (side.tokenizer for side in inputs.models)
    if student.fingerprint == teacher.fingerprint:
        yield Finding("projection", "ok", "both sides have one tokenizer: no projection is needed")
        return
    audited = cached_projection(student, teacher, DEFAULT_PROJECTION_METHOD).header["audit"]
    rows, tokens = audited["rows"], len(student)
    exact = (rows["exact"] + rows["special"]) / tokens
    what = (
        f"{exact:.1%} of the student's tokens are tokens of the teacher, {rows['composed'] / tokens:.1%} are "
        f"composed of several, {rows['unmapped'] / tokens:.1%} are unmapped; "
        f"unmapped mass {audited['unmapped_mass']:.4f}"
    )
    figures = {"rows": rows, "unmapped_mass": audited["unmapped_mass"],
               "unreachable_teacher_tokens": audited["unreachable_teacher_tokens"],
               "poorly_matched_categories": audited["poorly_matched_categories"]}  # fmt: skip
    told = audit_warning(audited)
    if told is None:
        yield Finding("projection", "ok", what, figures=figures)
    else:
        yield Finding(
            "projection", "warning", f"{what}. {'; '.join(map(str.strip, told.splitlines()))}", figures=figures
        )


@dataclass(frozen=True)
class _UncachedTeacher:
    """A teacher that would be cached as `cache-teacher` does it."""

    header: dict[str, Any]
    teacher_tokenizer: Any


def auto_loss(inputs: DoctorInputs) -> Iterator[Finding]:
    """Tell what `--loss auto` takes, and why."""
    side = inputs.teacher.tokenizer
    cache: Any = inputs.cache or _UncachedTeacher(
        {"teacher": {"name": side.name, "tokenizer": side.fingerprint, "embedding_rows": side.embedding_rows},
         "options": {"support": DEFAULT_SUPPORT}},
        side,
    )  # fmt: skip
    name = str(cache.header["teacher"]["name"])
    losses, why = DistillationTeacher(name, name, cache, inputs.student.tokenizer).auto_losses()
    told = " and ".join(f"--loss {loss}" for loss in losses)
    yield Finding("auto_loss", "ok", f"--loss auto takes {told}, for {why}", figures={"losses": losses})
