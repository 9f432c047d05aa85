"""Generation by `generate` of transformers, in this process, with a loaded model or the one in training."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from xtk.engines.backend import BackendConfig
from xtk.models import packed_attention
from xtk.models.causal_lm import check_embedding_rows, default_device, load_causal_lm, max_context_length
from xtk.models.resolver import ModelRef
from xtk.rollouts.engine_request_checks import max_new_tokens
from xtk.rollouts.generator_interface import Completion, GenerationRequest, Generator, SamplingConfig
from xtk.rollouts.token_sampling import StopStringDetector, position_seeds, sample_tokens
from xtk.text.tokenizer import Tokenizer

DEFAULT_BATCH_TOKENS = 8192


class TransformersGenerator(Generator):
    """Generates batches of completions with a causal language model, padded on the left; LoRA of peft is allowed.

    A completion depends only on the model, its `GenerationRequest` and the sampling, except for the last bits of
    logits, which depend on the rest of the batch. The model may be in training: each call restores its train/eval
    modes, attention implementation, generation config and torch's random state. `batch_tokens` counts padding.
    """

    supports_adapters: ClassVar[bool] = True
    runs_loaded_model: ClassVar[bool] = True
    completions_at_once: ClassVar[int] = 256

    def __init__(self, model: Any, tokenizer: Tokenizer, batch_tokens: int = DEFAULT_BATCH_TOKENS) -> None:
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens

    @classmethod
    def open(cls, config: BackendConfig) -> Self:
        """Load a model. Options: `model`, a loaded model to use instead."""
        if "model" in config.options:
            return cls(config.options["model"], config.tokenizer, config.batch_tokens)
        model = load_causal_lm(config.model, device=default_device())
        check_embedding_rows(model, config.tokenizer)
        return cls(model.eval().requires_grad_(False), config.tokenizer, config.batch_tokens)

    @property
    def _inner(self) -> Any:
        """The model itself, without the wrapper of peft."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion together; None if its configuration has no limit."""
        return max_context_length(self._inner.config)

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""
        context, name = self.context_length, self.tokenizer.name
        lengths = [max_new_tokens(request, sampling, context, name) for request in requests]
        completions: dict[int, Completion] = {}
        with generation_mode(self._inner):
            prompts = [len(request.input_ids) for request in requests]
            for batch in _generation_batches(prompts, lengths, self.batch_tokens):
                some, limits = [requests[at] for at in batch], [lengths[at] for at in batch]
                sampled_batch = _SampledBatch(some, limits, sampling, self.tokenizer, self._device)
                self._generate(sampled_batch)
                completions.update(zip(batch, sampled_batch.completions(), strict=True))
        return [completions[at] for at in range(len(requests))]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._inner.get_input_embeddings().weight.device
        return device

    def _generate(self, sampled_batch: _SampledBatch) -> None:
        from transformers import GenerationConfig
        from transformers.generation import LogitsProcessorList, StoppingCriteriaList

        def is_finished(input_ids: Tensor, scores: Any) -> Tensor:
            finished = sampled_batch.is_finished(input_ids, scores)
            self.num_sampled += sampled_batch.num_active
            return finished

        self._inner.generate(
            input_ids=sampled_batch.ids,
            attention_mask=sampled_batch.attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=max(sampled_batch.max_lengths), do_sample=False, use_cache=True, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([sampled_batch.sample_next]),
            stopping_criteria=StoppingCriteriaList([is_finished]),
        )

    def update_weights(self, folder: Path) -> None:
        """Load new weights; no state of the old ones is kept between calls."""
        dtype = str(self._inner.get_input_embeddings().weight.dtype).removeprefix("torch.")
        self._inner.load_state_dict(load_causal_lm(ModelRef(folder, dtype=dtype)).state_dict())


@contextlib.contextmanager
def generation_mode(model: Any, stop_ids: Collection[int] = ()) -> Iterator[None]:
    """Prepare a model for generation, then restore it; without `stop_ids` rows end by the caller's criteria."""
    from transformers import GenerationConfig

    modes = [(module, module.training) for module in model.modules()]
    own, options = model.config._attn_implementation, model.generation_config
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    model.eval()
    # The model's own may have penalties, top_p ...
    model.generation_config = GenerationConfig(eos_token_id=sorted(stop_ids) or None)
    # The last positions of a batch of prompts are a view, for which torch copies a bf16 head on a CPU once per prompt.
    head, hooks = model.get_output_embeddings(), []
    if head is not None:
        hooks.append(head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),)))
    try:
        if own == packed_attention.ATTENTION_NAME:  # it supports neither KV caches nor left padding
            try:
                model.set_attn_implementation("sdpa")
            except ValueError:
                model.set_attn_implementation("eager")
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        if own == packed_attention.ATTENTION_NAME:
            model.set_attn_implementation(own)
        model.generation_config = options
        for module, mode in modes:
            module.training = mode


