"""Requests for teacher caches: options, their checks, the cache header, and opening of the teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xtk.cache.codec.shard_codec_registry import CODECS, DEFAULT_PRECISION, Codec, codec_for_precision
from xtk.cache.teacher_logprobs import DEFAULT_TOP_K, Support
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.errors import MismatchError, XtkError
from xtk.models.causal_lm import load_model_config, max_context_length
from xtk.models.resolver import ModelRef, model_name
from xtk.name_registry import load_registered, unknown_name_error
from xtk.projection.build import tokenizer_identity
from xtk.teachers import BACKENDS
from xtk.teachers.backend_interface import TeacherBackend, TeacherConfig
from xtk.teachers.cache_shard_planning import LONG_DOCUMENTS, ShardingOptions, ShardPlan
from xtk.text.start_tokens import AUTO_START
from xtk.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CacheRequest:
    """Teacher and options of a cache."""

    teacher: ModelRef
    support: Support  # which entries of each distribution are stored
    start_token: str = AUTO_START  # what precedes a text; see `Tokenizer`
    backend: str = "transformers"  # a key of `BACKENDS`
    precision: str = DEFAULT_PRECISION  # of the stored log-probabilities: a key of `PRECISION_CODECS`
    # Treatment of documents longer than the teacher's context (or `max_length`): see `LONG_DOCUMENTS`
    long_documents: str = "refuse"
    max_length: int | None = None  # a smaller limit than the context, in tokens; None: the context
    batch_tokens: int = 8192  # maximum padded tokens per forward pass
    shard_tokens: int = 65536  # teacher tokens per shard; a kill loses the work of at most one shard per process
    backend_options: dict[str, Any] = field(default_factory=dict)  # options of one backend

    def teacher_tokenizer(self) -> Tokenizer:
        """Return the teacher's tokenizer, loaded from its folder or that of its adapter."""
        teacher = self.teacher
        return Tokenizer(teacher.folder, name=teacher.name, start_token=self.start_token, adapter=teacher.adapter)

    @property
    def teacher_short_name(self) -> str:
        """The teacher's name in cache headers, metrics and routes: the last part of its path or hub id."""
        return model_name(self.teacher.adapter or self.teacher.folder)


def check_cache_request(request: CacheRequest) -> None:
    """Check the options before any data is read."""
    support = request.support
    if request.long_documents not in LONG_DOCUMENTS:
        raise unknown_name_error("value of --long-documents", request.long_documents, LONG_DOCUMENTS)
    if request.max_length is not None and request.max_length < 4:
        raise XtkError(
            f"--max-length is {request.max_length}, but must be at least 4 tokens",
            hint="use, for example, --max-length 2048",
        )
    able: frozenset[str] = load_registered(BACKENDS, request.backend, "backend").support_kinds
    if support.kind not in able:
        raise XtkError(
            f"--backend {request.backend} does not support --support {support.kind}",
            hint=f"use --support {', '.join(sorted(able))}; or --backend transformers, which supports all",
        )


def open_teacher(request: CacheRequest, tokenizer: Tokenizer, weights: str = "") -> TeacherBackend:
    """Return the opened teacher: loaded, or connected to servers; its weights are `weights`, "": not compared."""
    backend = load_registered(BACKENDS, request.backend, "backend")
    teacher: TeacherBackend = backend(
        TeacherConfig(
            request.teacher, tokenizer, request.batch_tokens, request.backend_options, support=request.support
        )
    )
    if teacher.vocab_size < len(tokenizer):
        raise XtkError(
            f"the teacher's embedding has {teacher.vocab_size:,} rows, fewer than the {len(tokenizer):,} tokens of its "
            "tokenizer",
            where=request.teacher.name,
            hint="use a model folder whose tokenizer belongs to its weights",
        )
    if weights and weights != backend.weights_identity(request.teacher, request.backend_options):
        raise MismatchError(
            "the files of the teacher were replaced while it was loaded",
            where=str(request.teacher.folder),
            hint="run the same command again when nothing writes to this folder",
        )
    return teacher


