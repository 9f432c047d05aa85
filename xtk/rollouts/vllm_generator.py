"""Generation by vLLM, in this process or in workers that it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from xtk.engines.backend import BackendConfig
from xtk.engines.vllm_engine import VllmEngine, import_vllm
from xtk.errors import XtkError
from xtk.rollouts.engine_request_checks import (
    MAX_LOGIT_BIASES,
    check_temperature,
    checked_completion,
    max_new_tokens,
    num_requested_top_ids,
    seed_from_key,
)
from xtk.rollouts.engine_weight_files import WeightNames
from xtk.rollouts.generator_interface import Completion, GenerationRequest, Generator, SamplingConfig

RESERVED_OPTIONS = {"model": "STUDENT", "tokenizer": "STUDENT", "generation_config": None}  # see VllmEngine


class VllmGenerator(Generator):
    """Generates completions with vLLM. Its prefix cache lives until the weights change.

    On a CPU vLLM claims the memory and threads of its process: use `xtk.rollouts.subprocess_generator` there.
    `config`: the model. Option `engine`: arguments of `vllm.LLM`, a mapping or `name=value` words.
    """

    has_engine_options: ClassVar[bool] = True

    def __init__(self, config: BackendConfig) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process fewer
        self._tokenizer, self._name = config.tokenizer, config.model.name
        settings = {
            "max_logprobs": -1,  # any number
            "use_tqdm_on_load": False,
            "generation_config": "vllm",  # ignore penalties in the model's generation_config.json
            **({"enable_sleep_mode": True} if torch.cuda.is_available() else {}),
        }
        self._engine = VllmEngine(config, "rollout", RESERVED_OPTIONS, settings)
        self._names = WeightNames.from_folder(config.model.folder)
        self._asleep = self._weights_missing = False
        padding = range(len(self._tokenizer), self._engine.vocab_size)
        # Embedding rows without a token must not be sampled. With too many for a bias, a sampled one is an error.
        self._padding_bias = dict.fromkeys(padding, -float("inf")) if 0 < len(padding) <= MAX_LOGIT_BIASES else None

    @classmethod
    def needs_subprocess(cls, engine: Mapping[str, Any]) -> bool:
        """Return true: vLLM claims memory, threads and process groups of its process."""
        return True

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and completion together."""
        return self._engine.max_model_len

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Completion]:
        """Return one completion per request, in order."""
        if self._asleep or self._weights_missing:
            raise XtkError(
                "the vLLM engine cannot generate: its weights were freed by sleep() and not loaded again",
                where=self._name,
                hint="call wake_up(), then update_weights(folder)",
            )
        check_temperature(sampling)
        if not requests:
            return []
        num_top_ids = num_requested_top_ids(sampling, self._tokenizer, self._engine.vocab_size)
        outputs = self._engine.generate(
            [{"prompt_token_ids": request.input_ids.tolist()} for request in requests],
            [self._sampling_params(request, sampling, num_top_ids) for request in requests],
            "generate",
        )
        return [self._completion(output.outputs[0], sampling, num_top_ids) for output in outputs]

    def update_weights(self, folder: Path) -> None:
        """Load weights from a folder that all workers see; clear the prefix cache."""
        if self._asleep:
            raise XtkError(
                "the weights of the vLLM engine cannot be updated while it sleeps",
                where=self._name,
                hint="call wake_up() first",
            )
        self._names.check_complete(WeightNames.from_folder(folder), str(folder))
        self._reload(folder)
        if self._weights_missing:  # after a sleep: the new weights are loaded before the memory of the cache is taken
            self._engine.llm.wake_up(tags=["kv_cache"])
            self._weights_missing = False
        self._reset_prefix_cache()

    def sleep(self) -> None:
        """Free the device's memory, weights included; on a CPU, do nothing."""
        if self._engine.llm.llm_engine.model_config.enable_sleep_mode and not self._asleep:
            self._engine.llm.sleep(level=2)
            self._asleep = self._weights_missing = True

    def wake_up(self) -> None:
        """Take the memory of the weights again; call `update_weights` next, which takes that of the cache."""
        if self._asleep:
            self._engine.llm.wake_up(tags=["weights"])
            self._asleep = False

    def close(self) -> None:
        """Stop the engine for good."""
        self._engine.close()

    def _sampling_params(self, request: GenerationRequest, sampling: SamplingConfig, num_top_ids: int) -> Any:
        greedy = sampling.temperature == 0
        return import_vllm().SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=max_new_tokens(request, sampling, self.context_length, self._name),
            seed=None if greedy else seed_from_key(request.seed_key),
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=True,  # stop strings do not match names of special tokens
            # Stop tokens are xtk's, not those of a generation_config.json.
            ignore_eos=True,
            stop_token_ids=sorted(self._tokenizer.stop_ids),
            logprobs=num_top_ids,
            flat_logprobs=True,
            logit_bias=self._padding_bias,
        )

    def _completion(self, output: Any, sampling: SamplingConfig, num_top_ids: int) -> Completion:
        columns = num_top_ids + 1
        ids = np.array(output.token_ids, np.int32)
        table = np.array(output.logprobs.token_ids, np.int32)
        logprobs = np.array(output.logprobs.logprobs, np.float32)
        if table.shape != (len(ids) * columns,) or not np.array_equal(table[::columns], ids):
            raise XtkError(
                "vLLM returned log-probabilities of other tokens than it sampled",
                where=self._name,
                hint="use the vLLM version of pip install '.[vllm]' in xtk's repository, or the backend transformers",
            )
        return checked_completion(
            ids,
            logprobs[::columns],
            table.reshape(-1, columns)[:, 1:],
            isinstance(output.stop_reason, str),
            sampling,
            self._tokenizer,
        )

    def _reload(self, folder: Path) -> None:
        try:
            self._engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        except Exception as error:
            raise self._engine.error("vLLM cannot load the new weights of the student", error) from error

    def _reset_prefix_cache(self) -> None:
        if not self._engine.llm.reset_prefix_cache():
            raise XtkError(
                "vLLM could not clear its prefix cache after the weight update",
                where=self._name,
                hint="wait until all generation requests are finished before update_weights()",
            )
