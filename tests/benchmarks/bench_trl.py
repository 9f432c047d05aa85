"""TRL's GOLD aligner on the same texts: its time a token and its wrong spans beside ours.

TRL is installed from the registry, without what it depends on, into a folder of its own (.nox/trl), at the first run.
"""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hard_texts import made
from measurement import ROOT, gsm8k, machine, real_data

from xtk.tokens.alignment import align
from xtk.tokens.tokenizer import EncodedText, Tokenizer

VERSION = "1.16.0"
FOLDER = ROOT / ".nox" / "trl"
PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v1"))
ROUNDS = 3

Sides = tuple[Tokenizer, Tokenizer]
Groups = list[tuple[list[int], list[int]]]


def trl() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return TRL's tokenising with byte offsets and its aligner, or end with one line that says why not."""
    if not (FOLDER / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER)]
        done = subprocess.run([*command, f"trl=={VERSION}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"skipped: trl {VERSION} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    sys.path.insert(0, str(FOLDER))
    try:
        from trl.experimental.gold.gold_trainer import ULDLoss
        from trl.experimental.utils import encode_with_byte_offsets
    except ImportError as wrong:
        raise SystemExit(f"skipped: trl {VERSION} cannot be imported here: {wrong}") from None
    return encode_with_byte_offsets, ULDLoss._align_by_byte_offsets


def in_turns(*works: Callable[[], object]) -> list[float]:
    """Return the median time of each, called in turns, so that other work on the machine hits all of them."""
    times: list[list[float]] = [[] for _ in works]
    gc.collect()
    gc.freeze()  # what the other side made is not searched for garbage while this one is timed
    for _ in range(ROUNDS):
        for work, found in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in times]


def each(work: Callable[..., object], pairs: list[tuple[Any, Any]]) -> Callable[[], None]:
    """Return a function that works on one pair after the other and keeps nothing."""

    def loop() -> None:
        for one, other in pairs:
            work(one, other)

    return loop


def wrong_spans(sides: Sides, ids: tuple[list[int], list[int]], groups: Groups, text: bytes) -> int:
    """Count groups of tokens that spell different bytes on the two sides; text that no group spells is one more."""
    wrong, whole = 0, []
    for number, group in enumerate(groups):
        one, other = (
            b"".join(side.vocabulary.bytes_by_id[tokens[at]] for at in places)
            for side, tokens, places in zip(sides, ids, group, strict=True)
        )
        if number == 0:
            # Of " Anna" and "Anna", the text tells whose space it is.
            one, other = (side[side[:1] == b" " != text[:1] :] for side in (one, other))
        wrong += one != other
        whole.append(one)
    return wrong + (b"".join(whole) != text)


def our_wrong_spans(sides: Sides, pairs: list[tuple[EncodedText, EncodedText]], texts: list[str]) -> str:
    """Count the wrong spans of xtk, and all."""
    wrong = total = 0
    for (one, other), text in zip(pairs, texts, strict=True):
        spans = align(one, other).tolist()
        groups = [(list(range(s0, s1)), list(range(t0, t1))) for s0, s1, t0, t1 in spans]
        wrong += wrong_spans(sides, (one.ids.tolist(), other.ids.tolist()), groups, text.encode())
        total += len(spans)
    return f"{wrong:,} of {total:,}"


def their_wrong_spans(aligner: Callable[..., Any], sides: Sides, pairs: list[tuple[Any, Any]], texts: list[str]) -> str:
    """Count the wrong groups of TRL, and all."""
    wrong = total = 0
    for (one, other), text in zip(pairs, texts, strict=True):
        groups = list(zip(*aligner(one[1], other[1]), strict=True))
        wrong += wrong_spans(sides, (one[0], other[0]), groups, text.encode())
        total += len(groups)
    return f"{wrong:,} of {total:,}"


def compare(encode: Callable[..., Any], aligner: Callable[..., Any], sides: Sides, texts: list[str]) -> list[list[str]]:
    """Return for time of aligning, time of byte ends and wrong spans: what, ours, TRL's."""

    def plain() -> None:
        for side in sides:
            side._backend.encode_batch_fast(texts, add_special_tokens=False)

    def encode_ours() -> list[tuple[EncodedText, EncodedText]]:
        return list(zip(*(side.encode(texts) for side in sides), strict=True))

    def encode_theirs() -> list[tuple[Any, Any]]:
        return list(zip(*(encode(side._backend, texts) for side in sides), strict=True))

    ours = encode_ours()
    align(*ours[0])
    tokens = sum(len(one.ids) + len(other.ids) for one, other in ours) / 1e9
    whats = ["aligning, a token of either side", "ids and byte ends, over ids alone", "wrong spans"]
    try:
        theirs = encode_theirs()
    except (NotImplementedError, ValueError) as refused:
        alone, offsets, aligning = in_turns(plain, encode_ours, each(align, ours))
        told = [f"refused: {str(refused).partition(' (')[0]}", "refused", "refused"]
    else:
        by_offsets = [(one[1], other[1]) for one, other in theirs]
        alone, offsets, aligning, their_offsets, their_aligning = in_turns(
            plain, encode_ours, each(align, ours), encode_theirs, each(aligner, by_offsets)
        )
        told = [f"{their_aligning / tokens:.0f} ns", f"{their_offsets / alone:.2f} x"]
        told.append(their_wrong_spans(aligner, sides, theirs, texts))
    mine = [f"{aligning / tokens:.1f} ns", f"{offsets / alone:.2f} x", our_wrong_spans(sides, ours, texts)]
    return [list(line) for line in zip(whats, mine, told, strict=True)]


def main() -> None:
    """Measure and print."""
    folder = real_data() / "tokenizers"
    encode, aligner = trl()
    corpora = {"GSM8K": gsm8k(2000), **{name: made(name, 20) for name in ("number tables", "CJK", "emoji")}}
    sys.stdout.write(
        f"\n`{Path(__file__).name}` on {machine()}\n\n"
        f"| what, one core | xtk | TRL {VERSION}, GOLD |\n| --- | --- | --- |\n"
    )
    for one, other in PAIRS:
        sides = Tokenizer(folder / one), Tokenizer(folder / other)
        for corpus, texts in corpora.items():
            for what, mine, told in compare(encode, aligner, sides, texts):
                sys.stdout.write(f"| {corpus}, {one} x {other}: {what} | {mine} | {told} |\n")


if __name__ == "__main__":
    main()
