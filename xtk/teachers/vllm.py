"""A teacher run by vLLM in this process, or in workers that it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.model_resolver import weights_fingerprint
from xtk.engines.engine_options import check_not_reserved
from xtk.engines.vllm_engine import VllmEngine, import_vllm
from xtk.errors import XtkError
from xtk.teachers.backend import BackendConfig
from xtk.teachers.top_logprobs import (
    SUPPORTED_KINDS,
    TopLogprobs,
    check_document_lengths,
    check_support_kind,
    empty_top_logprobs,
    num_tokens_to_read,
    num_top_ids,
    top_logprobs_to_stored,
)
from xtk.tokens.teacher_logprobs import StoredLogprobs
from xtk.tokens.token_sequence import TokenSequence as TokenSequence

# What xtk says itself, and where the user says it.
RESERVED_OPTIONS = {
    "model": "TEACHER",
    "tokenizer": "TEACHER",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
    "max_logprobs": "--top-k",
    "logprobs_mode": None,
    "skip_tokenizer_init": None,
    "seed": None,
}
# Engine options that change what a model says; the others say how, and where, and may change between two runs.
MODEL_CHANGING_OPTIONS = frozenset(
    {"quantization", "quantization_config", "hf_overrides", "kv_cache_dtype", "load_format", "model_impl", "revision"}
)
# vLLM makes the log-probabilities of a prompt's part at once, U columns in the model's type and in fp32, beside what
# its profile of the memory knows of.
TRANSIENT_BYTES = 2 << 30
BYTES_PER_LOGIT = 8
MAX_PROMPTS = 128  # at once, at most; vLLM plans its memory for as many
MAX_ENTRIES_PER_CALL = 4 << 20  # in one call: vLLM holds a hundred bytes for each until the call returns


class VllmTeacher:
    """Scores documents with vLLM: the log-probabilities of the tokens of a prompt.

    Args:
        request: the model, and what is wanted of it. Of its options `engine` goes to `vllm.LLM` as it is, and
            `longest` is the length of the longest document, so that vLLM reserves no memory for longer ones.

    Raises:
        XtkError: vLLM is not installed, or cannot run this model, or cannot give this support.
    """

    support_kinds: ClassVar[frozenset[str]] = SUPPORTED_KINDS
    entropy_kind: ClassVar[str] = "lower bound"
    reserved_tokens: ClassVar[int] = 0

    def __init__(self, request: BackendConfig) -> None:
        check_support_kind(request)
        self._name, self._support = request.name, request.support
        self._top_k = num_top_ids(request.support, request.tokenizer.embedding_rows)
        self._engine = VllmEngine(_engine_arguments(request, self._top_k), request.name, "cache-teacher")
        self._tokens_in_a_call = max(request.batch_tokens, MAX_ENTRIES_PER_CALL // (self._top_k + 1))

    @classmethod
    def weights_identity(cls, folder: Path, options: dict[str, Any]) -> str:
        """Return the fingerprint of its weights, and of what the engine is told to make of them."""
        engine = options.get("engine") or {}
        changed = {name: engine[name] for name in sorted(engine) if name in MODEL_CHANGING_OPTIONS}
        return weights_fingerprint(folder) + (f" {json.dumps(changed, sort_keys=True)}" if changed else "")

    @property
    def vocab_size(self) -> int:
        """U, the columns of its distributions."""
        return self._engine.vocab_size

    @property
    def max_document_tokens(self) -> int:
        """Tokens of a document at most."""
        return self._engine.max_model_len

    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return what it says at the trained tokens of each document.

        Args:
            documents: at most `limit` tokens each.
            candidate_ids: never; vLLM does not give it.

        Raises:
            XtkError: the engine fails, or gives a number that is none.
        """
        check_document_lengths(documents, self.max_document_tokens, self._name)
        heads = [empty_top_logprobs(self._top_k)] * len(documents)
        for batch in _batch_documents([num_tokens_to_read(document) for document in documents], self._tokens_in_a_call):
            for number, found in zip(batch, self._top_logprobs([documents[at] for at in batch]), strict=True):
                heads[number] = found
        where = f"{self._name}, run by vLLM"
        return [
            top_logprobs_to_stored(document, found, self._support, self.vocab_size, where)
            for document, found in zip(documents, heads, strict=True)
        ]

    def close(self) -> None:
        """Stop the engine and give its memory back; nothing can be scored any more."""
        self._engine.close()

    def _top_logprobs(self, documents: Sequence[TokenSequence]) -> Iterator[TopLogprobs]:
        ids = [document.ids[: num_tokens_to_read(document)].tolist() for document in documents]
        # A prompt leaves room for a token that is generated. As long as the context, a document's last one is that.
        whole = [len(tokens) < self.max_document_tokens for tokens in ids]
        outputs = self._engine.generate(
            [{"prompt_token_ids": tokens if fits else tokens[:-1]} for tokens, fits in zip(ids, whole, strict=True)],
            [self._sampling_parameters(None if fits else tokens[-1]) for tokens, fits in zip(ids, whole, strict=True)],
            "score these documents",
        )
        for document, output, fits in zip(documents, outputs, whole, strict=True):
            told = [output.prompt_logprobs] if fits else [output.prompt_logprobs, output.outputs[0].logprobs]
            yield self._parse_output(document, told)

    def _sampling_parameters(self, forced: int | None) -> Any:
        """Return vLLM's parameters for a prompt, after which `forced` is to be generated."""
        last = {} if forced is None else {"logprobs": self._top_k, "allowed_token_ids": [forced]}
        return import_vllm().SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self._top_k,
            flat_logprobs=True,
            detokenize=False,
            **last,
        )

    def _parse_output(self, document: TokenSequence, told: list[Any]) -> TopLogprobs:
        """Read vLLM's lists: at each position but the first the token that stands there, and the likeliest ones."""
        columns = self._top_k + 1
        ids = np.concatenate([np.array(part.token_ids, np.int32) for part in told])
        logprobs = np.concatenate([np.array(part.logprobs, np.float32) for part in told])
        rows = num_tokens_to_read(document) - 1
        at = np.flatnonzero(document.train_mask) - 1
        if ids.shape != (rows * columns,) or logprobs.shape != ids.shape:
            raise XtkError(f"vLLM gives {len(ids):,} log-probabilities for {rows:,} x {columns:,}", where=self._name)
        ids, logprobs = ids.reshape(rows, columns)[at], logprobs.reshape(rows, columns)[at]
        if not np.array_equal(ids[:, 0], document.ids[at + 1]):
            raise XtkError("vLLM gives the log-probabilities of other tokens than it was given", where=self._name)
        return TopLogprobs(ids[:, 1:], logprobs[:, 1:], logprobs[:, 0])


