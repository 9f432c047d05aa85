"""Inputs of the checks: two models without weights, a cache or data, and the plan of a run; findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from xtk.cache.output import is_cache
from xtk.cache.reader import TeacherCache
from xtk.data.corpus_reader import Corpus
from xtk.errors import XtkError, path_exists
from xtk.models.resolver import base_model_and_adapter
from xtk.models.safetensors_headers import read_weight_headers
from xtk.parallel.parallel_config import ParallelConfig
from xtk.teachers.cache_resource_estimate import EvenSample
from xtk.text.chat.parts import REASONING_KEY
from xtk.text.document import Document
from xtk.text.model_config_json import read_model_config
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

LEVELS = ("ok", "note", "warning", "error")
READ_BATCH_SIZE = 256
SAMPLE_SIZE, MAX_DOCUMENTS_READ = 512, 40 * READ_BATCH_SIZE


@dataclass(frozen=True)
class Finding:
    """A result of a check."""

    level: str  # one of `LEVELS`; "error": a command will fail
    what: str  # the message, one sentence
    where: str = ""  # model, file or document; "": the pair
    hint: str = ""  # what to do
    figures: dict[str, Any] = field(default_factory=dict)  # values for --json
    check: str = ""  # name; "": that of the function, which `run_checks` adds

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
    """A student or teacher, without weights."""

    role: str  # "student" or "teacher"
    folder: Path
    tokenizer: Tokenizer
    config: dict[str, Any]  # content of config.json; empty if there is none
    tensor_headers: dict[str, tuple[str, tuple[int, ...]]]  # name: (safetensors dtype, shape), from the file headers
    is_remote: bool = False  # its weights are on the Hugging Face Hub and not downloaded
    adapter: Path | None = None  # folder of its PEFT adapter

    @classmethod
    def read(cls, role: str, folder: Path, name: str) -> DoctorModel:
        """Return the model or adapter in a folder; of weights, only the headers are read."""
        if is_cache(folder) and not (folder / "config.json").is_file():
            hint = "give the models first: xtk doctor STUDENT TEACHER CACHE"
            raise XtkError(f"the {role} must be a model, and this is a teacher cache", where=name, hint=hint)
        folder, adapter = base_model_and_adapter(folder)
        configuration = read_model_config(folder)
        tokenizer = Tokenizer(folder, name=name, adapter=adapter)
        tensors = read_weight_headers(folder, allow_missing=True)
        return cls(role, folder, tokenizer, configuration, tensors, not tensors and not path_exists(name), adapter)

    @property
    def name(self) -> str:
        """Its name in findings."""
        return f"{self.role} {self.tokenizer.name}"

    @property
    def has_chat_template(self) -> bool:
        """Whether its tokenizer has a chat template."""
        return self.tokenizer.template_fingerprint is not None

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model, also for a multimodal one."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens; None: not in its configuration."""
        values = [self.text_config.get(key) for key in ("max_position_embeddings", "n_positions", "seq_length")]
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    @property
    def embedding(self) -> tuple[str, int] | None:
        """Name and number of rows of its input embedding; None: not found."""
        endings = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")
        names = [name for ending in endings for name in self.tensor_headers if name.endswith(f"{ending}.weight")]
        return (names[0], self.tensor_headers[names[0]][1][0]) if names else None


