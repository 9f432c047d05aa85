"""Interface of teacher backends, and the configuration that they are opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.teacher_logprobs import StoredLogprobs, Support
from xtk.tokens.token_sequence import TokenSequence as TokenSequence
from xtk.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class BackendConfig:
    """Configuration for opening a teacher.

    Attributes:
        folder: of the model; tokenizer and configuration are enough for the backend `server`.
        name: name in messages.
        tokenizer: the teacher's.
        support: which entries of each distribution are returned.
        dtype: of weights and arithmetic.
        batch_tokens: maximum padded tokens per forward pass.
        trust_remote_code: allow model code from the model's folder.
        backend_options: options of one backend, by name.
    """

    folder: Path
    name: str
    tokenizer: Tokenizer
    support: Support
    dtype: str = "float32"
    batch_tokens: int = 8192
    trust_remote_code: bool = False
    backend_options: dict[str, Any] = field(default_factory=dict)


class TeacherBackend(Protocol):
    """A teacher model that returns log-probabilities of documents.

    Attributes:
        support_kinds: the supported kinds of support.
        entropy_kind: "exact", or "lower bound" if only the top tokens of a distribution are known.
        reserved_tokens: tokens of the context that a document cannot use.
        on_devices: optional; whether it computes in this process and uses one device per process. Default: true.
    """

    support_kinds: ClassVar[frozenset[str]]
    entropy_kind: ClassVar[str]
    reserved_tokens: ClassVar[int]

    @classmethod
    def weights_identity(cls, folder: Path, options: dict[str, Any]) -> str:
        """Return a string that identifies the weights, without loading them."""

    @property
    def vocab_size(self) -> int:
        """U, the size of its distributions."""

    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return the log-probabilities at the trained tokens of each document, in the configured support.

        Args:
            documents: at most the context length minus `reserved_tokens` tokens each.
            candidate_ids: for `--support candidates`, ids [P, G] at the trained tokens of each document; -1: padding.

        Raises:
            XtkError: the model fails, or returns values that are not log-probabilities.
        """
