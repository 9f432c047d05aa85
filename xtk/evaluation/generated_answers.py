"""Generated answers: what a model writes to problems, judged by a reward, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import XtkError
from xtk.evaluation.standard_errors import Estimate
from xtk.rewards.reward_spec import WeightedRewards, name_row_in_errors
from xtk.rollouts.generator_interface import Generator, SamplingConfig
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.rollouts.rollout_generation import generate_rollouts
from xtk.tokens.tokenizer import Tokenizer

COMPLETIONS_PER_BATCH = 256


def _gather_single_process(here: Any) -> list[Any]:
    return [here]


@dataclass(frozen=True)
class ProcessShare:
    """Which part of the work is of this process, where several evaluate one model.

    Attributes:
        rank: which of them this is.
        num_processes: how many there are.
        all_gather_object: returns what each of them gives, by rank.
    """

    rank: int = 0
    num_processes: int = 1
    all_gather_object: Callable[[Any], list[Any]] = _gather_single_process


@dataclass
class StopTruncatedRewards(WeightedRewards):
    """Rewards that judge an answer up to the text that ended it.

    Attributes:
        stop_strings: texts that end answers.
    """

    stop_strings: Sequence[str] = ()

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Judge what stands before the first of these texts."""
        places = [completion.find(text) for text in self.stop_strings if text in completion]
        return super().__call__(completion[: min(places, default=len(completion))], prompt, row)


