"""Interface of generation backends: sampling options, requests, completions and the base class `Generator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xtk.engines.backend import Backend, BackendConfig
from xtk.errors import XtkError
from xtk.options.declaration import check_options
from xtk.options.shared import SamplingOptions

FINISH_REASONS = ("stop", "stop-string", "length")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplingOptions):
    """Sampling options; a completion includes its stop string.

    Attributes:
        top_logprobs: number of most likely token ids to return at each position.
    """

    top_logprobs: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_logprobs < 0:
            raise XtkError(
                f"--top-logprobs is {self.top_logprobs}, but must be at least 0",
                hint="use --top-logprobs 0 to store no top tokens",
            )
        if not all(self.stop):
            raise XtkError(
                "--stop has an empty string, which would end every completion at once", hint="remove the empty --stop"
            )


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion.

    Attributes:
        input_ids: int32 [T], the tokens to continue; at least one.
        seed_key: integers that seed the sampling (seed, prompt, sample, turn), independent of the rest of the batch. A
            server or an engine follows it as far as it supports seeds.
        max_length: maximum tokens if fewer than `max_completion_length`; None: that limit alone.
    """

    input_ids: NDArray[np.int32]
    seed_key: tuple[int, ...]
    max_length: int | None = None


@dataclass(frozen=True)
class Completion:
    """A generated completion.

    Attributes:
        ids: int32 [n], the sampled tokens, including the stop token.
        logprobs: float32 [n], in nats, of the full distribution at temperature 1, before top-k and top-p.
        finish_reason: "stop": a stop token; "stop-string": one of `SamplingConfig.stop`; "length": the maximum length.
        top_ids: int32 [n, G], the most likely tokens at each position, most likely first; None if not requested.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    top_ids: NDArray[np.int32] | None = None


class Generator(Backend, ABC):
    """A generation backend. New weights clear all state of the old ones (prefix caches).

    Attributes:
        num_sampled: tokens sampled so far, those of running calls included, for progress; a backend that learns of them
            only with the completions leaves it at 0.
    """

    num_sampled: int = 0

    @abstractmethod
    def __init__(self, config: BackendConfig) -> None: ...

    @classmethod
    def open(cls, config: BackendConfig) -> Self:
        """Load a model or connect to one.

        Raises:
            XtkError: it cannot be loaded or reached, or an option is invalid.
        """
        return cls(config)

    @property
    @abstractmethod
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion together; None if unknown."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""

    @abstractmethod
    def update_weights(self, weights: Any) -> None:
        """Load new weights.

        Args:
            weights: a folder in Hugging Face format, or pairs of a name in that format and a tensor.
        """

    def sleep(self) -> None:
        """Free device memory, as far as the backend can."""

    def wake_up(self) -> None:
        """Take the device memory again; `update_weights` may be needed before generation."""

    def close(self) -> None:
        """Stop the backend for good."""
