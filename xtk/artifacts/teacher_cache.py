"""The teacher cache: a folder of Arrow shards and a manifest, from which any student trains.

Nothing in it depends on a student. A row is a document: its text, the teacher's tokens with the byte
where each ends, and the teacher's signal at each trained one. docs/reference/artifacts.md describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xtk.artifacts.files import (
    TEMPORARY,
    canonical_json,
    read_json,
    remove_leftovers,
    sha256,
    sha256_of_file,
    write_json,
    written_whole,
)
from xtk.errors import Damaged, XtkError
from xtk.tokens.document import Conversation, Document, Segment
from xtk.tokens.sequence import Sequence as TokenSequence
from xtk.tokens.signal import Signal

if TYPE_CHECKING:
    from xtk.tokens.tokenizer import Tokenizer

FORMAT, VERSION, CODEC = "xtk-teacher-cache", 2, "raw"
MANIFEST = "manifest.json"
# The teacher's tokenizer lies in its cache: what needs to know how the teacher spells is built from the cache alone.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
OPEN_SHARDS = 4096
_SHARD = re.compile(r"shard-\d{5,}\.arrow")

SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("segments", pa.list_(pa.struct([("role", pa.string()), ("text", pa.string()), ("train", pa.bool_())]))),
        ("ids", pa.list_(pa.int32())),
        ("byte_ends", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.int32())),
        ("closers", pa.list_(pa.int32())),
        ("ends", pa.bool_()),
        ("conversation", pa.string()),
        ("positions", pa.list_(pa.int32())),
        ("support_ids", pa.list_(pa.int32())),
        ("support_logprobs", pa.list_(pa.float32())),
        ("tail_mass", pa.list_(pa.float32())),
        ("realised_logprobs", pa.list_(pa.float32())),
        ("entropy", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True)
class Row:
    """One document of a cache.

    Attributes:
        document: its text and which of it is trained.
        tokens: what the teacher read.
        signal: what the teacher said at the trained tokens.
    """

    document: Document
    tokens: TokenSequence
    signal: Signal


class CacheWriter:
    """Writes a cache shard by shard; what is finished stays finished.

    Args:
        folder: where the cache is to be.
        header: identity of teacher, data and options; every shard carries it.
        shards: how many there will be.

    Raises:
        XtkError: the folder holds something else, or a cache of another request.
    """

    def __init__(self, folder: Path, header: dict[str, Any], shards: int) -> None:
        self.folder, self.header, self.shards = folder, header, shards
        if folder.exists() and not folder.is_dir():
            raise XtkError("a cache is a folder, and there is a file of this name", where=str(folder))
        if folder.is_dir():
            foreign = [path.name for path in folder.iterdir() if not _belongs(path.name)]
            if foreign:
                raise XtkError(
                    f"this folder holds other things ({', '.join(sorted(foreign)[:3])})",
                    where=str(folder),
                    hint="give a new folder to -o",
                )
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        for number in range(shards):
            path = self.path_of(number)
            if path.exists() and _identity(_read_shard_header(path)) != _identity(header):
                raise _other_request(folder, _read_shard_header(path), header)

    def path_of(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.folder / f"shard-{number:05d}.arrow"

    def missing(self) -> list[int]:
        """Return the shards that are still to be written."""
        return [number for number in range(self.shards) if not self.path_of(number).exists()]

    def write(self, number: int, first: int, rows: Sequence[Row]) -> None:
        """Write one shard, whole.

        Args:
            number: which one.
            first: index of its first document.
            rows: its documents.
        """
        schema = SCHEMA.with_metadata({"xtk": canonical_json(self.header)})
        with (
            written_whole(self.path_of(number)) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            writer.write_batch(_to_arrow(rows, first, schema))

    def write_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Write the teacher's tokenizer, so that the cache is all that a student needs."""
        for name, content in files.items():
            with written_whole(self.folder / name) as temporary:
                temporary.write_bytes(content)

    def finish(self) -> dict[str, Any]:
        """Write the manifest, last; return it."""
        entries = []
        for number in range(self.shards):
            path = self.path_of(number)
            rows, positions, tokens = _count(path)
            entries.append(
                {
                    "file": path.name,
                    "rows": rows,
                    "positions": positions,
                    "tokens": tokens,
                    "bytes": path.stat().st_size,
                    "checksum": sha256_of_file(path),
                }
            )
        manifest = {"format": FORMAT, "version": VERSION, "header": self.header, "shards": entries}
        manifest["checksum"] = _checksum(manifest)
        # Written last, on purpose: a folder without a manifest is unfinished.
        write_json(self.folder / MANIFEST, manifest)
        return manifest


