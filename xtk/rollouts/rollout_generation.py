"""Generates rollouts for prompts, turn by turn, and scores them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import XtkError
from xtk.rewards.reward_spec import WeightedRewards, name_row_in_errors
from xtk.rollouts.environments import CheckedEnvironment, Environment
from xtk.rollouts.generator_interface import Completion, GenerationRequest, Generator, SamplingConfig
from xtk.rollouts.prompts import tokenize_between_turns, tokenize_continuation, tokenize_prompts
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.text.document import Document, Segment
from xtk.text.document_token_ids import SampledTokens
from xtk.text.rollout_tokens import completion_text, decode_tokens
from xtk.text.tokenizer import Tokenizer

DEFAULT_MAX_TURNS = 8
STD_EPSILON = 1e-4  # TRL, GRPOTrainer


def generate_rollouts(
    prompts: Sequence[Prompt],
    generator: Generator,
    tokenizer: Tokenizer,
    sampling: SamplingConfig,
    *,
    num_generations: int,
    seed: int,
    rewards: WeightedRewards | None = None,
    environment: Callable[[], Environment] | None = None,
    max_turns: int = DEFAULT_MAX_TURNS,
    scale_rewards: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Rollout]:
    """Return rollouts by prompt, then by sample; each turn of all prompts is generated in one call.

    Args:
        prompts: those that fill the context are skipped, with a note.
        sampling: `max_completion_length` counts the sampled tokens of all turns of a rollout together.
        seed: the samples are a function of it, the index of the prompt, the sample and the turn.
        rewards: score each rollout: all text after the prompt, or the last message of a conversation.
        scale_rewards: whether to divide advantages by the standard deviation of the prompt's rewards.
    """
    all_episodes = [
        _Episode(prompt, sample, tokenizer, environment and CheckedEnvironment(environment, prompt.record))
        for prompt in prompts
        for sample in range(num_generations)
    ]
    context = generator.context_length
    documents = {episode.prompt_key: episode.document() for episode in all_episodes}
    tokens = tokenize_prompts(tokenizer, list(documents.values()), template_arguments)
    ids_of = dict(zip(documents, tokens, strict=True))
    episodes = [episode for episode in all_episodes if episode.set_prompt(ids_of[episode.prompt_key], context)]
    if len(episodes) < len(all_episodes):
        kept = {episode.prompt.number for episode in episodes}
        left_out = len({episode.prompt.number for episode in all_episodes} - kept)
        terminal.note(
            f"skipped {left_out:,} of {len(prompts):,} prompts: no space left in the context of {context} tokens"
        )
    for turn in range(max_turns):
        active = [episode for episode in episodes if not episode.finish_reason]
        if not active:
            break
        requests = [episode.next_request(seed, turn, sampling) for episode in active]
        for episode, completion in zip(active, generator.generate(requests, sampling), strict=True):
            episode.add_completion(completion)
            episode.step_environment(sampling, turn + 1 == max_turns, template_arguments)
    return _score_episodes(episodes, rewards, scale_rewards=scale_rewards)


class _Episode:
    """A rollout while it is generated; without an environment it has one turn."""

    def __init__(
        self, prompt: Prompt, sample: int, tokenizer: Tokenizer, environment: CheckedEnvironment | None
    ) -> None:
        self.prompt, self.sample, self.environment = prompt, sample, environment
        self._tokenizer, self._context = tokenizer, math.inf
        # finish_reason: why it has ended; "" while it goes on.
        # num_turns: number of turns that the student generated.
        self.finish_reason, self.num_turns = "", 0
        self._segments = list(prompt.document.segments)
        conversation = prompt.document.conversation
        self._messages: list[Mapping[str, Any]] | None = None if conversation is None else list(conversation.messages)
        self._ids: list[NDArray[np.int32]] = []
        self._completions: list[Completion | None] = []
        self._run: list[NDArray[np.int32]] = []  # sampled since the last tokens of the environment
        self._last_turn_text = ""
        self._written: dict[int, str] = {}  # all text of a segment; its own ends before the first special token
        if environment is not None and environment.initial_text:
            self._append_message(environment.role, environment.initial_text)
        self._prompt_segments = len(self._segments)

    @property
    def prompt_key(self) -> tuple[int, str | None]:
        """Prompts with the same key have the same initial tokens."""
        return self.prompt.number, None if self.environment is None else self.environment.initial_text

    def _append_message(self, role: str, text: str) -> None:
        self._segments.append(Segment(role, text, False))
        if self._messages is not None:
            self._messages.append({"role": role, "content": text})

    def document(self) -> Document:
        """Return the conversation or text so far."""
        conversation = self.prompt.document.conversation
        if conversation is not None:
            conversation = replace(conversation, messages=tuple(self._messages or ()))
        return replace(self.prompt.document, segments=tuple(self._segments), conversation=conversation)

    def set_prompt(self, ids: NDArray[np.int32], context: int | None) -> bool:
        """Append the prompt's tokens; return whether the context has space for a completion."""
        self._context = math.inf if context is None else context
        self._append_tokens(ids)
        return len(ids) < self._context

    def _append_tokens(self, ids: NDArray[np.int32]) -> None:
        self._ids.append(ids)
        self._completions.append(None)

    def _remaining_tokens(self, sampling: SamplingConfig, extra: int = 0) -> int:
        """Return how many tokens may still be sampled after `extra` more tokens of the environment."""
        sampled = sum(len(completion.ids) for completion in self._completions if completion is not None)
        left = self._context - sum(map(len, self._ids)) - extra
        return int(min(left, sampling.max_completion_length - sampled))

    def next_request(self, seed: int, turn: int, sampling: SamplingConfig) -> GenerationRequest:
        """Return the request for the next turn."""
        key = (seed, self.prompt.number, self.sample, turn)
        return GenerationRequest(np.concatenate(self._ids), key, max_length=self._remaining_tokens(sampling))

    def add_completion(self, completion: Completion) -> None:
        """Append a completion; without environment tokens in between it continues the last segment."""
        self.num_turns += 1
        self._ids.append(completion.ids)
        self._completions.append(completion)
        if self._run:
            self._segments.pop()
        self._run.append(completion.ids)
        first = not any(segment.text for segment in self._segments)
        is_start = first and len(self._run) == 1
        self._last_turn_text = completion_text(self._tokenizer, completion.ids, at_text_start=is_start)
        run = np.concatenate(self._run)
        self._written[len(self._segments)] = completion_text(self._tokenizer, run, at_text_start=first)
        text = decode_tokens(self._tokenizer, run, at_text_start=first).text
        role = "completion" if self._messages is None else "assistant"
        self._segments.append(Segment(role, text, True))
        if self._messages is not None:
            self._messages.append({"role": role, "content": text})

    def step_environment(
        self, sampling: SamplingConfig, last: bool, template_arguments: Mapping[str, Any] | None
    ) -> None:
        """Run the environment on the last turn and append its response, or end the rollout."""
        completion = self._completions[-1]
        assert completion is not None
        if self.environment is None:
            self.finish_reason = completion.finish_reason
            return
        response, done = self.environment.step(self._last_turn_text)
        ended = completion.finish_reason == "stop"
        if done or completion.finish_reason == "length" or (ended and self._messages is None):
            self.finish_reason = completion.finish_reason
        elif last:
            self.finish_reason = "turns"
        else:
            end = int(completion.ids[-1]) if ended else None
            self._append_environment_text(response, end, sampling, template_arguments)

    def _append_environment_text(
        self, response: str, end: int | None, sampling: SamplingConfig, template_arguments: Mapping[str, Any] | None
    ) -> None:
        assert self.environment is not None
        conversation = self.document().conversation
        if conversation is not None:
            message = {"role": self.environment.role, "content": response}
            ids = tokenize_between_turns(self._tokenizer, conversation, message, end, template_arguments)
        else:
            ids = tokenize_continuation(self._tokenizer, response)
        if self._remaining_tokens(sampling, len(ids)) < 1:
            self.finish_reason = "length"
        elif len(ids):
            self._append_message(self.environment.role, response)
            self._append_tokens(ids)
            self._run = []
        elif conversation is not None:
            raise XtkError(
                "the chat template adds no tokens between two turns, so a next turn cannot begin",
                where=self._tokenizer.name,
                hint="edit the model's chat_template.jinja so that it marks the start of a turn, or omit --environment",
            )

    def completion_text(self) -> str:
        """Return the text that rewards score."""
        first = len(self._segments) - 1 if self._messages is not None else self._prompt_segments
        later = enumerate(self._segments[first:], first)
        return "".join(self._written.get(number, segment.text) for number, segment in later)

    def prompt_text(self) -> str:
        """Return the text before the completion, or the message that it responds to."""
        before = self._segments[: self._prompt_segments]
        return before[-1].text if self._messages is not None else "".join(segment.text for segment in before)

    def score(self, rewards: WeightedRewards | None) -> tuple[float, dict[str, float]]:
        """Return the total reward, nan if nothing could score it, and each reward by name."""
        value, values = math.nan, dict[str, float]()
        if rewards is not None:
            value, values = rewards(self.completion_text(), self.prompt_text(), self.prompt.record)
        own = None if self.environment is None else self.environment.reward()
        if own is not None:
            values = {**values, "environment": own}
            value = own if math.isnan(value) else value if math.isnan(own) else value + own
        return value, values

    def to_rollout(self, reward: float, rewards: Mapping[str, float], advantage: float) -> Rollout:
        """Return the finished rollout."""
        sampled = [completion for completion in self._completions if completion is not None]
        pairs = list(zip(self._ids, self._completions, strict=True))
        logprobs = [np.zeros(len(ids), np.float32) if made is None else made.logprobs for ids, made in pairs]
        flags = [np.full(len(ids), made is not None) for ids, made in pairs]
        template = self._tokenizer.template_fingerprint if self._messages is not None else None
        tokens = SampledTokens(
            np.concatenate(self._ids).astype(np.int32),
            np.concatenate(flags),
            np.concatenate(logprobs).astype(np.float32),
            self._tokenizer.fingerprint,
            template or "",
            advantage,
        )
        top_ids = [completion.top_ids for completion in sampled if completion.top_ids is not None]
        return Rollout(
            document=replace(self.document(), sampled_tokens=tokens, is_complete=sampled[-1].finish_reason == "stop"),
            prompt=self.prompt.number,
            sample=self.sample,
            finish_reason=self.finish_reason,
            num_turns=self.num_turns,
            reward=reward,
            rewards=rewards,
            top_ids=np.concatenate(top_ids) if top_ids else None,
        )


