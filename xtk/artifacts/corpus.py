"""Reading documents: files of several formats, globs, remote paths, hub datasets, a pipe."""

from __future__ import annotations

import glob
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xtk.artifacts.hub import ADAPTER, is_run
from xtk.artifacts.records import ASKED, FIELDS, Record, document_of
from xtk.artifacts.spool import Spool
from xtk.errors import XtkError, exists
from xtk.lookup import unknown
from xtk.tokens.document import Document

_HUB_DATASET = re.compile(r"^[\w.-]+/[\w.-]+$")
_REMOTE = re.compile(r"^\w+://")
DATA = "a file, a folder of files, a glob in quotes, a hub dataset, or - for a pipe"


class Corpus:
    """Documents from one or more sources, readable as often as wanted.

    A line of `.jsonl`, a row of `.parquet` or `.arrow` and a whole `.txt` file are one document each.
    `-` reads JSON lines (or else one text) from stdin and keeps them in a temporary file.

    Args:
        sources: paths, globs, remote paths (`s3://`, `hf://`), ids of hub datasets (their train split), `-`.
        columns: {field: column} where data has other names than those of FIELDS; and for each of ASKED that is read.
        piped: what came through stdin, where it has been read already.
    """

    def __init__(
        self, sources: list[str], columns: Mapping[str, str] | None = None, piped: Spool | None = None
    ) -> None:
        self.sources = sources
        self.columns = dict(columns or {})
        self._piped = piped
        for field in self.columns:
            if field not in (*FIELDS, *ASKED):
                raise unknown("document field", field, FIELDS)
        self._readers = [reader for source in sources for reader in self._open(source)]

    @property
    def name(self) -> str:
        """How messages call it."""
        return ", ".join(self.sources)

    def descriptors(self) -> list[int]:
        """Return the open files that a child process needs to inherit to read it."""
        return [] if self._piped is None else [self._piped.descriptor]

    def __reduce__(self) -> tuple[type[Corpus], tuple[Any, ...]]:
        return Corpus, (self.sources, self.columns, self._piped)

    def __iter__(self) -> Iterator[Document]:
        for record, where in self.records():
            yield document_of(record, self.columns, where)

    def records(self) -> Iterator[tuple[Record, str]]:
        """Yield what the data holds, as it is: {column: value}, and which record it is, for messages.

        Raises:
            XtkError: there is none.
        """
        count = 0
        for name, read in self._readers:
            for number, record in enumerate(read()):
                yield record, f"{name}, document {number}"
                count += 1
        if not count:
            raise XtkError(
                "there is no document in this corpus",
                where=self.name,
                hint='one {"text": "..."} a line, in a .jsonl file',
            )

    def _open(self, source: str) -> list[tuple[str, Callable[[], Iterator[Record]]]]:
        if source == "-":
            if self._piped is None or self.sources.count("-") > 1:
                self._piped = Spool.of_stdin()
            piped = self._piped
            return [("stdin", lambda: _read_pipe(piped))]
        if _REMOTE.match(source):
            return [_reader(source)]
        paths = [source] if exists(source) else sorted(glob.glob(source, recursive=True))  # noqa: PTH207
        if paths:
            files = [file for path in paths for file in _files_of(Path(path))]
            return [_reader(str(file)) for file in files]
        if _HUB_DATASET.match(source) and not Path(source).suffix:
            return [(source, lambda: _read_hub(source))]
        raise XtkError("there is no such data", where=source, hint=DATA)


class HeldCorpus(Corpus):
    """Documents that are in memory already.

    Args:
        documents: as they were read.
        sources: where they are from, for messages.
        columns: as in `Corpus`; which of `ASKED` were read.
    """

    def __init__(self, documents: Sequence[Document], sources: list[str], columns: Mapping[str, str]) -> None:
        super().__init__([], columns)
        self.sources, self.documents = sources, documents

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)

    def __reduce__(self) -> tuple[type[Corpus], tuple[Any, ...]]:
        return HeldCorpus, (self.documents, self.sources, self.columns)


def columns_option(value: str | None, **asked: str) -> dict[str, str]:
    """Read `--columns prompt=question,completion=answer`.

    Args:
        value: as it was given.
        asked: columns that have an option of their own, by their fields; "": none.
    """
    pairs = [part.split("=", 1) for part in value.split(",")] if value else []
    names = [pair[0].strip() for pair in pairs]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise XtkError(f"--columns is {value!r}", hint=f"FIELD=COLUMN,...; fields are {', '.join(FIELDS)}")
    if named := sorted(set(names) & set(ASKED)):
        raise XtkError(f"--columns is {value!r}", hint=f"{named[0]} is an option: --{named[0]}-column COLUMN")
    columns = {name: pair[1].strip() for name, pair in zip(names, pairs, strict=True)}
    return {**columns, **{field: column for field, column in asked.items() if column}}


class Fingerprint:
    """The hash of documents in their order, added one by one: of all that is read, and of what of it is trained."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Add one document."""
        for segment in document.segments:
            text = segment.text.encode()
            self._hash.update(f"{segment.role} {segment.train} {len(text)}\n".encode())
            self._hash.update(text)
        if document.conversation is not None:
            talk = [document.conversation.messages, document.conversation.tools]
            self._hash.update(json.dumps(talk).encode())  # in their order: templates print tools as they come
        for name, told in _beside(document).items():
            self._hash.update(f"\0{name} {len(told)}\n".encode())
            self._hash.update(told)
        self._hash.update(b"\n")

    def __str__(self) -> str:
        return "sha256:" + self._hash.hexdigest()


