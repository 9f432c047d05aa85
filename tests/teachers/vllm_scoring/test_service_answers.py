"""query-teacher with an OpenAI-compatible service: vLLM's server, of which xtk has only the URL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_inputs
import torch
from http_server_processes import run_server, serve_faulty_proxy
from transformers import AutoModelForCausalLM
from vllm_on_cpu import Server

from xtk.cache.reader import TeacherCache
from xtk.text.tokenizer import Tokenizer

TOP, KEY = 8, "secret-key-of-the-test"
PROMPTS = [f"Anna has {number} apples and" for number in range(12)]


@pytest.fixture(scope="module")
def folder(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = shutil.copytree(teacher, tmp_path_factory.mktemp("service") / "teacher")
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (copied / "chat_template.jinja").write_text(template)
    return copied


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server"
    running = Server(folder, log, "--served-model-name", "teacher", "--api-key", KEY)
    try:
        running.wait()
        yield running
    finally:
        running.stop()


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XTK_API_KEY", KEY)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return small_inputs.write_jsonl(tmp_path / "prompts.jsonl", PROMPTS)


def query(run, service, data: Path, output: Path, *options: object, code: int | None = 0):
    return run(
        "query-teacher", f"{service.url}#teacher", data, "--top-logprobs", TOP, *options, "-o", output, code=code
    )


def listed_logprobs(cache: TeacherCache, number: int) -> list[dict[bytes, float]]:
    """Return {bytes: log-probability} of each position's listed tokens, without padding rows and special tokens."""
    bytes_by_id, found = cache.teacher_tokenizer.vocabulary.bytes_by_id, []
    logprobs = cache.read_document(number, None).teacher_logprobs
    for at in range(len(logprobs.positions)):
        entries = slice(logprobs.offsets[at], logprobs.offsets[at + 1])
        pairs = zip(logprobs.ids[entries].tolist(), logprobs.logprobs[entries].tolist(), strict=True)
        found.append(
            {bytes_by_id[token]: value for token, value in pairs if token < len(bytes_by_id) and bytes_by_id[token]}
        )
    return found


def test_echo_mode_returns_the_log_probabilities_of_the_model(run, folder, service, tmp_path):
    # ASCII only: this interface returns tokens as text, which loses bytes of split characters.
    texts = [text for text in small_inputs.sentences(60, seed=5) if text.isascii()][:20]
    data = small_inputs.write_jsonl(tmp_path / "texts.jsonl", texts)
    query(run, service, data, tmp_path / "echo.jsonl", "--mode", "echo")
    run("cache", "import", tmp_path / "echo.jsonl", "--precision", "float32", "-o", tmp_path / "api")
    cache, tokenizer = TeacherCache(tmp_path / "api"), Tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert len(cache) == len(texts)
    for number, text in enumerate(texts):
        assert cache.read_document(number).document.text == text
        ids = tokenizer.encode([text])[0].ids.tolist()
        with torch.no_grad():
            full_logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found = listed_logprobs(cache, number)
        assert len(found) == len(ids) - 1  # the service does not score the first token
        for at, (listed, row) in enumerate(zip(found, full_logprobs[:-1], strict=True)):
            assert tokenizer.vocabulary.bytes_of(ids[at + 1]) in listed
            for token_bytes, logprob in listed.items():
                assert logprob == pytest.approx(float(row[tokenizer.vocabulary.token_of_bytes[token_bytes]]), abs=2e-3)


