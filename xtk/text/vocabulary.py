"""The bytes of each token of a vocabulary.

Vocabularies use different alphabets: GPT-2's byte-level alphabet has a letter for every byte ("Ġthe"), SentencePiece
represents a space as U+2581 and a lone byte as "<0xE6>", WordPiece marks continuations of a word with "##". All of
them are decoded to bytes here, so that two vocabularies can be compared.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTE_LEVEL, METASPACE, WORD_PIECE, LITERAL = "byte-level", "metaspace", "word-piece", "literal"
METASPACE_CHARACTER = "▁"
_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, int]:
    """Return {code point of the letter: byte}, the alphabet of GPT-2's encoder.py."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: byte for byte in visible}
    invisible = (byte for byte in range(256) if byte not in letters)
    letters.update({0x100 + at: byte for at, byte in enumerate(invisible)})
    return letters


BYTE_LEVEL_DECODER = _byte_level_alphabet()
BYTE_LEVEL_ENCODER = {byte: chr(letter) for letter, byte in BYTE_LEVEL_DECODER.items()}


@dataclass(frozen=True)
class ByteVocabulary:
    """The bytes of every token, concatenated."""

    alphabet: str  # BYTE_LEVEL, METASPACE, WORD_PIECE or LITERAL
    token_bytes: NDArray[np.uint8]  # uint8, the concatenated bytes of all tokens, ordered by id
    offsets: NDArray[np.int64]  # [V+1], the bytes of token i are `token_bytes[offsets[i]:offsets[i + 1]]`
    special_mask: NDArray[np.bool_]  # [V], special tokens (bos, eos, turn markers), which have no bytes
    special_tokens: Mapping[str, int]  # {text: id} of the special tokens
    byte_fallback_mask: NDArray[np.bool_]  # [V], byte-fallback tokens such as "<0xE6>"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def byte_lengths(self) -> NDArray[np.int32]:
        """int32 [V], the number of bytes of each token."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def space_ids(self) -> NDArray[np.int32]:
        """The tokens that are one space, int32, ascending."""
        lone = np.flatnonzero(self.byte_lengths == 1)
        spaces: NDArray[np.int32] = lone[self.token_bytes[self.offsets[lone]] == ord(" ")].astype(np.int32)
        return spaces

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token; b"" for a special token."""
        return self.token_bytes[self.offsets[token] : self.offsets[token + 1]].tobytes()

    @cached_property
    def bytes_by_id(self) -> list[bytes]:
        """The bytes of every token, ordered by id."""
        joined = self.token_bytes.tobytes()
        ends = self.offsets.tolist()
        return [joined[start:end] for start, end in itertools.pairwise(ends)]

    def without_special_tokens_above(self, size: int) -> ByteVocabulary:
        """Return the first tokens of a vocabulary whose other tokens are all special; else the vocabulary itself."""
        if not 0 < size < len(self) or not self.special_mask[size:].all():
            return self
        return ByteVocabulary(
            alphabet=self.alphabet,
            token_bytes=self.token_bytes[: self.offsets[size]],
            offsets=self.offsets[: size + 1],
            special_mask=self.special_mask[:size],
            special_tokens={name: token for name, token in self.special_tokens.items() if token < size},
            byte_fallback_mask=self.byte_fallback_mask[:size],
        )

    @cached_property
    def is_text_decodable(self) -> bool:
        """Whether concatenated tokens form text: not for WordPiece and vocabularies without spaces."""
        return self.alphabet != WORD_PIECE and bool((self.token_bytes == ord(" ")).any())

    @cached_property
    def token_of_bytes(self) -> dict[bytes, int]:
        """{bytes: id}; of tokens with the same bytes, ordinary ones before byte fallback, then the lowest id."""
        spellings = self.bytes_by_id
        last_first = [
            *np.flatnonzero(self.byte_fallback_mask)[::-1].tolist(),
            *np.flatnonzero(~self.byte_fallback_mask)[::-1].tolist(),
        ]
        table = dict(zip(map(spellings.__getitem__, last_first), last_first, strict=True))
        table.pop(b"", None)
        return table


def decode_vocabulary(
    alphabet: str,
    token_of_id: Sequence[str | None],
    added_tokens: Mapping[int, str],
    special_tokens: Mapping[str, int],
    *,
    byte_fallback: bool = True,
    subword_prefix: str = "##",
    word_suffix: str = "",
) -> ByteVocabulary:
    """Return a vocabulary's tokens as bytes, from each token in the tokenizer's alphabet; None: an id without a token.

    `added_tokens`, {id: text}, are literal text in every alphabet. `byte_fallback`: whether METASPACE represents a lone
    byte as "<0x41>"; otherwise that is ordinary text. `subword_prefix`: of WORD_PIECE tokens inside of a word.
    `word_suffix`: of the last token of a word, in any alphabet, such as "</w>".
    """
    tokens = [token or "" for token in token_of_id]
    if word_suffix:
        tokens = [token.removesuffix(word_suffix) for token in tokens]
    for token in added_tokens:
        tokens[token] = ""
    if alphabet == BYTE_LEVEL:
        pieces = _decode_byte_level(tokens)
    elif alphabet == METASPACE:
        pieces = _decode_metaspace(tokens, byte_fallback)
    else:
        mark = subword_prefix if alphabet == WORD_PIECE else ""
        pieces = [token.removeprefix(mark).encode("utf-8", "replace") for token in tokens]
    controls = set(special_tokens.values())
    for token, text in added_tokens.items():
        pieces[token] = b"" if token in controls else text.encode("utf-8", "replace")
    for token in controls:
        pieces[token] = b""
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    mask = np.zeros(len(pieces), np.bool_)
    mask[list(controls)] = True
    lone = np.zeros(len(pieces), np.bool_)
    if alphabet == METASPACE and byte_fallback:
        places = [at for at, token in enumerate(tokens) if len(token) == 6 and _BYTE_FALLBACK_TOKEN.fullmatch(token)]
        lone[places] = True
    vocabulary = ByteVocabulary(
        alphabet=alphabet,
        token_bytes=np.frombuffer(b"".join(pieces), np.uint8),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        special_mask=mask,
        special_tokens=dict(special_tokens),
        byte_fallback_mask=lone,
    )
    vocabulary.__dict__["bytes_by_id"] = pieces  # fills the cached property
    return vocabulary


