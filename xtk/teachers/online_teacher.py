"""Teachers that score when they are asked, a block of documents at a time, and leave the device in between.

What they say goes to an ordinary cache, a short-lived one, so that nobody who reads it knows the difference.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.artifacts.corpus import Corpus, CorpusFingerprint, InMemoryCorpus
from xtk.artifacts.model_resolver import base_model_and_adapter, resolve_model_folder
from xtk.artifacts.shard_codecs import codec_for_precision
from xtk.errors import XtkError
from xtk.models.causal_lm import DTYPES, PLACEMENT_OPTIONS
from xtk.registry import load_registered, unknown_name_error
from xtk.teachers import BACKENDS
from xtk.teachers.backend import TeacherBackend
from xtk.teachers.backend_options import backend_options
from xtk.teachers.cache_building import CacheJob, write_shards
from xtk.teachers.cache_request import (
    CacheRequest,
    check_cache_request,
    make_cache_header,
    make_vocabulary_order,
    open_teacher,
    sharding_options,
)
from xtk.teachers.shard_planning import ShardPlan, make_shard_plan
from xtk.teachers.worker_pool import WorkerPool
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import make_support
from xtk.tokens.token_sequence import TokenSequence as TokenSequence
from xtk.tokens.tokenizer import Tokenizer

DEFAULT_NUM_CANDIDATES = 32
SHARD_TOKENS = 16384  # a shard is what one process scores at once: small, so that all have some of a block
ENGINE_PREFIX = "engine."
NUMERIC_OPTIONS = {
    "top_k": int,
    "top_p": float,
    "num_samples": int,
    "seed": int,
    "batch_tokens": int,
    "concurrency": int,
}
TEXT_OPTIONS = ("support", "precision", "dtype", "backend", "server", "weights")
SELF_TEACHER = "self"
# Which weights of the student teach it.
STUDENT_WEIGHTS = {
    "live": "as they are when it is asked",
    "ema": "their moving average, of --ema-decay",
    "base": "without its adapter, of --lora-r",
}
FULL_VOCABULARY = "all"  # of top_k: the whole vocabulary
_TEACHER_SPEC = re.compile(r"(?P<model>.*?)(:(?P<options>[a-z][a-z_.-]*=.*))?", re.DOTALL)


class OnlineTeacher:
    """One teacher, and what is asked of it.

    Args:
        request: its model and options; of `seed`, those of the first epoch.
        tokenizer: its own.
        num_candidates: of the support `candidates`: how many tokens it scores at each sampled position, about.
        student_weights: of the student, if it is its own teacher: a key of `OWN`. "": it is a model of its own.
        devices: of its own, on this machine; none: it takes turns with the student on its devices.

    Attributes:
        header: what a cache of all that it reads would tell of itself; there once it has read.

    Raises:
        XtkError: an option makes no sense, or there is no model.
    """

    def __init__(self, request: CacheRequest, tokenizer: Tokenizer, num_candidates: int = DEFAULT_NUM_CANDIDATES,
        student_weights: str = "",
                 devices: Sequence[int] = ()) -> None:  # fmt: skip
        check_cache_request(request)
        self.student_weights, self.devices = student_weights, devices
        self.num_candidates = num_candidates if request.support.kind == "candidates" else 0
        self.request, self.teacher_tokenizer = request, tokenizer
        self.header: dict[str, Any] = {}
        self._sharding = sharding_options(request)
        self._plan: ShardPlan | None = None
        self._opened: tuple[int, TeacherBackend] | None = None

    @property
    def manifest(self) -> dict[str, Any]:
        """What makes it another teacher than others."""
        return {"header": self.header} | ({"weights": self.student_weights} if self.student_weights else {})

    @property
    def needs_subprocess(self) -> bool:
        """Whether it needs a process of its own, which ends with each block: one that cannot leave the device."""
        engine = dict(self.request.backend_options.get("engine") or {})
        placed = PLACEMENT_OPTIONS & engine.keys() or "quantization_config" in engine or engine.get("tp_size", 1) != 1
        return self.request.backend == "vllm" or bool(placed or self.devices)

    def describe_placement(self) -> str:
        """Say where it scores."""
        where = "in each process, in turn with the student"
        if self.student_weights:
            where = "the student itself, " + STUDENT_WEIGHTS[self.student_weights]
        elif self.request.backend == "server":
            where = "at " + ", ".join(self.request.backend_options["servers"])
        elif self.devices:
            where = f"in a process of its own, on devices {'+'.join(map(str, self.devices))}"
        elif self.needs_subprocess:
            where = "in a process of its own, while the others wait"
        return f"{self.request.teacher_folder.resolve().name} scores, {where}"

    @property
    def estimated_bytes_per_document(self) -> float:
        """How much of its signal there is, about, of a document in the mean."""
        plan = self._read_plan()
        support = self.request.support
        return plan.num_positions / max(plan.num_chunks, 1) * 8 * (3 + (support.top_k or 64) + support.num_samples)

    def read_corpus(self, corpus: Corpus, log_prefix: str) -> tuple[list[Document], NDArray[np.int32]]:
        """Read all data once, as `cache-teacher` does before it scores.

        Args:
            corpus: the data.
            log_prefix: tells what is to be told of it; "": nobody.

        Returns:
            The documents as it will score them, those that are too long cut or left out, and int32 [documents], how
            many of its tokens each has.

        Raises:
            XtkError: the data is empty, or too long for it.
        """
        documents: list[Document] = []
        sizes: list[int] = []

        def take(document: Document, tokens: TokenSequence) -> None:
            documents.append(document)
            sizes.append(len(tokens))

        plan = make_shard_plan(self._sharding, corpus, self.teacher_tokenizer, take, log_prefix)
        ranks = make_vocabulary_order(self.request, self.teacher_tokenizer, plan)
        self._plan, self.header = plan, make_cache_header(self.request, self.teacher_tokenizer, plan, ranks)
        return documents, np.array(sizes, np.int32)

    def make_job(self, block: InMemoryCorpus, num_tokens: NDArray[np.int32], location: Path, epoch: int) -> CacheJob:
        """Return what is to be done to have a cache of some documents.

        Args:
            block: the documents, among those that `read` returned.
            num_tokens: int32 [documents], its tokens in each.
            location: where the cache goes.
            epoch: how often all documents were seen before: draws are those of the seed, plus this.
        """
        whole = self._read_plan()
        plan = ShardPlan(
            whole.shard_tokens,
            whole.token_counts,
            num_documents=len(num_tokens),
            optional_columns=whole.optional_columns,
        )
        fingerprint = CorpusFingerprint()
        for at, (document, size) in enumerate(zip(block.documents, num_tokens.tolist(), strict=True)):
            plan.assign_chunk(at, 0, size)
            fingerprint.add(document)
        plan.fingerprint = str(fingerprint)
        support = self.request.support
        if support.num_sample_sets:
            support = replace(support, seed=support.seed + epoch)
        request = replace(self.request, support=support)
        ranks = make_vocabulary_order(request, self.teacher_tokenizer, plan)
        header = make_cache_header(request, self.teacher_tokenizer, plan, ranks)
        opening = replace(request, backend_options={**request.backend_options, "longest": whole.max_chunk_tokens})
        return CacheJob(opening, block, location, self._sharding, plan, header, ranks)

    def write_shards(
        self, job: CacheJob, shard_numbers: list[int], student_model: Any = None
    ) -> Generator[tuple[int, dict[str, Any]]]:
        """Write shards; as `xtk.teachers.cache_building.write_shards`.

        Args:
            job: what is to be done.
            shard_numbers: of the shards.
            student_model: the student's `BackboneWithHead`, with the weights that are wanted of it, where it is its
                own teacher.
        """
        if not shard_numbers:
            return
        if student_model is not None:
            there = replace(job.request, backend_options={**job.request.backend_options, "cut": student_model})
            yield from write_shards(
                job, open_teacher(there, self.teacher_tokenizer), self.teacher_tokenizer, shard_numbers
            )
            return
        if self.needs_subprocess:
            with WorkerPool(1, job, device_per_process=False, devices=self.devices) as workers:
                yield from workers.write_shards(shard_numbers)
            return
        seed = job.request.support.seed
        if self._opened is None or self._opened[0] != seed:
            self._opened = None
            self._opened = seed, open_teacher(job.request, self.teacher_tokenizer)
        elif wake := getattr(self._opened[1], "wake_up", None):
            wake()
        yield from write_shards(job, self._opened[1], self.teacher_tokenizer, shard_numbers)

    def release_device(self) -> None:
        """Leave the device: to the memory of the CPU, or, where that cannot be, altogether."""
        rest = None if self._opened is None else getattr(self._opened[1], "sleep", None)
        if rest is not None and not rest():
            self._opened = None
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _read_plan(self) -> ShardPlan:
        if self._plan is None:
            raise RuntimeError("a teacher has not read what it is to score")
        return self._plan


def parse_online_teacher(
    text: str, *, long_documents: str, trust_remote_code: bool, student: Path | None = None,
    devices: Sequence[int] = (),
) -> OnlineTeacher:  # fmt: skip
    """Read `MODEL`, or `MODEL:top_k=64,dtype=bfloat16`, the options being those of `cache-teacher`.

    `self` is the student, as it is when it is asked; `self:weights=ema` or `weights=base` with other weights.

    Args:
        text: as it was written; `engine.NAME=VALUE` is `--engine NAME=VALUE`, `top_k=all` the whole vocabulary.
        long_documents: what becomes of documents that are longer than its context.
        trust_remote_code: run the model's own code.
        student: the student's folder.
        devices: of its own, on this machine.

    Raises:
        XtkError: there is no such model or option, or a value makes no sense.
    """
    found = _TEACHER_SPEC.fullmatch(text)
    model = text if found is None else found["model"]
    given, engine, servers = _parse_options(text, "" if found is None else found["options"] or "")
    backend = str(given.get("backend", "transformers"))
    if backend not in BACKENDS:
        raise unknown_name_error("backend", backend, BACKENDS)
    dtype, precision = str(given.get("dtype", "float32")), str(given.get("precision", "float32"))
    load_registered(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    codec_for_precision(precision)
    weights = str(given.get("weights", "live" if model == SELF_TEACHER else ""))
    if weights and (
        model != SELF_TEACHER or weights not in STUDENT_WEIGHTS or backend != "transformers" or student is None
    ):
        if weights not in STUDENT_WEIGHTS:
            raise unknown_name_error("weights of the student", weights, STUDENT_WEIGHTS)
        raise XtkError(
            f"--teacher {text}: weights are of the student as its own teacher, which transformers runs",
            hint=f"self:weights={weights}",
        )
    if student is not None and weights:
        model = str(student)
    folder, adapter = base_model_and_adapter(resolve_model_folder(model, with_weights=backend != "server"))
    tokenizer = Tokenizer(folder, name=model)
    top_k = tokenizer.embedding_rows if given.get("top_k") == FULL_VOCABULARY else given.get("top_k")
    support = make_support(
        str(given.get("support", "")),
        top_k=top_k,
        top_p=given.get("top_p"),
        num_samples=given.get("num_samples"),
        seed=given.get("seed", 0),
        available_kinds=load_registered(BACKENDS, backend, "backend").support_kinds,
    )
    request = CacheRequest(
        teacher_folder=folder,
        teacher_name=model,
        support=support,
        dtype=dtype,
        precision=precision,
        backend=backend,
        long_documents=long_documents,
        batch_tokens=given.get("batch_tokens", 8192),
        shard_tokens=SHARD_TOKENS,
        trust_remote_code=trust_remote_code,
        backend_options=backend_options(backend, engine, servers, given.get("concurrency", 32), adapter),
    )
    return OnlineTeacher(
        request, tokenizer, given.get("top_k") or DEFAULT_NUM_CANDIDATES, weights, () if weights else devices
    )


def _parse_options(text: str, told: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the options by name, those of the engine, and addresses of servers."""
    given: dict[str, Any] = {}
    engine: list[str] = []
    servers: list[str] = []
    for option in filter(None, told.split(",")):
        key, _, value = option.partition("=")
        name = key.replace("-", "_")
        if name.startswith(ENGINE_PREFIX):
            engine.append(f"{name.removeprefix(ENGINE_PREFIX)}={value}")
        elif name == "server":
            servers.append(value)
        elif name not in (*NUMERIC_OPTIONS, *TEXT_OPTIONS):
            raise unknown_name_error(
                "option of a teacher", key, (*NUMERIC_OPTIONS, *TEXT_OPTIONS, f"{ENGINE_PREFIX}NAME")
            )
        elif name in given:
            raise XtkError(f"--teacher {text}: {key} is given twice")
        elif name in NUMERIC_OPTIONS and (name, value) != ("top_k", FULL_VOCABULARY):
            given[name] = _parse_number(text, key, value, NUMERIC_OPTIONS[name])
        else:
            given[name] = value
    return given, engine, servers


