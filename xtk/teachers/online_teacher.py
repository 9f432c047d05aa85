"""Teachers that score blocks of documents during training, into memory, and release the device between."""

from __future__ import annotations

import gc
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.cache.teacher_document import TeacherDocument, teacher_tokens, without_bytes
from xtk.cache.teacher_logprobs import StoredLogprobs, make_support
from xtk.data.corpus_reader import Corpus, CorpusFingerprint, InMemoryCorpus
from xtk.engines.backend import backend_options, backends_with, engine_beside_student
from xtk.errors import XtkError
from xtk.models.causal_lm import DTYPES
from xtk.models.precision import AUTO, resolve_dtype
from xtk.models.resolver import ModelRef, base_model_and_adapter, resolve_model_folder
from xtk.name_registry import load_registered, unknown_name_error
from xtk.options.spec_parsing import parse_number, parse_pairs
from xtk.teachers import BACKENDS
from xtk.teachers.backend_interface import TeacherBackend
from xtk.teachers.cache_build_config import (
    CacheRequest,
    check_cache_request,
    make_cache_header,
    open_teacher,
    sharding_options,
)
from xtk.teachers.cache_building import check_scored_documents, score_chunks
from xtk.teachers.cache_shard_planning import Chunk, ShardPlan, chunk_documents, make_shard_plan
from xtk.teachers.teacher_processes import EXIT_SECONDS, TeacherJob, WorkerPool
from xtk.text.document import Document
from xtk.text.start_tokens import AUTO_START
from xtk.text.token_sequence import TokenSequence
from xtk.text.tokenizer import Tokenizer

DEFAULT_NUM_CANDIDATES = 32
# Scored at once by one process: few, so that every process gets parts of a block; and every process receives them all.
PART_TOKENS, PART_BYTES = 16384, 64 << 20
ENGINE_PREFIX = "engine."
NUMERIC_OPTIONS = {
    "top_k": int,
    "top_p": float,
    "num_samples": int,
    "seed": int,
    "batch_tokens": int,
    "concurrency": int,
}
TEXT_OPTIONS = ("support", "dtype", "start_token", "backend", "server", "weights")
SELF_TEACHER = "self"
# Weights of the student as its own teacher.
STUDENT_WEIGHTS = {
    "live": "current weights",
    "ema": "moving average of the weights (--ema-decay)",
    "base": "weights without the LoRA adapter (--lora-r)",
}
FULL_VOCABULARY = "all"  # value of top_k: the whole vocabulary
_TEACHER_SPEC = re.compile(r"(?P<model>.*?)(:(?P<options>[a-z][a-z_.-]*=.*))?", re.DOTALL)


class ScoringJob(TeacherJob):
    """Scoring of documents."""

    def run(
        self, teacher: TeacherBackend, tokenizer: Tokenizer, tasks: Iterable[Sequence[Chunk]]
    ) -> Iterator[list[StoredLogprobs]]:
        """Yield the log-probabilities of the documents of each part."""
        for number, part in enumerate(tasks):
            where = f"the documents of this block, part {number}"
            scored = score_chunks(self.request, teacher, part, where)
            check_scored_documents(self.request, scored, teacher.vocab_size, where)
            yield [document.stored_logprobs for document in scored]


