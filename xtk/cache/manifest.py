"""The manifest of a teacher cache: reading, schema, identity of headers, and names of the files of a cache."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import canonical_json, parse_json_object, sha256
from xtk.files.json_validation import check_json
from xtk.files.safe_artifact_files import check_file_name
from xtk.files.storage_folders import StorageFolder
from xtk.text.model_config_json import MAX_TOKENS

FORMAT, VERSION = "xtk-teacher-cache", 6
MANIFEST = "manifest.json"
# A cache contains the teacher's tokenizer, so that projections can be built from the cache alone.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_NAME = re.compile(r"shard-\d{5,9}\.arrow")
VOCABULARY_ORDER_NAME = re.compile(r"vocabulary-order-[0-9a-f]+\.arrow")
# Keys of a header's "codec" section whose values name files in the cache folder.
CODEC_FILE_KEYS = ("vocabulary_order",)
MAX_TOKEN_ID = 2**31 - 1
Checksum = Annotated[str, r"sha256:[0-9a-f]{64}"]
Count = Annotated[int, 0, MAX_TOKEN_ID]


def shard_file_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.arrow"


class CodecHeader(TypedDict):
    """How log-probabilities are stored; the caches of a merged one may differ in what is not required."""

    name: str
    precision: Literal["float32", "fine", "standard", "coarse"]
    num_samples: NotRequired[Count]
    num_sample_sets: NotRequired[Count]
    sample_logprobs: NotRequired[bool]  # not in older caches
    vocabulary_order: NotRequired[str]


class TeacherHeader(TypedDict):
    """The teacher and its tokenizer; `weights`, `tokenizer` and `template` are fingerprints."""

    name: str
    weights: Any
    tokenizer: str
    template: str | None
    embedding_rows: Annotated[int, 1, MAX_TOKENS]
    special_tokens: dict[str, Count]
    space_ids: list[Count]
    start_ids: NotRequired[list[Count]]  # older caches: bos, else eos


class DataRange(TypedDict):
    """Documents `[first, stop)` of the data of a merged cache."""

    fingerprint: str
    first: int
    stop: int
    optional_columns: NotRequired[list[str]]
    options: NotRequired[dict[str, Any]]


class DataHeader(TypedDict):
    """The documents: a fingerprint, or the ranges of a merged cache."""

    documents: NotRequired[int]
    fingerprint: NotRequired[str]
    values: NotRequired[str]
    optional_columns: NotRequired[list[str]]
    sources: NotRequired[list[DataRange]]


class OptionsHeader(TypedDict):
    """Options of `cache-teacher`, as far as the support has them."""

    support: str
    dtype: Literal["float32", "bfloat16", "float16"]
    top_k: NotRequired[Count | None]
    top_p: NotRequired[Annotated[float, 0, 1] | None]
    num_samples: NotRequired[Count | None]
    num_sample_sets: NotRequired[Count | None]
    max_length: NotRequired[int | None]


class CacheHeader(TypedDict):
    """What a cache was made from."""

    codec: CodecHeader
    teacher: TeacherHeader
    data: DataHeader
    options: OptionsHeader


class ShardEntry(TypedDict):
    """A shard; `payload_ranges` are the byte ranges of texts, tokens and log-probabilities."""

    file: str
    documents: Annotated[int, 1, MAX_TOKEN_ID]
    positions: int
    tokens: int
    entries: int
    bytes: int
    entropy: float
    quantization_kl: float
    text_bits: NotRequired[float | None]  # not in older caches
    text_bytes: NotRequired[int]
    payload_ranges: list[list[int]]
    checksum: Checksum
    source_header: NotRequired[Count]


class CacheManifest(TypedDict):
    """The content of `manifest.json`; `source_headers` are those of the caches that were merged."""

    header: CacheHeader
    shards: list[ShardEntry]
    files: dict[str, Checksum]
    source_headers: NotRequired[list[CacheHeader]]


def _check_manifest(manifest: dict[str, Any], where: str, hint: str) -> None:
    """Check types, ranges and counts of a manifest, and that no file name leads out of the cache."""
    check_json(manifest, CacheManifest, where, hint)

    def refuse(what: str) -> CorruptError:
        return CorruptError(what, where=where, hint=hint)

    shards, files = manifest["shards"], manifest["files"]
    if not shards:
        raise refuse("the manifest of this cache lists no shards")
    for name in files:
        check_file_name(name, (*TOKENIZER_FILES, VOCABULARY_ORDER_NAME), where=where)
    headers = source_headers(manifest)
    for header in (manifest["header"], *headers):
        if not {"fingerprint", "sources"} & header["data"].keys():
            raise refuse("this file lacks the key header.data.fingerprint")
        for name in codec_files(header):
            if check_file_name(name, (VOCABULARY_ORDER_NAME,), where=where) not in files:
                raise refuse(f"the manifest of this cache has no checksum for the file {name}")
    for at, shard in enumerate(shards):
        check_file_name(shard["file"], (shard_file_name(at),), where=where)
        if shard.get("source_header", 0) >= len(headers):
            raise refuse(
                f"shards[{at}].source_header in the manifest is {shard['source_header']}, but must be below "
                f"{len(headers)}"
            )
        ranges = shard["payload_ranges"]
        if len(ranges) != 3 or any(len(ends) != 2 or ends[0] > ends[1] for ends in ranges):
            raise refuse(f"shards[{at}].payload_ranges in the manifest must be three ranges [start, stop]")
        if max(stop for _, stop in ranges) > shard["bytes"]:
            raise refuse(f"shards[{at}].payload_ranges in the manifest ends after the last byte of the shard")
    documents = sum(shard["documents"] for shard in shards)
    stated = manifest["header"]["data"].get("documents", documents)
    if documents != stated:
        raise refuse(f"header.data.documents in the manifest is {stated:,}; its shards have {documents:,} documents")


def read_cache_manifest(folder: StorageFolder) -> dict[str, Any]:
    """Return the manifest of a cache after checking it."""
    where = folder.path_of(MANIFEST)
    try:
        content = folder.read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        if any(SHARD_NAME.fullmatch(file) for file in folder.file_sizes()):
            raise XtkError(
                "this teacher cache is unfinished",
                where=folder.name,
                hint="run the same xtk cache-teacher command again to continue it",
            ) from None
        raise XtkError(
            "this folder contains no teacher cache",
            where=folder.name,
            hint="check the path, or create one: xtk cache-teacher TEACHER DATA -o FOLDER",
        ) from None
    again = f"remove {where} and run the same xtk cache-teacher command again; finished parts are kept"
    manifest = parse_json_object(content, where, again)
    if manifest.get("format") != FORMAT or not {"shards", "header", "version"} <= manifest.keys():
        raise CorruptError("this file is not the manifest of a teacher cache", where=where, hint=again)
    if manifest["version"] != VERSION:
        raise cache_version_error(manifest["version"], where)
    # Byte by byte: JSON has several spellings of one value.
    try:
        whole = manifest.get("checksum") == manifest_checksum(manifest) and manifest_bytes(manifest) == content
    except (ValueError, TypeError, RecursionError):  # lone surrogates; "shards" is not a list
        whole = False
    if not whole:
        raise CorruptError("the manifest of this teacher cache does not match its checksum", where=where, hint=again)
    _check_manifest(manifest, where, again)
    return manifest


def cache_version_error(version: object, where: str) -> XtkError:
    """Return the error for a cache, or a shard of one, of another version of the format."""
    return XtkError(
        f"this teacher cache has version {version!s:.20}; this xtk reads version {VERSION}",
        where=where,
        hint="make it again: xtk cache-teacher TEACHER DATA -o FOLDER --force",
    )


def cache_totals(manifest: dict[str, Any]) -> dict[str, int]:
    """Return documents, positions, tokens and bytes of a cache."""
    names = ("documents", "positions", "tokens", "bytes")
    return {name: sum(int(shard[name]) for shard in manifest["shards"]) for name in names}


def teacher_bits_per_byte(manifest: dict[str, Any]) -> float | None:
    """Return the bits per byte of the teacher, over the text of all scored tokens.

    Infinite if the probability of one of them is 0; None if no token has text.
    """
    shards = manifest["shards"]
    num_bytes = sum(int(shard.get("text_bytes", 0)) for shard in shards)
    if not num_bytes or any("text_bytes" not in shard for shard in shards):
        return None
    bits = [shard.get("text_bits") for shard in shards]
    return math.inf if None in bits else sum(bits) / num_bytes


def cache_figures(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the totals of a cache, and the teacher's bits per byte, for JSON."""
    bits = teacher_bits_per_byte(manifest)
    shown = None if bits is None or math.isinf(bits) else round(bits, 6)
    return {**cache_totals(manifest), "teacher_bits_per_byte": shown}


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return "sha256:..." of a manifest without its checksum."""
    return sha256(canonical_json({key: value for key, value in manifest.items() if key != "checksum"}))


def source_headers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the headers of a cache's shards: its own, or those of the caches that were merged into it."""
    return list(manifest.get("source_headers") or [manifest["header"]])


def codec_files(header: dict[str, Any]) -> list[str]:
    """Return the names of the other files that shards with this header need."""
    return [str(header["codec"][key]) for key in CODEC_FILE_KEYS if header["codec"].get(key)]


def header_identity(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header without the teacher's name: a teacher folder that was moved is the same teacher."""
    teacher = {key: value for key, value in header_section(header, "teacher").items() if key != "name"}
    return {**header, "teacher": teacher}


def header_section(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of an unchecked header; {} if it is missing."""
    section = header.get(name)
    return section if isinstance(section, dict) else {}


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with one line per shard."""
    shards = ",\n".join(canonical_json(shard) for shard in manifest["shards"])
    rest = canonical_json({key: value for key, value in manifest.items() if key != "shards"})
    return f'{rest[:-1]},"shards":[\n{shards}\n]}}\n'.encode()


def repair_hint(folder: StorageFolder, file: str) -> str:
    """Return the next step for a corrupt file of a cache."""
    return f"remove {folder.path_of(file)} and run the same xtk cache-teacher command again to rewrite it"
