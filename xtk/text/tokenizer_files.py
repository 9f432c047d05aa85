"""Files of a tokenizer's folder: tokenizer.json, roles of special tokens, chat template; and their fingerprints."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from xtk.errors import XtkError
from xtk.text.model_config_json import CONFIG_FILE, MAX_TOKENS, read_model_config
from xtk.text.tokenizer_formats import add_tokens, convert_tokenizer_files, set_start_token
from xtk.untrusted_json import parse_json

MAX_TOKEN_ID = 2_000_000  # a larger id of an added token is an error in a file

SPECIAL_TOKEN_ROLES = ("bos", "eos", "pad", "unk")
STOP_TOKENS_KEY = "stop_tokens"  # in the tokenizer_config.json of a cache, which has no generation_config.json
_HINT = "download tokenizer.json of the model again, from a trusted source"


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a tokenizer's folder."""

    raw: bytes  # tokenizer.json
    content: dict[str, Any]  # its JSON, with the backend's ids of added tokens
    backend: tokenizers.Tokenizer  # the tokenizer of the library `tokenizers`
    fingerprint: str  # hash of the JSON without `truncation` and `padding`, which calls may change
    text_fingerprint: str  # the same without `post_processor`: equal where texts have the same tokens after their start
    special_tokens: dict[str, str]  # {role: text}, those of SPECIAL_TOKEN_ROLES that the tokenizer has
    chat_template: str | None  # a Jinja template; None without one
    configuration: dict[str, Any]  # content of tokenizer_config.json
    # Ids or texts of the stop tokens that generation_config.json, or a cache, names, in its order.
    stop_tokens: tuple[int | str, ...] = ()

    @property
    def template_fingerprint(self) -> str | None:
        """Hash of the chat template; None without one."""
        template = self.chat_template
        return None if template is None else "sha256:" + hashlib.sha256(json.dumps(template).encode()).hexdigest()


def read_tokenizer_files(folder: Path, model_folder: Path) -> TokenizerFiles:
    """Read the files of a tokenizer; other formats than tokenizer.json are converted.

    `model_folder`: folder with generation_config.json, which an adapter's folder does not have.
    """
    raw, configuration = _read_tokenizer_json(folder)
    with wrap_backend_errors("invalid tokenizer.json", str(folder)), _no_garbage_collection():
        backend = tokenizers.Tokenizer.from_buffer(raw)
        content = json.loads(raw, parse_float=_round_score)
        _check_tokenizer_json(content, str(folder))
        fingerprints = _tokenizer_fingerprints(content)
    # Where ids of added tokens have gaps, the backend (and so transformers) numbers them without gaps.
    content["added_tokens"] = [
        {**token, "id": backend.token_to_id(token["content"])} for token in content.get("added_tokens") or []
    ]
    template = _read_template(folder, configuration)
    roles = _special_tokens(folder, configuration)
    known = {role: token for role, token in roles.items() if backend.token_to_id(token) is not None}
    stops = _stop_tokens(model_folder, configuration)
    return TokenizerFiles(raw, content, backend, *fingerprints, known, template, configuration, stops)


def tokenizer_folder(folder: Path, adapter: Path | None) -> Path:
    """Return the folder with a model's tokenizer: its adapter's if that has one, as in transformers."""
    return adapter if adapter is not None and (adapter / "tokenizer.json").is_file() else folder


