"""A tokenizer of given byte strings, for teachers whose tokenizer is not known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xtk.api.tokenizer_argument import store_files
from xtk.text.vocabulary import BYTE_LEVEL_ENCODER

START_TOKEN, END_TOKEN = "<|xtk-start|>", "<|xtk-end|>"


def write_byte_tokenizer(spellings: Iterable[bytes]) -> Path:
    """Write a tokenizer with a token for each byte string and for each byte, and return its folder.

    It has no merges, so that a text is encoded as bytes; caches store token ids, which it only decodes.
    """
    singles = {bytes([byte]) for byte in range(256)}
    names = ["".join(map(BYTE_LEVEL_ENCODER.__getitem__, one)) for one in sorted(singles | set(spellings))]
    special = [START_TOKEN, END_TOKEN]
    vocabulary = {name: number for number, name in enumerate([*special, *names])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for number, text in enumerate(special)
    ]  # fmt: skip
    content: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    roles = {"bos_token": START_TOKEN, "eos_token": END_TOKEN}
    files = {"tokenizer.json": json.dumps(content, ensure_ascii=False), "tokenizer_config.json": json.dumps(roles)}
    return store_files("tokenizers", files)