def test_killed_command_continues_without_repeating_requests(run, service, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    options = ["--mode", "text", "--max-completion-length", "12", "--concurrency", "1", "--temperature", "0"]
    command = [sys.executable, "-m", "xtk", "query-teacher", None, str(prompts), "--top-logprobs", str(TOP), *options,
               "-o", str(output)]  # fmt: skip
    with run_server(serve_faulty_proxy, service.url) as proxy:
        command[4] = f"{proxy.url}#teacher"
        for num_answers in (3, 7):
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            end = time.monotonic() + 120
            while time.monotonic() < end and not (output.exists() and output.read_bytes().count(b"\n") >= num_answers):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert output.read_bytes().count(b"\n") >= num_answers
        with output.open("ab") as stream:
            stream.write(b'{"key": "a torn line')
        before = [json.loads(line) for line in output.read_bytes().splitlines()[:-1]]
        run("query-teacher", f"{proxy.url}#teacher", prompts, "--top-logprobs", TOP, *options, "-o", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert [row["request"]["prompt"] for row in rows] == PROMPTS
    kept = {row["key"]: row["response"]["id"] for row in before}
    assert all(row["response"]["id"] == kept[row["key"]] for row in rows if row["key"] in kept)
    modified_ns = output.stat().st_mtime_ns
    run("query-teacher", f"{service.url}#teacher", prompts, "--top-logprobs", TOP, *options, "-o", output)
    assert output.stat().st_mtime_ns == modified_ns
    other = run("query-teacher", f"{service.url}#teacher", prompts, "--top-logprobs", 3, *options, "-o", output, code=1)
    assert "answers to other requests" in other.stderr


def test_chat_answers_keep_the_bytes_of_their_tokens(run, folder, service, prompts, tmp_path):
    messages = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    messages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # An untrained model soon generates invalid UTF-8.
    query(run, service, messages, tmp_path / "answers.jsonl", "--max-completion-length", "3")
    by_bytes, by_ids = tmp_path / "bytes", tmp_path / "ids"
    run("cache", "import", tmp_path / "answers.jsonl", "--precision", "float32", "--skip-invalid", "-o", by_bytes)
    run(
        "cache",
        "import",
        tmp_path / "answers.jsonl",
        "--precision",
        "float32",
        "--skip-invalid",
        "--tokenizer",
        folder,
        "-o",
        by_ids,
    )
    cache_by_bytes, cache_by_ids = TeacherCache(by_bytes), TeacherCache(by_ids)
    assert len(cache_by_bytes) == len(cache_by_ids) > 0
    for number in range(len(cache_by_bytes)):
        assert not any(
            b"\xef\xbf\xbd" in token_bytes
            for position in listed_logprobs(cache_by_bytes, number)
            for token_bytes in position
        )
        assert listed_logprobs(cache_by_bytes, number) == listed_logprobs(cache_by_ids, number)
    tokenizer = Tokenizer(folder)
    stored = cache_by_ids.read_document(0, None)
    content = stored.document.segments[-1].text
    tokens_of_answer = [tokenizer.vocabulary.bytes_of(token) for token in stored.tokens.ids[1:].tolist()]
    assert b"".join(tokens_of_answer).decode() == content
    assert np.isfinite(stored.teacher_logprobs.observed_logprobs).all()


def test_max_cost_stops_the_command_and_a_higher_limit_continues_it(run, service, prompts, tmp_path):
    options = [
        "--mode",
        "text",
        "--max-completion-length",
        "4",
        "--input-price",
        "1000000",
        "--output-price",
        "1000000",
    ]
    output = tmp_path / "answers.jsonl"
    expected = json.loads(run("query-teacher", f"{service.url}#teacher", prompts, *options, "--estimate", "--json",
        "-o", output).stdout)  # fmt: skip
    assert expected["requests"] == len(PROMPTS)
    assert not output.exists()
    stopped = query(run, service, prompts, output, *options, "--max-cost", "100", code=75)
    assert "--max-cost" in stopped.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    used = sum(sum(row["response"]["usage"][name] for name in ("prompt_tokens", "completion_tokens")) for row in rows)
    assert 0 < used <= 100
    query(run, service, prompts, output, *options, "--max-cost", str(expected["max_cost"]))
    assert len(output.read_text().splitlines()) == len(PROMPTS)


def test_requests_per_minute_are_limited(run, service, prompts, tmp_path):
    start = time.monotonic()
    query(run, service, prompts, tmp_path / "answers.jsonl", "--mode", "text", "--max-completion-length", "2",
        "--max-requests-per-minute", "240")  # fmt: skip
    assert time.monotonic() - start > 0.25 * (len(PROMPTS) - 1)


def test_api_key_is_read_from_its_variable_and_never_printed(run, service, prompts, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    options = ["--mode", "text", "--max-completion-length", "2"]
    monkeypatch.delenv("XTK_API_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    refused = query(run, service, prompts, output, *options, code=1)
    assert "401" in refused.stderr
    assert "--api-key-env" in refused.stderr
    unset = query(run, service, prompts, output, *options, "--api-key-env", "MY_KEY", code=1)
    assert "MY_KEY" in unset.stderr
    monkeypatch.setenv("MY_KEY", KEY)
    done = query(run, service, prompts, output, *options, "--api-key-env", "MY_KEY", "--json")
    assert KEY not in done.stdout + done.stderr + output.read_text()
    monkeypatch.setenv("MY_KEY", KEY + "-wrong")
    output.unlink()
    refused = query(run, service, prompts, output, *options, "--api-key-env", "MY_KEY", code=1)
    assert KEY not in refused.stdout + refused.stderr
