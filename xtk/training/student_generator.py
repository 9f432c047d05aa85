"""Generation with the current student: with its model in this process, or with an engine that gets its weights.

The log-probabilities of an engine are compared with the student's own.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xtk import terminal
from xtk.batches.micro_batches import pad_or_pack
from xtk.engines.backend import BackendConfig, backends_with, engine_beside_student
from xtk.errors import MismatchError, XtkError
from xtk.files.atomic_files import TEMPORARY_PREFIX
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import free_device_memory, load_model_config, max_context_length
from xtk.models.output_head import OutputHead, compute_token_logprobs
from xtk.models.student_model_setup import StudentModelConfig, is_peft_model
from xtk.parallel import process_group
from xtk.parallel.parallel_config import ParallelConfig
from xtk.rewards.reward_spec import WeightedRewards
from xtk.rollouts import GENERATORS
from xtk.rollouts.engine_weight_files import write_tied_head
from xtk.rollouts.environments import load_environment
from xtk.rollouts.generator_interface import Generator
from xtk.rollouts.prompts import tokenize_prompts
from xtk.rollouts.rollout_generation import generate_rollouts
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.rollouts.subprocess_generator import SubprocessGenerator, folder_in_shared_memory
from xtk.subprocesses import cuda_visible_devices
from xtk.text.tokenizer import Tokenizer
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.student_with_losses import TokenBatch, forward_student, reshard_weights

WEIGHTS_FOLDER = f"{TEMPORARY_PREFIX}weights"


def check_generation_backend(on_policy: OnPolicyConfig, parallel: ParallelConfig) -> None:
    """Raise XtkError if a backend that runs the model in training is used with a sharded student."""
    if on_policy.backend_class.runs_loaded_model and parallel.is_sharded:
        others = backends_with(GENERATORS, lambda one: not one.runs_loaded_model)
        raise XtkError(
            f"--rollout-backend {on_policy.backend} needs an unsharded student, and --parallel is {parallel}",
            hint=f"use --rollout-backend {others}, or --parallel dp=N",
        )


def check_engine_can_load(on_policy: OnPolicyConfig, student: StudentModelConfig) -> None:
    """Refuse a student whose weights a separate engine or server cannot load."""
    if on_policy.backend_class.runs_loaded_model or not student.is_quantized:
        return
    raise XtkError(
        f"--rollout-backend {on_policy.backend} cannot load weights with --load-in-4bit or --load-in-8bit",
        hint="use --rollout-backend transformers, or remove this option",
    )


class StudentGenerator:
    """Generates rollouts with the current student; each process of a run has one.

    The transformers backend uses the training model itself. An engine (vllm) is started from the student's folder in a
    separate process. It gets new weights before each rollout batch except the first, and sleeps between batches if it
    shares the student's device. `save_weights` writes the current weights into a folder, in a dtype or its own
    (collective).
    """

    def __init__(
        self,
        on_policy: OnPolicyConfig,
        tokenizer: Tokenizer,
        student: BackboneWithHead,
        device: torch.device,
        config: BackendConfig,
        save_weights: Callable[[Path, torch.dtype | None], None],
        output: Path,
        prompts: Sequence[Prompt],
        *,
        mixed_precision: str,
        seed: int,
    ) -> None:
        self._on_policy, self._tokenizer, self._device = on_policy, tokenizer, device
        self._save, self._run_folder = save_weights, output / WEIGHTS_FOLDER
        self._shared: TemporaryDirectory[str] | None = None  # of the main process
        self._num_bytes = 4 * sum(weight.numel() for weight in student.model.parameters())
        self._precision, self._seed = mixed_precision, seed
        self._rewards = WeightedRewards(on_policy.rewards) if on_policy.rewards else None
        self._environment = load_environment(on_policy.environment) if on_policy.environment else None
        self._backend = on_policy.backend_class
        self._has_adapter = is_peft_model(student.model)
        # Whether it generates with the model in training itself, not with a copy of its weights.
        self.uses_training_model = self._backend.runs_loaded_model
        # Whether the main process generates for all: the engine has separate GPUs or is a server.
        self.main_process_only = bool(on_policy.devices) or self._backend.uses_servers
        self._in_subprocess = self._backend.needs_subprocess(on_policy.engine)
        self._shares_device = self._device.type == "cuda" and self._in_subprocess and not on_policy.devices
        self._generator, self._prompts, self._prompt_lengths = None, prompts, list[int]()
        if process_group.is_main_process() or not self.main_process_only:
            if self._environment is None:  # an environment may send the first message
                documents = [prompt.document for prompt in prompts]
                tokens = tokenize_prompts(tokenizer, documents, on_policy.chat_template_kwargs)
                self._prompt_lengths = list(map(len, tokens))
            self._generator = self._open_generator(config, student)
        self._asleep = self._has_scored = False
        process_group.barrier()  # the main process may have started an engine for all

    def _open_generator(self, config: BackendConfig, student: BackboneWithHead) -> Generator:
        if self.uses_training_model:
            return self._backend.open(replace(config, options={"model": student.model}))
        if not self._in_subprocess:
            return self._backend.open(config)
        engine = dict(self._on_policy.engine)
        if self._environment is None:
            context = max_context_length(load_model_config(config.model))
            longest = max(self._prompt_lengths, default=0) + self._on_policy.sampling.max_completion_length
            engine.setdefault("max_model_len", longest if context is None else min(longest, context))
        if self._shares_device:
            engine = engine_beside_student(engine)
        config = replace(config, options={**config.options, "engine": engine})
        devices = list(self._on_policy.devices)
        if self._shares_device and process_group.world_size() > 1:  # an engine takes the first device that it sees
            devices = [torch.cuda.current_device() if self._device.index is None else self._device.index]
        return SubprocessGenerator(config, self._on_policy.backend, cuda_visible_devices(devices) if devices else None)

    def check_prompts(self, max_length: int, *, may_truncate: bool) -> None:
        """Refuse prompts that leave no space for a completion in `max_length` tokens, 0: the context length."""
        limit = None if self._generator is None else self._generator.context_length
        if self._generator is None or self._environment is not None:
            return
        prompts, lengths = self._prompts, self._prompt_lengths
        completion = self._on_policy.sampling.max_completion_length
        longest = max(lengths) + completion if limit is None else min(max(lengths) + completion, limit)
        if max_length and not may_truncate and longest > max_length:
            raise XtkError(
                f"a rollout may have {longest:,} tokens, more than --max-length {max_length:,}",
                where=f"prompts of up to {max(lengths):,} tokens, --max-completion-length {completion:,}",
                hint="use a larger --max-length or a smaller --max-completion-length; or --long-documents truncate",
            )
        if limit is None:
            return
        too_long = [prompt.number for prompt, length in zip(prompts, lengths, strict=True) if length >= limit]
        if too_long:
            raise XtkError(
                f"{len(too_long):,} of {len(prompts):,} prompts leave no space for a completion in the student's "
                f"context of {limit:,} tokens",
                where=f"row {too_long[0]} of the data",
                hint="remove or shorten these prompts; with --rollout-engine max_model_len=N, use a larger N",
            )

    def sync_weights(self, step: int) -> None:
        """Send the student's current weights to the engine, before a rollout batch (collective).

        At step 0, a vllm engine already has the weights of a student without an adapter.
        """
        if self.uses_training_model:
            return
        if self._generator is not None and self._asleep:
            # Memory that torch keeps after a training step would not be free for the engine.
            free_device_memory()
            self._generator.wake_up()
        # A server may still have the weights of another run, and an engine loads the model without its adapter.
        if not step and not self._asleep and not self._backend.uses_servers and not self._has_adapter:
            return
        self._asleep = False
        weights = self._new_weights_folder() / "weights"
        self._save(weights, None if self._backend.uses_servers else getattr(torch, self._on_policy.dtype))
        if process_group.is_main_process():
            write_tied_head(weights)
        process_group.barrier()
        if self._generator is not None:
            self._generator.update_weights(weights)
        process_group.barrier()
        if not self._backend.uses_servers:  # a server may restart within a batch
            self._remove_weights()

    def generate(self, prompts: Sequence[Prompt], times_taken: int) -> list[Rollout]:
        """Return rollouts of prompts; `times_taken`, how often they were used before, changes the sampling seed."""
        if self._generator is None:
            raise RuntimeError("only the main process has a generator; call generate there")
        with autocast(self._precision, self._device):
            rollouts = generate_rollouts(
                prompts,
                self._generator,
                self._tokenizer,
                self._on_policy.sampling,
                num_generations=self._on_policy.num_generations,
                seed=self._seed + times_taken,
                rewards=self._rewards,
                environment=self._environment,
                max_turns=self._on_policy.max_turns,
                scale_rewards=self._on_policy.scale_rewards,
                template_arguments=self._on_policy.chat_template_kwargs,
            )
        if self._rewards is not None and not self._has_scored and rollouts:
            self._has_scored = any(math.isfinite(rollout.reward) for rollout in rollouts)
            if not self._has_scored:
                names = ", ".join(map(str, self._rewards.specs))
                terminal.note(f"distill: warning: none of {len(rollouts):,} completions was scored by --reward {names}")
        return rollouts

    def _new_weights_folder(self) -> Path:
        """Return a folder for weights: in shared memory if it has space and all engines see it (collective)."""
        if process_group.is_main_process():
            self._shared = None if self._backend.uses_servers else folder_in_shared_memory(self._num_bytes)
            self._run_folder.mkdir(exist_ok=True)
        first = Path(process_group.all_gather_object(self._shared.name if self._shared else self._run_folder)[0])
        sees = process_group.all_gather_object(self._generator is None or first.is_dir())
        return first if all(sees) else self._run_folder

    def _remove_weights(self) -> None:
        if process_group.is_main_process():
            shutil.rmtree(self._run_folder, ignore_errors=True)
            if self._shared is not None:
                self._shared.cleanup()

    def sleep(self) -> None:
        """Put an engine that shares the student's device to sleep, which drops its weights."""
        self._remove_weights()
        if self._generator is not None and self._shares_device:
            self._generator.sleep()
            self._asleep = True

    def close(self) -> None:
        """End the engine's process, if there is one."""
        if self._generator is not None:
            self._generator.close()

    def describe(self, num_processes: int) -> str:
        """Return the backend and where it runs."""
        devices = "+".join(map(str, self._on_policy.devices))
        where = f"in {num_processes} training process(es)"
        if self._backend.uses_servers:
            where = f"at {', '.join(self._on_policy.server)}"
        elif self.main_process_only:
            where = f"in a separate process on {f'GPU {devices}' if self._device.type == 'cuda' else 'the CPU'}"
        elif self._shares_device:
            where = f"in {num_processes} separate process(es), which sleep during training"
        if self.uses_training_model and self._device.type == "cuda":
            where += "; on a GPU --rollout-backend vllm is faster"
        return f"generation with {self._on_policy.backend} {where}"


