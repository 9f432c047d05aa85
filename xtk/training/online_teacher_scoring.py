"""Online teachers: they score the documents of a block of steps, leave the device, and the student trains on these."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk import terminal
from xtk.batches.data_sources import TextDocuments
from xtk.batches.losses_per_teacher import number_duplicate_names
from xtk.batches.micro_batches import BatchSampler
from xtk.cache.reader import open_verified_shard
from xtk.cache.shard import CacheShard
from xtk.cache.shard_writing import ShardPosition, write_shard
from xtk.cache.teacher_document import TeacherDocument, without_bytes
from xtk.data.corpus_reader import Corpus, CorpusFingerprint, InMemoryCorpus
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import atomic_write
from xtk.parallel import process_group
from xtk.parallel.graceful_stop import StopListener
from xtk.rollouts.prompts import PromptFormat, read_prompts
from xtk.rollouts.rollout_record import Prompt
from xtk.teachers.cache_shard_planning import Chunk
from xtk.teachers.online_teacher import PART_BYTES, PART_TOKENS, OnlineTeacher, read_corpus_for_all
from xtk.teachers.source import NO_ROW, TeacherSource
from xtk.text.document import Document

COMMAND_NAME = "distill"
DEFAULT_BLOCK_STEPS, DEFAULT_BLOCK_BYTES = 64, 4 << 30  # limits of a block without --teacher-block-steps


class StoredScores:
    """The scores of one teacher in the folder of a rollout batch: a shard for each part that is scored at once.

    Only of a teacher that a resumed run would score with other results: servers and vLLM round differently each time,
    and the weights of a teacher that is the student change with each step.
    """

    def __init__(
        self, folder: Path | None, number: int, teacher: OnlineTeacher, parts: Sequence[Sequence[Document]]
    ) -> None:
        self._folder = None if teacher.scores_repeat else folder
        self._teacher, self._number, self._parts = teacher, number, parts
        self._shards: dict[int, CacheShard] = {}

    def read(self) -> dict[int, list[TeacherDocument]]:
        """Return the documents of the parts that are stored; parts that are damaged or of other documents are not."""
        for part in range(len(self._parts)) if self._folder is not None else ():
            path = self._path(part)
            try:
                if path.is_file() and (shard := open_verified_shard(path, str(path))).header == self._header(part):
                    shard.load_bytes_of = lambda: self._teacher.teacher_tokenizer.vocabulary.bytes_of
                    self._shards[part] = shard
            except CorruptError as failure:
                terminal.note(f"distill: {failure.where}: {failure.what}; scoring these documents again")
        return {part: [shard.read_document(row) for row in range(len(shard))] for part, shard in self._shards.items()}

    def write(self, part: int, documents: Sequence[TeacherDocument]) -> None:
        """Store the scores of a part."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path(part)) as temporary:
                write_shard(temporary, self._header(part), ShardPosition(part, 0, len(documents)), documents)

    def _path(self, part: int) -> Path:
        assert self._folder is not None
        return self._folder / f"scores-{self._number:05d}-{part:05d}.arrow"

    def _header(self, part: int) -> dict[str, Any]:
        data = {"fingerprint": str(CorpusFingerprint.of(self._parts[part]))}
        return {**self._teacher.header, "data": data}


class OnlineDocuments(TextDocuments):
    """Documents in memory that online teachers score block by block.

    `token_counts`: int32 [teachers, documents], -1: not scored. `teachers`: as the losses see them: a mixture is one.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        online_teachers: Sequence[OnlineTeacher],
        token_counts: NDArray[np.int32],
        teachers: Sequence[TeacherSource],
    ) -> None:
        super().__init__(documents, teachers)
        self.online_teachers, self._sizes = online_teachers, token_counts

    def prepare_block(self, numbers: NDArray[np.int64]) -> None:
        """Make the documents of a block ready to be scored; nothing to do here."""

    def parts(self, teacher: int, numbers: NDArray[np.int64]) -> list[list[int]]:
        """Return the documents that a teacher scores, in parts of up to `PART_TOKENS` tokens, about `PART_BYTES`."""
        most = min(PART_TOKENS, PART_BYTES // self.online_teachers[teacher].bytes_per_position)
        parts: list[list[int]] = []
        size = 0
        for number in numbers[self._sizes[teacher, numbers] >= 0].tolist():
            own = int(self._sizes[teacher, number])
            if not parts or size + own > most:
                parts.append([])
                size = 0
            parts[-1].append(number)
            size += own
        return parts

    def longest(self, teacher: int) -> int:
        """Return the tokens of the longest document of a teacher."""
        return int(self._sizes[teacher].max(initial=0))

    def chunks(self, teacher: int, part: Sequence[int]) -> list[Chunk]:
        """Return the documents of a part with the teacher's tokens."""
        return self.online_teachers[teacher].tokenize([self.document(number) for number in part])

    def bytes_per_document(self) -> float:
        """Return the estimated size of a document's teacher log-probabilities."""
        return sum(teacher.estimated_bytes_per_document for teacher in self.online_teachers)


