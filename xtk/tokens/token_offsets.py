"""Where tokens end in a text that their tokenizer rewrote before it cut it: by the backend's character offsets.

A normaliser composes letters with their accents, lower-cases, drops white space. Its backend knows which characters
a token was made from, but not all of them: of "e" + U+0301, read as U+00E9, it names the "e" alone. Here the offsets
are widened to stretches of text that the normaliser rewrites as one, and tokens that share such a stretch are kept
together.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# More marks on one letter than any script needs; longer runs are kept together, unexamined.
MAX_CLUSTER_LENGTH = 16


def byte_ends_from_offsets(
    text: str,
    offsets: Sequence[tuple[int, int]],
    spellings: Sequence[bytes],
    normalize: Callable[[str], str] | None,
) -> NDArray[np.int32]:
    """Find the byte where each token ends.

    Characters that the tokenizer dropped belong to the token after them, at the end of the text to the last one.
    Of tokens that share characters the last one has their end, and the others end where the token before them does;
    but where their bytes are those of the text, each token ends by its bytes.

    Args:
        text: what was tokenised.
        offsets: [n], the characters that each token was made from, as the backend tells.
        spellings: [n], the bytes of each token.
        normalize: the tokenizer's normaliser; None without one.

    Returns:
        int32 [n], never falling; the last is the length of the text.
    """
    if not len(offsets):
        return np.zeros(0, np.int32)
    byte_of_character = np.cumsum([0, *(len(character.encode()) for character in text)], dtype=np.int32)
    edges = _cluster_boundaries(text, normalize)
    # A normalizer that adds characters at the end of a text has offsets behind it.
    table = np.clip(np.array(offsets, np.int64), 0, len(text))
    # Widened: from the edge at or before the first character to the one at or after the last.
    starts = byte_of_character[edges[np.searchsorted(edges, table[:, 0], side="right") - 1]]
    ends = np.maximum.accumulate(byte_of_character[edges[np.searchsorted(edges, table[:, 1], side="left")]])
    earliest_later = np.minimum.accumulate(starts[::-1])[::-1]
    shared = np.append(earliest_later[1:] < ends[:-1], False)
    ends = np.maximum.accumulate(np.where(shared, 0, ends))
    ends[-1] = byte_of_character[-1]
    _end_by_bytes(ends, text.encode(), spellings)
    return np.asarray(ends, np.int32)


def _end_by_bytes(ends: NDArray[np.int32], text: bytes, spellings: Sequence[bytes]) -> None:
    """Tell apart the tokens that share characters which the tokenizer left as they are: parts of "日", say."""
    first = start = 0
    for last in np.flatnonzero(np.diff(ends, prepend=0) > 0).tolist():
        stop = int(ends[last])
        if last > first:
            spelled = b"".join(spellings[first : last + 1])
            added = spelled == b" " + text[start:stop]  # a space in front that the tokenizer added
            if added or spelled == text[start:stop]:
                lengths = [len(spelling) for spelling in spellings[first : last + 1]]
                ends[first : last + 1] = np.maximum(start, start + np.cumsum(lengths) - added)
        first, start = last + 1, stop


def characters_kept_by_normalizer(text: str, normalize: Callable[[str], str]) -> list[int]:
    """Return the indices of the characters of which the normaliser leaves something."""
    nothing = normalize("00")  # a digit on each side, so that nothing is stripped as the edge of a text
    kept: list[int] = []
    for start, stop in itertools.pairwise(_cluster_boundaries(text, normalize).tolist()):
        if normalize(f"0{text[start:stop]}0") != nothing:
            kept.extend(range(start, stop))
    return kept


def _cluster_boundaries(text: str, normalise: Callable[[str], str] | None) -> NDArray[np.int64]:
    """Return the offsets, 0 and the text's length among them, that lie in nothing that is rewritten as one."""
    inside = np.zeros(len(text) + 1, np.bool_)
    if normalise is not None:
        cuts: dict[str, list[int]] = {}
        for start, stop in _combining_clusters(text):
            cluster = text[start:stop]
            if cluster not in cuts:
                cuts[cluster] = _split_points(cluster, normalise) if len(cluster) <= MAX_CLUSTER_LENGTH else []
            inside[start + 1 : stop] = True
            inside[[start + at for at in cuts[cluster]]] = False
    return np.flatnonzero(~inside)


def _combining_clusters(text: str) -> list[tuple[int, int]]:
    """Return `[start, stop)` of each character with all that may be rewritten with it, if that is more than itself."""
    if text.isascii():
        return []
    goes_on = [False, *map(_may_combine_with_previous, text[1:]), False]
    found, start = [], 0
    for at, flag in enumerate(goes_on):
        if not flag:
            if at - start > 1:
                found.append((start, at))
            start = at
    return found


def _split_points(cluster: str, normalise: Callable[[str], str]) -> list[int]:
    """Return where a cluster may be cut without a change to what the normaliser makes of it."""
    whole = _normalize_separately([cluster], normalise)
    return [
        at for at in range(1, len(cluster)) if _normalize_separately([cluster[:at], cluster[at:]], normalise) == whole
    ]


def _normalize_separately(parts: Sequence[str], normalise: Callable[[str], str]) -> str:
    # Between fences, so that they neither compose nor lie at the edges of the text, where spaces are stripped or added.
    # A digit composes with nothing, and all normalisers leave it alone.
    return normalise("0" + "0".join(parts) + "0").replace("0", "")


@lru_cache(maxsize=1 << 16)
def _may_combine_with_previous(character: str) -> bool:
    """Say whether a normaliser may compose this character with the one before it.

    Marks are, and Hangul vowels and final consonants (U+1160 to U+11FF), which are no marks; and whatever NFKC first
    turns into one of these: half-width voiced sound marks, the vowels of the compatibility alphabets. Charsmaps
    rewrite whole graphemes, so joiners (Cf) and the skin tones of emoji go on too.
    """
    first = unicodedata.normalize("NFKD", character)[0]
    return (
        unicodedata.category(first) in ("Mn", "Mc", "Me", "Cf")
        or "\u1160" <= first <= "\u11ff"
        or "\U0001f3fb" <= first <= "\U0001f3ff"
    )