@contextlib.contextmanager
def autocast(mixed_precision: str, device: torch.device) -> Iterator[Any]:
    """Autocast to bfloat16 with "bf16"; do nothing with "no"."""
    if mixed_precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        yield


ROLLOUTS_TO_COMPARE = 4
# Mean absolute differences, nats per token. Measured with equal weights: float32 1e-7 to 1e-6, an engine in bfloat16
# 0.034 on small models with random weights. The output head of one step before: 0.004 to 0.01 there, up to 2 later.
# On a GPU vLLM's attention rounds the products of float32 to TF32, as xtk does not: up to about 0.001.
MAX_DIFFERENCE, MAX_DIFFERENCE_FLOAT32, MAX_DIFFERENCE_TF32 = 0.1, 0.001, 0.01
FLOAT32_DIFFERENCE = 1e-4  # an engine this close computes in float32: from then on the stricter bound applies


def max_difference_in_float32(device: torch.device) -> float:
    """Return the bound for an engine that computes in float32 on a device."""
    return MAX_DIFFERENCE_FLOAT32 if device.type == "cpu" else MAX_DIFFERENCE_TF32


class LogprobCheck:
    """Checks the engine's log-probabilities on a few rollouts of each batch, before the first step (collective)."""

    def __init__(self, model: nn.Module, parallel: ParallelConfig, packing_multiple: int, device: torch.device) -> None:
        self._model, self._layout, self._packing, self._device = model, parallel, packing_multiple, device
        self.max_difference = MAX_DIFFERENCE

    def __call__(self, rollouts: Sequence[Rollout]) -> float | None:
        """Return the mean absolute difference in nats over the sampled tokens of a few rollouts; None: no tokens."""
        usable = [rollout for rollout in rollouts if rollout.unusable_reason != "not finite"]
        step = max(1, (len(usable) - 1) // (ROLLOUTS_TO_COMPARE - 1))
        some = usable[::step][:ROLLOUTS_TO_COMPARE]
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        total, count = 0.0, 0.0
        with torch.no_grad():
            for rollout in some:
                one_difference, tokens = self._difference(rollout)
                total, count = total + one_difference, count + tokens
        for module, mode in modes.items():
            module.training = mode
        reshard_weights(self._model)
        sums = torch.tensor([total, count], dtype=torch.float64, device=self._device)
        total, count = self._layout.all_reduce_sum(sums, "copies").tolist()
        if not count:
            return None
        difference: float = total / count
        if not math.isfinite(difference):
            raise XtkError(
                "the student's log-probabilities of its rollouts are not finite",
                where=f"{len(some)} compared rollouts, before the first training step on them",
                hint="use a smaller --learning-rate, or --mixed-precision no",
            )
        if not difference <= self.max_difference:
            is_tf32 = self.max_difference == MAX_DIFFERENCE_TF32
            raise MismatchError(
                f"the engine's log-probabilities differ from the student's by {difference:.3g} nats per token "
                f"on average, more than {self.max_difference:g}: the engine does not have the student's weights",
                where=f"{len(some)} compared rollouts, before the first training step on them",
                hint="check that no other run sends weights to this server and that --rollout-dtype and "
                "--rollout-engine do not quantize or change the model; or use --rollout-backend transformers"
                + ("; TF32, in which vLLM's attention on a GPU computes, explains about 0.001" if is_tf32 else ""),
            )
        if difference <= FLOAT32_DIFFERENCE:
            self.max_difference = max_difference_in_float32(self._device)
        return difference

    def _difference(self, rollout: Rollout) -> tuple[float, int]:
        """Return the sum of absolute differences (nats) over this process's sampled tokens, and their number."""
        stored = rollout.document.sampled_tokens
        assert stored is not None
        sampled = np.flatnonzero(stored.sampled_mask)
        sampled = sampled[sampled > 0]
        ids, (start,), lengths = pad_or_pack([stored.ids], self._packing)
        expected = stored.logprobs[sampled].astype(np.float64)
        targets = stored.ids[sampled].astype(np.int64)
        differences: list[float] = []

        def compare(states: Tensor, here: NDArray[np.int64], head: OutputHead) -> None:
            logprobs, _ = compute_token_logprobs(states, head, torch.from_numpy(targets[here]).to(states.device))
            differences.extend(np.abs(logprobs.cpu().numpy() - expected[here]).tolist())

        forward_student(
            self._model, TokenBatch(ids, lengths, sampled - 1 + start), (), self._layout, self._device, compare
        )
        return float(np.sum(differences)), len(differences)