class TeacherBlocks:
    """Iterates over the steps of a run in blocks; teachers score each block before it, in all processes.

    `block_steps`: 0: up to `DEFAULT_BLOCK_STEPS`, within `DEFAULT_BLOCK_BYTES`. `documents_of_step`: the documents of a
    step whose scores this process keeps; None: all.
    """

    def __init__(
        self,
        source: OnlineDocuments,
        sampler: BatchSampler,
        num_steps: int,
        block_steps: int,
        accelerator: Any,
        documents_of_step: Callable[[int], Iterable[int]] | None = None,
    ) -> None:
        self._source, self._order, self._steps = source, sampler, num_steps
        self._accelerator = accelerator
        self._documents_of_step = documents_of_step or (lambda step: self._order.documents_of_step(step))
        step_bytes = source.bytes_per_document() * len(sampler.documents_of_step(0))
        # Context manager with the student's `BackboneWithHead`, for `--teacher self`; its argument selects the weights.
        # Set by the training loop.
        self.lend_student: Callable[[str], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
        # Context manager that moves the student off its device, for --offload-student. Set by the training loop.
        self.offload: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.size = block_steps or max(1, min(DEFAULT_BLOCK_STEPS, int(DEFAULT_BLOCK_BYTES / max(step_bytes, 1.0))))
        self.teacher_seconds = 0.0

    def __call__(self, steps: range, stop_listener: StopListener) -> Iterator[range]:
        """Yield the steps of each block after scoring it; block boundaries do not depend on where a run resumes.

        Iteration ends after a stop signal, in all processes.
        """
        for block in self.blocks():
            if block.stop <= steps.start:
                continue
            if not self.score_block(block, stop_listener):
                return
            yield range(max(block.start, steps.start), block.stop)

    def blocks(self) -> Iterator[range]:
        """Yield the blocks of the whole run; a block lies within one epoch, which selects the set of sampled tokens."""
        start = 0
        while start < self._steps:
            epoch, stop = self._order.epoch_of_step(start), start + 1
            while stop < min(start + self.size, self._steps) and self._order.epoch_of_step(stop) == epoch:
                stop += 1
            yield range(start, stop)
            start = stop

    @property
    def lends_student(self) -> bool:
        """Whether a teacher is the student itself (`--teacher self`)."""
        return any(teacher.student_weights for teacher in self._source.online_teachers)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of scoring so far."""
        return {"teacher_seconds": round(self.teacher_seconds, 3)}

    def finish(self) -> None:
        """End the subprocesses of teachers at the end of the run."""
        for teacher in self._source.online_teachers:
            teacher.close()

    def score_block(self, block: range, stop: StopListener, folder: Path | None = None) -> bool:
        """Score the documents of a block, each process a part, and keep the scores of this process's documents.

        `folder`: for `StoredScores`; None: no scores are stored. Return False if a signal stopped it.
        """
        started = time.monotonic()
        accelerator, source = self._accelerator, self._source
        numbers = np.unique([number for step in block for number in self._order.documents_of_step(step)])
        wanted = {number for step in block for number in self._documents_of_step(step)}
        source.prepare_block(numbers)
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        if devices:
            torch.cuda.empty_cache()  # give memory of training steps to the teachers
        # --teacher self needs the student on its device.
        offload = contextlib.nullcontext if self.lends_student else self.offload
        epoch = self._order.epoch_of_step(block.start)
        with offload(), torch.random.fork_rng(devices):  # dropout stays the same as without a teacher
            for number, teacher in enumerate(source.online_teachers):
                teacher.forget()
                parts = source.parts(number, numbers)
                documents = [[source.document(at) for at in part] for part in parts]
                stored = StoredScores(folder, number, teacher, documents)
                if parts and not self._score(number, parts, stored, epoch, wanted, stop):
                    return False
        self.teacher_seconds += time.monotonic() - started
        return True

    def _score(
        self,
        number: int,
        parts: list[list[int]],
        stored: StoredScores,
        epoch: int,
        wanted: set[int],
        stop: StopListener,
    ) -> bool:
        """Score the parts of a block with one teacher; False: stopped by a signal."""
        accelerator, teacher, source = self._accelerator, self._source.online_teachers[number], self._source
        complete = stored.read()
        process_group.barrier()  # all processes read the files before one writes
        for part, documents in complete.items():
            teacher.keep(pair for pair in zip(parts[part], documents, strict=True) if pair[0] in wanted)
        own, of_first = (
            parts_of_process(range(len(parts)), complete, rank, accelerator.num_processes, teacher.needs_subprocess)
            for rank in (accelerator.process_index, 0)
        )
        chunks: list[list[Chunk]] = []

        def read_parts() -> Iterator[list[Chunk]]:
            for part in own:
                chunks.append(source.chunks(number, parts[part]))
                yield chunks[-1]

        lends = bool(teacher.student_weights)
        with (
            self.lend_student(teacher.student_weights) if lends else contextlib.nullcontext() as student,
            contextlib.closing(teacher.score(read_parts(), epoch, source.longest(number), student)) as scored,
        ):
            for turn in range(len(of_first)):  # no process has more parts than the first
                result = None
                if turn < len(own):
                    scores = next(scored)
                    documents = [TeacherDocument(*one, two) for one, two in zip(chunks[turn], scores, strict=True)]
                    stored.write(own[turn], documents)
                    result = own[turn], [(without_bytes(one.tokens), one.stored_logprobs) for one in documents]
                # Processes exchange results after each part: idle ones wait for one part, not until a timeout.
                for part, rows in filter(None, process_group.all_gather_object(result)):
                    teacher.keep(
                        (at, TeacherDocument(source.document(at), teacher.tokens_as_stored(tokens), logprobs))
                        for at, (tokens, logprobs) in zip(parts[part], rows, strict=True)
                        if at in wanted
                    )
                if stop.reason(by_signals=True):
                    return False
            if own:
                next(scored, None)  # to its end: a subprocess on its own devices stays for the next block
        teacher.release_device()
        if len(source.online_teachers) > 1:
            teacher.close()  # they share these devices
        return True


def parts_of_process(
    parts: Iterable[int], complete: Container[int], rank: int, num_processes: int, one_process: bool
) -> list[int]:
    """Return the parts that a process scores; with `one_process`, the first one scores all."""
    missing = [part for part in parts if part not in complete]
    if one_process:
        return missing if rank == 0 else []
    return missing[rank::num_processes]


def read_training_documents(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, *, is_routed: bool
) -> tuple[list[Document], NDArray[np.int32]]:
    """Return the documents of a run, checked against the teachers' limits, and their token counts.

    The counts are int32 [teachers, documents]; -1: not scored by this teacher.
    """
    if not is_routed:
        return read_corpus_for_all(teachers, corpus, COMMAND_NAME)
    names = teacher_names(teachers)
    parts: list[list[Document]] = [[] for _ in teachers]
    for document in _with_known_routes(corpus, names, corpus.name):
        parts[names.index(document.teacher_name)].append(document)
    documents: list[Document] = []
    lengths = []
    for teacher, part in zip(teachers, parts, strict=True):
        read, sizes = read_corpus_for_all([teacher], InMemoryCorpus(part, corpus.sources, corpus.columns), COMMAND_NAME)
        documents += read
        lengths.append(sizes[0])
    sizes = np.full((len(teachers), len(documents)), NO_ROW, np.int32)
    ends = np.cumsum([0, *map(len, lengths)])
    for number, own in enumerate(lengths):
        sizes[number, ends[number] : ends[number + 1]] = own
    return documents, sizes


def _with_known_routes(documents: Iterable[Document], names: Sequence[str], where: str) -> Iterator[Document]:
    """Yield documents after checking that each names a teacher, and, at the end, that each teacher is named."""
    unused = list(names)
    for number, document in enumerate(documents):
        if document.teacher_name not in names:
            unknown = f"has {document.teacher_name!r}, which is not the name of a teacher"
            raise XtkError(
                f"the --route-column of a document {unknown if document.teacher_name else 'is empty'}",
                where=f"{where}, document {number}",
                hint=f"use --route-column with a column of the data that contains {' or '.join(names)}",
            )
        if document.teacher_name in unused:
            unused.remove(document.teacher_name)
        yield document
    if unused:
        raise XtkError(
            f"no document has the teacher {unused[0]} in its --route-column",
            where=where,
            hint="remove this --teacher, or write its name into the --route-column of some documents",
        )


def read_training_prompts(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, prompt_format: PromptFormat, *, is_routed: bool
) -> list[Prompt]:
    """Return the prompts of a run."""
    prompts = read_prompts(corpus, prompt_format=prompt_format)
    documents = [prompt.document for prompt in prompts]
    if is_routed:
        documents = list(_with_known_routes(documents, teacher_names(teachers), corpus.name))
    held = InMemoryCorpus(documents, corpus.sources, corpus.columns)
    for teacher in teachers:
        teacher.read_corpus(held, "")
    return prompts


def teacher_names(teachers: Sequence[OnlineTeacher]) -> list[str]:
    """Return the teachers' names in metrics and routes: the last parts of their paths or hub ids, numbered if equal."""
    return number_duplicate_names([teacher.request.teacher_short_name for teacher in teachers])
