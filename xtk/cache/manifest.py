"""The manifest of a teacher cache: reading, schema, identity of headers, and names of the files of a cache."""

from __future__ import annotations

import math
import re
from typing import Any

from xtk.cache.codec.shard_codec_registry import PRECISION_CODECS
from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import canonical_json, parse_json_object, sha256
from xtk.files.json_validation import (
    CheckedObject,
    SchemaViolation,
    any_json,
    check_schema,
    integer,
    json_object,
    list_of,
    map_of,
    number,
    one_of,
    optional,
    text,
)
from xtk.files.safe_artifact_files import check_file_name
from xtk.files.storage_folders import StorageFolder
from xtk.text.tokenizer_validation import MAX_TOKENS

FORMAT, VERSION = "xtk-teacher-cache", 6
MANIFEST = "manifest.json"
# A cache contains the teacher's tokenizer, so that projections can be built from the cache alone.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_NAME = re.compile(r"shard-\d{5,9}\.arrow")
VOCABULARY_ORDER_NAME = re.compile(r"vocabulary-order-[0-9a-f]+\.arrow")
# Keys of a header's "codec" section whose values name files in the cache folder.
CODEC_FILE_KEYS = ("vocabulary_order",)
MAX_MANIFEST_BYTES = 1 << 30  # two million shards
MAX_TOKEN_ID = 2**31 - 1
_CHECKSUM = text(r"sha256:[0-9a-f]{64}")
_DTYPES = ("float32", "bfloat16", "float16")


def shard_file_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.arrow"


def _check_byte_ranges(value: Any, place: str) -> None:
    """Accept the byte ranges of texts, tokens and log-probabilities."""
    if type(value) is not list or len(value) != 3 or not all(map(_is_range, value)):
        raise SchemaViolation(place, value, "three ranges [start, stop]")


def _is_range(value: Any) -> bool:
    return (
        type(value) is list and len(value) == 2 and all(type(one) is int for one in value) and 0 <= value[0] <= value[1]
    )


_DATA_RANGE = json_object(
    {"fingerprint": text(), "first": integer(), "stop": integer()},
    {
        "documents": integer(),
        "options": map_of(any_json(2)),
        "optional_columns": list_of(text(), 8),
        "values": text(),
    },
)
_HEADER_SCHEMA = json_object(
    {
        "codec": json_object(
            {"name": text()},
            {
                "precision": one_of(tuple(PRECISION_CODECS)),
                "num_samples": integer(0, MAX_TOKEN_ID),
                "num_sample_sets": integer(0, MAX_TOKEN_ID),
                "vocabulary_order": text(),
            },
        ),
    },
    {
        "kind": text(),
        "teacher": json_object(
            {},
            {
                "name": text(),
                "weights": any_json(3),
                "tokenizer": text(),
                "template": optional(text()),
                "embedding_rows": integer(1, MAX_TOKENS),
                "start_ids": list_of(integer(0, MAX_TOKEN_ID), 16),
                "special_tokens": map_of(integer(0, MAX_TOKEN_ID)),
                "space_ids": list_of(integer(0, MAX_TOKEN_ID)),
            },
        ),
        "data": json_object(
            {},
            {
                "fingerprint": text(),
                "values": text(),
                "documents": integer(),
                "optional_columns": list_of(text(), 8),
                "sources": list_of(_DATA_RANGE),
            },
        ),
        "options": json_object(
            {},
            {
                "support": text(),
                "top_k": optional(integer(0, MAX_TOKEN_ID)),
                "top_p": optional(number(0, 1)),
                "num_samples": optional(integer(0, MAX_TOKEN_ID)),
                "num_sample_sets": optional(integer(0, MAX_TOKEN_ID)),
                "dtype": one_of(_DTYPES),
                "max_length": optional(integer()),
                "batch_tokens": integer(),
                "shard_tokens": integer(),
            },
        ),
    },
)
_SHARD_SCHEMA = json_object(
    {
        "file": text(),
        "documents": integer(1, MAX_TOKEN_ID),
        "positions": integer(),
        "tokens": integer(),
        "bytes": integer(),
        "payload_ranges": _check_byte_ranges,
        "checksum": _CHECKSUM,
    },
    {
        "entries": integer(),
        "source_header": integer(0, MAX_TOKEN_ID),
        "entropy": number(),
        "quantization_kl": number(),
        "text_bits": optional(number()),
        "text_bytes": integer(),
    },
    any_json(2),
)
_MANIFEST_SCHEMA = json_object(
    {"header": _HEADER_SCHEMA, "shards": list_of(_SHARD_SCHEMA)},
    {"files": map_of(_CHECKSUM), "source_headers": list_of(_HEADER_SCHEMA)},
)


