"""Reading of documents from data files in all formats, and fingerprints of documents."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import sys
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from xtk.data.corpus_reader import Corpus, CorpusFingerprint, parse_columns_option
from xtk.data.text_streams import RecordReadOptions, read_lines
from xtk.errors import XtkError
from xtk.text.document import Document, replace_surrogates

TEXTS = ["Anna has 12 apples.", "日本語 😀 e\u0301", "two\nlines\u2028and\u0085more", ""]


def lines_of(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def as_jsonl(path: Path) -> Path:
    path.with_suffix(".jsonl").write_text(lines_of([{"text": text} for text in TEXTS]), encoding="utf-8")
    return path.with_suffix(".jsonl")


def as_jsonl_with_escapes_and_empty_lines(path: Path) -> Path:
    lines = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    path.with_suffix(".json").write_text("\n\n" + "\r\n\n".join(lines))  # without a newline at the end
    return path.with_suffix(".json")


def as_jsonl_gz(path: Path) -> Path:
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(as_jsonl(path).read_bytes()))
    return path.with_suffix(".jsonl.gz")


def as_parquet(path: Path) -> Path:
    pa.parquet.write_table(pa.table({"text": TEXTS, "id": range(len(TEXTS))}), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_saved_dataset(path: Path) -> Path:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
    (file,) = path.glob("*.arrow")
    return file


def as_arrow_file(path: Path) -> Path:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path.with_suffix(".arrow")


@pytest.mark.parametrize(
    "write",
    [
        as_jsonl,
        as_jsonl_with_escapes_and_empty_lines,
        as_jsonl_gz,
        as_parquet,
        as_saved_dataset,
        as_arrow_file,
    ],
)
def test_every_format_returns_the_same_documents(tmp_path, write):
    corpus = Corpus([str(write(tmp_path / "data"))])
    assert [document.text for document in corpus] == TEXTS
    assert [document.text for document in corpus] == TEXTS  # a corpus can be read twice
    assert all([segment.role for segment in document.segments] == ["text"] for document in corpus)


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    raw = "one\r\ntwo\rthree\n\n日本\ufeff\x00 end".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    (document,) = Corpus([str(tmp_path / "a.txt")])
    assert document.text.encode() == raw
    assert document.segments[0].train


def test_bytes_that_are_not_utf_8_are_refused_with_their_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    failure = failure_of([tmp_path / "a.txt"])
    assert failure.what == "this data file is not UTF-8: byte 0xe9 at offset 3"
    assert failure.where == str(tmp_path / "a.txt")


def test_globs_and_folders_are_read_in_the_order_of_file_names(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "notes.md").write_text("no data")
    (tmp_path / "._a.txt").write_text("what macOS keeps next to a file")
    os.mkfifo(tmp_path / "d.txt")
    names = ["a.txt", "b.txt", "c.txt"]
    assert [document.text for document in Corpus([str(tmp_path)])] == names
    (tmp_path / "d.txt").unlink()
    assert [document.text for document in Corpus([f"{tmp_path}/*.txt"])] == names
    assert [document.text for document in Corpus([f"{tmp_path}/c.txt", f"{tmp_path}/[ab].txt"])] == [
        "c.txt", "a.txt", "b.txt"
    ]  # fmt: skip


def test_file_whose_name_looks_like_a_glob_is_read(tmp_path):
    (tmp_path / "part[1].txt").write_text("this one")
    assert [document.text for document in Corpus([f"{tmp_path}/part[1].txt"])] == ["this one"]


def test_file_urls_are_read_with_fsspec(tmp_path):
    path = as_jsonl(tmp_path / "data")
    assert [document.text for document in Corpus([path.as_uri()])] == TEXTS


def test_prompt_is_not_trained_and_completion_is(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of([{"prompt": "2 + 2 =", "completion": " 4"}]))
    (document,) = Corpus([str(tmp_path / "a.jsonl")])
    assert document == Document.from_completion("2 + 2 =", " 4")
    assert [(segment.role, segment.train) for segment in document.segments] == [("prompt", False), ("completion", True)]


def test_columns_with_other_names_are_mapped(tmp_path):
    records = [{"question": "2 + 2 =", "answer": " 4", "text": "not this"}]
    (tmp_path / "a.jsonl").write_text(lines_of(records))
    (pair,) = Corpus([str(tmp_path / "a.jsonl")], parse_columns_option("prompt=question,completion=answer"))
    assert pair == Document.from_completion("2 + 2 =", " 4")
    (alone,) = Corpus([str(tmp_path / "a.jsonl")], parse_columns_option("text=answer"))
    assert alone == Document.from_text(" 4")


def test_lone_surrogates_become_replacement_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud800b\udc00 \ud83d\ude00\ud83d"}')
    (document,) = Corpus([str(tmp_path / "a.jsonl")])
    assert document.text == "a\ufffdb\ufffd 😀\ufffd"
    assert replace_surrogates("\ufeffä\ud800") == "\ufeffä\ufffd"


def failure_of(sources: list[object], columns: dict[str, str] | None = None) -> XtkError:
    with pytest.raises(XtkError) as raised:
        list(Corpus([str(source) for source in sources], columns))
    return raised.value


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "unfinished', "this line of the data is not valid JSON"),
        ('["a list"]', "this document is not a JSON object"),
        ('"Anna"', "this document is not a JSON object"),
    ],
)
def test_invalid_line_is_reported_with_its_number(tmp_path, line, what):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    failure = failure_of([tmp_path / "a.jsonl"])
    assert failure.what.startswith(what)
    assert failure.where == f"{tmp_path}/a.jsonl, line 3"


def test_data_without_a_text_column_is_refused_with_its_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of([{"question": "2 + 2 =", "answer": " 4"}]))
    failure = failure_of([tmp_path / "a.jsonl"])
    assert "its columns: question, answer" in failure.what
    assert failure.where == f"{tmp_path}/a.jsonl, document 0"
    assert "--columns" in failure.hint
    assert "its columns: question, answer" in failure_of([tmp_path / "a.jsonl"], {"text": "body"}).what
    assert "its columns: question, answer" in failure_of([tmp_path / "a.jsonl"], {"prompt": "question"}).what


def test_text_that_is_a_number_or_null_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 12}')
    assert failure_of([tmp_path / "a.jsonl"]).what == "the column text must be text, not a number"
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "completion": null}')
    assert failure_of([tmp_path / "a.jsonl"]).what == "the column completion must be text, not null"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_empty_corpus_is_refused(tmp_path, name):
    (tmp_path / name).write_text("")
    failure = failure_of([tmp_path / name])
    assert failure.what == "the data contains no documents"
    assert failure.where == str(tmp_path / name)


@pytest.mark.parametrize("name", ["missing.jsonl", "*.parquet", "no/such/folder/"])
def test_missing_data_is_reported_before_anything_is_read(tmp_path, name):
    with pytest.raises(XtkError, match="this data file, folder or dataset does not exist") as raised:
        Corpus([f"{tmp_path}/{name}"])
    assert raised.value.where == f"{tmp_path}/{name}"
    assert raised.value.hint


def test_unknown_file_extension_is_refused_with_the_supported_ones(tmp_path):
    (tmp_path / "a.xlsx").write_text("text\nAnna\n")
    failure = failure_of([tmp_path / "a.xlsx"])
    assert failure.what == "data files that end in .xlsx are not supported"
    assert ".parquet" in failure.hint


def test_a_folder_without_data_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing here")
    assert failure_of([tmp_path]).what == "this folder contains no data files"


@pytest.mark.parametrize("write", [as_parquet, as_arrow_file, as_saved_dataset, as_jsonl_gz])
def test_truncated_file_is_reported_with_its_path(tmp_path, write):
    path = write(tmp_path / "data")
    os.truncate(path, path.stat().st_size // 2)
    failure = failure_of([path])
    assert failure.where.startswith(str(path))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz"])
def test_file_in_another_format_is_reported_with_its_path(tmp_path, name):
    (tmp_path / name).write_text("Anna has 12 apples.")
    assert failure_of([tmp_path / name]).where.startswith(str(tmp_path / name))


def test_unknown_field_in_columns_is_refused_with_a_suggestion():
    with pytest.raises(XtkError, match=r"no document field called 'texts'; did you mean text\?"):
        Corpus([], {"texts": "body"})


@pytest.mark.parametrize("value", ["text", "text=", "=body", "prompt=a,completion"])
def test_invalid_columns_option_is_refused(value):
    with pytest.raises(XtkError, match="--columns is"):
        parse_columns_option(value)
    assert parse_columns_option(None) == parse_columns_option("") == {}
    assert parse_columns_option("prompt=a, completion=b=c") == {"prompt": "a", "completion": "b=c"}


@pytest.mark.parametrize(
    ("piped", "texts"),
    [
        (lines_of([{"text": text} for text in TEXTS]), TEXTS),
        ("Anna has 12 apples.\nAnd Bert.\n", ["Anna has 12 apples.\nAnd Bert.\n"]),
    ],
)
def test_stdin_is_read_as_json_lines_or_as_one_text(monkeypatch, piped, texts):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
    corpus = Corpus(["-"])
    assert [document.text for document in corpus] == texts
    assert [document.text for document in corpus] == texts


def test_empty_stdin_is_refused_with_a_hint_to_the_previous_command(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
    with pytest.raises(XtkError, match=r"the command before the \| probably failed"):
        Corpus(["-"])


def fingerprint(*documents: Document) -> str:
    corpus_fingerprint = CorpusFingerprint()
    for document in documents:
        corpus_fingerprint.add(document)
    return str(corpus_fingerprint)


def test_fingerprint_depends_on_text_order_and_training():
    one, other = Document.from_text("Anna"), Document.from_text("Bert")
    different = [
        fingerprint(one, other),
        fingerprint(other, one),
        fingerprint(one),
        fingerprint(Document.from_text("AnnaBert")),
        fingerprint(Document.from_completion("Anna", "Bert")),
        fingerprint(Document.from_completion("AnnaBert", "")),
        fingerprint(one, Document.from_text(""), other),
        fingerprint(one, dataclasses.replace(other, is_complete=False)),
        fingerprint(dataclasses.replace(one, is_complete=False), other),
    ]
    assert len(set(different)) == len(different)
    assert fingerprint(one, other) == fingerprint(Document.from_text("Anna"), other)


CHAT = [
    {"role": "user", "content": "12 + 5?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 12, "b": 5}}]},
    {"role": "tool", "content": "17"},
    {"role": "assistant", "content": "It is 17."},
]
OPENAI_CHAT = [dict(message) for message in CHAT]
OPENAI_CHAT[1]["tool_calls"] = [{"type": "function", "function": CHAT[1]["tool_calls"][0]}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def chat_as_jsonl(folder):
    (folder / "chat.jsonl").write_text(
        lines_of([{"messages": CHAT, "tools": TOOLS, "text": "rendered by another tool"}])
    )
    return folder / "chat.jsonl"


def chat_as_parquet(folder):
    # As in Parquet: every message has every key, some with null, and tools are JSON text.
    full = [{"role": None, "content": None, "tool_calls": None, **message} for message in CHAT]
    pa.parquet.write_table(
        pa.Table.from_pylist([{"messages": full, "tools": json.dumps(TOOLS)}]), folder / "chat.parquet"
    )
    return folder / "chat.parquet"


def chat_as_prompt_and_completion(folder):
    (folder / "pc.jsonl").write_text(lines_of([{"prompt": CHAT[:3], "completion": CHAT[3:], "tools": TOOLS}]))
    return folder / "pc.jsonl"


@pytest.mark.parametrize("write", [chat_as_jsonl, chat_as_parquet, chat_as_prompt_and_completion])
def test_conversations_keep_their_messages_and_tools(tmp_path, write):
    (document,) = Corpus([str(write(tmp_path))])
    assert [dict(message) for message in document.conversation.messages] == OPENAI_CHAT
    assert document.conversation.tools == tuple(TOOLS)
    trained = [False, write is not chat_as_prompt_and_completion, False, True]
    pairs = zip(document.segments, document.conversation.parts, strict=True)
    assert all(segment.train == trained[part.message] for segment, part in pairs)
    assert [segment.text for segment in document.segments if segment.role.startswith("tool-")] == [
        "<tool_call>",
        "add",
        '{"a": 12, "b": 5}',
    ]


def test_sharegpt_messages_are_read_from_a_mapped_column(tmp_path):
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "5?"},
        {"from": "gpt", "value": "Five."},
    ]
    (tmp_path / "s.jsonl").write_text(lines_of([{"conversations": turns}]))
    (document,) = Corpus([str(tmp_path / "s.jsonl")], {"messages": "conversations"})
    assert [(part.role, part.text, part.train) for part in document.segments] == [
        ("system", "Be brief.", False),
        ("user", "5?", False),
        ("assistant", "Five.", True),
    ]


def test_text_column_is_read_instead_of_messages_if_requested(tmp_path):
    (document,) = Corpus([str(chat_as_jsonl(tmp_path))], {"text": "text"})
    assert document == Document.from_text("rendered by another tool")


def test_message_without_a_role_is_reported_with_its_document(tmp_path):
    (tmp_path / "bad.jsonl").write_text(lines_of([{"messages": CHAT}, {"messages": [{"content": "who?"}]}]))
    failure = failure_of([tmp_path / "bad.jsonl"])
    assert "role" in failure.what
    assert failure.where.endswith("document 1")


def test_fingerprint_depends_on_message_names_and_tools():
    def fingerprint(messages, tools=None) -> str:
        found = CorpusFingerprint()
        found.add(Document.from_messages(messages, tools=tools))
        return str(found)

    renamed = [{**CHAT[0], "name": "Anna"}, *CHAT[1:]]
    assert len({fingerprint(CHAT), fingerprint(renamed), fingerprint(CHAT, TOOLS)}) == 3


def test_messages_and_tools_in_json_text_are_decoded(tmp_path):
    record = {"messages": json.dumps(CHAT), "tools": ""}
    (tmp_path / "c.jsonl").write_text(lines_of([record]))
    (document,) = Corpus([str(tmp_path / "c.jsonl")])
    assert [dict(message) for message in document.conversation.messages] == OPENAI_CHAT
    assert document.conversation.tools is None


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"messages": "hello"}, "not valid JSON"),
        ({"messages": '{"role": "user"}'}, "messages must be a list of messages"),
        ({"messages": CHAT, "tools": {"type": "function"}}, "tools must be a list of tool descriptions, not an object"),
        ({"messages": CHAT, "tools": "[{"}, "the text in the column tools is not valid JSON"),
    ],
)
def test_invalid_messages_are_reported_with_their_document(tmp_path, record, what):
    (tmp_path / "c.jsonl").write_text(lines_of([record]))
    failure = failure_of([tmp_path / "c.jsonl"])
    assert what in failure.what
    assert failure.where.endswith("document 0")


def test_times_bytes_and_surrogates_in_messages_become_text(tmp_path):
    import datetime

    message = {"role": "user", "content": "12?", "at": datetime.datetime(2024, 5, 1, 12), "address": b"\x01"}
    pa.parquet.write_table(pa.Table.from_pylist([{"messages": [message]}]), tmp_path / "c.parquet")
    (document,) = Corpus([str(tmp_path / "c.parquet")])
    assert document.conversation.messages[0]["at"].startswith("2024-05-01")
    found = CorpusFingerprint()
    found.add(document)
    (tmp_path / "s.jsonl").write_text('{"messages": [{"role": "user", "content": "a", "name": "x\\ud800"}]}\n')
    (document,) = Corpus([str(tmp_path / "s.jsonl")])
    assert document.conversation.messages[0]["name"] == "x\ufffd"


def test_mapping_only_the_tools_column_keeps_the_messages(tmp_path):
    (tmp_path / "c.jsonl").write_text(lines_of([{"messages": CHAT, "functions": TOOLS}]))
    (document,) = Corpus([str(tmp_path / "c.jsonl")], {"tools": "functions"})
    assert document.conversation.tools == tuple(TOOLS)


def test_fingerprint_depends_on_the_order_of_keys_in_tools():
    one, other = CorpusFingerprint(), CorpusFingerprint()
    one.add(Document.from_messages(CHAT, tools=[{"a": 1, "b": 2}]))
    other.add(Document.from_messages(CHAT, tools=[{"b": 2, "a": 1}]))
    assert str(one) != str(other)


def test_file_name_with_colons_is_a_local_path(tmp_path):
    for name, write in (
        ("a::b.jsonl", Path.write_bytes),
        ("c::d.jsonl.gz", lambda path, raw: path.write_bytes(gzip.compress(raw))),
    ):
        write(tmp_path / name, lines_of([{"text": text} for text in TEXTS]).encode())
        assert [document.text for document in Corpus([str(tmp_path / name)])] == TEXTS


def test_a_very_long_line_is_read_in_linear_time():
    """A row of a cache of another tool may have a gigabyte."""

    def seconds(megabytes: int) -> float:
        stream = io.BytesIO(b"x" * (megabytes << 20) + b"\nnext\nlast")
        started = time.process_time()
        lines = [line for _, line in read_lines(stream, "name", RecordReadOptions(max_record_bytes=1 << 30))]
        assert [len(lines[0]), *lines[1:]] == [(megabytes << 20) + 1, "next\n", "last"]
        return time.process_time() - started

    seconds(8)
    assert min(seconds(64) for _ in range(3)) < 1.5  # 0.15 s; 7 s if each chunk is joined with all previous ones
