"""On-policy training: what is asked of the student's own writing, and which prompts a step takes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.artifacts.atomic_files import sha256_of_file
from xtk.errors import XtkError
from xtk.registry import unknown_name_error
from xtk.rewards.reward_spec import RewardSpec
from xtk.rollouts import GENERATORS
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.prompts import PromptFormat
from xtk.training.micro_batches import BatchSampler

# What tells of the rollouts of a round; `--stop-if` knows these.
ROLLOUT_METRICS = {
    "entropy": "nats a token, estimated: minus the mean log-probability of what was drawn",
    "length": "tokens of a rollout",
    "truncated_fraction": "share of rollouts that were cut off",
    "repeated_4gram_fraction": "share of four tokens in a row that were there before, within a rollout",
    "unusable_fraction": "share of rollouts that were empty, or had a log-probability that is no number",
    "reward": "mean reward, of what could be judged",
    "turns": "how often the student spoke",
    "environment_token_fraction": "share of the tokens behind the prompt that the student did not draw",
    "logprob_difference": "nats a token: mean absolute difference between the generation engine's log-probabilities of "
    "sampled tokens and the student's own",
}
# What came after runs had been trained: left as it is, it does not tell two of them apart.
KEYS_OMITTED_BY_DEFAULT = ("prompt_template", "apply_chat_template", "chat_template_kwargs")
_COMPARISON = re.compile(r"\s*(?P<name>[a-z0-9_]+)\s*(?P<sign>[<>])\s*(?P<limit>[-+.\deE]+)\s*")
_FILE = re.compile(r"^.+\.py(?=:)|(?<=[:,]schema=)[^,]+", re.DOTALL)
_SIGNS = {"<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class StopCondition:
    """A sign of collapse, after which a run ends: `repeated_4gram_fraction>0.5`.

    Attributes:
        name: a key of `FIGURES`.
        comparison: "<" or ">".
        limit: what it is compared with.
    """

    name: str
    comparison: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.limit:g}"

    def is_met(self, metrics: Mapping[str, float]) -> bool:
        """Say whether a round shows it."""
        return self.name in metrics and bool(_SIGNS[self.comparison](metrics[self.name], self.limit))


def parse_stop_condition(text: str) -> StopCondition:
    """Read `entropy<0.05`.

    Raises:
        XtkError: it is no comparison of a known figure with a number.
    """
    found = _COMPARISON.fullmatch(text)
    if found is None:
        raise XtkError(
            f"--stop-if is {text!r}", hint=f"FIGURE<NUMBER or FIGURE>NUMBER; figures: {', '.join(ROLLOUT_METRICS)}"
        )
    if found["name"] not in ROLLOUT_METRICS:
        raise unknown_name_error("figure of rollouts", found["name"], ROLLOUT_METRICS)
    try:
        return StopCondition(found["name"], found["sign"], float(found["limit"]))
    except ValueError:
        raise XtkError(f"--stop-if is {text!r}, and {found['limit']} is no number") from None


@dataclass(frozen=True)
class OnPolicyConfig:
    """How a student writes what it learns from.

    Attributes:
        sampling: how tokens are drawn.
        num_generations: completions of a prompt; all of them are in one step.
        steps_per_generation: steps whose completions are written at a time, by the student as it is before them.
        num_iterations: how often these steps are taken.
        lmbda: the share of steps that take what the student wrote; the others take the completions of the data.
        rewards: what completions are worth.
        scale_rewards: whether advantages are divided by the deviation of a prompt's rewards.
        reward_beta: b; rollouts count by `softmax(reward / b)`, over the completions of a prompt, or where each has
            one, of a step. 0: all count alike.
        prompt_template: writes prompts from the fields of a record; "": records have prompts.
        apply_chat_template: a prompt that is text is what a user says, in the student's chat template.
        chat_template_kwargs: what the student's chat template is told beside the messages.
        environment: who answers the student, `FILE.py:CLASS`; "": nobody.
        max_turns: how often the student speaks at most.
        backend: who writes: a key of `WRITERS`.
        engine: options of the backend.
        server: addresses, of the backend of that name.
        dtype: in which an engine computes; a student that writes itself computes as it trains.
        batch_tokens: that the student reads and writes at a time, padding included.
        devices: of an engine, on this machine; none: it takes turns with the student on its devices.
        stop_if: signs of collapse.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_generations: int = 1
    steps_per_generation: int = 1
    num_iterations: int = 1
    lmbda: float = 1.0
    rewards: tuple[RewardSpec, ...] = ()
    scale_rewards: bool = True
    reward_beta: float = 0.0
    prompt_template: str = ""
    apply_chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    max_turns: int = 1
    backend: str = "transformers"
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: tuple[str, ...] = ()
    dtype: str = "float32"
    batch_tokens: int = 16384
    devices: tuple[int, ...] = ()
    stop_if: tuple[StopCondition, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_generations", "steps_per_generation", "num_iterations", "max_turns"):
            if getattr(self, name) < 1:
                raise XtkError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it is 1 or more")
        if not 0 <= self.lmbda <= 1:
            raise XtkError(
                f"--lmbda is {self.lmbda}; it is a share, from 0 (the data) to 1 (the student's own writing)"
            )
        if not (math.isfinite(self.reward_beta) and self.reward_beta >= 0):
            raise XtkError(f"--reward-beta is {self.reward_beta}; it is a number from 0 on")
        if self.reward_beta and not self.rewards:
            raise XtkError("--reward-beta weighs rollouts by their rewards, and there are none", hint="--reward exact")
        if self.devices and self.backend != "vllm":
            raise XtkError("--devices rollout=... is for --rollout-backend vllm; the student itself is where it is")
        if self.server and self.backend != "server":
            raise XtkError(f"--rollout-server is for --rollout-backend server, not {self.backend}")
        if self.engine and self.backend != "vllm":
            raise XtkError(f"--rollout-engine is for --rollout-backend vllm, not {self.backend}")
        if self.backend not in GENERATORS:
            raise unknown_name_error("backend", self.backend, GENERATORS)

    @property
    def prompt_format(self) -> PromptFormat:
        """How records are put to the student."""
        return PromptFormat(self.prompt_template, as_chat=self.apply_chat_template)

    @property
    def steps_per_rollout_batch(self) -> int:
        """Steps between two times of writing."""
        return self.steps_per_generation * self.num_iterations

    def describe(self, generator: str) -> str:
        """Say what a round is.

        Args:
            generator: writes, and where.
        """
        return (
            f"a round is {self.steps_per_generation} step(s), taken {self.num_iterations} time(s), of "
            f"{self.num_generations} completion(s) of each prompt; {generator}"
        )

    def identity(self) -> dict[str, Any]:
        """Return what makes two runs the same."""
        content = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("batch_tokens", "devices", "server", "stop_if")
        }
        for name in KEYS_OMITTED_BY_DEFAULT:
            if not content[name]:
                del content[name]
        content["sampling"]["stop"] = list(self.sampling.stop)
        content["environment"] = _by_content(self.environment)
        rewards = [_by_content(str(reward)) for reward in self.rewards]
        return {**content, "rewards": rewards, "engine": dict(self.engine)}

    def check_batch(self, documents_per_step: int) -> None:
        """Refuse steps that hold a part of a prompt's completions.

        Raises:
            XtkError: they do.
        """
        if documents_per_step % self.num_generations:
            raise XtkError(
                f"a step has {documents_per_step} documents, and a prompt {self.num_generations} completions, "
                "which are compared within a step",
                hint="--per-device-train-batch-size x --gradient-accumulation-steps x processes, a multiple of "
                "--num-generations",
            )


