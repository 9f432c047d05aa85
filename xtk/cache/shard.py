"""Shards of a teacher cache: Arrow files with one row per document; see docs/reference/artifacts.md."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.cache.codec.shard_codec_registry import CODECS, Codec
from xtk.cache.columns import BLOB_COLUMNS, ShardColumns, shard_schema
from xtk.cache.manifest import VERSION, VOCABULARY_ORDER_NAME, cache_version_error
from xtk.cache.shard_writing import (
    TEXT_KEYS,
    ShardPosition,
    count_text_bits,
    write_sealed,
)
from xtk.cache.teacher_document import TeacherDocument, teacher_tokens
from xtk.cache.teacher_logprobs import StoredLogprobs, TeacherLogprobs
from xtk.cache.token_ids_by_frequency import VocabularyOrder, VocabularyOrderLoader
from xtk.errors import CorruptError, XtkError
from xtk.files.arrow_validation import RESTORE_HINT, check_columns, read_single_batch
from xtk.files.safe_artifact_files import check_file_name
from xtk.files.storage_folders import LocalFolder, StorageFolder
from xtk.name_registry import load_registered
from xtk.text.chat.parts import CONTENT, REASONING_KEY, TOOL_PARTS
from xtk.text.document import Conversation, Document, Segment
from xtk.text.token_sequence import TokenSequence

PAYLOAD_PARTS = ("text", *BLOB_COLUMNS)  # in this order in `payload_ranges`
MAX_DOCUMENT_TOKENS = 1 << 24  # a larger number means a corrupt shard, and would allocate gigabytes


class CacheShard:
    """An open, memory-mapped shard."""

    def __init__(
        self,
        path: Path,
        name: str = "",  # name in error messages; default: the path
        # loads the vocabulary order that the header names; default: from the folder of the shard
        load_order: VocabularyOrderLoader | None = None,
        # loads the function that returns the bytes of the teacher's tokens, if they are known; called for documents in
        # which a token ends in text of the chat template
        load_bytes_of: Callable[[], Callable[[int], bytes] | None] = lambda: None,
    ) -> None:
        self.name, self.load_bytes_of = name or str(path), load_bytes_of
        self._load_vocabulary_order = load_order or (
            lambda file: read_vocabulary_order(LocalFolder(path.parent), file, str(path))
        )
        try:
            with pa.memory_map(str(path)) as source:
                self._buffer = source.read_buffer()
        except (pa.ArrowException, ValueError, OSError) as failure:
            raise CorruptError(
                f"this shard of a teacher cache cannot be read: {failure}", where=self.name, hint=RESTORE_HINT
            ) from None
        self._batch, seal = read_single_batch(self._buffer, self.name, full=False)
        with self._corruption_as_error("its header is invalid"):
            metadata = self._batch.schema.metadata or {}
            self.header: dict[str, Any] = dict(json.loads(metadata[b"xtk"]))
            self._options = dict(self.header["codec"])
            self._tables = base64.b64decode(metadata[b"codec_tables"], validate=True)
            stated = dict(json.loads(seal[b"xtk"]))
            if stated.get("version") != VERSION:
                raise cache_version_error(stated.get("version", "unknown"), self.name)
            self.position = ShardPosition(*(int(stated[name]) for name in ("shard", "first_document", "documents")))
            bits, size = (stated.get(name) for name in TEXT_KEYS)  # none in shards of an older xtk
            values = (None if bits is None else float(bits), 0 if size is None else int(size))
            self._text = dict(zip(TEXT_KEYS, values, strict=True)) if "text_bytes" in stated else {}
            schema = shard_schema(self.header)
        check_columns(self._batch, schema, self.name, frozenset({"conversation"}))
        with self._corruption_as_error("the offsets of a column are invalid"):
            self.columns = ShardColumns(self._batch)
        self._checksums = self._batch.column("checksum").to_numpy()

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._buffer)

    @cached_property
    def codec(self) -> Codec:
        """The codec that decodes its tokens and log-probabilities."""
        with self._corruption_as_error("its compression tables are invalid"):
            options = self._options
            kind: type[Codec] = load_registered(CODECS, options["name"], "codec")
            ranks = self._load_vocabulary_order(options["vocabulary_order"]) if kind.needs_vocabulary_order else None
            return kind(options, self._tables, ranks)

    @cached_property
    def vocab_size(self) -> int:
        """Size of the teacher's vocabulary; all token ids are smaller."""
        with self._corruption_as_error("its header has no valid vocabulary size of the teacher"):
            return int(self.header.get("teacher", {}).get("embedding_rows", np.iinfo(np.int32).max))

    @contextlib.contextmanager
    def _corruption_as_error(self, what: str, row: int | None = None) -> Iterator[None]:
        """Convert exceptions from corrupt content into a CorruptError that names the shard and the row."""
        where = self.name if row is None else f"{self.name}, row {row}"
        try:
            yield
        except CorruptError as failure:
            raise (
                failure if failure.where else CorruptError(failure.what, where=where, hint=failure.hint or RESTORE_HINT)
            ) from None
        except XtkError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise CorruptError(
                f"this shard of a teacher cache is corrupt: {what}", where=where, hint=RESTORE_HINT
            ) from None

    def counts(self) -> dict[str, int]:
        """Return the total numbers of documents, trained positions, tokens and entries."""
        columns = self.columns
        return {
            "documents": len(self),
            "positions": int(columns.num_positions.sum()),
            "tokens": int(columns.num_tokens.sum()),
            "entries": int(columns.num_entries.sum()),
        }

    def entropy_sums(self) -> dict[str, float]:
        """Return the sums over all positions, in nats, of the entropy and of the KL divergence of the quantization."""
        sums = {
            name: self._batch.column(name).to_numpy().sum(dtype=np.float64) for name in ("entropy", "quantization_kl")
        }
        return {name: float(f"{found:.6g}") for name, found in sums.items()}

    def payload_ranges(self) -> list[tuple[int, int]]:
        """Return the byte ranges `[start, stop)` of texts, tokens and log-probabilities in the file."""
        texts = self._batch.column("segments").values.field("text").buffers()[2]
        buffers = [texts, *(self._batch.column(name).buffers()[2] for name in BLOB_COLUMNS)]
        base = self._buffer.address
        return [(0, 0) if not held or not held.size else (held.address - base, held.address - base + held.size)
                for held in buffers]  # fmt: skip

    def frame_checksum(self) -> str:
        """Return "sha256:..." of all bytes outside of the payload; these include the checksums of the documents."""
        return frame_checksum(self._buffer, self.payload_ranges())

    def manifest_entry(self, file: str) -> dict[str, Any]:
        """Return the entry of this shard in the manifest of a cache, under a file name."""
        return {
            "file": file,
            **self.counts(),
            **self.entropy_sums(),
            **self._text,
            "bytes": self.num_bytes,
            "payload_ranges": [list(stretch) for stretch in self.payload_ranges()],
            "checksum": self.frame_checksum(),
        }

    def read_document(self, number: int, sample_set: int | None = 0) -> CachedDocument:
        """Return one document after comparing its checksum."""
        if not self.is_intact(number):
            raise corrupt_document_error(self.name, number)
        return CachedDocument(self, number, sample_set)

    def is_intact(self, number: int) -> bool:
        """Return whether a document matches its checksum."""
        try:
            return self.columns.checksum(number) == int(self._checksums[number])
        except (ValueError, IndexError, OverflowError):  # corrupt offsets
            return False

    def write_slice(self, path: Path, start: int, stop: int) -> None:
        """Write the documents `[start, stop)` as a separate shard; their bytes and checksums do not change.

        The new shard states the position of the documents in the original cache, so that its bytes do not depend on
        its position in the output.
        """
        documents = map(self.read_document, range(start, stop))
        text = count_text_bits((document.tokens, document.stored_logprobs) for document in documents)
        place = ShardPosition(self.position.shard, self.position.first_document + start, stop - start)
        write_sealed(path, self._batch.slice(start, stop - start), place, text)

    def damaged_documents(self) -> Iterator[int]:
        """Yield the numbers of the documents that do not match their checksums."""
        return (number for number in range(len(self)) if not self.is_intact(number))

    def is_conversation(self) -> NDArray[np.bool_]:
        """Return bool [documents], whether each is a conversation."""
        is_valid: NDArray[np.bool_] = self._batch.column("conversation").is_valid().to_numpy(zero_copy_only=False)
        return is_valid


