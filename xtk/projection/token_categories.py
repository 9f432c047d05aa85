"""Text categories of tokens: digits, white space, Latin, and so on."""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray

from xtk.text.vocabulary import ByteVocabulary

CATEGORIES = (
    "specials", "partial UTF-8", "white space", "digits", "punctuation", "code", "Latin", "CJK", "other scripts",
)  # fmt: skip
SPECIAL, PARTIAL_UTF8, WHITE_SPACE, DIGITS, PUNCTUATION, CODE, LATIN, CJK, OTHER_SCRIPT = range(len(CATEGORIES))

_SPACE, _DIGIT, _LATIN, _CJK, _OTHER, _SYMBOL, _CODE_SYMBOL, _OPERATOR = (1 << bit for bit in range(8))
_CODE_SYMBOLS = "!#$%&()*+,./:;<=>?@[\\]^_`{|}~"  # ASCII symbols except ' " and -, which occur in words
_OPERATORS = "#$%&()*+/<=>@[\\]^_`{|}~;"
# First and last code point of the blocks, from Blocks.txt of Unicode.
_LATIN_BLOCKS = ((0x0000, 0x036F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xFB00, 0xFB06),
                 (0xFF21, 0xFF5A))  # fmt: skip
_CJK_BLOCKS = ((0x1100, 0x11FF), (0x2E80, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA960, 0xA97F),
               (0xAC00, 0xD7FF), (0xF900, 0xFAFF), (0xFF66, 0xFFDC), (0x20000, 0x3FFFF))  # fmt: skip


def token_categories(vocabulary: ByteVocabulary) -> NDArray[np.int8]:
    """Return one category for each token, the first that applies.

    - specials: special tokens, and ids without bytes.
    - partial UTF-8: the bytes are not valid UTF-8 alone, such as the first two of three.
    - white space: only white space.
    - digits: digits and other numbers of any script, possibly with white space.
    - CJK: has a Han, Kana, Bopomofo or Hangul letter. Other scripts: has a letter that is neither CJK nor Latin.
    - code: Latin letters or digits with an ASCII symbol other than `'`, `"` and `-`; Latin letters with digits; a lower
      case letter before a capital (`camelCase`); or at least two symbols, one of them a bracket or an operator.
    - Latin: letters of Latin blocks.
    - punctuation: everything else: punctuation, symbols, emoji, control characters.

    Returns:
        int8 [V], indices in CATEGORIES.
    """
    texts = [_decode_or_empty(spelling) for spelling in vocabulary.bytes_by_id]
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    bits = _character_bits(codes)
    spelled = np.flatnonzero(sizes)
    starts = (np.cumsum(sizes) - sizes)[spelled]
    categories = np.full(len(texts), PARTIAL_UTF8, np.int8)
    if len(spelled):
        categories[spelled] = _categories_from_bits(bits, codes, starts)
    categories[(vocabulary.byte_lengths == 0) | vocabulary.special_mask] = SPECIAL
    return categories


def _decode_or_empty(spelling: bytes) -> str:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return ""


def _categories_from_bits(
    bits: NDArray[np.uint8], codes: NDArray[np.uint32], starts: NDArray[np.int64]
) -> NDArray[np.int8]:
    """Return the category of each token, whose characters begin at `starts`."""
    has = np.bitwise_or.reduceat(bits, starts)
    symbols = np.add.reduceat((bits & _SYMBOL > 0).astype(np.int32), starts)
    small, capital = (codes >= 97) & (codes <= 122), (codes >= 65) & (codes <= 90)
    camel = np.zeros(len(codes), np.bool_)
    camel[1:] = small[:-1] & capital[1:]
    camel[starts] = False
    words, numbers = has & _LATIN > 0, has & _DIGIT > 0
    is_code = (words & numbers) | ((words | numbers) & (has & _CODE_SYMBOL > 0))
    is_code |= np.bitwise_or.reduceat(camel, starts) | ((symbols > 1) & (has & _OPERATOR > 0))
    conditions = [
        has == _SPACE,
        numbers & ((has | _DIGIT | _SPACE) == (_DIGIT | _SPACE)),
        has & _CJK > 0,
        has & _OTHER > 0,
        is_code,
        words,
    ]
    chosen = np.select(conditions, [WHITE_SPACE, DIGITS, CJK, OTHER_SCRIPT, CODE, LATIN], PUNCTUATION)
    return chosen.astype(np.int8)


def _character_bits(codes: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the class bits of each character; each distinct character is classified once."""
    table = np.zeros(0x110000, np.uint8)
    table[codes] = 1
    occurring = np.flatnonzero(table)
    table[occurring] = [_bits_of_character(code) for code in map(chr, occurring.tolist())]
    for bits, blocks in ((_LATIN, _LATIN_BLOCKS), (_CJK, _CJK_BLOCKS)):
        for first, last in blocks:
            block = table[first : last + 1]
            block[block == _OTHER] = bits
    return table[codes]


def _bits_of_character(character: str) -> int:
    if character.isspace():
        return _SPACE
    major = unicodedata.category(character)[0]
    if major in "LMN":
        return _DIGIT if major == "N" else _OTHER
    in_code = _CODE_SYMBOL if character in _CODE_SYMBOLS else 0
    return _SYMBOL | in_code | (_OPERATOR if character in _OPERATORS else 0)