class OnlineTeacher:
    """A teacher that scores during training.

    Args:
        request: its model and options, with the seed of the first epoch.
        num_candidates: for the support `candidates`, approximate number of candidate ids per generated token.
        student_weights: if the student is its own teacher, a key of `STUDENT_WEIGHTS`; "": a separate model.
        devices: separate devices on this machine; (): it alternates with the student on the student's devices.
    """

    kind = "teacher"

    def __init__(self, request: CacheRequest, tokenizer: Tokenizer, num_candidates: int = DEFAULT_NUM_CANDIDATES,
        student_weights: str = "",
                 devices: Sequence[int] = ()) -> None:  # fmt: skip
        check_cache_request(request)
        self.student_weights, self.devices = student_weights, devices
        self.num_candidates = num_candidates if request.support.kind == "candidates" else 0
        self.request, self.teacher_tokenizer = request, tokenizer
        self.header: dict[str, Any] = {}
        self._backend: type[TeacherBackend] = load_registered(BACKENDS, request.backend, "backend")
        self._sharding = sharding_options(request)
        self._plan: ShardPlan | None = None
        self._opened: tuple[int, TeacherBackend] | None = None
        self._pool: WorkerPool | None = None
        self._pool_seed = self._pool_longest = 0  # seed of samples, length of the longest document
        self._scored: dict[int, TeacherDocument] = {}

    @property
    def manifest(self) -> dict[str, Any]:
        """The identity of this teacher, in the form of a cache manifest."""
        return {"header": self.header} | ({"weights": self.student_weights} if self.student_weights else {})

    @property
    def scores_repeat(self) -> bool:
        """Whether a resumed run gets the same scores: not from servers, vLLM, or weights that training changes."""
        return self._backend.runs_loaded_model and self.student_weights in ("", "base")

    @property
    def needs_subprocess(self) -> bool:
        """Whether it needs a subprocess. On the student's devices it ends after each block to release them."""
        return bool(self.devices) or self._backend.needs_subprocess(self.request.backend_options.get("engine") or {})

    def describe_placement(self) -> str:
        """Return one line about where the teacher runs."""
        where = "runs in each training process, alternating with the student"
        if self.student_weights:
            where = "is the student itself: " + STUDENT_WEIGHTS[self.student_weights]
        elif self._backend.uses_servers:
            where = "runs on " + ", ".join(self.request.backend_options["servers"])
        elif self.devices:
            where = f"runs in a subprocess on devices {'+'.join(map(str, self.devices))}"
        elif self.needs_subprocess:
            where = "runs in a subprocess while training waits"
        return f"the teacher {self.request.teacher_short_name} {where}"

    @property
    def estimated_bytes_per_document(self) -> float:
        """Approximate mean size of the log-probabilities of a document, in bytes."""
        plan = self._plan
        assert plan is not None, "read_corpus is called first"
        return plan.num_positions / max(plan.num_chunks, 1) * self.bytes_per_position

    @property
    def bytes_per_position(self) -> int:
        """Approximate size of the log-probabilities of a position, in bytes."""
        support = self.request.support
        return 8 * (3 + (support.top_k or 64) + support.num_samples)

    def read_corpus(self, corpus: Corpus, log_prefix: str) -> tuple[list[Document], NDArray[np.int32]]:
        """Read all data once; return the documents as they will be scored, and int32 [documents], their tokens."""
        documents: list[Document] = []
        sizes: list[int] = []

        def take(document: Document, tokens: TokenSequence) -> None:
            documents.append(document)
            sizes.append(len(tokens))

        plan = make_shard_plan(self._sharding, corpus, self.teacher_tokenizer, take, log_prefix)
        self._plan, self.header = plan, make_cache_header(self.request, self.teacher_tokenizer, plan, None)
        return documents, np.array(sizes, np.int32)

    def tokenize(self, documents: Sequence[Document]) -> list[Chunk]:
        """Return documents of `read_corpus`, or generated ones, with the teacher's tokens."""
        corpus = InMemoryCorpus(documents, ["the documents of a block"], {})
        chunks = chunk_documents(self._sharding, corpus, self.teacher_tokenizer, list(documents))
        return [chunk for (chunk,) in chunks]

    def score(
        self,
        parts: Iterable[Sequence[Chunk]],  # documents with the teacher's tokens; read while the teacher scores
        epoch: int,  # number of completed epochs, added to the seed of the samples
        longest: int,
        student_model: Any = None,  # if the student is its own teacher, its `BackboneWithHead` with the weights to use
    ) -> Generator[list[StoredLogprobs]]:
        """Score documents part by part, and yield the log-probabilities of each part."""
        support = self.request.support
        if support.num_sample_sets:
            support = replace(support, seed=support.seed + epoch)
        options = {**self.request.backend_options, "longest": longest}
        if self.request.backend == "vllm" and not self.devices and torch.cuda.is_available():
            options["engine"] = engine_beside_student(options.get("engine") or {})  # the student stays there
        request = replace(self.request, support=support, backend_options=options)
        job = ScoringJob(request, self.header)
        if student_model is not None:
            there = replace(request, backend_options={**options, "cut": student_model})
            yield from job.run(open_teacher(there, self.teacher_tokenizer), self.teacher_tokenizer, parts)
        elif self.needs_subprocess:
            tasks = [[(document, without_bytes(tokens)) for document, tokens in part] for part in parts]
            try:
                yield from self._subprocess(job, longest).run(tasks)
            except BaseException:
                self.close(0.0)
                raise
            if not self.devices:
                self.close()
        else:
            if self._opened is None or self._opened[0] != support.seed:
                self._opened = None
                weights = self.header["teacher"]["weights"]
                self._opened = support.seed, open_teacher(request, self.teacher_tokenizer, weights)
            else:
                self._opened[1].wake_up()
            yield from job.run(self._opened[1], self.teacher_tokenizer, parts)

    def _subprocess(self, job: ScoringJob, longest: int) -> WorkerPool:
        """Return the subprocess of a block; that of the last block if it has the same seed and is long enough."""
        seed = job.request.support.seed
        longest = longest if self.request.backend == "vllm" else 0  # only vLLM reserves memory for it
        if self._pool is None or self._pool_seed != seed or longest > self._pool_longest:
            self.close()
            self._pool_seed, self._pool_longest = seed, longest
            self._pool = WorkerPool(1, job, self.devices).__enter__()
        return self._pool

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """End the subprocess if there is one, after at most `seconds`."""
        if self._pool is not None:
            self._pool.close(seconds)
        self._pool = None

    def tokens_as_stored(self, tokens: TokenSequence) -> TokenSequence:
        """Return the tokens of a document as a cache of this teacher would return them."""
        arrays = tokens.ids, tokens.byte_ends, tokens.train_mask, tokens.text_runs, tokens.segment_end_tokens
        return teacher_tokens(
            *arrays, self.header["teacher"]["space_ids"], lambda: self.teacher_tokenizer.vocabulary.bytes_of
        )

    def keep(self, scored: Iterable[tuple[int, TeacherDocument]]) -> None:
        """Keep outputs for documents, by their indices, for `outputs`."""
        self._scored.update(scored)

    def forget(self) -> None:
        """Drop all that is kept."""
        self._scored = {}

    def outputs(self, documents: Sequence[int], sample_set: int | None = 0) -> list[TeacherDocument | None]:
        """Return outputs for documents of the current block, None: not scored. `sample_set` None: only exact values."""
        kept = [self._scored.get(number) for number in documents]
        return [None if output is None else output.with_sample_set(sample_set) for output in kept]

    def release_device(self) -> None:
        """Release the device: move the model to CPU memory, or unload it if that is not possible."""
        if self._opened is not None and not self._opened[1].sleep():
            self._opened = None
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def observed_only(text: str) -> str:
    """Return the value of `--reference` as one of `--teacher` that scores the observed tokens only."""
    match = _TEACHER_SPEC.fullmatch(text)
    return text + (",support=none" if match is not None and match["options"] else ":support=none")