def _decode_byte_level(tokens: list[str]) -> list[bytes]:
    try:  # one letter is one byte, so the whole vocabulary is translated in one call
        joined = "".join(tokens).translate(BYTE_LEVEL_DECODER).encode("latin-1")
    except UnicodeEncodeError:
        return [_byte_level_or_literal(token) for token in tokens]
    ends = [0, *itertools.accumulate(map(len, tokens))]
    return [joined[start:end] for start, end in itertools.pairwise(ends)]


def _byte_level_or_literal(token: str) -> bytes:
    if all(ord(letter) in BYTE_LEVEL_DECODER for letter in token):
        return token.translate(BYTE_LEVEL_DECODER).encode("latin-1")
    return token.encode("utf-8", "replace")


def _decode_metaspace(tokens: list[str], byte_fallback: bool) -> list[bytes]:
    pieces = []
    for token in tokens:
        lone = _BYTE_FALLBACK_TOKEN.fullmatch(token) if byte_fallback and len(token) == 6 else None
        pieces.append(bytes([int(lone[1], 16)]) if lone else token.replace(METASPACE_CHARACTER, " ").encode())
    return pieces


def read_vocabulary(content: dict[str, Any], backend: Any) -> ByteVocabulary:
    """Return the bytes of each token of a tokenizer; `backend`: the same as `tokenizers.Tokenizer`."""
    added, model = content["added_tokens"], content["model"]
    alphabet = _token_alphabet(content)
    literal = [token for token in added if alphabet != METASPACE or not _is_piece_of_model(token, model)]
    return decode_vocabulary(
        alphabet,
        _tokens_in_order(content, added, backend),
        added_tokens={token["id"]: token["content"] for token in literal},
        special_tokens={token["content"]: token["id"] for token in added if token.get("special")},
        byte_fallback=bool(model.get("byte_fallback")),
        subword_prefix=model.get("continuing_subword_prefix") or "",
        word_suffix=model.get("end_of_word_suffix") or "",
    )


def _is_piece_of_model(token: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Return whether an added token is a piece of the model too, as the runs of spaces (U+2581) of Gemma are.

    The model finds such a piece in text in which each space is U+2581 already, so it stands for spaces.
    """
    text, number, table = token["content"], token["id"], model.get("vocab")
    if token.get("special"):
        return False
    if isinstance(table, dict):
        return bool(table.get(text) == number)
    return isinstance(table, list) and number < len(table) and bool(table[number][0] == text)


def _tokens_in_order(content: dict[str, Any], added: Sequence[dict[str, Any]], backend: Any) -> list[str | None]:
    """Return the token of each id: from the JSON if it is complete, since the backend takes ten times as long."""
    table: dict[str, int] = content["model"].get("vocab")
    added_ids = {token["content"]: token["id"] for token in added}
    if isinstance(table, dict):
        tokens = list(table) if list(table.values()) == list(range(len(table))) else _tokens_by_id(table)
        tokens += [None] * (max(added_ids.values(), default=-1) + 1 - len(tokens))
        for token, number in added_ids.items():
            tokens[number] = token
        if len(tokens) - tokens.count(None) == backend.get_vocab_size(with_added_tokens=True):
            return tokens
    return _tokens_by_id(backend.get_vocab(with_added_tokens=True))


def _tokens_by_id(table: dict[str, int]) -> list[str | None]:
    token_of_id: list[str | None] = [None] * (max(table.values(), default=-1) + 1)
    for token, number in table.items():
        token_of_id[number] = token
    return token_of_id


def _token_alphabet(content: dict[str, Any]) -> str:
    parts = [content.get("pre_tokenizer"), content.get("decoder"), content.get("normalizer")]
    kinds = {kind for part in parts for kind in component_types(part)}
    if "ByteLevel" in kinds:
        return BYTE_LEVEL
    if (
        "Metaspace" in kinds
        or content.get("model", {}).get("byte_fallback")
        or METASPACE_CHARACTER in json.dumps(parts, ensure_ascii=False)
    ):
        return METASPACE
    if "WordPiece" in kinds or content.get("model", {}).get("type") == "WordPiece":
        return WORD_PIECE
    return LITERAL


def component_types(part: Any) -> Iterator[str]:
    """Yield the types of a part of tokenizer.json (normalizer, pre-tokenizer, decoder) and of the parts in it."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from component_types(value)
    elif isinstance(part, list):
        for value in part:
            yield from component_types(value)