def _stop_tokens(folder: Path, configuration: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the stop tokens that a folder names: texts in a cache, ids in a model folder; () without any."""
    named = configuration.get(STOP_TOKENS_KEY)
    with contextlib.suppress(XtkError):  # a tokenizer does not need this file; doctor checks it
        named = _read_json(folder / "generation_config.json").get("eos_token_id") if named is None else named
    stops = named if isinstance(named, list) else [named]
    return tuple(stop for stop in stops if isinstance(stop, int | str) and not isinstance(stop, bool))


def _check_tokenizer_json(content: dict[str, Any], where: str) -> None:
    """Refuse tokens without text, which the library drops, and ids so large that tables of all ids do not fit."""
    added, table = content.get("added_tokens") or [], content["model"].get("vocab")
    for token in added:
        if not token["content"]:
            raise XtkError(f"added token {token['id']} in tokenizer.json has no text", where=where, hint=_HINT)
    ids = list(table.values()) if isinstance(table, dict) else [len(table) - 1] if isinstance(table, list) else []
    highest = max([*ids, *(token["id"] for token in added)], default=0)
    if highest >= MAX_TOKENS:
        raise XtkError(
            f"this tokenizer has a token with id {highest:,}; ids must be at most {MAX_TOKENS - 1:,}",
            where=where,
            hint=_HINT,
        )


@contextlib.contextmanager
def wrap_backend_errors(what: str, where: str) -> Iterator[None]:
    """Convert exceptions of the tokenizers library, including Rust panics, to XtkError."""
    try:
        yield
    except XtkError:
        raise
    except BaseException as failure:
        # Rust panics derive from BaseException.
        if not isinstance(failure, Exception) and type(failure).__name__ != "PanicException":
            raise
        raise XtkError(f"{what}: {str(failure)[:300]}", where=where, hint=_HINT) from None


def _read_tokenizer_json(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Return tokenizer.json and the tokenizer configuration, converted from another format if necessary."""
    path = folder / "tokenizer.json"
    configuration = _read_json(folder / "tokenizer_config.json")
    if path.is_file():
        return path.read_bytes(), configuration
    if not folder.is_dir():
        raise XtkError(
            "this model or tokenizer folder does not exist",
            where=str(folder),
            hint="check the path; use a folder with tokenizer.json",
        )
    files = convert_tokenizer_files(folder)
    if files is not None:
        content = json.loads(files["tokenizer.json"])
        if named := _added_tokens(folder, configuration):
            add_tokens(content, named)
        configuration = json.loads(files["tokenizer_config.json"]) | configuration
        set_start_token(content, configuration)
        return json.dumps(content, ensure_ascii=False).encode(), configuration
    slow = [name for name in ("vocab.json", "vocab.txt") if (folder / name).is_file()]
    if slow:
        raise XtkError(
            f"this folder has only a slow tokenizer ({slow[0]}, no tokenizer.json)",
            where=str(folder),
            hint='convert it: python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"",
        )
    raise XtkError(
        "this folder has no tokenizer.json",
        where=str(folder),
        hint="copy tokenizer.json and tokenizer_config.json of the model into the folder",
    )


def _added_tokens(folder: Path, configuration: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return {id: token} of the tokens that a folder adds to those of its tokenizer file."""
    listed = _read_json(folder / "added_tokens.json")
    added = {number: {"content": text} for text, number in listed.items() if type(number) is int}
    decoder = configuration.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if str(number).isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            added[int(number)] = token
    if added and not 0 <= min(added) <= max(added) < MAX_TOKEN_ID:
        raise XtkError(
            f"an added token has the id {min(added) if min(added) < 0 else max(added)}",
            where=str(folder),
            hint="correct added_tokens.json or added_tokens_decoder in tokenizer_config.json, or download them again",
        )
    return added


def _special_tokens(folder: Path, configuration: dict[str, Any]) -> dict[str, str]:
    fallback = _read_json(folder / "special_tokens_map.json")
    roles = {}
    for role in SPECIAL_TOKEN_ROLES:
        value = configuration.get(f"{role}_token", fallback.get(f"{role}_token"))
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            roles[role] = token
    return roles


def _read_template(folder: Path, configuration: dict[str, Any]) -> str | None:
    template = combined_template_files(folder)
    if template is not None:
        return template
    template = configuration.get("chat_template")
    if isinstance(template, list):  # several, named
        return combine_templates(
            {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        )
    return template if isinstance(template, str) else None


# A second template, where a model folder has two in files.
TOOL_USE_TEMPLATE = Path("additional_chat_templates", "tool_use.jinja")


def combined_template_files(folder: Path) -> str | None:
    """Return the chat template in files of a folder: one, or two combined; None if there is none."""
    template = _read_template_file(folder / "chat_template.jinja")
    if template is None:
        return None
    with_tools = _read_template_file(folder / TOOL_USE_TEMPLATE)
    return combine_templates({"default": template, "tool_use": with_tools})


def combine_templates(named: Mapping[str, Any]) -> str | None:
    """Return one template: `tool_use` for conversations with tools, else `default`, without it the first one."""
    template, with_tools = named.get("default", next(iter(named.values()), None)), named.get("tool_use")
    if not isinstance(template, str):
        return None
    if not isinstance(with_tools, str) or with_tools == template:
        return template
    # As transformers chooses. The empty expressions keep line feeds and spaces at both ends of each.
    # A final line feed is not part of a template.
    empty = "{{ '' }}"
    template, with_tools = template.removesuffix("\n"), with_tools.removesuffix("\n")
    return f"{{% if tools %}}{empty}{with_tools}{empty}{{% else %}}{empty}{template}{empty}{{% endif %}}"


def _read_template_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise XtkError("this chat template is not UTF-8", where=str(path), hint="save the file as UTF-8") from None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection while half a million long-lived objects are created: halves the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _round_score(number: str) -> float:
    # Unigram scores lose their last digits when a tokenizer is saved again; the fingerprint must not change.
    return float(f"{float(number):.6g}")


def _tokenizer_fingerprints(content: dict[str, Any]) -> tuple[str, str]:
    """Return the hashes of tokenizer.json with and without its post-processor."""
    parts = {key: f"{json.dumps(key)}:{_canonical_json(content[key])}" for key in sorted(content)}

    def without(*keys: str) -> str:
        text = "{" + ",".join(part for key, part in parts.items() if key not in keys) + "}"
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    return without("truncation", "padding"), without("truncation", "padding", "post_processor")


def _canonical_json(content: Any) -> str:
    """Return `json.dumps` with sorted keys. A vocabulary is sorted by its keys alone, which halves the time."""
    if not isinstance(content, dict):
        return json.dumps(content, sort_keys=True, separators=(",", ":"))
    if set(map(type, content.values())) == {int}:
        return json.dumps({key: content[key] for key in sorted(content)}, separators=(",", ":"))
    return "{" + ",".join(f"{json.dumps(key)}:{_canonical_json(content[key])}" for key in sorted(content)) + "}"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise XtkError("this JSON file is not UTF-8", where=str(path), hint="save the file as UTF-8") from None
    content = parse_json(text, what="this file", where=str(path))
    if re.search(r"\\u[dD][89a-fA-F]", text):  # lone surrogates cannot be encoded as UTF-8
        content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    return content if isinstance(content, dict) else {}


def configured_vocab_size(folder: Path) -> int:
    """Return `vocab_size` of the model configuration in a folder; 0 if it has none."""
    configuration = read_model_config(folder)
    text = configuration.get("text_config")
    rows = configuration.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    if not isinstance(rows or 0, int) or not 0 <= (rows or 0) <= MAX_TOKENS:
        raise XtkError(
            f"vocab_size in config.json is {rows}, but must be an integer from 0 to {MAX_TOKENS:,}",
            where=str(folder / CONFIG_FILE),
            hint="copy or download the model again",
        )
    return int(rows or 0)
