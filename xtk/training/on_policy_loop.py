"""On-policy training loop: the student generates a rollout batch, the teachers score it, the student trains on it.

A rollout batch stays in the run folder until a later checkpoint exists, with the log-probabilities of teachers that
would not repeat them (`StoredScores`). A run that is killed within a batch resumes with the same rollouts, although
the weights that generated them are gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xtk.data.corpus_reader import CorpusFingerprint
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import read_json, sha256, write_json
from xtk.files.run_names import CHECKPOINT, list_checkpoints
from xtk.parallel import process_group
from xtk.parallel.graceful_stop import StopListener
from xtk.projection.projection import SparseProjection
from xtk.rollouts.rollout_record import Prompt, Rollout
from xtk.runs.folder import ROLLOUTS_FILE
from xtk.runs.metrics_file import MetricsFile
from xtk.runs.rollout_batch_files import (
    COMPARISON_FILE,
    ROLLOUT_BATCHES,
    complete_rollout_files,
    read_rollouts,
    remove_rollout_batch,
    rollout_file_name,
    write_rollouts,
)
from xtk.teachers.cache_shard_planning import Chunk
from xtk.teachers.online_teacher import OnlineTeacher
from xtk.teachers.source import NO_ROW, TeacherSource
from xtk.text.alignment import align_sequences, separate_added_spaces
from xtk.text.document import Document
from xtk.text.document_token_ids import SampledTokens
from xtk.text.token_sequence import TokenSequence
from xtk.text.tokenizer import Tokenizer
from xtk.training.on_policy_config import OnPolicyConfig, PromptSampler, count_repeated_ngrams, reward_weights
from xtk.training.online_teacher_scoring import OnlineDocuments, TeacherBlocks
from xtk.training.student_generator import LogprobCheck, StudentGenerator


class OnPolicyDocuments(OnlineDocuments):
    """The current rollout batch, the documents of the data (none, or one a prompt), and the teachers' outputs for both.

    `route_names`: the teachers' names, if each document names its teacher. `projections`: those of teachers with
    another tokenizer and `--support candidates`.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        data: Sequence[Document],
        completions_per_prompt: int,
        student: Tokenizer,
        online_teachers: Sequence[OnlineTeacher],
        teachers: Sequence[TeacherSource],
        route_names: Sequence[str],
        projections: Sequence[SparseProjection | None],
    ) -> None:
        placeholders = [prompt.document for prompt in prompts for _ in range(completions_per_prompt)]
        sizes = np.full((len(online_teachers), len(placeholders) + len(data)), NO_ROW, np.int32)
        super().__init__([*placeholders, *data], online_teachers, sizes, teachers)
        self.prompts, self.completions_per_prompt = prompts, completions_per_prompt
        self._student, self._names, self._projections = student, route_names, projections
        self._current = list(self._documents)
        self._top_ids: dict[int, NDArray[np.int32]] = {}
        self._taken: list[int] = []
        self._chunks: list[dict[int, Chunk]] = []
        self._student_tokens: dict[int, TokenSequence] = {}

    def fingerprint(self) -> str:
        """Return the hash of the records, which contain prompts, completions and inputs of rewards and environments."""
        records = [dict(prompt.record) for prompt in self.prompts]
        content = json.dumps(records, sort_keys=True, default=str)
        if with_completions := self._documents[len(self.prompts) * self.completions_per_prompt :]:
            content += str(CorpusFingerprint.of(with_completions))
        return sha256(content.encode())

    def document(self, number: int) -> Document:
        """Return a document; for a completion, the one of the current rollout batch."""
        return self._current[number]

    def set_rollouts(self, rollouts: Mapping[int, Rollout], weights: Mapping[int, float]) -> None:
        """Replace the current rollout batch."""
        for number in self._taken:
            self._current[number] = self._documents[number]
        self._top_ids, self._taken, self._student_tokens = {}, list(rollouts), {}
        for number, rollout in rollouts.items():
            document = rollout.document
            self._current[number] = replace(document, weight=document.weight * weights[number])
            if rollout.top_ids is not None:
                self._top_ids[number] = np.asarray(rollout.top_ids, np.int32)

    def student_tokens(self, tokenizer: Tokenizer, numbers: Sequence[int]) -> list[TokenSequence]:
        """Return the student's tokens of some documents; those of a rollout batch are computed once."""
        new = list(dict.fromkeys(number for number in numbers if number not in self._student_tokens))
        self._student_tokens |= zip(new, super().student_tokens(tokenizer, new), strict=True)
        return [self._student_tokens[number] for number in numbers]

    def prepare_block(self, numbers: NDArray[np.int64]) -> None:
        """Tokenize the documents of a rollout batch for each teacher that scores them, once."""
        self._chunks = []
        for at, teacher in enumerate(self.online_teachers):
            own = [int(n) for n in numbers if not self._names or self.document(n).teacher_name == self._names[at]]
            chunks = dict(zip(own, teacher.tokenize([self.document(number) for number in own]), strict=True))
            if teacher.request.support.kind == "candidates":
                ours = self.student_tokens(self._student, own)
                chunks = {
                    number: self._with_candidates(at, number, *chunk, student)
                    for (number, chunk), student in zip(chunks.items(), ours, strict=True)
                }
            self._chunks.append(chunks)
            self._sizes[at] = NO_ROW
            self._sizes[at, own] = [len(tokens) for _, tokens in chunks.values()]

    def chunks(self, teacher: int, part: Sequence[int]) -> list[Chunk]:
        """Return the documents of a part with the teacher's tokens."""
        return [self._chunks[teacher][number] for number in part]

    def _with_candidates(
        self, at: int, number: int, document: Document, theirs: TokenSequence, ours: TokenSequence
    ) -> Chunk:
        """Return a document with the candidate tokens for a teacher to score, and the teacher's tokens."""
        lists = teacher_candidate_ids(document, self._top_ids.get(number), ours, theirs, self._projections[at])
        return document.with_candidate_ids(lists), theirs


