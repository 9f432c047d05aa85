"""Checks of the cache, the projection and the losses of `--loss auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xtk.batches.losses_per_teacher import DEFAULT_PROJECTION_METHOD, DistillationTeacher
from xtk.cache.manifest import teacher_bits_per_byte
from xtk.cache.teacher_logprobs import DEFAULT_SUPPORT
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.models.resolver import weights_fingerprint
from xtk.projection.coverage_audit import audit_warning
from xtk.projection.disk_cache import cached_projection


def cache_identity(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the cache with the given teacher."""
    if inputs.cache is None:
        return
    identity, teacher = inputs.cache.header["teacher"], inputs.teacher.tokenizer
    support = inputs.cache.header["options"].get("support")
    where = f"cache of {identity['name']}"
    again = f"give the teacher of the cache, or run xtk cache-teacher {teacher.name} ..."
    if identity["tokenizer"] != teacher.fingerprint:
        what = f"the cache comes from a teacher with another tokenizer ({identity['tokenizer'][:15]})"
        yield Finding("error", what, f"{where}; {inputs.teacher.name} has {teacher.fingerprint[:15]}", again)
        return
    summary = f"{len(inputs.cache):,} documents, support {support}"
    if (bits := teacher_bits_per_byte(inputs.cache.manifest)) is not None:
        summary += f", teacher {bits:.3f} bits per byte"
    # A cache from a server has only the configuration's fingerprint.
    cached = [part for part in str(identity.get("weights")).split() if part.startswith("sha256:")]
    own = _weights_fingerprints(inputs.teacher)
    if cached and own and cached != own:
        what = f"the cache comes from a teacher with other weights or another configuration ({cached[0][:15]})"
        yield Finding("warning", what, f"{where}; {inputs.teacher.name} has {own[0][:15]}", again)
    elif inputs.data_sample.documents and identity["template"] != teacher.template_fingerprint:
        hint = "if the data has conversations, run cache-teacher --force"
        yield Finding("warning", "the cache was made with another chat template", where, hint)
    elif not cached or not own:
        reason = "the teacher's folder has none" if cached else "the cache has no fingerprint"
        yield Finding("ok", f"{summary}; weights not compared: {reason}", where)
    else:
        yield Finding("ok", f"{summary}; same weights as this teacher", where)


def _weights_fingerprints(side: DoctorModel) -> list[str]:
    """Return the fingerprints of a model's weights and of its adapter; [] without local weights."""
    folders = [side.folder, *([side.adapter] if side.adapter else [])]
    return [weights_fingerprint(folder) for folder in folders] if side.tensor_headers else []


def projection(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report the coverage of the projection that `distill` would build."""
    student, teacher = (side.tokenizer for side in inputs.models)
    if student.text_fingerprint == teacher.text_fingerprint:
        yield Finding("ok", "student and teacher have the same tokenizer: no projection is needed")
        return
    audit = cached_projection(student, teacher, DEFAULT_PROJECTION_METHOD).header["audit"]
    rows, tokens = audit["rows"], len(student)
    exact = (rows["exact"] + rows["special"]) / tokens
    what = (
        f"student tokens: {exact:.1%} are teacher tokens, {rows['composed'] / tokens:.1%} are composed of several, "
        f"{rows['unmapped'] / tokens:.1%} are unmapped; unmapped mass {audit['unmapped_mass']:.4f}"
    )
    shown = ("unmapped_mass", "unreachable_teacher_tokens", "poorly_matched_categories")
    figures = {"rows": rows, **{name: audit[name] for name in shown}}
    warning = audit_warning(audit)
    if warning is not None:
        what += f". {'; '.join(map(str.strip, warning.splitlines()))}"
    yield Finding("ok" if warning is None else "note", what, figures=figures)  # the default loss compares bytes


@dataclass(frozen=True)
class _UncachedTeacher:
    """A teacher with the header that `cache-teacher` would write."""

    header: dict[str, Any]
    teacher_tokenizer: Any


def auto_loss(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report the losses that `--loss auto` would choose, and why."""
    side = inputs.teacher.tokenizer
    cache: Any = inputs.cache or _UncachedTeacher(
        {"teacher": {"name": side.name, "tokenizer": side.fingerprint, "embedding_rows": side.embedding_rows},
         "options": {"support": DEFAULT_SUPPORT}},
        side,
    )  # fmt: skip
    name = str(cache.header["teacher"]["name"])
    losses, why = DistillationTeacher(name, name, cache, inputs.student.tokenizer).auto_losses()
    chosen = " and ".join(f"--loss {loss}" for loss in losses)
    yield Finding("ok", f"--loss auto chooses {chosen}, because {why}", figures={"losses": losses})
