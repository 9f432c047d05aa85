"""Tokenizers as arguments of the Python API: a path, a hub id, or a tokenizer of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xtk.errors import XtkError
from xtk.files.atomic_files import atomic_write, canonical_json, sha256
from xtk.models.resolver import base_model_and_adapter, resolve_model_folder
from xtk.text.tokenizer import Tokenizer
from xtk.text.tokenizer_files import SPECIAL_TOKEN_ROLES, combine_templates
from xtk.writable_cache_folders import user_cache_folder

# Texts that normalizers of all kinds change: composed and decomposed accents, case, compatibility forms, spaces.
_PROBES = (
    "Zoë paid $1,234.50  for 'π' in 2019?\n\tdef f(x): return x",
    "e\u0301a\u0308 \u1e9b\u0323 \ufb01 \uff21\uff22 \u00bd \u2460",
    "  HELLO Hello hello\u00a0\u3000 \u201cx\u201d\u2026 \u200b\u0000\r\n",
    "",
)


_MAX_RECENT = 4
_recent: dict[str, Tokenizer] = {}  # by content: reading a tokenizer of 150,000 tokens takes two seconds


def to_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return xtk's tokenizer for a folder, a hub id, a fast tokenizer of transformers, or a `Tokenizer` of xtk.

    The last ones are kept until their content changes.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        place, name = resolve_model_folder(str(tokenizer), with_weights=False), str(tokenizer)
        folder, adapter = base_model_and_adapter(place, with_weights=False)
        files = [_file_states(folder), _file_states(place)]
        return _remembered([name, *files], lambda: Tokenizer(folder, name=name, adapter=adapter))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise XtkError(
            f"this is not a fast tokenizer: {type(tokenizer).__name__}",
            where="tokenizer",
            hint="use a folder, a hub id, or a tokenizer of transformers.AutoTokenizer with a backend_tokenizer",
        )
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    with_start = list(tokenizer("a")["input_ids"])
    content = [sha256(backend.to_str()), getattr(tokenizer, "chat_template", None), _role_ids(tokenizer), with_start]
    states = _file_states(Path(name)) if Path(name).is_dir() else []
    return _remembered(
        [name, states, content], lambda: _loaded_from_folder(tokenizer, name) or _stored_copy(tokenizer, name)
    )


def _remembered(content: list[Any], load: Callable[[], Tokenizer]) -> Tokenizer:
    """Return the tokenizer that was loaded for equal content, or load it."""
    key = sha256(json.dumps(content, default=str))
    loaded = _recent.pop(key, None) or load()
    _recent[key] = loaded
    for oldest in list(_recent)[:-_MAX_RECENT]:
        _recent.pop(oldest, None)
    return loaded


def _file_states(folder: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of change of the files in a folder."""
    states = [(path, path.stat()) for path in sorted(folder.resolve().iterdir()) if path.is_file()]
    return [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]


def _role_ids(tokenizer: Any) -> dict[str, int | None]:
    """Return the ids of the special tokens of a tokenizer of transformers, by role."""
    return {role: getattr(tokenizer, f"{role}_token_id", None) for role in SPECIAL_TOKEN_ROLES}


def _loaded_from_folder(tokenizer: Any, name: str) -> Tokenizer | None:
    """Return the tokenizer in the folder or of the hub id that a tokenizer was loaded from; None if they differ.

    transformers may write `tokenizer.json` with other content than it has read. The folder's has the fingerprint that
    caches and projections of the command line state.
    """
    try:
        in_folder = Tokenizer(resolve_model_folder(name, with_weights=False), name=name)
    except XtkError:
        return None
    template = getattr(tokenizer, "chat_template", None)
    if in_folder.template_fingerprint != _template_fingerprint(template):
        return None
    roles = {role: number for role, number in _role_ids(tokenizer).items() if number is not None}
    if in_folder.special_token_ids != roles:
        return None
    with_start = [*in_folder.start_ids, *in_folder.encode(["a"])[0].ids.tolist()]
    if list(tokenizer("a")["input_ids"])[: len(with_start)] != with_start:
        return None
    expected = [list(tokenizer(probe, add_special_tokens=False)["input_ids"]) for probe in _PROBES]
    same = [encoded.ids.tolist() for encoded in in_folder.encode(list(_PROBES))] == expected
    return in_folder if same and len(in_folder) + in_folder.num_left_out == len(tokenizer) else None


def _template_fingerprint(template: Any) -> str | None:
    if isinstance(template, dict):
        template = combine_templates(template)
    return None if template is None else "sha256:" + hashlib.sha256(json.dumps(template).encode()).hexdigest()


def _stored_copy(tokenizer: Any, name: str) -> Tokenizer:
    """Return the tokenizer from a copy in xtk's cache folder, which worker processes can load too."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = combine_templates(template)
    roles = {f"{role}_token": getattr(tokenizer, f"{role}_token", None) for role in SPECIAL_TOKEN_ROLES}
    files = {
        "tokenizer.json": tokenizer.backend_tokenizer.to_str(),
        "tokenizer_config.json": canonical_json({role: text for role, text in roles.items() if text is not None}),
        **({} if template is None else {"chat_template.jinja": str(template)}),
    }
    return Tokenizer(store_files("tokenizers", files), name=name)


def store_files(kind: str, files: dict[str, str], name: str = "") -> Path:
    """Write small files {name: content} into a folder of xtk's cache, and return it: KIND/hash of the content/NAME."""
    try:
        folder = user_cache_folder() / kind / sha256(canonical_json(files)).removeprefix("sha256:")[:32] / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            path = folder / file
            if not path.is_file() or path.read_text(encoding="utf-8") != content:
                with atomic_write(path) as temporary:
                    temporary.write_text(content, encoding="utf-8")
    except (OSError, RuntimeError) as failure:
        raise XtkError(
            f"files cannot be written to xtk's cache folder: {failure}",
            where=kind,
            hint="set the environment variable XTK_CACHE to a writable folder",
        ) from None
    return folder