def _by_content(text: str) -> str:
    """Return `FILE.py:NAME`, or a reward with `schema=FILE`, with the file's name and checksum for its path."""

    def named(found: re.Match[str]) -> str:
        path = Path(found[0])
        return f"{path.name}@{sha256_of_file(path)}" if path.is_file() else found[0]

    return _FILE.sub(named, text)


class PromptSampler(BatchSampler):
    """Which documents a step takes, of those that the student writes and of those of the data.

    The n completions of prompt p are documents `p n` to `p n + n - 1`; the document of the data that prompt p is from
    is document `P n + p`.

    Args:
        prompts_of_step: int64, the prompts to draw from.
        sizes: int64 [P], how long each of all prompts is.
        per_step: documents in a step.
        seed: of the shuffle and of what is on-policy.
        on_policy: how steps follow.
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
        """Return which step this one is, not counting those that take the same documents again."""
        number, within = divmod(step, self._on_policy.steps_per_rollout_batch)
        return number * self._on_policy.steps_per_generation + within % self._on_policy.steps_per_generation

    def is_on_policy(self, step: int) -> bool:
        """Say whether a step takes what the student writes."""
        drawn = np.random.default_rng([self._seed, self.generation_step(step), 1]).random()
        return bool(drawn < self._on_policy.lmbda)

    def epoch_of_step(self, step: int) -> int:
        """Return how often all prompts were taken before a step."""
        return self.generation_step(step) * self._prompts_of(step) // len(self._documents)

    def prompts_of_step(self, step: int) -> list[tuple[int, int]]:
        """Return (prompt, how often it was taken before) of a step, longest first."""
        size, count = len(self._documents), self._prompts_of(step)
        places = range(self.generation_step(step) * count, (self.generation_step(step) + 1) * count)
        found = [(int(self._of_epoch(place // size)[place % size]), place // size) for place in places]
        return sorted(found, key=lambda pair: (-int(self._sizes[pair[0]]), pair))

    def documents_of_step(self, step: int) -> list[int]:
        """Return the documents of a step, those of the longest prompts first."""
        count = self._on_policy.num_generations
        if not self.is_on_policy(step):
            return [self._all * count + prompt for prompt, _ in self.prompts_of_step(step)]
        return [prompt * count + sample for prompt, _ in self.prompts_of_step(step) for sample in range(count)]

    def _prompts_of(self, step: int) -> int:
        if self.is_on_policy(step):
            return self.documents_per_step // self._on_policy.num_generations
        return min(self.documents_per_step, len(self._documents))


def count_repeated_ngrams(ids: Sequence[int], ngram_size: int = 4) -> tuple[int, int]:
    """Return how many runs of `size` tokens were there before, of how many."""
    runs = [tuple(ids[at : at + ngram_size]) for at in range(len(ids) - ngram_size + 1)]
    return len(runs) - len(set(runs)), len(runs)


def reward_weights(rewards: Sequence[float], prompt_numbers: Sequence[int], beta: float) -> NDArray[np.float64]:
    """Return how much each rollout of a step counts: `softmax(reward / beta)` times the number of those compared.

    Compared are the rollouts of one prompt; those of a step, where each prompt has one. One that could not be judged
    counts as the mean of the others.

    Args:
        rewards: [n], nan where there is none.
        prompt_numbers: [n], which prompt each is of.
        beta: b.

    Returns:
        float64 [n], with the mean 1 within those compared.
    """
    values, owners = np.array(rewards, np.float64), np.array(prompt_numbers)
    weights = np.ones(len(values))
    parts = [owners == group for group in np.unique(owners)]
    if all(part.sum() == 1 for part in parts):
        parts = [np.ones(len(values), np.bool_)]
    for part in parts:
        own = values[part]
        judged = np.isfinite(own)
        if not judged.any():
            continue
        powers = np.exp((np.where(judged, own, own[judged].mean()) - own[judged].max()) / beta)
        weights[part] = powers / powers.mean()
    return weights
