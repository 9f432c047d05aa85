"""A student that writes by `generate` of transformers, in this process: a model of its own, or the one in training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from xtk.errors import XtkError
from xtk.models import packed_attention
from xtk.models.causal_lm import DTYPES, check_embedding_rows, default_device, load_causal_lm, max_context_length
from xtk.models.safetensors_headers import format_names
from xtk.rollouts.generator_interface import Completion, GenerationRequest, GeneratorConfig, SamplingConfig
from xtk.rollouts.stop_strings import StopStringDetector
from xtk.rollouts.token_sampling import position_seeds, sample_tokens
from xtk.tokens.tokenizer import Tokenizer

DEFAULT_BATCH_TOKENS = 8192


class TransformersGenerator:
    """Writes with a causal language model, several completions at a time, padded on the left.

    A completion is a function of the model, its `GenerationRequest` and the sampling alone, but for the last bits of
    logits, which
    depend on what is computed beside them. The model may be in training: its modes, its attention and its options of
    generation are as they were after each call, and so is torch's random state.

    Args:
        model: of transformers, with or without LoRA of peft; it stays the caller's.
        tokenizer: its.
        batch_tokens: of prompts and completions that are held at a time, padding among them.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, batch_tokens: int = DEFAULT_BATCH_TOKENS) -> None:
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens

    @classmethod
    def open(cls, config: GeneratorConfig) -> Self:
        """Load a model. Of the request's options `adapter` is a folder of peft's.

        Raises:
            XtkError: it cannot be loaded, or has fewer rows than its tokenizer has tokens.
        """
        model = load_causal_lm(
            config.folder,
            dtype=DTYPES[config.dtype],
            device=default_device(),
            trust_remote_code=config.trust_remote_code,
            adapter=config.options.get("adapter"),
        )
        check_embedding_rows(model, config.tokenizer)
        return cls(model.eval().requires_grad_(False), config.tokenizer, config.batch_tokens)

    @property
    def _inner(self) -> Any:
        """The model itself, inside of what peft puts around it."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def context_length(self) -> int | None:
        """The most tokens of prompt and completion together; None: its configuration does not say."""
        return max_context_length(self._inner.config)

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return a completion of each, in order.

        Raises:
            XtkError: the context has no room for a token behind a prompt.
        """
        lengths = [self._length(ask, sampling) for ask in requests]
        found: dict[int, Completion] = {}
        with generation_mode(self._inner):
            for batch in _generation_batches([len(ask.input_ids) for ask in requests], lengths, self.batch_tokens):
                draws = _Draws(
                    [requests[at] for at in batch],
                    [lengths[at] for at in batch],
                    sampling,
                    self.tokenizer,
                    self._device,
                )
                self._generate(draws)
                found.update(zip(batch, draws.completions(), strict=True))
        return [found[at] for at in range(len(requests))]

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._inner.get_input_embeddings().weight.device
        return device

    def _length(self, ask: GenerationRequest, sampling: SamplingConfig) -> int:
        limits = [sampling.max_completion_length, ask.max_length]
        limits.append(None if self.context_length is None else self.context_length - len(ask.input_ids))
        length = min(limit for limit in limits if limit is not None)
        if length < 1 or not len(ask.input_ids):
            raise XtkError(
                f"a prompt of {len(ask.input_ids):,} tokens leaves no room in a context of {self.context_length}"
                if len(ask.input_ids)
                else "a prompt has no token, and the model needs one to go on from",
                where=self.tokenizer.name,
            )
        return length

    def _generate(self, draws: _Draws) -> None:
        from transformers import GenerationConfig
        from transformers.generation import LogitsProcessorList, StoppingCriteriaList

        self._inner.generate(
            input_ids=draws.ids,
            attention_mask=draws.attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=max(draws.max_lengths), do_sample=False, use_cache=True, pad_token_id=0
            ),
            logits_processor=LogitsProcessorList([draws.sample_next]),
            stopping_criteria=StoppingCriteriaList([draws.is_finished]),
        )

    def update_weights(self, weights: str | Path | Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights; nothing of the old ones is kept between calls.

        Raises:
            XtkError: a weight is none of the model's, has another shape, or is missing.
        """
        own = self._inner.state_dict()
        left = {weight.data_ptr(): name for name, weight in own.items()}  # tied weights count once
        with torch.no_grad():
            for name, weight in self._read(weights) if isinstance(weights, str | Path) else weights:
                if name not in own or own[name].shape != weight.shape:
                    there = f"{list(own[name].shape)} there" if name in own else "not there"
                    raise XtkError(
                        f"the weight {name} is {list(weight.shape)}, and {there}", where=type(self._inner).__name__
                    )
                own[name].copy_(weight)
                left.pop(own[name].data_ptr(), None)
        if left:
            names = sorted(left.values())
            raise XtkError(
                f"missing weights: {len(names):,} ({format_names(names)})",
                where=f"new weights of {type(self._inner).__name__}",
            )

    def _read(self, folder: str | Path) -> Iterable[tuple[str, Tensor]]:
        dtype = self._inner.get_input_embeddings().weight.dtype
        weights: dict[str, Tensor] = load_causal_lm(Path(folder), dtype=dtype).state_dict()
        return weights.items()

    def sleep(self) -> None:
        """Stay: the model is the caller's, and nothing else is held between calls."""

    def wake_up(self) -> None:
        """Go on."""


@contextlib.contextmanager
def generation_mode(model: Any) -> Iterator[None]:
    """Make a model one that writes, and leave it as it was."""
    from transformers import GenerationConfig

    modes = [(module, module.training) for module in model.modules()]
    own, options = model.config._attn_implementation, model.generation_config
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    model.eval()
    model.generation_config = GenerationConfig()  # a penalty or a cut of the model's own would be drawn from
    try:
        if own == packed_attention.ATTENTION_NAME:  # which knows no caches and no padding on the left
            try:
                model.set_attn_implementation("sdpa")
            except ValueError:
                model.set_attn_implementation("eager")
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        if own == packed_attention.ATTENTION_NAME:
            model.set_attn_implementation(own)
        model.generation_config = options
        for module, mode in modes:
            module.training = mode


def _generation_batches(prompts: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Group asks of similar length, longest first, so that prompts and completions are within `tokens` when padded."""
    order = sorted(range(len(prompts)), key=lambda at: (-prompts[at] - lengths[at], -prompts[at], at))
    batch: list[int] = []
    for at in order:
        grown = [*batch, at]
        padded = max(prompts[one] for one in grown) + max(lengths[one] for one in grown)
        if batch and padded * len(grown) > tokens:
            yield batch
            grown = [at]
        batch = grown
    if batch:
        yield batch


class _Draws:
    """A batch while it is written: what `generate` reads, and what is asked after each pass of the model.

    Attributes:
        ids: int64 [B, T], the prompts, zeros in front of shorter ones.
        attention_mask: int64 [B, T], 1 for tokens of a prompt.
        max_lengths: how many tokens each may draw.
    """

    def __init__(
        self,
        asks: Sequence[GenerationRequest],
        lengths: list[int],
        sampling: SamplingConfig,
        tokenizer: Tokenizer,
        device: torch.device,
    ) -> None:
        size = max(len(ask.input_ids) for ask in asks)
        padded = np.stack([np.pad(ask.input_ids, (size - len(ask.input_ids), 0)) for ask in asks]).astype(np.int64)
        shown = np.stack([np.arange(size) >= size - len(ask.input_ids) for ask in asks]).astype(np.int64)
        self.ids, self.attention_mask = torch.from_numpy(padded).to(device), torch.from_numpy(shown).to(device)
        self.max_lengths, self._sampling, self._tokenizer = lengths, sampling, tokenizer
        seeds = np.stack([position_seeds(ask.seed_key, max(lengths)) for ask in asks])
        self._seeds = torch.from_numpy(seeds).to(device)
        self._watches = [StopStringDetector(tokenizer, sampling.stop) for _ in asks]
        self._sampled: list[list[int]] = [[] for _ in asks]
        self._finishes = [""] * len(asks)
        self._logprobs: list[Tensor] = []
        self._top_ids: list[Tensor] = []

    def sample_next(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw a token for each row, as a processor of logits [B, V]; return logits of which it is the greatest."""
        logprobs = scores.log_softmax(-1)
        known = scores[:, : len(self._tokenizer)]
        step = min(len(self._logprobs), self._seeds.shape[1] - 1)
        chosen = sample_tokens(known, self._seeds[:, step], self._sampling)[:, None]
        self._logprobs.append(logprobs.gather(1, chosen)[:, 0])
        if self._sampling.top_logprobs:
            self._top_ids.append(known.topk(min(self._sampling.top_logprobs, known.shape[1])).indices)
        return torch.zeros_like(scores).scatter_(1, chosen, 1.0)

    def is_finished(self, input_ids: Tensor, scores: Any) -> Tensor:
        """Say which rows have ended, as a criterion to stop."""
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._finishes[row]:
                self._sampled[row].append(token)
                self._finishes[row] = self._finish(row, token)
        return torch.tensor([bool(finish) for finish in self._finishes], device=input_ids.device)

    def _finish(self, row: int, token: int) -> str:
        if token in self._tokenizer.end_ids:
            return "stop"
        if self._watches[row].add_token(token):
            return "stop-string"
        return "length" if len(self._sampled[row]) == self.max_lengths[row] else ""

    def completions(self) -> list[Completion]:
        """Return what was written."""
        logprobs = torch.stack(self._logprobs, 1).cpu().numpy()
        top_ids = torch.stack(self._top_ids, 1).cpu().numpy().astype(np.int32) if self._top_ids else None
        return [
            Completion(
                np.array(drawn, np.int32),
                logprobs[row, : len(drawn)],
                self._finishes[row],
                None if top_ids is None else top_ids[row, : len(drawn)],
            )
            for row, drawn in enumerate(self._sampled)
        ]
