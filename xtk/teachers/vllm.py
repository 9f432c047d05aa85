"""Teacher backend `vllm`: vLLM in this process, or in workers that it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import StoredLogprobs
from xtk.engines.vllm_engine import VllmEngine, import_vllm
from xtk.errors import XtkError
from xtk.models.causal_lm import load_model_config, max_context_length
from xtk.models.resolver import ModelRef, weights_fingerprint
from xtk.teachers.backend_interface import TeacherBackend, TeacherConfig
from xtk.teachers.transformers import batches_by_length
from xtk.teachers.vllm_top_logprobs import (
    SUPPORTED_KINDS,
    TopLogprobs,
    check_document_lengths,
    empty_top_logprobs,
    num_tokens_to_read,
    num_top_ids,
    top_logprobs_to_stored,
)
from xtk.text.token_sequence import TokenSequence

RESERVED_OPTIONS = {"model": "TEACHER", "tokenizer": "TEACHER", "max_logprobs": "--top-k"}  # see VllmEngine
# Engine options that change the log-probabilities; all others may differ between two runs of one cache.
MODEL_CHANGING_OPTIONS = frozenset(
    {"quantization", "quantization_config", "hf_overrides", "kv_cache_dtype", "load_format", "model_impl", "revision"}
)
# vLLM computes the log-probabilities of the prompt tokens of a pass at once (on a GPU 1,024 rows at a time), U columns
# in the model's dtype and in float32, in addition to the memory that its profiling accounts for.
TRANSIENT_BYTES = 2 << 30
BYTES_PER_LOGIT = 8
GPU_TOKENS = 8192
MAX_PROMPTS = 128  # maximum concurrent prompts; vLLM reserves memory for them
MAX_ENTRIES_PER_CALL = 4 << 20  # vLLM keeps about 100 bytes for each entry until the call returns


class VllmTeacher(TeacherBackend):
    """Scores documents with vLLM, by the log-probabilities of prompt tokens.

    Args:
        request: model and options. In `options`, `engine` is passed to `vllm.LLM`, and `longest` is the length
            of the longest document, so that vLLM reserves no memory for longer ones.
    """

    support_kinds: ClassVar[frozenset[str]] = SUPPORTED_KINDS
    has_engine_options: ClassVar[bool] = True

    def __init__(self, request: TeacherConfig) -> None:
        self._name, self._support = request.model.name, request.support
        self._top_k = num_top_ids(request.support, request.tokenizer.embedding_rows)
        self._engine = VllmEngine(request, "cache-teacher", RESERVED_OPTIONS, _engine_settings(request, self._top_k))
        self._tokens_in_a_call = max(request.batch_tokens, MAX_ENTRIES_PER_CALL // (self._top_k + 1))

    @classmethod
    def weights_identity(cls, model: ModelRef, options: dict[str, Any]) -> str:
        """Return the fingerprint of the weights, and the engine options that change the log-probabilities."""
        engine = options.get("engine") or {}
        changed = {name: engine[name] for name in sorted(engine) if name in MODEL_CHANGING_OPTIONS}
        return weights_fingerprint(model.folder) + (f" {json.dumps(changed, sort_keys=True)}" if changed else "")

    @classmethod
    def needs_subprocess(cls, engine: Mapping[str, Any]) -> bool:
        """Return true: vLLM releases the memory of a device only at its end."""
        return True

    @property
    def vocab_size(self) -> int:
        """U, the size of its distributions."""
        return self._engine.vocab_size

    @property
    def max_document_tokens(self) -> int:
        """Maximum tokens of a document."""
        return self._engine.max_model_len

    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return log-probabilities, see `TeacherBackend.score`; no candidate ids."""
        check_document_lengths(documents, self.max_document_tokens, self._name)
        heads = [empty_top_logprobs(self._top_k)] * len(documents)
        lengths = [num_tokens_to_read(document) for document in documents]
        trained = [number for number, length in enumerate(lengths) if length]
        self.report_tokens(
            sum(len(document) for document, length in zip(documents, lengths, strict=True) if not length)
        )
        for batch in batches_by_length([lengths[number] for number in trained], self._tokens_in_a_call):
            own = [trained[at] for at in batch]
            for number, logprobs in zip(own, self._top_logprobs([documents[at] for at in own]), strict=True):
                heads[number] = logprobs
            self.report_tokens(sum(len(documents[at]) for at in own))
        where = f"{self._name}, run by vLLM"
        return [
            top_logprobs_to_stored(document, logprobs, self._support, self.vocab_size, where)
            for document, logprobs in zip(documents, heads, strict=True)
        ]

    def close(self) -> None:
        """Stop the engine and release its memory; `score` cannot be called any more."""
        self._engine.close()

    def _top_logprobs(self, documents: Sequence[TokenSequence]) -> Iterator[TopLogprobs]:
        ids = [document.ids[: num_tokens_to_read(document)].tolist() for document in documents]
        # The context must also hold one generated token: if a document fills it, its last token is generated.
        whole = [len(tokens) < self.max_document_tokens for tokens in ids]
        outputs = self._engine.generate(
            [{"prompt_token_ids": tokens if fits else tokens[:-1]} for tokens, fits in zip(ids, whole, strict=True)],
            [self._sampling_parameters(None if fits else tokens[-1]) for tokens, fits in zip(ids, whole, strict=True)],
            "score these documents",
        )
        for document, output, fits in zip(documents, outputs, whole, strict=True):
            parts = [output.prompt_logprobs] if fits else [output.prompt_logprobs, output.outputs[0].logprobs]
            yield self._parse_output(document, parts)

    def _sampling_parameters(self, forced: int | None) -> Any:
        """Return vLLM's parameters for a prompt; a token `forced` is generated after it."""
        last = {} if forced is None else {"logprobs": self._top_k, "allowed_token_ids": [forced]}
        return import_vllm().SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=self._top_k, flat_logprobs=True, detokenize=False, **last
        )

    def _parse_output(self, document: TokenSequence, parts: list[Any]) -> TopLogprobs:
        """Return the top log-probabilities from vLLM's lists: the observed token, then the most likely ones."""
        columns = self._top_k + 1
        ids = np.concatenate([np.array(part.token_ids, np.int32) for part in parts])
        logprobs = np.concatenate([np.array(part.logprobs, np.float32) for part in parts])
        rows = num_tokens_to_read(document) - 1
        at = np.flatnonzero(document.train_mask) - 1
        has_all = ids.shape == (rows * columns,) == logprobs.shape
        if not has_all or not np.array_equal(ids.reshape(rows, columns)[at, 0], document.ids[at + 1]):
            raise XtkError(
                f"the {len(ids):,} log-probabilities from vLLM are not {columns:,} for each of the {rows:,} tokens of "
                "the document",
                where=self._name,
                hint="use --backend transformers",
            )
        ids, logprobs = ids.reshape(rows, columns)[at], logprobs.reshape(rows, columns)[at]
        return TopLogprobs(ids[:, 1:], logprobs[:, 1:], logprobs[:, 0])


def _engine_settings(request: TeacherConfig, top_k: int) -> dict[str, Any]:
    length = {}
    if longest := request.options.get(
        "longest"
    ):  # so that vLLM reserves no memory for longer prompts; one is generated
        context = max_context_length(load_model_config(request.model))
        length = {"max_model_len": min(longest + 1, context or longest)}
    limit = TRANSIENT_BYTES // (request.tokenizer.embedding_rows * BYTES_PER_LOGIT)
    if torch.cuda.is_available():
        limit = max(limit, GPU_TOKENS)
    tokens = max(1, min(request.batch_tokens, limit))
    return {
        "skip_tokenizer_init": True,  # inputs and outputs are token ids
        "max_logprobs": top_k,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(MAX_PROMPTS, tokens),
        # Each document is scored once.
        "enable_prefix_caching": False,
        **length,
    }