def _parse_number(text: str, key: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        hint = f"{key}={json.dumps(64 if kind is int else 0.99)}"
        raise XtkError(f"--teacher {text}: {key} is {value!r}, and no number", hint=hint) from None


def read_corpus_for_all(
    teachers: Sequence[OnlineTeacher], corpus: Corpus, log_prefix: str
) -> tuple[list[Document], NDArray[np.int32]]:
    """Have several teachers read the same documents: each is cut, or left out, where it is too long for one of them.

    Args:
        teachers: one or more.
        corpus: the data.
        log_prefix: tells what is to be told of it.

    Returns:
        The documents, and int32 [teachers, documents], how many tokens of each teacher they have.

    Raises:
        XtkError: the data is empty or too long for one of them, or holds tokens of one and there are others.
    """
    several = len({teacher.teacher_tokenizer.fingerprint for teacher in teachers}) > 1
    while True:
        inputs, sizes = set(), []
        reading = corpus
        for teacher in teachers:
            documents, lengths = teacher.read_corpus(reading, log_prefix)
            inputs.add(teacher.header["data"]["fingerprint"])
            sizes.append(lengths)
            reading = InMemoryCorpus(documents, corpus.sources, corpus.columns)
            # Each would spell them its own way, without an end.
            if several and any(one.teacher_tokens is not None or one.candidate_ids is not None for one in documents):
                raise XtkError(
                    "the data holds tokens of one teacher, and there are several tokenizers",
                    where=corpus.name,
                    hint="text or messages instead of input_ids and candidate_ids",
                )
        fingerprint = CorpusFingerprint()
        for document in documents:
            fingerprint.add(document)
        if inputs == {str(fingerprint)}:
            return documents, np.stack(sizes)
        corpus, log_prefix = reading, ""
