"""Tokenizer files of a transplanted model, which transformers and vLLM read as xtk does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xtk.models.saved_model import TOKENIZER_CLASS
from xtk.text.tokenizer import Tokenizer

# Settings of tokenizer_config.json that tokenizer.json does not contain.
_KEPT_SETTINGS = ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "padding_side", "truncation_side")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, template_of: Tokenizer) -> None:
    """Write tokenizer.json, its configuration and the chat template of `template_of`, if it has one."""
    files = tokenizer.to_files(with_start=True)
    files.pop("chat_template.jinja", None)
    template = template_of.to_files().get("chat_template.jinja")
    if template is not None:
        files["chat_template.jinja"] = template
    # Without it, transformers uses the class of the model, which may tokenize differently.
    configuration = {**tokenizer_settings(tokenizer), "tokenizer_class": TOKENIZER_CLASS}
    files["tokenizer_config.json"] = json.dumps(configuration, indent=1, sort_keys=True, ensure_ascii=False).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the roles of special tokens, and settings that tokenizer.json does not contain."""
    source = tokenizer.folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    kept = {name: settings[name] for name in _KEPT_SETTINGS if name in settings}
    return {**kept, **json.loads(tokenizer.to_files()["tokenizer_config.json"])}
