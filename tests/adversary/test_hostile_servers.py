"""Malformed responses of HTTP servers: each ends in an error message, within a limit of time."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from email.utils import formatdate
from multiprocessing.connection import Connection
from typing import ClassVar

import pytest
from http_server_processes import JsonHandler, ServerProcess, run_server, serve_handler
from xtk_processes import run_xtk

from xtk.cache.reader import TeacherCache
from xtk.engines import http_client_pool
from xtk.engines.http_client_pool import Endpoint, EndpointPool, NoResponseError, RetryPolicy
from xtk.engines.server_responses import (
    PermanentError,
    RetryableError,
    checked_logprobs,
    checked_token_ids,
    parse_response,
    parse_token_ids,
)
from xtk.engines.vllm_servers import parse_models
from xtk.errors import XtkError

_TOKEN_ENTRY = {"token": "17", "bytes": [49, 55], "logprob": -1.0, "top_logprobs": []}
_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "17"},
           "logprobs": {"content": [_TOKEN_ENTRY]}}  # fmt: skip
# Malformed parts of a service's answer, and the error message of query-teacher; "": the answer is used.
MALFORMED_ANSWERS = [
    *(({"usage": {"prompt_tokens": count, "completion_tokens": count}}, "")
      for count in ("abc", [1], {"a": 1}, 10**400, -(10**6), 1e300, True, None)),
    ({"usage": 5}, ""),
    ({"choices": [{**_CHOICE, "logprobs": {"content": 5}}]}, "the service's log-probabilities are not lists"),
    ({"choices": [{**_CHOICE, "logprobs": {"tokens": 5, "top_logprobs": 5}}]}, "log-probabilities are not lists"),
    ({"choices": [{**_CHOICE, "logprobs": "many"}]}, "the service's log-probabilities are not lists"),
    ({"choices": [{**_CHOICE, "logprobs": [5]}]}, "the service's log-probabilities are not lists"),
    ({"choices": [{**_CHOICE, "message": "17"}]}, "the service's response has no choice"),
    ({"choices": [{**_CHOICE, "message": ["17"], "logprobs": None}]}, "the service's response has no choice"),
    ({"choices": [{**_CHOICE, "logprobs": None}]}, "the service's answer has no log-probabilities"),
    ({"choices": 5}, "the service's response has no choice"),
]  # fmt: skip
HASTY = RetryPolicy(
    max_attempts=2, total_seconds=20, attempt_seconds=1.5, connect_seconds=5, initial_backoff=0.02, max_backoff=0.1
)


def attack(connection: Connection) -> None:
    """Serve hostile responses; the first part of the path names the method that responds."""

    class Handler(JsonHandler):
        answers = 0
        times: ClassVar[list[float]] = []

        def attack(self) -> None:
            getattr(self, self.path.split("/")[1])()

        do_GET = do_POST = attack  # noqa: N815

        def compressed(self) -> None:
            self.respond(200, gzip.compress(b'{"data": [{"id": "m"}]}'), {"Content-Encoding": "gzip"})

        def redirect(self) -> None:
            self.respond(302, b"", {"Location": "http://127.0.0.1:9/v1/models"})

        def nowhere(self) -> None:
            self.respond(302, b"")

        def drip(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b" ")
                time.sleep(0.05)

        def hints(self) -> None:
            while True:
                self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100)

        def hang(self) -> None:
            time.sleep(60)

        def deep(self) -> None:
            self.respond(200, b'{"data":' * 10_000 + b"1" + b"}" * 10_000)

        def number(self) -> None:
            self.respond(200, b'{"data": [{"id": "m", "max_model_len": ' + b"9" * 5000 + b"}]}")

        def length(self) -> None:
            self.respond(200, b'{"data": [{"id": "m", "max_model_len": -5}]}')

        def name(self) -> None:
            self.respond(200, b'{"data": [{"id": ["m"]}]}')

        def nan(self) -> None:
            self.respond(200, b'{"data": NaN}')

        def nul(self) -> None:
            self.respond(200, b"\0" * 1000)

        def html(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            self.respond(200, b"<html>gateway</html>", {"Content-Type": "text/html"})

        def latin(self) -> None:
            self.respond(200, b'{"data": "\xff\xfe"}')

        def switch(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Handler.answers += 1
            self.respond(200, {"model": "m" if Handler.answers < 3 else "other", "data": [{"id": "m"}]})

        def error(self) -> None:
            self.respond(500, b"x" * (1 << 24))

        def fails(self) -> None:
            """Respond with the status in the path, and the number of requests."""
            self.rfile.read(int(self.headers["Content-Length"]))
            Handler.answers += 1
            self.respond(int(self.path.split("/")[2]), f"request {Handler.answers}".encode())

        def key(self) -> None:
            header = self.headers["Authorization"]
            if self.path.endswith("models"):
                self.respond(401, {"error": {"message": f"invalid header Authorization: {header}"}})
            else:
                self.respond(200, {"model": "m", "choices": [_CHOICE], "request": {"Authorization": header}})

        def malformed(self) -> None:
            model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
            changed = {} if model == "m" else MALFORMED_ANSWERS[int(model)][0]
            self.respond(200, {"model": model, "choices": [_CHOICE], **changed})

        def one_without(self) -> None:
            """Answer the first prompt at once without log-probabilities, and the others later."""
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            if b"0 + 5?" in raw:
                self.respond(200, {"model": "m", "choices": [{**_CHOICE, "logprobs": None}]})
            else:
                time.sleep(1)
                self.respond(200, {"model": "m", "choices": [_CHOICE]})

        def invalid(self) -> None:
            """Answer prompts with an even number, and others with the fault that the model's name states."""
            request = self.read_json()
            model, is_even = request["model"], request["messages"][0]["content"][0] in "02468"
            entry = {**_TOKEN_ENTRY, "logprob": 0.5} if model == "positive" else _TOKEN_ENTRY
            entries = [entry] * (2 if model == "count" else 1)
            choice = {**_CHOICE, "logprobs": {"content": entries}}
            if model == "filtered":
                choice = choice if is_even else {**_CHOICE, "finish_reason": "content_filter"}
            self.respond(200, {"model": model, "choices": [choice]})

        def busy(self) -> None:
            """Refuse the first request until a date, and answer later ones."""
            self.rfile.read(int(self.headers["Content-Length"]))
            Handler.times.append(time.time())
            if len(Handler.times) == 1:
                retry_date = formatdate(time.time() + 4, usegmt=True)
                self.respond(429, {"error": {"message": "too many"}}, {"Retry-After": retry_date})
            else:
                self.respond(200, {"model": "m", "choices": [_CHOICE]})

        def other_model(self) -> None:
            self.respond(200, {"model": "other", "choices": [_CHOICE]})

        def escapes(self) -> None:
            self.respond(404, {"error": {"message": "\x1b]0;owned\x07\x1b[31mred\u202e\x9b2J"}})

    serve_handler(Handler, connection)