@dataclass(frozen=True)
class RunPlan:
    """Options of a planned run, named as in `distill` and `cache-teacher`."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output: Path = Path()  # folder
    dtype: str = "float32"
    teacher_dtype: str = "float32"
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    per_device_train_batch_size: int = 8
    max_batch_tokens: int = 0
    batch_tokens: int = 8192
    max_length: int = 0
    long_documents: str = "refuse"
    save_total_limit: int = 2
    attn_implementation: str = ""
    lora_r: int = 0


@dataclass(frozen=True)
class DoctorInputs:
    """Inputs of all checks."""

    student: DoctorModel
    teacher: DoctorModel
    plan: RunPlan
    cache: TeacherCache | None = None  # a finished one
    corpus: Corpus | None = None  # the data; None: not given, or the documents of the cache

    @property
    def models(self) -> tuple[DoctorModel, DoctorModel]:
        """Student and teacher."""
        return self.student, self.teacher

    def documents(self) -> Iterable[Document]:
        """Return the documents of the data, or of the cache."""
        if self.corpus is not None:
            return self.corpus
        return () if self.cache is None else (stored.document for stored in self.cache)

    @cached_property
    def conversation_contents(self) -> frozenset[str]:
        """What the conversations contain, of at most `MAX_DOCUMENTS_READ` documents (`contents_of`)."""
        return contents_of(islice(self.documents(), MAX_DOCUMENTS_READ))

    @cached_property
    def data_sample(self) -> DataSample:
        """Statistics of the data with both tokenizers."""
        return DataSample.from_inputs(self)


def contents_of(documents: Iterable[Document]) -> frozenset[str]:
    """Return what the conversations of documents contain.

    "conversations", if there are any; "tools", their descriptions; "calls" of tools; "reasoning" of the assistant;
    "thoughts", the text <think> in a trained content; "outer space", a trained content that begins or ends with white
    space. The last four also with "earlier " before them: with a later user message.
    """
    contents = set()
    for document in documents:
        if document.conversation is None:
            continue
        messages = document.conversation.messages
        contents |= {"conversations", "tools"} if document.conversation.tools else {"conversations"}
        roles = [message["role"] for message in messages]
        for number, (message, is_trained) in enumerate(zip(messages, document.trained_messages, strict=True)):
            content = message["content"]
            parts = {
                "calls": message.get("tool_calls"),
                "reasoning": REASONING_KEY in message,
                "thoughts": is_trained and "<think>" in content,
                "outer space": is_trained and content != content.strip(),
            }
            here = {name for name, is_there in parts.items() if is_there}
            contents |= here | ({f"earlier {name}" for name in here} if "user" in roles[number:] else set())
    return frozenset(contents)


@dataclass
class DataSample:
    """Statistics of the first documents of the data. Lists have a value for the student, and one for the teacher."""

    documents: list[Document] = field(default_factory=list)  # an evenly spaced sample of the documents read
    num_documents: int = 0  # read
    num_bytes: int = 0  # UTF-8, of the documents read
    is_complete: bool = True  # all documents were read
    num_tokens: list[int] = field(default_factory=lambda: [0, 0])  # of all documents read
    num_trained_tokens: list[int] = field(default_factory=lambda: [0, 0])
    longest: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])  # (tokens, index) of a document
    num_too_long: list[int] = field(default_factory=lambda: [0, 0])  # documents above the limit

    @property
    def conversations(self) -> list[Document]:
        """The sampled documents that are conversations."""
        return [document for document in self.documents if document.conversation is not None]

    @classmethod
    def from_inputs(cls, inputs: DoctorInputs) -> DataSample:
        """Return the statistics of at most `MAX_DOCUMENTS_READ` documents."""
        reading, sample, documents = cls(), EvenSample(SAMPLE_SIZE), iter(inputs.documents())
        while group := list(islice(documents, READ_BATCH_SIZE)):
            if reading.num_documents >= MAX_DOCUMENTS_READ:
                reading.is_complete = False
                break
            for number, side in enumerate(inputs.models):
                limit = max_document_tokens(side, inputs.plan)
                sequences = tokenize_documents(side.tokenizer, group)
                sizes = [(len(tokens), reading.num_documents + at) for at, tokens in enumerate(sequences)]
                reading.num_tokens[number] += sum(size for size, _ in sizes)
                reading.num_trained_tokens[number] += sum(int(tokens.train_mask.sum()) for tokens in sequences)
                reading.longest[number] = max(reading.longest[number], *sizes)
                reading.num_too_long[number] += sum(limit is not None and size > limit for size, _ in sizes)
                if number == 0:
                    for document, tokens in zip(group, sequences, strict=True):
                        sample.add(document, tokens)
            reading.num_bytes += sum(len(document.text.encode()) for document in group)
            reading.num_documents += len(group)
        reading.documents = [document for document, _ in sample.documents]
        return reading


def max_document_tokens(model: DoctorModel, plan: RunPlan) -> int | None:
    """Return the maximum number of tokens of a document for a model; None: no limit."""
    limits = [limit for limit in (model.context_length, plan.max_length) if limit]
    return min(limits) if limits else None
