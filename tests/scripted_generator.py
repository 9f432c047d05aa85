"""A generator whose completions are given by a function of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.token_sampling import StopStringDetector
from xtk.text.tokenizer import Tokenizer


class ScriptedGenerator:
    """Completes prompts with the results of `respond(prompt, seed_key)`: (text, whether an end token follows)."""

    completions_at_once = 256

    def __init__(
        self,
        tokenizer: Tokenizer,
        respond: Callable[[str, tuple[int, ...]], tuple[str, bool]],
        context: int | None = None,
    ) -> None:
        self.tokenizer, self.respond, self.context_length = tokenizer, respond, context
        self.requests: list[GenerationRequest] = []
        self.num_sampled = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        self.requests += requests
        return [self._complete(request, sampling) for request in requests]

    def _complete(self, request: GenerationRequest, sampling: SamplingConfig) -> Completion:
        names = self.tokenizer.special_token_names
        prompt = b"".join(
            names[token].encode() if token in names else self.tokenizer.vocabulary.bytes_of(token)
            for token in request.input_ids.tolist()
        ).decode()
        text, adds_end_token = self.respond(prompt, request.seed_key)
        (encoded,) = self.tokenizer.encode([text])
        token_ids = [*encoded.ids.tolist(), *([self.tokenizer.end_id] if adds_end_token else [])]
        length = min(
            sampling.max_completion_length, len(token_ids) if request.max_length is None else request.max_length
        )
        stop_detector, sampled, finish_reason = StopStringDetector(self.tokenizer, sampling.stop), [], "length"
        for token in token_ids[:length]:
            sampled.append(token)
            if token in self.tokenizer.end_ids:
                finish_reason = "stop"
            elif stop_detector.add_token(token):
                finish_reason = "stop-string"
                break
        ids = np.array(sampled, np.int32)
        logprobs = -0.125 * np.arange(1, len(ids) + 1, dtype=np.float32)
        top_ids = np.column_stack([ids, ids + 1]) if sampling.top_logprobs else None
        return Completion(ids, logprobs, finish_reason, top_ids)
