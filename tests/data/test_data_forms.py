"""Data formats: JSON arrays, CSV and TSV, folders of `datasets.save_to_disk`, compressed files, and their errors."""

from __future__ import annotations

import io
import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xtk.data.corpus_reader import Corpus
from xtk.data.text_streams import READ_BYTES
from xtk.errors import XtkError
from xtk.text.document import Document

TEXTS = ["Anna has 12 apples.", '日本語 😀, "quoted"', "two\nlines and\r\nthree", "", "[{,"]
RECORDS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]


def texts_of(*sources, **options):
    return [document.text for document in Corpus([str(source) for source in sources], **options)]


def failure_of(*sources, **options) -> XtkError:
    with pytest.raises(XtkError) as raised:
        texts_of(*sources, **options)
    return raised.value


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_json_array_is_read_as_documents(tmp_path, name, indent, ascii_only):
    path = tmp_path / name
    path.write_text("\ufeff \n" + json.dumps(RECORDS, indent=indent, ensure_ascii=ascii_only) + "\n", encoding="utf-8")
    assert texts_of(path) == TEXTS


def test_one_json_object_over_several_lines_is_a_document(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[1], indent=1))
    assert texts_of(tmp_path / "a.json") == TEXTS[1:2]
    (tmp_path / "a.json").write_text("\n".join(json.dumps(record, indent=1) for record in RECORDS))
    assert failure_of(tmp_path / "a.json").what.startswith("this file is not valid JSON: Extra data: line 5")
    (tmp_path / "a.json").write_text("[]")
    assert failure_of(tmp_path / "a.json").what == "the data contains no documents"


@pytest.mark.parametrize("shift", range(4))
def test_json_array_larger_than_the_read_buffer_is_read(tmp_path, shift):
    texts = ["x" * shift, *["é😀" * 20_000, "y" * 3 * READ_BYTES, '"\\' * 50_000], *map(str, range(20_000))]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts], ensure_ascii=False))
    assert texts_of(tmp_path / "a.json") == texts


def test_json_array_is_read_from_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(RECORDS).encode())))
    assert texts_of("-") == TEXTS
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[1] A footnote.")))
    assert texts_of("-") == ["[1] A footnote."]


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_rows_of_csv_and_tsv_are_read_as_documents(tmp_path, name, separator):
    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    lines = [f"id{separator}text", *(f"{number}{separator}{quoted(text)}" for number, text in enumerate(TEXTS))]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n\r\n")
    assert texts_of(tmp_path / name) == TEXTS


def test_csv_fields_other_than_text_are_parsed_as_json(tmp_path):
    chat = [{"role": "user", "content": "12?"}, {"role": "assistant", "content": "12."}]
    quoted = json.dumps(chat).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'messages,quality,tools\n"{quoted}",0.5,\n')
    (document,) = Corpus([str(tmp_path / "a.csv")], {"weight": "quality"})
    assert document.conversation == Document.from_messages(chat).conversation
    assert document.weight == 0.5
    (tmp_path / "a.csv").write_text('input_ids,labels\n"[5, 6]","[-100, 6]"\n')
    (document,) = Corpus([str(tmp_path / "a.csv")])
    assert document == Document.from_teacher_ids([5, 6], [False, True])
    (tmp_path / "a.csv").write_text("question,answer\n12,17\n")
    (document,) = Corpus([str(tmp_path / "a.csv")], {"prompt": "question", "completion": "answer"})
    assert document == Document.from_completion("12", "17")  # a number is read as text if the column must be text


def as_dataset(records):
    return datasets.Dataset.from_list(records)


def test_saved_datasets_are_read_in_row_order(tmp_path):
    datasets.disable_progress_bars()
    as_dataset(RECORDS).save_to_disk(tmp_path / "one", num_shards=3)
    assert texts_of(tmp_path / "one") == TEXTS
    both = datasets.DatasetDict(train=as_dataset(RECORDS[:2]), test=as_dataset(RECORDS[2:]))
    both.save_to_disk(tmp_path / "both")
    assert texts_of(tmp_path / "both") == TEXTS[:2]
    assert texts_of(f"{tmp_path}/both:test") == TEXTS[2:]
    failure = failure_of(f"{tmp_path}/both:tset")
    assert failure.what == "this saved dataset has no split 'tset'; did you mean test?"
    assert "train, test" in failure.hint
    assert "was saved without splits" in failure_of(f"{tmp_path}/one:test").what


def test_saved_dataset_with_files_outside_its_folder_is_refused(tmp_path):
    datasets.disable_progress_bars()
    as_dataset(RECORDS).save_to_disk(tmp_path / "one")
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../elsewhere.arrow"
    (tmp_path / "one" / "state.json").write_text(json.dumps(state))
    assert "which is not a file of an xtk artifact in the same folder" in failure_of(tmp_path / "one").what


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_duplicate_column_names_are_refused(tmp_path, form):
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["other"])], ["text", "text"])
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert failure_of(path).what == "this file has two columns named 'text'"


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "txt", "parquet"])
def test_document_above_the_size_limit_is_refused(tmp_path, extension):
    path = tmp_path / f"a.{extension}"
    dataset = as_dataset([{"text": "short"}, {"text": "x" * 1000}])
    if extension == "parquet":
        dataset.to_parquet(path)
    elif extension == "txt":
        path.write_text("x" * 1000)
    elif extension == "csv":
        dataset.to_csv(path, index=False)
    else:
        path.write_text("\n".join(map(json.dumps, dataset)) if extension == "jsonl" else json.dumps(list(dataset)))
    assert len(texts_of(path, max_document_bytes=1100)[-1]) == 1000
    failure = failure_of(path, max_document_bytes=500)
    assert failure.what == "this document is larger than --max-document-bytes (500)"
    assert failure.where.startswith(str(path))


def test_zstd_is_read_with_pyarrow_alone_and_a_truncated_file_is_refused(tmp_path):
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(b'{"text": "Anna"}\n' * 3)
    frame = sink.getvalue().to_pybytes()
    (tmp_path / "data.jsonl.zst").write_bytes(frame + frame)
    assert [one.text for one in Corpus([str(tmp_path / "data.jsonl.zst")])] == ["Anna"] * 6
    (tmp_path / "cut.jsonl.zst").write_bytes(frame[:-5])
    with pytest.raises(XtkError, match="cannot be read completely"):
        list(Corpus([str(tmp_path / "cut.jsonl.zst")]))
