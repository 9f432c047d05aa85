"""From prompts to rollouts: turn by turn, what students draw and what they are answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk import terminal
from xtk.errors import XtkError
from xtk.rewards.specification import Rewards, row_named
from xtk.rollouts.advantages import group_advantages
from xtk.rollouts.environments import Environment, Played
from xtk.rollouts.prompts import ids_between_turns, ids_of_text, prompt_ids
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.rollouts.writer import Ask, Completion, Sampling, Writer
from xtk.tokens.document import Document, Segment
from xtk.tokens.drawn import spelled
from xtk.tokens.ids import DrawnTokens
from xtk.tokens.tokenizer import Tokenizer

MAX_TURNS = 8


def write_rollouts(
    prompts: Sequence[Prompt],
    writer: Writer,
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    num_generations: int,
    seed: int,
    rewards: Rewards | None = None,
    environment: Callable[[], Environment] | None = None,
    max_turns: int = MAX_TURNS,
    scale_rewards: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Rollout]:
    """Let a student go on from prompts; each turn of all of them is written at once.

    Args:
        prompts: those to which the context leaves no room are left out, which is told.
        writer: who draws.
        tokenizer: the student's.
        sampling: how; `max_completion_length` is of all turns of a rollout together, without what they are answered.
        num_generations: rollouts of each prompt.
        seed: of the draws, which are a function of it, the number of the prompt, the sample and the turn.
        rewards: judge each; of a text all that stands behind the prompt, of a conversation what was said last.
        environment: answers turns; None: there is one turn.
        max_turns: then it answers no more.
        scale_rewards: whether advantages are in standard deviations of their prompt's rewards.
        template_arguments: what the chat template is told.

    Returns:
        Prompt by prompt, their samples in order.

    Raises:
        XtkError: an environment, a reward or a chat template fails.
    """
    begun = [
        _Episode(prompt, sample, tokenizer, None if environment is None else Played(environment, prompt.record))
        for prompt in prompts
        for sample in range(num_generations)
    ]
    openings = {episode.opening: episode.document() for episode in begun}
    read = dict(zip(openings, prompt_ids(tokenizer, list(openings.values()), template_arguments), strict=True))
    episodes = [episode for episode in begun if episode.begin(read[episode.opening], writer.context)]
    if len(episodes) < len(begun):
        left_out = len({episode.prompt.number for episode in begun} - {episode.prompt.number for episode in episodes})
        terminal.note(f"{left_out:,} of {len(prompts):,} prompts leave no room in a context of {writer.context} tokens")
    for turn in range(max_turns):
        speaking = [episode for episode in episodes if not episode.finish]
        if not speaking:
            break
        asks = [episode.ask(seed, turn, sampling) for episode in speaking]
        for episode, completion in zip(speaking, writer.write(asks, sampling), strict=True):
            episode.add(completion)
            episode.go_on(sampling, turn + 1 == max_turns, template_arguments)
    return _judged(episodes, rewards, scale_rewards=scale_rewards)


class _Episode:
    """A rollout while it is written.

    Args:
        prompt: what it goes on from.
        sample: which of the prompt's rollouts it is.
        tokenizer: the student's.
        played: what answers it.

    Attributes:
        finish: why it has ended; "": it goes on.
        turns: how often the student spoke.
    """

    def __init__(self, prompt: Prompt, sample: int, tokenizer: Tokenizer, played: Played | None) -> None:
        self.prompt, self.sample, self.played = prompt, sample, played
        self._tokenizer, self._context = tokenizer, math.inf
        self.finish, self.turns = "", 0
        self._segments = list(prompt.document.segments)
        talk = prompt.document.conversation
        self._messages: list[Mapping[str, Any]] | None = None if talk is None else list(talk.messages)
        self._ids: list[NDArray[np.int32]] = []
        self._drawn: list[Completion | None] = []
        self._run: list[NDArray[np.int32]] = []  # what was drawn since something else was read
        self._spoken = ""
        if played is not None and played.beginning:
            self._answer(played.role, played.beginning)
        self._prompt_segments = len(self._segments)

    @property
    def opening(self) -> tuple[int, str | None]:
        """What all that begin alike have in common."""
        return self.prompt.number, None if self.played is None else self.played.beginning

    def _answer(self, role: str, text: str) -> None:
        self._segments.append(Segment(role, text, False))
        if self._messages is not None:
            self._messages.append({"role": role, "content": text})

    def document(self) -> Document:
        """Return what was read and said so far."""
        talk = self.prompt.document.conversation
        if talk is not None:
            talk = replace(talk, messages=tuple(self._messages or ()))
        return replace(self.prompt.document, segments=tuple(self._segments), conversation=talk)

    def begin(self, ids: NDArray[np.int32], context: int | None) -> bool:
        """Read the prompt; say whether the context leaves room to go on from it."""
        self._context = math.inf if context is None else context
        self._read(ids)
        return len(ids) < self._context

    def _read(self, ids: NDArray[np.int32]) -> None:
        self._ids.append(ids)
        self._drawn.append(None)

    def _room(self, sampling: Sampling, heard: int = 0) -> int:
        """Return how many tokens may still be drawn, once so many more have been read."""
        drawn = sum(len(completion.ids) for completion in self._drawn if completion is not None)
        left = self._context - sum(map(len, self._ids)) - heard
        return int(min(left, sampling.max_completion_length - drawn))

    def ask(self, seed: int, turn: int, sampling: Sampling) -> Ask:
        """Return what is to be written next."""
        key = (seed, self.prompt.number, self.sample, turn)
        return Ask(np.concatenate(self._ids), key, length=self._room(sampling))

    def add(self, completion: Completion) -> None:
        """Take what the student drew; what it draws without having read anything else is one stretch with it."""
        self.turns += 1
        self._ids.append(completion.ids)
        self._drawn.append(completion)
        if self._run:
            self._segments.pop()
        self._run.append(completion.ids)
        first = not any(segment.text for segment in self._segments)
        self._spoken = spelled(self._tokenizer, completion.ids, first=first and len(self._run) == 1).text
        text = spelled(self._tokenizer, np.concatenate(self._run), first=first).text
        role = "completion" if self._messages is None else "assistant"
        self._segments.append(Segment(role, text, True))
        if self._messages is not None:
            self._messages.append({"role": role, "content": text})

    def go_on(self, sampling: Sampling, last: bool, template_arguments: Mapping[str, Any] | None) -> None:
        """Have the environment answer, and read its answer; or end."""
        completion = self._drawn[-1]
        assert completion is not None
        if self.played is None:
            self.finish = completion.finish
            return
        answer, done = self.played.step(self._spoken)
        ended = completion.finish == "stop"
        if done or completion.finish == "length" or (ended and self._messages is None):
            self.finish = completion.finish
        elif last:
            self.finish = "turns"
        else:
            self._hear(answer, ended, sampling, template_arguments)

    def _hear(self, answer: str, ended: bool, sampling: Sampling, template_arguments: Mapping[str, Any] | None) -> None:
        assert self.played is not None
        talk = self.document().conversation
        if talk is not None:
            message = {"role": self.played.role, "content": answer}
            ids = ids_between_turns(self._tokenizer, talk, message, ended, template_arguments)
        else:
            ids = ids_of_text(self._tokenizer, answer)
        if self._room(sampling, len(ids)) < 1:
            self.finish = "length"
        elif len(ids):
            self._answer(self.played.role, answer)
            self._read(ids)
            self._run = []
        elif talk is not None:
            raise XtkError("the chat template writes nothing between two turns", where=self._tokenizer.name)

    def completion(self) -> str:
        """Return what rewards judge."""
        if self._messages is not None:
            return self._segments[-1].text
        return "".join(segment.text for segment in self._segments[self._prompt_segments :])

    def prompt_text(self) -> str:
        """Return what stands before it: a text, or the message that was to be answered."""
        before = self._segments[: self._prompt_segments]
        return before[-1].text if self._messages is not None else "".join(segment.text for segment in before)

    def judge(self, rewards: Rewards | None) -> tuple[float, dict[str, float]]:
        """Return what it is worth, nan if nothing could judge it, and each of its rewards."""
        value, values = math.nan, dict[str, float]()
        if rewards is not None:
            value, values = rewards(self.completion(), self.prompt_text(), self.prompt.record)
        own = None if self.played is None else self.played.reward()
        if own is not None:
            values = {**values, "environment": own}
            value = own if math.isnan(value) else value if math.isnan(own) else value + own
        return value, values

    def rollout(self, reward: float, rewards: Mapping[str, float], advantage: float) -> Rollout:
        """Return it, once it has ended."""
        drawn = [completion for completion in self._drawn if completion is not None]
        logprobs = [
            np.zeros(len(ids), np.float32) if completion is None else completion.logprobs
            for ids, completion in zip(self._ids, self._drawn, strict=True)
        ]
        flags = [
            np.full(len(ids), completion is not None) for ids, completion in zip(self._ids, self._drawn, strict=True)
        ]
        template = self._tokenizer.template_fingerprint if self._messages is not None else None
        tokens = DrawnTokens(
            np.concatenate(self._ids).astype(np.int32),
            np.concatenate(flags),
            np.concatenate(logprobs).astype(np.float32),
            self._tokenizer.fingerprint,
            template or "",
            advantage,
        )
        top_ids = [completion.top_ids for completion in drawn if completion.top_ids is not None]
        return Rollout(
            document=replace(self.document(), drawn=tokens, ends=drawn[-1].finish == "stop"),
            prompt=self.prompt.number,
            sample=self.sample,
            finish=self.finish,
            turns=self.turns,
            reward=reward,
            rewards=rewards,
            top_ids=np.concatenate(top_ids) if top_ids else None,
        )


def _judged(episodes: Sequence[_Episode], rewards: Rewards | None, *, scale_rewards: bool) -> list[Rollout]:
    values = []
    for episode in episodes:
        with row_named(episode.prompt.number):
            values.append(episode.judge(rewards))
    groups: dict[int, list[int]] = {}
    for at, episode in enumerate(episodes):
        groups.setdefault(episode.prompt.number, []).append(at)
    advantages = np.zeros(len(episodes))
    for group in groups.values():
        advantages[group] = group_advantages([values[at][0] for at in group], scale=scale_rewards)
    return [
        episode.rollout(*value, float(advantage))
        for episode, value, advantage in zip(episodes, values, advantages, strict=True)
    ]
