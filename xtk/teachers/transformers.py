"""Teacher backend `transformers`: a causal language model in this process."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xtk.cache.teacher_logprobs import SUPPORTS, StoredLogprobs, Support
from xtk.engines.backend import check_not_reserved
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import PLACEMENT_OPTIONS, default_device, load_causal_lm
from xtk.models.output_head import ChunkedLogits, OutputHead, chunk_rows_of
from xtk.models.resolver import ModelRef, weights_fingerprint
from xtk.parallel.host_to_device import start_copy_to_host, to_device
from xtk.teachers.backend_interface import TeacherBackend, TeacherConfig
from xtk.teachers.logprobs_to_cache_arrays import LogprobArrays, arrays_to_stored, sampling_uniforms, trained_positions
from xtk.text.token_sequence import TokenSequence

_SEVERAL_DEVICES = "--engine device_map=auto, or --backend vllm --engine tensor_parallel_size=N"
# Engine options that xtk sets, and the options of the command line for them.
RESERVED_OPTIONS = {
    "pretrained_model_name_or_path": "TEACHER",
    "dtype": "--dtype",
    "torch_dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
    "local_files_only": None,
    "use_safetensors": None,
    "distributed_config": _SEVERAL_DEVICES,
    "tp_plan": _SEVERAL_DEVICES,
    "tp_size": _SEVERAL_DEVICES,
}
# Engine options, in addition to those of placement, that change the results only by rounding.
COMPUTE_OPTIONS = frozenset({"attn_implementation", "experts_implementation", "low_cpu_mem_usage"})
BLOCK_SIZE = 64
# Matrix products are fast with many rows; passes over the logits with few, which stay in the processor's cache.
CHUNK_PASSES = 16
MIN_SHIFTED = -1e4  # a logit minus the largest one, in place of -inf: its probability is 0 in float32


class TransformersTeacher(TeacherBackend):
    """Scores documents with a causal language model: hidden states first, then logits in chunks.

    Args:
        request: model and options. In `options`, `engine` is passed to `from_pretrained`; `cut` is a loaded model of
            the caller, and `weights` its identity.
    """

    support_kinds: ClassVar[frozenset[str]] = frozenset(SUPPORTS)
    entropy_kind: ClassVar[str] = "exact"
    has_engine_options: ClassVar[bool] = True
    supports_adapters: ClassVar[bool] = True
    runs_loaded_model: ClassVar[bool] = True

    def __init__(self, request: TeacherConfig) -> None:
        engine = dict(request.options.get("engine") or {})
        check_not_reserved(engine, RESERVED_OPTIONS)
        if there := request.options.get("cut"):
            self._cut = there
        else:
            model = load_causal_lm(request.model, device=default_device(), options=engine)
            self._cut = BackboneWithHead(model.eval().requires_grad_(False))
        self.model = self._cut.model
        self.device = self.model.device
        self._placed = bool(PLACEMENT_OPTIONS & engine.keys() or getattr(self.model, "quantization_method", None))
        self.support, self.batch_tokens = request.support, request.batch_tokens

    @classmethod
    def weights_identity(cls, model: ModelRef, options: dict[str, Any]) -> str:
        """Return the fingerprints of the weights and of the adapter, and the engine options that change results."""
        if options.get("weights"):
            return str(options["weights"])
        engine = options.get("engine") or {}
        changed = {
            name: value for name, value in sorted(engine.items()) if name not in PLACEMENT_OPTIONS | COMPUTE_OPTIONS
        }
        fingerprints = [weights_fingerprint(folder) for folder in (model.folder, model.adapter) if folder]
        fingerprints += [json.dumps(changed, sort_keys=True)] if changed else []
        return " ".join(fingerprints)

    @classmethod
    def needs_subprocess(cls, engine: Mapping[str, Any]) -> bool:
        """Return whether the model is placed or quantized: then it stays on its devices."""
        return bool(PLACEMENT_OPTIONS & engine.keys() or "quantization_config" in engine)

    @property
    def vocab_size(self) -> int:
        """U, the size of its distributions."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def sleep(self) -> bool:
        """Move the model to CPU memory; not possible if it is placed or quantized."""
        if self._placed:
            return False
        self.model.to("cpu")
        return True

    def wake_up(self) -> None:
        """Move the model back to the device."""
        self.model.to(self.device)

    @torch.inference_mode()
    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return log-probabilities, as `TeacherBackend.score`; a GPU gets the next batch before the last is read."""
        scored: list[StoredLogprobs | None] = [None] * len(documents)
        started: deque[tuple[list[int], Callable[[], Tensor]]] = deque()
        num_started = 2 if self.device.type == "cuda" else 1

        def finish() -> None:
            batch, wait = started.popleft()
            own = [documents[at] for at in batch]
            for number, logprobs in zip(
                batch, arrays_to_stored(own, _split_columns(wait(), self.support)), strict=True
            ):
                scored[number] = logprobs
            self.report_tokens(sum(map(len, own)))

        for batch in batches_by_length([len(document) for document in documents], self.batch_tokens):
            named = None if candidate_ids is None else [candidate_ids[at] for at in batch]
            started.append((batch, self._start_batch([documents[at] for at in batch], named)))
            if len(started) == num_started:
                finish()
        while started:
            finish()
        return [logprobs for logprobs in scored if logprobs is not None]

    def _start_batch(
        self, documents: list[TokenSequence], given: Sequence[NDArray[np.int32]] | None
    ) -> Callable[[], Tensor]:
        """Queue the work for a batch; return the function that waits for its `_join_columns`, int32 [N, C]."""
        longest = max(1, *(len(document) for document in documents))
        ids = torch.zeros(len(documents), longest, dtype=torch.int64)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = torch.from_numpy(document.ids)
        positions = [trained_positions(document) for document in documents]
        places = np.concatenate([row * longest + at - 1 for row, at in enumerate(positions)])
        observed_ids = np.concatenate([document.ids[at] for document, at in zip(documents, positions, strict=True)])
        states = self._cut(to_device(ids, self.device)).flatten(0, 1)
        uniforms = np.concatenate([sampling_uniforms(document, self.support) for document in documents])

        def on_device(array: NDArray[Any]) -> Tensor:
            return to_device(torch.from_numpy(array), states.device)

        candidates = None if given is None else on_device(_padded_candidates(given).astype(np.int64))
        wanted = _PositionInputs(on_device(observed_ids.astype(np.int64)), candidates, on_device(uniforms))
        rows = states[on_device(places)]
        parts = list(_columns_of_states(rows, wanted, self._cut.head, self.support))
        return start_copy_to_host(torch.cat(parts) if parts else _no_columns(self.support))


class _PositionInputs(NamedTuple):
    """Inputs at each of N positions."""

    observed_ids: Tensor
    candidate_ids: Tensor | None
    uniforms: Tensor  # for sampling

    def at(self, rows: slice) -> _PositionInputs:
        candidate_ids = None if self.candidate_ids is None else self.candidate_ids[rows]
        return _PositionInputs(self.observed_ids[rows], candidate_ids, self.uniforms[rows])


def _padded_candidates(given: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the concatenated candidate ids [P, G] of several documents, padded to the largest G."""
    wide = max((ids.shape[1] for ids in given), default=0)
    return np.concatenate(
        [np.zeros((0, wide), np.int32)]
        + [np.pad(ids, ((0, 0), (0, wide - ids.shape[1])), constant_values=-1) for ids in given]
    )