def teacher_candidate_ids(
    document: Document,
    top_ids: NDArray[np.int32] | None,
    ours: TokenSequence,
    theirs: TokenSequence,
    projection: SparseProjection | None,
) -> list[NDArray[np.int32]]:
    """Return the candidate tokens for a teacher to score at each of its trained tokens: one array of ids for each.

    It is empty where no sampled student token begins, and without `top_ids`, int32 [sampled tokens, G], the student's
    top tokens at each position.
    """
    positions = np.flatnonzero(theirs.train_mask)
    lists = {position: np.zeros(0, np.int32) for position in positions.tolist()}
    sampled = document.sampled_tokens
    if top_ids is not None and sampled is not None:
        row_of = np.cumsum(sampled.sampled_mask) - 1
        for s0, _, t0, _ in separate_added_spaces(align_sequences(ours, theirs), ours, theirs).tolist():
            if t0 in lists and s0 < len(sampled.sampled_mask) and sampled.sampled_mask[s0]:
                lists[t0] = _project_ids(top_ids[row_of[s0]], projection)
    return [lists[position] for position in positions.tolist()]


def _project_ids(ids: NDArray[np.int32], projection: SparseProjection | None) -> NDArray[np.int32]:
    if projection is None:
        return ids
    edges = projection.row_offsets
    return np.unique(np.concatenate([projection.teacher_ids[edges[one] : edges[one + 1]] for one in ids.tolist()]))


