"""Expected bytes of the tokens of every tokenizer family, computed without the tokenizers.

Each family has its normalizer, written with Python's Unicode functions, and what its tokens may leave out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizer_families import CHARSMAP, charsmap
from tokenizers import normalizers

from xtk.text.tokenizer import EncodedText, Tokenizer


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def lower(text: str) -> str:
    # One character at a time: Python's str.lower() handles the final sigma, the backends do not.
    return "".join(character.lower() for character in text)


def without_accents(text: str) -> str:
    return "".join(character for character in text if unicodedata.category(character) != "Mn")


def without_marks(text: str) -> str:
    return "".join(character for character in text if unicodedata.category(character)[0] != "M")


def bert_clean(text: str) -> str:
    kept = (x for x in text if x in "\t\n\r" or not (x in "\0\ufffd" or unicodedata.category(x) in ("Cc", "Cf", "Co")))
    return "".join(" " if x.isspace() else x for x in kept)


def albert(text: str) -> str:
    text = text.replace("``", '"').replace("''", '"')
    return lower(without_marks(unicodedata.normalize("NFKD", text)))


COMPILED_CHARSMAP = normalizers.Precompiled(charsmap(CHARSMAP))


def normalize_by_charsmap(text: str) -> str:
    # By the backend itself: a charsmap treats a letter with its marks as one unit, without an equivalent in Python.
    return str(COMPILED_CHARSMAP.normalize_str(text))


def unchanged(text: str) -> str:
    return text


@dataclass(frozen=True)
class GroundTruth:
    """Expected behavior of one tokenizer family.

    Attributes:
        normalize: its normalizer, except for white space and the spaces that it adds.
        changes_spaces: whether white space is dropped, collapsed or added, so that it cannot be compared.
        lossless: whether its tokens decode to every text (without "▁" if `metaspace`), perhaps after an added space.
        metaspace: whether it replaces "▁" with a space.
        prefix_space: whether it adds a space in front of the text.
        complete: whether every text can be encoded without unknown tokens.
    """

    normalize: Callable[[str], str] = unchanged
    changes_spaces: bool = False
    lossless: bool = False
    metaspace: bool = False
    prefix_space: bool = False
    complete: bool = True


GROUND_TRUTHS = {
    "student": GroundTruth(lossless=True),
    "teacher": GroundTruth(lossless=True),
    "gpt2": GroundTruth(lossless=True),
    "gpt2-prefix": GroundTruth(lossless=True, prefix_space=True),
    "llama3": GroundTruth(lossless=True),
    "tekken": GroundTruth(lossless=True),
    "composing": GroundTruth(nfc),
    "byte-lower": GroundTruth(lambda text: without_marks(lower(unicodedata.normalize("NFD", text)))),
    "metaspace": GroundTruth(lossless=True, metaspace=True, prefix_space=True),
    "metaspace-always": GroundTruth(lossless=True, metaspace=True, prefix_space=True),
    "llama2": GroundTruth(lossless=True, metaspace=True, prefix_space=True),
    "gemma": GroundTruth(lossless=True, metaspace=True),
    "t5": GroundTruth(nfkc, changes_spaces=True, metaspace=True, prefix_space=True, complete=False),
    "albert": GroundTruth(albert, changes_spaces=True, metaspace=True, prefix_space=True, complete=False),
    "xlm-r": GroundTruth(normalize_by_charsmap, changes_spaces=True, metaspace=True, prefix_space=True, complete=False),
    "word-piece": GroundTruth(lambda text: lower(without_accents(unicodedata.normalize("NFD", bert_clean(text)))),
                              changes_spaces=True, complete=False),
    "word-piece-cased": GroundTruth(bert_clean, changes_spaces=True, complete=False),
    "word-level": GroundTruth(changes_spaces=True, complete=False),
    "characters": GroundTruth(complete=False),
    "added": GroundTruth(changes_spaces=True),
    "added-metaspace": GroundTruth(changes_spaces=True, metaspace=True, prefix_space=True),
    "added-lower": GroundTruth(lambda text: lower(nfkc(text)), changes_spaces=True),
}  # fmt: skip


def without_whitespace(text: bytes) -> bytes:
    return re.sub(r"\s+", "", text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def token_groups(tokens: EncodedText) -> list[tuple[int, int, int, int]]:
    """Return `[first, stop)` of tokens and `[start, end)` of bytes between consecutive positions where tokens end."""
    groups = []
    first = start = 0
    for index, end in enumerate(tokens.byte_ends.tolist()):
        if end > start:
            groups.append((first, index + 1, start, end))
            first, start = index + 1, end
    return groups


def normalized_bytes(truth: GroundTruth, text: bytes) -> bytes:
    """Return what the family's normalizer makes of a part of a text; an incomplete character stays unchanged."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return without_whitespace(text) if truth.changes_spaces else text
    normalized = truth.normalize(characters.replace("▁", " ") if truth.metaspace else characters)
    return without_whitespace(normalized.encode()) if truth.changes_spaces else normalized.encode()


def assert_groups_match_text(truth: GroundTruth, tokenizer: Tokenizer, text: str, tokens: EncodedText) -> None:
    """Compare each group of tokens with the bytes of its part of the text, except for unknown tokens."""
    encoded, unknown = text.encode(), tokenizer.special_token_ids.get("unk")
    for first, stop, start, end in token_groups(tokens):
        ids = tokens.ids[first:stop].tolist()
        if unknown in ids:
            assert not truth.complete
            continue
        token_bytes = b"".join(tokenizer.vocabulary.bytes_of(token) for token in ids)
        token_bytes = without_whitespace(normalized_bytes(truth, token_bytes)) if truth.changes_spaces else token_bytes
        expected = normalized_bytes(truth, encoded[start:end])
        only_prefix_added = truth.prefix_space and start == 0 and token_bytes == b" " + expected
        assert token_bytes == expected or only_prefix_added, (
            f"{text!r}: bytes {start} to {end} are {expected!r}, the tokens {token_bytes!r}"
        )


def assert_ends_at_possible_positions(truth: GroundTruth, tokenizer: Tokenizer, text: str, tokens: EncodedText) -> None:
    """Check that each token ends at one of its possible byte positions, if it has any; brute force, for short texts."""
    token_bytes = [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids.tolist()]
    clean = without_whitespace if truth.changes_spaces else bytes
    splits = [
        (
            len(text[:position].encode()),
            clean(normalized_bytes(truth, text[:position].encode())),
            clean(normalized_bytes(truth, text[position:].encode())),
        )
        for position in range(1, len(text))
    ]
    ends = set(tokens.byte_ends.tolist())
    for position in range(1, len(token_bytes)):
        left, right = clean(b"".join(token_bytes[:position])), clean(b"".join(token_bytes[position:]))
        if not left or not right:
            continue
        left = left.removeprefix(b" ") if truth.prefix_space and not text.startswith(" ") else left
        possible_ends = {byte for byte, before, after in splits if (before, after) == (left, right)}
        assert not possible_ends or possible_ends & ends, (
            f"{text!r}: token {position} could end at {sorted(possible_ends)}, ends: {tokens.byte_ends}"
        )


def assert_valid_byte_ends(text: str, tokens: EncodedText) -> None:
    """Check the properties of byte ends that hold for all families."""
    assert tokens.ids.dtype == tokens.byte_ends.dtype == np.int32
    assert len(tokens.ids) == len(tokens.byte_ends)
    assert (np.diff(tokens.byte_ends, prepend=0) >= 0).all()
    assert not len(tokens.byte_ends) or tokens.byte_ends[-1] == len(text.encode())
