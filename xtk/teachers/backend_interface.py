"""Base class of teacher backends, and the configuration that they are opened with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.engines.backend import Backend, BackendConfig
from xtk.models.resolver import ModelRef
from xtk.text.token_sequence import TokenSequence


@dataclass(frozen=True)
class TeacherConfig(BackendConfig):
    """Configuration for opening a teacher."""

    support: Support = field(kw_only=True)  # which entries of each distribution are returned


class TeacherBackend(Backend, ABC):
    """A teacher model that returns log-probabilities of documents. It is opened with a `TeacherConfig`."""

    support_kinds: ClassVar[frozenset[str]]  # the supported kinds of support
    entropy_kind: ClassVar[str] = "lower bound"  # "exact"; "lower bound": only the top tokens are known
    # Is called with the number of tokens of each batch that is scored, for a progress bar.
    report_tokens: Callable[[int], None] = staticmethod(lambda count: None)

    @abstractmethod
    def __init__(self, request: TeacherConfig) -> None: ...

    @classmethod
    @abstractmethod
    def weights_identity(cls, model: ModelRef, options: dict[str, Any]) -> str:
        """Return a string that identifies the weights, without loading them."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """U, the size of its distributions."""

    @abstractmethod
    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return the log-probabilities at the trained tokens of each document, in the configured support.

        Args:
            documents: at most the context length each.
            candidate_ids: for `--support candidates`, ids [P, G] at the trained tokens of each document; -1: padding.

        Raises:
            XtkError: the model fails, or returns values that are not log-probabilities.
        """

    def sleep(self) -> bool:
        """Release the device between two calls of `score`, and return whether this is possible."""
        return True

    def wake_up(self) -> None:
        """Take the device again."""

    def close(self) -> None:
        """Stop an engine and release its memory; nothing to do for others."""
