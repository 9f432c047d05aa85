"""Alignment: calls for each document, one thread, beside tokenising the same text; and whether any span is wrong.

All pairs of four real tokenizers, on real and on made texts.
"""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from hard_texts import corpora
from measurement import gsm8k, real_data, report

from xtk.tokens.alignment import align
from xtk.tokens.tokenizer import EncodedText, Tokenizer

NAMES = ("llama3", "qwen", "gpt2", "mistral-v1")
PAIRS = list(itertools.combinations(NAMES, 2))
MADE_DOCUMENTS = 40
ROUNDS = 3


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Return the time of one call."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def tokenise(side: Tokenizer, texts: list[str]) -> None:
    """Tokenise, and find no bytes."""
    side._backend.encode_batch_fast(texts, add_special_tokens=False)


def align_all(documents: list[tuple[EncodedText, EncodedText]]) -> None:
    """Align document by document."""
    for student, teacher in documents:
        align(student, teacher)


def wrong_spans(
    student: Tokenizer, teacher: Tokenizer, one: EncodedText, other: EncodedText, text: bytes
) -> tuple[int, int]:
    """Return the spans of a document whose tokens spell different bytes on the two sides, and all spans.

    From the spelling of each token alone, not from the byte ends that the alignment works with. Only the
    space that a tokenizer puts in front of a text is forgiven. Text that no span spells is one wrong span.
    """
    left_spellings, right_spellings = student.vocabulary.bytes_by_id, teacher.vocabulary.bytes_by_id
    left_ids, right_ids = one.ids.tolist(), other.ids.tolist()
    spans = align(one, other).tolist()
    wrong, whole = 0, []
    for s0, s1, t0, t1 in spans:
        left = b"".join([left_spellings[token] for token in left_ids[s0:s1]])
        right = b"".join([right_spellings[token] for token in right_ids[t0:t1]])
        if s0 == 0:
            # Of " Anna" and "Anna", the text tells whose space it is.
            left, right = (side[side[:1] == b" " != text[:1] :] for side in (left, right))
        wrong += left != right
        whole.append(left)
    return wrong + (b"".join(whole) != text), len(spans)


@dataclass(frozen=True)
class Found:
    """What was measured on one corpus.

    Attributes:
        tokens: of each tokenizer.
        tokenising: seconds of each tokenizer.
        aligning: seconds of each pair.
        spans: of all pairs.
        wrong: of these, those whose bytes differ.
    """

    tokens: dict[str, int]
    tokenising: dict[str, float]
    aligning: dict[tuple[str, str], float]
    spans: int
    wrong: int


def measure(sides: dict[str, Tokenizer], texts: list[str]) -> Found:
    """Tokenise and align a corpus with all tokenizers and pairs, in turns; then look for wrong spans."""
    encoded = {name: side.encode(texts) for name, side in sides.items()}
    pairs = {pair: list(zip(encoded[pair[0]], encoded[pair[1]], strict=True)) for pair in PAIRS}
    tokenising: dict[str, list[float]] = {name: [] for name in NAMES}
    aligning: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    for _ in range(ROUNDS):  # in turns, so that other work on the machine hits all of them
        for name, side in sides.items():
            tokenising[name].append(seconds(tokenise, side, texts))
        for _ in range(ROUNDS):
            for pair, documents in pairs.items():
                aligning[pair].append(seconds(align_all, documents))
    counts = [
        wrong_spans(sides[one], sides[other], left, right, text.encode())
        for one, other in PAIRS
        for left, right, text in zip(encoded[one], encoded[other], texts, strict=True)
    ]
    return Found(
        tokens={name: sum(len(document.ids) for document in documents) for name, documents in encoded.items()},
        tokenising={name: statistics.median(times) for name, times in tokenising.items()},
        aligning={pair: statistics.median(times) for pair, times in aligning.items()},
        spans=sum(spans for _, spans in counts),
        wrong=sum(wrong for wrong, _ in counts),
    )


def lines(corpus: str, found: Found) -> list[tuple[str, str, str]]:
    """Return the lines of the table for one corpus."""
    speeds, shares = {}, {}
    for (one, other), aligning in found.aligning.items():
        speeds[f"{one} x {other}"] = (found.tokens[one] + found.tokens[other]) / aligning / 1e6
        shares[f"{one} x {other}"] = aligning / (found.tokenising[one] + found.tokenising[other])
    slowest, dearest = min(speeds, key=speeds.__getitem__), max(shares, key=shares.__getitem__)
    speed, share = statistics.median(speeds.values()), statistics.median(shares.values())
    return [
        (
            f"{corpus}: tokens of both sides aligned a second, one core, median of all pairs",
            f"{speed:.0f} M (least {speeds[slowest]:.0f} M, {slowest})",
            "100 M",
        ),
        (f"{corpus}: its time over tokenising", f"{share:.2%} (most {shares[dearest]:.2%}, {dearest})", "2 %"),
        (f"{corpus}: wrong spans, all pairs, of {found.spans:,}", f"{found.wrong:,}", "0"),
    ]


def main() -> None:
    """Measure and print."""
    sides = {name: Tokenizer(real_data() / "tokenizers" / name) for name in NAMES}
    rows, all_found = [], []
    for corpus, texts in corpora(MADE_DOCUMENTS).items():
        all_found.append(measure(sides, texts))
        rows += lines(corpus, all_found[-1])
    speed = sum((len(NAMES) - 1) * sum(found.tokens.values()) for found in all_found) / sum(
        sum(found.aligning.values()) for found in all_found
    )
    texts = gsm8k()
    ratios = [
        sum(seconds(side.encode, texts) for side in sides.values())
        / sum(seconds(tokenise, side, texts) for side in sides.values())
        for _ in range(ROUNDS)
    ]
    spans, wrong = sum(found.spans for found in all_found), sum(found.wrong for found in all_found)
    rows += [
        ("all of them: tokens aligned a second, one core", f"{speed / 1e6:.0f} M", "100 M"),
        (f"all of them: wrong spans, of {spans:,}", f"{wrong:,}", "0"),
        ("ids with byte ends over ids alone, one core", f"{statistics.median(ratios):.2f} x", "(none)"),
    ]
    report(__file__, rows)


if __name__ == "__main__":
    main()
