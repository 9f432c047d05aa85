"""What every backend that writes is asked, and what it answers: tokens in, tokens out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from xtk.errors import XtkError
from xtk.tokens.tokenizer import Tokenizer

FINISH_REASONS = ("stop", "stop-string", "length")


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
        temperature: of the logits; 0 takes the likeliest token.
        top_p: draws are from the fewest tokens that carry this mass.
        top_k: and from so many of the likeliest at most; 0: any.
        max_completion_length: tokens of a completion at most.
        stop: texts that end a completion once they are written; they belong to it.
        top_logprobs: of how many of the likeliest tokens at each place ids are told too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 256
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise XtkError(f"--temperature is {self.temperature}; it is a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise XtkError(f"--top-p is {self.top_p}; it is a mass, above 0 and at most 1")
        if self.top_k < 0 or self.top_logprobs < 0:
            raise XtkError(f"--top-k is {self.top_k} and --top-logprobs {self.top_logprobs}; both are 0 or more")
        if self.max_completion_length < 1:
            raise XtkError(f"--max-completion-length is {self.max_completion_length}; it is 1 or more")
        if not all(self.stop):
            raise XtkError("--stop is an empty text, which every completion has")


@dataclass(frozen=True)
class GenerationRequest:
    """One completion that is asked for.

    Attributes:
        input_ids: int32 [T], what the model reads; at least one token.
        seed_key: numbers that its random draws are a function of (seed, prompt, sample, turn, say), whatever is written
            beside it. Of a server or an engine only as far as that keeps to seeds.
        max_length: tokens at most, if fewer than `max_completion_length`; None: as many.
    """

    input_ids: NDArray[np.int32]
    seed_key: tuple[int, ...]
    max_length: int | None = None


@dataclass(frozen=True)
class Completion:
    """What was written.

    Attributes:
        ids: int32 [n], as they were drawn, the token that ended it among them.
        logprobs: float32 [n], natural, of the whole distribution at temperature 1, before anything was cut off.
        finish_reason: "stop": it drew a token that ends; "stop-string": it wrote a text that does; "length": it was
            cut off.
        top_ids: int32 [n, G], the likeliest tokens at each place, the likeliest first; None: they were not asked for.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    top_ids: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class GeneratorConfig:
    """The model that is to write.

    Attributes:
        folder: a local folder of a model.
        name: how messages call it.
        tokenizer: its.
        dtype: of its weights and arithmetic, as `--dtype` names it.
        batch_tokens: tokens, read and written, that are held at a time.
        trust_remote_code: run the model's own code.
        options: what only one backend knows (`engine`, `servers`, `device`).
    """

    folder: Path
    name: str
    tokenizer: Tokenizer
    dtype: str = "float32"
    batch_tokens: int = 8192
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Generator(Protocol):
    """A model that writes. One that is told new weights forgets all that it kept of the old ones (prefix caches)."""

    @classmethod
    def open(cls, config: GeneratorConfig) -> Self:
        """Load or reach a model.

        Raises:
            XtkError: it cannot be loaded or reached, or an option is none.
        """

    @property
    def context_length(self) -> int | None:
        """The most tokens of prompt and completion together; None: it does not say."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return a completion of each, in order."""

    def update_weights(self, weights: Any) -> None:
        """Take new weights.

        Args:
            weights: a folder in Hugging Face's format, or pairs of a name in that format and a tensor.
        """

    def sleep(self) -> None:
        """Leave the device to others, as far as the backend can."""

    def wake_up(self) -> None:
        """Come back to it; weights may have to be told anew."""
