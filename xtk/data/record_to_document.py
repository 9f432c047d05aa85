"""Conversion of dataset records to documents: the supported columns and their meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import canonical_json
from xtk.name_registry import nearest_name
from xtk.text.chat.parts import replace_surrogates
from xtk.text.document import TRAIN_FLAG_KEYS, Conversation, Document, Segment
from xtk.text.document_token_ids import SampledTokens
from xtk.untrusted_json import parse_json

MASK_FIELDS = (
    "completion_mask",
    "assistant_masks",
    "loss_mask",
)  # names of TRL, of transformers, and of other trainers
RECORD_FIELDS = (
    "messages", "tools", "text", "prompt", "completion", "teacher_prompt",
    "input_ids", "attention_mask", "labels", *MASK_FIELDS, "candidate_ids", "segments",
    "student_ids", "sampled_mask", "student_logprobs", "student_tokenizer", "student_template", "advantage", "complete",
)  # fmt: skip
# Fields that are plain text in CSV; other fields are JSON there.
TEXT_FIELDS = ("text", "prompt", "completion", "teacher_prompt", "student_tokenizer", "student_template", "route")
OPT_IN_FIELDS = ("weight", "route")  # read only from the column that an option names
CONTENT_FIELDS = {
    "messages": ("messages",),
    "segments": ("segments",),
    "text": ("text",),
    "prompt and completion": ("prompt", "completion"),
    "input_ids": ("input_ids",),
}
IGNORE_INDEX = -100  # untrained labels, the default of PyTorch's cross-entropy
MAX_WEIGHT = 1e12  # of a document: sums of larger weights are not finite in float32
ROLLOUT_CHECKSUM = "rollout_checksum"
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
}  # roles of the ShareGPT format
_RECORD_HINT = "correct this document in the data, or remove it"

Record = Mapping[str, Any]


def record_to_document(
    record: Record,  # {column: value}
    columns: Mapping[str, str],  # {field: column} for fields with another column name
    where: str,  # source and number of the record, for messages
) -> Document:
    """Return the document in a record."""
    check_rollout_checksum(record, where)
    row = _RecordReader(record, columns, where)
    content = _content_kind(row)
    try:
        if content == "input_ids":
            document = Document.from_teacher_ids(*_ids_and_trained(row))
        elif content == "segments":
            document = Document(tuple(_segments(row["segments"])))
        else:
            document = _text_or_conversation(
                [row[field] for field in CONTENT_FIELDS[content]], row, CONTENT_FIELDS[content]
            )
        document = _with_candidate_ids(_with_teacher_prompt(document, row), row)
        return _with_sampled_tokens(_with_weight_and_route(document, row), row)
    except ValueError as failure:
        raise XtkError(str(failure), where=where, hint=_RECORD_HINT) from None


def record_to_prompt(record: Record, columns: Mapping[str, str], where: str) -> Document:
    """Return the prompt of a record as a document without trained tokens, for generation.

    The prompt is the first that exists of: `prompt`; `messages`, without a last message of the assistant; `text`.

    Args:
        record: {column: value}.
        columns: {field: column} for fields with another column name.
        where: source and number of the record, for messages.
    """
    row = _RecordReader(record, columns, where)
    fields = [field for field in ("prompt", "messages", "text") if field in row and row[field] is not None]
    requested = [field for field in ("prompt", "messages", "text") if field in columns]
    if requested and requested[0] not in row:
        raise row.missing_column_error(requested[0])
    if not requested and not fields:
        raise XtkError(
            "this document has no column prompt, messages or text; its columns: "
            f"{', '.join(map(str, record)) or 'none'}",
            where=where,
            hint="use --columns prompt=COLUMN, messages=COLUMN or text=COLUMN",
        )
    field = (requested or fields)[0]
    try:
        document = _text_or_conversation([row[field]], row, (field,))
        if document.conversation is None:
            document = Document((Segment("prompt", document.text, False),))
        else:
            document = _without_last_answer(document, document.conversation)
        return _with_weight_and_route(_with_teacher_prompt(document, row), row)
    except ValueError as failure:
        raise XtkError(str(failure), where=where, hint=_RECORD_HINT) from None


def _without_last_answer(document: Document, conversation: Conversation) -> Document:
    """Return a conversation without a last message of the assistant, and without trained tokens."""
    messages = list(conversation.messages)
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("the conversation has no message before the assistant's reply; add a user message")
    count = conversation.num_parts(len(messages))
    segments = tuple(replace(segment, train=False) for segment in document.segments[:count])
    return Document(segments, conversation=replace(conversation, messages=tuple(messages)))


class _RecordReader:
    """Access to the columns of a record by field name."""

    def __init__(self, record: Record, columns: Mapping[str, str], where: str) -> None:
        self.record, self.columns, self.where = record, columns, where

    def column_name(self, field: str) -> str:
        """Return the column of a field."""
        return self.columns.get(field, field)

    def __contains__(self, field: str) -> bool:
        return self.column_name(field) in self.record

    def __getitem__(self, field: str) -> Any:
        return self.record[self.column_name(field)]

    def get(self, field: str) -> Any:
        """Return the value of a field; None without its column."""
        if field in self.columns and field not in self:
            raise self.missing_column_error(field)
        return self.record.get(self.column_name(field))

    def missing_column_error(self, field: str) -> XtkError:
        """Return the error for a column that `--columns` names and that does not exist."""
        name, known = self.column_name(field), list(map(str, self.record))
        near = nearest_name(name, known)
        return XtkError(
            f"this document has no column {name}; its columns: {', '.join(known) or 'none'}"
            + (f"; did you mean {near}?" if near else ""),
            where=self.where,
            hint=_missing_column_hint(field),
        )


def _missing_column_hint(field: str) -> str:
    if any(field in fields for fields in CONTENT_FIELDS.values()):
        return f"use --columns {field}=COLUMN with one of these columns"
    if field in OPT_IN_FIELDS:
        return f"add this column to every document, or name another one with --{field}-column"
    return f"add this column to every document, with null where there is no {field}"


def _content_kind(row: _RecordReader) -> str:
    """Return the key of CONTENT_FIELDS to read from a record; fields named in `--columns` take precedence."""
    requested = {field for fields in CONTENT_FIELDS.values() for field in fields if field in row.columns}
    kinds = [name for name, fields in CONTENT_FIELDS.items() if requested.intersection(fields)]
    there = [name for name, fields in CONTENT_FIELDS.items() if all(field in row for field in fields)]
    if not requested:
        kinds = [name for name in there if any(row[field] is not None for field in CONTENT_FIELDS[name])] or there
    if "input_ids" in kinds and len(kinds) > 1:
        raise XtkError(
            f"this document has {' and '.join(kinds)}, but xtk reads only one of them; --columns selects it",
            where=row.where,
            hint=f"to use the teacher's token ids: --columns input_ids={row.column_name('input_ids')}; "
            "to tokenize the text again: --columns "
            + ",".join(f"{field}={row.column_name(field)}" for field in CONTENT_FIELDS[kinds[0]]),
        )
    if kinds and kinds[0] not in there:
        raise row.missing_column_error(next(field for field in CONTENT_FIELDS[kinds[0]] if field not in row))
    if not kinds:
        raise XtkError(
            "this document has no column text, messages, prompt and completion, or input_ids; its columns: "
            f"{', '.join(map(str, row.record)) or 'none'}",
            where=row.where,
            hint="use --columns text=COLUMN, messages=COLUMN, prompt=COLUMN,completion=COLUMN or input_ids=COLUMN",
        )
    return kinds[0]


def _text_or_conversation(values: list[Any], row: _RecordReader, fields: tuple[str, ...]) -> Document:
    if fields == ("messages",) and isinstance(values[0], str):
        values = [_from_json(values[0], row.column_name("messages"), row.where)]
        if not isinstance(values[0], list):
            raise XtkError(
                f"the column {row.column_name('messages')} must be a list of messages, or its JSON text",
                where=row.where,
                hint='write, for example, [{"role": "user", "content": "..."}]',
            )
    if all(isinstance(value, list) for value in values):
        return _conversation(values, row)
    for field, value in zip(fields, values, strict=True):
        if not isinstance(value, str):
            raise XtkError(
                f"the column {row.column_name(field)} must be text, not {_json_type(value)}",
                where=row.where,
                hint=f"correct this document, or use --columns {field}=COLUMN to select another column",
            )
    return Document.from_text(values[0]) if len(values) == 1 else Document.from_completion(*values)


def _conversation(parts: list[list[Any]], row: _RecordReader) -> Document:
    """Return a document from one list of messages, or from the messages of a prompt and of its completion."""
    given = len(parts[0]) if len(parts) > 1 else 0
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _from_json(tools, "tools", row.where) if tools.strip() else None
    if isinstance(tools, list):  # a list of JSON texts: tables cannot store objects of different shapes
        tools = [_from_json(tool, "tools", row.where) if _is_object_text(tool) else tool for tool in tools]
    if tools is not None and not isinstance(tools, list):
        raise XtkError(
            f"the column {row.column_name('tools')} must be a list of tool descriptions, not {_json_type(tools)}",
            where=row.where,
            hint='write, for example, [{"type": "function", "function": {"name": "..."}}]',
        )
    messages = [_normalized_message(message) for part in parts for message in part]
    return Document.from_messages(messages, tools=json_value(tools) or None, num_prompt_messages=given)


def _with_teacher_prompt(document: Document, row: _RecordReader) -> Document:
    prompt = row.get("teacher_prompt")
    if prompt is None:
        return document
    if isinstance(prompt, list):
        return document.with_teacher_prompt([_normalized_message(message) for message in prompt])
    if not isinstance(prompt, str):
        raise ValueError(
            f"the column {row.column_name('teacher_prompt')} must be text or a list of messages, "
            f"not {_json_type(prompt)}"
        )
    return document.with_teacher_prompt(prompt)


def _with_candidate_ids(document: Document, row: _RecordReader) -> Document:
    lists = row.get("candidate_ids")
    if lists is None:
        return document
    if not isinstance(lists, list) or not all(isinstance(ids, list) for ids in lists):
        raise ValueError(
            f"the column {row.column_name('candidate_ids')} must be a list of lists of token ids, one list per teacher "
            "token that is scored (all trained tokens but the first token)"
        )
    return document.with_candidate_ids(lists)


def _segments(parts: Any) -> Iterator[Segment]:
    """Yield the segments of a document from the column `segments`."""
    if not isinstance(parts, list) or not parts:
        raise ValueError(
            'the column segments must be a non-empty list of objects {"role": ..., "text": ..., "train": true}'
        )
    for part in parts:
        role, text, train = (
            (part.get(key) for key in ("role", "text", "train")) if isinstance(part, dict) else [None] * 3
        )
        if not isinstance(role, str) or not isinstance(text, str) or not isinstance(train, bool):
            raise ValueError(
                f'each segment must be an object {{"role": "...", "text": "...", "train": true}}; got {str(part)[:60]}'
            )
        yield Segment(replace_surrogates(role), replace_surrogates(text), train)


def rollout_checksum(record: Record) -> str:
    """Return "xxh3:..." of a rollout record, without its checksum.

    Null values are ignored: tables fill missing columns with nulls.
    """
    content = _without_nulls({key: value for key, value in record.items() if key != ROLLOUT_CHECKSUM})
    return f"xxh3:{xxhash.xxh3_64_hexdigest(canonical_json(content).encode('utf-8', 'surrogatepass'))}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def check_rollout_checksum(record: Record, where: str) -> None:
    """Compare a rollout record with its checksum; a record without one is not checked."""
    stated = record.get(ROLLOUT_CHECKSUM)
    if stated is not None and stated != rollout_checksum(record):
        raise CorruptError(
            "this rollout does not match its checksum",
            where=where,
            hint=f"run xtk rollout again; if you edited this rollout on purpose, remove its key {ROLLOUT_CHECKSUM}",
        )


def _with_sampled_tokens(document: Document, row: _RecordReader) -> Document:
    """Return the document with the tokens as which a student wrote it."""
    complete = row.get("complete")  # also a column of the shards of a cache
    if isinstance(complete, bool):
        document = replace(document, is_complete=complete)
    if row.get("student_ids") is None:
        return document
    parts = {name: row.get(name) for name in ("sampled_mask", "student_logprobs", "student_tokenizer")}
    for name, value in parts.items():
        if not isinstance(value, str if name == "student_tokenizer" else list):
            raise ValueError(
                f"a rollout with {row.column_name('student_ids')} also needs the column {row.column_name(name)}; "
                "use the output of xtk rollout unchanged"
            )
    template, advantage = row.get("student_template") or "", row.get("advantage")
    sampled_tokens = SampledTokens.from_lists(
        row["student_ids"],
        parts["sampled_mask"],
        parts["student_logprobs"],
        str(parts["student_tokenizer"]),
        str(template),
        0.0 if advantage is None else float(advantage),
    )
    return replace(document, sampled_tokens=sampled_tokens)


def _with_weight_and_route(document: Document, row: _RecordReader) -> Document:
    """Return the document with its loss weight and teacher name."""
    if "weight" in row.columns:
        weight = row.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MAX_WEIGHT:
            raise ValueError(
                f"the column {row.column_name('weight')} is {weight!r}, but must be a number from 0 to 1e12"
            )
        document = replace(document, weight=float(weight))
    if "route" in row.columns:
        route = row.get("route")
        if not isinstance(route, str):
            raise ValueError(f"the column {row.column_name('route')} is {route!r}, but must be the NAME of a --teacher")
        document = replace(document, teacher_name=replace_surrogates(route))
    return document


def _ids_and_trained(row: _RecordReader) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ids without padding, and whether each is trained, from labels and masks."""
    ids = _integer_column(row, "input_ids")
    kept, trained = np.ones(len(ids), np.bool_), np.ones(len(ids), np.bool_)
    if row.get("attention_mask") is not None:
        kept = _mask_column(row, "attention_mask", len(ids))
    if row.get("labels") is not None:
        labels = _integer_column(row, "labels", len(ids))
        trained = labels != IGNORE_INDEX
        failure = np.flatnonzero(kept & trained & (labels != ids))
        if len(failure):
            at = failure[0]
            raise ValueError(
                f"{row.column_name('labels')}[{at}] is {labels[at]}, but {row.column_name('input_ids')}[{at}] is "
                f"{ids[at]}; labels must be the same ids, not shifted, or {IGNORE_INDEX} for untrained tokens"
            )
    for mask in MASK_FIELDS:
        if row.get(mask) is not None:
            trained &= _mask_column(row, mask, len(ids))
    return ids[kept], trained[kept]


