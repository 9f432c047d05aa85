"""What is examined: two models without their weights, a cache or data, and how a run would be laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.model_resolver import base_model_and_adapter
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.errors import XtkError, path_exists
from xtk.models.safetensors_headers import read_weight_headers
from xtk.models.student_model import ALL_LINEAR
from xtk.teachers.cache_cost_estimate import EvenSample
from xtk.tokens.document import Document
from xtk.tokens.model_config import read_model_config
from xtk.tokens.token_sequence import TokenSequence, tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.parallel_config import ParallelConfig

LEVELS = ("ok", "note", "warning", "error")
SAMPLE_SIZE, MAX_DOCUMENTS_READ = 512, 10_000
READ_BATCH_SIZE = 256


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: its name.
        level: one of `LEVELS`; of an error, a command will end with one.
        what: a sentence.
        where: which side, file or document; "": the pair.
        hint: what to do next; "": nothing.
        figures: numbers, for machines.
    """

    check: str
    level: str
    what: str
    where: str = ""
    hint: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as `xtk doctor --json` prints it."""
        return {
            "check": self.check,
            "level": self.level,
            "message": self.what,
            "where": self.where,
            "hint": self.hint,
            "values": self.figures,
        }


@dataclass(frozen=True)
class DoctorModel:
    """The student or the teacher.

    Attributes:
        role: "student" or "teacher".
        folder: of the model.
        tokenizer: its.
        config: config.json; empty where there is none.
        tensor_headers: {name: (dtype as safetensors calls it, shape)} of the weights, from their headers.
        is_remote: whether its weights are on the hub, and stay there.
        adapter: a folder of peft's, where it is a model with an adapter.
    """

    role: str
    folder: Path
    tokenizer: Tokenizer
    config: dict[str, Any]
    tensor_headers: dict[str, tuple[str, tuple[int, ...]]]
    is_remote: bool = False
    adapter: Path | None = None

    @classmethod
    def read(cls, role: str, folder: Path, name: str) -> DoctorModel:
        """Read a folder of a model or of an adapter, of the weights their headers alone.

        Raises:
            XtkError: this is a teacher cache, there is no tokenizer, or a file cannot be read.
        """
        if is_cache(folder) and not (folder / "config.json").is_file():
            hint = "xtk doctor STUDENT TEACHER CACHE: the models first, then the cache"
            raise XtkError(f"the {role} is a model, and this is a teacher cache", where=name, hint=hint)
        folder, adapter = base_model_and_adapter(folder)
        configuration = read_model_config(folder)
        tokenizer, tensors = Tokenizer(folder, name=name), read_weight_headers(folder, allow_missing=True)
        return cls(role, folder, tokenizer, configuration, tensors, not tensors and not path_exists(name), adapter)

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"{self.role} {self.tokenizer.name}"

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the configuration that is about text."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    @property
    def context_length(self) -> int | None:
        """The most tokens that it reads; None: its configuration does not say."""
        values = [self.text_config.get(key) for key in ("max_position_embeddings", "n_positions", "seq_length")]
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    @property
    def embedding(self) -> tuple[str, int] | None:
        """The name of its embedding, and how many rows that has; None where none is found."""
        endings = (
            "embed_tokens.weight",
            "wte.weight",
            "embed_in.weight",
            "word_embeddings.weight",
            "embeddings.weight",
        )
        found = [name for ending in endings for name in self.tensor_headers if name.endswith(ending)]
        return (found[0], self.tensor_headers[found[0]][1][0]) if found else None


@dataclass(frozen=True)
class RunPlan:
    """How a run would be laid out, in the words of `distill` and `cache-teacher`.

    Attributes:
        parallel: of the processes.
        output: where artifacts would go.
        top_k: of the cache; 0: the usual one.
        tokens_per_second: tokens a second of the teacher; 0: nobody said.
        others: as the options of `distill` are called.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output: Path = Path()
    dtype: str = "float32"
    teacher_dtype: str = "float32"
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_batch_tokens: int = 0
    batch_tokens: int = 8192
    max_length: int = 0
    long_documents: str = "refuse"
    save_total_limit: int = 2
    ema_decay: float = 0.0
    attn_implementation: str = ""
    lora_r: int = 0
    lora_target_modules: tuple[str, ...] = ALL_LINEAR
    top_k: int = 0
    tokens_per_second: float = 0.0


