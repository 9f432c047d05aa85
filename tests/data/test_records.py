"""Conversion of data rows to documents: teacher prompts, trained tokens, weights, routes, and invalid columns."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from xtk.data.corpus_reader import Corpus, CorpusFingerprint, parse_columns_option
from xtk.data.record_to_document import RECORD_FIELDS, record_to_document
from xtk.errors import XtkError
from xtk.text.document import Document
from xtk.text.teacher_tokenization import teacher_views
from xtk.text.tokenizer import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "data.md"
EXAMPLES = [
    (json.loads(line), trained)
    for line, trained in re.findall(r"```json\n(.*)\n```\n\ntrained: `([^`]*)`", PAGE.read_text(encoding="utf-8"))
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12 + 5?"},
    {"role": "assistant", "content": "It is 17."},
]


def document(record: dict[str, object], **columns: str) -> Document:
    return record_to_document(record, columns, "here")


def failure_of(record: dict[str, object], **columns: str) -> XtkError:
    with pytest.raises(XtkError) as raised:
        document(record, **columns)
    assert raised.value.where == "here"
    return raised.value


def fingerprint(document: Document) -> str:
    found = CorpusFingerprint()
    found.add(document)
    return str(found)


# Examples of docs/how-to/data.md.


def test_data_page_shows_every_column_and_no_other():
    assert len(EXAMPLES) == PAGE.read_text(encoding="utf-8").count("```json")
    shown = {column for record, _ in EXAMPLES for column in record}
    assert shown == set(RECORD_FIELDS)


@pytest.mark.slow
@pytest.mark.parametrize(("record", "trained"), EXAMPLES, ids=[" ".join(record) for record, _ in EXAMPLES])
def test_examples_of_the_data_page_are_trained_as_documented(real_data, tmp_path, record, trained):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    documents = list(Corpus([str(tmp_path / "a.jsonl")]))
    teacher = Tokenizer(real_data / "tokenizers" / "qwen", start_token="eos")  # without one, no first token is trained
    ((viewed_document, sequence),) = teacher_views(teacher, documents)
    bytes_by_id = teacher.vocabulary.bytes_by_id
    trained_bytes = b"".join(
        bytes_by_id[token] for token in sequence.ids[sequence.train_mask & sequence.text_mask].tolist()
    )
    assert trained_bytes.decode() == trained == "".join(part.text for part in viewed_document.segments if part.train)


# Teacher prompts.


def test_teacher_prompt_is_text_or_messages():
    pair = {"prompt": "a", "completion": "b"}
    assert document({**pair, "teacher_prompt": "c\ud800"}) == Document.from_completion("a", "b").with_teacher_prompt(
        "c\ufffd"
    )
    assert document({**pair, "teacher_prompt": None}) == Document.from_completion("a", "b")
    assert document({**pair, "hint": "c"}, teacher_prompt="hint").teacher_prompt == "c"
    turns = [{"from": "human", "value": "12?", "weight": 1}, {"role": "tool", "content": None, "name": None}]
    chat = document({"messages": CHAT, "teacher_prompt": turns})
    assert chat.teacher_prompt == ({"role": "user", "content": "12?"}, {"role": "tool", "content": ""})
    assert chat.conversation == document({"messages": CHAT}).conversation


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"text": "a", "teacher_prompt": 5}, "teacher_prompt must be text or a list of messages, not a number"),
        ({"text": "a", "teacher_prompt": CHAT}, "the document has no messages"),
        (
            {"input_ids": [1], "teacher_prompt": "a"},
            "a document with input_ids, which are used unchanged, cannot have a teacher_prompt",
        ),
        ({"messages": CHAT, "teacher_prompt": ["a"]}, "each message must be an object"),
    ],
)
def test_invalid_teacher_prompt_is_refused(record, what):
    assert what in failure_of(record).what


def test_missing_requested_column_is_refused():
    failure = failure_of({"text": "a", "hints": "b"}, teacher_prompt="hint")
    assert failure.what == "this document has no column hint; its columns: text, hints; did you mean hints?"
    assert "labels" in failure_of({"input_ids": [1]}, labels="labels").what


# Masks of messages.


def test_train_flags_are_read_from_messages_of_both_formats():
    turns = [{**CHAT[2], "train": False}, {**CHAT[2], "weight": 0}, {"from": "gpt", "value": "a", "train": False},
             {"from": "gpt", "value": "a", "weight": 1}, {**CHAT[1], "train": True}]  # fmt: skip
    assert [part.train for part in document({"messages": turns}).segments] == [False, False, False, True, True]
    assert "must be true or false" in failure_of({"messages": [{**CHAT[2], "weight": 2}]}).what


# Tokens.


def ids_and_train_mask(record: dict[str, object], **columns: str) -> tuple[list[int], list[bool]]:
    tokens = document(record, **columns).teacher_tokens
    assert tokens is not None
    return tokens.ids.tolist(), tokens.train_mask.tolist()


def test_trained_tokens_are_those_that_all_masks_select():
    ids = [5, 6, 7, 8]
    assert ids_and_train_mask({"input_ids": ids}) == (ids, [True] * 4)
    assert ids_and_train_mask({"input_ids": ids, "labels": [-100, 6, 7, 8]}) == (ids, [False, True, True, True])
    for mask in ("completion_mask", "assistant_masks", "loss_mask"):
        assert ids_and_train_mask({"input_ids": ids, mask: [0, 1, 0, True]}) == (ids, [False, True, False, True])
        both = {"input_ids": ids, "labels": [-100, -100, 7, 8], mask: [1, 1, 1, 0]}
        assert ids_and_train_mask(both) == (ids, [False, False, True, False])
    assert ids_and_train_mask({"input_ids": ids, "loss_mask": None}) == (ids, [True] * 4)
    assert ids_and_train_mask({"tokens": ids, "y": [-100, 6, 7, 8]}, input_ids="tokens", labels="y")[1] == [
        False,
        True,
        True,
        True,
    ]


def test_padding_on_either_side_is_removed():
    record = {"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0], "labels": [9, -100, 6, 9]}
    assert ids_and_train_mask(record) == ([5, 6], [False, True])


def test_parquet_and_json_give_the_same_tokens(tmp_path):
    record = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 0], "candidate_ids": [[1], []]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    schema = pa.schema(
        [("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int64())), ("attention_mask", pa.list_(pa.int8())),
         ("candidate_ids", pa.list_(pa.list_(pa.int32())))]
    )  # fmt: skip
    pa.parquet.write_table(pa.Table.from_pylist([record], schema), tmp_path / "a.parquet")
    from_jsonl, from_parquet = (list(Corpus([str(tmp_path / name)])) for name in ("a.jsonl", "a.parquet"))
    assert from_jsonl == from_parquet
    assert from_jsonl[0].candidate_ids.to_padded().tolist() == [[1], [-1]]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"input_ids": "5 6"}, "input_ids must be a list of integers"),
        ({"input_ids": [5, None]}, "input_ids must be a list of integers"),
        ({"input_ids": [5.0]}, "input_ids must be a list of integers"),
        ({"input_ids": [2**40]}, "which is not a token id: it does not fit into 32 bits"),
        ({"input_ids": [2**80]}, "contains an integer that is too large for a token id"),
        ({"input_ids": [5, 6], "labels": [-100]}, "labels has 1 entries; must have 2, like input_ids"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels[0] is 6, but input_ids[0] is 5"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "loss_mask must contain only 0 and 1"),
        ({"input_ids": [5, 6], "loss_mask": [0.5, 1]}, "loss_mask must be a list of integers"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "attention_mask has 1 entries"),
        ({"input_ids": [5, 6], "candidate_ids": [1]}, "candidate_ids must be a list of lists"),
        ({"input_ids": [5, 6], "candidate_ids": [["a"]]}, "candidate_ids must be a flat list of integers"),
    ],
)
def test_invalid_tokens_and_masks_are_refused(record, what):
    assert what in failure_of(record).what


def test_text_and_input_ids_together_need_an_explicit_column():
    record = {"text": "Anna", "input_ids": [5, 6]}
    failure = failure_of(record)
    assert "text and input_ids" in failure.what
    assert "--columns input_ids=input_ids" in failure.hint
    assert document(record, text="text") == Document.from_text("Anna")
    assert document(record, input_ids="input_ids") == Document.from_teacher_ids([5, 6])
    # A column of nulls counts as missing.
    assert document({"text": None, "input_ids": [5, 6], "messages": None}) == Document.from_teacher_ids([5, 6])
    assert document({"text": "Anna", "input_ids": None}) == Document.from_text("Anna")
    assert "text and input_ids" in failure_of(record, text="text", input_ids="input_ids").what


def test_row_without_a_known_column_is_refused_with_the_supported_columns():
    failure = failure_of({"tokens": [5]})
    assert "or input_ids; its columns: tokens" in failure.what
    assert "input_ids=COLUMN" in failure.hint


def test_columns_option_maps_every_field_and_refuses_unknown_fields():
    for field in RECORD_FIELDS:
        assert parse_columns_option(f"{field}=other") == {field: "other"}
        Corpus([], {field: "other"})
    with pytest.raises(XtkError, match=r"did you mean teacher_prompt\?"):
        Corpus([], {"teacher_promt": "hint"})


# Weights and routes.


def test_weights_and_routes_are_read_only_from_requested_columns():
    record = {"text": "a", "weight": 3, "route": "one", "quality": 0.5}
    assert document(record) == Document.from_text("a")
    found = document(record, weight="quality", route="route")
    assert (found.weight, found.teacher_name) == (0.5, "one")
    assert document({**record, "quality": 0}, weight="quality").weight == 0
    assert found.byte_slice(0, 1).weight == 0.5
    assert parse_columns_option("text=body", weight="quality", route="") == {"text": "body", "weight": "quality"}
    with pytest.raises(XtkError) as raised:
        parse_columns_option("weight=quality")
    assert raised.value.hint == "use --weight-column COLUMN"


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "2", None, True, [1]])
def test_invalid_weight_is_refused(weight):
    failure = failure_of({"text": "a", "quality": weight}, weight="quality")
    assert failure.what == f"the column quality is {weight!r}, but must be a number from 0 to 1e12"


def test_missing_weight_column_is_reported_with_file_and_row(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a", "quality": 1}\n{"text": "b"}\n')
    with pytest.raises(XtkError) as raised:
        list(Corpus([str(tmp_path / "data.jsonl")], {"weight": "quality"}))
    assert raised.value.what == "this document has no column quality; its columns: text"
    assert raised.value.where == f"{tmp_path / 'data.jsonl'}, document 1"
    assert raised.value.hint == "add this column to every document, or name another one with --weight-column"


def test_route_that_is_not_a_name_is_refused():
    failure = failure_of({"text": "a", "by": 3}, route="by")
    assert failure.what == "the column by is 3, but must be the NAME of a --teacher"


# Fingerprints.


def test_fingerprint_depends_on_everything_that_is_read_or_trained():
    pair, ids = Document.from_completion("a", "b"), Document.from_teacher_ids([5, 6, 7])
    chat = Document.from_messages(CHAT)
    different = [
        pair, pair.with_teacher_prompt("c"), pair.with_teacher_prompt(""), pair.with_candidate_ids([[1]]),
        pair.with_candidate_ids([[1], []]), pair.with_candidate_ids([[], [1]]), pair.with_candidate_ids([]),
        chat, chat.with_teacher_prompt("c"), chat.with_teacher_prompt([CHAT[0]]), chat.with_teacher_prompt([]),
        chat.with_teacher_prompt([{**CHAT[0], "name": "Anna"}]),
        Document.from_messages([*CHAT[:2], {**CHAT[2], "train": False}]),
        replace(pair, weight=2.0), replace(pair, weight=0.0), replace(pair, teacher_name="one"),
        ids, Document.from_teacher_ids([5, 6, 8]), Document.from_teacher_ids([5, 6, 7], [1, 1, 0]),
            ids.with_candidate_ids([[1], [2]]),
    ]  # fmt: skip
    assert len({fingerprint(one) for one in different}) == len(different)
    assert all(one != other for at, one in enumerate(different) for other in different[:at])


def test_fingerprint_ignores_train_flags_that_equal_the_default():
    assert fingerprint(Document.from_teacher_ids(np.array([5, 6]))) == fingerprint(
        Document.from_teacher_ids([5, 6], [True, True])
    )
    marked = Document.from_messages([*CHAT[:2], {**CHAT[2], "train": True, "weight": 1}])
    assert fingerprint(marked) == fingerprint(Document.from_messages(CHAT))
