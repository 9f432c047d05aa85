"""Time of the alignment relative to tokenization, one call per document, one thread; and the number of wrong spans.

All pairs of four real tokenizers, on real and on generated texts.
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

from xtk.text.alignment import align
from xtk.text.tokenizer import EncodedText, Tokenizer

NAMES = ("llama3", "qwen", "gpt2", "mistral-v1")
PAIRS = list(itertools.combinations(NAMES, 2))
GENERATED_DOCUMENTS = 40
REPEATS = 3


def seconds(function: Callable[..., object], *arguments: object) -> float:
    """Return the time of one call."""
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def tokenize(side: Tokenizer, texts: list[str]) -> None:
    """Tokenize, without byte ends."""
    side._backend.encode_batch_fast(texts, add_special_tokens=False)


def align_all(documents: list[tuple[EncodedText, EncodedText]]) -> None:
    """Align document by document."""
    for student, teacher in documents:
        align(student, teacher)


def wrong_spans(
    student: Tokenizer, teacher: Tokenizer, one: EncodedText, other: EncodedText, text: bytes
) -> tuple[int, int]:
    """Return the numbers of wrong spans and of all spans of a document; a wrong span's tokens spell different bytes.

    Computed from the spelling of each token alone, not from the byte ends that the alignment uses. Only the space that
    a tokenizer adds in front of a text is ignored. If the spans do not spell the text, that is one wrong span.
    """
    left_spellings, right_spellings = student.vocabulary.bytes_by_id, teacher.vocabulary.bytes_by_id
    left_ids, right_ids = one.ids.tolist(), other.ids.tolist()
    spans = align(one, other).tolist()
    wrong, spellings = 0, []
    for s0, s1, t0, t1 in spans:
        left = b"".join([left_spellings[token] for token in left_ids[s0:s1]])
        right = b"".join([right_spellings[token] for token in right_ids[t0:t1]])
        if s0 == 0:
            # A leading space that the text does not have is ignored (" Anna" for "Anna").
            left, right = (side[side[:1] == b" " != text[:1] :] for side in (left, right))
        wrong += left != right
        spellings.append(left)
    return wrong + (b"".join(spellings) != text), len(spans)


@dataclass(frozen=True)
class AlignmentTimes:
    """Measurements on one corpus.

    Attributes:
        tokens: number of tokens, by tokenizer.
        tokenizing: seconds, by tokenizer.
        aligning: seconds, by pair.
        spans: number of spans of all pairs.
        wrong: number of those whose bytes differ.
    """

    tokens: dict[str, int]
    tokenizing: dict[str, float]
    aligning: dict[tuple[str, str], float]
    spans: int
    wrong: int


def measure(sides: dict[str, Tokenizer], texts: list[str]) -> AlignmentTimes:
    """Tokenize and align a corpus with all tokenizers and pairs, alternating; then count wrong spans."""
    encoded = {name: side.encode(texts) for name, side in sides.items()}
    pairs = {pair: list(zip(encoded[pair[0]], encoded[pair[1]], strict=True)) for pair in PAIRS}
    tokenizing: dict[str, list[float]] = {name: [] for name in NAMES}
    aligning: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    for _ in range(REPEATS):  # alternating, so that other load affects all of them
        for name, side in sides.items():
            tokenizing[name].append(seconds(tokenize, side, texts))
        for _ in range(REPEATS):
            for pair, documents in pairs.items():
                aligning[pair].append(seconds(align_all, documents))
    counts = [
        wrong_spans(sides[one], sides[other], left, right, text.encode())
        for one, other in PAIRS
        for left, right, text in zip(encoded[one], encoded[other], texts, strict=True)
    ]
    return AlignmentTimes(
        tokens={name: sum(len(document.ids) for document in documents) for name, documents in encoded.items()},
        tokenizing={name: statistics.median(times) for name, times in tokenizing.items()},
        aligning={pair: statistics.median(times) for pair, times in aligning.items()},
        spans=sum(spans for _, spans in counts),
        wrong=sum(wrong for wrong, _ in counts),
    )


def corpus_rows(corpus: str, times: AlignmentTimes) -> list[tuple[str, str, str]]:
    """Return the rows of the table for one corpus."""
    speeds, time_ratios = {}, {}
    for (one, other), aligning in times.aligning.items():
        speeds[f"{one} x {other}"] = (times.tokens[one] + times.tokens[other]) / aligning / 1e6
        time_ratios[f"{one} x {other}"] = aligning / (times.tokenizing[one] + times.tokenizing[other])
    slowest, costliest = min(speeds, key=speeds.__getitem__), max(time_ratios, key=time_ratios.__getitem__)
    speed, time_ratio = statistics.median(speeds.values()), statistics.median(time_ratios.values())
    return [
        (
            f"{corpus}: tokens of both sides aligned a second, one core, median of all pairs",
            f"{speed:.0f} M (least {speeds[slowest]:.0f} M, {slowest})",
            "100 M",
        ),
        (
            f"{corpus}: its time over tokenizing",
            f"{time_ratio:.2%} (most {time_ratios[costliest]:.2%}, {costliest})",
            "2 %",
        ),
        (f"{corpus}: wrong spans, all pairs, of {times.spans:,}", f"{times.wrong:,}", "0"),
    ]


def main() -> None:
    """Measure and print."""
    sides = {name: Tokenizer(real_data() / "tokenizers" / name) for name in NAMES}
    rows, all_times = [], []
    for corpus, texts in corpora(GENERATED_DOCUMENTS).items():
        all_times.append(measure(sides, texts))
        rows += corpus_rows(corpus, all_times[-1])
    speed = sum((len(NAMES) - 1) * sum(times.tokens.values()) for times in all_times) / sum(
        sum(times.aligning.values()) for times in all_times
    )
    texts = gsm8k()
    ratios = [
        sum(seconds(side.encode, texts) for side in sides.values())
        / sum(seconds(tokenize, side, texts) for side in sides.values())
        for _ in range(REPEATS)
    ]
    spans, wrong = sum(times.spans for times in all_times), sum(times.wrong for times in all_times)
    rows += [
        ("all of them: tokens aligned a second, one core", f"{speed / 1e6:.0f} M", "100 M"),
        (f"all of them: wrong spans, of {spans:,}", f"{wrong:,}", "0"),
        ("ids with byte ends over ids alone, one core", f"{statistics.median(ratios):.2f} x", "(none)"),
    ]
    report(__file__, rows)


if __name__ == "__main__":
    main()
