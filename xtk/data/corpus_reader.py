"""Documents for training and evaluation, from files, globs, remote paths, hub datasets or stdin."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from xtk.data.data_file_readers import DATASET_READERS, FORMATS, read_records, unsupported_format_error
from xtk.data.json_record_reader import first_nonempty_line, is_json_array, parse_json_record, read_json_records
from xtk.data.record_to_document import OPT_IN_FIELDS, RECORD_FIELDS, Record, record_to_document
from xtk.data.saved_datasets import DEFAULT_SPLIT, saved_dataset_files
from xtk.data.text_streams import RecordReadOptions, file_extension, read_lines, read_text
from xtk.errors import XtkError, path_exists
from xtk.files.hub_access import check_dataset_reachable
from xtk.files.run_names import is_run_folder
from xtk.name_registry import load_registered, unknown_name_error
from xtk.options.shared import MAX_DOCUMENT_BYTES
from xtk.text.document import Document
from xtk.text.model_config_json import ADAPTER_CONFIG

_HUB_URL = re.compile(r"^hf://(?:datasets/)?[\w.-]+/[\w.-]+(?::[\w.-]+)?$")
_HUB_DATASET = re.compile(r"^(?:hf://(?:datasets/)?)?(?P<name>[\w.-]+/[\w.-]+?)(?::(?P<split>[\w.-]+))?$")
_HUB_FILE = re.compile(r"^hf://datasets/([\w.-]+/[\w.-]+)(?:@[^/]+)?/.+$")
_URL_PREFIX = re.compile(r"^\w+://")
_STDIN_READ_BYTES = 1 << 20
DATA_HINT = (
    "use a file, a folder, a glob in quotes, a URL (hf://, s3://), a hub dataset (owner/name[:split]), or - for stdin"
)


class Corpus:
    """Documents from one or more sources; can be iterated repeatedly.

    One document is a line of `.jsonl`, an object of a JSON array, a row of `.csv`, `.tsv`, `.parquet` or `.arrow`, a
    whole `.txt` file, or a row of a folder of `datasets.save_to_disk`. `-` reads JSON lines, a JSON array or one text
    from stdin into a temporary file.
    """

    def __init__(
        self,
        # paths, globs, remote paths (`s3://`, `hf://`), hub datasets (`owner/name`, `owner/name:split`; default split:
        # train), `-`
        sources: Sequence[str],
        # {field: column} for RECORD_FIELDS with another column name, and for each of OPT_IN_FIELDS to read
        columns: Mapping[str, str] | None = None,
        max_document_bytes: int = MAX_DOCUMENT_BYTES,  # a larger record is refused before it is completely in memory
        stdin: StdinSpool | None = None,  # content of stdin, if it is already read
    ) -> None:
        self.sources = list(sources)
        self.columns = dict(columns or {})
        self._read_options = RecordReadOptions(self.columns, max_document_bytes)
        self._stdin = stdin
        for field in self.columns:
            if field not in (*RECORD_FIELDS, *OPT_IN_FIELDS):
                raise unknown_name_error("document field", field, RECORD_FIELDS)
        self._readers = [reader for source in sources for reader in self._open(source)]

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return ", ".join(self.sources)

    def inherited_descriptors(self) -> list[int]:
        """Return the file descriptors that a child process must inherit to read this corpus."""
        return [] if self._stdin is None else [self._stdin.descriptor]

    def __reduce__(self) -> tuple[type[Corpus], tuple[Any, ...]]:
        return Corpus, (self.sources, self.columns, self._read_options.max_record_bytes, self._stdin)

    def __iter__(self) -> Iterator[Document]:
        for record, where in self.records():
            yield record_to_document(record, self.columns, where)

    def records(self) -> Iterator[tuple[Record, str]]:
        """Yield the records, {column: value}, and the source and number of each, for messages."""
        count = 0
        for name, read in self._readers:
            for number, record in enumerate(read()):
                yield record, f"{name}, document {number}"
                count += 1
        if not count:
            raise XtkError(
                "the data contains no documents",
                where=self.name,
                hint='write one JSON object per line into a .jsonl file, such as {"text": "..."}',
            )

    def _open(self, source: str) -> list[tuple[str, Callable[[], Iterator[Record]]]]:
        if source == "-":
            if self._stdin is None or self.sources.count("-") > 1:
                self._stdin = StdinSpool.read_stdin()
            piped = self._stdin
            return [("stdin", lambda: _read_stdin(piped, self._read_options))]
        if dataset := _HUB_FILE.match(source):
            _check_extension(source)
            return [(source, lambda: _read_hub_file(source, dataset[1], self._read_options))]
        if _URL_PREFIX.match(source) and not _HUB_URL.match(source):
            return [self._file(source)]
        paths = [source] if path_exists(source) else sorted(glob.glob(source, recursive=True))  # noqa: PTH207
        if paths:
            return [self._file(str(file)) for path in paths for file in _data_files(Path(path))]
        name, _, split = source.rpartition(":")
        if name and path_exists(name) and Path(name).is_dir():
            return [self._file(str(file)) for file in _data_files(Path(name), split)]
        if (dataset := _HUB_DATASET.match(source)) and not Path(dataset["name"]).suffix:
            return [(source, lambda: _read_hub_dataset(dataset["name"], dataset["split"] or "", self._read_options))]
        raise XtkError("this data file, folder or dataset does not exist", where=source, hint=DATA_HINT)

    def _file(self, name: str) -> tuple[str, Callable[[], Iterator[Record]]]:
        _check_extension(name)
        return name, lambda: read_records(name, self._read_options)


def is_data_path(location: str) -> bool:
    """Return whether a path is a file in a data format, or a folder of `datasets.save_to_disk`."""
    path = Path(location)
    if not path_exists(location):
        return False
    return (path.is_file() and file_extension(path.name) in FORMATS) or (
        path.is_dir() and saved_dataset_files(path, "") is not None
    )


def _check_extension(name: str) -> None:
    if file_extension(name) not in FORMATS:
        raise unsupported_format_error(name)


def _read_hub_file(name: str, dataset: str, reading: RecordReadOptions) -> Iterator[Record]:
    check_dataset_reachable(dataset)
    yield from read_records(name, reading)


class InMemoryCorpus(Corpus):
    """A corpus of documents in memory."""

    def __init__(self, documents: Sequence[Document], sources: list[str], columns: Mapping[str, str]) -> None:
        super().__init__([], columns)
        self.sources, self.documents = sources, documents

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)

    def __reduce__(self) -> tuple[type[Corpus], tuple[Any, ...]]:
        return InMemoryCorpus, (self.documents, self.sources, self.columns)


def parse_columns_option(value: str | None, **field_columns: str) -> dict[str, str]:
    """Return {field: column} for `--columns prompt=question,completion=answer`, and those of separate options."""
    pairs = [part.split("=", 1) for part in value.split(",")] if value else []
    names = [pair[0].strip() for pair in pairs]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise XtkError(
            f"--columns is {value!r}, but must be FIELD=COLUMN,...",
            hint=f"use, for example, --columns prompt=question; the fields are {', '.join(RECORD_FIELDS)}",
        )
    if named := sorted(set(names) & set(OPT_IN_FIELDS)):
        raise XtkError(f"--columns cannot set the field {named[0]}", hint=f"use --{named[0]}-column COLUMN")
    columns = {name: pair[1].strip() for name, pair in zip(names, pairs, strict=True)}
    return {**columns, **{field: column for field, column in field_columns.items() if column}}


class CorpusFingerprint:
    """Incremental hash of documents in order: their whole content, and which parts are trained."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    @classmethod
    def of(cls, documents: Iterable[Document]) -> CorpusFingerprint:
        """Return the fingerprint of documents."""
        counts = cls()
        for document in documents:
            counts.add(document)
        return counts

    def add(self, document: Document) -> None:
        """Add one document."""
        for segment in document.segments:
            text = segment.text.encode()
            self._hash.update(f"{segment.role} {segment.train} {len(text)}\n".encode())
            self._hash.update(text)
        if document.conversation is not None:
            talk = [document.conversation.messages, document.conversation.tools]
            self._hash.update(json.dumps(talk).encode())  # keys in order: templates print tools in this order
        for name, content in _extra_content(document).items():
            self._hash.update(f"\0{name} {len(content)}\n".encode())
            self._hash.update(content)
        self._hash.update(b"\n")

    def __str__(self) -> str:
        return "sha256:" + self._hash.hexdigest()