def corrupt_document_error(name: str, row: int) -> CorruptError:
    """Return the error for a document of a shard that does not match its checksum."""
    return CorruptError(
        "a document of this teacher cache does not match its checksum", where=f"{name}, row {row}", hint=RESTORE_HINT
    )


def read_vocabulary_order(folder: StorageFolder, file: object, where: str) -> VocabularyOrder:
    """Return the vocabulary order in a file of a cache."""
    name = check_file_name(file, (VOCABULARY_ORDER_NAME,), where=where)
    try:
        return VocabularyOrder.from_file_content(name, folder.read(name), folder.path_of(name))
    except FileNotFoundError:
        raise CorruptError(
            "the teacher cache lacks its file of token ids by frequency",
            where=folder.path_of(name),
            hint="copy the whole cache folder again",
        ) from None


def frame_checksum(content: Any, payload: Sequence[tuple[int, int]]) -> str:
    """Return "sha256:..." of the bytes of a shard outside of the payload ranges."""
    view, hashed, at = memoryview(content), hashlib.sha256(), 0
    for start, stop in sorted((start, stop) for start, stop in payload if stop > start):
        hashed.update(view[at:start])
        at = stop
    hashed.update(view[at:])
    return "sha256:" + hashed.hexdigest()


class CachedDocument(TeacherDocument):
    """One document of a cache; each part is decoded when it is first used."""

    def __init__(self, shard: CacheShard, number: int, sample_set: int | None) -> None:
        self._shard, self.columns, self._number, self._sample_set = shard, shard.columns, number, sample_set
        self.index: int | None = None  # the index of the document in its cache; None for a shard without a cache

    @property
    def header(self) -> dict[str, Any]:
        """The header of its cache: teacher, data and options."""
        return self._shard.header

    @cached_property
    def document(self) -> Document:  # type: ignore[override]
        """The text, and which parts are trained."""
        with self._shard._corruption_as_error("its document cannot be read", self._number):
            segments = self.columns.segments(self._number)
            written = str(self.columns.blob("conversation", self._number), "utf-8")
            return Document(
                segments,
                is_complete=bool(self.columns.complete[self._number]),
                conversation=_conversation_from_json(written, segments),
                weight=float(self.columns.weights[self._number]),
                teacher_name=self.columns.route(self._number),
                sampled_tokens=self.columns.sampled_tokens(self._number),
            )

    @cached_property
    def num_tokens(self) -> int:
        """T, the number of the teacher's tokens."""
        length = int(self.columns.num_tokens[self._number])
        if not 0 <= length <= MAX_DOCUMENT_TOKENS:
            raise self._corruption_error(f"a document has {length} tokens")
        return length

    @cached_property
    def trained_positions(self) -> NDArray[np.int32]:
        """int32 [P], indices of the trained tokens."""
        edges = self.columns.list_values("trained_ranges", self._number)
        starts, stops = edges[::2].astype(np.int64), edges[1::2].astype(np.int64)
        if len(starts) != len(stops) or (
            len(edges)
            and not (edges[0] >= 0 and stops[-1] <= self.num_tokens and (np.diff(edges.astype(np.int64)) > 0).all())
        ):
            raise self._corruption_error("positions of trained tokens lie outside of the document")
        if int((stops - starts).sum()) != int(self.columns.num_positions[self._number]):
            raise self._corruption_error("its number of trained tokens differs from the stored positions")
        runs = [
            np.arange(start, stop, dtype=np.int32) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        return runs[0] if len(runs) == 1 else np.concatenate([np.zeros(0, np.int32), *runs])

    @cached_property
    def tokens(self) -> TokenSequence:  # type: ignore[override]
        """The teacher's tokens; `exact` is False if a run starts with a token that has no bytes and is not a space."""
        length, number = self.num_tokens, self._number
        with self._shard._corruption_as_error("its tokens cannot be decoded", number):
            ids, ends = self._shard.codec.unpack_tokens(self.columns.blob("tokens", number), length)
            pieces = self.columns.list_values("byte_ranges", number).reshape(-1, 3)
            closers = self.columns.list_values("segment_end_tokens", number)
        self._check_ids(ids)
        size = int(self.columns.text_sizes[number])
        if not (
            _all_between(ends, 0, size)
            and _all_between(pieces[:, 0], 0, length - 1)
            and _all_between(pieces[:, 1], 0, length)
            and _all_between(pieces[:, 2], 0, size)
            and _all_between(closers, -1, length - 1)
        ):
            raise self._corruption_error("token or byte positions lie outside of the document")
        trained = np.zeros(length, np.bool_)
        trained[self.trained_positions] = True
        space_ids = self.header.get("teacher", {}).get("space_ids")
        return teacher_tokens(ids, ends, trained, pieces, closers, space_ids, self._shard.load_bytes_of)

    @cached_property
    def teacher_logprobs(self) -> TeacherLogprobs:
        """The teacher's log-probabilities, with one sample set or none."""
        ids, positions = self.tokens.ids, self.trained_positions
        with self._shard._corruption_as_error("its log-probabilities cannot be decoded", self._number):
            packed = self.columns.blob("teacher_logprobs", self._number)
            signal = self._shard.codec.unpack_teacher_logprobs(packed, ids, positions, self._sample_set)
        self._check_ids(signal.ids)
        return signal

    @cached_property
    def stored_logprobs(self) -> StoredLogprobs:  # type: ignore[override]
        """All stored log-probabilities of the teacher."""
        ids, positions = self.tokens.ids, self.trained_positions
        with self._shard._corruption_as_error("its log-probabilities cannot be decoded", self._number):
            packed = self.columns.blob("teacher_logprobs", self._number)
            scores = self._shard.codec.unpack_stored_logprobs(packed, ids, positions)
        self._check_ids(scores.ids)
        self._check_ids(scores.sample_ids)
        return scores

    def _check_ids(self, ids: NDArray[np.int32]) -> None:
        width = self._shard.vocab_size
        if not _all_between(ids, 0, width - 1):
            failure = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise self._corruption_error(f"token id {failure} is outside of the teacher's vocabulary of {width:,} ids")

    def _corruption_error(self, what: str) -> CorruptError:
        return CorruptError(
            f"this shard of a teacher cache is corrupt: {what}",
            where=f"{self._shard.name}, row {self._number}",
            hint=RESTORE_HINT,
        )


def _all_between(numbers: NDArray[np.int32], lowest: int, highest: int) -> bool:
    return not numbers.size or (int(numbers.min()) >= lowest and int(numbers.max()) <= highest)


def _conversation_from_json(written: str, segments: Sequence[Segment]) -> Conversation | None:
    """Return a conversation from its messages without contents and reasoning, which are segments."""
    if not written:
        return None
    content = json.loads(written)
    texts, messages = iter([segment.text for segment in segments]), list[dict[str, Any]]()
    for bare in content["messages"]:
        # In the order of `normalize_message`: a template may write a whole message.
        message = {key: value for key, value in bare.items() if key not in (REASONING_KEY, "tool_calls")}
        reasoning = next(texts, None) if REASONING_KEY in bare else None
        if reasoning is not None:
            next(texts, None)  # the mark that ends it
        message[CONTENT] = next(texts, None)
        if reasoning is not None:
            message[REASONING_KEY] = reasoning
        if calls := bare.get("tool_calls"):
            message["tool_calls"] = calls
        for _ in range(len(TOOL_PARTS) * len(calls or ())):
            next(texts, None)
        messages.append(message)
    tools = content["tools"]
    conversation = Conversation(tuple(messages), None if tools is None else tuple(tools))
    if [part.text for part in conversation.parts] != [segment.text for segment in segments]:
        raise ValueError("segments and messages differ")
    return conversation
