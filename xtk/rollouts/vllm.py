"""A student that writes by vLLM, in this process or in workers that it starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xtk.engines.options import engine_options, refuse_reserved
from xtk.engines.vllm import Engine, import_vllm
from xtk.errors import XtkError
from xtk.rollouts.completions import BIASES, completion_of, length_of, refuse_hotter, seed_of, told_ids
from xtk.rollouts.weights import Names, save_weights, with_head
from xtk.rollouts.writer import Ask, Completion, Sampling, WriterRequest

# What xtk says itself, and where the user says it.
RESERVED = {
    "model": "STUDENT",
    "tokenizer": "STUDENT",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
    "max_logprobs": None,
    "logprobs_mode": None,
    "skip_tokenizer_init": None,
    "generation_config": None,
    "seed": None,
}


class VllmWriter:
    """Writes with vLLM. It keeps what it read of prompts for those that begin alike, until the weights change.

    On a CPU vLLM binds the memory and the threads of its process: `xtk.rollouts.apart` gives it one of its own.

    Args:
        request: the model. Of its options `engine` goes to `vllm.LLM`: a mapping, or `name=value` words.

    Raises:
        XtkError: vLLM is not installed, or cannot run this model.
    """

    def __init__(self, request: WriterRequest) -> None:
        # In this process, weights are told from memory to memory.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._tokenizer, self._name = request.tokenizer, request.name
        self._engine = Engine(_settings(request), request.name, "rollout")
        self._names = Names.of(request.folder)
        self._asleep = self._forgotten = False
        padding = range(len(self._tokenizer), self._engine.width)
        # Rows that no token has. With more of them than vLLM takes, one that is drawn is refused.
        self._never = dict.fromkeys(padding, -float("inf")) if 0 < len(padding) <= BIASES else None

    @classmethod
    def open(cls, request: WriterRequest) -> Self:
        """Start vLLM, as the class says."""
        return cls(request)

    @property
    def context(self) -> int:
        """The most tokens of prompt and completion together."""
        return self._engine.limit

    def write(self, asks: Sequence[Ask], sampling: Sampling) -> list[Completion]:
        """Return a completion of each, in order.

        Raises:
            XtkError: a prompt leaves no room, or the engine fails, or it has no weights.
        """
        if self._asleep or self._forgotten:
            raise XtkError(
                "the engine was asked to write before it came back with weights",
                where=self._name,
                hint="wake(), then update(weights)",
            )
        refuse_hotter(sampling)
        if not asks:
            return []
        told = told_ids(sampling, self._tokenizer, self._engine.width)
        outputs = self._engine.generate(
            [{"prompt_token_ids": ask.ids.tolist()} for ask in asks],
            [self._wanted(ask, sampling, told) for ask in asks],
            "write",
        )
        return [self._completion(output.outputs[0], sampling, told) for output in outputs]

    def update(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Take new weights, and forget what was kept of the old ones.

        Args:
            weights: a folder, which all workers see, or pairs of a name and a tensor; they are read one by one.

        Raises:
            XtkError: one is missing, or the engine refuses them. Then it may have some of each.
        """
        if self._asleep:
            raise XtkError("the engine was told weights while it rests", where=self._name, hint="wake() first")
        if isinstance(weights, str | Path):
            self._names.check(Names.of(Path(weights)), str(weights))
            self._reload(weights_path=str(weights))
        elif self._in_process():
            seen: set[str] = set()
            self._reload(weights_iterator=_noted(with_head(weights), seen))
            self._names.check(Names(frozenset(seen)), "the weights that were told")
        else:
            with tempfile.TemporaryDirectory() as folder:
                save_weights(weights, Path(folder))
                self.update(folder)
            return
        self._forgotten = False
        self._forget()

    def rest(self) -> None:
        """Give the device's memory back, weights and all; on a CPU, nothing."""
        if self._sleeps() and not self._asleep:
            self._engine.llm.sleep(level=2)
            self._asleep = self._forgotten = True

    def wake(self) -> None:
        """Take the memory again; then weights have to be told, if `rest` gave any back."""
        if self._asleep:
            self._engine.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Stop the engine; nothing can be written any more."""
        self._engine.close()

    def _wanted(self, ask: Ask, sampling: Sampling, told: int) -> Any:
        greedy = sampling.temperature == 0
        return import_vllm().SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=length_of(ask, sampling, self.context, self._name),
            seed=None if greedy else seed_of(ask.key),
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=True,  # their names are no text that was written
            # The tokens that end are xtk's, not those of a generation_config.json.
            ignore_eos=True,
            stop_token_ids=sorted(self._tokenizer.end_ids),
            logprobs=told,
            flat_logprobs=True,
            logit_bias=self._never,
        )

    def _completion(self, output: Any, sampling: Sampling, told: int) -> Completion:
        columns = told + 1
        ids = np.array(output.token_ids, np.int32)
        table = np.array(output.logprobs.token_ids, np.int32)
        logprobs = np.array(output.logprobs.logprobs, np.float32)
        if table.shape != (len(ids) * columns,) or not np.array_equal(table[::columns], ids):
            raise XtkError("vLLM gives the log-probabilities of other tokens than it wrote", where=self._name)
        return completion_of(
            ids,
            logprobs[::columns],
            table.reshape(-1, columns)[:, 1:],
            isinstance(output.stop_reason, str),
            sampling,
            self._tokenizer,
        )

    def _reload(self, **weights: Any) -> None:
        try:
            self._engine.llm.collective_rpc("reload_weights", kwargs=weights)
        except Exception as wrong:
            raise self._engine.failed("vLLM cannot take these weights", wrong) from wrong

    def _forget(self) -> None:
        if not self._engine.llm.reset_prefix_cache():
            raise XtkError("vLLM does not forget what it read with the old weights", where=self._name)

    def _in_process(self) -> bool:
        from vllm.v1.engine.core_client import InprocClient

        engine = self._engine.llm.llm_engine
        return isinstance(engine.engine_core, InprocClient) and engine.vllm_config.parallel_config.world_size == 1

    def _sleeps(self) -> bool:
        return bool(self._engine.llm.llm_engine.model_config.enable_sleep_mode)


def _settings(request: WriterRequest) -> dict[str, Any]:
    import torch

    engine = engine_options(request.options.get("engine") or {})
    refuse_reserved(engine, RESERVED)
    return {
        "model": str(request.folder),
        "dtype": request.dtype,
        "trust_remote_code": request.trust_remote_code,
        "seed": 0,
        "max_logprobs": -1,  # as many as a call asks for
        "logprobs_mode": "raw_logprobs",
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # draws are from what the model says, with no penalties of its folder's
        **({"enable_sleep_mode": True} if torch.cuda.is_available() else {}),
        **engine,
    }


def _noted(weights: Iterable[tuple[str, Any]], seen: set[str]) -> Iterator[tuple[str, Any]]:
    for name, weight in weights:
        seen.add(name)
        yield name, weight.detach()
