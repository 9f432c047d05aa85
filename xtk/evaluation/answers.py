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
from xtk.evaluation.estimates import Estimate
from xtk.rewards.specification import Rewards, row_named
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.rollouts.writer import Sampling, Writer
from xtk.rollouts.writing import write_rollouts
from xtk.tokens.tokenizer import Tokenizer

COMPLETIONS_AT_A_TIME = 256


def _alone(here: Any) -> list[Any]:
    return [here]


@dataclass(frozen=True)
class Share:
    """Which part of the work is of this process, where several evaluate one model.

    Attributes:
        rank: which of them this is.
        processes: how many there are.
        told_by_all: returns what each of them gives, by rank.
    """

    rank: int = 0
    processes: int = 1
    told_by_all: Callable[[Any], list[Any]] = _alone


@dataclass
class BeforeStop(Rewards):
    """Rewards that judge an answer up to the text that ended it.

    Attributes:
        stop: texts that end answers.
    """

    stop: Sequence[str] = ()

    def __call__(self, completion: str, prompt: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Judge what stands before the first of these texts."""
        places = [completion.find(text) for text in self.stop if text in completion]
        return super().__call__(completion[: min(places, default=len(completion))], prompt, row)


@dataclass(frozen=True)
class Answers:
    """How a model did.

    Attributes:
        scores: float64 [P, n], the reward of each sample of each problem; nan where it could not judge.
        best: the reward of a right answer.
        lengths: int64 [P, n], tokens that were drawn.
        truncated: share of the answers that were cut off.
        without_room: problems to which the context left no room; their scores are 0.
    """

    scores: NDArray[np.float64]
    best: float
    lengths: NDArray[np.int64]
    truncated: float
    without_room: int

    @property
    def judged(self) -> NDArray[np.bool_]:
        """Which problems count, bool [P]: those of which all samples could be judged."""
        return np.array([bool(np.isfinite(scores).all()) for scores in self.scores], np.bool_)

    def average(self) -> Estimate:
        """Return avg@n, the mean reward."""
        return Estimate.of(self.scores[self.judged].mean(axis=1))

    def pass_at(self, k: int) -> Estimate:
        """Return pass@k: how likely one of k samples is right, without bias from n samples."""
        scores = self.scores[self.judged]
        right = (scores >= self.best).sum(axis=1)
        return Estimate.of(np.array([pass_at(k, scores.shape[1], int(count)) for count in right]))

    def difference(self, other: Answers) -> Estimate:
        """Return by how much the mean reward is above that of another model, problem by problem.

        Paired: what is hard for both is left out of the error (Miller 2024).
        """
        both = self.judged & other.judged
        if not both.any():
            raise XtkError("no problem could be judged for both models")
        return Estimate.of(self.scores[both].mean(axis=1) - other.scores[both].mean(axis=1))

    def record(self) -> dict[str, Any]:
        """Return figures, as JSON holds them."""
        samples = self.scores.shape[1]
        found: dict[str, Any] = {
            "problems": int(self.judged.sum()),
            "unjudged": int((~self.judged).sum()),
            "without_room": self.without_room,
            "num_generations": samples,
            "mean_length": round(float(self.lengths.mean()), 3),
            "truncated": round(self.truncated, 6),
        }
        named = {f"avg@{samples}": self.average(), **{f"pass@{k}": self.pass_at(k) for k in powers_up_to(samples)}}
        for name, estimate in named.items():
            found[name] = estimate.value
            found[f"{name}_error"] = estimate.told_error
        return found


def powers_up_to(samples: int) -> list[int]:
    """Return 1, 2, 4, ... below a number, and that number."""
    return sorted({samples, *(1 << bit for bit in range(samples.bit_length()))})


def pass_at(k: int, samples: int, right: int) -> float:
    """Return how likely at least one of k samples is right, where `right` of `samples` are.

    `1 - C(n - c, k) / C(n, k)`, which has no bias (Chen et al. 2021, Evaluating Large Language Models Trained on Code,
    equation 1).

    Raises:
        ValueError: k is more than there are.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} from {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def check_judges(rewards: Rewards, prompts: Sequence[Prompt]) -> None:
    """Refuse problems that no reward can judge before a model writes to them.

    Raises:
        XtkError: tells the fields that they have.
    """
    judged = False
    for prompt in prompts:
        with row_named(prompt.number):
            judged = rewards.can_judge(prompt.record) or judged
    if not judged:
        fields = list(dict.fromkeys(str(name) for prompt in prompts for name in prompt.record))
        raise _unjudged(rewards, f"problems have the fields {', '.join(fields)}")


def _unjudged(rewards: Rewards, where: str | None = None) -> XtkError:
    return XtkError(
        f"the reward {', '.join(map(str, rewards.specifications))} could judge no answer",
        where=where,
        hint="a column with what is right: --reward exact:column=NAME",
    )


def answer(
    prompts: Sequence[Prompt],
    writer: Writer,
    tokenizer: Tokenizer,
    sampling: Sampling,
    rewards: Rewards,
    *,
    num_generations: int = 1,
    seed: int = 0,
    template_arguments: dict[str, Any] | None = None,
    show: Callable[[Prompt, Rollout], None] | None = None,
    share: Share | None = None,
) -> Answers:
    """Let a model answer problems, and judge what it writes.

    Args:
        prompts: the problems, with the fields that the reward reads.
        writer: who writes.
        tokenizer: its.
        sampling: how; of several samples with a temperature.
        rewards: judge, up to a text of `sampling` that ends an answer.
        num_generations: n, samples of each problem.
        seed: of the draws.
        template_arguments: what the chat template is told.
        show: is given each answer.
        share: of this process, if several share the problems; each of them has to call this, and gets all.

    Raises:
        XtkError: several samples would be alike, or none can be judged.
    """
    if num_generations > 1 and sampling.temperature == 0:
        raise XtkError(f"at temperature 0 all {num_generations} answers are one", hint="--temperature 0.8, say")
    share = share or Share()
    judges = BeforeStop(rewards.specifications, rewards.unjudged, sampling.stop)
    shape = (len(prompts), num_generations)
    scores, lengths = np.zeros(shape), np.zeros(shape, np.int64)
    cut = np.zeros(shape, np.bool_)
    answered = np.zeros(len(prompts), np.bool_)
    place = {prompt.number: at for at, prompt in enumerate(prompts)}
    mine = prompts[share.rank :: share.processes]
    with terminal.Progress("evaluate", len(mine), "problems") as progress:
        for group in _groups(mine, max(1, COMPLETIONS_AT_A_TIME // num_generations)):
            found = write_rollouts(
                group, writer, tokenizer, sampling, num_generations=num_generations, seed=seed, rewards=judges,
                template_arguments=template_arguments,
            )  # fmt: skip
            for one in found:
                drawn = one.document.drawn
                assert drawn is not None
                at = place[one.prompt]
                scores[at, one.sample], lengths[at, one.sample] = one.reward, int(drawn.drawn.sum())
                cut[at, one.sample], answered[at] = one.finish == "length", True
                if show is not None:
                    show(prompts[at], one)
            progress.advance(len(group))
    told = share.told_by_all((scores, lengths, cut, answered))
    scores, lengths, cut, answered = (sum(parts) for parts in zip(*told, strict=True))
    best = sum(specification.weight for specification in rewards.specifications)
    written = max(int(answered.sum()) * num_generations, 1)
    result = Answers(scores, best, lengths, float(cut.sum()) / written, int((answered == 0).sum()))
    if not result.judged.any():
        raise _unjudged(rewards)
    return result


def _groups(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
