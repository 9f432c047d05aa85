"""Options of on-policy training, sampling of prompts, and weights of rollouts by their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.batches.micro_batches import BatchSampler
from xtk.engines.backend import backends_with, check_backend_options
from xtk.errors import XtkError
from xtk.name_registry import load_registered
from xtk.options.declaration import check_options
from xtk.options.training_options import OnPolicyOptions
from xtk.rewards.reward_spec import RewardSpec, paths_as_checksums
from xtk.rollouts import GENERATORS
from xtk.rollouts.generator_interface import Generator, SamplingConfig
from xtk.rollouts.prompts import PromptFormat


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(OnPolicyOptions):
    """Options of on-policy training: how the student generates completions, and how they are used."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # temperature and other sampling options
    rewards: tuple[RewardSpec, ...] = ()  # the rewards of completions
    scale_rewards: bool = True  # whether advantages are divided by the standard deviation of a prompt's rewards
    # Jinja template that builds prompts from the fields of a record; "": records have prompts
    prompt_template: str = ""
    apply_chat_template: bool = False  # wrap plain-text prompts as a user message in the student's chat template
    # Additional arguments of the student's chat template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""  # class of a multi-turn environment, `FILE.py:CLASS`; "": none
    max_turns: int = 1  # maximum number of student turns
    backend: str = "transformers"  # generation backend: a key of `GENERATORS`
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of the vllm backend
    server: tuple[str, ...] = ()  # URLs for the server backend
    dtype: str = "float32"  # dtype of a generation engine; the transformers backend uses the dtype of training
    # Maximum number of tokens to generate with at a time, padding included (transformers backend)
    batch_tokens: int = 16384
    devices: tuple[int, ...] = ()  # GPUs of a vllm engine; none: it alternates with training on the student's GPUs

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_turns < 1:
            raise XtkError(f"--max-turns is {self.max_turns}, but must be at least 1", hint="use --max-turns 1 or more")
        if self.reward_beta and not self.rewards:
            raise XtkError("--reward-beta needs --reward", hint="add for example --reward gsm8k")
        backend = self.backend_class
        if self.devices and not backend.needs_subprocess(self.engine):
            able = backends_with(GENERATORS, lambda one: one.needs_subprocess({}))
            raise XtkError(
                f"--devices rollout=... needs --rollout-backend {able}",
                hint=f"add --rollout-backend {able}, or remove rollout=... from --devices",
            )
        check_backend_options(GENERATORS, self.backend, engine=self.engine, servers=self.server, prefix="--rollout-")

    @property
    def backend_class(self) -> type[Generator]:
        """The class of the generation backend."""
        backend: type[Generator] = load_registered(GENERATORS, self.backend, "rollout backend")
        return backend

    @property
    def prompt_format(self) -> PromptFormat:
        """How prompts are built from records."""
        return PromptFormat(self.prompt_template, as_chat=self.apply_chat_template)

    @property
    def steps_per_rollout_batch(self) -> int:
        """Training steps per rollout batch, counting repeated passes."""
        return self.steps_per_generation * self.num_iterations

    def describe(self, generator: str) -> str:
        """Return a line that describes a rollout batch."""
        return (
            f"each rollout batch has {self.steps_per_generation} step(s), {self.num_iterations} pass(es) and "
            f"{self.num_generations} completion(s) per prompt; {generator}"
        )

    def identity(self) -> dict[str, Any]:
        """Return the options that decide whether two runs are the same."""
        speed = ("batch_tokens", "devices", "server")
        content = {name: value for name, value in asdict(self).items() if name not in speed}
        content["sampling"]["stop"] = list(self.sampling.stop)
        content["environment"] = paths_as_checksums(self.environment)
        rewards = [paths_as_checksums(str(reward)) for reward in self.rewards]
        return {**content, "rewards": rewards, "engine": dict(self.engine)}

    def check_batch(self, documents_per_step: int) -> None:
        """Check that each step has all completions of its prompts."""
        if documents_per_step % self.num_generations:
            raise XtkError(
                f"the documents per step ({documents_per_step}) must be a multiple of --num-generations "
                f"{self.num_generations}",
                hint="change --per-device-train-batch-size or --gradient-accumulation-steps: documents per step are "
                "their product, times the number of data-parallel processes",
            )