def _join_columns(parts: tuple[Tensor | None, ...]) -> Tensor:
    """Return the arrays of `LogprobArrays` as one matrix int32 [N, C], so that one copy takes them to the host."""
    columns = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts if part is not None]
    return torch.cat([part if part.dtype == torch.int32 else part.float().view(torch.int32) for part in columns], 1)


def _split_columns(joined: Tensor, support: Support) -> LogprobArrays:
    """Return the arrays that `_join_columns` joined."""
    num_samples = support.num_sample_sets * support.num_samples
    single = 3 if num_samples else 2
    top = (joined.shape[1] - single - 2 * num_samples) // 2
    table = joined.numpy()
    edges = np.cumsum([0, top, top, 1, 1, num_samples, num_samples, single - 2])
    ids, logprobs, observed, entropy, sampled, sampled_logprobs, remainder = (
        np.ascontiguousarray(table[:, start:stop]) for start, stop in itertools.pairwise(edges.tolist())
    )
    return LogprobArrays(
        ids=ids,
        logprobs=logprobs.view(np.float32),
        observed_logprobs=observed.view(np.float32)[:, 0],
        entropy=entropy.view(np.float32)[:, 0],
        sampled_ids=sampled.reshape(len(table), support.num_sample_sets, support.num_samples),
        remainder_mass=remainder.view(np.float32)[:, 0] if num_samples else None,
        sampled_logprobs=sampled_logprobs.view(np.float32).reshape(
            len(table), support.num_sample_sets, support.num_samples
        )
        if num_samples
        else None,
    )


