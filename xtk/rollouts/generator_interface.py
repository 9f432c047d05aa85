"""Interface of generation backends: sampling options, requests, completions and the base class `Generator`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from xtk.engines.backend import Backend, BackendConfig
from xtk.errors import XtkError
from xtk.options.declaration import check_options
from xtk.options.shared import SamplingOptions

FINISH_REASONS = ("stop", "stop-string", "length")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplingOptions):
    """Sampling options; a completion includes its stop string."""

    top_logprobs: int = 0  # number of most likely token ids to return at each position

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
    """A request for one completion."""

    input_ids: NDArray[np.int32]  # [T], the tokens to continue; at least one
    # Integers that seed the sampling (seed, prompt, sample, turn), independent of the rest of the batch. A server or an
    # engine follows it as far as it supports seeds.
    seed_key: tuple[int, ...]
    max_length: int | None = None  # maximum tokens if fewer than `max_completion_length`; None: that limit alone


@dataclass(frozen=True)
class Completion:
    """A generated completion."""

    ids: NDArray[np.int32]  # [n], the sampled tokens, including the stop token
    logprobs: NDArray[np.float32]  # [n], in nats, of the full distribution at temperature 1, before top-k and top-p
    finish_reason: str  # "stop": a stop token; "stop-string": of `SamplingConfig.stop`; "length": the maximum length
    top_ids: NDArray[np.int32] | None = None  # [n, G], at each position, most likely first; None if not requested


class Generator(Backend, ABC):
    """A generation backend. New weights clear all state of the old ones (prefix caches)."""

    # Completions of one call of `rollout` and `evaluate-answers`. An engine keeps its batch full within a call.
    completions_at_once: ClassVar[int] = 2048
    # Tokens sampled so far, also by running calls; 0 if the backend learns of them only with completions.
    num_sampled: int = 0

    @abstractmethod
    def __init__(self, config: BackendConfig) -> None: ...

    @classmethod
    def open(cls, config: BackendConfig) -> Self:
        """Load a model or connect to one."""
        return cls(config)

    @property
    @abstractmethod
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and completion together; None if unknown."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""

    @abstractmethod
    def update_weights(self, folder: Path) -> None:
        """Load weights from a folder in Hugging Face format; a tied output head is in it (see `write_tied_head`)."""

    def sleep(self) -> None:
        """Free device memory, as far as the backend can."""

    def wake_up(self) -> None:
        """Take the device memory again; `update_weights` may be needed before generation."""

    def close(self) -> None:
        """Stop the backend for good."""