def check_cache_manifest(manifest: dict[str, Any], where: str, hint: str) -> dict[str, Any]:
    """Return a manifest after checking types, ranges, and that no file name leads out of the cache.

    Args:
        manifest: its JSON.
        where: the file, for errors.
        hint: next step for errors.

    Returns:
        The manifest, with objects that raise CorruptError for a missing key.

    Raises:
        CorruptError: names the first invalid value.
    """
    check_schema(manifest, _MANIFEST_SCHEMA, where, hint)
    if not manifest["shards"]:
        raise CorruptError("the manifest of this cache lists no shards", where=where, hint=hint)
    files = manifest.get("files", {})
    for name in files:
        check_file_name(name, (*TOKENIZER_FILES, VOCABULARY_ORDER_NAME), where=where)
    headers = manifest.get("source_headers") or [manifest["header"]]
    for header in (manifest["header"], *headers):
        for key in CODEC_FILE_KEYS:
            if (
                header["codec"].get(key) is not None
                and check_file_name(header["codec"][key], (VOCABULARY_ORDER_NAME,), where=where) not in files
            ):
                raise CorruptError(
                    f"the manifest of this cache has no checksum for the file {header['codec'][key]}",
                    where=where,
                    hint=hint,
                )
    for at, shard in enumerate(manifest["shards"]):
        check_file_name(shard["file"], (shard_file_name(at),), where=where)
        if shard.get("source_header", 0) >= len(headers):
            raise CorruptError(
                f"shards[{at}].source_header in the manifest is {shard['source_header']}, but must be below "
                f"{len(headers)}",
                where=where,
                hint=hint,
            )
        if max(stop for _, stop in shard["payload_ranges"]) > shard["bytes"]:
            raise CorruptError(
                f"shards[{at}].payload_ranges in the manifest ends after the last byte of the shard",
                where=where,
                hint=hint,
            )
    documents = sum(shard["documents"] for shard in manifest["shards"])
    if documents != manifest["header"].get("data", {}).get("documents", documents):
        raise CorruptError(
            f"header.data.documents in the manifest is {manifest['header']['data']['documents']:,}; "
            f"its shards have {documents:,} documents",
            where=where,
            hint=hint,
        )
    stated = CheckedObject(manifest, "", where)
    stated["header"] = _checked_header(manifest["header"], "header", where)
    if "source_headers" in manifest:
        stated["source_headers"] = [
            _checked_header(one, f"source_headers[{at}]", where) for at, one in enumerate(manifest["source_headers"])
        ]
    stated["shards"] = [CheckedObject(one, f"shards[{at}]", where) for at, one in enumerate(manifest["shards"])]
    return stated


def _checked_header(header: dict[str, Any], place: str, where: str) -> CheckedObject:
    sections = {
        name: CheckedObject(section, f"{place}.{name}", where) if isinstance(section, dict) else section
        for name, section in header.items()
    }
    return CheckedObject(sections, place, where)


def read_cache_manifest(folder: StorageFolder) -> dict[str, Any]:
    """Return the manifest of a cache after checking it.

    Raises:
        XtkError: there is no cache, it is unfinished, or it has another version.
    """
    where = folder.path_of(MANIFEST)
    try:
        content = folder.read(MANIFEST, MAX_MANIFEST_BYTES)
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
    return check_cache_manifest(manifest, where, again)


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
    num_bytes = sum(int(shard["text_bytes"]) for shard in shards)
    if not num_bytes:
        return None
    bits = [shard["text_bits"] for shard in shards]
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
    found = header.get(name)
    return found if isinstance(found, dict) else {}


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with one line per shard."""
    shards = ",\n".join(canonical_json(shard) for shard in manifest["shards"])
    rest = canonical_json({key: value for key, value in manifest.items() if key != "shards"})
    return f'{rest[:-1]},"shards":[\n{shards}\n]}}\n'.encode()


def repair_hint(folder: StorageFolder, file: str) -> str:
    """Return the next step for a corrupt file of a cache."""
    return f"remove {folder.path_of(file)} and run the same xtk cache-teacher command again to rewrite it"
