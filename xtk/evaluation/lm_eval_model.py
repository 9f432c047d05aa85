"""A model that xtk has loaded, as lm-evaluation-harness asks one. This module needs that package."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from lm_eval.models.huggingface import HFLM

from xtk import terminal
from xtk.evaluation.generated_answers import ProcessShare
from xtk.tokens.tokenizer import Tokenizer

PROGRESS_BATCH_SIZE = 512  # requests between two looks at the progress; they are sorted by length among themselves
REQUESTS_PER_TURN = (
    32  # requests in a row that one process answers: the choices of a problem share what stands before them
)


class HarnessModel(HFLM):  # type: ignore[misc]
    """Answers requests with a model of the caller's; several processes may each have one, and share the requests.

    Args:
        model: of transformers.
        tokenizer: its, which is read from the same files as everywhere else in xtk.
        batch_size: requests in a forward pass.
        max_length: tokens that it reads; None: what its configuration says.
        template_arguments: what the chat template is told beside the messages.
        share: which of the requests this process answers.
        stderr: where the progress goes.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        max_length: int | None,
        template_arguments: dict[str, Any],
        process_share: ProcessShare,
        stderr: TextIO,
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        with tempfile.TemporaryDirectory() as folder:
            for name, content in tokenizer.to_files().items():
                Path(folder, name).write_bytes(content)
            own = PreTrainedTokenizerFast.from_pretrained(folder)
        super().__init__(pretrained=model, backend="causal", tokenizer=own, batch_size=batch_size,
                         max_length=max_length, chat_template_args=template_arguments)  # fmt: skip
        self._share, self._stderr = process_share, stderr

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer; nothing is kept under this name."""
        return "xtk"

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return (log-probability, whether it is the likeliest text) of each continuation."""
        return self._run_in_batches(super().loglikelihood, requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the log-probability of each whole text."""
        return self._run_in_batches(super().loglikelihood_rolling, requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return what is written to each request."""
        return self._run_in_batches(super().generate_until, requests)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _run_in_batches(self, asked: Callable[..., list[Any]], requests: Sequence[Any]) -> list[Any]:
        """Ask some at a time, and show how far it is: the harness itself is silenced."""
        share, found = self._share, list[Any]()
        everything = range(len(requests))
        dealt = [
            [at for at in everything if at // REQUESTS_PER_TURN % share.num_processes == one]
            for one in range(share.num_processes)
        ]
        mine = dealt[share.rank]
        with (
            contextlib.redirect_stderr(self._stderr),
            terminal.Progress("evaluate", len(mine), "requests") as progress,
        ):
            for start in range(0, len(mine), PROGRESS_BATCH_SIZE):
                part = [requests[at] for at in mine[start : start + PROGRESS_BATCH_SIZE]]
                found += asked(part, disable_tqdm=True)
                progress.advance(len(part))
        answers = dict(zip(itertools.chain(*dealt), itertools.chain(*share.all_gather_object(found)), strict=True))
        return [answers[at] for at in range(len(requests))]
