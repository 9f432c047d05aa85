"""What a cache is asked to hold: checked, named in its header, and the teacher that it asks for opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtk.artifacts.codecs import CODECS, STANDARD, Codec, codec_of
from xtk.artifacts.ranks import Ranks
from xtk.errors import XtkError
from xtk.lookup import lookup
from xtk.projection.build import identity
from xtk.teachers import BACKENDS
from xtk.teachers.planning import Dealing, Plan
from xtk.teachers.teacher import Teacher, TeacherRequest
from xtk.tokens.signal import USUAL_TOP_K, Support
from xtk.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class CacheRequest:
    """What a cache is to hold.

    Attributes:
        teacher: a local model folder.
        name: how messages call it.
        support: which tokens of a distribution are kept.
        dtype: of the teacher's weights and arithmetic.
        backend: who runs it.
        precision: of what is kept: a key of `PRECISIONS`.
        long_documents: what becomes of documents longer than the teacher's context (or `max_length`).
        max_length: a smaller limit than the context; None: the context.
        batch_tokens: padded tokens in a forward pass.
        shard_tokens: teacher tokens in a shard; a kill loses at most one shard's work.
        trust_remote_code: run the model's own code.
        backend_options: what only one backend knows.
    """

    teacher: Path
    name: str
    support: Support
    dtype: str = "float32"
    backend: str = "transformers"
    precision: str = STANDARD
    long_documents: str = "refuse"
    max_length: int | None = None
    batch_tokens: int = 8192
    shard_tokens: int = 65536
    trust_remote_code: bool = False
    backend_options: dict[str, Any] = field(default_factory=dict)


def check_request(request: CacheRequest) -> None:
    """Refuse what makes no sense, before anything is read.

    Raises:
        XtkError: tells which option.
    """
    support = request.support
    if request.max_length is not None and request.max_length < 4:
        raise XtkError(f"--max-length is {request.max_length}; a document has at least 4 tokens")
    able: frozenset[str] = lookup(BACKENDS, request.backend, "backend").supports
    if support.kind not in able:
        raise XtkError(
            f"the backend {request.backend} does not give the support {support.kind}",
            hint=f"--support {', '.join(sorted(able))}; or --backend transformers, which gives all",
        )


def open_teacher(request: CacheRequest, tokenizer: Tokenizer) -> Teacher:
    """Load or reach the teacher.

    Raises:
        XtkError: it cannot be loaded, or has fewer rows than its tokenizer has tokens.
    """
    teacher: Teacher = lookup(BACKENDS, request.backend, "backend")(
        TeacherRequest(
            folder=request.teacher,
            name=request.name,
            tokenizer=tokenizer,
            support=request.support,
            dtype=request.dtype,
            batch_tokens=request.batch_tokens,
            trust_remote_code=request.trust_remote_code,
            options=request.backend_options,
        )
    )
    if teacher.width < len(tokenizer):
        raise XtkError(
            f"the teacher has {teacher.width:,} vocabulary rows; its tokenizer names {len(tokenizer):,} tokens",
            where=request.name,
        )
    return teacher


def dealing_of(request: CacheRequest) -> Dealing:
    """Return how the documents of a request become rows and shards.

    Raises:
        XtkError: there is no model in the teacher's folder, or none whose configuration can be read.
    """
    from xtk.models.causal_lm import context_length, load_configuration

    context = context_length(load_configuration(request.teacher, trust_remote_code=request.trust_remote_code))
    room: int = lookup(BACKENDS, request.backend, "backend").room
    limits = [limit for limit in (context and context - room, request.max_length) if limit]
    return Dealing(min(limits, default=None), request.max_length, request.long_documents, request.shard_tokens)


def ranks_for(request: CacheRequest, tokenizer: Tokenizer, plan: Plan) -> Ranks | None:
    """Return the vocabulary by its frequency in the data, if the codec of a request needs it."""
    codec: type[Codec] = lookup(CODECS, codec_of(request.precision), "codec")
    return Ranks.of(plan.counts, tokenizer.vocabulary.lengths) if codec.needs_ranks else None


def cache_header(request: CacheRequest, tokenizer: Tokenizer, plan: Plan, ranks: Ranks | None) -> dict[str, Any]:
    """Return the identity of a cache: of its teacher, its data and all options that its numbers depend on."""
    backend = lookup(BACKENDS, request.backend, "backend")
    support = request.support
    sampling = {"num_samples": support.draws, "num_sample_sets": support.sets, "seed": support.seed}
    parameters: dict[str, dict[str, Any]] = {
        "top-k": {"top_k": support.top_k},
        "top-p": {"top_k": support.top_k, "top_p": support.top_p},
        "sample": sampling,
        "top-k+sample": {"top_k": support.top_k, **sampling},
    }
    own = identity(tokenizer)
    if support.top_k > max(tokenizer.width, *USUAL_TOP_K.values()):
        raise XtkError(
            f"--top-k is {support.top_k:,}; the teacher's vocabulary has {tokenizer.width:,} tokens",
            where=request.name,
            hint="--top-k all",
        )
    return {
        "kind": "teacher-cache",
        "codec": {
            "name": codec_of(request.precision),
            "precision": request.precision,
            "num_samples": support.draws,
            "num_sample_sets": support.sets,
            **({} if ranks is None else {"vocabulary_order": ranks.file}),
        },
        "teacher": {
            "name": request.teacher.resolve().name,
            "weights": backend.identity(request.teacher, request.backend_options),
            "template": tokenizer.template_fingerprint,
            "width": tokenizer.width,
            "tokenizer": own["tokenizer"],
            "special_tokens": own["roles"],
        },
        "data": {
            "fingerprint": plan.fingerprint,
            "rows": plan.pieces,
            "too_long": plan.too_long,
            **({"optional_columns": plan.optional_columns} if plan.optional_columns else {}),
        },
        "options": {
            "support": support.kind,
            **parameters.get(support.kind, {}),
            "entropy": backend.entropy,
            "dtype": request.dtype,
            "backend": request.backend,
            "long_documents": request.long_documents,
            "max_length": request.max_length,
            "batch_tokens": request.batch_tokens,
            "shard_tokens": request.shard_tokens,
        },
    }