class OnPolicyLoop(TeacherBlocks):
    """Iterates over the steps of an on-policy run, in rollout batches; each process generates a part of each."""

    def __init__(
        self,
        source: OnPolicyDocuments,
        sampler: PromptSampler,
        num_steps: int,
        on_policy: OnPolicyConfig,
        output: Path,
        accelerator: Any,
        generator: StudentGenerator,
        run_fingerprint: str,
        check: LogprobCheck | None = None,
        documents_of_step: Callable[[int], Iterable[int]] | None = None,
    ) -> None:
        super().__init__(source, sampler, num_steps, on_policy.steps_per_rollout_batch, accelerator, documents_of_step)
        self._output = output
        self._on_policy, self._batches_folder, self._check = on_policy, output / ROLLOUT_BATCHES, check
        self._fingerprint = run_fingerprint
        self._generator = generator
        self._source: OnPolicyDocuments = source
        self._order: PromptSampler = sampler
        self.rollout_metrics: dict[str, float] = {}
        self.generation_seconds = 0.0
        self._reported: MetricsFile | None = None
        self._first_step = 0

    def __call__(self, steps: range, stop_listener: StopListener) -> Iterator[range]:
        """Yield the steps of each rollout batch, after generating and scoring it, or reading a stored one.

        Iteration ends after a stop signal, in all processes; generated rollouts are kept.
        """
        self._first_step = steps.start
        self._remove_later_batches(steps.start)
        for number, block in enumerate(self.blocks()):
            if block.stop <= steps.start:
                continue
            folder = self._batches_folder / f"{number:06d}"
            started = time.monotonic()
            self._generate_rollouts(block, folder, is_current=steps.start <= block.start)
            generated = time.monotonic()
            if stop_listener.reason(by_signals=True) or not self.score_block(block, stop_listener, folder):
                return
            self.generation_seconds += generated - started
            yield range(max(block.start, steps.start), block.stop)
            self._remove_saved_batches()

    def blocks(self) -> Iterator[range]:
        """Yield the steps of each rollout batch of the whole run."""
        for start in range(0, self._steps, self.size):
            yield range(start, min(start + self.size, self._steps))

    def finish(self) -> None:
        """End the generator and teachers, and remove stored rollout batches."""
        super().finish()
        self._generator.close()
        if self._accelerator.is_main_process:
            for _, folder in self._stored_batches():
                remove_rollout_batch(folder)
            with contextlib.suppress(OSError):  # it contains files of the user
                self._batches_folder.rmdir()

    def staleness(self, step: int) -> int:
        """Return the number of optimizer steps between generating a step's rollouts and training on them."""
        return step % self.size if self._order.is_on_policy(step) else 0

    def metrics(self, step: int) -> dict[str, float]:
        """Return the on-policy metrics of a step."""
        on_policy = self._order.is_on_policy(step)
        figures = {
            f"rollout_{name}" if name != "reward" else name: value for name, value in self.rollout_metrics.items()
        }
        return {
            **super().metrics(step),
            **(figures if on_policy else {}),
            "is_on_policy_step": int(on_policy),
            "staleness_steps": self.staleness(step),
            "generation_seconds": round(self.generation_seconds, 3),
        }

    def _remove_later_batches(self, start: int) -> None:
        """Remove rollout batches after the one in which the run resumes; they are generated again."""
        if self._accelerator.is_main_process:
            for number, folder in self._stored_batches():
                if number * self.size > start:
                    remove_rollout_batch(folder)
        process_group.barrier()

    def _remove_saved_batches(self) -> None:
        """Remove rollout batches before the last checkpoint, except those that contain an earlier checkpoint."""
        saved = [step for step, _ in list_checkpoints(self._output)]
        for number, folder in self._stored_batches() if saved and self._accelerator.is_main_process else []:
            start, stop = number * self.size, (number + 1) * self.size
            if stop <= saved[-1] and not any(start < step < stop for step in saved):
                remove_rollout_batch(folder)

    def _stored_batches(self) -> list[tuple[int, Path]]:
        return [(int(folder.name), folder) for folder in self._batches_folder.glob("[0-9]*") if folder.name.isdecimal()]

    def _generate_rollouts(self, block: range, folder: Path, *, is_current: bool) -> None:
        """Generate the rollouts of a batch, each process a part, unless they are stored; then load them.

        `is_current`: whether the student has the weights of the first of these steps.
        """
        accelerator, on_policy = self._accelerator, self._on_policy
        on_policy_steps = [step for step in block if self._order.is_on_policy(step)]
        epochs: dict[int, int] = {}
        for step in on_policy_steps:
            for prompt, epoch in self._order.prompts_of_step(step):
                epochs.setdefault(prompt, epoch)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        stored = complete_rollout_files(folder)
        process_group.barrier()  # all processes list the files before one writes
        if stored is None and epochs and block.start < self._first_step:
            raise CorruptError(
                f"the run resumes after step {self._first_step:,}, but the stored rollouts of steps "
                f"{block.start + 1:,} to {block.stop:,} are missing",
                where=str(folder),
                hint=f"move {CHECKPOINT}-{self._first_step} out of the run folder to resume from an earlier one",
            )
        if stored is None and epochs:
            folder.mkdir(parents=True, exist_ok=True)
            self._generator.sync_weights(block.start)
            rank, ranks = (0 if rank == 0 else None, 1) if self._generator.main_process_only else (rank, ranks)
            own = [] if rank is None else sorted(epochs)[rank::ranks]
            rollouts = [
                rollout
                for epoch in sorted({epochs[number] for number in own})
                for rollout in self._generator.generate(
                    [self._source.prompts[n] for n in own if epochs[n] == epoch], epoch
                )
            ]
            _refuse_missing_rollouts(own, rollouts)
            if rank is not None:
                write_rollouts(folder / rollout_file_name(rank, ranks), rollouts, self._fingerprint)
        self._generator.sleep()  # also if nothing was generated: an engine starts awake
        process_group.barrier()
        parts = stored or complete_rollout_files(folder) or []
        stored_rollouts = self._read_batch(parts, block)
        size = on_policy.num_generations
        by_document = {rollout.prompt * size + rollout.sample: rollout for rollout in stored_rollouts}
        if len(stored_rollouts) != len(by_document) or len(stored_rollouts) != len(epochs) * on_policy.num_generations:
            raise self._corrupt_batch_error("the stored rollouts are incomplete or corrupt", str(folder), block)
        weights = dict.fromkeys(by_document, 1.0)
        for step in on_policy_steps:
            numbers = [number for number in dict.fromkeys(self._order.documents_of_step(step)) if number in by_document]
            usable = [number for number in numbers if not by_document[number].unusable_reason]
            weights |= dict.fromkeys(numbers, 0.0) | dict.fromkeys(usable, 1.0)
            if on_policy.reward_beta and usable:
                some = [by_document[number] for number in usable]
                usable_weights = reward_weights(
                    [item.reward for item in some], [item.prompt for item in some], on_policy.reward_beta
                )
                weights |= dict(zip(usable, usable_weights.tolist(), strict=True))
        self._source.set_rollouts(by_document, weights)
        if stored_rollouts:
            self.rollout_metrics = rollout_metrics(stored_rollouts)
            if self._check is not None:
                self.rollout_metrics |= self._compare_logprobs(
                    self._check, stored_rollouts, folder / COMPARISON_FILE, is_current
                )
            self._log_sample(block, stored_rollouts)

    def _read_batch(self, parts: Sequence[Path], block: range) -> list[Rollout]:
        """Return the rollouts in the files of a batch."""
        rollouts = []
        for path in parts:
            try:
                rollouts += read_rollouts(path, self._fingerprint, self._source.prompts)
            except CorruptError as failure:
                raise self._corrupt_batch_error(failure.what, str(path), block) from None
        return rollouts

    def _corrupt_batch_error(self, what: str, where: str, block: range) -> CorruptError:
        """Return the error for a stored batch; only the weights before its first step could generate it again."""
        folder = self._batches_folder / f"{block.start // self.size:06d}"
        hint = (
            f"move {CHECKPOINT}-{self._first_step} out of the run folder to resume from an earlier one"
            if block.start < self._first_step
            else f"run rm -r {folder} and the same command again, which generates them again"
        )
        return CorruptError(what, where=where, hint=hint)

    def _compare_logprobs(
        self, check: LogprobCheck, rollouts: Sequence[Rollout], path: Path, is_current: bool
    ) -> dict[str, float]:
        """Return the metric of the log-probability check; computed with current weights, and stored for a resume."""
        if is_current:
            try:
                difference = check(rollouts)
            except XtkError:  # the same command generates them again
                if self._accelerator.is_main_process:
                    remove_rollout_batch(path.parent)
                raise
            if difference is not None and self._accelerator.is_main_process:
                write_json(path, {"logprob_difference": difference})
            return {} if difference is None else {"logprob_difference": difference}
        return dict(read_json(path)) if path.is_file() else {}

    def _log_sample(self, block: range, rollouts: Sequence[Rollout]) -> None:
        """Append one rollout of the batch to the log of rollouts."""
        if self._accelerator.is_main_process:
            one = rollouts[0]
            record = {
                "step": block.start,
                "prompt": one.prompt,
                "text": one.document.text,
                "finish_reason": one.finish_reason,
                **({} if math.isnan(one.reward) else {"reward": one.reward}),
            }
            if self._reported is None:  # drop entries of batches that a killed run repeats
                self._reported = MetricsFile(self._output / ROLLOUTS_FILE, block.start - 1)
            self._reported.write(record)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of some rollouts; they are logged with the prefix `rollout_`."""
    sampled = [rollout.document.sampled_tokens for rollout in rollouts if rollout.document.sampled_tokens is not None]
    ids = [tokens.ids[tokens.sampled_mask].tolist() for tokens in sampled]
    logprobs = np.concatenate([np.zeros(0), *(tokens.logprobs[tokens.sampled_mask] for tokens in sampled)])
    logprobs = logprobs[np.isfinite(logprobs)]
    repeated = np.array([count_repeated_ngrams(some) for some in ids]).reshape(-1, 2).sum(axis=0)
    figures = {
        "entropy": float(-logprobs.mean()) if len(logprobs) else 0.0,
        "length": float(np.mean([len(some) for some in ids])) if ids else 0.0,
        "truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "repeated_4gram_fraction": float(repeated[0] / max(repeated[1], 1)),
        "unusable_fraction": float(np.mean([bool(rollout.unusable_reason) for rollout in rollouts])),
        "turns": float(np.mean([rollout.num_turns for rollout in rollouts])),
        "environment_token_fraction": 1
        - sum(map(len, ids)) / max(sum(_tokens_after_prompt(tokens) for tokens in sampled), 1),
    }
    scored = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
    return {**figures, **({"reward": float(np.mean(scored))} if scored else {})}


def _tokens_after_prompt(tokens: SampledTokens) -> int:
    positions = np.flatnonzero(tokens.sampled_mask)
    return int(positions[-1] - positions[0] + 1) if len(positions) else 0


def _refuse_missing_rollouts(prompts: Sequence[int], rollouts: Sequence[Rollout]) -> None:
    """Refuse prompts without rollouts: with an environment, only generation shows that one has no space."""
    missing = sorted(set(prompts) - {rollout.prompt for rollout in rollouts})
    if missing:
        raise XtkError(
            f"{len(missing):,} prompts with the first message of the environment leave no space for a completion in "
            "the student's context",
            where=f"row {missing[0]} of the data",
            hint="remove or shorten these prompts; with --rollout-engine max_model_len=N, use a larger N",
        )
