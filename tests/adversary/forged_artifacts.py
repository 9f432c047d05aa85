"""Manifests and headers with right checksums, as an attacker writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from json_mutations import dumped

from xtk.artifacts.atomic_files import canonical_json, sha256
from xtk.artifacts.cache_manifest import manifest_bytes, manifest_checksum

MANIFEST = "manifest.json"


def checksum_of(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def sealed(manifest: Any) -> bytes:
    """Return a manifest with its checksum, in the one form that xtk writes; plain JSON of what has no such form."""
    try:
        manifest = {**manifest, "checksum": manifest_checksum(manifest)}
        return manifest_bytes(manifest)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return dumped(manifest).encode()


def forge(cache: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a cache and seal it again."""
    manifest = json.loads((cache / MANIFEST).read_text())
    change(manifest)
    (cache / MANIFEST).write_bytes(sealed(manifest))


def projection_parts(path: Path) -> tuple[dict[str, Any], bytes, Any]:
    """Return xtk's header of a projection, the tensors' bytes and the header of safetensors."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    outer = json.loads(raw[8 : 8 + size])
    return json.loads(outer["__metadata__"]["xtk"]), raw[8 + size :], outer


def write_projection(path: Path, header: Any, data: bytes, outer: Any) -> None:
    """Write a projection with another header, and the checksum that belongs to it."""
    from xtk.artifacts.projection_file import TENSOR_DTYPES

    try:
        kept = {key: value for key, value in header.items() if key != "checksum"}
        tensors = b"".join(
            data[slice(*outer[name]["data_offsets"])] for name in TENSOR_DTYPES if isinstance(outer.get(name), dict)
        )
        header = {**kept, "checksum": sha256(canonical_json(kept).encode() + tensors)}
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        pass
    outer = {**outer, "__metadata__": {"xtk": dumped(header)}}
    text = dumped(outer).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
