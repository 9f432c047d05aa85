"""What the manifest of a teacher cache may state: its schema, and the names of the files of a cache."""

from __future__ import annotations

import re
from typing import Any

from xtk.artifacts.codecs import PRECISIONS
from xtk.artifacts.members import member
from xtk.artifacts.schema import (
    Invalid,
    Stated,
    check,
    list_of,
    map_of,
    number,
    one_of,
    optional,
    plain,
    record,
    text,
    whole,
)
from xtk.errors import Damaged
from xtk.tokens.tokenizer_limits import MAX_TOKENS

MANIFEST = "manifest.json"
# The teacher's tokenizer lies in its cache: what needs to know how the teacher spells is built from the cache alone.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD = re.compile(r"shard-\d{5,9}\.arrow")
VOCABULARY_ORDER = re.compile(r"vocabulary-order-[0-9a-f]+\.arrow")
# Keys of a codec's options under which a header names files in the folder of the shards.
FILES_OF_A_CODEC = ("vocabulary_order",)
MANIFEST_BYTES = 1 << 30  # two million shards
IDS = 2**31 - 1
_CHECKSUM = text(r"sha256:[0-9a-f]{64}")
_DTYPES = ("float32", "bfloat16", "float16")


def file_of(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05d}.arrow"


def _payload(value: Any, place: str) -> None:
    """Accept the byte ranges of texts, tokens and signals."""
    if type(value) is not list or len(value) != 3 or not all(map(_is_range, value)):
        raise Invalid(place, value, "three ranges [start, stop]")


def _is_range(value: Any) -> bool:
    return (
        type(value) is list and len(value) == 2 and all(type(one) is int for one in value) and 0 <= value[0] <= value[1]
    )


_STRETCH = record(
    {"fingerprint": text(), "first": whole(), "stop": whole()}, {"rows": whole(), "options": map_of(plain(2))}
)
_HEADER = record(
    {
        "codec": record(
            {"name": text()},
            {
                "precision": one_of(tuple(PRECISIONS)),
                "num_samples": whole(0, IDS),
                "num_sample_sets": whole(0, IDS),
                "vocabulary_order": text(),
            },
        ),
    },
    {
        "kind": text(),
        "teacher": record(
            {},
            {
                "name": text(),
                "weights": plain(3),
                "tokenizer": text(),
                "template": optional(text()),
                "width": whole(1, MAX_TOKENS),
                "special_tokens": map_of(whole(0, IDS)),
            },
        ),
        "data": record(
            {},
            {
                "fingerprint": text(),
                "rows": whole(),
                "optional_columns": list_of(text(), 8),
                "sources": list_of(_STRETCH),
            },
        ),
        "options": record(
            {},
            {
                "support": text(),
                "top_k": optional(whole(0, IDS)),
                "top_p": optional(number(0, 1)),
                "num_samples": optional(whole(0, IDS)),
                "num_sample_sets": optional(whole(0, IDS)),
                "dtype": one_of(_DTYPES),
                "max_length": optional(whole()),
                "batch_tokens": whole(),
                "shard_tokens": whole(),
            },
        ),
    },
)
_SHARD = record(
    {
        "file": text(),
        "rows": whole(0, IDS),
        "positions": whole(),
        "tokens": whole(),
        "bytes": whole(),
        "payload": _payload,
        "checksum": _CHECKSUM,
    },
    {"entries": whole(), "source_header": whole(0, IDS)},
    plain(2),
)
_MANIFEST = record(
    {"header": _HEADER, "shards": list_of(_SHARD)},
    {"files": map_of(_CHECKSUM), "source_headers": list_of(_HEADER)},
)


def check_manifest(manifest: dict[str, Any], where: str, hint: str) -> dict[str, Any]:
    """Check what a manifest states, whoever wrote it: types, ranges, and that no name leads out of the cache.

    Args:
        manifest: its JSON.
        where: the file, for errors.
        hint: what to do about a damaged manifest.

    Returns:
        It, with objects that name a missing key.

    Raises:
        Damaged: names the first value that cannot be.
    """
    check(manifest, _MANIFEST, where, hint)
    if not manifest["shards"]:
        raise Damaged("this cache has no shard", where=where, hint=hint)
    files = manifest.get("files", {})
    for name in files:
        member(name, (*TOKENIZER, VOCABULARY_ORDER), where=where)
    headers = manifest.get("source_headers") or [manifest["header"]]
    for header in (manifest["header"], *headers):
        for key in FILES_OF_A_CODEC:
            if (
                header["codec"].get(key) is not None
                and member(header["codec"][key], (VOCABULARY_ORDER,), where=where) not in files
            ):
                raise Damaged(f"this file states no checksum of {header['codec'][key]}", where=where, hint=hint)
    for at, shard in enumerate(manifest["shards"]):
        member(shard["file"], (file_of(at),), where=where)
        if shard.get("source_header", 0) >= len(headers):
            raise Damaged(
                f"shards[{at}].source_header is {shard['source_header']}; there are {len(headers)}",
                where=where,
                hint=hint,
            )
        if max(stop for _, stop in shard["payload"]) > shard["bytes"]:
            raise Damaged(f"shards[{at}].payload ends after the file's last byte", where=where, hint=hint)
    stated = Stated(manifest, "", where)
    stated["header"] = _stated_header(manifest["header"], "header", where)
    if "source_headers" in manifest:
        stated["source_headers"] = [
            _stated_header(one, f"source_headers[{at}]", where) for at, one in enumerate(manifest["source_headers"])
        ]
    stated["shards"] = [Stated(one, f"shards[{at}]", where) for at, one in enumerate(manifest["shards"])]
    return stated


def _stated_header(header: dict[str, Any], place: str, where: str) -> Stated:
    sections = {
        name: Stated(section, f"{place}.{name}", where) if isinstance(section, dict) else section
        for name, section in header.items()
    }
    return Stated(sections, place, where)
