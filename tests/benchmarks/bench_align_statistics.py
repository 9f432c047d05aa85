"""What `xtk align --stats` costs over a corpus, beside tokenising the corpus twice; all cores, times in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from hard_texts import made, wikitext
from measurement import gsm8k, real_data, report

from xtk.commands.alignment_html import alignment_page
from xtk.tokens.alignment_statistics import BATCH_DOCUMENTS, AlignmentStatistics, align_documents
from xtk.tokens.document import Document
from xtk.tokens.tokenizer import Tokenizer

PAIRS = (("llama3", "qwen"), ("llama3", "mistral-v1"))
ROUNDS = 5


def groups(texts: list[str]) -> Iterator[list[str]]:
    """Yield as many texts as the statistics take at once."""
    for at in range(0, len(texts), BATCH_DOCUMENTS):
        yield texts[at : at + BATCH_DOCUMENTS]


def tokenise_twice(student: Tokenizer, teacher: Tokenizer, texts: list[str]) -> None:
    """Tokenise with both sides, and do nothing else."""
    for group in groups(texts):
        for side in (student, teacher):
            side._backend.encode_batch_fast(group, add_special_tokens=False)


def count(student: Tokenizer, teacher: Tokenizer, documents: list[Document]) -> AlignmentStatistics:
    """Do as the command does."""
    counts = AlignmentStatistics(student, teacher)
    for group in align_documents(documents, student, teacher):
        counts.add(group)
    return counts


def write(counts: AlignmentStatistics, student: Tokenizer, teacher: Tokenizer) -> bytes:
    """Write a page of the worst documents."""
    return "".join(alignment_page(counts.to_json(), counts.worst_documents, student, teacher, order="worst")).encode()


def both(work: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Return the seconds and the processor seconds of one call."""
    started, begun = time.perf_counter(), time.process_time()
    work(*arguments)
    return time.perf_counter() - started, time.process_time() - begun


def main() -> None:
    """Measure and print."""
    rows = []
    corpora = {"GSM8K": gsm8k(), "WikiText-2": wikitext(), "number tables": made("number tables", 200)}
    for one, other in PAIRS:
        sides = [Tokenizer(real_data() / "tokenizers" / name) for name in (one, other)]
        for name, texts in corpora.items():
            documents = [Document.from_text(text) for text in texts]
            count(*sides, documents[:100])  # compiles or loads what is compiled
            times = [(both(tokenise_twice, *sides, texts), both(count, *sides, documents)) for _ in range(ROUNDS)]
            seconds, processor = (statistics.median(whole[at] / alone[at] for alone, whole in times) for at in range(2))
            rows += [
                (f"statistics of {name}, {one} x {other}, over tokenising it twice", f"{seconds:.2f} x", "1.1 x"),
                (f"{name}, {one} x {other}: the same in time of the processors", f"{processor:.2f} x", "(none)"),
            ]
    sides = [Tokenizer(real_data() / "tokenizers" / name) for name in PAIRS[0]]
    counts = AlignmentStatistics(*sides, num_worst=20)
    for group in align_documents(map(Document.from_text, wikitext()), *sides):
        counts.add(group)
    size = len(write(counts, *sides))
    seconds = statistics.median(both(write, counts, *sides)[0] for _ in range(5))
    rows.append((f"writing a page of {size / 1e6:.1f} MB", f"{seconds:.2f} s", "(none)"))
    report(__file__, rows)


if __name__ == "__main__":
    main()
