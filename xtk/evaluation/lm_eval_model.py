"""Adapter from models loaded by xtk to lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from xtk.errors import NonFiniteModelError
from xtk.evaluation.generated_answers import NON_FINITE_HINT, ProcessShare
from xtk.progress import Progress
from xtk.text.tokenizer import Tokenizer

PROGRESS_BATCH_SIZE = 512  # requests between progress updates; each batch is sorted by length
# Consecutive requests per process: the choices of a problem share their context.
REQUESTS_PER_TURN = 32


class HarnessModel:
    """The harness's class for transformers models around a loaded model; several processes can share the requests.

    Args:
        max_length: context length in tokens; None: from the model's configuration.
        process_share: the requests that this process answers.
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
        from lm_eval.models.huggingface import HFLM

        self._model = HFLM(pretrained=model, backend="causal", tokenizer=harness_tokenizer(tokenizer),
                           batch_size=batch_size, max_length=max_length,
                           chat_template_args=template_arguments)  # fmt: skip
        self._model._loglikelihood_tokens = functools.partial(_without_progress, self._model._loglikelihood_tokens)
        self._share, self._stderr = process_share, stderr

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the harness's model."""
        return getattr(self._model, name)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer for the harness's request cache, which xtk does not use."""
        return "xtk"

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return (log-probability, whether greedy decoding gives it) of each continuation."""
        answers = self._run_in_batches(self._model.loglikelihood, requests)
        _refuse_nan(logprob for logprob, _ in answers)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the log-probability of each text."""
        answers = self._run_in_batches(self._model.loglikelihood_rolling, requests)
        _refuse_nan(answers)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the generated text of each request."""
        return self._run_in_batches(self._model.generate_until, requests)

    def _run_in_batches(self, method: Callable[..., list[Any]], requests: Sequence[Any]) -> list[Any]:
        """Answer this process's requests in batches with progress, and return the answers of all processes."""
        share, results = self._share, list[Any]()
        indices = range(len(requests))
        by_rank = [
            [at for at in indices if at // REQUESTS_PER_TURN % share.num_processes == one]
            for one in range(share.num_processes)
        ]
        mine = by_rank[share.rank]
        with contextlib.redirect_stderr(self._stderr), Progress("evaluate", len(mine), "requests") as progress:
            for start in range(0, len(mine), PROGRESS_BATCH_SIZE):
                part = [requests[at] for at in mine[start : start + PROGRESS_BATCH_SIZE]]
                results += method(part, disable_tqdm=True)
                progress.advance(len(part))
        answers = dict(zip(itertools.chain(*by_rank), itertools.chain(*share.all_gather_object(results)), strict=True))
        return [answers[at] for at in range(len(requests))]


def check_finite_logits(model: Any) -> None:
    """Refuse a model whose logits are not finite: its most likely answers would have scores like any others."""
    with torch.no_grad():
        ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        logits = model(input_ids=ids).logits
    _refuse_nan([float("nan") if bool(logits.isnan().any() or logits.isposinf().any()) else 0.0])


def _refuse_nan(values: Iterable[float]) -> None:
    """Refuse log-probabilities that are not numbers."""
    if any(math.isnan(value) for value in values):
        raise NonFiniteModelError("the model gives log-probabilities that are not a number", hint=NON_FINITE_HINT)


def harness_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of transformers, which puts the start token in front of texts where the model's does."""
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        for name, content in tokenizer.to_files(with_start=True).items():
            Path(folder, name).write_bytes(content)
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _without_progress(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of the harness without its progress bars, which some callers request in spite of `disable_tqdm`."""
    return method(*arguments, **{**options, "disable_tqdm": True})
