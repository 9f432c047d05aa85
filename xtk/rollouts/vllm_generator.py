"""A student that writes by vLLM, in this process or in workers that it starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xtk.engines.engine_options import check_not_reserved, parse_engine_options
from xtk.engines.vllm_engine import VllmEngine, import_vllm
from xtk.errors import XtkError
from xtk.rollouts.completion_checks import (
    MAX_LOGIT_BIASES,
    check_temperature,
    checked_completion,
    max_new_tokens,
    num_requested_top_ids,
    seed_from_key,
)
from xtk.rollouts.generator_interface import Completion, GenerationRequest, GeneratorConfig, SamplingConfig
from xtk.rollouts.weight_sync import WeightNames, save_weights, with_tied_head

# What xtk says itself, and where the user says it.
RESERVED_ENGINE_OPTIONS = {
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


class VllmGenerator:
    """Writes with vLLM. It keeps what it read of prompts for those that begin alike, until the weights change.

    On a CPU vLLM binds the memory and the threads of its process: `xtk.rollouts.subprocess_generator` gives it one of
        its own.

    Args:
        request: the model. Of its options `engine` goes to `vllm.LLM`: a mapping, or `name=value` words.

    Raises:
        XtkError: vLLM is not installed, or cannot run this model.
    """

    def __init__(self, config: GeneratorConfig) -> None:
        # In this process, weights are told from memory to memory.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._tokenizer, self._name = config.tokenizer, config.name
        self._engine = VllmEngine(_engine_settings(config), config.name, "rollout")
        self._names = WeightNames.from_folder(config.folder)
        self._asleep = self._forgotten = False
        padding = range(len(self._tokenizer), self._engine.vocab_size)
        # Rows that no token has. With more of them than vLLM takes, one that is drawn is refused.
        self._padding_bias = dict.fromkeys(padding, -float("inf")) if 0 < len(padding) <= MAX_LOGIT_BIASES else None

    @classmethod
    def open(cls, config: GeneratorConfig) -> Self:
        """Start vLLM, as the class says."""
        return cls(config)

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and completion together."""
        return self._engine.max_model_len

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
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
        check_temperature(sampling)
        if not requests:
            return []
        told = num_requested_top_ids(sampling, self._tokenizer, self._engine.vocab_size)
        outputs = self._engine.generate(
            [{"prompt_token_ids": ask.input_ids.tolist()} for ask in requests],
            [self._sampling_params(ask, sampling, told) for ask in requests],
            "write",
        )
        return [self._completion(output.outputs[0], sampling, told) for output in outputs]

    def update_weights(self, weights: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Take new weights, and forget what was kept of the old ones.

        Args:
            weights: a folder, which all workers see, or pairs of a name and a tensor; they are read one by one.

        Raises:
            XtkError: one is missing, or the engine refuses them. Then it may have some of each.
        """
        if self._asleep:
            raise XtkError("the engine was told weights while it rests", where=self._name, hint="wake() first")
        if isinstance(weights, str | Path):
            self._names.check_complete(WeightNames.from_folder(Path(weights)), str(weights))
            self._reload(weights_path=str(weights))
        elif self._in_process():
            seen: set[str] = set()
            self._reload(weights_iterator=_noted(with_tied_head(weights), seen))
            self._names.check_complete(WeightNames(frozenset(seen)), "the weights that were told")
        else:
            with tempfile.TemporaryDirectory() as folder:
                save_weights(weights, Path(folder))
                self.update_weights(folder)
            return
        self._forgotten = False
        self._forget()

    def sleep(self) -> None:
        """Give the device's memory back, weights and all; on a CPU, nothing."""
        if self._sleeps() and not self._asleep:
            self._engine.llm.sleep(level=2)
            self._asleep = self._forgotten = True

    def wake_up(self) -> None:
        """Take the memory again; then weights have to be told, if `rest` gave any back."""
        if self._asleep:
            self._engine.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Stop the engine; nothing can be written any more."""
        self._engine.close()

    def _sampling_params(self, ask: GenerationRequest, sampling: SamplingConfig, told: int) -> Any:
        greedy = sampling.temperature == 0
        return import_vllm().SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=max_new_tokens(ask, sampling, self.context_length, self._name),
            seed=None if greedy else seed_from_key(ask.seed_key),
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=True,  # their names are no text that was written
            # The tokens that end are xtk's, not those of a generation_config.json.
            ignore_eos=True,
            stop_token_ids=sorted(self._tokenizer.end_ids),
            logprobs=told,
            flat_logprobs=True,
            logit_bias=self._padding_bias,
        )

    def _completion(self, output: Any, sampling: SamplingConfig, told: int) -> Completion:
        columns = told + 1
        ids = np.array(output.token_ids, np.int32)
        table = np.array(output.logprobs.token_ids, np.int32)
        logprobs = np.array(output.logprobs.logprobs, np.float32)
        if table.shape != (len(ids) * columns,) or not np.array_equal(table[::columns], ids):
            raise XtkError("vLLM gives the log-probabilities of other tokens than it wrote", where=self._name)
        return checked_completion(
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
            raise self._engine.error("vLLM cannot take these weights", wrong) from wrong

    def _forget(self) -> None:
        if not self._engine.llm.reset_prefix_cache():
            raise XtkError("vLLM does not forget what it read with the old weights", where=self._name)

    def _in_process(self) -> bool:
        from vllm.v1.engine.core_client import InprocClient

        engine = self._engine.llm.llm_engine
        return isinstance(engine.engine_core, InprocClient) and engine.vllm_config.parallel_config.world_size == 1

    def _sleeps(self) -> bool:
        return bool(self._engine.llm.llm_engine.model_config.enable_sleep_mode)


def _engine_settings(request: GeneratorConfig) -> dict[str, Any]:
    import torch

    engine = parse_engine_options(request.options.get("engine") or {})
    check_not_reserved(engine, RESERVED_ENGINE_OPTIONS)
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
