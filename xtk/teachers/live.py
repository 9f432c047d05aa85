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

from xtk.artifacts.codecs import codec_of
from xtk.artifacts.corpus import Corpus, Fingerprint, HeldCorpus
from xtk.artifacts.hub import local_folder, with_adapter
from xtk.errors import XtkError
from xtk.lookup import lookup, unknown
from xtk.models.causal_lm import DTYPES, PLACES
from xtk.teachers import BACKENDS
from xtk.teachers.caching import Work, fill
from xtk.teachers.engine import backend_options
from xtk.teachers.planning import Plan, make_plan
from xtk.teachers.processes import Workers
from xtk.teachers.request import CacheRequest, cache_header, check_request, dealing_of, open_teacher, ranks_for
from xtk.teachers.teacher import Teacher
from xtk.tokens.document import Document
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.signal import support_of
from xtk.tokens.tokenizer import Tokenizer

ASKED = 32
SHARD_TOKENS = 16384  # a shard is what one process scores at once: small, so that all have some of a block
ENGINE = "engine."
NUMBERS = {"top_k": int, "top_p": float, "draws": int, "seed": int, "batch_tokens": int, "concurrency": int}
WORDS = ("support", "precision", "dtype", "backend", "server", "weights")
SELF = "self"
# Which weights of the student teach it.
OWN = {
    "live": "as they are when it is asked",
    "ema": "their moving average, of --ema-decay",
    "base": "without its adapter, of --lora-r",
}
ALL = "all"  # of top_k: the whole vocabulary
_WITH_OPTIONS = re.compile(r"(?P<model>.*?)(:(?P<options>[a-z][a-z_.-]*=.*))?", re.DOTALL)


