"""Tables of `datasets` and Arrow: JSON types, null keys of aligned structs, and duplicate keys of JSON."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_families import write_family
from datasets import Features, Json, List, Value

from xtk.api.cache_from_model import RecordCorpus
from xtk.data.arrow_record_readers import read_dataset
from xtk.data.corpus_reader import Corpus, CorpusFingerprint
from xtk.data.record_to_document import record_to_document, record_to_prompt
from xtk.data.text_streams import RecordReadOptions
from xtk.errors import XtkError
from xtk.rollouts.prompts import read_prompts
from xtk.text.tokenizer import Tokenizer

datasets.disable_progress_bars()

QUESTION = {"role": "user", "content": "go"}
REPLIES = ["It is 17.", "17", "12.0", "true", '{"a":  1}', "[]", '[{"name": "Ann"}]', "a/b é 😀 \u2028 </s>", ""]


def chat(*answers, **columns):
    return {"messages": [QUESTION, *({"role": "assistant", **answer} for answer in answers)], **columns}


def call(arguments):
    return {"content": "", "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": arguments}}]}


def tool(properties, **others):
    parameters = {"type": "object", "properties": properties, **others}
    return {"type": "function", "function": {"name": "find", "parameters": parameters}}


CALLS = [chat(call(arguments)) for arguments in ({"city": "Rome"}, {"zone": 1.5, "where": {"a": None}}, {})]
TOOLS = [chat({"content": "a"}, tools=[tool(part)])
         for part in ({"city": {"type": "string"}}, {"zone": {"type": "number", "default": None}}, {})]  # fmt: skip
PARTS = [chat({"content": reply}) for reply in REPLIES] + [chat({"content": [{"type": "text", "text": "It is 4."}]})]
TURNS = [{"prompt": [QUESTION], "completion": [{"role": "assistant", "content": "17"}], "teacher_prompt": [QUESTION]},
         {"prompt": [{**QUESTION, "name": "Ann"}], "completion": CALLS[0]["messages"][1:]}]  # fmt: skip
MESSAGE = {"role": Value("string"), "content": Value("string")}


def message_features(**keys):
    return Features({"messages": List({**MESSAGE, **keys})})


def call_features(arguments):
    function = {"name": Value("string"), "arguments": arguments}
    return message_features(tool_calls=List({"type": Value("string"), "function": function}))


def tool_features(properties):
    parameters = {"type": Value("string"), "properties": properties}
    function = {"name": Value("string"), "parameters": parameters}
    return Features({"messages": List(MESSAGE), "tools": List({"type": Value("string"), "function": function})})


# Rows, and their features: None for those that `datasets` chooses for a JSON file.
CASES = {
    "content of different types": (PARTS, None),
    "content: Json": (PARTS, message_features(content=Json())),
    "content: List(Json)": (
        [{"messages": [{**PARTS[-1]["messages"][1], "role": role} for role in ("user", "assistant")]}],
        message_features(content=List(Json())),
    ),
    "messages: List(Json)": (CALLS, Features({"messages": List(Json())})),
    "messages: Json": (CALLS, Features({"messages": Json()})),
    "calls of different shapes": (CALLS, None),
    "tool_calls: Json": (CALLS, message_features(tool_calls=Json())),
    "tool_calls: List(Json)": (CALLS, message_features(tool_calls=List(Json()))),
    "arguments: Json": (CALLS, call_features(Json())),
    "arguments as object and as JSON text": ([*CALLS, chat(call('{"city":  "Rome"}')), chat(call("not JSON"))], None),
    "tools of different shapes": (TOOLS, None),
    "tools: Json": (TOOLS, Features({"messages": List(MESSAGE), "tools": Json()})),
    "tools: List(Json)": (TOOLS, Features({"messages": List(MESSAGE), "tools": List(Json())})),
    "properties: Json": (TOOLS, tool_features(Json())),
    "turns": (TURNS, Features(dict.fromkeys(TURNS[0], List(Json())))),
    "turns: Json": (TURNS, Features(dict.fromkeys(TURNS[0], Json()))),
    "text or turns": ([{"prompt": "12", "completion": "17"}, *TURNS], None),
    "text: Json": ([{"text": reply} for reply in REPLIES], Features({"text": Json()})),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_family("qwen3", tmp_path_factory.mktemp("qwen3")))


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def forms_of(dataset, folder):
    """Return the corpora of a dataset in each form that xtk reads."""
    dataset.to_parquet(folder / "a.parquet")
    pq.write_table(dataset.data.table, folder / "plain.parquet", store_schema=False)  # the types of Parquet alone
    dataset.save_to_disk(folder / "saved")
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, dataset.data.schema) as writer:
        writer.write_table(dataset.data.table)
    files = [Corpus([str(folder / name)]) for name in ("a.parquet", "plain.parquet", "saved", "a.arrow")]
    return [*files, RecordCorpus(dataset), RecordCorpus(dataset.to_iterable_dataset())]


def renderings(tokenizer, documents):
    return [
        document.text if document.conversation is None
        else tokenizer.chat_template.render(document.conversation.messages, document.conversation.tools)
        for document in documents
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tables_of_datasets_are_read_as_the_json_lines_that_they_come_from(tmp_path, tokenizer, case):
    rows, features = CASES[case]
    original = Corpus([write_lines(tmp_path / "a.jsonl", rows)])
    expected, texts = str(CorpusFingerprint.of(original)), renderings(tokenizer, original)
    if features is None:
        dataset = datasets.load_dataset("json", data_files=original.sources, split="train", cache_dir=tmp_path / "hf")
        assert "Json" in str(dataset.features)  # which `datasets` chose
    else:
        dataset = datasets.Dataset.from_list([dict.fromkeys(features) | row for row in rows], features=features)
    for corpus in forms_of(dataset, tmp_path):
        assert renderings(tokenizer, corpus) == texts, corpus.name
        assert str(CorpusFingerprint.of(corpus)) == expected, corpus.name
        prompts = read_prompts(corpus) if "text" not in rows[0] else []
        same = [record_to_prompt(*record) for record in _located(original)] if prompts else []
        assert [prompt.document for prompt in prompts] == same


def _located(corpus):
    return [(record, corpus.columns, where) for record, where in corpus.records()]


def test_hub_datasets_are_read_as_their_files(tmp_path, tokenizer, monkeypatch):
    corpus = Corpus(["owner/name"])  # no local folder yet, so that `datasets` loads it
    (tmp_path / "owner" / "name").mkdir(parents=True)
    local = Corpus([write_lines(tmp_path / "owner" / "name" / "train.jsonl", PARTS)])
    monkeypatch.chdir(tmp_path)
    assert renderings(tokenizer, corpus) == renderings(tokenizer, local)


ALIGNED = [
    chat(call({"city": "Rome"}), tools=[tool({"city": {"type": "string"}}, required=["city"])]),
    chat(call({"zone": "x", "in": {"deep": [1]}}), tools=[tool({"zone": {"type": "string", "enum": ["x"]}})]),
    chat(call({"zone": "x", "in": {"other": 1}}), call({})),
]


def test_null_keys_of_aligned_structs_are_missing_keys(tmp_path, tokenizer, capsys):
    rows = [dict.fromkeys(("messages", "tools")) | row for row in ALIGNED]
    original = Corpus([write_lines(tmp_path / "a.jsonl", rows)])
    dataset = datasets.Dataset.from_list(rows)
    arguments = dataset[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"city": "Rome", "zone": None, "in": None}  # which `datasets` aligned
    for corpus in forms_of(dataset, tmp_path):
        assert renderings(tokenizer, corpus) == renderings(tokenizer, original), corpus.name
        assert "null" not in "".join(renderings(tokenizer, corpus))
        assert str(CorpusFingerprint.of(corpus)) == str(CorpusFingerprint.of(original))
        notes = [line for line in capsys.readouterr().err.splitlines() if "null keys" in line]
        assert len(notes) == 1, corpus.name  # although it is read more than once
        assert "from document 0 on" in notes[0]
        assert notes[0].startswith(corpus.name)


def test_nulls_in_json_values_and_in_other_columns_are_kept(tmp_path, capsys):
    rows = [chat(call({"city": None}))]
    assert "null" in json.dumps(next(iter(Corpus([write_lines(tmp_path / "a.jsonl", rows)]))).conversation.messages)
    dataset = datasets.Dataset.from_list(rows, features=call_features(Json()))
    (document,) = RecordCorpus(dataset)
    assert document.conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}
    # Other columns keep their nulls, which prompt templates and rewards read.
    dataset = datasets.Dataset.from_list([{"text": "a", "meta": {"a": 1, "b": None}, "answer": [{"c": None}]}])
    ((record, _),) = RecordCorpus(dataset).records()
    assert record == {"text": "a", "meta": {"a": 1, "b": None}, "answer": [{"c": None}]}
    assert "null" not in capsys.readouterr().err


def test_maps_are_objects_and_json_columns_of_other_names_are_decoded(tmp_path):
    kind = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    calls = [[{"name": "find", "arguments": [("city", "Rome"), ("days", "2")]}]]
    messages = [[{"role": "user", "content": "go", "tool_calls": None},
                 {"role": "assistant", "content": "", "tool_calls": calls[0]}]]  # fmt: skip
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(kind))])
    meta = pa.array(['{"text": 17, "a": null}'], pa.json_())
    table = pa.table({"talk": pa.array(messages, pa.large_list(message)), "meta": meta})
    pq.write_table(table, tmp_path / "a.parquet")
    corpus = Corpus([str(tmp_path / "a.parquet")], {"messages": "talk"})
    ((record, where),) = corpus.records()
    assert record["meta"] == {"text": 17, "a": None}
    document = record_to_document(record, corpus.columns, where)
    function = document.conversation.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "find", "arguments": {"city": "Rome", "days": "2"}}


@pytest.mark.parametrize("content", ["Anna", '{"a": 1, "a": 2}', "[" * 200 + "]" * 200])
def test_values_of_the_json_type_that_are_not_json_are_refused(tmp_path, content):
    pq.write_table(pa.table({"text": pa.array(['"Anna"', content], pa.json_())}), tmp_path / "a.parquet")
    with pytest.raises(XtkError, match=r"a value of the column text, whose type is arrow\.json") as raised:
        list(Corpus([str(tmp_path / "a.parquet")]))
    assert raised.value.where == f"{tmp_path}/a.parquet, document 1"


def test_tools_may_be_json_texts(tmp_path):
    described = [tool({"city": {"type": "string"}}), tool({"zone": {"type": "number"}})]
    rows = [chat({"content": "a"}, tools=described)]
    expected = str(CorpusFingerprint.of(Corpus([write_lines(tmp_path / "a.jsonl", rows)])))
    for tools in (
        json.dumps(described),
        [json.dumps(one) for one in described],
        [described[0], json.dumps(described[1])],
    ):
        lines = write_lines(tmp_path / "b.jsonl", [{**rows[0], "tools": tools}])
        assert str(CorpusFingerprint.of(Corpus([lines]))) == expected
    dataset = datasets.Dataset.from_list([{**rows[0], "tools": [json.dumps(one) for one in described]}])
    assert str(CorpusFingerprint.of(RecordCorpus(dataset))) == expected


def test_streamed_rows_above_the_size_limit_are_refused():
    dataset = datasets.Dataset.from_list([{"text": "a"}, {"text": "x" * 1000}]).to_iterable_dataset()
    rows = read_dataset(dataset, "owner/name", RecordReadOptions(max_record_bytes=500))
    assert next(rows) == {"text": "a"}
    with pytest.raises(XtkError, match="larger than --max-document-bytes"):
        next(rows)


def test_align_reads_a_parquet_file_as_its_json_lines(run, tmp_path):
    # The rows of a public report: an answer was aligned with the quotation marks of JSON.
    question = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
    rows = [chat({"content": "It is 17."}), {"messages": [question, {"role": "assistant", "content": "It is 4."}]}]
    lines = write_lines(tmp_path / "m.jsonl", rows)
    dataset = datasets.load_dataset("json", data_files=lines, split="train", cache_dir=tmp_path / "hf")
    dataset.to_parquet(tmp_path / "m.parquet")
    models = [write_family(name, tmp_path) for name in ("qwen3", "smollm3")]
    printed = [run("align", *models, data, "--json").stdout for data in (lines, tmp_path / "m.parquet")]
    assert "17" in printed[0]
    assert printed[0] == printed[1]


@pytest.mark.parametrize("name", ["a.jsonl", "array.json", "a.csv"])
def test_duplicate_keys_of_json_are_refused_with_line_and_key(tmp_path, name):
    first, second = '{"text": "Anna"}', '{"text": "Anna", "meta": {"te\\u0078t": 1}, "text": "Otto"}'
    texts = {"a.jsonl": f"{first}\n{second}\n",
             "array.json": f"[{first},\n{second}]",
             "a.csv": 'text,messages\n\nAnna,"[{""role"": ""user"", ""role"": ""user""}]"\n'}  # fmt: skip
    (tmp_path / name).write_text(texts[name])
    with pytest.raises(XtkError, match=r"has the key 'text' twice|has the key 'role' twice") as raised:
        list(Corpus([str(tmp_path / name)]))
    location = {"a.jsonl": ", line 2", "array.json": "", "a.csv": ", document 0"}[name]
    assert raised.value.where.startswith(f"{tmp_path}/{name}{location}")
    inner = '{"text": "Anna", "meta": [{"b": 1, "b": 1}]}'
    (tmp_path / "inner.jsonl").write_text(inner)
    with pytest.raises(XtkError, match="has the key 'b' twice"):
        list(Corpus([str(tmp_path / "inner.jsonl")]))
    equal_values = '{"text": "Anna", "meta": [{"text": 1}, {"text": 1}]}'
    (tmp_path / "inner.jsonl").write_text(equal_values)
    assert len(list(Corpus([str(tmp_path / "inner.jsonl")]))) == 1
