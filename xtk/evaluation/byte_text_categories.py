"""Text category of each byte: white space, digits, punctuation, code, or letters of a script."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

from xtk.text.document import Document

# Python has no script property. Unicode names of letters begin with the script: GREEK SMALL LETTER ALPHA.
SCRIPTS = {
    "LATIN": "Latin", "GREEK": "Greek", "CYRILLIC": "Cyrillic", "ARMENIAN": "Armenian", "GEORGIAN": "Georgian",
    "HEBREW": "Hebrew", "ARABIC": "Arabic", "DEVANAGARI": "Devanagari", "BENGALI": "Bengali", "GURMUKHI": "Gurmukhi",
    "GUJARATI": "Gujarati", "TAMIL": "Tamil", "TELUGU": "Telugu", "KANNADA": "Kannada", "MALAYALAM": "Malayalam",
    "SINHALA": "Sinhala", "THAI": "Thai", "LAO": "Lao", "MYANMAR": "Myanmar", "KHMER": "Khmer", "TIBETAN": "Tibetan",
    "ETHIOPIC": "Ethiopic", "MONGOLIAN": "Mongolian", "CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana",
    "HANGUL": "Hangul",
}  # fmt: skip
WIDTH_PREFIXES = ("FULLWIDTH", "HALFWIDTH")  # precede the script in a Unicode name
TEXT_CATEGORIES = ("white space", "digits", "punctuation", "code", *dict.fromkeys(SCRIPTS.values()), "other scripts")
WHITE_SPACE, DIGITS, PUNCTUATION, CODE = range(4)
OTHER_SCRIPTS = len(TEXT_CATEGORIES) - 1
_INHERITED, _UNKNOWN = -2, -1
_CATEGORY_OF_CODE_POINT = np.full(0x110000, _UNKNOWN, np.int8)  # filled when a code point occurs
# As in CommonMark: a fence ends with one of the same character that is at least as long, or with the text.
_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?P<rest>[^\n]*)$", re.MULTILINE)


def categorize_bytes(document: Document) -> NDArray[np.int8]:
    """Return the text category of each byte of a document; all bytes of a character have the same.

    - code: the lines between Markdown fences (at least three backticks or tildes), whatever their characters. Code
      without fences is categorized by its characters.
    - white space: characters for which `str.isspace` is true.
    - digits: digits and other numbers of any script.
    - Latin, Greek, Han, ...: letters, by the first word of their Unicode names, with their marks. Kana is both Hiragana
      and Katakana. Scripts that are not listed, and letters without a script, are other scripts.
    - punctuation: everything else: punctuation, symbols, emoji, control characters.

    Returns:
        int8 [bytes], indices in `TEXT_CATEGORIES`.
    """
    return np.concatenate([np.zeros(0, np.int8), *(_categorize_text(segment.text) for segment in document.segments)])


def _categorize_text(text: str) -> NDArray[np.int8]:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    categories = _CATEGORY_OF_CODE_POINT[codes]
    if (categories == _UNKNOWN).any():
        occurring = np.unique(codes[categories == _UNKNOWN])
        _CATEGORY_OF_CODE_POINT[occurring] = [_categorize_character(chr(code)) for code in occurring.tolist()]
        categories = _CATEGORY_OF_CODE_POINT[codes]
    own = categories != _INHERITED
    if not own.all():
        before = np.maximum.accumulate(np.where(own, np.arange(len(categories)), -1))
        categories = np.where(before < 0, OTHER_SCRIPTS, categories[np.maximum(before, 0)]).astype(np.int8)
    for start, stop in fenced_ranges(text):
        categories[start:stop] = CODE
    return np.repeat(categories, 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000).astype(np.int64))


def fenced_ranges(text: str) -> list[tuple[int, int]]:
    """Return the character ranges `[start, stop)` between each pair of fences, without the lines of the fences."""
    ranges: list[tuple[int, int]] = []
    fence, start = "", 0
    for line in _FENCE.finditer(text):
        if not fence:
            fence, start = line["fence"], min(line.end() + 1, len(text))
        elif line["fence"].startswith(fence) and not line["rest"].strip():
            ranges.append((start, line.start()))
            fence = ""
    if fence:
        ranges.append((start, len(text)))
    return ranges


def _categorize_character(character: str) -> int:
    if character.isspace():
        return WHITE_SPACE
    major = unicodedata.category(character)[0]
    if major == "N":
        return DIGITS
    if major not in "LM":
        return PUNCTUATION
    words = [word for word in unicodedata.name(character, "").split() if word not in WIDTH_PREFIXES]
    script = SCRIPTS.get(words[0].partition("-")[0]) if words else None
    if script is None:
        return _INHERITED if major == "M" else OTHER_SCRIPTS
    return TEXT_CATEGORIES.index(script)
