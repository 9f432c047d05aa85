"""A student whose turns are written down: it draws the tokens of a text that is chosen by what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.stop_strings import StopStringDetector
from xtk.tokens.tokenizer import Tokenizer


class ScriptedWriter:
    """Says what a function of what it reads, and of the key, returns: a text, and whether an end token follows."""

    def __init__(
        self, tokenizer: Tokenizer, says: Callable[[str, tuple[int, ...]], tuple[str, bool]], context: int | None = None
    ) -> None:
        self.tokenizer, self.says, self.context_length = tokenizer, says, context
        self.asked: list[GenerationRequest] = []

    def generate(self, asks: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        self.asked += asks
        return [self._write(ask, sampling) for ask in asks]

    def _write(self, ask: GenerationRequest, sampling: SamplingConfig) -> Completion:
        names = self.tokenizer.special_token_names
        read = b"".join(
            names[token].encode() if token in names else self.tokenizer.vocabulary.bytes_of(token)
            for token in ask.input_ids.tolist()
        ).decode()
        text, ends = self.says(read, ask.seed_key)
        (encoded,) = self.tokenizer.encode([text])
        wanted = [*encoded.ids.tolist(), *([self.tokenizer.end_id] if ends else [])]
        length = min(sampling.max_completion_length, len(wanted) if ask.max_length is None else ask.max_length)
        watch, drawn, finish = StopStringDetector(self.tokenizer, sampling.stop), [], "length"
        for token in wanted[:length]:
            drawn.append(token)
            if token in self.tokenizer.end_ids:
                finish = "stop"
            elif watch.add_token(token):
                finish = "stop-string"
                break
        ids = np.array(drawn, np.int32)
        logprobs = -0.125 * np.arange(1, len(ids) + 1, dtype=np.float32)
        top_ids = np.column_stack([ids, ids + 1]) if sampling.top_logprobs else None
        return Completion(ids, logprobs, finish, top_ids)
