"""The student as it is now, writing: by its own model, or by an engine that is told its weights."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from xtk.artifacts.files import TEMPORARY
from xtk.children import visible
from xtk.errors import XtkError
from xtk.models.causal_lm import Cut
from xtk.rewards.specification import Rewards
from xtk.rollouts.environments import environment_of
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.rollouts.weights import add_head
from xtk.rollouts.writer import Writer, WriterRequest
from xtk.rollouts.writing import write_rollouts
from xtk.tokens.tokenizer import Tokenizer
from xtk.training import processes
from xtk.training.layout import Layout
from xtk.training.on_policy import OnPolicy

OWN = "transformers"
WEIGHTS = f"{TEMPORARY}weights"


def check_writer(on_policy: OnPolicy, layout: Layout) -> None:
    """Refuse a model that cannot write in the way in which it is cut.

    Raises:
        XtkError: it is cut over processes, and is to write itself.
    """
    if on_policy.backend == OWN and layout.sharded:
        raise XtkError(
            f"a student that is cut over processes ({layout}) does not write itself: all would have to take each token "
            "together",
            hint="--rollout-backend vllm or server, which is told the weights; or replicas, --parallel dp=N",
        )


class StudentWriter:
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
        alone: whether the first process writes for all: the engine has devices of its own, or is a server.
    """

    def __init__(
        self,
        on_policy: OnPolicy,
        tokenizer: Tokenizer,
        cut: Cut,
        request: WriterRequest,
        save: Callable[[Path], None],
        output: Path,
        *,
        mixed_precision: str,
        seed: int,
    ) -> None:
        self._on_policy, self._tokenizer, self._device = on_policy, tokenizer, cut.model.device
        self._save, self._folder = save, output / WEIGHTS
        self._precision, self._seed = mixed_precision, seed
        self._rewards = Rewards(on_policy.rewards) if on_policy.rewards else None
        self._environment = environment_of(on_policy.environment) if on_policy.environment else None
        self.alone = bool(on_policy.devices) or on_policy.backend == "server"
        self._may_be_sent_again = on_policy.backend == "server"  # to one that was restarted within a round
        self._shares = self._device.type == "cuda" and on_policy.backend == "vllm" and not on_policy.devices
        self._writer = None if self.alone and not processes.is_first() else self._opened(request, cut)
        self._resting = False

    def _opened(self, request: WriterRequest, cut: Cut) -> Writer:
        if self._on_policy.backend == OWN:
            from xtk.rollouts.transformers import TransformersWriter

            return TransformersWriter(cut.model, self._tokenizer, batch_tokens=request.batch_tokens)
        if self._on_policy.backend == "server":
            from xtk.rollouts.server import ServerWriter

            return ServerWriter.open(request)
        from xtk.rollouts.apart import Apart

        return Apart(request, "vllm", visible(self._on_policy.devices) if self._on_policy.devices else None)

    def renew(self, step: int) -> None:
        """Tell an engine the weights; all processes call it, before a round.

        Args:
            step: how many were taken; before the first the engine has them.
        """
        if self._on_policy.backend == OWN:
            return
        if self._writer is not None and self._resting:
            self._writer.wake()
        # A server may have those of another run.
        if not step and not self._resting and self._on_policy.backend != "server":
            return
        self._resting = False
        self._save(self._folder)
        if processes.is_first():
            add_head(self._folder)
        processes.wait()
        if self._writer is not None:
            self._writer.update(self._folder)
        processes.wait()
        if not self._may_be_sent_again:
            self._remove_weights()

    def write(self, prompts: Sequence[Prompt], before: int) -> list[Rollout]:
        """Return what the student makes of prompts.

        Args:
            prompts: of this process.
            before: how often they were taken before.
        """
        if self._writer is None:
            raise RuntimeError("another process writes")
        with precision(self._precision, self._device):
            return write_rollouts(
                prompts,
                self._writer,
                self._tokenizer,
                self._on_policy.sampling,
                num_generations=self._on_policy.num_generations,
                seed=self._seed + before,
                rewards=self._rewards,
                environment=self._environment,
                max_turns=self._on_policy.max_turns,
                scale_rewards=self._on_policy.scale_rewards,
                template_arguments=self._on_policy.chat_template_kwargs,
            )

    def _remove_weights(self) -> None:
        if processes.is_first():
            shutil.rmtree(self._folder, ignore_errors=True)

    def rest(self) -> None:
        """Give the device back to the student, where the engine shares it; it has no weights then."""
        self._remove_weights()
        if self._writer is not None and self._shares:
            self._writer.rest()
            self._resting = True

    def close(self) -> None:
        """End a process that was started for this."""
        if (close := getattr(self._writer, "close", None)) is not None:
            close()

    def plan(self, count: int) -> str:
        """Say who writes, and where.

        Args:
            count: processes of the run.
        """
        devices = "+".join(map(str, self._on_policy.devices))
        where = f"in {count} process(es), with the student"
        if self._on_policy.backend == "server":
            where = f"at {', '.join(self._on_policy.server)}"
        elif self.alone:
            where = f"in a process of its own, on {f'cuda {devices}' if self._device.type == 'cuda' else 'the CPU'}"
        elif self._shares:
            where = f"in {count} process(es) of its own, asleep while the student trains"
        return f"{self._on_policy.backend} writes, {where}"


@contextlib.contextmanager
def precision(mixed_precision: str, device: torch.device) -> Iterator[Any]:
    """Compute as a run computes: "no", or "bf16"."""
    if mixed_precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        yield