def finished_cache(folder: Path, header: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest if the folder holds the finished cache of this very request; None if it is unfinished.

    Raises:
        XtkError: it holds the finished cache of another request.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    if _identity(manifest["header"]) != _identity(header):
        raise _other_request(folder, manifest["header"], header)
    sizes = {folder / shard["file"]: shard["bytes"] for shard in manifest["shards"]}
    if all(path.is_file() and path.stat().st_size == size for path, size in sizes.items()):
        return manifest
    for path, size in sizes.items():  # a shard that was lost or cut short is made again
        if path.is_file() and path.stat().st_size != size:
            path.unlink()
    (folder / MANIFEST).unlink()
    return None


def remove_cache(folder: Path) -> None:
    """Remove a cache, finished or not, for `--force`; the manifest goes first.

    Raises:
        XtkError: the folder holds other things too.
    """
    if not folder.is_dir():
        return
    foreign = [path.name for path in folder.iterdir() if not _belongs(path.name)]
    if foreign:
        raise XtkError(f"this folder holds other things ({', '.join(sorted(foreign)[:3])})", where=str(folder))
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.iterdir():
        path.unlink()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a cache.

    Raises:
        XtkError: there is no cache, an unfinished one, or one of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if folder.is_dir() and any(folder.glob("shard-*.arrow")):
            raise XtkError(
                "this teacher cache is unfinished",
                where=str(folder),
                hint="run the same xtk cache-teacher command again; it goes on",
            )
        raise XtkError("there is no teacher cache", where=str(folder), hint="xtk cache-teacher TEACHER DATA -o FOLDER")
    again = f"remove {path} and run the same xtk cache-teacher command again; finished parts are kept"
    try:
        manifest = read_json(path)
    except Damaged as wrong:
        raise Damaged(wrong.what, where=str(path), hint=again) from None
    if manifest.get("format") != FORMAT or "shards" not in manifest or "header" not in manifest:
        raise Damaged("this is no manifest of a teacher cache", where=str(path), hint=again)
    if manifest.get("version") != VERSION or manifest["header"].get("codec") != CODEC:
        raise XtkError(
            f"this cache has version {manifest.get('version')}, codec {manifest['header'].get('codec')!r}; "
            f"this xtk reads version {VERSION}, codec {CODEC!r}",
            where=str(path),
            hint="read the text into a new cache, or use the xtk that wrote this one",
        )
    if manifest.get("checksum") != _checksum(manifest):
        raise Damaged("the manifest of this cache was altered: its checksum does not fit", where=str(path), hint=again)
    return manifest


def totals(manifest: dict[str, Any]) -> dict[str, int]:
    """Return documents, positions, tokens and bytes of a cache."""
    names = {"documents": "rows", "positions": "positions", "tokens": "tokens", "bytes": "bytes"}
    return {total: sum(int(shard[name]) for shard in manifest["shards"]) for total, name in names.items()}


class TeacherCache:
    """A finished cache, read by row, memory-mapped.

    A shard's checksum is verified when it is first opened; sizes of all are when the cache is.

    Args:
        folder: what `xtk cache-teacher` wrote.

    Raises:
        XtkError: no finished cache is there, or a shard is missing or cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.header: dict[str, Any] = self.manifest["header"]
        for shard in self.manifest["shards"]:
            path = folder / shard["file"]
            if not path.is_file():
                raise Damaged("a shard of this cache is missing", where=str(path), hint=_repair(path))
            if path.stat().st_size != shard["bytes"]:
                raise Damaged(
                    f"a shard of this cache has {path.stat().st_size} bytes; {shard['bytes']} were written",
                    where=str(path),
                    hint=_repair(path),
                )
        self._first_rows = np.cumsum([0] + [shard["rows"] for shard in self.manifest["shards"]])
        self._open = lru_cache(maxsize=OPEN_SHARDS)(self._open_shard)
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __iter__(self) -> Iterator[Row]:
        return (self.row(number) for number in range(len(self)))

    def row(self, number: int) -> Row:
        """Read one document.

        Raises:
            Damaged: its shard was altered.
        """
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        return self._open(shard).row(number - int(self._first_rows[shard]))

    @property
    def teacher(self) -> Tokenizer:
        """The teacher's tokenizer.

        Raises:
            Damaged: it is missing, or not the one that the cache was made with.
        """
        from xtk.tokens.tokenizer import Tokenizer

        identity = self.header["teacher"]
        try:
            tokenizer = Tokenizer(self.folder, name=str(identity["name"]), width=int(identity["width"]))
        except Damaged:
            raise
        except XtkError as wrong:
            raise Damaged(
                f"the teacher's tokenizer is not in its cache: {wrong.what}",
                where=str(self.folder),
                hint="copy it there from the teacher, or name a projection: --projection",
            ) from None
        found = (tokenizer.fingerprint, tokenizer.template_fingerprint)
        if found != (identity["tokenizer"], identity["template"]):
            raise Damaged("the tokenizer in this cache is not the one it was made with", where=str(self.folder))
        return tokenizer

    def text_bytes(self) -> NDArray[np.int64]:
        """Return int64 [documents], how many bytes each text has; opens, and so verifies, every shard."""
        return np.concatenate([self._open(number).text_bytes() for number in range(len(self.manifest["shards"]))])

    def conversations(self) -> NDArray[np.bool_]:
        """Return bool [documents], which of them are conversations."""
        return np.concatenate([self._open(number).conversations() for number in range(len(self.manifest["shards"]))])

    def verify(self) -> None:
        """Read every shard and compare it with its checksum.

        Raises:
            Damaged: one of them differs.
        """
        for number in range(len(self.manifest["shards"])):
            self._verified.discard(number)
            self._open_shard(number)

    def _open_shard(self, number: int) -> _Shard:
        entry = self.manifest["shards"][number]
        path = self.folder / entry["file"]
        if number in self._verified:
            return _Shard(path)
        if sha256_of_file(path) != entry["checksum"]:
            raise Damaged(
                "a shard of this cache was altered: its checksum does not fit", where=str(path), hint=_repair(path)
            )
        if _identity(_read_shard_header(path)) != _identity(self.header):
            raise Damaged("a shard is from another cache", where=str(path), hint=_repair(path))
        self._verified.add(number)
        return _Shard(path)


class _Shard:
    """One open shard: columns as flat numpy arrays over the memory map."""

    def __init__(self, path: Path) -> None:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        self._lists = {
            name: (batch.column(name).offsets.to_numpy(), batch.column(name).values.to_numpy())
            for name in SCHEMA.names
            if pa.types.is_list(SCHEMA.field(name).type) and name != "segments"
        }
        segments = batch.column("segments")
        self._segment_offsets = segments.offsets.to_numpy()
        self._roles, self._texts, self._trains = (segments.values.field(name) for name in ("role", "text", "train"))
        self._ends = batch.column("ends").to_numpy(zero_copy_only=False)
        self._conversations = batch.column("conversation")

    def text_bytes(self) -> NDArray[np.int64]:
        ends = np.frombuffer(self._texts.buffers()[1], np.int32)[self._texts.offset :][: len(self._texts) + 1]
        sizes: NDArray[np.int64] = np.diff(ends[self._segment_offsets]).astype(np.int64)
        return sizes

    def conversations(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._conversations.is_valid().to_numpy(zero_copy_only=False)
        return found

    def row(self, number: int) -> Row:
        segments = tuple(
            Segment(self._roles[at].as_py(), self._texts[at].as_py(), self._trains[at].as_py())
            for at in range(self._segment_offsets[number], self._segment_offsets[number + 1])
        )
        written = self._conversations[number].as_py()
        document = Document(
            segments,
            ends=bool(self._ends[number]),
            conversation=_conversation_of(written, [segment.text for segment in segments]),
        )
        positions = self._list("positions", number)
        size = len(positions)
        ids = self._list("ids", number)
        trained = np.zeros(len(ids), np.bool_)
        trained[positions] = True
        return Row(
            document,
            TokenSequence(
                ids,
                self._list("byte_ends", number),
                trained,
                self._list("pieces", number).reshape(-1, 3),
                self._list("closers", number),
            ),
            Signal(
                positions=positions,
                support_ids=self._list("support_ids", number).reshape(size, -1 if size else 0),
                support_logprobs=self._list("support_logprobs", number).reshape(size, -1 if size else 0),
                tail_mass=self._list("tail_mass", number),
                realised_logprobs=self._list("realised_logprobs", number),
                entropy=self._list("entropy", number),
            ),
        )

    def _list(self, name: str, number: int) -> NDArray[Any]:
        offsets, values = self._lists[name]
        piece: NDArray[Any] = values[offsets[number] : offsets[number + 1]]
        return piece


def _to_arrow(rows: Sequence[Row], first: int, schema: pa.Schema) -> pa.RecordBatch:
    def lists(name: str, parts: list[NDArray[Any]]) -> pa.Array:
        offsets = np.cumsum([0] + [part.size for part in parts])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise XtkError("a shard holds more than 2^31 numbers in one column", hint="a smaller --shard-tokens")
        kind = SCHEMA.field(name).type
        flat = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, kind.value_type))

    signal = {
        name: lists(name, [getattr(row.signal, name) for row in rows])
        for name in ("positions", "support_ids", "support_logprobs", "tail_mass", "realised_logprobs", "entropy")
    }
    columns = {
        "document": pa.array(range(first, first + len(rows)), pa.int64()),
        "segments": pa.array(
            [
                [{"role": part.role, "text": part.text, "train": part.train} for part in row.document.segments]
                for row in rows
            ],
            SCHEMA.field("segments").type,
        ),
        "ids": lists("ids", [row.tokens.ids for row in rows]),
        "byte_ends": lists("byte_ends", [row.tokens.ends for row in rows]),
        "pieces": lists("pieces", [row.tokens.pieces for row in rows]),
        "closers": lists("closers", [row.tokens.closers for row in rows]),
        "ends": pa.array([row.document.ends for row in rows], pa.bool_()),
        "conversation": pa.array([_json_of_conversation(row.document) for row in rows], pa.string()),
        **signal,
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=schema)


def _json_of_conversation(document: Document) -> str | None:
    """Return the messages of a conversation without their contents, which are the document's segments."""
    conversation = document.conversation
    if conversation is None:
        return None
    bare = [{key: value for key, value in message.items() if key != "content"} for message in conversation.messages]
    # In the order of the data: templates print tools and calls as they come.
    return json.dumps({"messages": bare, "tools": conversation.tools}, ensure_ascii=False)


def _conversation_of(written: str | None, texts: Sequence[str]) -> Conversation | None:
    if written is None:
        return None
    content = json.loads(written)
    messages = ({**bare, "content": text} for bare, text in zip(content["messages"], texts, strict=True))
    tools = content["tools"]
    return Conversation(tuple(messages), None if tools is None else tuple(tools))


def _read_shard_header(path: Path) -> dict[str, Any]:
    try:
        with pa.memory_map(str(path)) as source:
            metadata = pa.ipc.open_file(source).schema.metadata or {}
            return dict(json.loads(metadata[b"xtk"]))
    except (pa.ArrowException, KeyError, ValueError) as wrong:
        raise Damaged(f"a shard of this cache cannot be read: {wrong}", where=str(path), hint=_repair(path)) from None


def shard_figures(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the header of a shard, and its rows, positions and tokens.

    Raises:
        Damaged: it is no shard of a cache, or cut short.
    """
    header = _read_shard_header(path)
    rows, positions, tokens = _count(path)
    return header, {"rows": rows, "positions": positions, "tokens": tokens, "bytes": path.stat().st_size}


def _count(path: Path) -> tuple[int, int, int]:
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
            return batch.num_rows, len(batch.column("positions").values), len(batch.column("ids").values)
    except (pa.ArrowException, KeyError, ValueError) as wrong:
        raise Damaged(f"a shard of this cache cannot be read: {wrong}", where=str(path), hint=_repair(path)) from None


def _checksum(manifest: dict[str, Any]) -> str:
    return sha256(canonical_json({key: value for key, value in manifest.items() if key != "checksum"}))


def _belongs(name: str) -> bool:
    return name == MANIFEST or name in TOKENIZER or name.startswith(TEMPORARY) or bool(_SHARD.fullmatch(name))


def _identity(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header without the teacher's name: a folder that was moved is the same teacher."""
    teacher = {key: value for key, value in header.get("teacher", {}).items() if key != "name"}
    return {**header, "teacher": teacher}


def _repair(path: Path) -> str:
    return f"remove {path} and {path.parent / MANIFEST}, and run the same xtk cache-teacher command again"


def _other_request(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> XtkError:
    differences = [
        f"{section}.{key}: {found.get(section, {}).get(key)} there, {wanted.get(section, {}).get(key)} asked for"
        for section in ("teacher", "data", "options")
        for key in sorted({*found.get(section, {}), *wanted.get(section, {})})
        if found.get(section, {}).get(key) != wanted.get(section, {}).get(key)
    ]
    return XtkError(
        "there is a cache of another request",
        where=f"{folder} ({'; '.join(differences[:3])})",
        hint="another -o, or --force to replace it",
    )
