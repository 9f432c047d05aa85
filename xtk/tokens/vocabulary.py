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
METASPACE_LETTER = "▁"
_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, int]:
    """Return {code point of the letter: byte}, the alphabet of GPT-2's encoder.py."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: byte for byte in visible}
    invisible = (byte for byte in range(256) if byte not in letters)
    letters.update({0x100 + at: byte for at, byte in enumerate(invisible)})
    return letters


BYTE_OF_LETTER = _byte_level_alphabet()
LETTER_OF_BYTE = {byte: chr(letter) for letter, byte in BYTE_OF_LETTER.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token, as one pool.

    Attributes:
        family: the alphabet that the tokens are written in.
        pool: uint8, the bytes of all tokens one after the other, in the order of ids.
        offsets: int64 [V+1], token i spells `pool[offsets[i]:offsets[i + 1]]`.
        special: bool [V], control tokens (bos, eos, turn markers): they spell no text.
        special_tokens: {content: id} of the control tokens.
        lone_byte: bool [V], byte-fallback tokens such as "<0xE6>".
    """

    family: str
    pool: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    special: NDArray[np.bool_]
    special_tokens: Mapping[str, int]
    lone_byte: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """int32 [V], how many bytes each token spells."""
        return np.diff(self.offsets).astype(np.int32)

    def spelling(self, token: int) -> bytes:
        """Return the bytes that one token spells; none for a control token."""
        return self.pool[self.offsets[token] : self.offsets[token + 1]].tobytes()

    @cached_property
    def spellings(self) -> list[bytes]:
        """The bytes of every token, in the order of ids."""
        whole = self.pool.tobytes()
        ends = self.offsets.tolist()
        return [whole[start:end] for start, end in itertools.pairwise(ends)]

    @cached_property
    def spells_texts(self) -> bool:
        """Whether tokens put one behind the other spell a text: those of vocabularies without spaces do not."""
        return self.family != WORD_PIECE and bool((self.pool == ord(" ")).any())

    @cached_property
    def token_of_bytes(self) -> dict[bytes, int]:
        """{bytes: id}: of tokens that spell the same, an ordinary one before a byte-fallback one, then the lowest."""
        spellings = self.spellings
        last_first = [*np.flatnonzero(self.lone_byte)[::-1].tolist(), *np.flatnonzero(~self.lone_byte)[::-1].tolist()]
        table = dict(zip(map(spellings.__getitem__, last_first), last_first, strict=True))
        table.pop(b"", None)
        return table


def read_vocabulary(
    family: str,
    token_of_id: Sequence[str | None],
    literal: Mapping[int, str],
    special: Mapping[str, int],
    *,
    byte_fallback: bool = True,
    word_mark: str = "##",
    end_mark: str = "",
) -> Vocabulary:
    """Decode a vocabulary into bytes.

    Args:
        family: BYTE_LEVEL, METASPACE, WORD_PIECE or LITERAL.
        token_of_id: each token as its tokenizer writes it; None where an id has no token.
        literal: {id: text} of added tokens, which stand for themselves in every family.
        special: {content: id} of control tokens.
        byte_fallback: whether METASPACE writes a lone byte as "<0x41>". To a model without, that is ordinary text.
        word_mark: what WORD_PIECE writes in front of a piece that goes on inside a word.
        end_mark: what the model writes behind the last piece of a word, in any family: "</w>", say.
    """
    written = [token or "" for token in token_of_id]
    if end_mark:
        written = [token.removesuffix(end_mark) for token in written]
    for token in literal:
        written[token] = ""
    if family == BYTE_LEVEL:
        pieces = _decode_byte_level(written)
    elif family == METASPACE:
        pieces = _decode_metaspace(written, byte_fallback)
    else:
        mark = word_mark if family == WORD_PIECE else ""
        pieces = [token.removeprefix(mark).encode("utf-8", "replace") for token in written]
    controls = set(special.values())
    for token, text in literal.items():
        pieces[token] = b"" if token in controls else text.encode("utf-8", "replace")
    for token in controls:
        pieces[token] = b""
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    mask = np.zeros(len(pieces), np.bool_)
    mask[list(controls)] = True
    lone = np.zeros(len(pieces), np.bool_)
    if family == METASPACE and byte_fallback:
        lone[[at for at, token in enumerate(written) if len(token) == 6 and _LONE_BYTE.fullmatch(token)]] = True
    vocabulary = Vocabulary(
        family=family,
        pool=np.frombuffer(b"".join(pieces), np.uint8),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        special=mask,
        special_tokens=dict(special),
        lone_byte=lone,
    )
    vocabulary.__dict__["spellings"] = pieces  # what the cached property would cut out of the pool again
    return vocabulary


def _decode_byte_level(written: list[str]) -> list[bytes]:
    try:  # one letter is one byte, so the whole vocabulary is translated at once
        whole = "".join(written).translate(BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return [_byte_level_or_literal(token) for token in written]
    ends = [0, *itertools.accumulate(map(len, written))]
    return [whole[start:end] for start, end in itertools.pairwise(ends)]


def _byte_level_or_literal(token: str) -> bytes:
    if all(ord(letter) in BYTE_OF_LETTER for letter in token):
        return token.translate(BYTE_OF_LETTER).encode("latin-1")
    return token.encode("utf-8", "replace")


def _decode_metaspace(written: list[str], byte_fallback: bool) -> list[bytes]:
    pieces = []
    for token in written:
        lone = _LONE_BYTE.fullmatch(token) if byte_fallback and len(token) == 6 else None
        pieces.append(bytes([int(lone[1], 16)]) if lone else token.replace(METASPACE_LETTER, " ").encode())
    return pieces