def _beside(document: Document) -> dict[str, bytes]:
    """Return what a document has beside its segments and messages."""
    found = {}
    if document.teacher_prompt is not None:
        found["teacher_prompt"] = json.dumps(document.teacher_prompt).encode()
    if document.teacher_tokens is not None:
        found["input_ids"] = document.teacher_tokens.to_bytes()
    if document.given_ids is not None:
        found["given_ids"] = document.given_ids.to_bytes()
    if document.weight != 1:
        found["weight"] = repr(document.weight).encode()
    if document.route:
        found["route"] = document.route.encode()
    if document.drawn is not None:
        found["student_ids"] = document.drawn.to_bytes()
    return found


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    _refuse_models(path)
    files = sorted(file for file in path.iterdir() if _format_of(file.name) in _FORMATS)
    if not files:
        raise XtkError(
            "this folder holds no data files", where=str(path), hint=f"files ending in {', '.join(_FORMATS)}"
        )
    return files


def _refuse_models(folder: Path) -> None:
    """Refuse a folder whose JSON is no data.

    Raises:
        XtkError: it is a run or a model.
    """
    if is_run(folder):
        raise XtkError("this is a run, not data", where=str(folder), hint=DATA)
    has_weights = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    is_known = any((folder / name).is_file() for name in (ADAPTER, "tokenizer.json"))
    if has_weights or (is_known and not any(folder.glob("shard-*"))):  # caches have tokenizers too
        raise XtkError("this is a model, not data", where=str(folder), hint=DATA)


def _reader(name: str) -> tuple[str, Callable[[], Iterator[Record]]]:
    kind = _format_of(name)
    if kind not in _FORMATS:
        raise XtkError(
            f"data ending in {kind or 'nothing'} cannot be read", where=name, hint=f"one of {', '.join(_FORMATS)}"
        )
    return name, lambda: _named(name, _FORMATS[kind](name))


def _named(name: str, records: Iterator[Record]) -> Iterator[Record]:
    """Pass records on; a file that is cut short or of another format is told by its name."""
    try:
        yield from records
    except XtkError:
        raise
    except Exception as wrong:
        damage = (ValueError, EOFError, OSError, OverflowError, MemoryError, zlib.error, lzma.LZMAError)
        if isinstance(wrong, OSError) and wrong.errno:  # the operating system's: no such file, no permission
            raise
        # pyarrow is imported only where its formats are read; some of its errors are TypeErrors and KeyErrors.
        if not isinstance(wrong, damage) and type(wrong).__module__ != "pyarrow.lib":
            raise
        raise XtkError(
            f"this data cannot be read to its end: {wrong}",
            where=name,
            hint="look whether it is whole, and whether its ending tells its format",
        ) from None


def _format_of(name: str) -> str:
    plain = name.removesuffix(".gz").removesuffix(".zst").removesuffix(".xz")
    return Path(plain).suffix.lower()


def _read_json_lines(name: str) -> Iterator[Record]:
    import fsspec

    with fsspec.open(name, "rt", encoding="utf-8", compression="infer", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _json_record(line, f"{name}, line {number}")


def _json_record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as wrong:
        raise XtkError(f"this line is no JSON: {wrong}", where=where) from None
    if not isinstance(record, dict):
        raise XtkError('a document is a JSON object such as {"text": "..."}', where=where)
    return record


def _read_text(name: str) -> Iterator[Record]:
    import fsspec

    # newline="": the bytes of the file are the bytes of the document.
    with fsspec.open(name, "rt", encoding="utf-8", compression="infer", errors="replace", newline="") as stream:
        text = stream.read()
    if text:
        yield {"text": text}


def _read_parquet(name: str) -> Iterator[Record]:
    import fsspec
    import pyarrow.parquet

    from xtk.artifacts.arrow_files import validated

    with fsspec.open(name, "rb") as stream:
        for batch in validated(pyarrow.parquet.ParquetFile(stream).iter_batches()):
            yield from batch.to_pylist()


def _read_arrow(name: str) -> Iterator[Record]:
    import fsspec
    import pyarrow

    from xtk.artifacts.arrow_files import validated

    with fsspec.open(name, "rb") as stream:
        try:
            batches = pyarrow.ipc.open_stream(stream)  # what `datasets` writes
        except pyarrow.ArrowInvalid:
            stream.seek(0)
            table = pyarrow.ipc.open_file(stream)
            batches = map(table.get_batch, range(table.num_record_batches))
        for batch in validated(batches):
            yield from batch.to_pylist()


def _read_hub(name: str) -> Iterator[Record]:
    import datasets

    try:
        yield from datasets.load_dataset(name, split="train", streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as wrong:
        raise XtkError(f"this dataset cannot be loaded from the hub: {wrong}", where=name) from None


def _read_pipe(piped: Spool) -> Iterator[Record]:
    with piped.open() as lines:
        first = next(line for line in lines if line.strip())
    if not first.lstrip().startswith("{"):
        with piped.open() as stream:
            text = stream.read()
        path = text.strip()
        if "\n" not in path and exists(path) and Path(path).is_file() and _format_of(path) in _FORMATS:
            yield from _reader(path)[1]()
        else:
            yield {"text": text}
        return
    with piped.open() as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = _json_record(line, f"stdin, line {number}")
                if "path" in record and "kind" in record and not set(FIELDS) & set(record):
                    yield from _reader(str(record["path"]))[1]()
                else:
                    yield record


_FORMATS: dict[str, Callable[[str], Iterator[Record]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
