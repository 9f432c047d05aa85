"""xtk's aligner compared with TRL's GOLD aligner on the same texts: time per token and wrong spans.

On the first run, TRL is installed from the registry, without its dependencies, into a separate folder (.nox/trl).
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

from hard_texts import generated_documents
from measurement import ROOT, gsm8k, machine, real_data

from xtk.text.alignment import align
from xtk.text.tokenizer import EncodedText, Tokenizer

VERSION = "1.16.0"
FOLDER = ROOT / ".nox" / "trl"
PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v1"))
REPEATS = 3

TokenizerPair = tuple[Tokenizer, Tokenizer]
Groups = list[tuple[list[int], list[int]]]


def trl() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return TRL's tokenization with byte offsets and its aligner, or exit with one line that names the reason."""
    if not (FOLDER / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER)]
        completed = subprocess.run([*command, f"trl=={VERSION}"], capture_output=True, text=True, check=False)
        if completed.returncode:
            raise SystemExit(f"skipped: trl {VERSION} cannot be installed: {completed.stderr.strip().splitlines()[-1]}")
    sys.path.insert(0, str(FOLDER))
    try:
        from trl.experimental.gold.gold_trainer import ULDLoss
        from trl.experimental.utils import encode_with_byte_offsets
    except ImportError as error:
        raise SystemExit(f"skipped: trl {VERSION} cannot be imported here: {error}") from None
    return encode_with_byte_offsets, ULDLoss._align_by_byte_offsets


def in_turns(*functions: Callable[[], object]) -> list[float]:
    """Return the median time of each function; they alternate, so that other load affects all of them."""
    times: list[list[float]] = [[] for _ in functions]
    gc.collect()
    gc.freeze()  # the other functions' objects are not garbage-collected while one is timed
    for _ in range(REPEATS):
        for function, seconds in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in times]


def for_each_pair(function: Callable[..., object], pairs: list[tuple[Any, Any]]) -> Callable[[], None]:
    """Return a function that calls another one with each pair and discards the results."""

    def loop() -> None:
        for one, other in pairs:
            function(one, other)

    return loop


def wrong_spans(sides: TokenizerPair, ids: tuple[list[int], list[int]], groups: Groups, text: bytes) -> int:
    """Return the number of groups whose tokens spell different bytes on the two sides.

    Plus one if the groups do not spell the text.
    """
    wrong, spellings = 0, []
    for number, group in enumerate(groups):
        one, other = (
            b"".join(side.vocabulary.bytes_by_id[tokens[at]] for at in positions)
            for side, tokens, positions in zip(sides, ids, group, strict=True)
        )
        if number == 0:
            # A leading space that the text does not have is ignored (" Anna" for "Anna").
            one, other = (side[side[:1] == b" " != text[:1] :] for side in (one, other))
        wrong += one != other
        spellings.append(one)
    return wrong + (b"".join(spellings) != text)


def xtk_wrong_spans(sides: TokenizerPair, pairs: list[tuple[EncodedText, EncodedText]], texts: list[str]) -> str:
    """Return the numbers of xtk's wrong spans and of all its spans, as text."""
    wrong = total = 0
    for (one, other), text in zip(pairs, texts, strict=True):
        spans = align(one, other).tolist()
        groups = [(list(range(s0, s1)), list(range(t0, t1))) for s0, s1, t0, t1 in spans]
        wrong += wrong_spans(sides, (one.ids.tolist(), other.ids.tolist()), groups, text.encode())
        total += len(spans)
    return f"{wrong:,} of {total:,}"


def trl_wrong_spans(
    aligner: Callable[..., Any], sides: TokenizerPair, pairs: list[tuple[Any, Any]], texts: list[str]
) -> str:
    """Return the numbers of TRL's wrong groups and of all its groups, as text."""
    wrong = total = 0
    for (one, other), text in zip(pairs, texts, strict=True):
        groups = list(zip(*aligner(one[1], other[1]), strict=True))
        wrong += wrong_spans(sides, (one[0], other[0]), groups, text.encode())
        total += len(groups)
    return f"{wrong:,} of {total:,}"


def compare(
    encode: Callable[..., Any], aligner: Callable[..., Any], sides: TokenizerPair, texts: list[str]
) -> list[list[str]]:
    """Return rows for the time of aligning, the time of byte ends, and wrong spans: label, xtk, TRL."""

    def encode_ids() -> None:
        for side in sides:
            side._backend.encode_batch_fast(texts, add_special_tokens=False)

    def encode_xtk() -> list[tuple[EncodedText, EncodedText]]:
        return list(zip(*(side.encode(texts) for side in sides), strict=True))

    def encode_trl() -> list[tuple[Any, Any]]:
        return list(zip(*(encode(side._backend, texts) for side in sides), strict=True))

    xtk_pairs = encode_xtk()
    align(*xtk_pairs[0])
    billion_tokens = sum(len(one.ids) + len(other.ids) for one, other in xtk_pairs) / 1e9
    labels = ["aligning, a token of either side", "ids and byte ends, over ids alone", "wrong spans"]
    try:
        trl_pairs = encode_trl()
    except (NotImplementedError, ValueError) as error:
        ids_seconds, xtk_offsets_seconds, xtk_align_seconds = in_turns(
            encode_ids, encode_xtk, for_each_pair(align, xtk_pairs)
        )
        trl_cells = [f"refused: {str(error).partition(' (')[0]}", "refused", "refused"]
    else:
        by_offsets = [(one[1], other[1]) for one, other in trl_pairs]
        ids_seconds, xtk_offsets_seconds, xtk_align_seconds, trl_offsets_seconds, trl_align_seconds = in_turns(
            encode_ids, encode_xtk, for_each_pair(align, xtk_pairs), encode_trl, for_each_pair(aligner, by_offsets)
        )
        trl_cells = [f"{trl_align_seconds / billion_tokens:.0f} ns", f"{trl_offsets_seconds / ids_seconds:.2f} x"]
        trl_cells.append(trl_wrong_spans(aligner, sides, trl_pairs, texts))
    xtk_cells = [
        f"{xtk_align_seconds / billion_tokens:.1f} ns",
        f"{xtk_offsets_seconds / ids_seconds:.2f} x",
        xtk_wrong_spans(sides, xtk_pairs, texts),
    ]
    return [list(row) for row in zip(labels, xtk_cells, trl_cells, strict=True)]


def main() -> None:
    """Measure and print."""
    folder = real_data() / "tokenizers"
    encode, aligner = trl()
    corpora = {
        "GSM8K": gsm8k(2000),
        **{name: generated_documents(name, 20) for name in ("number tables", "CJK", "emoji")},
    }
    sys.stdout.write(
        f"\n`{Path(__file__).name}` on {machine()}\n\n"
        f"| what, one core | xtk | TRL {VERSION}, GOLD |\n| --- | --- | --- |\n"
    )
    for one, other in PAIRS:
        sides = Tokenizer(folder / one), Tokenizer(folder / other)
        for corpus, texts in corpora.items():
            for label, xtk_cell, trl_cell in compare(encode, aligner, sides, texts):
                sys.stdout.write(f"| {corpus}, {one} x {other}: {label} | {xtk_cell} | {trl_cell} |\n")


if __name__ == "__main__":
    main()
