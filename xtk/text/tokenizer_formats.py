"""Converts tokenizer files of tiktoken, mistral-common and SentencePiece to tokenizer.json, in memory.

The result equals that of Hugging Face's converters, without downloads and without the packages of these formats.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from xtk.errors import XtkError
from xtk.text.start_tokens import start_post_processor
from xtk.text.vocabulary import BYTE_LEVEL_ENCODER, METASPACE_CHARACTER

# The split of cl100k_base (contractions, words, numbers, punctuation, white space) from tiktoken's openai_public.py,
# in the spelling of Llama 3 and Qwen; %s is the pattern of a number.
_CL100K_TEMPLATE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2, from its encoder.py.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# o200k_base, from tiktoken's openai_public.py.
_UPPERCASE, _LOWERCASE = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE}*{_LOWERCASE}+{_CONTRACTIONS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPERCASE}+{_LOWERCASE}*{_CONTRACTIONS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@dataclass(frozen=True)
class TiktokenSpec:
    """Properties of a tiktoken tokenizer that its file of BPE ranks lacks."""

    split_pattern: str  # regular expression that splits a text before merging
    special_token_ids: Mapping[str, int]  # {token: id}
    special_token_roles: Mapping[str, str]  # {"bos": token, ...}
    normalizer: Any = None  # in the format of tokenizer.json
    adds_bos: bool = False  # whether the publisher's code puts the bos token before a text


def _consecutive_ids(first: int, names: Iterable[str]) -> dict[str, int]:
    return {name: first + at for at, name in enumerate(names)}


# By the number of BPE ranks, from llama-models' tokenizer.py, Qwen's tokenization_qwen.py, tiktoken's openai_public.py.
_LLAMA3_SPECIAL_TOKENS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>", *(f"<|reserved_special_token_{at}|>" for at in range(2, 246)),
]  # fmt: skip
TIKTOKEN_SPECS = {
    128_000: TiktokenSpec(
        _CL100K_TEMPLATE % r"\p{N}{1,3}",
        _consecutive_ids(128_000, _LLAMA3_SPECIAL_TOKENS),
        {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "pad": "<|finetune_right_pad_id|>"},
        adds_bos=True,
    ),
    151_643: TiktokenSpec(
        _CL100K_TEMPLATE % r"\p{N}",
        _consecutive_ids(151_643, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        {"type": "NFC"},
    ),
    100_256: TiktokenSpec(
        _CL100K_TEMPLATE % r"\p{N}{1,3}",
        {
            "<|endoftext|>": 100_257, "<|fim_prefix|>": 100_258, "<|fim_middle|>": 100_259, "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        {"eos": "<|endoftext|>"},
    ),
    199_998: TiktokenSpec(_O200K_PATTERN, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
        {"eos": "<|endoftext|>"}),
    50_256: TiktokenSpec(_GPT2_PATTERN, {"<|endoftext|>": 50_256}, {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}),
}  # fmt: skip

FileContents = dict[str, bytes]
_Token = TypeVar("_Token", str, bytes)


def convert_tokenizer_files(folder: Path) -> FileContents | None:
    """Return {"tokenizer.json": ..., "tokenizer_config.json": ...}, converted from another tokenizer file of a folder.

    Supports `tekken.json` (mistral-common), `*.tiktoken` and `tokenizer.model` with BPE ranks (tiktoken, Llama 3), and
    SentencePiece's `tokenizer.model`, `spiece.model`, `sentencepiece.bpe.model`. None if the folder has none of these.
    """
    for pattern, read in _FORMAT_READERS.items():
        for path in sorted(folder.glob(pattern)):
            try:
                return read(path)
            except (ValueError, KeyError, TypeError, IndexError, struct.error, binascii.Error) as error:
                raise XtkError(
                    f"this tokenizer file is invalid or truncated: {error}",
                    where=str(path),
                    hint="download the file again",
                ) from None
    return None


def _read_tekken(path: Path) -> FileContents:
    content = json.loads(path.read_text(encoding="utf-8"))
    settings = content["config"]
    shift = int(settings["default_num_special_tokens"])
    size = int(settings["default_vocab_size"]) - shift
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in content["vocab"][:size]}
    named = {int(entry["rank"]): str(entry["token_str"]) for entry in content.get("special_tokens") or []}
    if not named:  # in the first version, they are in mistral-common's code
        named = dict(enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]))
    specials = {named.get(at, f"<SPECIAL_{at}>"): at for at in range(shift)}
    roles = {role: token for role, token in _SENTENCEPIECE_SPECIAL_TOKENS.items() if token in specials}
    return _files_from_bpe_ranks(
        {token: rank + shift for token, rank in ranks.items()},
        TiktokenSpec(settings["pattern"], specials, roles, adds_bos=True),
    )


def _read_tiktoken(path: Path) -> FileContents:
    ranks = {}
    for line in path.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    # In one of the files, the end-of-text token is among the ranks.
    scheme = TIKTOKEN_SPECS.get(len(ranks)) or TIKTOKEN_SPECS.get(len(ranks) - 1)
    if scheme is None:
        raise XtkError(
            f"this tiktoken file of {len(ranks):,} tokens is unknown to xtk, and tiktoken files do not contain the "
            "regular expression that splits a text before merging",
            where=str(path),
            hint="use tokenizer.json of the model; or write it: transformers.convert_slow_tokenizer."
            'TikTokenConverter(FILE, pattern=PATTERN).converted().save("tokenizer.json")',
        )
    return _files_from_bpe_ranks(ranks, scheme)


def _files_from_bpe_ranks(ranks: Mapping[bytes, int], scheme: TiktokenSpec) -> FileContents:
    """Return the files of a byte-level BPE that merges the pair with the lowest rank first."""
    written = {token: "".join(map(BYTE_LEVEL_ENCODER.__getitem__, token)) for token in ranks}
    merges = [
        [written[left], written[right]] for left, right in _possible_merges(sorted(ranks, key=ranks.__getitem__), ranks)
    ]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    # Added tokens get ids above the model's vocabulary, unless they are part of it.
    vocabulary |= {token: number for token, number in scheme.special_token_ids.items() if number < len(ranks)}
    model = {"type": "BPE", "ignore_merges": True, "vocab": vocabulary, "merges": merges}
    split = {"type": "Split", "pattern": {"Regex": scheme.split_pattern}, "behavior": "Isolated", "invert": False}
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {
        "normalizer": scheme.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_alone]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**_BPE_DEFAULTS, **model},
    }
    return _tokenizer_files(content, scheme.special_token_ids, scheme.special_token_roles, adds_bos=scheme.adds_bos)


def _possible_merges(ordered: Iterable[_Token], ids: Mapping[_Token, int]) -> Iterator[tuple[_Token, _Token]]:
    """Yield the pairs of tokens whose concatenation is a token, in the order of these tokens, then by ids."""
    for token in ordered:
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        yield from sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


_BPE_DEFAULTS = {
    "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip
_SENTENCEPIECE_SPECIAL_TOKENS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def _tokenizer_files(
    content: dict[str, Any],
    specials: Mapping[str, int],
    roles: Mapping[str, str],
    symbols: Mapping[str, int] | None = None,
    *,
    adds_bos: bool = False,
) -> FileContents:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added: list[dict[str, Any]] = [
        {"id": number, "content": token, **plain, "special": True} for token, number in specials.items()
    ]
    added += [{"id": number, "content": token, **plain, "special": False} for token, number in (symbols or {}).items()]
    tokenizer_json = {
        "version": "1.0", "truncation": None, "padding": None, "post_processor": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]), **content,
    }  # fmt: skip
    configuration: dict[str, Any] = {f"{role}_token": token for role, token in roles.items()}
    configuration |= {"add_bos_token": True} if adds_bos else {}
    return {
        "tokenizer.json": json.dumps(tokenizer_json, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(configuration, ensure_ascii=False).encode(),
    }


def set_start_token(content: dict[str, Any], configuration: Mapping[str, Any]) -> None:
    """Write the start token of a converted tokenizer.json, in place: bos, if `add_bos_token` is set.

    As transformers does. Without the setting, the converted file's publisher decides.
    """
    bos = configuration.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    if configuration.get("add_bos_token") and isinstance(bos, str) and bos in ids:
        content["post_processor"] = start_post_processor([bos], [ids[bos]])


def add_tokens(content: dict[str, Any], tokens: Mapping[int, Mapping[str, Any]]) -> None:
    """Add tokens to a converted tokenizer.json, in place, as the slow tokenizers of transformers do.

    `tokens`: {id: {"content": text, "special": True by default}}. One with the id of a piece replaces it.
    """
    model, added = content["model"], {token["id"]: token for token in content["added_tokens"]}
    is_table = isinstance(model["vocab"], dict)
    names = {number: text for text, number in model["vocab"].items()} if is_table else {}
    size = len(model["vocab"])
    missing = [
        number for number in range(size, max(tokens, default=-1)) if number not in tokens and number not in added
    ]
    wanted: dict[int, Mapping[str, Any]] = {number: {"content": f"<|unused_{number}|>"} for number in missing}
    replaced: set[str] = set()
    for number, token in sorted({**wanted, **tokens}.items()):
        text = str(token["content"])
        if number < size and is_table and names[number] != text:
            replaced.add(names[number])
            model["vocab"].pop(names[number])
            model["vocab"][text] = number
        elif number < size and not is_table:
            model["vocab"][number][0] = text
        added[number] = {
            "id": number, "content": text, "single_word": bool(token.get("single_word")),
            "lstrip": bool(token.get("lstrip")), "rstrip": bool(token.get("rstrip")), "normalized": False,
            "special": bool(token.get("special", True)),
        }  # fmt: skip
    if replaced:
        model["merges"] = [pair for pair in model["merges"] if replaced.isdisjoint((*pair, pair[0] + pair[1]))]
    content["added_tokens"] = [added[number] for number in sorted(added)]


# SentencePiece; field numbers as in sentencepiece_model.proto.

_NORMAL_PIECE, _UNKNOWN_PIECE, _CONTROL_PIECE, _USER_DEFINED_PIECE = 1, 2, 3, 4
_UNIGRAM_MODEL, _BPE_MODEL = 1, 2


def _read_sentencepiece(path: Path) -> FileContents:
    raw = path.read_bytes()
    if re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", raw):
        return _read_tiktoken(path)
    fields = _protobuf_fields(raw)
    trainer, normalizer = (_last_values(_protobuf_fields(fields[number][0])) for number in (2, 3))
    pieces = [_last_values(_protobuf_fields(piece)) for piece in fields[1]]
    names = [piece[1].decode() for piece in pieces]
    scores = [struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0 for piece in pieces]
    kinds = [piece.get(3, _NORMAL_PIECE) for piece in pieces]
    byte_fallback = bool(trainer.get(35, 0))
    unknown = kinds.index(_UNKNOWN_PIECE)
    kind = trainer.get(3, _UNIGRAM_MODEL)
    if kind == _UNIGRAM_MODEL:
        model: dict[str, Any] = {
            "type": "Unigram", "unk_id": unknown, "byte_fallback": byte_fallback,
            "vocab": [list(pair) for pair in zip(names, scores, strict=True)],
        }  # fmt: skip
    elif kind == _BPE_MODEL:
        model = {
            **_BPE_DEFAULTS, "type": "BPE", "unk_token": names[unknown], "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "vocab": {name: number for number, name in enumerate(names)}, "merges": _merges_from_scores(names, scores,
                kinds),
        }  # fmt: skip
    else:
        raise XtkError(
            "SentencePiece models of type word or char are not supported, only BPE and Unigram",
            where=str(path),
            hint="use a model with another tokenizer, or a folder with tokenizer.json",
        )
    specials = {name: at for at, name in enumerate(names) if kinds[at] in (_UNKNOWN_PIECE, _CONTROL_PIECE)}
    symbols = {name: at for at, name in enumerate(names) if kinds[at] == _USER_DEFINED_PIECE}
    roles = {role: name for role, name in _SENTENCEPIECE_SPECIAL_TOKENS.items() if name in specials}
    content = {**_normalizer_and_decoder(normalizer, byte_fallback), "model": model}
    return _tokenizer_files(content, specials, roles, symbols)


def _merges_from_scores(names: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE, best first."""
    number_of = {name: at for at, name in enumerate(names) if kinds[at] == _NORMAL_PIECE}
    best_first = sorted(number_of, key=lambda name: (-scores[number_of[name]], number_of[name]))
    return list(_possible_merges(best_first, number_of))