def _generation_batches(prompts: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Group requests of similar length, longest first; padded prompts and completions of a batch fit in `tokens`."""
    order = sorted(range(len(prompts)), key=lambda at: (-prompts[at] - lengths[at], -prompts[at], at))
    batch: list[int] = []
    for at in order:
        grown = [*batch, at]
        padded = max(prompts[field] for field in grown) + max(lengths[field] for field in grown)
        if batch and padded * len(grown) > tokens:
            yield batch
            grown = [at]
        batch = grown
    if batch:
        yield batch


class _SampledBatch:
    """A batch during generation: inputs of `generate`, and its logits processor and stopping criterion."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        lengths: list[int],
        sampling: SamplingConfig,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        size = max(len(request.input_ids) for request in requests)
        padding = [size - len(request.input_ids) for request in requests]
        padded = [np.pad(request.input_ids, (left, 0)) for request, left in zip(requests, padding, strict=True)]
        # int64 [B, T], the prompts, zero-padded on the left.
        self.ids = torch.from_numpy(np.stack(padded).astype(np.int64)).to(device)
        # int64 [B, T], 1 for prompt tokens.
        self.attention_mask = (torch.arange(size) >= torch.tensor(padding)[:, None]).long().to(device)
        # max_lengths: maximum sampled tokens of each completion.
        self.max_lengths, self._sampling, self._tokenizer = lengths, sampling, tokenizer
        seeds = np.stack([position_seeds(request.seed_key, max(lengths)) for request in requests])
        self._seeds = torch.from_numpy(seeds).to(device)
        self._stop_detectors = [StopStringDetector(tokenizer, sampling.stop) for _ in requests]
        self._sampled: list[list[int]] = [[] for _ in requests]
        # num_active: completions that got a token in the last step.
        self._finishes, self.num_active = [""] * len(requests), 0
        self._logprobs: list[Tensor] = []
        self._top_ids: list[Tensor] = []

    def sample_next(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample a token for each row of logits [B, V]; return logits with it as argmax, as a logits processor."""
        logprobs = scores.log_softmax(-1)
        known = scores[:, : len(self._tokenizer)]
        step = min(len(self._logprobs), self._seeds.shape[1] - 1)
        chosen = sample_tokens(known, self._seeds[:, step], self._sampling)[:, None]
        self._logprobs.append(logprobs.gather(1, chosen)[:, 0])
        if self._sampling.top_logprobs:
            self._top_ids.append(known.topk(min(self._sampling.top_logprobs, known.shape[1])).indices)
        return torch.zeros_like(scores).scatter_(1, chosen, 1.0)

    def is_finished(self, input_ids: Tensor, scores: Any) -> Tensor:
        """Return bool [B], which completions have ended; a stopping criterion of `generate`."""
        self.num_active = self._finishes.count("")
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._finishes[row]:
                self._sampled[row].append(token)
                self._finishes[row] = self._finish(row, token)
        return torch.tensor([bool(finish) for finish in self._finishes], device=input_ids.device)

    def _finish(self, row: int, token: int) -> str:
        if token in self._tokenizer.stop_ids:
            return "stop"
        if self._stop_detectors[row].add_token(token):
            return "stop-string"
        return "length" if len(self._sampled[row]) == self.max_lengths[row] else ""

    def completions(self) -> list[Completion]:
        """Return the completions of the batch."""
        logprobs = torch.stack(self._logprobs, 1).cpu().numpy()
        top_ids = torch.stack(self._top_ids, 1).cpu().numpy().astype(np.int32) if self._top_ids else None
        return [
            Completion(
                np.array(sampled, np.int32),
                logprobs[row, : len(sampled)],
                self._finishes[row],
                None if top_ids is None else top_ids[row, : len(sampled)],
            )
            for row, sampled in enumerate(self._sampled)
        ]
