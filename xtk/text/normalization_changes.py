"""Counts characters that a tokenizer changes: normalized to others, dropped, or unknown."""

from __future__ import annotations

import difflib
import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from xtk.text.tokenizer import EncodedText, Tokenizer
from xtk.text.vocabulary import METASPACE_CHARACTER

BATCH_SIZE = 1000
NUM_EXAMPLES = 3
MAX_COMPARED_CHARACTERS = 1000  # of one part of a text


@dataclass
class NormalizationLoss:
    """Characters of texts that a tokenizer changed, without a space that it prepends to a text."""

    tokenizer_name: str  # name of the tokenizer
    num_characters: int = 0  # characters of all texts
    rewritten: int = 0  # characters that became others: composed, lower-cased, without accent
    dropped: int = 0  # characters that disappeared: white space, control characters, lone accents
    unknown: int = 0  # characters that became the unknown token
    # Counts of (text, its replacement); the replacement is "" if dropped, None if unknown.
    examples: Counter[tuple[str, str | None]] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Number of characters that the tokens do not represent."""
        return self.rewritten + self.dropped + self.unknown

    def __add__(self, other: NormalizationLoss) -> NormalizationLoss:
        return NormalizationLoss(
            self.tokenizer_name,
            self.num_characters + other.num_characters,
            self.rewritten + other.rewritten,
            self.dropped + other.dropped,
            self.unknown + other.unknown,
            self.examples + other.examples,
        )

    def warning(self) -> str | None:
        """Return a one-line warning; None if nothing was changed."""
        if not self.lost:
            return None
        kinds = {"rewritten": self.rewritten, "dropped": self.dropped, "unknown": self.unknown}
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items() if number)
        examples = "; ".join(_describe_change(*pair, count) for pair, count in self.examples.most_common(NUM_EXAMPLES))
        return (
            f"{self.tokenizer_name} changes {self.lost / self.num_characters:.2%} of the characters of these texts "
            f"({self.lost:,} of {self.num_characters:,}: {counts}); the changed text is compared; "
            f"most frequent: {examples}"
        )


def _describe_change(before: str, after: str | None, count: int) -> str:
    # Composed characters look the same: show code points then.
    looks_same = bool(after) and unicodedata.normalize("NFKC", before) == unicodedata.normalize("NFKC", str(after))
    shown = ascii if looks_same else repr
    change = "unknown" if after is None else f"to {shown(after)}" if after else "dropped"
    return f"{shown(before)} {change} {count:,} {'times' if count > 1 else 'time'}"


def count_normalization_loss(
    tokenizer: Tokenizer, texts: Iterable[str], encoded: Iterable[EncodedText] | None = None
) -> NormalizationLoss:
    """Return the number of characters that a tokenizer changes. Texts with exact tokens take no extra time."""
    loss = NormalizationLoss(tokenizer.name)
    changed: Counter[tuple[str, str | None]] = Counter()
    pairs = _encode_in_batches(tokenizer, texts) if encoded is None else zip(texts, encoded, strict=True)
    for text, tokens in pairs:
        loss.num_characters += len(text)
        if not tokens.exact:
            changed.update(_changed_substrings(tokenizer, text.encode(), tokens))
    for (text, read), count in changed.items():
        _count_change(loss, text, read, count)
    return loss


def _encode_in_batches(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterable[tuple[str, EncodedText]]:
    remaining = iter(texts)
    while some := list(itertools.islice(remaining, BATCH_SIZE)):
        yield from zip(some, tokenizer.encode(some), strict=True)


def _changed_substrings(tokenizer: Tokenizer, text: bytes, tokens: EncodedText) -> Iterable[tuple[str, str | None]]:
    """Yield (text, replacement) of changed parts between token ends; the replacement is None for the unknown token."""
    ids, ends = tokens.ids.tolist(), tokens.byte_ends.tolist()
    first = start = 0
    for at, stop in enumerate(ends):
        if stop == start:
            continue
        part, stretch = ids[first : at + 1], text[start:stop]
        spelled = b"".join(map(tokenizer.vocabulary.bytes_of, part))
        if tokenizer.unknown_id in part:
            yield stretch.decode(errors="replace"), None
        elif spelled not in (stretch, b" " + stretch):
            yield stretch.decode(errors="replace"), spelled.decode(errors="replace")
        first, start = at + 1, stop
    if start < len(text):  # without any token
        yield text[start:].decode(), ""


def _count_change(loss: NormalizationLoss, text: str, read: str | None, count: int) -> None:
    if read is None:
        word = text.lstrip()
        if len(word) < len(text):
            _count_change(loss, text[: len(text) - len(word)], "", count)
        loss.unknown += count * len(word)
        loss.examples[word, None] += count
        return
    if not text[0].isspace() and text[0] != METASPACE_CHARACTER:
        read = read.removeprefix(" ")  # prepended by the tokenizer
    if max(len(text), len(read)) > MAX_COMPARED_CHARACTERS:  # the search takes quadratic time
        operations = [("replace" if read else "delete", 0, len(text), 0, len(read))]
    else:
        operations = [*difflib.SequenceMatcher(None, text, read, autojunk=False).get_opcodes()]
    for kind, start, stop, low, high in operations:
        if kind == "delete":
            loss.dropped += count * (stop - start)
            loss.examples[text[start:stop], ""] += count
        elif kind == "replace":
            loss.rewritten += count * (stop - start)
            before, after = text[start:stop], read[low:high]
            changes = zip(before, after, strict=True) if len(before) == len(after) else [(before, after)]
            for change in changes:
                loss.examples[change] += count
