"""The data, as both sides read it."""

from __future__ import annotations

from collections.abc import Iterator

from xtk.doctor.case import Case, Finding, limit_of
from xtk.tokens.rewriting import rewriting
from xtk.tokens.sequence import left_out, sequences, told_rewritten
from xtk.tokens.statistics import Statistics, aligned

# Ours: in the pairs of docs/explanation/numbers.md over 99 % of the bytes are aligned.
ALIGNED = 0.9
WAYS = {"student": "truncate or skip", "teacher": "truncate, split or skip"}


def lengths(case: Case) -> Iterator[Finding]:
    """Compare documents with the contexts."""
    reading = case.read
    if not reading.numbers:
        return
    for number, side in enumerate(case.sides):
        limit, longest = limit_of(side, case.plan), reading.longest[number][0]
        figures = {"longest": longest[0], "limit": limit, "too_long": reading.too_long[number]}
        told = f"the longest of {_read(case)} has {longest[0]:,} tokens"
        if side.role == "teacher" and case.cache is not None:
            continue  # it has read them
        if limit is None:
            yield Finding("lengths", "note", f"{told}; the configuration tells no context", side.name, figures=figures)
        elif reading.too_long[number] and case.plan.long_documents == "refuse":
            command = "distill" if side.role == "student" else "cache-teacher"
            what = f"{reading.too_long[number]:,} of {_read(case)} are longer than {limit:,} tokens; {told}"
            hint = f"xtk {command} --long-documents {WAYS[side.role]}"
            yield Finding("lengths", "error", what, f"{side.name}, document {longest[1]}", hint, figures)
        elif reading.too_long[number]:
            what = f"{reading.too_long[number]:,} of {_read(case)}: --long-documents {case.plan.long_documents}; {told}"
            yield Finding("lengths", "warning", what, f"{side.name}, document {longest[1]}", figures=figures)
        else:
            yield Finding("lengths", "ok", f"{told}, of {limit:,} that it reads", side.name, figures=figures)


def _read(case: Case) -> str:
    reading = case.read
    return f"{'' if reading.whole else 'the first '}{reading.numbers:,} documents"


def spelled_tokens(case: Case) -> Iterator[Finding]:
    """Find data in which somebody has written special tokens as text, as templates write them."""
    for side in case.sides:
        names = list(side.tokenizer.vocabulary.special_tokens)
        found = [
            (at, name)
            for at, (document, _) in enumerate(case.read.documents)
            for name in names
            if name in document.text
        ]
        if found:
            share = len({at for at, _ in found}) / len(case.read.documents)
            what = f"{share:.0%} of the documents spell special tokens, such as {found[0][1]}, which xtk reads as text"
            hint = "conversations as messages, which each side's own template writes"
            yield Finding("spelled_tokens", "warning", what, side.name, hint, {"share": round(share, 6)})


def compression(case: Case) -> Iterator[Finding]:
    """Count tokens and bytes of both sides, and what of them is aligned."""
    reading = case.read
    if not reading.numbers:
        what = "without a cache or data, nothing is said of lengths, alignment and cost"
        yield Finding("compression", "note", what, hint="xtk doctor STUDENT TEACHER DATA")
        return
    sizes = [reading.bytes / max(tokens, 1) for tokens in reading.tokens]
    figures = {"student_bytes_per_token": round(sizes[0], 4), "teacher_bytes_per_token": round(sizes[1], 4),
               "documents": reading.numbers, "bytes": reading.bytes}  # fmt: skip
    what = (
        f"student {sizes[0]:.2f} bytes a token, teacher {sizes[1]:.2f}: the student reads "
        f"{reading.tokens[0] / max(reading.tokens[1], 1):.2f} tokens for one of the teacher's"
    )
    yield Finding("compression", "ok", what, _read(case), figures=figures)
    yield _alignment(case)
    for side in case.sides:
        texts = [document.text for document, _ in reading.documents if document.conversation is None]
        if warning := rewriting(side.tokenizer, texts).warning():
            yield Finding(
                "compression", "note", warning, side.name, "docs/explanation/alignment.md tells what it means"
            )


def _alignment(case: Case) -> Finding:
    documents = [document for document, _ in case.read.documents]
    statistics = Statistics(case.student.tokenizer, case.teacher.tokenizer)
    for group in aligned(documents, case.student.tokenizer, case.teacher.tokenizer):
        statistics.add(group)
    record = statistics.record()
    share, single = 1 - record["unaligned_share_of_bytes"], record["kinds"]["1:1"]["share_of_spans"]
    figures = {"aligned_share_of_bytes": share, "single_share_of_spans": single}
    # What stands in no span of a conversation is its template and what was not answered.
    low = share < ALIGNED and all(document.conversation is None for document in documents)
    what = f"{share:.1%} of the bytes are aligned; {single:.1%} of the spans are one token on each side"
    hint = "xtk align STUDENT TEACHER DATA --stats tells the worst documents" if low else ""
    where = f"{len(documents):,} documents"
    return Finding("alignment", "warning" if low else "ok", what, where, hint, figures)


def conversations(case: Case) -> Iterator[Finding]:
    """Count what the templates do not leave as it is, in the data."""
    talks = [document for document, _ in case.read.documents if document.conversation is not None]
    for side in case.sides:
        if not talks or side.tokenizer.template_fingerprint is None:
            continue
        counts = [left_out(*pair) for pair in zip(talks, sequences(side.tokenizer, talks), strict=True)]
        if sum(counts):
            yield Finding("conversations", "warning", told_rewritten(counts), side.name, "docs/how-to/conversations.md",
                          {"bytes": sum(counts)})  # fmt: skip
        else:
            yield Finding("conversations", "ok", f"{len(talks):,} conversations, all answers as they are", side.name)