@dataclass(frozen=True)
class DoctorInputs:
    """All that is examined.

    Attributes:
        student: one side.
        teacher: the other.
        plan: of the run.
        cache: a finished cache; None: there is none yet.
        corpus: the data; None: there is none, or the cache is the data.
    """

    student: DoctorModel
    teacher: DoctorModel
    plan: RunPlan
    cache: TeacherCache | None = None
    corpus: Corpus | None = None

    @property
    def models(self) -> tuple[DoctorModel, DoctorModel]:
        """Student and teacher."""
        return self.student, self.teacher

    @cached_property
    def has_conversations(self) -> bool:
        """Whether there is one among the first documents."""
        return any(document.conversation is not None for document in islice(_documents(self), READ_BATCH_SIZE))

    @cached_property
    def data_sample(self) -> DataSample:
        """The data, read by both sides."""
        return DataSample.from_inputs(self)


@dataclass
class DataSample:
    """What both sides make of the first documents of the data.

    Attributes:
        documents: a sample, from all over what was read.
        num_documents: how many documents were read.
        is_complete: whether these are all.
        num_tokens: of each side, of all that was read.
        num_trained_tokens: tokens of each side that are trained.
        longest: of each side (tokens, number of the document), the longest first, some.
        num_too_long: of each side, documents that are longer than its limit.
        num_bytes: of text that was read.
    """

    documents: list[tuple[Document, TokenSequence]] = field(default_factory=list)
    num_documents: int = 0
    is_complete: bool = True
    num_tokens: list[int] = field(default_factory=lambda: [0, 0])
    num_trained_tokens: list[int] = field(default_factory=lambda: [0, 0])
    longest: list[list[tuple[int, int]]] = field(default_factory=lambda: [[], []])
    num_too_long: list[int] = field(default_factory=lambda: [0, 0])
    num_bytes: int = 0

    @classmethod
    def from_inputs(cls, inputs: DoctorInputs) -> DataSample:
        """Read `READ` documents at most."""
        reading, sample = cls(), EvenSample(SAMPLE_SIZE)
        for group in _document_batches(_documents(inputs)):
            if reading.num_documents >= MAX_DOCUMENTS_READ:
                reading.is_complete = False
                break
            for number, side in enumerate(inputs.models):
                limit = max_document_tokens(side, inputs.plan)
                found = tokenize_documents(side.tokenizer, group)
                sizes = [(len(tokens), reading.num_documents + at) for at, tokens in enumerate(found)]
                reading.num_tokens[number] += sum(size for size, _ in sizes)
                reading.num_trained_tokens[number] += sum(int(tokens.train_mask.sum()) for tokens in found)
                reading.longest[number] = sorted([*reading.longest[number], *sizes], reverse=True)[:64]
                reading.num_too_long[number] += sum(limit is not None and size > limit for size, _ in sizes)
                if number == 0:
                    for document, tokens in zip(group, found, strict=True):
                        sample.add(document, tokens)
            reading.num_bytes += sum(len(document.text.encode()) for document in group)
            reading.num_documents += len(group)
        reading.documents = sample.documents
        return reading


def max_document_tokens(model: DoctorModel, plan: RunPlan) -> int | None:
    """Return the most tokens that a side is to read of a document."""
    limits = [limit for limit in (model.context_length, plan.max_length) if limit]
    return min(limits) if limits else None


def _documents(case: DoctorInputs) -> Iterable[Document]:
    if case.corpus is not None:
        return case.corpus
    return () if case.cache is None else (row.document for row in case.cache)


def _document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    for document in documents:
        group.append(document)
        if len(group) == READ_BATCH_SIZE:
            yield group
            group = []
    if group:
        yield group