@pytest.fixture(scope="module")
def server():
    with run_server(attack) as running:
        yield running


def request_models(server: ServerProcess, kind: str) -> object:
    endpoint = Endpoint.parse(f"{server.host}/{kind}/v1")
    pool = EndpointPool([endpoint], concurrency=2, retry_policy=HASTY)

    async def send_request() -> object:
        async with pool.connected():
            return await pool.request_one(endpoint, "/models", None, parse_models, max_attempts=1)

    return asyncio.run(send_request())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("drip", "within 1.5 seconds"),
        ("hints", "within 1.5 seconds"),
        ("hang", "within 1.5 seconds"),
        ("deep", "not valid JSON|nested"),
        ("number", "not valid JSON"),
        ("length", "max_model_len"),
        ("name", "a model whose id is not a string"),
        ("nan", "NaN is not a JSON number"),
        ("nul", "not valid JSON"),
        ("html", "not valid JSON"),
        ("latin", "not valid JSON"),
        ("error", "500 x"),
    ],
)
def test_malformed_response_ends_in_a_short_error(server, kind, message):
    started = time.monotonic()
    with pytest.raises(NoResponseError, match=message) as raised:
        request_models(server, kind)
    assert time.monotonic() - started < 10
    assert len(raised.value.what) < 1000


def test_compressed_response_is_read(server):
    assert request_models(server, "compressed") == [{"id": "m"}]


@pytest.mark.parametrize(("status", "attempts"), [(500, 5), (501, 5), (502, 12), (503, 12), (529, 12)])
def test_internal_errors_are_retried_less_often_than_those_of_busy_servers(status, attempts):
    policy = RetryPolicy(max_attempts=12, initial_backoff=0.001, max_backoff=0.01)
    with run_server(attack) as running:
        endpoint = Endpoint.parse(f"{running.host}/fails/{status}/v1")
        pool = EndpointPool([endpoint], concurrency=1, retry_policy=policy)

        async def send_request() -> object:
            async with pool.connected():
                return await pool.request("/x", lambda _: {}, str, what="a document")

        with pytest.raises(XtkError, match=f"in {attempts} attempts; last error: .*: HTTP {status} request {attempts}"):
            asyncio.run(send_request())


