"""What every backend is: something that scores documents."""

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
    """How a teacher is to be opened.

    Attributes:
        folder: the model, or at least its tokenizer and configuration where something else runs it.
        name: how messages call it.
        tokenizer: its own.
        support: what of each distribution is wanted.
        dtype: of its arithmetic.
        batch_tokens: padded tokens in a forward pass.
        trust_remote_code: run the model's own code.
        backend_options: what only one backend knows, by name.
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
    """A model that says how likely each token was, somewhere.

    Attributes:
        support_kinds: the kinds of support that it can give.
        entropy_kind: "exact", or "lower bound" where only the head of a distribution is known.
        reserved_tokens: tokens of its context that it needs beside a document.
        on_devices: whether it computes in this process, on a device of its own where there are devices. What does not
            say so does.
    """

    support_kinds: ClassVar[frozenset[str]]
    entropy_kind: ClassVar[str]
    reserved_tokens: ClassVar[int]

    @classmethod
    def weights_identity(cls, folder: Path, options: dict[str, Any]) -> str:
        """Return what tells its weights from others, without loading them."""

    @property
    def vocab_size(self) -> int:
        """U, the columns of its distributions."""

    def score(
        self, documents: Sequence[TokenSequence], candidate_ids: Sequence[NDArray[np.int32]] | None = None
    ) -> list[StoredLogprobs]:
        """Return what it says at the trained tokens of each document, in the support that it was opened with.

        Args:
            documents: at most as many tokens each as its context holds, less `room`.
            candidate_ids: for the support of that name, ids [P, G] at the trained tokens of each document; -1 stands
                for none.

        Raises:
            XtkError: a number that is none, or no answer.
        """