def _score_episodes(
    episodes: Sequence[_Episode], rewards: WeightedRewards | None, *, scale_rewards: bool
) -> list[Rollout]:
    values = []
    for episode in episodes:
        with name_row_in_errors(episode.prompt.number):
            values.append(episode.score(rewards))
    groups: dict[int, list[int]] = {}
    for at, episode in enumerate(episodes):
        groups.setdefault(episode.prompt.number, []).append(at)
    advantages = np.zeros(len(episodes))
    for group in groups.values():
        advantages[group] = group_advantages([values[at][0] for at in group], scale=scale_rewards)
    return [
        episode.to_rollout(*value, float(advantage))
        for episode, value, advantage in zip(episodes, values, advantages, strict=True)
    ]


def group_advantages(rewards: Sequence[float], *, scale: bool = True) -> NDArray[np.float64]:
    """Return the advantages of the rollouts of one prompt: reward minus mean, in standard deviations.

    Shao et al., "DeepSeekMath", 2024, section 4.1 (GRPO); without `scale` Liu et al., "Understanding R1-Zero-like
    training", 2025. The standard deviation is that of a sample (n - 1), as in TRL. Unscored rollouts (nan) get 0 and
    are excluded; all are 0 if fewer than two are scored, or all rewards are equal.
    """
    values = np.asarray(rewards, np.float64)
    judged = np.isfinite(values)
    advantages = np.zeros(len(values))
    if judged.sum() < 2 or np.ptp(values[judged]) == 0:
        return advantages
    advantages[judged] = values[judged] - values[judged].mean()
    return advantages / (values[judged].std(ddof=1) + STD_EPSILON) if scale else advantages
