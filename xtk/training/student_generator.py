"""The student as it is now, writing: by its own model, or by an engine that is told its weights."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from xtk.artifacts.atomic_files import TEMPORARY_PREFIX
from xtk.errors import XtkError
from xtk.models.causal_lm import BackboneWithHead
from xtk.rewards.reward_spec import WeightedRewards
from xtk.rollouts.environments import load_environment
from xtk.rollouts.generator_interface import Generator, GeneratorConfig
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.rollouts.rollout_generation import generate_rollouts
from xtk.rollouts.weight_sync import write_tied_head
from xtk.subprocesses import cuda_visible_devices
from xtk.tokens.tokenizer import Tokenizer
from xtk.training import distributed
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.parallel_config import ParallelConfig

IN_PROCESS_BACKEND = "transformers"
WEIGHTS_FOLDER = f"{TEMPORARY_PREFIX}weights"


def check_generation_backend(on_policy: OnPolicyConfig, parallel: ParallelConfig) -> None:
    """Refuse a model that cannot write in the way in which it is cut.

    Raises:
        XtkError: it is cut over processes, and is to write itself.
    """
    if on_policy.backend == IN_PROCESS_BACKEND and parallel.is_sharded:
        raise XtkError(
            f"a student that is cut over processes ({parallel}) does not write itself: all would have to take each "
            f"token "
            "together",
            hint="--rollout-backend vllm or server, which is told the weights; or replicas, --parallel dp=N",
        )


class StudentGenerator:
    """Has the student write, as it is when it is asked; each process of a run has one.

    A student that writes itself needs nothing else. An engine is opened with the student's folder, in a process of its
    own, since it binds memory, threads and process groups; it is told new weights before each round but the first, and
    sleeps between rounds where it shares the student's device.

    Args:
        on_policy: how it writes.
        tokenizer: its own.
        cut: its model, of which this process has all, if it writes itself.
        request: opens an engine.
        save: writes the student's weights, as they are, into a folder; all processes call it.
        output: the run's folder.
        mixed_precision: of the run.
        seed: of the draws.

    Attributes:
        main_process_only: whether the first process writes for all: the engine has devices of its own, or is a server.
    """

    def __init__(
        self,
        on_policy: OnPolicyConfig,
        tokenizer: Tokenizer,
        student: BackboneWithHead,
        config: GeneratorConfig,
        save_weights: Callable[[Path], None],
        output: Path,
        *,
        mixed_precision: str,
        seed: int,
    ) -> None:
        self._on_policy, self._tokenizer, self._device = on_policy, tokenizer, student.model.device
        self._save, self._folder = save_weights, output / WEIGHTS_FOLDER
        self._precision, self._seed = mixed_precision, seed
        self._rewards = WeightedRewards(on_policy.rewards) if on_policy.rewards else None
        self._environment = load_environment(on_policy.environment) if on_policy.environment else None
        self.main_process_only = bool(on_policy.devices) or on_policy.backend == "server"
        self._may_be_sent_again = on_policy.backend == "server"  # to one that was restarted within a round
        self._shares_device = self._device.type == "cuda" and on_policy.backend == "vllm" and not on_policy.devices
        self._generator = (
            None if self.main_process_only and not distributed.is_main_process() else self._opened(config, student)
        )
        self._asleep = False

    def _opened(self, request: GeneratorConfig, cut: BackboneWithHead) -> Generator:
        if self._on_policy.backend == IN_PROCESS_BACKEND:
            from xtk.rollouts.transformers_generator import TransformersGenerator

            return TransformersGenerator(cut.model, self._tokenizer, batch_tokens=request.batch_tokens)
        if self._on_policy.backend == "server":
            from xtk.rollouts.server_generator import ServerGenerator

            return ServerGenerator.open(request)
        from xtk.rollouts.subprocess_generator import SubprocessGenerator

        return SubprocessGenerator(
            request, "vllm", cuda_visible_devices(self._on_policy.devices) if self._on_policy.devices else None
        )

    def sync_weights(self, step: int) -> None:
        """Tell an engine the weights; all processes call it, before a round.

        Args:
            step: how many were taken; before the first the engine has them.
        """
        if self._on_policy.backend == IN_PROCESS_BACKEND:
            return
        if self._generator is not None and self._asleep:
            self._generator.wake_up()
        # A server may have those of another run.
        if not step and not self._asleep and self._on_policy.backend != "server":
            return
        self._asleep = False
        self._save(self._folder)
        if distributed.is_main_process():
            write_tied_head(self._folder)
        distributed.barrier()
        if self._generator is not None:
            self._generator.update_weights(self._folder)
        distributed.barrier()
        if not self._may_be_sent_again:
            self._remove_weights()

    def generate(self, prompts: Sequence[Prompt], times_taken: int) -> list[Rollout]:
        """Return what the student makes of prompts.

        Args:
            prompts: of this process.
            times_taken: how often they were taken before.
        """
        if self._generator is None:
            raise RuntimeError("another process writes")
        with autocast(self._precision, self._device):
            return generate_rollouts(
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

    def _remove_weights(self) -> None:
        if distributed.is_main_process():
            shutil.rmtree(self._folder, ignore_errors=True)

    def sleep(self) -> None:
        """Give the device back to the student, where the engine shares it; it has no weights then."""
        self._remove_weights()
        if self._generator is not None and self._shares_device:
            self._generator.sleep()
            self._asleep = True

    def close(self) -> None:
        """End a process that was started for this."""
        if (close := getattr(self._generator, "close", None)) is not None:
            close()

    def describe(self, num_processes: int) -> str:
        """Say who writes, and where.

        Args:
            num_processes: processes of the run.
        """
        devices = "+".join(map(str, self._on_policy.devices))
        where = f"in {num_processes} process(es), with the student"
        if self._on_policy.backend == "server":
            where = f"at {', '.join(self._on_policy.server)}"
        elif self.main_process_only:
            where = f"in a process of its own, on {f'cuda {devices}' if self._device.type == 'cuda' else 'the CPU'}"
        elif self._shares_device:
            where = f"in {num_processes} process(es) of its own, asleep while the student trains"
        return f"{self._on_policy.backend} writes, {where}"


@contextlib.contextmanager
def autocast(mixed_precision: str, device: torch.device) -> Iterator[Any]:
    """Compute as a run computes: "no", or "bf16"."""
    if mixed_precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        yield
