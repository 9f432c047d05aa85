"""Malformed or too large data: each attack ends in an error that names the file and the location."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow


def assert_refused(result: subprocess.CompletedProcess[str], *messages: str) -> None:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    for message in messages:
        assert message in result.stderr, result.stderr


DEEP = "[" * 10_000 + "]" * 10_000
ATTACKS = {
    "deep line": ("a.jsonl", f'{{"text": "a", "x": {DEEP}}}'.encode(), "line 1", "nested more than 100 levels deep"),
    "deep messages": (
        "a.jsonl", json.dumps({"messages": DEEP}).encode(), "document 0", "nested more than 100 levels deep"
    ),
    "half deep": ("a.jsonl", ('{"text": "a", "x": ' + "[" * 900 + "]" * 900 + "}").encode(), "line 1", "nested"),
    "deep array": ("a.json", f'[{{"text": "a"}},\n{{"text": {DEEP}}}]'.encode(), "a.json", "nested"),
    "open array": ("a.json", b'[{"text": "a"}', "a.json", "not valid JSON: Expecting ',' delimiter"),
    "array of text": ("a.json", b'[{"text": "a"} {"text": "b"}]', "a.json", "not valid JSON"),
    "latin-1": ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', "a.jsonl", "byte 0xe9 at offset 27"),
    "latin-1 text": ("a.txt", b"caf\xe9", "a.txt", "byte 0xe9 at offset 3"),
    "latin-1 in an array": ("a.json", b'[{"text": "caf\xe9"}]', "a.json", "byte 0xe9 at offset 14"),
    "utf-16": ("a.txt", "Anna".encode("utf-16"), "a.txt", "this file is encoded in UTF-16; data must be UTF-8"),
    "utf-16 lines": ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl", "this file is encoded in UTF-16"),
    "utf-32": ("a.csv", "text\na\n".encode("utf-32"), "a.csv", "this file is encoded in UTF-32"),
    "csv fields": ("a.csv", b'text,id\n"a",1\nb\n', "line 3", "this row has 1 fields; must have 2, like the header"),
    "csv quotes": ("a.csv", b'text,id\n"a,1\nb,2\n', "line 2", "this row is not valid CSV"),
    "csv header": ("a.csv", b"text,text\na,b\n", "a.csv", "two columns named 'text'"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_malformed_data_is_refused_with_its_location(run, pair, tmp_path, attack):
    name, content, location, message = ATTACKS[attack]
    (tmp_path / name).write_bytes(content)
    assert_refused(run("align", pair.student, pair.teacher, tmp_path / name, code=None), location, message)


def long_line(path):
    path.write_bytes(b'{"text": "' + b"a" * 50_000_000 + b'"}\n')


def long_array(path):
    path.write_bytes(b'[{"text": "' + b"a" * 50_000_000 + b'"}]\n')


def long_field(path):
    path.write_bytes(b'text,id\n"' + b"a\n" * 25_000_000 + b'",1\n')


def long_text(path):
    path.write_bytes(b"a" * 50_000_000)


@pytest.mark.parametrize(
    ("write", "name"), [(long_line, "a.jsonl"), (long_array, "a.json"), (long_field, "a.csv"), (long_text, "a.txt")]
)
def test_document_of_50_mb_is_refused_quickly(run, pair, tmp_path, write, name):
    write(tmp_path / name)
    started = time.monotonic()
    result = run("align", pair.student, pair.teacher, tmp_path / name, code=None)
    assert_refused(result, "larger than --max-document-bytes (16,000,000)", name)
    assert time.monotonic() - started < 30


def test_max_document_bytes_applies_to_every_command_that_reads_data(run, pair, tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"text": "Anna has 12 apples."}) + "\n")
    limit, message = ("--max-document-bytes", 20), "larger than --max-document-bytes (20)"
    out = ("-o", tmp_path / "out")
    assert_refused(run("cache-teacher", pair.teacher, data, *out, *limit, code=None), message, "line 1")
    assert_refused(run("distill", pair.student, data, "--loss", "ce", *out, *limit, code=None), message)
    assert_refused(run("rollout", pair.student, data, "-o", tmp_path / "out.jsonl", *limit, code=None), message)
    assert_refused(run("evaluate", pair.student, data, *limit, code=None), message)
    assert_refused(
        run("build-projection", pair.student, pair.teacher, "--method", "cooccurrence", "--corpus", data, *out, *limit,
                   code=None), message
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_token_id_of_3e8_is_refused(run, pair, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 300_000_000]}) + "\n")
    result = run("cache-teacher", pair.teacher, tmp_path / "a.jsonl", "-o", tmp_path / "cache", code=None)
    assert_refused(result, "input_ids[1] of a document is 300000000")


def test_stdin_that_is_not_utf_8_is_refused(pair, tmp_path):
    import sys

    command = [sys.executable, "-m", "xtk", "align", str(pair.student), str(pair.teacher), "-"]
    result = subprocess.run(command, input=b'{"text": "caf\xe9"}\n', capture_output=True, check=False)
    assert result.returncode == 1
    assert "this data file is not UTF-8: byte 0xe9 at offset 13" in result.stderr.decode()


# Without network access.


@pytest.fixture
def silent_server() -> Iterator[int]:
    """Yield the port of a server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


SOURCES = ("owner/name", "owner/name:test", "hf://datasets/owner/name", "hf://datasets/owner/name/a.jsonl")


@pytest.mark.parametrize("source", SOURCES)
def test_hub_data_without_network_is_an_error(run, pair, tmp_path, source):
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    started = time.monotonic()
    # A fresh process, because the client of the hub reads its environment variables at import.
    out = tmp_path / "cache"
    result = run("cache-teacher", pair.teacher, source, "-o", out, code=None, env=environment, fresh=True)
    assert_refused(result, "loading it from the Hugging Face hub failed")
    assert time.monotonic() - started < 40  # under load; a few seconds on an idle machine


@pytest.mark.parametrize("is_model", [False, True])
def test_hub_that_never_responds_is_an_error_within_20_seconds(run, pair, tmp_path, silent_server, is_model):
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{silent_server}", "HF_HUB_OFFLINE": "0"}
    command = ("align", "owner/model", pair.teacher, "text")
    if not is_model:
        command = ("cache-teacher", pair.teacher, "owner/name", "-o", tmp_path / "cache")
    started = time.monotonic()
    run("inspect", tmp_path, code=1, fresh=True)  # measures the time of imports on this machine
    import_seconds = time.monotonic() - started
    started = time.monotonic()
    result = run(*command, code=None, env=environment, fresh=True)
    assert_refused(result, "loading it from the Hugging Face hub failed", "owner/")
    assert time.monotonic() - started < 18 + import_seconds
