"""Evaluation of generated answers by a reward: avg@n and pass@k with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.errors import NonFiniteModelError, XtkError
from xtk.evaluation.standard_errors import Estimate
from xtk.progress import Progress
from xtk.rewards.reward_spec import WeightedRewards
from xtk.rollouts.generator_interface import Generator, SamplingConfig
from xtk.rollouts.prompts import unscored_error
from xtk.rollouts.rollout_generation import generate_rollouts
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.text.tokenizer import Tokenizer

NON_FINITE_HINT = (
    "compute in float32 or bfloat16; if it stays, the weights are wrong: check them with xtk inspect MODEL --verify"
)


def _gather_single_process(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class ProcessShare:
    """The part of this process in an evaluation that several processes share."""

    rank: int = 0
    num_processes: int = 1
    # Collective call that returns the objects of all processes, by rank.
    all_gather_object: Callable[[Any], list[Any]] = _gather_single_process


@dataclass
class StopTruncatedRewards(WeightedRewards):
    """Rewards that score a completion up to its first stop string."""

    stop_strings: Sequence[str] = ()

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Return the reward of the completion before the first stop string."""
        places = [completion.find(text) for text in self.stop_strings if text in completion]
        return super().__call__(completion[: min(places, default=len(completion))], prompt, row)


@dataclass(frozen=True)
class AnswerScores:
    """Rewards of a model's answers."""

    scores: NDArray[np.float64]  # [P, n], the reward of each sample of each problem; nan where it could not be scored
    max_reward: float  # the reward of a correct answer
    lengths: NDArray[np.int64]  # [P, n], number of generated tokens
    truncated_fraction: float  # fraction of answers that reached the length limit
    prompts_too_long: int  # number of problems whose prompt fills the context; their scores are 0

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """Bool [P], the problems that count: all their samples could be scored."""
        return np.array([bool(np.isfinite(scores).all()) for scores in self.scores], np.bool_)

    def mean_reward(self) -> Estimate:
        """Return avg@n, the mean reward over problems and samples."""
        return Estimate.mean_of(self.scores[self.is_scored].mean(axis=1))

    def pass_at(self, k: int) -> Estimate:
        """Return pass@k: unbiased estimate of the probability that one of k samples is correct."""
        scores = self.scores[self.is_scored]
        right = (scores >= self.max_reward).sum(axis=1)
        return Estimate.mean_of(np.array([pass_at_k(k, scores.shape[1], int(count)) for count in right]))

    def difference(self, other: AnswerScores) -> Estimate:
        """Return the difference to another model's mean reward, paired by problem.

        Pairing removes the difficulty of problems from the standard error (Miller 2024).
        """
        both = self.is_scored & other.is_scored
        if not both.any():
            raise XtkError(
                "--reward scored no problem for both models, so they cannot be compared",
                hint="check that a column has the expected answers, and name it: --reward gsm8k:column=NAME",
            )
        return Estimate.mean_of(self.scores[both].mean(axis=1) - other.scores[both].mean(axis=1))

    def to_json(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        samples = self.scores.shape[1]
        answers = self.lengths.size - self.prompts_too_long * samples
        record: dict[str, Any] = {
            "problems": int(self.is_scored.sum()),
            "unscored": int((~self.is_scored).sum()),
            "prompts_too_long": self.prompts_too_long,
            "num_generations": samples,
            "mean_length": round(float(self.lengths.sum()) / max(answers, 1), 3),
            "truncated_fraction": round(self.truncated_fraction, 6),
        }
        named = {
            f"avg@{samples}": self.mean_reward(),
            **{f"pass@{k}": self.pass_at(k) for k in powers_of_two_up_to(samples)},
        }
        for name, estimate in named.items():
            record[name] = estimate.value
            record[f"{name}_error"] = estimate.finite_error
        return record


def powers_of_two_up_to(samples: int) -> list[int]:
    """Return the powers of two below a number, and the number itself."""
    return sorted({samples, *(1 << bit for bit in range(samples.bit_length()))})


def pass_at_k(k: int, num_samples: int, num_correct: int) -> float:
    """Return the unbiased estimate of pass@k from n samples of which c are correct.

    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k needs k from 1 to the number of samples ({num_samples}), not {k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


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
    """Generate answers to problems, and return their rewards; completions are scored up to a stop string.

    With `process_share`, several processes share the problems: a collective call, whose full result all get.
    """
    if num_generations > 1 and sampling.temperature == 0:
        raise XtkError(
            f"at --temperature 0 all {num_generations} answers to a problem are equal",
            hint="use --temperature 0.8, or --num-generations 1",
        )
    process_share = process_share or ProcessShare()
    rewards_to_stop = StopTruncatedRewards(rewards.specs, rewards.unscored, sampling.stop)
    shape = (len(prompts), num_generations)
    scores, lengths = np.zeros(shape), np.zeros(shape, np.int64)
    truncated = np.zeros(shape, np.bool_)
    answered, not_finite = np.zeros(len(prompts), np.bool_), np.zeros(len(prompts), np.bool_)
    index_of = {prompt.number: at for at, prompt in enumerate(prompts)}
    mine = prompts[process_share.rank :: process_share.num_processes]
    before = generator.num_sampled
    with Progress("evaluate", len(mine), "problems") as progress:
        progress.get_detail = lambda: f"{sampled:,} tokens" if (sampled := generator.num_sampled - before) else ""
        for group in _batched(mine, max(1, generator.completions_at_once // num_generations)):
            rollouts = generate_rollouts(
                group, generator, tokenizer, sampling, num_generations=num_generations, seed=seed,
                rewards=rewards_to_stop, template_arguments=template_arguments,
            )  # fmt: skip
            for rollout in rollouts:
                sampled = rollout.document.sampled_tokens
                assert sampled is not None
                at = index_of[rollout.prompt]
                not_finite[at] |= rollout.unusable_reason == "not finite"
                scores[at, rollout.sample], lengths[at, rollout.sample] = (
                    rollout.reward,
                    int(sampled.sampled_mask.sum()),
                )
                truncated[at, rollout.sample], answered[at] = rollout.finish_reason == "length", True
                if on_answer is not None:
                    on_answer(prompts[at], rollout)
            progress.advance(len(group))
    gathered = process_share.all_gather_object((scores, lengths, truncated, answered, not_finite))
    scores, lengths, truncated, answered, not_finite = (sum(parts) for parts in zip(*gathered, strict=True))
    if not_finite.any():
        raise NonFiniteModelError(
            "the model gives log-probabilities that are not finite",
            where=f"problem {int(not_finite.argmax())}",
            hint=NON_FINITE_HINT,
        )
    best = sum(specification.weight for specification in rewards.specs)
    num_answers = max(int(answered.sum()) * num_generations, 1)
    result = AnswerScores(scores, best, lengths, float(truncated.sum()) / num_answers, int((answered == 0).sum()))
    if not result.is_scored.any():
        raise unscored_error(rewards)
    return result


def _batched(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
