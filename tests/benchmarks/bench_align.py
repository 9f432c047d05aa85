"""Alignment of GSM8K, llama3 x qwen: calls for each document, one thread, beside tokenising the same text."""

from __future__ import annotations

import os

os.environ["RAYON_NUM_THREADS"] = "1"

from common import gsm8k, median_seconds, real_data, report

from xtk.tokens.alignment import align
from xtk.tokens.tokenizer import Tokenizer


def main() -> None:
    """Measure and print."""
    texts = gsm8k()
    student, teacher = (Tokenizer(real_data() / "tokenizers" / name) for name in ("llama3", "qwen"))
    left, right = student.encode(texts), teacher.encode(texts)
    tokens = sum(len(side.ids) for side in (*left, *right))
    pairs = list(zip(left, right, strict=True))
    aligning = median_seconds(lambda: [align(*pair) for pair in pairs], 11)
    backends = [side._backend for side in (student, teacher)]
    tokenising = median_seconds(
        lambda: [backend.encode_batch_fast(texts, add_special_tokens=False) for backend in backends], 3
    )
    whole = median_seconds(lambda: [side.encode(texts) for side in (student, teacher)], 3)
    wrong = 0
    for (one, other), text in zip(pairs, texts, strict=True):
        spans = align(one, other)
        wrong += int((one.ends[spans[:, 1] - 1] != other.ends[spans[:, 3] - 1]).sum())
        wrong += int(len(text.encode()) != one.ends[spans[-1, 1] - 1])
    report(
        __file__,
        [
            ("alignment of GSM8K, tokens of both sides a second, one core", f"{tokens / aligning / 1e6:.0f} M", "50 M"),
            ("its time over the time of tokenising, one core", f"{aligning / tokenising:.2%}", "5 %"),
            ("ids with byte ends over ids alone, one core", f"{whole / tokenising:.2f} x", "(none)"),
            (f"spans of unequal bytes, of {sum(len(align(*pair)) for pair in pairs):,}", str(wrong), "0"),
        ],
    )


if __name__ == "__main__":
    main()