def _extra_content(document: Document) -> dict[str, bytes]:
    """Return the encoded content of a document in addition to its segments and messages."""
    extra = {}
    if not document.is_complete:
        extra["complete"] = b"false"
    if document.teacher_prompt is not None:
        extra["teacher_prompt"] = json.dumps(document.teacher_prompt).encode()
    if document.teacher_tokens is not None:
        extra["input_ids"] = document.teacher_tokens.to_bytes()
    if document.candidate_ids is not None:
        extra["candidate_ids"] = document.candidate_ids.to_bytes()
    if document.weight != 1:
        extra["weight"] = repr(document.weight).encode()
    if document.teacher_name:
        extra["route"] = document.teacher_name.encode()
    if document.sampled_tokens is not None:
        extra["student_ids"] = document.sampled_tokens.to_bytes()
    return extra


def _data_files(path: Path, split: str = "") -> list[Path]:
    if not path.is_dir():
        return [path]
    saved = saved_dataset_files(path, split)
    if saved is not None:
        return saved
    _refuse_non_data(path)
    files = sorted(
        file
        for file in path.iterdir()
        if file_extension(file.name) in FORMATS and not file.name.startswith(".") and (file.is_file() or file.is_dir())
    )
    if not files:
        raise XtkError(
            "this folder contains no data files",
            where=str(path),
            hint=f"use a folder with files that end in {', '.join(FORMATS)}",
        )
    return files


