"""What kind of text each byte is: white space, digits, punctuation, code, or letters of a script."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

from xtk.tokens.document import Document

# Python knows no scripts. The names of letters begin with them: GREEK SMALL LETTER ALPHA.
SCRIPTS = {
    "LATIN": "Latin", "GREEK": "Greek", "CYRILLIC": "Cyrillic", "ARMENIAN": "Armenian", "GEORGIAN": "Georgian",
    "HEBREW": "Hebrew", "ARABIC": "Arabic", "DEVANAGARI": "Devanagari", "BENGALI": "Bengali", "GURMUKHI": "Gurmukhi",
    "GUJARATI": "Gujarati", "TAMIL": "Tamil", "TELUGU": "Telugu", "KANNADA": "Kannada", "MALAYALAM": "Malayalam",
    "SINHALA": "Sinhala", "THAI": "Thai", "LAO": "Lao", "MYANMAR": "Myanmar", "KHMER": "Khmer", "TIBETAN": "Tibetan",
    "ETHIOPIC": "Ethiopic", "MONGOLIAN": "Mongolian", "CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana",
    "HANGUL": "Hangul",
}  # fmt: skip
WIDTH_PREFIXES = ("FULLWIDTH", "HALFWIDTH")  # stand before the script in the name of a letter
TEXT_CATEGORIES = ("white space", "digits", "punctuation", "code", *dict.fromkeys(SCRIPTS.values()), "other scripts")
WHITE_SPACE, DIGITS, PUNCTUATION, CODE = range(4)
OTHER_SCRIPTS = len(TEXT_CATEGORIES) - 1
_INHERITED, _UNKNOWN = -2, -1
_CATEGORY_OF_CODE_POINT = np.full(0x110000, _UNKNOWN, np.int8)  # by code point, as far as they have occurred
# As CommonMark has them: a fence is closed by one of its own character that is as long, or by the end of the text.
_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?P<rest>[^\n]*)$", re.MULTILINE)


def categorize_bytes(document: Document) -> NDArray[np.int8]:
    """Give each byte of a document's text one kind, all bytes of a character the same.

    - code: what stands between Markdown's fences (three backticks or tildes and more), whatever its characters. A
      document that is code without fences is of the kinds of its characters.
    - white space: what Python takes for it.
    - digits: digits and other numbers of any script.
    - Latin, Greek, Han, ...: letters, by the first word of their Unicode names, with the marks on them. Kana is both of
      Japanese. Scripts that have no name here, and letters without a script, are other scripts.
    - punctuation: the rest: punctuation, symbols, emoji, controls.

    Returns:
        int8 [bytes], places in KINDS.
    """
    return np.concatenate([np.zeros(0, np.int8), *(_categorize_text(segment.text) for segment in document.segments)])


def _categorize_text(text: str) -> NDArray[np.int8]:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    kinds = _CATEGORY_OF_CODE_POINT[codes]
    if (kinds == _UNKNOWN).any():
        occurring = np.unique(codes[kinds == _UNKNOWN])
        _CATEGORY_OF_CODE_POINT[occurring] = [_categorize_character(chr(code)) for code in occurring.tolist()]
        kinds = _CATEGORY_OF_CODE_POINT[codes]
    own = kinds != _INHERITED
    if not own.all():
        before = np.maximum.accumulate(np.where(own, np.arange(len(kinds)), -1))
        kinds = np.where(before < 0, OTHER_SCRIPTS, kinds[np.maximum(before, 0)]).astype(np.int8)
    for start, stop in fenced_ranges(text):
        kinds[start:stop] = CODE
    return np.repeat(kinds, 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000).astype(np.int64))


def fenced_ranges(text: str) -> list[tuple[int, int]]:
    """Return the characters `[start, stop)` between each pair of fences, their lines left out."""
    found: list[tuple[int, int]] = []
    fence, start = "", 0
    for line in _FENCE.finditer(text):
        if not fence:
            fence, start = line["fence"], min(line.end() + 1, len(text))
        elif line["fence"].startswith(fence) and not line["rest"].strip():
            found.append((start, line.start()))
            fence = ""
    if fence:
        found.append((start, len(text)))
    return found


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
