"""Bits per byte of the user's texts: after each candidate of a start token, and of the teacher by kind of text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from xtk import terminal
from xtk.batches.first_step_bits_per_byte import MIN_IMPROVEMENT
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import BitsPerByteResult, evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import default_device, load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.text.document import Document
from xtk.text.start_tokens import NO_START, START_ROLES, TEXT_SEPARATORS
from xtk.text.tokenizer import Tokenizer

MAX_PARAMETERS = 1_000_000_000  # weights of larger models are not loaded
NUM_DOCUMENTS, DOCUMENT_CHARACTERS = 8, 600
SIGNIFICANT_FRACTION = 0.01
MIN_CATEGORY_BYTES = 200  # of a kind of text, for a comparison of its bits


def start_tokens(inputs: DoctorInputs) -> Iterator[Finding]:
    """Check that no other start token predicts the texts better, and that the teacher is better than the student.

    Weights of models of at most `MAX_PARAMETERS` are loaded. All numbers are of the same bytes.
    """
    texts = [document.text for document in inputs.data_sample.documents if document.conversation is None]
    texts = [text for text in texts if len(text) > 1]
    chosen = texts[:: max(1, len(texts) // NUM_DOCUMENTS)][:NUM_DOCUMENTS]
    documents = [Document.from_text(text[:DOCUMENT_CHARACTERS]) for text in chosen]
    if not documents:
        return
    sides = [side for side in inputs.models if _is_measured(side)]
    without = [side.tokenizer.with_start_token(NO_START) for side in sides]
    findings: list[Finding] = []
    levels: dict[str, BitsPerByteResult] = {}
    for side in sides:
        with contextlib.suppress(XtkError), terminal.quiet():  # other checks report a model that cannot be loaded
            finding, levels[side.role] = _compare_start_tokens(side, documents, without)
            findings.append(finding)
    yield from findings
    if {"student", "teacher"} <= levels.keys():
        yield _compare_by_category(inputs.teacher.name, levels["student"], levels["teacher"])


def _is_measured(side: DoctorModel) -> bool:
    parameters = sum(math.prod(shape) for _, shape in side.tensor_headers.values())
    return bool(side.config) and 0 < parameters <= MAX_PARAMETERS and not side.config.get("auto_map")


def _compare_start_tokens(
    side: DoctorModel, documents: list[Document], without: Sequence[Tokenizer]
) -> tuple[Finding, BitsPerByteResult]:
    own, no_start = side.tokenizer, side.tokenizer.with_start_token(NO_START)
    candidates = [role for role in START_ROLES if role in own.special_token_ids]
    candidates += [token for token in TEXT_SEPARATORS if token in own.vocabulary.special_tokens]
    model = BackboneWithHead(load_causal_lm(ModelRef(side.folder, side.adapter), device=default_device()))
    results: dict[str, BitsPerByteResult] = {}
    for tokenizer in (own, no_start, *map(own.with_start_token, candidates)):
        if (name := _name(tokenizer)) not in results:
            results[name] = evaluate_bits_per_byte(
                model, tokenizer, documents, by_category=tokenizer is own, compared_with=without
            )
    bits = {name: result.bits_per_byte for name, result in results.items()}
    current, best = _name(own), min(bits, key=bits.__getitem__)
    figures = {"bits_per_byte": bits, "documents": len(documents)}
    measured = ", ".join(f"{value:.3f} after {name}" for name, value in bits.items())
    what = f"bits per byte of {len(documents)} texts: {measured}"
    level, hint = "ok", ""
    if bits[best] < (1 - SIGNIFICANT_FRACTION) * bits[current]:
        what = f"{best} predicts the texts better than {current}, the tokenizer's own start ({what})"
        token = NO_START if best == _name(no_start) else best
        online = f", or distill --teacher 'MODEL:start_token={token}'" if side.role == "teacher" else ""
        level, hint = "warning", f"use --start-token '{token}' in every command with this model{online}"
    return Finding(level, what, side.name, hint, figures), results[current]


def _compare_by_category(name: str, student: BitsPerByteResult, teacher: BitsPerByteResult) -> Finding:
    """Return the finding about a teacher that is not better by `MIN_IMPROVEMENT` on all texts or on a kind of text."""
    pairs = {"all": (student.bits_per_byte, teacher.bits_per_byte)}
    for category, bits in student.per_category.items():
        if category in teacher.per_category and bits.counts.sum() >= MIN_CATEGORY_BYTES:
            pairs[category] = (bits.value, teacher.per_category[category].value)
    weak = [kind for kind, (own, theirs) in pairs.items() if theirs > (1 - MIN_IMPROVEMENT) * own]
    bits_per_byte = {kind: {"student": own, "teacher": theirs} for kind, (own, theirs) in pairs.items()}
    figures = {"bits_per_byte": bits_per_byte}
    own, theirs = pairs["all"]
    what = f"bits per byte of the same texts: teacher {theirs:.3f}, student {own:.3f}"
    if not weak:
        return Finding("ok", what, name, "", figures, "teacher_level")
    listed = [
        "all texts" if kind == "all" else f"{kind} ({pairs[kind][1]:.3f} and {pairs[kind][0]:.3f})" for kind in weak
    ]
    what += f"; the teacher is not better than the student by {MIN_IMPROVEMENT:.0%} on {', '.join(listed)}"
    hint = "check that it is the right model, and its start token; the student learns little where it is not better"
    return Finding("warning" if "all" in weak else "note", what, name, hint, figures, "teacher_level")


def _name(tokenizer: Tokenizer) -> str:
    names = [tokenizer.special_token_names.get(token, str(token)) for token in tokenizer.start_ids]
    return " ".join(names) or "no start token"
