"""Servers that repeat the API key of a request: it reaches no file, no output and no error message."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from http_server_processes import JsonHandler, ServerProcess, run_server, serve_as_vllm, serve_handler
from small_inputs import Pair

from xtk.engines.http_client_pool import Endpoint, EndpointPool, RetryPolicy

KEY = "sk-proj/Ab+9_x/0123456789/abcdefghijklmnopqrstuvwxyz0123456789ABCDEF=="
_LOGPROBS = {"content": [{"token": "17", "bytes": [49, 55], "logprob": -1.0, "top_logprobs": []}]}
_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "17"},
           "logprobs": _LOGPROBS}  # fmt: skip

# The header `Bearer KEY` in texts.
TEXT_FORMS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "the key": lambda header: header.split()[1],
    "json": lambda header: json.dumps({"Authorization": header}).replace("/", "\\/"),
    "percent": lambda header: quote(header, safe=""),
    "python": lambda header: repr(header.encode()),
}
# The same in JSON strings: the characters between the quotation marks.
JSON_FORMS: dict[str, Callable[[str], str]] = {
    **{name: lambda header, form=form: json.dumps(form(header))[1:-1] for name, form in TEXT_FORMS.items()},
    "escaped slash": lambda header: json.dumps(header)[1:-1].replace("/", "\\/"),
}
JSON_PLACES = ("answer", "name", "model", "error", "error object", "models")
TEXT_PLACES = ("error text", "location", "reason", "header line")


def repeat_key(connection: Connection) -> None:
    """Serve responses that repeat the key: at /PLACE/FORM/v1."""

    class Handler(JsonHandler):
        def respond_with_key(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            place, name = (unquote(part) for part in self.path.split("/")[1:3])
            header = self.headers["Authorization"]
            forms = JSON_FORMS if place in JSON_PLACES else TEXT_FORMS
            texts = [form(header) for form in forms.values()] if name == "all" else [forms[name](header)]
            self.repeat(place, " ".join(texts))

        do_GET = do_POST = respond_with_key  # noqa: N815

        def repeat(self, place: str, text: str) -> None:
            choices = json.dumps([_CHOICE])
            if place == "answer":
                self.respond(200, f'{{"model": "m", "choices": {choices}, "echo": [{{"h": "{text}"}}]}}'.encode())
            elif place == "name":
                self.respond(200, f'{{"model": "m", "choices": {choices}, "{text}": 1}}'.encode())
            elif place == "model":
                self.respond(200, f'{{"model": "{text}", "choices": {choices}}}'.encode())
            elif place == "error":
                self.respond(401, f'{{"error": {{"message": "bad header {text}"}}}}'.encode())
            elif place == "error object":
                self.respond(400, f'{{"error": ["bad", {{"header": "{text}"}}]}}'.encode())
            elif place == "models":
                self.respond(200, f'{{"data": [{{"id": "{text}"}}, {{"id": "other"}}]}}'.encode())
            elif place == "error text":
                self.respond(404, f"<p>{text}</p>".encode())
            elif place == "location":
                self.respond(302, b"", {"Location": f"https://login.example/?header={text}"})
            elif place == "reason":
                self.send_response_only(403, f"Forbidden for {text}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.wfile.write(f"HTTP/1.1 200 OK\r\n{text}\r\n\r\n".encode())
                self.close_connection = True

    serve_handler(Handler, connection)


def key_in(text: str) -> bool:
    """Return whether a text has the key, as it is or after one of the usual decodings."""
    forms = (text, unquote(text), text.replace("\\/", "/"), text.replace("\\\\", "\\").replace("\\/", "/"))
    return any(KEY in form for form in forms)


@pytest.mark.parametrize("form", JSON_FORMS)
def test_the_detection_of_these_tests_sees_every_form(form):
    assert key_in(json.loads(f'"{JSON_FORMS[form]("Bearer " + KEY)}"')), form
    assert not key_in("Bearer *** and nothing that is secret")


@pytest.fixture(scope="module")
def server():
    with run_server(repeat_key) as running:
        yield running


@pytest.fixture
def key(monkeypatch) -> str:
    monkeypatch.setenv("XTK_API_KEY", KEY)
    return KEY


def response_text(server: ServerProcess, place: str, form: str) -> str:
    """Return all that a caller of the client can see: the JSON value, or the message of the error."""
    endpoint = Endpoint.parse(f"{server.host}/{quote(place)}/{quote(form)}/v1")
    pool = EndpointPool([endpoint], concurrency=1, retry_policy=RetryPolicy(max_attempts=1, total_seconds=20))

    async def send_request() -> object:
        async with pool.connected():
            return await pool.request_one(endpoint, "/models", {}, lambda answer: answer, max_attempts=1)

    try:
        return json.dumps(asyncio.run(send_request()), ensure_ascii=False)
    except Exception as error:
        return f"{error} {error!r} {vars(error)}"


@pytest.mark.parametrize("form", JSON_FORMS)
@pytest.mark.parametrize("place", JSON_PLACES)
def test_key_in_json_is_removed(server, key, place, form, capsys):
    text = response_text(server, place, form)
    assert not key_in(text + capsys.readouterr().err)
    assert "***" in text


@pytest.mark.parametrize("form", TEXT_FORMS)
@pytest.mark.parametrize("place", TEXT_PLACES)
def test_key_in_texts_and_headers_of_a_response_is_removed(server, key, place, form, capsys):
    text = response_text(server, place, form)
    assert not key_in(text + capsys.readouterr().err)
    assert "***" in text


@pytest.mark.parametrize(
    "place", ["answer", "name", "model", "error", "error object", "error text", "location", "reason"]
)
def test_query_teacher_writes_no_key(server, key, run, tmp_path, place):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"{one} + 5?"}]}) + "\n" for one in range(2))
    )
    result = run("query-teacher", f"{server.host}/{quote(place)}/all/v1#m", tmp_path / "prompts.jsonl",
                 "-o", tmp_path / "answers.jsonl", cwd=tmp_path, code=None)  # fmt: skip
    assert result.returncode == (0 if place in ("answer", "name", "model") else 1)
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert not key_in(result.stdout + result.stderr + written)
    assert "***" in result.stderr + written
    assert result.returncode or len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("short", ["choices", "x", "EMPTY"])
def test_short_key_is_removed_after_its_scheme_only(server, monkeypatch, short):
    """Local servers take keys such as x or EMPTY, which are also words and letters of responses."""
    monkeypatch.setenv("XTK_API_KEY", short)
    answer = response_text(server, "answer", "raw")
    assert '"choices": [{' in answer
    assert '{"h": "***"}' in answer


def test_key_that_no_header_can_have_is_refused_without_printing_it(server, monkeypatch):
    monkeypatch.setenv("XTK_API_KEY", "sk-0123456789\nabcdefgh")
    assert "has characters that are not printable ASCII" in (text := response_text(server, "answer", "raw"))
    assert "0123456789" not in text
    monkeypatch.setenv("XTK_API_KEY", KEY + "\n")  # a line break at the end is not part of it
    assert '{"h": "Bearer ***"}' in response_text(server, "answer", "raw")


def test_password_in_the_address_is_removed(server, monkeypatch):
    monkeypatch.delenv("XTK_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    address = f"user:{quote(KEY, safe='')}@{server.host.removeprefix('http://')}"
    text = response_text(type("Server", (), {"host": f"http://{address}"}), "error", "raw")  # type: ignore[arg-type]
    assert "bad header Basic ***" in text
    assert not key_in(text)
    assert b64encode(f"user:{KEY}".encode()).decode() not in text


def repeat_key_in_each_response(connection: Connection, upstream: str) -> None:
    """Forward requests to a server of vLLM, and add the key to each response."""

    class Handler(JsonHandler):
        def forward(self) -> None:
            body = json.dumps({**self.read_json(), "model": "teacher"}) if self.command == "POST" else None
            upstream_connection = HTTPConnection(urlsplit(upstream).netloc, timeout=120)
            upstream_connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
            content = json.loads(upstream_connection.getresponse().read())
            texts = [form(self.headers["Authorization"]) for form in TEXT_FORMS.values()]
            for model in content.get("data", []):
                model["id"], model["owned_by"] = " ".join(texts), texts[0]
            for choice in content.get("choices", []):
                choice["text"] = " ".join(texts)
            content["model"] = " ".join(texts)
            self.respond(200, {**content, **dict.fromkeys(texts, texts)})

        do_GET = do_POST = forward  # noqa: N815

    serve_handler(Handler, connection)


def test_cache_of_a_server_that_repeats_the_key_has_no_key(pair: Pair, key, run, tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"text": "12 + 5 = 17"}\n{"text": "What is it?"}\n')
    with (
        run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {}) as upstream,
        run_server(repeat_key_in_each_response, upstream.url) as server,
    ):
        result = run("cache-teacher", pair.teacher, tmp_path / "data.jsonl", "--backend", "server", "--server",
                     server.url, "--top-k", 4, "-o", tmp_path / "cache")  # fmt: skip
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not key_in(result.stdout + result.stderr)
    assert not any(key_in(path.read_bytes().decode("latin-1")) for path in files)
    assert len(files) > 3