def _no_columns(support: Support) -> Tensor:
    """Return the matrix of zero positions, for documents without trained tokens."""
    num_samples = support.num_sample_sets * support.num_samples
    return torch.zeros(0, 2 * num_samples + (3 if num_samples else 2), dtype=torch.int32)


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield batches of documents of similar length with at most `tokens` padded tokens; longest first.

    A single longer document is a separate batch.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    start = 0
    while start < len(order):
        size = max(1, tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


def _columns_of_states(states: Tensor, wanted: _PositionInputs, head: OutputHead, support: Support) -> Iterator[Tensor]:
    """Yield the log-probabilities of some rows at a time, as `_join_columns` of `_arrays_of_logits`."""
    width = head.num_logits(states)
    chunk = chunk_rows_of(head, states)
    logits_of = ChunkedLogits(head, states, chunk)
    few = max(1, chunk // CHUNK_PASSES) if states.device.type == "cpu" else chunk
    work = states.new_empty((min(few, len(states)), width), dtype=torch.float32)
    for start in range(0, len(states), chunk):
        logits = logits_of(states[start : start + chunk])
        for first in range(0, len(logits), few):
            rows = slice(start + first, start + min(first + few, len(logits)))
            yield _join_columns(_arrays_of_logits(logits[first : first + few], wanted.at(rows), support, work))


def _arrays_of_logits(
    logits: Tensor, wanted: _PositionInputs, support: Support, work: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the arrays of `LogprobArrays` for a few rows; the logits are overwritten."""
    values, ids = blockwise_top_k(logits, min(max(1, support.top_k), logits.shape[1]))
    observed = logits.gather(1, wanted.observed_ids[:, None])
    if wanted.candidate_ids is not None:
        ids = wanted.candidate_ids
        values, highest = logits.gather(1, ids.clamp_min(0)), values[:, :1]
    else:
        highest = values[:, :1].clone()
    shifted = logits.sub_(highest)
    if shifted.device.type != "cpu":  # a look at the mean, as below, would wait for the device
        shifted.clamp_min_(MIN_SHIFTED)
    exponentials = torch.exp(shifted, out=work[: len(logits)])
    normalizer = exponentials.sum(1, keepdim=True)
    log_normalizer = normalizer.log()
    mean = torch.einsum("nv,nv->n", exponentials, shifted) / normalizer[:, 0]
    if shifted.device.type == "cpu" and not mean.isfinite().all():  # tokens with a logit of -inf
        mean = torch.einsum("nv,nv->n", exponentials, shifted.clamp_min_(MIN_SHIFTED)) / normalizer[:, 0]
    logprobs = values - highest - log_normalizer
    if support.kind == "top-p":
        probs = logprobs.exp()
        ids = ids.masked_fill(probs.cumsum(1) - probs >= support.top_p, -1)
    elif support.kind in ("sample", "none"):
        ids, logprobs = ids[:, :0], logprobs[:, :0]
    sampled = ids.new_zeros((len(ids), support.num_sample_sets, support.num_samples))
    sampled_logprobs, remainder = logprobs.new_zeros(sampled.shape), None
    if support.num_sample_sets:
        exact = torch.cat([torch.where(ids < 0, wanted.observed_ids[:, None], ids), wanted.observed_ids[:, None]], 1)
        exponentials.scatter_(1, exact, 0.0)
        sampled, remainder = systematic_sample(exponentials, wanted.uniforms, support.num_samples)
        remainder = (remainder / normalizer[:, 0]).float()
        own = logits.gather(1, sampled.clamp_min(0).flatten(1)) - log_normalizer
        sampled_logprobs = own.view(sampled.shape)
    return (
        ids.int(),
        logprobs,
        (observed - highest - log_normalizer)[:, 0],
        log_normalizer[:, 0] - mean,
        sampled.int(),
        sampled_logprobs,
        remainder,
    )


def systematic_sample(weights: Tensor, uniforms: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return ids sampled in proportion to weights, by systematic sampling.

    The n samples of a set are evenly spaced on the cumulative weights, from a random start: an id of probability p is
    sampled n p times on average, rounded up or down. Estimates are unbiased, as with independent samples, with less
    variance.

    Args:
        weights: [N, U], 0 for ids that must not be sampled.
        uniforms: float64 [N, R], in [0, 1), the start of each set.

    Returns:
        Ids int64 [N, R, n], -1 where all weights are 0; and the sums of the weights, float64 [N].
    """
    rows, width = weights.shape
    blocks = width // BLOCK_SIZE
    sums = weights[:, : blocks * BLOCK_SIZE].reshape(rows, blocks, BLOCK_SIZE).sum(2)
    sums = torch.cat([sums, weights[:, blocks * BLOCK_SIZE :].sum(1, keepdim=True)], 1).double()
    ends = sums.cumsum(1)
    total = ends[:, -1]
    steps = torch.arange(num_samples, dtype=torch.float64, device=weights.device)
    # A start of 1 - 2^-53 may round up to the total weight, after the last id.
    places = ((steps + uniforms[:, :, None]) / num_samples).clamp_max(1 - 1e-12).flatten(1) * total[:, None]
    block = torch.searchsorted(ends, places, right=True).clamp_max(blocks)
    inside = block[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=weights.device)
    held = weights.gather(1, inside.clamp_max(width - 1).flatten(1)).view(inside.shape).double()
    cumulated = held.masked_fill(inside >= width, 0).cumsum(2)
    before = ends.gather(1, block) - sums.gather(1, block)
    # Block sums are rounded to float32: a position after the last weight of a block belongs to that weight.
    left = torch.minimum(places - before, cumulated[:, :, -1] * (1 - 1e-12))
    ids = block * BLOCK_SIZE + (cumulated <= left[:, :, None]).sum(2)
    ids = ids.masked_fill(total[:, None] <= 0, -1)
    return ids.view(rows, -1, num_samples), total


def blockwise_top_k(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the exact `top_k` largest values [n, K] of each row and their ids, largest first.

    The K largest values of a row are in the K blocks with the largest maximum, so that one pass finds the blocks and
    only their contents are sorted: five times faster than a top-k over 151,936 columns.
    """
    rows, width = logits.shape
    blocks = width // BLOCK_SIZE
    if blocks <= 2 * top_k:
        values, ids = logits.topk(top_k, dim=1)
        return values, ids
    body = logits[:, : blocks * BLOCK_SIZE].as_strided((rows, blocks, BLOCK_SIZE), (logits.stride(0), BLOCK_SIZE, 1))
    best = body.amax(2).topk(top_k, dim=1, sorted=False).indices
    candidates = body.gather(1, best[:, :, None].expand(-1, -1, BLOCK_SIZE)).flatten(1)
    ids = (best[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=logits.device)).flatten(1)
    remainder = torch.arange(blocks * BLOCK_SIZE, width, device=logits.device)
    candidates = torch.cat([candidates, logits[:, blocks * BLOCK_SIZE :]], 1)
    ids = torch.cat([ids, remainder.expand(rows, -1)], 1)
    values, chosen = candidates.topk(top_k, dim=1)
    return values, ids.gather(1, chosen)