@dataclass(frozen=True)
class AnswerScores:
    """How a model did.

    Attributes:
        scores: float64 [P, n], the reward of each sample of each problem; nan where it could not judge.
        max_reward: the reward of a right answer.
        lengths: int64 [P, n], tokens that were drawn.
        truncated_fraction: share of the answers that were cut off.
        prompts_too_long: problems to which the context left no room; their scores are 0.
    """

    scores: NDArray[np.float64]
    max_reward: float
    lengths: NDArray[np.int64]
    truncated_fraction: float
    prompts_too_long: int

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Which problems count, bool [P]: those of which all samples could be judged."""
        return np.array([bool(np.isfinite(scores).all()) for scores in self.scores], np.bool_)

    def mean_reward(self) -> Estimate:
        """Return avg@n, the mean reward."""
        return Estimate.mean_of(self.scores[self.is_scored].mean(axis=1))

    def pass_at(self, k: int) -> Estimate:
        """Return pass@k: how likely one of k samples is right, without bias from n samples."""
        scores = self.scores[self.is_scored]
        right = (scores >= self.max_reward).sum(axis=1)
        return Estimate.mean_of(np.array([pass_at_k(k, scores.shape[1], int(count)) for count in right]))

    def difference(self, other: AnswerScores) -> Estimate:
        """Return by how much the mean reward is above that of another model, problem by problem.

        Paired: what is hard for both is left out of the error (Miller 2024).
        """
        both = self.is_scored & other.is_scored
        if not both.any():
            raise XtkError("no problem could be judged for both models")
        return Estimate.mean_of(self.scores[both].mean(axis=1) - other.scores[both].mean(axis=1))

    def to_json(self) -> dict[str, Any]:
        """Return figures, as JSON holds them."""
        samples = self.scores.shape[1]
        found: dict[str, Any] = {
            "problems": int(self.is_scored.sum()),
            "unscored": int((~self.is_scored).sum()),
            "prompts_too_long": self.prompts_too_long,
            "num_generations": samples,
            "mean_length": round(float(self.lengths.mean()), 3),
            "truncated_fraction": round(self.truncated_fraction, 6),
        }
        named = {
            f"avg@{samples}": self.mean_reward(),
            **{f"pass@{k}": self.pass_at(k) for k in powers_of_two_up_to(samples)},
        }
        for name, estimate in named.items():
            found[name] = estimate.value
            found[f"{name}_error"] = estimate.finite_error
        return found


def powers_of_two_up_to(samples: int) -> list[int]:
    """Return 1, 2, 4, ... below a number, and that number."""
    return sorted({samples, *(1 << bit for bit in range(samples.bit_length()))})


def pass_at_k(k: int, num_samples: int, num_correct: int) -> float:
    """Return how likely at least one of k samples is right, where `right` of `samples` are.

    `1 - C(n - c, k) / C(n, k)`, which has no bias (Chen et al. 2021, Evaluating Large Language Models Trained on Code,
    equation 1).

    Raises:
        ValueError: k is more than there are.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} from {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def check_rewards_apply(rewards: WeightedRewards, prompts: Sequence[Prompt]) -> None:
    """Refuse problems that no reward can judge before a model writes to them.

    Raises:
        XtkError: tells the fields that they have.
    """
    judged = False
    for prompt in prompts:
        with name_row_in_errors(prompt.number):
            judged = rewards.can_score(prompt.record) or judged
    if not judged:
        fields = list(dict.fromkeys(str(name) for prompt in prompts for name in prompt.record))
        raise _unscored_error(rewards, f"problems have the fields {', '.join(fields)}")


def _unscored_error(rewards: WeightedRewards, where: str | None = None) -> XtkError:
    return XtkError(
        f"the reward {', '.join(map(str, rewards.specs))} could judge no answer",
        where=where,
        hint="a column with what is right: --reward exact:column=NAME",
    )


def evaluate_answers(
    prompts: Sequence[Prompt],
    generator: Generator,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    rewards: WeightedRewards,
    *,
    num_generations: int = 1,
    seed: int = 0,
    template_arguments: dict[str, Any] | None = None,
    on_answer: Callable[[Prompt, Rollout], None] | None = None,
    process_share: ProcessShare | None = None,
) -> AnswerScores:
    """Let a model answer problems, and judge what it writes.

    Args:
        prompts: the problems, with the fields that the reward reads.
        generator: who writes.
        tokenizer: its.
        sampling: how; of several samples with a temperature.
        rewards: judge, up to a text of `sampling` that ends an answer.
        num_generations: n, samples of each problem.
        seed: of the draws.
        template_arguments: what the chat template is told.
        on_answer: is given each answer.
        process_share: of this process, if several share the problems; each of them has to call this, and gets all.

    Raises:
        XtkError: several samples would be alike, or none can be judged.
    """
    if num_generations > 1 and sampling.temperature == 0:
        raise XtkError(f"at temperature 0 all {num_generations} answers are one", hint="--temperature 0.8, say")
    process_share = process_share or ProcessShare()
    judges = StopTruncatedRewards(rewards.specs, rewards.unscored, sampling.stop)
    shape = (len(prompts), num_generations)
    scores, lengths = np.zeros(shape), np.zeros(shape, np.int64)
    cut = np.zeros(shape, np.bool_)
    answered = np.zeros(len(prompts), np.bool_)
    place = {prompt.number: at for at, prompt in enumerate(prompts)}
    mine = prompts[process_share.rank :: process_share.num_processes]
    with terminal.Progress("evaluate", len(mine), "problems") as progress:
        for group in _batched(mine, max(1, COMPLETIONS_PER_BATCH // num_generations)):
            found = generate_rollouts(
                group, generator, tokenizer, sampling, num_generations=num_generations, seed=seed, rewards=judges,
                template_arguments=template_arguments,
            )  # fmt: skip
            for one in found:
                drawn = one.document.sampled_tokens
                assert drawn is not None
                at = place[one.prompt]
                scores[at, one.sample], lengths[at, one.sample] = one.reward, int(drawn.sampled_mask.sum())
                cut[at, one.sample], answered[at] = one.finish_reason == "length", True
                if on_answer is not None:
                    on_answer(prompts[at], one)
            progress.advance(len(group))
    told = process_share.all_gather_object((scores, lengths, cut, answered))
    scores, lengths, cut, answered = (sum(parts) for parts in zip(*told, strict=True))
    best = sum(specification.weight for specification in rewards.specs)
    written = max(int(answered.sum()) * num_generations, 1)
    result = AnswerScores(scores, best, lengths, float(cut.sum()) / written, int((answered == 0).sum()))
    if not result.is_scored.any():
        raise _unscored_error(rewards)
    return result


def _batched(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
