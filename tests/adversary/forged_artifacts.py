"""Manifests and headers with matching checksums, as an attacker would write them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from json_mutations import to_json

from xtk.cache.manifest import manifest_bytes, manifest_checksum
from xtk.files.atomic_files import canonical_json, sha256

MANIFEST = "manifest.json"


def checksum_of(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def with_checksum(manifest: Any) -> bytes:
    """Return a manifest with its checksum, in the canonical form that xtk writes; plain JSON if it has no such form."""
    try:
        manifest = {**manifest, "checksum": manifest_checksum(manifest)}
        return manifest_bytes(manifest)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return to_json(manifest).encode()


def forge(cache: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a cache and write it with a matching checksum."""
    manifest = json.loads((cache / MANIFEST).read_text())
    change(manifest)
    (cache / MANIFEST).write_bytes(with_checksum(manifest))


def projection_parts(path: Path) -> tuple[dict[str, Any], bytes, Any]:
    """Return xtk's header of a projection, the bytes of its tensors and its safetensors header."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    safetensors_header = json.loads(raw[8 : 8 + size])
    return json.loads(safetensors_header["__metadata__"]["xtk"]), raw[8 + size :], safetensors_header


def write_projection(path: Path, header: Any, data: bytes, safetensors_header: Any) -> None:
    """Write a projection with another header and a matching checksum."""
    from xtk.projection.file import TENSOR_DTYPES

    try:
        without_checksum = {key: value for key, value in header.items() if key != "checksum"}
        tensors = b"".join(
            data[slice(*safetensors_header[name]["data_offsets"])]
            for name in TENSOR_DTYPES
            if isinstance(safetensors_header.get(name), dict)
        )
        header = {**without_checksum, "checksum": sha256(canonical_json(without_checksum).encode() + tensors)}
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        pass
    safetensors_header = {**safetensors_header, "__metadata__": {"xtk": to_json(header)}}
    text = to_json(safetensors_header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