def test_hints_for_a_service_do_not_name_vllm(query_teacher):
    stderr = query_teacher("m", kind="html", code=1).stderr
    assert "check that a service with the OpenAI interface answers at this URL" in " ".join(stderr.split())
    assert "vllm" not in stderr.lower()


def test_request_without_a_body_has_the_shorter_status_timeout(server, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HASTY", RetryPolicy(attempt_seconds=600, status_seconds=1))
    with pytest.raises(NoResponseError, match="within 1 seconds"):
        request_models(server, "hints")


def test_server_that_changes_its_model_is_refused(server):
    endpoint = Endpoint.parse(f"{server.host}/switch/v1")
    pool = EndpointPool([endpoint], concurrency=1, retry_policy=HASTY)

    async def send_requests() -> None:
        async with pool.connected():
            for _ in range(3):
                await pool.request_one(endpoint, "/completions", {}, parse_models, max_attempts=1)

    with pytest.raises(XtkError, match="the server answered with the model 'm' first, and now with 'other'"):
        asyncio.run(send_requests())


def test_redirects_are_not_followed(server):
    with pytest.raises(PermanentError, match=r"xtk does not follow the redirect to http://127\.0\.0\.1:9/v1/models"):
        request_models(server, "redirect")
    with pytest.raises(PermanentError, match="xtk does not follow the redirect to an unknown address"):
        request_models(server, "nowhere")


def test_server_that_hangs_is_reported_while_waiting(server, capsys, monkeypatch):
    monkeypatch.setattr(http_client_pool, "REPORT_INTERVAL_SECONDS", 0.4)
    with pytest.raises(NoResponseError):
        request_models(server, "hang")
    assert "no response for" in capsys.readouterr().err


def test_escape_codes_in_a_response_do_not_reach_the_terminal(server, pair, corpus, tmp_path):
    result = run_xtk("cache-teacher", pair.teacher, corpus, "--backend", "server", "--server",
                     f"{server.host}/escapes/v1", "--top-k", 4, "-o", tmp_path / "cache", code=1)  # fmt: skip
    assert "Traceback" not in result.stderr
    assert r"\x1b]0;owned\x07\x1b[31mred\u202e\x9b2J" in result.stderr
    assert not any(mark in result.stderr for mark in "\x1b\x07\x9b\u202e")


def test_api_key_that_a_service_repeats_is_redacted_in_errors_and_files(server, corpus, tmp_path, monkeypatch):
    secret = "sk-0123456789abcdef"
    monkeypatch.setenv("XTK_API_KEY", secret)
    with pytest.raises(PermanentError) as raised:
        request_models(server, "key")
    assert "Bearer ***" in str(raised.value)
    assert secret not in str(raised.value)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "12 + 5?"}]}) + "\n")
    result = run_xtk(
        "query-teacher", f"{server.host}/key/v1#m", tmp_path / "prompts.jsonl", "-o", tmp_path / "answers.jsonl"
    )
    assert "Bearer ***" in (tmp_path / "answers.jsonl").read_text()
    assert secret not in (tmp_path / "answers.jsonl").read_text() + result.stdout + result.stderr


@pytest.fixture
def query_teacher(server, run, tmp_path):
    """Return a function that runs query-teacher on a prompt that costs at most 20, or on several."""

    def query(model: str, *options: object, num_prompts: int = 1, kind: str = "malformed", code: int = 0):
        rows = ({"messages": [{"role": "user", "content": f"{one} + 5?"}]} for one in range(num_prompts))
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run("query-teacher", f"{server.host}/{kind}/v1#{model}", tmp_path / "prompts.jsonl", "--json",
                   *options, "-o", tmp_path / "answers.jsonl", code=code)  # fmt: skip

    return query


