"""TRL's GOLD aligner on the same texts: its time a token and its wrong spans beside ours.

TRL is installed from the registry, without what it depends on, into a folder of its own (.nox/trl), at the first run.
"""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, gsm8k, real_data, report
from hard_texts import made

from xtk.tokens.alignment import align
from xtk.tokens.tokenizer import Tokenizer

VERSION = "1.16.0"
FOLDER = ROOT / ".nox" / "trl"
PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v1"))
ROUNDS = 3

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


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median time of some calls, and what the last one returned."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - started)
    return statistics.median(times), result


def wrong_spans(
    sides: tuple[Tokenizer, Tokenizer], ids: tuple[list[int], list[int]], groups: Groups, text: bytes
) -> int:
    """Count groups of tokens that spell different bytes on the two sides; text that no group spells is one more."""
    wrong, whole = 0, []
    for number, group in enumerate(groups):
        one, other = (
            b"".join(side.vocabulary.spellings[tokens[at]] for at in places)
            for side, tokens, places in zip(sides, ids, group, strict=True)
        )
        if number == 0:
            # Of " Anna" and "Anna", the text tells whose space it is.
            one, other = (side[side[:1] == b" " != text[:1] :] for side in (one, other))
        wrong += one != other
        whole.append(one)
    return wrong + (b"".join(whole) != text)


class Measured:
    """Seconds of tokenising with byte ends, seconds of aligning, spans, wrong spans, tokens."""

    def __init__(self, offsets: float, aligning: float, spans: int, wrong: int, tokens: int) -> None:
        self.offsets, self.aligning, self.spans, self.wrong, self.tokens = offsets, aligning, spans, wrong, tokens


def ours(sides: tuple[Tokenizer, Tokenizer], texts: list[str]) -> Measured:
    """Measure xtk."""
    offsets, (left, right) = seconds(lambda: [side.encode(texts) for side in sides])
    pairs = list(zip(left, right, strict=True))
    align(*pairs[0])
    aligning, spans = seconds(lambda: [align(*pair) for pair in pairs])
    wrong = sum(
        wrong_spans(
            sides,
            (one.ids.tolist(), other.ids.tolist()),
            [(list(range(s0, s1)), list(range(t0, t1))) for s0, s1, t0, t1 in found.tolist()],
            text.encode(),
        )
        for (one, other), found, text in zip(pairs, spans, texts, strict=True)
    )
    tokens = sum(len(one.ids) + len(other.ids) for one, other in pairs)
    return Measured(offsets, aligning, sum(map(len, spans)), wrong, tokens)


def theirs(
    encode: Callable[..., Any], aligner: Callable[..., Any], sides: tuple[Tokenizer, Tokenizer], texts: list[str]
) -> Measured:
    """Measure TRL.

    Raises:
        NotImplementedError: TRL refuses a tokenizer.
        ValueError: TRL cannot make sense of the offsets of a text.
    """
    offsets, (left, right) = seconds(lambda: [encode(side._backend, texts) for side in sides])
    aligning, groups = seconds(lambda: [aligner(one[1], other[1]) for one, other in zip(left, right, strict=True)])
    wrong = sum(
        wrong_spans(sides, (one[0], other[0]), list(zip(*found, strict=True)), text.encode())
        for one, other, found, text in zip(left, right, groups, texts, strict=True)
    )
    tokens = sum(len(one[0]) + len(other[0]) for one, other in zip(left, right, strict=True))
    return Measured(offsets, aligning, sum(len(found[0]) for found in groups), wrong, tokens)


def lines(name: str, plain: float, xtk: Measured, other: Measured | str) -> list[tuple[str, str, str]]:
    """Return the lines of the table for one corpus: ours, and TRL's in the last column."""
    if isinstance(other, str):
        told = [other] * 3
    else:
        told = [
            f"{1e9 * other.aligning / other.tokens:.0f} ns",
            f"{other.offsets / plain:.2f} x",
            f"{other.wrong:,} of {other.spans:,}",
        ]
    mine = [
        f"{1e9 * xtk.aligning / xtk.tokens:.1f} ns",
        f"{xtk.offsets / plain:.2f} x",
        f"{xtk.wrong:,} of {xtk.spans:,}",
    ]
    whats = ["aligning, a token of either side", "byte ends over plain tokenising", "wrong spans"]
    return [(f"{name}: {what}", one, told) for what, one, told in zip(whats, mine, told, strict=True)]


def main() -> None:
    """Measure and print."""
    folder = real_data() / "tokenizers"
    encode, aligner = trl()
    corpora = {"GSM8K": gsm8k(2000), **{name: made(name, 20) for name in ("number tables", "CJK", "emoji")}}
    rows = []
    for pair in PAIRS:
        sides = Tokenizer(Path(folder) / pair[0]), Tokenizer(Path(folder) / pair[1])
        for corpus, texts in corpora.items():
            plain, _ = seconds(
                lambda texts=texts, sides=sides: [
                    side._backend.encode_batch_fast(texts, add_special_tokens=False) for side in sides
                ]
            )
            other: Measured | str
            try:
                other = theirs(encode, aligner, sides, texts)
            except (NotImplementedError, ValueError) as refused:
                other = f"refused: {str(refused).partition('.')[0]}"
            rows += lines(f"{corpus}, {' x '.join(pair)}", plain, ours(sides, texts), other)
    rows.insert(0, ("(the columns)", "xtk", f"TRL {VERSION}, GOLD"))
    report(__file__, rows)


if __name__ == "__main__":
    main()
