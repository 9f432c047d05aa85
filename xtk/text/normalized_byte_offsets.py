"""Byte ends of tokens in a text that the tokenizer normalized, from the backend's character offsets.

A normalizer composes letters with accents, lower-cases, drops white space. The offsets of the backend are incomplete:
for "e" + U+0301, normalized to U+00E9, they contain the "e" alone. Here the offsets are widened to clusters that the
normalizer rewrites together, and tokens that share a cluster get the same end.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# More marks on one letter than any script needs; longer clusters are not split.
MAX_CLUSTER_LENGTH = 16


def byte_ends_from_offsets(
    text: str,
    offsets: Sequence[tuple[int, int]],
    spellings: Sequence[bytes],
    normalize: Callable[[str], str] | None,
) -> NDArray[np.int32]:
    """Return int32 [n], the byte where each token ends, never decreasing; the last is the length of the text.

    Characters that the tokenizer dropped belong to the next token, at the end of the text to the last one. If tokens
    share characters, the last one has their end and the others the end of the token before them; but if their bytes
    (`spellings`) are those of the text, each token ends by its bytes. `offsets`: the character range of each token,
    from the backend.
    """
    if not len(offsets):
        return np.zeros(0, np.int32)
    byte_of_character = np.cumsum([0, *(len(character.encode()) for character in text)], dtype=np.int32)
    edges = _cluster_boundaries(text, normalize)
    # A normalizer that appends characters has offsets past the end of the text.
    table = np.clip(np.array(offsets, np.int64), 0, len(text))
    # Widened: from the cluster boundary at or before the first character to the one at or after the last.
    starts = byte_of_character[edges[np.searchsorted(edges, table[:, 0], side="right") - 1]]
    ends = np.maximum.accumulate(byte_of_character[edges[np.searchsorted(edges, table[:, 1], side="left")]])
    earliest_later = np.minimum.accumulate(starts[::-1])[::-1]
    shared = np.append(earliest_later[1:] < ends[:-1], False)
    ends = np.maximum.accumulate(np.where(shared, 0, ends))
    ends[-1] = byte_of_character[-1]
    _end_by_bytes(ends, text.encode(), spellings)
    return np.asarray(ends, np.int32)


def _end_by_bytes(ends: NDArray[np.int32], text: bytes, spellings: Sequence[bytes]) -> None:
    """Set separate ends for tokens that share characters which were not normalized, such as the bytes of "日"."""
    first = start = 0
    for last in np.flatnonzero(np.diff(ends, prepend=0) > 0).tolist():
        stop = int(ends[last])
        if last > first:
            spelled = b"".join(spellings[first : last + 1])
            added = spelled == b" " + text[start:stop]  # a space that the tokenizer prepended
            if added or spelled == text[start:stop]:
                lengths = [len(spelling) for spelling in spellings[first : last + 1]]
                ends[first : last + 1] = np.maximum(start, start + np.cumsum(lengths) - added)
        first, start = last + 1, stop


def characters_kept_by_normalizer(text: str, normalize: Callable[[str], str]) -> list[int]:
    """Return the indices of the characters that the normalizer does not drop."""
    nothing = normalize("00")  # digits on both sides, so that nothing is stripped at the ends of the text
    kept: list[int] = []
    for start, stop in itertools.pairwise(_cluster_boundaries(text, normalize).tolist()):
        if normalize(f"0{text[start:stop]}0") != nothing:
            kept.extend(range(start, stop))
    return kept


def _cluster_boundaries(text: str, normalize: Callable[[str], str] | None) -> NDArray[np.int64]:
    """Return the character offsets, including 0 and the text's length, that are not inside of a cluster."""
    inside = np.zeros(len(text) + 1, np.bool_)
    if normalize is not None:
        cuts: dict[str, list[int]] = {}
        for start, stop in _combining_clusters(text):
            cluster = text[start:stop]
            if cluster not in cuts:
                cuts[cluster] = _split_points(cluster, normalize) if len(cluster) <= MAX_CLUSTER_LENGTH else []
            inside[start + 1 : stop] = True
            inside[[start + at for at in cuts[cluster]]] = False
    return np.flatnonzero(~inside)


def _combining_clusters(text: str) -> list[tuple[int, int]]:
    """Return `[start, stop)` of clusters: characters that may be normalized together, at least two each."""
    if text.isascii():
        return []
    goes_on = [False, *map(_may_combine_with_previous, text[1:]), False]
    clusters, start = [], 0
    for at, flag in enumerate(goes_on):
        if not flag:
            if at - start > 1:
                clusters.append((start, at))
            start = at
    return clusters


def _split_points(cluster: str, normalize: Callable[[str], str]) -> list[int]:
    """Return where a cluster may be split without changing its normalization."""
    expected = _normalize_separately([cluster], normalize)
    return [
        at
        for at in range(1, len(cluster))
        if _normalize_separately([cluster[:at], cluster[at:]], normalize) == expected
    ]


def _normalize_separately(parts: Sequence[str], normalize: Callable[[str], str]) -> str:
    # Between digits, so that parts neither compose nor lie at the ends of the text, where spaces are stripped or added.
    # Digits compose with nothing, and no normalizer changes them.
    return normalize("0" + "0".join(parts) + "0").replace("0", "")


@lru_cache(maxsize=1 << 16)
def _may_combine_with_previous(character: str) -> bool:
    """Return whether a normalizer may compose this character with the one before it.

    True for marks, for Hangul vowels and final consonants (U+1160 to U+11FF), which are not marks, and for characters
    that NFKC turns into one of these: half-width voiced sound marks, vowels of the compatibility alphabets. Charsmaps
    rewrite complete graphemes, so joiners (Cf) and emoji skin tones count too.
    """
    first = unicodedata.normalize("NFKD", character)[0]
    return (
        unicodedata.category(first) in ("Mn", "Mc", "Me", "Cf")
        or "\u1160" <= first <= "\u11ff"
        or "\U0001f3fb" <= first <= "\U0001f3ff"
    )