def _normalizer_and_decoder(normalizer: Mapping[int, Any], byte_fallback: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if normalizer.get(2):
        charsmap = base64.b64encode(normalizer[2]).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalizer.get(4, 1):  # remove_extra_whitespaces
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    prefix = bool(normalizer.get(3, 1))  # add_dummy_prefix
    if prefix:
        steps.append({"type": "Prepend", "prepend": METASPACE_CHARACTER})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": METASPACE_CHARACTER})
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": METASPACE_CHARACTER}, "content": " "}]
    decoders += [{"type": "ByteFallback"}] if byte_fallback else []
    decoders.append({"type": "Fuse"})
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _protobuf_fields(raw: bytes) -> dict[int, list[Any]]:
    """Parse a protobuf message to {field number: values}, with messages and strings as bytes."""
    values_of: dict[int, list[Any]] = {}
    at = 0
    while at < len(raw):
        tag, at = _read_varint(raw, at)
        number, kind = tag >> 3, tag & 7
        value: Any
        if kind == 0:
            value, at = _read_varint(raw, at)
        elif kind in (1, 2, 5):
            size, at = _read_varint(raw, at) if kind == 2 else (8 if kind == 1 else 4, at)
            value, at = raw[at : at + size], at + size
        else:
            raise ValueError("it is not a SentencePiece model")
        if at > len(raw):
            raise ValueError("the file ends too early")
        values_of.setdefault(number, []).append(value)
    return values_of


def _last_values(fields: Mapping[int, list[Any]]) -> dict[int, Any]:
    return {number: values[-1] for number, values in fields.items()}  # the last value of a repeated scalar field wins


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


_FORMAT_READERS: dict[str, Callable[[Path], FileContents]] = {
    "tekken.json": _read_tekken,
    "*.tiktoken": _read_tiktoken,
    "tokenizer.model": _read_sentencepiece,
    "tokenizer.model.v*": _read_sentencepiece,
    "spiece.model": _read_sentencepiece,
    "sentencepiece.bpe.model": _read_sentencepiece,
}