def parse_online_teacher(
    text: str, *, long_documents: str, trust_remote_code: bool, student: ModelRef | None = None,
    student_start: str = AUTO_START, devices: Sequence[int] = (),
) -> OnlineTeacher:  # fmt: skip
    """Return the teacher of `--teacher MODEL` or `MODEL:top_k=64,dtype=bfloat16`, with options of `cache-teacher`.

    `self` is the student with its current weights; `self:weights=ema` or `self:weights=base` with other weights.

    Args:
        text: value of --teacher; `engine.NAME=VALUE` means `--engine NAME=VALUE`, `top_k=all` the whole vocabulary.
        long_documents: treatment of documents that are longer than its context: see `LONG_DOCUMENTS`.
        trust_remote_code: allow model code from the model's folder.
        student_start: the student's start token, also of the teacher `self`.
    """
    match = _TEACHER_SPEC.fullmatch(text)
    model = text if match is None else match["model"]
    given, engine, servers = _parse_options(text, "" if match is None else match["options"] or "")
    backend = str(given.get("backend", "transformers"))
    kind: type[TeacherBackend] = load_registered(BACKENDS, backend, "backend")
    dtype = str(given.get("dtype", AUTO))
    load_registered(dict.fromkeys((AUTO, *DTYPES), "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    weights = str(given.get("weights", "live" if model == SELF_TEACHER else ""))
    if weights and (
        model != SELF_TEACHER or weights not in STUDENT_WEIGHTS or not kind.runs_loaded_model or student is None
    ):
        if weights not in STUDENT_WEIGHTS:
            raise unknown_name_error("weights of the student", weights, STUDENT_WEIGHTS)
        if model == SELF_TEACHER and student is None:
            raise XtkError(
                f"--teacher {text}: this command trains no student, whose weights the teacher self has",
                hint="use --teacher MODEL with a folder or hub id",
            )
        raise XtkError(
            f"--teacher {text}: weights= is only for the teacher self with "
            f"backend={backends_with(BACKENDS, lambda one: one.runs_loaded_model)}",
            hint=f"use --teacher self:weights={weights}",
        )
    if student is not None and weights:
        model = str(student.folder)
    folder, adapter = base_model_and_adapter(resolve_model_folder(model, with_weights=not kind.uses_servers))
    dtype = resolve_dtype(dtype, None if kind.uses_servers or weights else folder)
    start_token = str(given.get("start_token", student_start if weights else AUTO_START))
    tokenizer_adapter = student.adapter if student is not None and weights else adapter
    tokenizer = Tokenizer(folder, name=model, start_token=start_token, adapter=tokenizer_adapter)
    top_k = tokenizer.embedding_rows if given.get("top_k") == FULL_VOCABULARY else given.get("top_k")
    support = make_support(
        str(given.get("support", "")),
        top_k=None if given.get("support") == "candidates" else top_k,  # there, the number of candidates
        top_p=given.get("top_p"),
        num_samples=given.get("num_samples"),
        seed=given.get("seed", 0),
        available_kinds=kind.support_kinds,
    )
    request = CacheRequest(
        ModelRef(folder, adapter, dtype, trust_remote_code, model),
        support=support,
        start_token=start_token,
        precision="float32",
        backend=backend,
        long_documents=long_documents,
        batch_tokens=given.get("batch_tokens", 8192),
        shard_tokens=PART_TOKENS,
        backend_options=backend_options(
            BACKENDS,
            backend,
            engine=engine,
            servers=servers,
            concurrency=given.get("concurrency", 32),
            adapter=adapter,
        ),
    )
    num_candidates = DEFAULT_NUM_CANDIDATES if top_k is None else top_k
    if support.kind == "candidates" and num_candidates < 1:
        raise XtkError(
            f"--teacher {text}: top_k is {num_candidates}, but must be at least 1",
            hint=f"use, for example, top_k={DEFAULT_NUM_CANDIDATES}, or top_k={FULL_VOCABULARY}",
        )
    return OnlineTeacher(request, tokenizer, num_candidates, weights, () if weights else devices)


def _parse_options(text: str, options: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the options by name, the engine options, and the addresses of servers."""
    given: dict[str, Any] = {}
    engine: list[str] = []
    servers: list[str] = []
    for name, value in parse_pairs(options, f"--teacher {text}", repeatable=("server",)):
        if name.startswith(ENGINE_PREFIX):
            engine.append(f"{name.removeprefix(ENGINE_PREFIX)}={value}")
        elif name == "server":
            servers.append(value)
        elif name not in (*NUMERIC_OPTIONS, *TEXT_OPTIONS):
            raise unknown_name_error(
                "option of a teacher", name, (*NUMERIC_OPTIONS, *TEXT_OPTIONS, f"{ENGINE_PREFIX}NAME")
            )
        elif name in NUMERIC_OPTIONS and (name, value) != ("top_k", FULL_VOCABULARY):
            kind = NUMERIC_OPTIONS[name]
            example = f"for example {name}={64 if kind is int else 0.99}"
            given[name] = parse_number(value, kind, f"--teacher {text}: {name}", example)
        else:
            given[name] = value
    return given, engine, servers


def read_corpus_for_all(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, log_prefix: str
) -> tuple[list[Document], NDArray[np.int32]]:
    """Return the documents, limited to what all teachers can read, and int32 [teachers, documents], their tokens."""
    several = len({teacher.teacher_tokenizer.fingerprint for teacher in teachers}) > 1
    while True:
        inputs, sizes = set(), []
        reading = corpus
        for teacher in teachers:
            documents, lengths = teacher.read_corpus(reading, log_prefix)
            inputs.add(teacher.header["data"]["fingerprint"])
            sizes.append(lengths)
            reading = InMemoryCorpus(documents, corpus.sources, corpus.columns)
            # Each teacher would convert the ids to its own tokenization, and this loop would not end.
            if several and any(
                document.teacher_tokens is not None or document.candidate_ids is not None for document in documents
            ):
                raise XtkError(
                    "the data contains token ids of one tokenizer, but the teachers have different tokenizers",
                    where=corpus.name,
                    hint="use data with text or messages instead of input_ids and candidate_ids",
                )
        fingerprint = CorpusFingerprint()
        for document in documents:
            fingerprint.add(document)
        if inputs == {str(fingerprint)}:
            return documents, np.stack(sizes)
        corpus, log_prefix = reading, ""