@pytest.mark.parametrize("index", range(len(MALFORMED_ANSWERS)))
def test_malformed_answer_is_refused_and_malformed_usage_is_estimated(query_teacher, tmp_path, index):
    message = MALFORMED_ANSWERS[index][1]
    prices = ("--output-price", 1e6, "--max-completion-length", 20, "--max-cost", 25)
    result = query_teacher(str(index), *prices, code=1 if message else 0)
    assert message in " ".join(result.stderr.split())
    if not message:
        assert 0 < json.loads(result.stdout)["cost"] <= 20
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "damage", [{"response": None}, {"response": 5}, {"response": {}}, {"response": {"choices": 5}}]
)
def test_corrupt_answer_in_the_output_file_is_refused(query_teacher, tmp_path, damage):
    query_teacher("m")
    row = json.loads((tmp_path / "answers.jsonl").read_text())
    damaged = json.dumps({key: value for key, value in {**row, **damage}.items() if value is not None}) + "\n"
    (tmp_path / "answers.jsonl").write_text(damaged)
    assert "a line of the output file is not an answer" in query_teacher("m", code=1).stderr
    assert (tmp_path / "answers.jsonl").read_text() == damaged


def test_resumed_output_file_refuses_answers_of_another_model(query_teacher, tmp_path):
    query_teacher("m")
    kept = (tmp_path / "answers.jsonl").read_bytes()
    stderr = query_teacher("m", num_prompts=3, kind="other_model", code=1).stderr
    assert "answered with the model 'm' first, and now with 'other'" in " ".join(stderr.split())
    assert (tmp_path / "answers.jsonl").read_bytes() == kept
    query_teacher("m", num_prompts=3)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("model", "why"), [("positive", "a log-probability is 0.5"), ("count", "are of another text than the answer")]
)
def test_service_whose_first_answers_cannot_be_used_is_paid_for_three(query_teacher, tmp_path, model, why):
    result = query_teacher(model, "--concurrency", 1, num_prompts=9, kind="invalid", code=1)
    assert "cache import can use none of the first 3 answers" in " ".join(result.stderr.split())
    assert why in " ".join(result.stderr.split())
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3


def test_answers_that_a_filter_has_cut_do_not_become_training_text(query_teacher, run, tmp_path):
    result = query_teacher("filtered", "--concurrency", 1, num_prompts=5, kind="invalid")
    assert "cache import cannot use 2 of 5 new answers; the first: document 1: a filter of the service" in result.stderr
    refused = run("cache", "import", tmp_path / "answers.jsonl", "-o", tmp_path / "cache", code=1)
    assert "finish_reason content_filter" in " ".join(refused.stderr.split())
    assert not (tmp_path / "cache").exists()
    run("cache", "import", tmp_path / "answers.jsonl", "--skip-invalid", "-o", tmp_path / "cache")
    assert run("inspect", tmp_path / "cache", "--json").stdout.count("content_filter") == 0
    assert [one.document.text for one in TeacherCache(tmp_path / "cache")] == ["0 + 5?17", "2 + 5?17", "4 + 5?17"]


def test_answers_in_flight_are_kept_when_one_has_no_log_probabilities(query_teacher, tmp_path):
    result = query_teacher("m", "--concurrency", 3, num_prompts=5, kind="one_without", code=1)
    assert "the service's answer has no log-probabilities" in " ".join(result.stderr.split())
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_busy_service_is_retried_at_its_retry_after_date(query_teacher):
    started = time.monotonic()
    query_teacher("m", kind="busy")
    assert time.monotonic() - started > 2.5  # dates have whole seconds


@pytest.mark.parametrize("name", ["1_2_3", " 3", "3 ", "+3", "-1", "٣", "0x1", "", "03", "9" * 30, "3000000000", "1.0"])
def test_key_that_is_not_a_token_id_is_refused(name):
    with pytest.raises(RetryableError, match="token id"):
        parse_token_ids([name])
    assert parse_token_ids(["0", "123"]).tolist() == [0, 123]


@pytest.mark.parametrize("values", [[True], [1.5], [-1], [1 << 40], ["3"], None, {"0": 1}])
def test_value_that_is_not_a_token_id_is_refused(values):
    with pytest.raises(RetryableError, match="token id"):
        checked_token_ids(values)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), 0.5, None, "-1", True, -(10**400)])
def test_value_that_is_not_a_log_probability_is_refused(value):
    with pytest.raises(RetryableError, match="log-probability"):
        checked_logprobs([-1.0, value])
    assert checked_logprobs([0, -2.5]).tolist() == [0, -2.5]


def test_infinity_and_nan_in_json_are_refused():
    for text in ("-Infinity", "Infinity", "NaN"):
        with pytest.raises(ValueError, match="is not a JSON number"):
            parse_response(json.dumps({"logprob": 0}).replace("0", text))
    with pytest.raises(RetryableError, match="not finite"):
        checked_logprobs([parse_response("-1e999")])
