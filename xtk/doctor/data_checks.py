"""The data, as both sides read it."""

from __future__ import annotations

from collections.abc import Iterator

from xtk.doctor.inputs import DoctorInputs, Finding, max_document_tokens
from xtk.tokens.alignment_statistics import AlignmentStatistics, align_documents
from xtk.tokens.normalization_loss import count_normalization_loss
from xtk.tokens.token_sequence import count_lost_bytes, format_lost_bytes, tokenize_documents

# Ours: in the pairs of docs/explanation/numbers.md over 99 % of the bytes are aligned.
MIN_ALIGNED_FRACTION = 0.9
LONG_DOCUMENT_HINTS = {"student": "truncate or skip", "teacher": "truncate, split or skip"}


def document_lengths(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare documents with the contexts."""
    reading = inputs.data_sample
    if not reading.num_documents:
        return
    for number, side in enumerate(inputs.models):
        limit, longest = max_document_tokens(side, inputs.plan), reading.longest[number][0]
        figures = {
            "longest_tokens": longest[0],
            "limit_tokens": limit,
            "documents_too_long": reading.num_too_long[number],
        }
        told = f"the longest of {_documents_read(inputs)} has {longest[0]:,} tokens"
        if side.role == "teacher" and inputs.cache is not None:
            continue  # it has read them
        if limit is None:
            yield Finding(
                "document_lengths", "note", f"{told}; the configuration tells no context", side.name, figures=figures
            )
        elif reading.num_too_long[number] and inputs.plan.long_documents == "refuse":
            command = "distill" if side.role == "student" else "cache-teacher"
            what = f"{reading.num_too_long[number]:,} of {_documents_read(inputs)} "
            what += f"are longer than {limit:,} tokens; {told}"
            hint = f"xtk {command} --long-documents {LONG_DOCUMENT_HINTS[side.role]}"
            yield Finding("document_lengths", "error", what, f"{side.name}, document {longest[1]}", hint, figures)
        elif reading.num_too_long[number]:
            what = f"{reading.num_too_long[number]:,} of {_documents_read(inputs)}: "
            what += f"--long-documents {inputs.plan.long_documents}; {told}"
            yield Finding("document_lengths", "warning", what, f"{side.name}, document {longest[1]}", figures=figures)
        else:
            yield Finding("document_lengths", "ok", f"{told}, of {limit:,} that it reads", side.name, figures=figures)


def _documents_read(case: DoctorInputs) -> str:
    reading = case.data_sample
    return f"{'' if reading.is_complete else 'the first '}{reading.num_documents:,} documents"


def special_tokens_in_text(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find data in which somebody has written special tokens as text, as templates write them."""
    for side in inputs.models:
        names = list(side.tokenizer.vocabulary.special_tokens)
        found = [
            (at, name)
            for at, (document, _) in enumerate(inputs.data_sample.documents)
            for name in names
            if name in document.text
        ]
        if found:
            share = len({at for at, _ in found}) / len(inputs.data_sample.documents)
            what = f"{share:.0%} of the documents spell special tokens, such as {found[0][1]}, which xtk reads as text"
            hint = "conversations as messages, which each side's own template writes"
            yield Finding(
                "special_tokens_in_text", "warning", what, side.name, hint, {"document_fraction": round(share, 6)}
            )


def compression(inputs: DoctorInputs) -> Iterator[Finding]:
    """Count tokens and bytes of both sides, and what of them is aligned."""
    reading = inputs.data_sample
    if not reading.num_documents:
        what = "without a cache or data, nothing is said of lengths, alignment and cost"
        yield Finding("compression", "note", what, hint="xtk doctor STUDENT TEACHER DATA")
        return
    sizes = [reading.num_bytes / max(tokens, 1) for tokens in reading.num_tokens]
    figures = {"student_bytes_per_token": round(sizes[0], 4), "teacher_bytes_per_token": round(sizes[1], 4),
               "documents": reading.num_documents, "bytes": reading.num_bytes}  # fmt: skip
    what = (
        f"student {sizes[0]:.2f} bytes a token, teacher {sizes[1]:.2f}: the student reads "
        f"{reading.num_tokens[0] / max(reading.num_tokens[1], 1):.2f} tokens for one of the teacher's"
    )
    yield Finding("compression", "ok", what, _documents_read(inputs), figures=figures)
    yield _alignment_finding(inputs)
    for side in inputs.models:
        texts = [document.text for document, _ in reading.documents if document.conversation is None]
        if warning := count_normalization_loss(side.tokenizer, texts).warning():
            yield Finding(
                "compression", "note", warning, side.name, "docs/explanation/alignment.md tells what it means"
            )


def _alignment_finding(case: DoctorInputs) -> Finding:
    documents = [document for document, _ in case.data_sample.documents]
    statistics = AlignmentStatistics(case.student.tokenizer, case.teacher.tokenizer)
    for group in align_documents(documents, case.student.tokenizer, case.teacher.tokenizer):
        statistics.add(group)
    record = statistics.to_json()
    share, single = 1 - record["unaligned_fraction"], record["span_kinds"]["1:1"]["span_fraction"]
    figures = {"aligned_byte_fraction": share, "one_to_one_span_fraction": single}
    # What stands in no span of a conversation is its template and what was not answered.
    low = share < MIN_ALIGNED_FRACTION and all(document.conversation is None for document in documents)
    what = f"{share:.1%} of the bytes are aligned; {single:.1%} of the spans are one token on each side"
    hint = "xtk align STUDENT TEACHER DATA --stats tells the worst documents" if low else ""
    where = f"{len(documents):,} documents"
    return Finding("alignment", "warning" if low else "ok", what, where, hint, figures)


def conversations(inputs: DoctorInputs) -> Iterator[Finding]:
    """Count what the templates do not leave as it is, in the data."""
    talks = [document for document, _ in inputs.data_sample.documents if document.conversation is not None]
    for side in inputs.models:
        if not talks or side.tokenizer.template_fingerprint is None:
            continue
        counts = [
            count_lost_bytes(*pair) for pair in zip(talks, tokenize_documents(side.tokenizer, talks), strict=True)
        ]
        if sum(counts):
            yield Finding("conversations", "warning", format_lost_bytes(counts), side.name,
                "docs/how-to/conversations.md",
                          {"bytes": sum(counts)})  # fmt: skip
        else:
            yield Finding("conversations", "ok", f"{len(talks):,} conversations, all answers as they are", side.name)