def _engine_arguments(request: BackendConfig, top_k: int) -> dict[str, Any]:
    engine: Mapping[str, Any] = request.backend_options.get("engine") or {}
    check_not_reserved(engine, RESERVED_OPTIONS)
    tokens = max(1, min(request.batch_tokens, TRANSIENT_BYTES // (request.tokenizer.embedding_rows * BYTES_PER_LOGIT)))
    return {
        "model": str(request.folder),
        "skip_tokenizer_init": True,  # it is given ids and asked for ids
        "dtype": request.dtype,
        "trust_remote_code": request.trust_remote_code,
        "seed": 0,
        "max_logprobs": top_k,
        "logprobs_mode": "raw_logprobs",
        "max_num_batched_tokens": tokens,
        "max_num_seqs": min(MAX_PROMPTS, tokens),
        # Documents are read once.
        "enable_prefix_caching": False,
        **_model_length(request),
        **engine,
    }


def _model_length(request: BackendConfig) -> dict[str, int]:
    """Return how long a prompt may be, that vLLM keeps no memory for longer ones: a token more, where one is left."""
    from xtk.models.causal_lm import load_model_config, max_context_length

    longest = request.backend_options.get("longest")
    if longest is None:
        return {}
    configuration = load_model_config(request.folder, trust_remote_code=request.trust_remote_code)
    return {"max_model_len": min(longest + 1, max_context_length(configuration) or longest)}


def _batch_documents(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Group documents in order, as many as fit `tokens`, at least one; those of which nothing is read are left out."""
    batch: list[int] = []
    held = 0
    for number, length in enumerate(lengths):
        if not length:
            continue
        if batch and held + length > tokens:
            yield batch
            batch, held = [], 0
        batch.append(number)
        held += length
    if batch:
        yield batch
