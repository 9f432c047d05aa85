"""What the tokenizers of the tests do to a text, written again without them: the truth that spans are held against.

A family here says what its normaliser reads (in Python's own Unicode functions) and what its tokens may leave out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizer_families import CHARSMAP, charsmap
from tokenizers import normalizers

from xtk.tokens.tokenizer import EncodedText, Tokenizer


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def lower(text: str) -> str:
    # Letter by letter: Python's str.lower() knows the final sigma, the backends do not.
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


COMPILED = normalizers.Precompiled(charsmap(CHARSMAP))


def read_by_charsmap(text: str) -> str:
    # Asked piece by piece: how a charsmap treats letters with marks, which it reads as one, only the backend knows.
    return str(COMPILED.normalize_str(text))


def same(text: str) -> str:
    return text


@dataclass(frozen=True)
class Truth:
    """What one family does.

    Attributes:
        reads: its normaliser, but for white space and the spaces that it adds.
        squeezes: whether white space is dropped, collapsed or added, so that it cannot be compared.
        bytes_spell: whether its tokens' bytes spell every text (without "▁" if `escapes`), perhaps after a space.
        escapes: whether it reads "▁" as a space.
        prefix: whether it puts a space in front.
        everything: whether there is a token for every text, so that none is unknown.
    """

    reads: Callable[[str], str] = same
    squeezes: bool = False
    bytes_spell: bool = False
    escapes: bool = False
    prefix: bool = False
    everything: bool = True


TRUTHS = {
    "student": Truth(bytes_spell=True),
    "teacher": Truth(bytes_spell=True),
    "gpt2": Truth(bytes_spell=True),
    "gpt2-prefix": Truth(bytes_spell=True, prefix=True),
    "llama3": Truth(bytes_spell=True),
    "tekken": Truth(bytes_spell=True),
    "composing": Truth(nfc),
    "byte-lower": Truth(lambda text: without_marks(lower(unicodedata.normalize("NFD", text)))),
    "metaspace": Truth(bytes_spell=True, escapes=True, prefix=True),
    "metaspace-always": Truth(bytes_spell=True, escapes=True, prefix=True),
    "llama2": Truth(bytes_spell=True, escapes=True, prefix=True),
    "gemma": Truth(bytes_spell=True, escapes=True),
    "t5": Truth(nfkc, squeezes=True, escapes=True, prefix=True, everything=False),
    "albert": Truth(albert, squeezes=True, escapes=True, prefix=True, everything=False),
    "xlm-r": Truth(read_by_charsmap, squeezes=True, escapes=True, prefix=True, everything=False),
    "word-piece": Truth(lambda text: lower(without_accents(unicodedata.normalize("NFD", bert_clean(text)))),
                        squeezes=True, everything=False),
    "word-piece-cased": Truth(bert_clean, squeezes=True, everything=False),
    "word-level": Truth(squeezes=True, everything=False),
    "characters": Truth(everything=False),
    "added": Truth(squeezes=True),
    "added-metaspace": Truth(squeezes=True, escapes=True, prefix=True),
    "added-lower": Truth(lambda text: lower(nfkc(text)), squeezes=True),
}  # fmt: skip


def squeezed(text: bytes) -> bytes:
    return re.sub(r"\s+", "", text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def groups(tokens: EncodedText) -> list[tuple[int, int, int, int]]:
    """Return `[first, stop)` of tokens and `[start, end)` of bytes between each two places where tokens end."""
    found = []
    first = start = 0
    for at, end in enumerate(tokens.byte_ends.tolist()):
        if end > start:
            found.append((first, at + 1, start, end))
            first, start = at + 1, end
    return found


def read_bytes(truth: Truth, text: bytes) -> bytes:
    """What the family reads in a stretch of text; in a part of a character, itself."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return squeezed(text) if truth.squeezes else text
    read = truth.reads(characters.replace("▁", " ") if truth.escapes else characters)
    return squeezed(read.encode()) if truth.squeezes else read.encode()


def assert_groups_spell(truth: Truth, tokenizer: Tokenizer, text: str, tokens: EncodedText) -> int:
    """Hold each group of tokens against the bytes that it is said to spell; return how many could be compared."""
    raw, unknown = text.encode(), tokenizer.special_token_ids.get("unk")
    compared = 0
    for first, stop, start, end in groups(tokens):
        ids = tokens.ids[first:stop].tolist()
        if unknown in ids:
            continue
        compared += 1
        spelled = b"".join(tokenizer.vocabulary.bytes_of(token) for token in ids)
        spelled = squeezed(read_bytes(truth, spelled)) if truth.squeezes else spelled
        read = read_bytes(truth, raw[start:end])
        prefixed = truth.prefix and start == 0 and spelled == b" " + read
        assert spelled == read or prefixed, f"{text!r}: bytes {start} to {end} are {read!r}, the tokens {spelled!r}"
    return compared


def assert_ends_where_it_could(truth: Truth, tokenizer: Tokenizer, text: str, tokens: EncodedText) -> None:
    """Hold each token that could end somewhere against the places where it could; brute force, for short texts."""
    spellings = [tokenizer.vocabulary.bytes_of(token) for token in tokens.ids.tolist()]
    fit = squeezed if truth.squeezes else bytes
    reads = [
        (
            len(text[:at].encode()),
            fit(read_bytes(truth, text[:at].encode())),
            fit(read_bytes(truth, text[at:].encode())),
        )
        for at in range(1, len(text))
    ]
    ends = set(tokens.byte_ends.tolist())
    for at in range(1, len(spellings)):
        head, tail = fit(b"".join(spellings[:at])), fit(b"".join(spellings[at:]))
        if not head or not tail:
            continue
        head = head.removeprefix(b" ") if truth.prefix and not text.startswith(" ") else head
        places = {byte for byte, before, after in reads if (before, after) == (head, tail)}
        assert not places or places & ends, (
            f"{text!r}: token {at} could end at {sorted(places)}, ends: {tokens.byte_ends}"
        )


def assert_whole(text: str, tokens: EncodedText) -> None:
    """Hold ends against what is true of all families."""
    assert tokens.ids.dtype == tokens.byte_ends.dtype == np.int32
    assert len(tokens.ids) == len(tokens.byte_ends)
    assert (np.diff(tokens.byte_ends, prepend=0) >= 0).all()
    assert not len(tokens.byte_ends) or tokens.byte_ends[-1] == len(text.encode())