class PromptSampler(BatchSampler):
    """Chooses the documents of each step: rollouts of sampled prompts, or documents of the data.

    With n completions for each of P prompts, the completions of prompt p are documents `p n` to `p n + n - 1`; the
    document of the data from which prompt p was read is document `P n + p`.
    """

    def __init__(
        self,
        prompts: NDArray[np.int64],
        prompt_sizes: NDArray[np.int64],
        documents_per_step: int,
        seed: int,
        on_policy: OnPolicyConfig,
    ) -> None:
        super().__init__(prompts, prompt_sizes, documents_per_step, seed)
        self._on_policy, self._all = on_policy, len(prompt_sizes)

    def generation_step(self, step: int) -> int:
        """Return the number of this step among those with new documents (repeated passes have the same number)."""
        number, within = divmod(step, self._on_policy.steps_per_rollout_batch)
        return number * self._on_policy.steps_per_generation + within % self._on_policy.steps_per_generation

    def is_on_policy(self, step: int) -> bool:
        """Return whether a step trains on rollouts."""
        value = np.random.default_rng([self._seed, self.generation_step(step), 1]).random()
        return bool(value < self._on_policy.lmbda)

    def epoch_of_step(self, step: int) -> int:
        """Return the number of completed epochs over the prompts before a step."""
        return self.generation_step(step) * self._num_prompts(step) // len(self._documents)

    def prompts_of_step(self, step: int) -> list[tuple[int, int]]:
        """Return (prompt, epoch) pairs of a step, longest prompts first."""
        size, count = len(self._documents), self._num_prompts(step)
        indices = range(self.generation_step(step) * count, (self.generation_step(step) + 1) * count)
        prompts = [(int(self._shuffle_of_epoch(at // size)[at % size]), at // size) for at in indices]
        return sorted(prompts, key=lambda pair: (-int(self._sizes[pair[0]]), pair))

    def documents_of_step(self, step: int) -> list[int]:
        """Return the documents of a step, longest prompts first."""
        count = self._on_policy.num_generations
        if not self.is_on_policy(step):
            return [self._all * count + prompt for prompt, _ in self.prompts_of_step(step)]
        return [prompt * count + sample for prompt, _ in self.prompts_of_step(step) for sample in range(count)]

    def _num_prompts(self, step: int) -> int:
        if self.is_on_policy(step):
            return self.documents_per_step // self._on_policy.num_generations
        return min(self.documents_per_step, len(self._documents))


def count_repeated_ngrams(ids: Sequence[int], ngram_size: int = 4) -> tuple[int, int]:
    """Return the number of n-grams that occurred before, and of all n-grams."""
    ngrams = [tuple(ids[at : at + ngram_size]) for at in range(len(ids) - ngram_size + 1)]
    return len(ngrams) - len(set(ngrams)), len(ngrams)


def reward_weights(rewards: Sequence[float], prompt_numbers: Sequence[int], beta: float) -> NDArray[np.float64]:
    """Return the weight of each rollout of a step: `softmax(reward / beta)` times the size of its group.

    A group is the rollouts of a prompt, or all rollouts of the step if each prompt has one. A rollout without a reward
    (NaN) gets the mean reward of the others. float64 [n], with mean 1 in each group.
    """
    values, owners = np.array(rewards, np.float64), np.array(prompt_numbers)
    weights = np.ones(len(values))
    parts = [owners == group for group in np.unique(owners)]
    if all(part.sum() == 1 for part in parts):
        parts = [np.ones(len(values), np.bool_)]
    for part in parts:
        own = values[part]
        scored = np.isfinite(own)
        if not scored.any():
            continue
        powers = np.exp((np.where(scored, own, own[scored].mean()) - own[scored].max()) / beta)
        weights[part] = powers / powers.mean()
    return weights
