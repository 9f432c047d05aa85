"""Time of `--method cooccurrence` on GSM8K, llama3 x qwen: counting relative to tokenizing with both tokenizers.

Both in one process, alternating, all cores; the median of the ratios.
"""

from __future__ import annotations

import statistics
import time

from measurement import gsm8k, real_data, report

from xtk.projection.methods.cooccurrence import CooccurrenceCounter, count_cooccurrences
from xtk.text.tokenizer import Tokenizer

REPEATS = 7


def main() -> None:
    """Measure and print."""
    texts = gsm8k()
    student, teacher = (Tokenizer(real_data() / "tokenizers" / name) for name in ("llama3", "qwen"))
    list(count_cooccurrences(CooccurrenceCounter(student, teacher), texts[:100]))
    tokenizing, counting, ratios, cpu_ratios = [], [], [], []
    for _ in range(REPEATS):
        started, cpu_started = time.perf_counter(), time.process_time()
        for side in (student, teacher):
            side._backend.encode_batch_fast(texts, add_special_tokens=False)
        middle, cpu_middle = time.perf_counter(), time.process_time()
        counter = CooccurrenceCounter(student, teacher)
        list(count_cooccurrences(counter, texts))
        ended, cpu_ended = time.perf_counter(), time.process_time()
        tokenizing.append(middle - started)
        counting.append(ended - middle)
        ratios.append(counting[-1] / tokenizing[-1])
        cpu_ratios.append((cpu_ended - cpu_middle) / (cpu_middle - cpu_started))
    counts = counter.to_counts(len(texts), "")
    seconds = f"({statistics.median(counting):.2f} s; tokenizing {statistics.median(tokenizing):.2f} s)"
    report(
        __file__,
        [
            ("counting over tokenizing twice, seconds", f"{statistics.median(ratios):.2f} x {seconds}", "1.2 x"),
            ("the same, processor time", f"{statistics.median(cpu_ratios):.2f} x", "(none)"),
            ("spans counted, different pairs", f"{counts.counts.sum():,}, {len(counts.counts):,}", "(none)"),
        ],
    )


if __name__ == "__main__":
    main()