def _mask_column(row: _RecordReader, field: str, size: int) -> NDArray[np.bool_]:
    values = _integer_column(row, field, size)
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"the column {row.column_name(field)} must contain only 0 and 1")
    return np.asarray(values == 1, np.bool_)


def _integer_column(row: _RecordReader, field: str, size: int | None = None) -> NDArray[np.int64]:
    """Return int64 [size], a column of integers; any length without `size`."""
    values, name = row[field], row.column_name(field)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"the column {name} must be a list of integers")
    if size is None and any(isinstance(value, bool) for value in values):  # masks may have booleans
        raise ValueError(f"the column {name} must be a list of integers, but has true or false")
    if size is not None and len(values) != size:
        raise ValueError(
            f"the column {name} has {len(values):,} entries; must have {size:,}, like {row.column_name('input_ids')}"
        )
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise ValueError(f"the column {name} contains an integer that is too large for a token id (64 bits)") from None


def _from_json(value: str, name: str, where: str) -> Any:
    """Decode a JSON column: Parquet cannot store objects of different shapes, so datasets store them as JSON."""
    return parse_json(value, what=f"the text in the column {name}", where=where, refuse_duplicate_keys=True)


def _is_object_text(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def _normalized_message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    if "from" in message and "value" in message and "role" not in message:
        marks = {key: message[key] for key in TRAIN_FLAG_KEYS if message.get(key) is not None}
        return {"role": SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message["value"], **marks}
    # Tables fill missing keys with nulls.
    return {replace_surrogates(str(key)): json_value(value) for key, value in message.items() if value is not None}


def _json_type(value: object) -> str:
    """Return the name of a value's JSON type, for messages."""
    names = {"NoneType": "null", "bool": "a boolean", "int": "a number", "float": "a number", "str": "text",
             "list": "a list", "tuple": "a list", "dict": "an object"}  # fmt: skip
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def json_value(value: Any) -> Any:
    """Return a value that JSON in UTF-8 can represent: other types, such as times, become text; no surrogates."""
    if isinstance(value, dict):
        return {replace_surrogates(str(key)): json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return replace_surrogates(str(value))