def _refuse_non_data(folder: Path) -> None:
    """Refuse a folder whose JSON files are not data."""
    if is_run_folder(folder):
        raise XtkError("this is a run folder of xtk distill, not data", where=str(folder), hint=DATA_HINT)
    has_weights = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    is_known = any((folder / name).is_file() for name in (ADAPTER_CONFIG, "tokenizer.json"))
    if has_weights or (is_known and not any(folder.glob("shard-*"))):  # caches have tokenizers too
        raise XtkError("this is a model folder, not data", where=str(folder), hint=DATA_HINT)


def _read_hub_dataset(name: str, split: str, reading: RecordReadOptions) -> Iterator[Record]:
    check_dataset_reachable(name)
    import datasets

    read_dataset = load_registered(DATASET_READERS, "datasets", "reader")
    try:
        stream = datasets.load_dataset(name, split=split or DEFAULT_SPLIT, streaming=True)
        yield from read_dataset(stream, name, reading)
    except XtkError:
        raise
    except Exception as failure:  # errors of the hub client, the network, and each format's reader
        reason = next(iter(str(failure).splitlines()), "") or type(failure).__name__
        raise XtkError(
            f"this dataset cannot be loaded from the Hugging Face hub: {reason}", where=name,
            hint=f"check the name and the split ({name}:SPLIT), or download its files: "
            f"hf download {name} --repo-type dataset",
        ) from None  # fmt: skip


def _read_stdin(piped: StdinSpool, reading: RecordReadOptions) -> Iterator[Record]:
    with piped.open() as stream:
        first = first_nonempty_line(stream)
    with piped.open() as stream:
        if is_json_array(first):
            yield from read_json_records(stream, first, "stdin", reading)
            return
        if not first.startswith("{"):
            yield from _text_or_path(read_text(stream, "stdin", reading), reading)
            return
        for number, line in read_lines(stream, "stdin", reading):
            if line.strip():
                record = parse_json_record(line, f"stdin, line {number}")
                if "path" in record and "kind" in record and not set(RECORD_FIELDS) & set(record):
                    yield from read_records(str(record["path"]), reading)
                else:
                    yield record


def _text_or_path(text: str, reading: RecordReadOptions) -> Iterator[Record]:
    path = text.strip()
    if "\n" not in path and path_exists(path) and Path(path).is_file() and file_extension(path) in FORMATS:
        yield from read_records(path, reading)
    else:
        yield {"text": text}


class StdinSpool:
    """Content of stdin in an unlinked temporary file, to read repeatedly and in child processes that inherit it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def read_stdin(cls) -> StdinSpool:
        """Return the content of stdin, read to its end."""
        descriptor, path = tempfile.mkstemp(prefix="xtk-stdin-")
        Path(path).unlink()
        spool = cls(descriptor)
        blank = True
        with open(descriptor, "wb", closefd=False) as file:
            while part := _read_stdin_part():
                file.write(part)
                blank = blank and not part.strip()
        if blank:
            raise XtkError(
                "standard input is empty: the command before the | probably failed",
                where="standard input",
                hint="check the messages of that command above, or run it alone",
            )
        return spool

    def open(self) -> BinaryIO:
        """Return a stream of the bytes, at their beginning."""
        again: str | int = f"/proc/self/fd/{self.descriptor}"
        if not Path(str(again)).exists():
            again = os.dup(self.descriptor)
        stream = open(again, "rb")  # noqa: SIM115 (the caller closes it)
        stream.seek(0)
        return stream

    def __reduce__(self) -> tuple[type[StdinSpool], tuple[int]]:
        # For child processes that inherit the descriptor.
        return StdinSpool, (self.descriptor,)


def _read_stdin_part() -> bytes:
    return sys.stdin.buffer.read(_STDIN_READ_BYTES) if sys.stdin is not None and not sys.stdin.isatty() else b""
