"""Rounds of on-policy training: the student writes, its teachers score that, and it trains from what they said.

A round is kept in the run's folder, what was written and what was said of it, until a checkpoint comes after it: a run
that is killed inside of a round goes on with the same rollouts, which weights wrote that are no more.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from xtk.artifacts.atomic_files import atomic_write, read_json, sha256, write_json
from xtk.artifacts.cache_manifest import MANIFEST
from xtk.artifacts.corpus import CorpusFingerprint, InMemoryCorpus
from xtk.artifacts.run_folders import CHECKPOINT, ROLLOUTS_FILE, list_checkpoints
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import CorruptError, XtkError
from xtk.projection.projection import Projection
from xtk.rollouts.rollout import Prompt, Rollout
from xtk.teachers.cache_building import CacheJob
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document, Segment
from xtk.tokens.pretokenized import SampledTokens
from xtk.tokens.teacher_view import teacher_views
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import NO_ROW
from xtk.training.graceful_stop import StopListener
from xtk.training.logprob_check import LogprobCheck
from xtk.training.metrics_file import MetricsFile
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler, count_repeated_ngrams, reward_weights
from xtk.training.online_scoring import CombineCaches, OnlineSource, TeacherBlocks

ROLLOUT_BATCHES_FOLDER = "rollout_batches"
COMPARISON_FILE = "comparison.json"


class RolloutGenerator(Protocol):
    """Who writes for the student; as `xtk.training.student_generator.StudentGenerator`.

    Attributes:
        main_process_only: whether the first process writes for all.
    """

    main_process_only: bool

    def sync_weights(self, step: int) -> None:
        """Take the student's weights, as they are now; all processes call it."""

    def generate(self, prompts: Sequence[Prompt], times_taken: int) -> list[Rollout]:
        """Go on from prompts that were taken so often before."""

    def sleep(self) -> None:
        """Leave the device to others."""

    def close(self) -> None:
        """Write no more."""


class OnPolicySource(OnlineSource):
    """What a student wrote in the present round, the documents of the data, and what teachers said of both.

    Args:
        prompts: all.
        data: the documents of the data, one a prompt; none if no step takes them.
        completions_per_prompt: completions of a prompt.
        student: the student's tokenizer.
        teachers: who score.
        names: of the teachers, if each document names its own; none: all score all.
        images: of each teacher with another tokenizer who is asked for given tokens, how the student's lead to its own.
        join: how several teachers speak together.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        data: Sequence[Document],
        completions_per_prompt: int,
        student: Tokenizer,
        teachers: Sequence[OnlineTeacher],
        route_names: Sequence[str],
        projections: Sequence[Projection | None],
        combine_caches: CombineCaches,
    ) -> None:
        unwritten = [prompt.document for prompt in prompts for _ in range(completions_per_prompt)]
        sizes = np.full((len(teachers), len(unwritten) + len(data)), NO_ROW, np.int32)
        super().__init__([*unwritten, *data], teachers, sizes, {}, combine_caches)
        self.prompts, self.completions_per_prompt = prompts, completions_per_prompt
        self._student, self._names, self._images = student, route_names, projections
        self._now = list(self._documents)
        self._top_ids: dict[int, NDArray[np.int32]] = {}
        self._taken: list[int] = []

    def fingerprint(self) -> str:
        """Return the hash of the records: what prompts, rewards, environments and the data's completions come from."""
        told = [dict(prompt.record) for prompt in self.prompts]
        content = json.dumps(told, sort_keys=True, default=str)
        if answered := self._documents[len(self.prompts) * self.completions_per_prompt :]:
            of_data = CorpusFingerprint()
            for document in answered:
                of_data.add(document)
            content += str(of_data)
        return sha256(content.encode())

    def document(self, number: int) -> Document:
        """Return a document; of a completion, that of the present round."""
        return self._now[number]

    def set_rollouts(self, rollouts: Mapping[int, Rollout], weights: Mapping[int, float]) -> None:
        """Take what the student wrote.

        Args:
            rollouts: by the numbers of documents.
            weights: what each counts.
        """
        for number in self._taken:
            self._now[number] = self._documents[number]
        self._top_ids, self._taken = {}, list(rollouts)
        for number, rollout in rollouts.items():
            document = rollout.document
            self._now[number] = replace(document, weight=document.weight * weights[number])
            if rollout.top_ids is not None:
                self._top_ids[number] = np.asarray(rollout.top_ids, np.int32)

    def plan_jobs(self, numbers: NDArray[np.int64], epoch: int, folder: Path) -> list[CacheJob | None]:
        """Return what each teacher has to do for a round; None: nothing. As `LiveSource.works`."""
        works: list[CacheJob | None] = []
        for at, teacher in enumerate(self.teachers):
            own = [int(n) for n in numbers if not self._names or self.document(n).teacher_name == self._names[at]]
            self._sizes[at, numbers] = NO_ROW
            if not own:
                works.append(None)
                continue
            asked = InMemoryCorpus([self._with_candidates(at, number) for number in own], ["rollouts"], {})
            read, sizes = teacher.read_corpus(asked, "")
            self._sizes[at, own] = sizes
            works.append(teacher.make_job(InMemoryCorpus(read, asked.sources, {}), sizes, folder / str(at), epoch))
        return works

    def _with_candidates(self, at: int, number: int) -> Document:
        """Return a document as a teacher is asked about it: with the tokens that it is to tell about."""
        document, teacher = self.document(number), self.teachers[at]
        if teacher.request.support.kind != "candidates":
            return document
        lists = teacher_candidate_ids(
            document, self._top_ids.get(number), self._student, teacher.teacher_tokenizer, self._images[at]
        )
        return document.with_candidate_ids(lists)


