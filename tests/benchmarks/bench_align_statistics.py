"""Time of `xtk align --stats` over a corpus, relative to tokenizing it twice; all cores, alternating."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from hard_texts import generated_documents, wikitext
from measurement import gsm8k, real_data, report

from xtk.pages.alignment_html import alignment_page
from xtk.text.alignment import BATCH_TEXTS
from xtk.text.alignment_statistics import AlignmentStatistics, align_documents
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer

PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v1"))
REPEATS = 5


def groups(texts: list[str]) -> Iterator[list[str]]:
    """Yield the texts in batches of the size that the statistics process at once."""
    for at in range(0, len(texts), BATCH_TEXTS):
        yield texts[at : at + BATCH_TEXTS]


def tokenize_twice(student: Tokenizer, teacher: Tokenizer, texts: list[str]) -> None:
    """Tokenize with both tokenizers, and do nothing else."""
    for group in groups(texts):
        for side in (student, teacher):
            side._backend.encode_batch_fast(group, add_special_tokens=False)


def count_statistics(student: Tokenizer, teacher: Tokenizer, documents: list[Document]) -> AlignmentStatistics:
    """Count as the command does."""
    counts = AlignmentStatistics(student, teacher)
    for group in align_documents(documents, student, teacher):
        counts.add(group)
    return counts


def write_page(counts: AlignmentStatistics, student: Tokenizer, teacher: Tokenizer) -> bytes:
    """Return an HTML page of the worst documents."""
    return "".join(alignment_page(counts.to_json(), counts.worst_documents, student, teacher, order="worst")).encode()


def time_of_call(function: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Return the wall time and the CPU time of one call."""
    started, cpu_started = time.perf_counter(), time.process_time()
    function(*arguments)
    return time.perf_counter() - started, time.process_time() - cpu_started


def main() -> None:
    """Measure and print."""
    rows = []
    corpora = {"GSM8K": gsm8k(), "WikiText-2": wikitext(), "number tables": generated_documents("number tables", 200)}
    for one, other in PAIRS:
        student, teacher = (Tokenizer(real_data() / "tokenizers" / name) for name in (one, other))
        for name, texts in corpora.items():
            documents = [Document.from_text(text) for text in texts]
            count_statistics(student, teacher, documents[:100])  # compiles the kernels, or loads compiled ones
            times = [
                (
                    time_of_call(tokenize_twice, student, teacher, texts),
                    time_of_call(count_statistics, student, teacher, documents),
                )
                for _ in range(REPEATS)
            ]
            seconds, cpu_seconds = (
                statistics.median(counting[at] / tokenizing[at] for tokenizing, counting in times) for at in range(2)
            )
            rows += [
                (f"statistics of {name}, {one} x {other}, over tokenizing it twice", f"{seconds:.2f} x", "1.1 x"),
                (f"{name}, {one} x {other}: the same in time of the processors", f"{cpu_seconds:.2f} x", "(none)"),
            ]
    sides = [Tokenizer(real_data() / "tokenizers" / name) for name in PAIRS[0]]
    counts = AlignmentStatistics(*sides, num_worst=20)
    for group in align_documents(map(Document.from_text, wikitext()), *sides):
        counts.add(group)
    size = len(write_page(counts, *sides))
    seconds = statistics.median(time_of_call(write_page, counts, *sides)[0] for _ in range(5))
    rows.append((f"writing a page of {size / 1e6:.1f} MB", f"{seconds:.2f} s", "(none)"))
    report(__file__, rows)


if __name__ == "__main__":
    main()
