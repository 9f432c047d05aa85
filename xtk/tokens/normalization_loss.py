"""What a tokenizer loses of texts: characters that it rewrote, dropped or could not write, counted."""

from __future__ import annotations

import difflib
import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from xtk.tokens.tokenizer import EncodedText, Tokenizer
from xtk.tokens.vocabulary import METASPACE_CHARACTER

BATCH_SIZE = 1000
NUM_EXAMPLES = 3


@dataclass
class NormalizationLoss:
    """What a tokenizer did to the characters of some texts.

    A space that it puts in front of a text is no loss and not counted.

    Attributes:
        tokenizer_name: the tokenizer.
        num_characters: of all texts, those that it left alone too.
        rewritten: characters that became others: composed, in lower case, without their accent.
        dropped: characters of which nothing is left: white space, control characters, lone accents.
        unknown: characters that only the unknown token stands for.
        examples: how often each stretch of text (first) was read as another (second; "" if dropped, None if unknown).
    """

    tokenizer_name: str
    num_characters: int = 0
    rewritten: int = 0
    dropped: int = 0
    unknown: int = 0
    examples: Counter[tuple[str, str | None]] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Characters that the tokens do not spell."""
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
        """Return one line for people; None if nothing was lost."""
        if not self.lost:
            return None
        kinds = {"rewritten": self.rewritten, "dropped": self.dropped, "unknown": self.unknown}
        told = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items() if number)
        examples = "; ".join(_describe_change(*pair, count) for pair, count in self.examples.most_common(NUM_EXAMPLES))
        return (
            f"{self.tokenizer_name} cannot spell {self.lost / self.num_characters:.2%} of the characters of these "
            f"texts "
            f"({self.lost:,} of {self.num_characters:,}: {told}), and what it reads instead is compared; "
            f"most often {examples}"
        )


def _describe_change(before: str, after: str | None, count: int) -> str:
    # What was composed looks the same: then in code points.
    looks_same = bool(after) and unicodedata.normalize("NFKC", before) == unicodedata.normalize("NFKC", str(after))
    shown = ascii if looks_same else repr
    did = "unknown" if after is None else f"as {shown(after)}" if after else "dropped"
    return f"{shown(before)} {did} {count:,} {'times' if count > 1 else 'time'}"


def count_normalization_loss(
    tokenizer: Tokenizer, texts: Iterable[str], encoded: Iterable[EncodedText] | None = None
) -> NormalizationLoss:
    """Count what a tokenizer loses of texts. Texts that its tokens spell exactly cost nothing but their tokenising.

    Args:
        tokenizer: reads the texts.
        texts: any number; a thousand at a time are held.
        encoded: the texts' tokens, where they are at hand.
    """
    found = NormalizationLoss(tokenizer.name)
    stretches: Counter[tuple[str, str | None]] = Counter()
    pairs = _encode_in_batches(tokenizer, texts) if encoded is None else zip(texts, encoded, strict=True)
    for text, tokens in pairs:
        found.num_characters += len(text)
        if not tokens.exact:
            stretches.update(_changed_substrings(tokenizer, text.encode(), tokens))
    for (text, read), count in stretches.items():
        _count_change(found, text, read, count)
    return found


def _encode_in_batches(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterable[tuple[str, EncodedText]]:
    remaining = iter(texts)
    while some := list(itertools.islice(remaining, BATCH_SIZE)):
        yield from zip(some, tokenizer.encode(some), strict=True)


def _changed_substrings(tokenizer: Tokenizer, text: bytes, tokens: EncodedText) -> Iterable[tuple[str, str | None]]:
    """Yield the stretches between ends that their tokens do not spell, and what these spell; None for unknown."""
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
    if start < len(text):  # no token at all
        yield text[start:].decode(), ""


def _count_change(found: NormalizationLoss, text: str, read: str | None, count: int) -> None:
    if read is None:
        word = text.lstrip()
        if len(word) < len(text):
            _count_change(found, text[: len(text) - len(word)], "", count)
        found.unknown += count * len(word)
        found.examples[word, None] += count
        return
    if not text[0].isspace() and text[0] != METASPACE_CHARACTER:
        read = read.removeprefix(" ")  # the tokenizer's own
    for kind, start, stop, low, high in difflib.SequenceMatcher(None, text, read, autojunk=False).get_opcodes():
        if kind == "delete":
            found.dropped += count * (stop - start)
            found.examples[text[start:stop], ""] += count
        elif kind == "replace":
            found.rewritten += count * (stop - start)
            one_by_one = stop - start == high - low
            changes = (
                zip(text[start:stop], read[low:high], strict=True)
                if one_by_one
                else [(text[start:stop], read[low:high])]
            )
            for before, after in changes:
                found.examples[before, after] += count
