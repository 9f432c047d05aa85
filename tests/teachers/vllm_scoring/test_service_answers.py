"""A service that xtk knows by its URL alone: vLLM's own service, asked as any OpenAI-compatible one."""

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
from http_server_processes import get_in_the_way, served
from transformers import AutoModelForCausalLM
from vllm_on_cpu import Server

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.tokens.tokenizer import Tokenizer

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


def ask(run, service, data: Path, output: Path, *options: object, code: int | None = 0):
    return run(
        "query-teacher", f"{service.url}#teacher", data, "--top-logprobs", TOP, *options, "-o", output, code=code
    )


def spelled(cache: TeacherCache, number: int) -> list[dict[bytes, float]]:
    """The listed tokens of each position of a document by their bytes, without padding rows and special tokens."""
    spellings, found = cache.teacher_tokenizer.vocabulary.bytes_by_id, []
    one = cache.read_document(number, None).teacher_logprobs
    for at in range(len(one.positions)):
        entries = slice(one.offsets[at], one.offsets[at + 1])
        pairs = zip(one.ids[entries].tolist(), one.logprobs[entries].tolist(), strict=True)
        found.append({spellings[token]: value for token, value in pairs if token < len(spellings) and spellings[token]})
    return found


def test_scored_texts_have_the_log_probabilities_of_the_model(run, folder, service, tmp_path):
    # Texts of ASCII: this interface names tokens by their text, and loses bytes of characters.
    texts = [text for text in small_inputs.sentences(60, seed=5) if text.isascii()][:20]
    data = small_inputs.write_jsonl(tmp_path / "texts.jsonl", texts)
    ask(run, service, data, tmp_path / "echo.jsonl", "--mode", "echo")
    run("import-cache", tmp_path / "echo.jsonl", "--precision", "float32", "-o", tmp_path / "api")
    api, tokenizer = TeacherCache(tmp_path / "api"), Tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert len(api) == len(texts)
    for number, text in enumerate(texts):
        assert api.read_document(number).document.text == text
        ids = tokenizer.encode([text])[0].ids.tolist()
        with torch.no_grad():
            truth = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found = spelled(api, number)
        assert len(found) == len(ids) - 1  # the service does not score the first token
        for at, (listed, row) in enumerate(zip(found, truth[:-1], strict=True)):
            assert tokenizer.vocabulary.bytes_of(ids[at + 1]) in listed
            for spelling, logprob in listed.items():
                assert logprob == pytest.approx(float(row[tokenizer.vocabulary.token_of_bytes[spelling]]), abs=2e-3)


def test_killed_twice_it_continues_and_no_answer_is_asked_for_again(run, service, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    options = ["--mode", "text", "--max-completion-length", "12", "--concurrency", "1", "--temperature", "0"]
    command = [sys.executable, "-m", "xtk", "query-teacher", None, str(prompts), "--top-logprobs", str(TOP), *options,
               "-o", str(output)]  # fmt: skip
    with served(get_in_the_way, service.url) as proxy:
        command[4] = f"{proxy.url}#teacher"
        for wanted in (3, 7):
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            end = time.monotonic() + 120
            while time.monotonic() < end and not (output.exists() and output.read_bytes().count(b"\n") >= wanted):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert output.read_bytes().count(b"\n") >= wanted
        with output.open("ab") as stream:
            stream.write(b'{"key": "a torn line')
        before = [json.loads(line) for line in output.read_bytes().splitlines()[:-1]]
        run("query-teacher", f"{proxy.url}#teacher", prompts, "--top-logprobs", TOP, *options, "-o", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert [row["request"]["prompt"] for row in rows] == PROMPTS
    kept = {row["key"]: row["response"]["id"] for row in before}
    assert all(row["response"]["id"] == kept[row["key"]] for row in rows if row["key"] in kept)
    once = output.stat().st_mtime_ns
    run("query-teacher", f"{service.url}#teacher", prompts, "--top-logprobs", TOP, *options, "-o", output)
    assert output.stat().st_mtime_ns == once
    other = run("query-teacher", f"{service.url}#teacher", prompts, "--top-logprobs", 3, *options, "-o", output, code=1)
    assert "answers to other requests" in other.stderr


def test_chat_answers_have_the_bytes_of_their_tokens(run, folder, service, prompts, tmp_path):
    messages = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    messages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # An untrained model soon writes broken UTF-8.
    ask(run, service, messages, tmp_path / "answers.jsonl", "--max-completion-length", "3")
    by_bytes, by_ids = tmp_path / "bytes", tmp_path / "ids"
    run("import-cache", tmp_path / "answers.jsonl", "--precision", "float32", "--skip-invalid", "-o", by_bytes)
    run("import-cache", tmp_path / "answers.jsonl", "--precision", "float32", "--skip-invalid", "--tokenizer", folder,
        "-o", by_ids)  # fmt: skip
    one, other = TeacherCache(by_bytes), TeacherCache(by_ids)
    assert len(one) == len(other) > 0
    for number in range(len(one)):
        assert not any(b"\xef\xbf\xbd" in name for position in spelled(one, number) for name in position)
        assert spelled(one, number) == spelled(other, number)
    tokenizer = Tokenizer(folder)
    stored = other.read_document(0, None)
    content = stored.document.segments[-1].text
    spellings = [tokenizer.vocabulary.bytes_of(token) for token in stored.tokens.ids[1:].tolist()]
    assert b"".join(spellings).decode() == content
    assert np.isfinite(stored.teacher_logprobs.observed_logprobs).all()


def test_the_cost_has_a_limit_that_a_larger_one_continues(run, service, prompts, tmp_path):
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
    stopped = ask(run, service, prompts, output, *options, "--max-cost", "100", code=75)
    assert "--max-cost" in stopped.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    used = sum(sum(row["response"]["usage"][name] for name in ("prompt_tokens", "completion_tokens")) for row in rows)
    assert 0 < used <= 100
    ask(run, service, prompts, output, *options, "--max-cost", str(expected["max_cost"]))
    assert len(output.read_text().splitlines()) == len(PROMPTS)


def test_requests_per_minute_have_a_limit(run, service, prompts, tmp_path):
    start = time.monotonic()
    ask(run, service, prompts, tmp_path / "answers.jsonl", "--mode", "text", "--max-completion-length", "2",
        "--max-requests-per-minute", "240")  # fmt: skip
    assert time.monotonic() - start > 0.25 * (len(PROMPTS) - 1)


def test_a_key_is_read_from_its_variable_and_is_nowhere_else(run, service, prompts, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    options = ["--mode", "text", "--max-completion-length", "2"]
    monkeypatch.delenv("XTK_API_KEY")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    refused = ask(run, service, prompts, output, *options, code=1)
    assert "401" in refused.stderr
    assert "--api-key-env" in refused.stderr
    unset = ask(run, service, prompts, output, *options, "--api-key-env", "MY_KEY", code=1)
    assert "MY_KEY" in unset.stderr
    monkeypatch.setenv("MY_KEY", KEY)
    done = ask(run, service, prompts, output, *options, "--api-key-env", "MY_KEY", "--json")
    assert KEY not in done.stdout + done.stderr + output.read_text()
    monkeypatch.setenv("MY_KEY", KEY + "-wrong")
    output.unlink()
    refused = ask(run, service, prompts, output, *options, "--api-key-env", "MY_KEY", code=1)
    assert KEY not in refused.stdout + refused.stderr