def sharding_options(request: CacheRequest) -> ShardingOptions:
    """Return how the documents of a request are split and assigned to shards."""
    context = max_context_length(load_model_config(request.teacher))
    limits = [limit for limit in (context, request.max_length) if limit]
    return ShardingOptions(min(limits, default=None), request.max_length, request.long_documents, request.shard_tokens)


def make_vocabulary_order(precision: str, tokenizer: Tokenizer, plan: ShardPlan) -> VocabularyOrder | None:
    """Return the vocabulary sorted by frequency in the data; None if the codec of a precision does not need it."""
    codec: type[Codec] = load_registered(CODECS, codec_for_precision(precision), "codec")
    if not codec.needs_vocabulary_order:
        return None
    return VocabularyOrder.from_counts(plan.token_counts, tokenizer.vocabulary.byte_lengths)


def make_cache_header(
    request: CacheRequest, tokenizer: Tokenizer, plan: ShardPlan, vocabulary_order: VocabularyOrder | None
) -> dict[str, Any]:
    """Return the header of a cache: the identity of teacher, data and all options that affect its content."""
    backend = load_registered(BACKENDS, request.backend, "backend")
    return compose_cache_header(
        tokenizer,
        plan,
        vocabulary_order,
        support=request.support,
        precision=request.precision,
        name=request.teacher_short_name,
        weights=backend.weights_identity(request.teacher, request.backend_options),
        options={
            "entropy": backend.entropy_kind,
            "dtype": request.teacher.dtype,
            "backend": request.backend,
            "long_documents": request.long_documents,
            "max_length": request.max_length,
            "batch_tokens": request.batch_tokens,
            "shard_tokens": request.shard_tokens,
        },
    )


def compose_cache_header(
    tokenizer: Tokenizer,
    plan: ShardPlan,
    vocabulary_order: VocabularyOrder | None,
    *,
    support: Support,
    precision: str,
    name: str,
    weights: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the header of a cache, from a request or of log-probabilities from elsewhere."""
    sampling = {"num_samples": support.num_samples, "num_sample_sets": support.num_sample_sets, "seed": support.seed}
    parameters: dict[str, dict[str, Any]] = {
        "top-k": {"top_k": support.top_k},
        "top-p": {"top_k": support.top_k, "top_p": support.top_p},
        "sample": sampling,
        "top-k+sample": {"top_k": support.top_k, **sampling},
    }
    own = tokenizer_identity(tokenizer)
    if support.top_k > max(tokenizer.embedding_rows, *DEFAULT_TOP_K.values()):
        raise XtkError(
            f"--top-k is {support.top_k:,}, but must be at most the teacher's vocabulary size "
            f"{tokenizer.embedding_rows:,}",
            where=tokenizer.name,
            hint="use --top-k all for the whole vocabulary",
        )
    return {
        "kind": "teacher-cache",
        "codec": {
            "name": codec_for_precision(precision),
            "precision": precision,
            "num_samples": support.num_samples,
            "num_sample_sets": support.num_sample_sets,
            **({"sample_logprobs": True} if support.num_sample_sets else {}),
            **({} if vocabulary_order is None else {"vocabulary_order": vocabulary_order.file_name}),
        },
        "teacher": {
            "name": name,
            "weights": weights,
            "template": tokenizer.template_fingerprint,
            "embedding_rows": tokenizer.embedding_rows,
            "tokenizer": own["tokenizer"],
            "special_tokens": own["special_tokens"],
            "space_ids": tokenizer.vocabulary.space_ids.tolist(),
            "start_ids": list(tokenizer.start_ids),
        },
        "data": {
            "fingerprint": plan.fingerprint,
            "documents": plan.num_chunks,
            "documents_too_long": plan.num_too_long,
            **({"optional_columns": plan.optional_columns} if plan.optional_columns else {}),
        },
        "options": {"support": support.kind, **parameters.get(support.kind, {}), **options},
    }