def teacher_candidate_ids(
    document: Document,
    top_ids: NDArray[np.int32] | None,
    student: Tokenizer,
    teacher: Tokenizer,
    projection: Projection | None,
) -> list[NDArray[np.int32]]:
    """Return what a teacher is to tell about at each of its trained tokens, where the student began a token too.

    Args:
        document: what the student wrote.
        top_ids: int32 [drawn tokens, G], which tokens the student found likeliest in their places; None: unknown, and
            the teacher is asked about the tokens of the text alone.
        student: its tokenizer.
        teacher: the teacher's tokenizer.
        projection: how the student's tokens lead to the teacher's; None: they are the same.
    """
    ((_, theirs),) = teacher_views(teacher, [document])
    (ours,) = tokenize_documents(student, [document])
    places = np.flatnonzero(theirs.train_mask)
    lists = {place: np.zeros(0, np.int32) for place in places.tolist()}
    drawn = document.sampled_tokens
    if top_ids is not None and drawn is not None:
        row_of = np.cumsum(drawn.sampled_mask) - 1
        for s0, _, t0, _ in align_sequences(ours, theirs).tolist():
            if t0 in lists and s0 < len(drawn.sampled_mask) and drawn.sampled_mask[s0]:
                lists[t0] = _led(top_ids[row_of[s0]], projection)
    return [lists[place] for place in places.tolist()]


def _led(ids: NDArray[np.int32], image: Projection | None) -> NDArray[np.int32]:
    if image is None:
        return ids
    edges = image.row_offsets
    return np.unique(np.concatenate([image.teacher_ids[edges[one] : edges[one + 1]] for one in ids.tolist()]))


