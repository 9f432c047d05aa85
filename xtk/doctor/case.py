"""What is examined: two models without their weights, a cache or data, and how a run would be laid out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.hub import with_adapter
from xtk.artifacts.teacher_cache import TeacherCache, is_cache
from xtk.errors import XtkError, exists
from xtk.models.headers import weight_headers
from xtk.models.preparation import ALL_LINEAR
from xtk.teachers.forecast import Spread
from xtk.tokens.document import Document
from xtk.tokens.model_config import model_config
from xtk.tokens.sequence import Sequence, sequences
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.layout import Layout

LEVELS = ("ok", "note", "warning", "error")
SAMPLED, READ = 512, 10_000
AT_ONCE = 256


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


@dataclass(frozen=True)
class Side:
    """The student or the teacher.

    Attributes:
        role: "student" or "teacher".
        folder: of the model.
        tokenizer: its.
        configuration: config.json; empty where there is none.
        tensors: {name: (dtype as safetensors calls it, shape)} of the weights, from their headers.
        remote: whether its weights are on the hub, and stay there.
        adapter: a folder of peft's, where it is a model with an adapter.
    """

    role: str
    folder: Path
    tokenizer: Tokenizer
    configuration: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    remote: bool = False
    adapter: Path | None = None

    @classmethod
    def read(cls, role: str, folder: Path, name: str) -> Side:
        """Read a folder of a model or of an adapter, of the weights their headers alone.

        Raises:
            XtkError: this is a teacher cache, there is no tokenizer, or a file cannot be read.
        """
        if is_cache(folder) and not (folder / "config.json").is_file():
            hint = "xtk doctor STUDENT TEACHER CACHE: the models first, then the cache"
            raise XtkError(f"the {role} is a model, and this is a teacher cache", where=name, hint=hint)
        folder, adapter = with_adapter(folder)
        configuration = model_config(folder)
        tokenizer, tensors = Tokenizer(folder, name=name), weight_headers(folder, partial=True)
        return cls(role, folder, tokenizer, configuration, tensors, not tensors and not exists(name), adapter)

    @property
    def name(self) -> str:
        """What findings call it."""
        return f"{self.role} {self.tokenizer.name}"

    @property
    def text_configuration(self) -> dict[str, Any]:
        """The part of the configuration that is about text."""
        text = self.configuration.get("text_config")
        return text if isinstance(text, dict) else self.configuration

    @property
    def context(self) -> int | None:
        """The most tokens that it reads; None: its configuration does not say."""
        values = [self.text_configuration.get(key) for key in ("max_position_embeddings", "n_positions", "seq_length")]
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
        found = [name for ending in endings for name in self.tensors if name.endswith(ending)]
        return (found[0], self.tensors[found[0]][1][0]) if found else None


@dataclass(frozen=True)
class Plan:
    """How a run would be laid out, in the words of `distill` and `cache-teacher`.

    Attributes:
        layout: of the processes.
        output: where artifacts would go.
        top_k: of the cache; 0: the usual one.
        rate: tokens a second of the teacher; 0: nobody said.
        others: as the options of `distill` are called.
    """

    layout: Layout = field(default_factory=Layout)
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
    rate: float = 0.0


@dataclass(frozen=True)
class Case:
    """All that is examined.

    Attributes:
        student: one side.
        teacher: the other.
        plan: of the run.
        cache: a finished cache; None: there is none yet.
        corpus: the data; None: there is none, or the cache is the data.
    """

    student: Side
    teacher: Side
    plan: Plan
    cache: TeacherCache | None = None
    corpus: Corpus | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        """Student and teacher."""
        return self.student, self.teacher

    @cached_property
    def has_conversations(self) -> bool:
        """Whether there is one among the first documents."""
        return any(document.conversation is not None for document in islice(_documents(self), AT_ONCE))

    @cached_property
    def read(self) -> Reading:
        """The data, read by both sides."""
        return Reading.of(self)


@dataclass
class Reading:
    """What both sides make of the first documents of the data.

    Attributes:
        documents: a sample, from all over what was read.
        numbers: how many documents were read.
        whole: whether these are all.
        tokens: of each side, of all that was read.
        positions: tokens of each side that are trained.
        longest: of each side (tokens, number of the document), the longest first, some.
        too_long: of each side, documents that are longer than its limit.
        bytes: of text that was read.
    """

    documents: list[tuple[Document, Sequence]] = field(default_factory=list)
    numbers: int = 0
    whole: bool = True
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    positions: list[int] = field(default_factory=lambda: [0, 0])
    longest: list[list[tuple[int, int]]] = field(default_factory=lambda: [[], []])
    too_long: list[int] = field(default_factory=lambda: [0, 0])
    bytes: int = 0

    @classmethod
    def of(cls, case: Case) -> Reading:
        """Read `READ` documents at most."""
        reading, sample = cls(), Spread(SAMPLED)
        for group in _groups(_documents(case)):
            if reading.numbers >= READ:
                reading.whole = False
                break
            for number, side in enumerate(case.sides):
                limit = limit_of(side, case.plan)
                found = sequences(side.tokenizer, group)
                sizes = [(len(tokens), reading.numbers + at) for at, tokens in enumerate(found)]
                reading.tokens[number] += sum(size for size, _ in sizes)
                reading.positions[number] += sum(int(tokens.trained.sum()) for tokens in found)
                reading.longest[number] = sorted([*reading.longest[number], *sizes], reverse=True)[:64]
                reading.too_long[number] += sum(limit is not None and size > limit for size, _ in sizes)
                if number == 0:
                    for document, tokens in zip(group, found, strict=True):
                        sample.add(document, tokens)
            reading.bytes += sum(len(document.text.encode()) for document in group)
            reading.numbers += len(group)
        reading.documents = sample.held
        return reading


def limit_of(side: Side, plan: Plan) -> int | None:
    """Return the most tokens that a side is to read of a document."""
    limits = [limit for limit in (side.context, plan.max_length) if limit]
    return min(limits) if limits else None


def _documents(case: Case) -> Iterable[Document]:
    if case.corpus is not None:
        return case.corpus
    return () if case.cache is None else (row.document for row in case.cache)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    for document in documents:
        group.append(document)
        if len(group) == AT_ONCE:
            yield group
            group = []
    if group:
        yield group
