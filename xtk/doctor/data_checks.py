"""Checks of the data with both tokenizers: lengths, special tokens in text, alignment and conversations."""

from __future__ import annotations

from collections.abc import Iterator

from xtk.doctor.doctor_inputs import DoctorInputs, Finding, max_document_tokens
from xtk.text.alignment_statistics import AlignmentStatistics, align_documents
from xtk.text.normalization_changes import count_normalization_loss
from xtk.text.token_sequence import count_lost_bytes, format_lost_bytes, tokenize_documents

# Measured: over 99 % of the bytes are aligned in the pairs of docs/explanation/numbers.md.
MIN_ALIGNED_FRACTION = 0.9
LONG_DOCUMENT_HINTS = {"student": "distill --long-documents truncate or skip",
                       "teacher": "cache-teacher --long-documents truncate, split or skip"}  # fmt: skip


def document_lengths(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare document lengths with the models' context lengths."""
    reading = inputs.data_sample
    if not reading.num_documents:
        return
    for number, side in enumerate(inputs.models):
        limit, longest = max_document_tokens(side, inputs.plan), reading.longest[number]
        too_long, choice = reading.num_too_long[number], inputs.plan.long_documents
        figures = {"longest_tokens": longest[0], "limit_tokens": limit, "documents_too_long": too_long}
        message = f"the longest of {_documents_read(inputs)} has {longest[0]:,} tokens"
        if side.role == "teacher" and inputs.cache is not None:
            continue  # it has scored them already
        if limit is None:
            yield Finding("note", f"{message}; config.json has no context length", side.name, figures=figures)
        elif not too_long:
            yield Finding("ok", f"{message} (limit {limit:,})", side.name, figures=figures)
        else:
            what, where = f"{too_long:,} of {_documents_read(inputs)} are ", f"{side.name}, document {longest[1]}"
            if choice == "refuse":
                hint = f"use xtk {LONG_DOCUMENT_HINTS[side.role]}"
                yield Finding("error", f"{what}longer than {limit:,} tokens; {message}", where, hint, figures)
            else:
                what += f"too long: --long-documents {choice}; {message}"
                yield Finding("warning", what, where, figures=figures)


def _documents_read(inputs: DoctorInputs) -> str:
    reading = inputs.data_sample
    return f"{'' if reading.is_complete else 'the first '}{reading.num_documents:,} documents"


def special_tokens_in_text(inputs: DoctorInputs) -> Iterator[Finding]:
    """Find texts that contain the strings of special tokens, as rendered chats do."""
    texts = [document.text for document in inputs.data_sample.documents]
    for side in inputs.models:
        names = list(side.tokenizer.vocabulary.special_tokens)
        listed = [next((name for name in names if name in text), "") for text in texts]
        if any(listed):
            fraction, example = sum(map(bool, listed)) / len(texts), next(filter(None, listed))
            what = f"{fraction:.0%} of the documents contain special tokens such as {example}, read by xtk as text"
            hint = "give conversations as messages, so that each model's chat template renders them"
            yield Finding("warning", what, side.name, hint, {"document_fraction": round(fraction, 6)})


def compression(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report bytes per token of both tokenizers, and the aligned fraction."""
    reading = inputs.data_sample
    if not reading.num_documents:
        what = "lengths, alignment, cost, reasoning and tools are not checked without a cache or data"
        yield Finding("note", what, hint="run xtk doctor STUDENT TEACHER DATA")
        return
    sizes = [reading.num_bytes / max(tokens, 1) for tokens in reading.num_tokens]
    figures = {"student_bytes_per_token": round(sizes[0], 4), "teacher_bytes_per_token": round(sizes[1], 4),
               "documents": reading.num_documents, "bytes": reading.num_bytes}  # fmt: skip
    what = (
        f"bytes per token: student {sizes[0]:.2f}, teacher {sizes[1]:.2f}; "
        f"{reading.num_tokens[0] / max(reading.num_tokens[1], 1):.2f} student tokens per teacher token"
    )
    yield Finding("ok", what, _documents_read(inputs), figures=figures)
    yield _alignment_finding(inputs)
    for side in inputs.models:
        texts = [document.text for document in reading.documents if document.conversation is None]
        if warning := count_normalization_loss(side.tokenizer, texts).warning():
            yield Finding("note", warning, side.name, "see docs/explanation/alignment.md")


def _alignment_finding(inputs: DoctorInputs) -> Finding:
    documents = inputs.data_sample.documents
    statistics = AlignmentStatistics(inputs.student.tokenizer, inputs.teacher.tokenizer)
    for group in align_documents(documents, inputs.student.tokenizer, inputs.teacher.tokenizer):
        statistics.add(group)
    record = statistics.to_json()
    aligned, one_to_one = 1 - record["unaligned_fraction"], record["span_kinds"]["1:1"]["span_fraction"]
    figures = {"aligned_byte_fraction": aligned, "one_to_one_span_fraction": one_to_one}
    # In conversations, template text and untrained messages are in no span.
    low = aligned < MIN_ALIGNED_FRACTION and not inputs.data_sample.conversations
    what = f"{aligned:.1%} of the bytes are aligned; {one_to_one:.1%} of the spans are one token to one token"
    hint = "run xtk align STUDENT TEACHER DATA --stats to list the worst documents" if low else ""
    return Finding("warning" if low else "ok", what, f"{len(documents):,} documents", hint, figures, "alignment")


def conversations(inputs: DoctorInputs) -> Iterator[Finding]:
    """Count bytes of trained messages that the chat templates change."""
    documents = inputs.data_sample.conversations
    for side in inputs.models:
        if not documents or not side.has_chat_template:
            continue
        sequences = tokenize_documents(side.tokenizer, documents)
        counts = [count_lost_bytes(*pair) for pair in zip(documents, sequences, strict=True)]
        if total := sum(counts):
            hint = "see docs/how-to/conversations.md"
            yield Finding("warning", format_lost_bytes(counts), side.name, hint, {"bytes": total})
        else:
            yield Finding("ok", f"{len(documents):,} conversations, no answer is changed", side.name)
