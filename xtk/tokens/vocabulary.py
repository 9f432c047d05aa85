"""What each token of a vocabulary spells, in bytes.

Tokenizers write their tokens in private alphabets: GPT-2's byte-level alphabet has a
letter for every byte ("Ġthe"), SentencePiece writes a space as U+2581 and a lone byte
as "<0xE6>", WordPiece marks what goes on inside a word with "##". Here all of them
become bytes, so that two vocabularies can be compared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """The bytes of every token, as one pool.

    Attributes:
        alphabet: the alphabet that the tokens are written in.
        token_bytes: uint8, the bytes of all tokens one after the other, in the order of ids.
        offsets: int64 [V+1], token i spells `pool[offsets[i]:offsets[i + 1]]`.
        special_mask: bool [V], control tokens (bos, eos, turn markers): they spell no text.
        special_tokens: {content: id} of the control tokens.
        byte_fallback_mask: bool [V], byte-fallback tokens such as "<0xE6>".
    """

    alphabet: str
    token_bytes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    special_mask: NDArray[np.bool_]
    special_tokens: Mapping[str, int]
    byte_fallback_mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def byte_lengths(self) -> NDArray[np.int32]:
        """int32 [V], how many bytes each token spells."""
        return np.diff(self.offsets).astype(np.int32)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that one token spells; none for a control token."""
        return self.token_bytes[self.offsets[token] : self.offsets[token + 1]].tobytes()

    @cached_property
    def bytes_by_id(self) -> list[bytes]:
        """The bytes of every token, in the order of ids."""
        whole = self.token_bytes.tobytes()
        ends = self.offsets.tolist()
        return [whole[start:end] for start, end in itertools.pairwise(ends)]

    @cached_property
    def is_text_decodable(self) -> bool:
        """Whether tokens put one behind the other spell a text: those of vocabularies without spaces do not."""
        return self.alphabet != WORD_PIECE and bool((self.token_bytes == ord(" ")).any())

    @cached_property
    def token_of_bytes(self) -> dict[bytes, int]:
        """{bytes: id}: of tokens that spell the same, an ordinary one before a byte-fallback one, then the lowest."""
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
    """Decode a vocabulary into bytes.

    Args:
        alphabet: BYTE_LEVEL, METASPACE, WORD_PIECE or LITERAL.
        token_of_id: each token as its tokenizer writes it; None where an id has no token.
        added_tokens: {id: text} of added tokens, which stand for themselves in every family.
        special_tokens: {content: id} of control tokens.
        byte_fallback: whether METASPACE writes a lone byte as "<0x41>". To a model without, that is ordinary text.
        subword_prefix: what WORD_PIECE writes in front of a piece that goes on inside a word.
        word_suffix: what the model writes behind the last piece of a word, in any family: "</w>", say.
    """
    written = [token or "" for token in token_of_id]
    if word_suffix:
        written = [token.removesuffix(word_suffix) for token in written]
    for token in added_tokens:
        written[token] = ""
    if alphabet == BYTE_LEVEL:
        pieces = _decode_byte_level(written)
    elif alphabet == METASPACE:
        pieces = _decode_metaspace(written, byte_fallback)
    else:
        mark = subword_prefix if alphabet == WORD_PIECE else ""
        pieces = [token.removeprefix(mark).encode("utf-8", "replace") for token in written]
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
        lone[[at for at, token in enumerate(written) if len(token) == 6 and _BYTE_FALLBACK_TOKEN.fullmatch(token)]] = (
            True
        )
    vocabulary = ByteVocabulary(
        alphabet=alphabet,
        token_bytes=np.frombuffer(b"".join(pieces), np.uint8),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        special_mask=mask,
        special_tokens=dict(special_tokens),
        byte_fallback_mask=lone,
    )
    vocabulary.__dict__["bytes_by_id"] = pieces  # what the cached property would cut out of the pool again
    return vocabulary


def _decode_byte_level(written: list[str]) -> list[bytes]:
    try:  # one letter is one byte, so the whole vocabulary is translated at once
        whole = "".join(written).translate(BYTE_LEVEL_DECODER).encode("latin-1")
    except UnicodeEncodeError:
        return [_byte_level_or_literal(token) for token in written]
    ends = [0, *itertools.accumulate(map(len, written))]
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


def _byte_level_or_literal(token: str) -> bytes:
    if all(ord(letter) in BYTE_LEVEL_DECODER for letter in token):
        return token.translate(BYTE_LEVEL_DECODER).encode("latin-1")
    return token.encode("utf-8", "replace")


def _decode_metaspace(written: list[str], byte_fallback: bool) -> list[bytes]:
    pieces = []
    for token in written:
        lone = _BYTE_FALLBACK_TOKEN.fullmatch(token) if byte_fallback and len(token) == 6 else None
        pieces.append(bytes([int(lone[1], 16)]) if lone else token.replace(METASPACE_CHARACTER, " ").encode())
    return pieces
