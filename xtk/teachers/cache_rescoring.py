"""Verification of a cache against its teacher: scores a sample of its documents again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.cache.reader import TeacherCache
from xtk.cache.statistics import evenly_spaced_indices, max_stored_error
from xtk.cache.teacher_logprobs import StoredLogprobs, Support, kl_on_stored_ids
from xtk.errors import CorruptError, MismatchError
from xtk.models.resolver import ModelRef
from xtk.name_registry import load_registered
from xtk.teachers import BACKENDS
from xtk.teachers.backend_interface import TeacherBackend, TeacherConfig
from xtk.text.document_token_ids import CandidateIdLists
from xtk.text.tokenizer import Tokenizer

# Allowed difference of log-probabilities, in nats, between different batches and machines. In bfloat16, logits from 16
# to 32 have steps of 1/8.
TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 0.5}
MIN_COMPARED_LOGPROB = -32.0
VERIFICATION_BACKEND = "transformers"  # returns exact log-probabilities of any ids


def verify_cache(
    cache: TeacherCache, model: ModelRef, *, documents: int = 8, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Score evenly spaced documents of a cache again, and compare their stored log-probabilities with the teacher's.

    Args:
        model: the teacher; its dtype is that of the cache.

    Returns:
        `documents`, `positions`; `largest_logprob_difference`, `largest_entropy_difference` and
        `quantization_kl_nats` (what quantization adds to KL(teacher || student), the mean), in nats;
        `quantization_kl_fraction_of_entropy`;
        `same_weights`.

    Raises:
        CorruptError: the weights are the teacher's, and the log-probabilities differ.
    """
    name = model.name
    tokenizer = Tokenizer(model.folder, name=name)
    identity = cache.header["teacher"]
    if tokenizer.fingerprint != identity["tokenizer"]:
        raise MismatchError(
            f"{name} has another tokenizer than the teacher that wrote this cache",
            where=f"{name} has {tokenizer.fingerprint[:15]}; {cache.folder.name} is from {identity['tokenizer'][:15]}",
            hint=f"give the teacher of this cache, which was named {identity['name']}",
        )
    backend = load_registered(BACKENDS, VERIFICATION_BACKEND, "backend")
    weights = backend.weights_identity(model, dict(options or {}))
    same = weights == identity["weights"]
    if not same:
        terminal.note(
            f"cache verify: the weights of {name} ({weights[:15]}) differ from those of the teacher of this cache "
            f"({identity['weights'][:15]})"
        )
    dtype = str(cache.header["options"]["dtype"])
    support = Support("top-k", top_k=_num_certain_ids(cache.header["options"]))
    teacher = backend(
        TeacherConfig(replace(model, dtype=dtype), tokenizer, options=dict(options or {}), support=support)
    )
    return _compare_documents(cache, teacher, name, evenly_spaced_indices(cache, documents), dtype, same)


def _compare_documents(
    cache: TeacherCache, teacher: TeacherBackend, name: str, numbers: list[int], dtype: str, same: bool
) -> dict[str, Any]:
    allowed = TOLERANCE[dtype] + max_stored_error(cache.header["codec"])
    worst, worst_entropy, at = 0.0, 0.0, 0
    num_missing, num_top_ids = 0, _num_certain_ids(cache.header["options"])
    divergences: list[NDArray[np.float64]] = []
    entropy: list[NDArray[np.float32]] = []
    for number in numbers:
        row = cache.read_document(number)
        held = row.stored_logprobs
        if not len(held):
            continue
        (scored,) = teacher.score([row.tokens], [CandidateIdLists(held.offsets, held.ids).to_padded()])
        if num_top_ids:
            num_missing += _count_missing_ids(held, teacher.score([row.tokens])[0], num_top_ids, allowed)
        difference = max(
            _max_difference(held.logprobs, scored.logprobs),
            _max_difference(held.observed_logprobs, scored.observed_logprobs),
        )
        if difference > worst:
            worst, at = difference, number
        worst_entropy = max(worst_entropy, _max_difference(held.entropy, scored.entropy))
        divergences.append(kl_on_stored_ids(scored, held))
        entropy.append(scored.entropy)
    if worst > allowed or num_missing:
        where = (
            f"row {at} of {cache.folder.name}: a log-probability differs by {worst:.3g} nats; at most {allowed:.3g} is "
            f"allowed; {num_missing:,} of the most likely ids are missing"
        )
        if same:
            raise CorruptError(
                "the log-probabilities in this cache differ from those that its teacher computes now",
                where=where,
                hint="create the cache again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
            )
        raise MismatchError(
            f"{name} computes other log-probabilities than the teacher that wrote this cache",
            where=where,
            hint=f"use {cache.header['teacher']['name']}",
        )
    positions = np.concatenate([np.zeros(0), *divergences])
    added = float(positions.mean()) if len(positions) else 0.0
    nats = float(np.concatenate([np.zeros(0, np.float32), *entropy]).mean()) if entropy else 0.0
    return {
        "documents": len(numbers),
        "positions": len(positions),
        "same_weights": same,
        "largest_logprob_difference": float(f"{worst:.3g}"),
        "largest_entropy_difference": float(f"{worst_entropy:.3g}"),
        "allowed_logprob_difference": allowed,
        "quantization_kl_nats": float(f"{added:.3g}"),
        "quantization_kl_fraction_of_entropy": float(f"{added / nats:.3g}") if nats > 0 else None,
    }


def _num_certain_ids(options: dict[str, Any]) -> int:
    """Return how many of the most likely ids of each position a cache with these options always contains."""
    support = options.get("support")
    return int(options["top_k"]) if support in ("top-k", "top-k+sample") else int(support == "top-p")


def _count_missing_ids(held: StoredLogprobs, scored: StoredLogprobs, num_top_ids: int, allowed: float) -> int:
    """Count the teacher's top ids that the cache lacks although they are more likely than its least likely top id."""
    num_missing = 0
    for at in range(len(held)):
        ours = slice(held.offsets[at], held.offsets[at + 1])
        theirs = slice(scored.offsets[at], scored.offsets[at + 1])
        last = np.sort(held.logprobs[ours])[::-1][:num_top_ids][-1]
        others = ~np.isin(scored.ids[theirs], held.ids[ours])
        num_missing += int((scored.logprobs[theirs][others] > last + allowed).sum())
    return num_missing


def _max_difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the largest absolute difference, nats; log-probabilities below -32 count as -32."""
    differences = np.maximum(ours.astype(np.float64), MIN_COMPARED_LOGPROB) - np.maximum(
        theirs.astype(np.float64), MIN_COMPARED_LOGPROB
    )
    return float(np.abs(differences).max(initial=0.0))
