"""`xtk align --stats` and `--html`: the counts match the printed spans, and the page shows every token."""

from __future__ import annotations

import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import small_inputs
from pseudo_terminal import frames, run_in_terminal
from rich.console import Console
from rich.table import Table
from test_bad_input import assert_refused
from xtk_processes import run_here

from xtk.terminal_tables import print_wide
from xtk.text.tokenizer import Tokenizer

SPECIAL_TEXTS = [
    "<script>alert('1 & 2')</script> \"quoted\" </style> <!-- x --> &amp;",
    "tab\there\nnew line\r\n\x00\x07\x7f\u0085\u200d\u202e\ufeff",
    "שלום עולם 12345",
    "日本語 😀👩\u200d👩\u200d👧 e\u0301 \u0301",
    "· ⏎ ␇ U+200D ∅ ◌ E6",
    "",
]
VOID_TAGS = {"meta", "br"}


class Page(HTMLParser):
    """Parser that checks the nesting of a page and collects the tokens of each document, as bytes, by model."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.documents: dict[int, dict[str, list[bytes]]] = {}
        self.titles: list[str] = []
        self._side: str | None = None
        self._tokens: dict[str, list[bytes]] | None = None
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        assert not set(values) & {"src", "href", "onclick", "onload"}
        if tag not in VOID_TAGS:
            self.open.append(tag)
        if tag == "article":
            self._tokens = self.documents[int(values["id"].removeprefix("document-"))] = {"student": [], "teacher": []}
        elif values.get("class") in ("student", "teacher"):
            self._side = values["class"]
        elif tag == "bdi" and self._tokens is not None:
            self._tokens[self._side].append(b"")
            self.titles.append(values["title"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "article":
            self._tokens = None

    def handle_data(self, data):
        if self._tokens is not None and "bdi" in self.open:
            self._tokens[self._side][-1] += displayed_bytes(data, self.open[-1])


def displayed_bytes(data: str, tag: str) -> bytes:
    """Return the bytes of displayed text: `i` has a symbol for a character, `b` a byte in hexadecimal."""
    if tag == "b":
        return bytes.fromhex(data)
    if tag != "i":
        return data.encode()
    if data in ("◌", "∅"):
        return b""
    if data.startswith("U+"):
        return chr(int(data[2:], 16)).encode()
    symbols = {"·": " ", "⏎": "\n", "⇥": "\t", "␍": "\r", "␡": "\x7f"}
    return symbols.get(data, chr(ord(data[0]) - 0x2400 if data not in symbols else 0)).encode()


def json_lines(text: str) -> list[dict]:
    # Not splitlines(): JSON strings may contain an unescaped U+0085.
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_inputs.write_jsonl(
        tmp_path_factory.mktemp("align") / "data.jsonl", [*SPECIAL_TEXTS, *small_inputs.sentences(30, seed=5)]
    )


@pytest.mark.slow
def test_statistics_match_the_spans_that_align_prints(run, pair, metaspace, data):
    student, teacher = pair.student, metaspace
    documents = json_lines(run("align", student, teacher, data).stdout)
    done = run("align", student, teacher, data, "--stats", "--json")
    (record,) = json_lines(done.stdout)
    vocabulary = Tokenizer(student).vocabulary
    counts = {kind: [0, 0] for kind in record["span_kinds"]}
    for document in documents:
        for s0, s1, t0, t1 in document["spans"]:
            kind = ("1:" if s1 - s0 == 1 else "n:") + ("1" if t1 - t0 == 1 else "n" if s1 - s0 == 1 else "m")
            counts[kind][0] += 1
            counts[kind][1] += len(b"".join(map(vocabulary.bytes_of, document["student_ids"][s0:s1])))
    assert {kind: [figures["spans"], figures["bytes"]] for kind, figures in record["span_kinds"].items()} == counts
    assert min(spans for spans, _ in counts.values()) > 0
    assert record["documents"] == len(documents) == 36
    assert record["bytes"] == sum(len(document["text"].encode()) for document in documents)
    assert record["student_tokens"] == sum(len(document["student_ids"]) for document in documents)
    assert record["teacher_tokens"] == sum(len(document["teacher_ids"]) for document in documents)
    assert record["student"] == str(student)
    assert record["nanoseconds_per_token"] > 0


@pytest.mark.slow
def test_statistics_of_piped_data_and_of_a_single_text(run, pair, data):
    whole = json.loads(run("align", pair.student, pair.teacher, data, "--stats", "--json").stdout)
    piped = json.loads(run("align", pair.student, pair.teacher, "--stats", "--json", stdin=data.read_text()).stdout)
    for key in set(whole) - {"seconds", "nanoseconds_per_token"}:
        assert piped[key] == whole[key]
    alone = json.loads(run("align", pair.student, pair.teacher, "Anna has 123", "--stats", "--json", "-q").stdout)
    assert (alone["documents"], alone["bytes"]) == (1, 12)
    assert_refused(
        run_here("align", pair.student, pair.teacher, "-", "--stats", stdin="", code=None), "the command before the |"
    )


@pytest.mark.slow
def test_the_table_is_plain_text_when_stdout_is_not_a_terminal(run, pair, data):
    done = run("align", pair.student, pair.teacher, data, "--stats", "--quiet")
    assert done.stderr == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u0085\u200d\u202e]", done.stdout)
    for words in ("36 documents", "1:n", "n:m", "unaligned", "Longest spans", "ns per token"):
        assert words in done.stdout
    assert not re.search(r"(?m)^[a-z ]*align[a-z ]* in \d", done.stdout)  # the time is not that of aligning alone
    assert "to read, tokenize, align and count: " in done.stdout
    assert "align: 36 documents" in run("align", pair.student, pair.teacher, data, "--stats").stderr


@pytest.mark.slow
def test_tables_fit_a_terminal_of_80_columns(pair, data, tmp_path):
    command = [sys.executable, "-m", "xtk", "align", str(pair.student), str(pair.teacher), str(data), "--stats"]
    code, written = run_in_terminal(command, tmp_path)
    lines = frames(written)
    assert code == 0
    assert max(map(len, lines)) <= 80
    for words in ("36 documents, ", "│ 1:n ", "│ unaligned ", "Longest spans", "…", " ns per token of either side"):
        assert any(words in line for line in lines), words
    (alone,) = frames(run_in_terminal([*command[:-2], "Anna has 12", "--stats", "--quiet"], tmp_path)[1])[:1]
    assert alone.strip().startswith("1 document, ")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["first", "worst"])
def test_the_page_shows_every_token_of_both_models_once_and_in_order(run, pair, metaspace, data, tmp_path, order):
    student, teacher = pair.student, metaspace
    arguments = ("align", student, teacher, data, "--html", "page.html", "--limit", 40, "--order", order)
    done = run(*arguments, cwd=tmp_path)
    assert done.stdout == "page.html\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    lines = json_lines(run("align", student, teacher, data).stdout)
    assert sorted(page.documents) == list(range(len(lines)))
    vocabularies = [
        (name, Tokenizer(folder).vocabulary) for name, folder in (("student", student), ("teacher", teacher))
    ]
    for index, tokens in page.documents.items():
        document = lines[index]
        for name, vocabulary in vocabularies:
            assert tokens[name] == [vocabulary.bytes_of(token) for token in document[f"{name}_ids"]]
        assert b"".join(tokens["student"]) == document["text"].encode()
    if order == "first":
        assert list(page.documents) == sorted(page.documents)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert page.tags >= {"style", "main", "table", "caption", "article", "h1", "h2", "h3"}
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in html
    assert "http" not in html
    assert 'dir="rtl"' in html
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u0085\u200d\u202e\ufeff]", html)


def test_token_titles_show_ids_and_bytes(run, pair, tmp_path):
    run("align", pair.student, pair.teacher, "Anna 日", "--html", "p.html", cwd=tmp_path)
    page = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    tokens = page.documents[0]
    vocabularies = [Tokenizer(folder).vocabulary for folder in (pair.student, pair.teacher)]
    ids_and_bytes = {re.fullmatch(r"id (\d+), bytes ([0-9A-F ]+)", title).groups() for title in page.titles}
    assert {bytes.fromhex(hex_bytes) for _, hex_bytes in ids_and_bytes} == set(tokens["student"]) | set(
        tokens["teacher"]
    )
    for token_id, hex_bytes in ids_and_bytes:
        assert bytes.fromhex(hex_bytes) in {
            vocabulary.bytes_of(int(token_id)) for vocabulary in vocabularies if int(token_id) < len(vocabulary)
        }


@pytest.mark.slow
def test_the_page_states_what_it_leaves_out(run, pair, tmp_path):
    long = "Anna has 1234 apples. " * 2000
    data = small_inputs.write_jsonl(tmp_path / "long.jsonl", [long, *small_inputs.sentences(20)])
    run("align", pair.student, pair.teacher, data, "--html", "p.html", "--limit", 3, "--order", "first",
        cwd=tmp_path)  # fmt: skip
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "3 of 21 documents" in html
    assert "Shown up to byte 16,3" in html
    page = Page(html)
    assert list(page.documents) == [0, 1, 2]
    shown_bytes = b"".join(page.documents[0]["student"])
    assert long.encode().startswith(shown_bytes)
    assert shown_bytes == b"".join(page.documents[0]["teacher"])
    assert len(html) < 4_000_000
    run("align", pair.student, pair.teacher, data, "--html", "none.html", "--limit", 0, cwd=tmp_path)
    assert Page((tmp_path / "none.html").read_text(encoding="utf-8")).documents == {}


def test_unaligned_tokens_are_on_the_page(run, pair, families, tmp_path):
    run("align", pair.student, families["word-piece"], "   \n", "--html", "p.html", cwd=tmp_path)
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert b"".join(Page(html).documents[0]["student"]) == b"   \n"
    assert "The last 4 bytes are unaligned." in html


@pytest.mark.slow
def test_the_page_is_written_to_the_output_path_and_replaces_nothing_else(run, pair, data, tmp_path):
    arguments = ("align", pair.student, pair.teacher, data, "--html", "sub/no-ending")
    record = json.loads(run(*arguments, "--json", cwd=tmp_path).stdout)
    assert (record["path"], record["kind"], record["documents"]) == ("sub/no-ending", "alignment-page", 36)
    path: Path = tmp_path / "sub" / "no-ending"
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert run(*arguments, cwd=tmp_path).stdout == "sub/no-ending\n"
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert_refused(
        run_here(*arguments, "--limit", 2, cwd=tmp_path, code=None), "page that was made from other inputs", "--force"
    )
    assert path.read_bytes() == before[0]
    run(*arguments, "--limit", 2, "--force", cwd=tmp_path)
    assert path.read_bytes() != before[0]
    path.write_text("my notes")
    assert_refused(run_here(*arguments, cwd=tmp_path, code=None), "an existing file", "use another output path (-o)")
    assert_refused(run_here(*arguments[:-1], tmp_path / "sub", cwd=tmp_path, code=None), "this path is a folder")
    assert path.read_text() == "my notes"


@pytest.mark.parametrize("arguments", [("--html",), ("-o", "p.html"), ("--html", "p.html", "--limit", "-1")])
def test_invalid_page_options_are_refused(pair, tmp_path, arguments):
    done = run_here("align", pair.student, pair.teacher, "text", *arguments, cwd=tmp_path, code=2)
    assert done.stdout == ""
    assert not any(tmp_path.iterdir())
    assert_refused(
        run_here("align", pair.student, pair.teacher, "x", "--order", "frist", cwd=tmp_path, code=None), "first"
    )


@pytest.mark.slow
def test_statistics_and_page_of_real_tokenizers_on_gsm8k(run, real_data, tmp_path):
    tokenizers = (real_data / "tokenizers" / "llama3", real_data / "tokenizers" / "mistral-v1")
    lines = (real_data / "corpora" / "gsm8k_train.jsonl").read_text().splitlines()[:200]
    (tmp_path / "some.jsonl").write_text("\n".join(lines) + "\n")
    data = ("some.jsonl", "--columns", "prompt=question,completion=answer")
    record = json.loads(run("align", *tokenizers, *data, "--stats", "--json", cwd=tmp_path).stdout)
    assert record["documents"] == 200
    assert record["unaligned_bytes"] == 0
    assert record["normalized_documents"]["either"] == 0
    assert record["span_kinds"]["1:1"]["byte_fraction"] > 0.7
    assert (
        record["span_kinds"]["1:n"]["spans"] > record["span_kinds"]["n:1"]["spans"] > 0
    )  # mistral-v1 has single digits
    assert len(record["worst_documents"]) == len(record["longest_spans"]) == 5
    run("align", *tokenizers, *data, "--html", "p.html", cwd=tmp_path)
    page = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert list(page.documents)[:5] == [worst["document"] for worst in record["worst_documents"]]
    for tokens in page.documents.values():
        assert b"".join(tokens["teacher"]) == b" " + b"".join(tokens["student"])


def test_tables_on_a_narrow_terminal_have_all_digits():
    stream = io.StringIO()
    table = Table(title="spans")
    for name in ("pattern", "spans", "share of all spans", "bytes"):
        table.add_column(name, no_wrap=True)
    numbers = ["1,234,567,890", "98.7654321", "1,111,111,111,111,111,111,111,111,111"]
    table.add_row("a pattern that has a long name", *numbers)
    print_wide(Console(file=stream, width=40, force_terminal=True), table)
    assert all(number in stream.getvalue() for number in numbers)