class LiveTeacher:
    """One teacher, and what is asked of it.

    Args:
        request: its model and options; of `seed`, those of the first epoch.
        tokenizer: its own.
        asked: of the support `given`, about how many tokens it is asked at each place where a student wrote.
        weights: of the student, if it is its own teacher: a key of `OWN`. "": it is a model of its own.
        devices: of its own, on this machine; none: it takes turns with the student on its devices.

    Attributes:
        header: what a cache of all that it reads would tell of itself; there once it has read.

    Raises:
        XtkError: an option makes no sense, or there is no model.
    """

    def __init__(self, request: CacheRequest, tokenizer: Tokenizer, asked: int = ASKED, weights: str = "",
                 devices: Sequence[int] = ()) -> None:  # fmt: skip
        check_request(request)
        self.weights, self.devices = weights, devices
        self.asked = asked if request.support.kind == "given" else 0
        self.request, self.teacher = request, tokenizer
        self.header: dict[str, Any] = {}
        self._dealing = dealing_of(request)
        self._plan: Plan | None = None
        self._opened: tuple[int, Teacher] | None = None

    @property
    def manifest(self) -> dict[str, Any]:
        """What makes it another teacher than others."""
        return {"header": self.header} | ({"weights": self.weights} if self.weights else {})

    @property
    def apart(self) -> bool:
        """Whether it needs a process of its own, which ends with each block: one that cannot leave the device."""
        engine = dict(self.request.backend_options.get("engine") or {})
        placed = PLACES & engine.keys() or "quantization_config" in engine or engine.get("tp_size", 1) != 1
        return self.request.backend == "vllm" or bool(placed or self.devices)

    def plan(self) -> str:
        """Say where it scores."""
        where = "in each process, in turn with the student"
        if self.weights:
            where = "the student itself, " + OWN[self.weights]
        elif self.request.backend == "server":
            where = "at " + ", ".join(self.request.backend_options["servers"])
        elif self.devices:
            where = f"in a process of its own, on devices {'+'.join(map(str, self.devices))}"
        elif self.apart:
            where = "in a process of its own, while the others wait"
        return f"{self.request.teacher.resolve().name} scores, {where}"

    @property
    def bytes_per_document(self) -> float:
        """How much of its signal there is, about, of a document in the mean."""
        plan = self._whole()
        support = self.request.support
        return plan.positions / max(plan.pieces, 1) * 8 * (3 + (support.top_k or 64) + support.draws)

    def read(self, corpus: Corpus, who: str) -> tuple[list[Document], NDArray[np.int32]]:
        """Read all data once, as `cache-teacher` does before it scores.

        Args:
            corpus: the data.
            who: tells what is to be told of it; "": nobody.

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

        plan = make_plan(self._dealing, corpus, self.teacher, take, who)
        ranks = ranks_for(self.request, self.teacher, plan)
        self._plan, self.header = plan, cache_header(self.request, self.teacher, plan, ranks)
        return documents, np.array(sizes, np.int32)

    def work(self, block: HeldCorpus, sizes: NDArray[np.int32], place: Path, epoch: int) -> Work:
        """Return what is to be done to have a cache of some documents.

        Args:
            block: the documents, among those that `read` returned.
            sizes: int32 [documents], its tokens in each.
            place: where the cache goes.
            epoch: how often all documents were seen before: draws are those of the seed, plus this.
        """
        whole = self._whole()
        plan = Plan(whole.shard_tokens, whole.counts, documents=len(sizes), optional_columns=whole.optional_columns)
        fingerprint = Fingerprint()
        for at, (document, size) in enumerate(zip(block.documents, sizes.tolist(), strict=True)):
            plan.deal(at, 0, size)
            fingerprint.add(document)
        plan.fingerprint = str(fingerprint)
        support = self.request.support
        if support.sets:
            support = replace(support, seed=support.seed + epoch)
        request = replace(self.request, support=support)
        ranks = ranks_for(request, self.teacher, plan)
        header = cache_header(request, self.teacher, plan, ranks)
        opening = replace(request, backend_options={**request.backend_options, "longest": whole.longest})
        return Work(opening, block, place, self._dealing, plan, header, ranks)

    def fill(self, work: Work, numbers: list[int], own: Any = None) -> Generator[tuple[int, dict[str, Any]]]:
        """Write shards; as `xtk.teachers.caching.fill`.

        Args:
            work: what is to be done.
            numbers: of the shards.
            own: the student's `Cut`, with the weights that are wanted of it, where it is its own teacher.
        """
        if not numbers:
            return
        if own is not None:
            there = replace(work.request, backend_options={**work.request.backend_options, "cut": own})
            yield from fill(work, open_teacher(there, self.teacher), self.teacher, numbers)
            return
        if self.apart:
            with Workers(1, work, on_devices=False, devices=self.devices) as workers:
                yield from workers.fill(numbers)
            return
        seed = work.request.support.seed
        if self._opened is None or self._opened[0] != seed:
            self._opened = None
            self._opened = seed, open_teacher(work.request, self.teacher)
        elif wake := getattr(self._opened[1], "wake", None):
            wake()
        yield from fill(work, self._opened[1], self.teacher, numbers)

    def leave(self) -> None:
        """Leave the device: to the memory of the CPU, or, where that cannot be, altogether."""
        rest = None if self._opened is None else getattr(self._opened[1], "rest", None)
        if rest is not None and not rest():
            self._opened = None
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _whole(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("a teacher has not read what it is to score")
        return self._plan


def read_live_teacher(
    text: str, *, long_documents: str, trust_remote_code: bool, student: Path | None = None,
    devices: Sequence[int] = (),
) -> LiveTeacher:  # fmt: skip
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
    found = _WITH_OPTIONS.fullmatch(text)
    model = text if found is None else found["model"]
    given, engine, servers = _options(text, "" if found is None else found["options"] or "")
    backend = str(given.get("backend", "transformers"))
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    dtype, precision = str(given.get("dtype", "float32")), str(given.get("precision", "float32"))
    lookup(dict.fromkeys(DTYPES, "xtk.models.causal_lm:DTYPES"), dtype, "dtype")
    codec_of(precision)
    weights = str(given.get("weights", "live" if model == SELF else ""))
    if weights and (model != SELF or weights not in OWN or backend != "transformers" or student is None):
        if weights not in OWN:
            raise unknown("weights of the student", weights, OWN)
        raise XtkError(
            f"--teacher {text}: weights are of the student as its own teacher, which transformers runs",
            hint=f"self:weights={weights}",
        )
    if student is not None and weights:
        model = str(student)
    folder, adapter = with_adapter(local_folder(model, weights=backend != "server"))
    tokenizer = Tokenizer(folder, name=model)
    top_k = tokenizer.width if given.get("top_k") == ALL else given.get("top_k")
    support = support_of(
        str(given.get("support", "")),
        top_k=top_k,
        top_p=given.get("top_p"),
        draws=given.get("draws"),
        seed=given.get("seed", 0),
        able=lookup(BACKENDS, backend, "backend").supports,
    )
    request = CacheRequest(
        teacher=folder,
        name=model,
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
    return LiveTeacher(request, tokenizer, given.get("top_k") or ASKED, weights, () if weights else devices)


def _options(text: str, told: str) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the options by name, those of the engine, and addresses of servers."""
    given: dict[str, Any] = {}
    engine: list[str] = []
    servers: list[str] = []
    for option in filter(None, told.split(",")):
        key, _, value = option.partition("=")
        name = key.replace("-", "_")
        if name.startswith(ENGINE):
            engine.append(f"{name.removeprefix(ENGINE)}={value}")
        elif name == "server":
            servers.append(value)
        elif name not in (*NUMBERS, *WORDS):
            raise unknown("option of a teacher", key, (*NUMBERS, *WORDS, f"{ENGINE}NAME"))
        elif name in given:
            raise XtkError(f"--teacher {text}: {key} is given twice")
        elif name in NUMBERS and (name, value) != ("top_k", ALL):
            given[name] = _number(text, key, value, NUMBERS[name])
        else:
            given[name] = value
    return given, engine, servers


def _number(text: str, key: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        hint = f"{key}={json.dumps(64 if kind is int else 0.99)}"
        raise XtkError(f"--teacher {text}: {key} is {value!r}, and no number", hint=hint) from None


def read_together(
    teachers: Sequence[LiveTeacher], corpus: Corpus, who: str
) -> tuple[list[Document], NDArray[np.int32]]:
    """Have several teachers read the same documents: each is cut, or left out, where it is too long for one of them.

    Args:
        teachers: one or more.
        corpus: the data.
        who: tells what is to be told of it.

    Returns:
        The documents, and int32 [teachers, documents], how many tokens of each teacher they have.

    Raises:
        XtkError: the data is empty or too long for one of them, or holds tokens of one and there are others.
    """
    several = len({teacher.teacher.fingerprint for teacher in teachers}) > 1
    while True:
        inputs, sizes = set(), []
        reading = corpus
        for teacher in teachers:
            documents, lengths = teacher.read(reading, who)
            inputs.add(teacher.header["data"]["fingerprint"])
            sizes.append(lengths)
            reading = HeldCorpus(documents, corpus.sources, corpus.columns)
            # Each would spell them its own way, without an end.
            if several and any(one.teacher_tokens is not None or one.given_ids is not None for one in documents):
                raise XtkError(
                    "the data holds tokens of one teacher, and there are several tokenizers",
                    where=corpus.name,
                    hint="text or messages instead of input_ids and given_ids",
                )
        fingerprint = Fingerprint()
        for document in documents:
            fingerprint.add(document)
        if inputs == {str(fingerprint)}:
            return documents, np.stack(sizes)
        corpus, who = reading, ""