class OnPolicyLoop(TeacherBlocks):
    """The steps of an on-policy run, in rounds.

    Args:
        source: of the documents.
        order: which of them a step takes.
        steps: of the whole run.
        on_policy: how the student writes.
        output: the run's folder, which all processes see.
        accelerator: Accelerate's.
        writer: writes for the student; each process asks for its share of the prompts.
        check: compares rollouts that an engine generated with the student; None: the student generates them itself.

    Attributes:
        rollout_metrics: of the last round, for metrics.
        generation_seconds: that the student wrote, so far.
    """

    def __init__(
        self,
        source: OnPolicySource,
        sampler: PromptSampler,
        num_steps: int,
        on_policy: OnPolicyConfig,
        output: Path,
        accelerator: Any,
        generator: RolloutGenerator,
        check: LogprobCheck | None = None,
    ) -> None:
        super().__init__(source, sampler, num_steps, on_policy.steps_per_rollout_batch, output, accelerator)
        self._on_policy, self._rounds, self._check = on_policy, output / ROLLOUT_BATCHES_FOLDER, check
        self._generator = generator
        self._source: OnPolicySource = source
        self._order: PromptSampler = sampler
        self.rollout_metrics: dict[str, float] = {}
        self.generation_seconds = 0.0
        self._reported: MetricsFile | None = None
        self._first_step = 0

    def __call__(self, steps: range, stop_listener: StopListener) -> Iterator[range]:
        """Yield the steps in rounds; before each the student writes and its teachers score, or what they did is read.

        A signal ends them, in all processes; what was written by then is kept.

        Args:
            steps: those that are left.
            stop_listener: knows of signals.

        Raises:
            XtkError: the rollouts of a round show a sign of collapse after which the run is to end.
        """
        self._first_step = steps.start
        self._forget_later(steps.start)
        for number, block in enumerate(self.blocks()):
            if block.stop <= steps.start:
                continue
            folder = self._rounds / f"{number:06d}"
            started = time.monotonic()
            self._generate_rollouts(block, folder, is_current=steps.start <= block.start)
            written = time.monotonic()
            if stop_listener.reason(self._accelerator.device, by_signals=True) or not self._scored(
                block, folder, stop_listener
            ):
                self._source.close_caches()
                return
            self.generation_seconds += written - started
            self.teacher_seconds += time.monotonic() - written
            try:
                yield range(max(block.start, steps.start), block.stop)
            finally:
                self._source.close_caches()
            self._forget_saved()

    def blocks(self) -> Iterator[range]:
        """Yield the steps of each round of the whole run."""
        for start in range(0, self._steps, self.size):
            yield range(start, min(start + self.size, self._steps))

    def finish(self) -> None:
        """Remove what was kept of rounds; the run is done."""
        self._generator.close()
        if self._accelerator.is_main_process:
            shutil.rmtree(self._rounds, ignore_errors=True)

    def staleness(self, step: int) -> int:
        """Return how many steps the student took since it wrote what a step takes."""
        return step % self.size if self._order.is_on_policy(step) else 0

    def metrics(self, step: int) -> dict[str, float]:
        """Return what metrics tell of a step's rollouts."""
        writes = self._order.is_on_policy(step)
        figures = {
            f"rollout_{name}" if name != "reward" else name: value for name, value in self.rollout_metrics.items()
        }
        return {
            **super().metrics(step),
            **(figures if writes else {}),
            "is_on_policy_step": int(writes),
            "staleness_steps": self.staleness(step),
            "generation_seconds": round(self.generation_seconds, 3),
        }

    def _forget_later(self, start: int) -> None:
        """Remove rounds behind the one in which the run goes on: the student writes them anew."""
        if self._accelerator.is_main_process:
            for number, folder in self._kept():
                if number * self.size > start:
                    shutil.rmtree(folder, ignore_errors=True)
        self._accelerator.wait_for_everyone()

    def _forget_saved(self) -> None:
        """Remove rounds before the last checkpoint, but for those inside of which an earlier checkpoint lies."""
        saved = [step for step, _ in list_checkpoints(self._output)]
        for number, folder in self._kept() if saved and self._accelerator.is_main_process else []:
            start, stop = number * self.size, (number + 1) * self.size
            if stop <= saved[-1] and not any(start < step < stop for step in saved):
                shutil.rmtree(folder, ignore_errors=True)

    def _kept(self) -> list[tuple[int, Path]]:
        return [(int(folder.name), folder) for folder in self._rounds.glob("[0-9]*") if folder.name.isdecimal()]

    def _generate_rollouts(self, block: range, folder: Path, *, is_current: bool) -> None:
        """Have the student write what the steps of a round take, each process its share, and read it.

        Args:
            block: the steps.
            folder: where the rollouts are stored.
            is_current: whether the student's weights are those of the first of the steps.
        """
        accelerator, on_policy = self._accelerator, self._on_policy
        writing = [step for step in block if self._order.is_on_policy(step)]
        times: dict[int, int] = {}
        for step in writing:
            for prompt, before in self._order.prompts_of_step(step):
                times.setdefault(prompt, before)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        there = _complete_rollout_files(folder)
        accelerator.wait_for_everyone()  # everybody looked before anybody writes
        if there is None and times and block.start < self._first_step:
            raise CorruptError(
                f"the rollouts of steps {block.start + 1:,} to {block.stop:,} are missing, and the run goes on after "
                f"step {self._first_step:,}",
                where=str(folder),
                hint=f"move {CHECKPOINT}-{self._first_step} to another folder: the one before is taken",
            )
        if there is None and times:
            folder.mkdir(parents=True, exist_ok=True)
            self._generator.sync_weights(block.start)
            rank, ranks = (0 if rank == 0 else None, 1) if self._generator.main_process_only else (rank, ranks)
            own = [] if rank is None else sorted(times)[rank::ranks]
            rollouts = [
                rollout
                for before in sorted({times[number] for number in own})
                for rollout in self._generator.generate(
                    [self._source.prompts[n] for n in own if times[n] == before], before
                )
            ]
            self._generator.sleep()
            if rank is not None:
                _store(folder / _name(rank, ranks), rollouts)
        accelerator.wait_for_everyone()
        parts = there or _complete_rollout_files(folder) or []
        found = [rollout for part in parts for rollout in _stored(part, self._source)]
        written = {one.prompt * on_policy.num_generations + one.sample: one for one in found}
        weights = dict.fromkeys(written, 1.0)
        for step in writing:
            numbers = [number for number in dict.fromkeys(self._order.documents_of_step(step)) if number in written]
            usable = [number for number in numbers if not written[number].unusable_reason]
            weights |= dict.fromkeys(numbers, 0.0) | dict.fromkeys(usable, 1.0)
            if on_policy.reward_beta and usable:
                some = [written[number] for number in usable]
                counts = reward_weights(
                    [one.reward for one in some], [one.prompt for one in some], on_policy.reward_beta
                )
                weights |= dict(zip(usable, counts.tolist(), strict=True))
        self._source.set_rollouts(written, weights)
        if found:
            self.rollout_metrics = rollout_metrics(found)
            if self._check is not None:
                self.rollout_metrics |= self._compared(self._check, found, folder / COMPARISON_FILE, is_current)
            self._log_sample(block, found)

    def _compared(
        self, check: LogprobCheck, rollouts: Sequence[Rollout], path: Path, is_current: bool
    ) -> dict[str, float]:
        """Return how far the engine's log-probabilities are from the student's; stored, as weights change."""
        if is_current:
            try:
                difference = check(rollouts)
            except XtkError:  # the same command is to generate them again
                if self._accelerator.is_main_process:
                    shutil.rmtree(path.parent, ignore_errors=True)
                raise
            if difference is not None and self._accelerator.is_main_process:
                write_json(path, {"logprob_difference": difference})
            return {} if difference is None else {"logprob_difference": difference}
        return dict(read_json(path)) if path.is_file() else {}

    def _log_sample(self, block: range, rollouts: Sequence[Rollout]) -> None:
        """Add a rollout of the round to those that people read, and look for signs of collapse."""
        if self._accelerator.is_main_process:
            one = rollouts[0]
            record = {
                "step": block.start,
                "prompt": one.prompt,
                "text": one.document.text,
                "finish_reason": one.finish_reason,
                **({} if math.isnan(one.reward) else {"reward": one.reward}),
            }
            if self._reported is None:  # a killed run wrote those of rounds that come again
                self._reported = MetricsFile(self._output / ROLLOUTS_FILE, block.start - 1)
            self._reported.write(record)
        for sign in self._on_policy.stop_if:
            if sign.is_met(self.rollout_metrics):
                raise XtkError(
                    f"the rollouts show a sign of collapse: {sign.name} is {self.rollout_metrics[sign.name]:.4g}, "
                    f"--stop-if "
                    f"{sign}",
                    where=f"the round of steps {block.start + 1:,} to {block.stop:,} of {self._output}",
                    hint="a smaller --learning-rate, fewer --num-iterations, ce on data with --lmbda below 1; "
                    "checkpoints before it are kept",
                )

    def _write_cache(self, teacher: OnlineTeacher, work: CacheJob, stop: StopListener) -> bool:
        place = Path(work.location)
        whole = (place / MANIFEST).is_file() and TeacherCache(place).header == work.header
        self._accelerator.wait_for_everyone()
        return whole or super()._write_cache(teacher, work, stop)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return what tells of some rollouts, by the names of `FIGURES`."""
    drawn = [one.document.sampled_tokens for one in rollouts if one.document.sampled_tokens is not None]
    ids = [tokens.ids[tokens.sampled_mask].tolist() for tokens in drawn]
    logprobs = np.concatenate([np.zeros(0), *(tokens.logprobs[tokens.sampled_mask] for tokens in drawn)])
    logprobs = logprobs[np.isfinite(logprobs)]
    repeated = np.array([count_repeated_ngrams(some) for some in ids]).reshape(-1, 2).sum(axis=0)
    figures = {
        "entropy": float(-logprobs.mean()) if len(logprobs) else 0.0,
        "length": float(np.mean([len(some) for some in ids])) if ids else 0.0,
        "truncated_fraction": float(np.mean([one.finish_reason == "length" for one in rollouts])),
        "repeated_4gram_fraction": float(repeated[0] / max(repeated[1], 1)),
        "unusable_fraction": float(np.mean([bool(one.unusable_reason) for one in rollouts])),
        "turns": float(np.mean([one.num_turns for one in rollouts])),
        "environment_token_fraction": 1
        - sum(map(len, ids)) / max(sum(_behind_the_prompt(tokens) for tokens in drawn), 1),
    }
    judged = [one.reward for one in rollouts if math.isfinite(one.reward)]
    return {**figures, **({"reward": float(np.mean(judged))} if judged else {})}


def _behind_the_prompt(tokens: SampledTokens) -> int:
    places = np.flatnonzero(tokens.sampled_mask)
    return int(places[-1] - places[0] + 1) if len(places) else 0


# How a round lies on the disk.


def _name(rank: int, ranks: int) -> str:
    return f"rollouts-{rank:05d}-of-{ranks:05d}.jsonl"


def _complete_rollout_files(folder: Path) -> list[Path] | None:
    """Return the files of a round, if all processes wrote theirs, however many they were."""
    for first in sorted(folder.glob("rollouts-00000-of-*.jsonl")):
        ranks = int(first.stem.rpartition("-")[2])
        parts = [folder / _name(rank, ranks) for rank in range(ranks)]
        if all(part.is_file() for part in parts):
            return parts
    return None


def _store(path: Path, rollouts: Sequence[Rollout]) -> None:
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for one in rollouts:
            drawn, top_ids = one.document.sampled_tokens, one.top_ids
            record = {
                "prompt": one.prompt,
                "sample": one.sample,
                "finish_reason": one.finish_reason,
                "turns": one.num_turns,
                "reward": None if math.isnan(one.reward) else one.reward,
                "rewards": {name: None if math.isnan(value) else value for name, value in one.rewards.items()},
                "complete": one.document.is_complete,
                "segments": [[part.role, part.text, part.train] for part in one.document.segments],
                "messages": None if one.document.conversation is None else list(one.document.conversation.messages),
                "sampled_tokens": None if drawn is None else base64.b64encode(drawn.to_bytes()).decode(),
                "top_ids": None if top_ids is None else np.asarray(top_ids).tolist(),
            }
            stream.write(json.dumps({**record, "checksum": _rollout_checksum(path, record)}) + "\n")


def _rollout_checksum(path: Path, record: Mapping[str, Any]) -> str:
    """Return xxh3 of a rollout and of its place: the round and the process."""
    return "xxh3:" + xxhash.xxh3_64_hexdigest(f"{path.parent.name}/{path.name} {json.dumps(record)}".encode())


def _read_rollout_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of rollouts.

    Raises:
        Damaged: one of them does not match its checksum.
    """
    try:
        records = [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        stated = [record.pop("checksum") for record in records]
    except (ValueError, TypeError, KeyError, RecursionError):
        records, stated = [{}], [""]
    if stated != [_rollout_checksum(path, record) for record in records]:
        raise CorruptError(
            "these rollouts do not match their checksums",
            where=str(path),
            hint=f"rm -r {path.parent}, and the same command again: the student writes them again",
        )
    return records


def _stored(path: Path, source: OnPolicySource) -> Iterator[Rollout]:
    for record in _read_rollout_records(path):
        of_prompt = source.prompts[record["prompt"]].document
        talk = of_prompt.conversation
        document = replace(
            of_prompt,
            segments=tuple(Segment(*part) for part in record["segments"]),
            is_complete=record["complete"],
            conversation=None if talk is None else replace(talk, messages=tuple(record["messages"])),
            sampled_tokens=None
            if record["sampled_tokens"] is None
            else SampledTokens.from_bytes(base64.b64decode(record["sampled_tokens"])),
        )
        yield Rollout(
            document,
            prompt=record["prompt"],
            sample=record["sample"],
            finish_reason=record["finish_reason"],
            num_turns=record["turns"],
            reward=math.nan if record["reward"] is None else record["reward"],
            rewards={name: math.nan if value is None else value for name, value in record["rewards"].items()},
            top_ids=None if record["top_ids"] is None else np.array(record["top_ids"], np.int32),
        )
