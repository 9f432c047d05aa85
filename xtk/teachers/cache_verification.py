"""Does a cache hold what its teacher says? Some of its documents, scored again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.artifacts.cache_statistics import evenly_spaced_indices, max_stored_error
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import CorruptError, MismatchError
from xtk.registry import load_registered
from xtk.teachers import BACKENDS
from xtk.teachers.backend import BackendConfig, TeacherBackend
from xtk.tokens.teacher_logprobs import StoredLogprobs, Support, kl_on_stored_ids
from xtk.tokens.tokenizer import Tokenizer

# Largest difference of two log-probabilities, in nats, that other batches and other machines make. A logit of 16 to 32
# has steps of 1/8 in bfloat16.
TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 0.5}
MIN_COMPARED_LOGPROB = -32.0
VERIFICATION_BACKEND = "transformers"  # gives exact numbers of any ids


def verify_cache(
    cache: TeacherCache,
    folder: Path,
    name: str,
    *,
    documents: int = 8,
    trust_remote_code: bool = False,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score documents all over a cache again, and compare what it holds with what the teacher says.

    Args:
        cache: which one.
        folder: the teacher, a local model folder.
        name: how messages call it.
        documents: how many are scored.
        trust_remote_code: run the model's own code.
        options: of the backend.

    Returns:
        `documents`, `positions`; `largest_logprob_difference`, `largest_entropy_difference` and
        `quantization_kl_nats` (what quantization adds to KL(teacher || student), the mean), in nats;
        `quantization_kl_fraction_of_entropy`;
        `same_weights`.

    Raises:
        Mismatch: the model has another tokenizer, or is another model and says something else.
        Damaged: it is the teacher, and the cache does not hold what it says.
    """
    tokenizer = Tokenizer(folder, name=name)
    identity = cache.header["teacher"]
    if tokenizer.fingerprint != identity["tokenizer"]:
        raise MismatchError(
            "this model reads other tokens than the teacher of this cache",
            where=f"{name} has {tokenizer.fingerprint[:15]}; {cache.folder.name} is from {identity['tokenizer'][:15]}",
            hint=f"--teacher {identity['name']}",
        )
    backend = load_registered(BACKENDS, VERIFICATION_BACKEND, "backend")
    weights = backend.weights_identity(folder, dict(options or {}))
    same = weights == identity["weights"]
    if not same:
        terminal.note(
            f"inspect: {name} is another model than the teacher of this cache: its weights are {weights[:15]}, "
            f"those of the teacher {identity['weights'][:15]}"
        )
    dtype = str(cache.header["options"]["dtype"])
    support = Support("top-k", top_k=_num_certain_ids(cache.header["options"]))
    teacher = backend(
        BackendConfig(
            folder,
            name,
            tokenizer,
            support,
            dtype,
            trust_remote_code=trust_remote_code,
            backend_options=dict(options or {}),
        )
    )
    return _compare_documents(cache, teacher, name, evenly_spaced_indices(cache, documents), dtype, same)


def _compare_documents(
    cache: TeacherCache, teacher: TeacherBackend, name: str, numbers: list[int], dtype: str, same: bool
) -> dict[str, Any]:
    allowed = TOLERANCE[dtype] + max_stored_error(cache.header["codec"])
    worst, worst_entropy, at = 0.0, 0.0, 0
    missing, likeliest = 0, _num_certain_ids(cache.header["options"])
    divergences: list[NDArray[np.float64]] = []
    entropy: list[NDArray[np.float32]] = []
    for number in numbers:
        row = cache.read_document(number)
        held = row.stored_logprobs
        if not len(held):
            continue
        (said,) = teacher.score([row.tokens], [_padded_ids(held)])
        if likeliest:
            missing += _count_missing_ids(held, teacher.score([row.tokens])[0], likeliest, allowed)
        difference = max(
            _max_difference(held.logprobs, said.logprobs),
            _max_difference(held.observed_logprobs, said.observed_logprobs),
        )
        if difference > worst:
            worst, at = difference, number
        worst_entropy = max(worst_entropy, _max_difference(held.entropy, said.entropy))
        divergences.append(kl_on_stored_ids(said, held))
        entropy.append(said.entropy)
    if worst > allowed or missing:
        where = (
            f"row {at} of {cache.folder.name}: a log-probability differs by {worst:.3g} nats; {allowed:.3g} is "
            f"allowed; {missing:,} of the likeliest ids are missing"
        )
        if same:
            raise CorruptError("this cache does not hold what its teacher says", where=where)
        raise MismatchError(f"{name} is not the teacher of this cache", where=where)
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
    """Return how many of the likeliest ids a cache of these options holds for certain."""
    support = options.get("support")
    return int(options["top_k"]) if support in ("top-k", "top-k+sample") else int(support == "top-p")


def _count_missing_ids(held: StoredLogprobs, said: StoredLogprobs, likeliest: int, allowed: float) -> int:
    """Count ids that the teacher finds likelier than what is held in their place."""
    missing = 0
    for at in range(len(held)):
        ours = slice(held.offsets[at], held.offsets[at + 1])
        theirs = slice(said.offsets[at], said.offsets[at + 1])
        last = np.sort(held.logprobs[ours])[::-1][:likeliest][-1]
        others = ~np.isin(said.ids[theirs], held.ids[ours])
        missing += int((said.logprobs[theirs][others] > last + allowed).sum())
    return missing


def _padded_ids(scores: StoredLogprobs) -> NDArray[np.int32]:
    """Return int32 [P, G], the exact ids of each position; -1 where one has fewer than others."""
    sizes = np.diff(scores.offsets)
    ids = np.full((len(scores), int(sizes.max())), -1, np.int32)
    ids[np.arange(ids.shape[1])[None] < sizes[:, None]] = scores.ids
    return ids


def _max_difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the largest difference; of what is less likely than exp(-32) none is seen."""
    differences = np.maximum(ours.astype(np.float64), MIN_COMPARED_LOGPROB) - np.maximum(
        theirs.astype(np.float64), MIN_COMPARED_LOGPROB
    )
    return float(np.abs(differences).max(initial=0.0))
