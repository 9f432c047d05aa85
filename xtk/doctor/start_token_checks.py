"""Check of start tokens: bits per byte of the user's texts after each candidate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from xtk import terminal
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding
from xtk.errors import XtkError
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import default_device, load_causal_lm
from xtk.tokens.document import Document
from xtk.tokens.start_tokens import NO_START, START_ROLES
from xtk.tokens.tokenizer import Tokenizer

MAX_PARAMETERS = 1_000_000_000  # weights of larger models are not loaded
NUM_DOCUMENTS, DOCUMENT_CHARACTERS = 8, 600
SIGNIFICANT_FRACTION = 0.02


def start_tokens(inputs: DoctorInputs) -> Iterator[Finding]:
    """Check that no other start token predicts the user's texts better; loads the weights of small models."""
    texts = [document.text for document, _ in inputs.data_sample.documents if document.conversation is None]
    texts = [text for text in texts if len(text) > 1]
    chosen = texts[:: max(1, len(texts) // NUM_DOCUMENTS)][:NUM_DOCUMENTS]
    documents = [Document.from_text(text[:DOCUMENT_CHARACTERS]) for text in chosen]
    if not documents:
        return
    findings = []
    for side in inputs.models:
        parameters = sum(math.prod(shape) for _, shape in side.tensor_headers.values())
        if side.config and 0 < parameters <= MAX_PARAMETERS and not side.config.get("auto_map"):
            with contextlib.suppress(XtkError), terminal.quiet():  # other checks report a model that cannot be loaded
                findings.append(_compare_start_tokens(side, documents))
    yield from findings


def _compare_start_tokens(side: DoctorModel, documents: list[Document]) -> Finding:
    own, without = side.tokenizer, side.tokenizer.with_start_token(NO_START)
    roles = [role for role in START_ROLES if role in own.special_token_ids]
    model = BackboneWithHead(load_causal_lm(side.folder, device=default_device(), adapter=side.adapter))
    bits: dict[str, float] = {}
    for tokenizer in (own, without, *map(own.with_start_token, roles)):
        if (name := _name(tokenizer)) not in bits:
            result = evaluate_bits_per_byte(model, tokenizer, documents, compared_with=[without])
            bits[name] = result.bits_per_byte
    current, best = _name(own), min(bits, key=bits.__getitem__)
    figures = {"bits_per_byte": bits, "documents": len(documents)}
    measured = ", ".join(f"{value:.3f} after {name}" for name, value in bits.items())
    what = f"bits per byte of {len(documents)} texts: {measured}"
    if bits[best] < (1 - SIGNIFICANT_FRACTION) * bits[current]:
        what = f"{best} predicts the texts better than {current}, the tokenizer's own start ({what})"
        token = NO_START if best == _name(without) else best
        hint = f"use --start-token '{token}' in every command that reads texts with this model"
        return Finding("start_tokens", "warning", what, side.name, hint, figures)
    return Finding("start_tokens", "ok", what, side.name, figures=figures)


def _name(tokenizer: Tokenizer) -> str:
    names = [tokenizer.special_token_names.get(token, str(token)) for token in tokenizer.start_ids]
    return " ".join(names) or "no start token"
