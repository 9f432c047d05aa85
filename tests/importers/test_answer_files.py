"""Answer files of query-teacher: foreign files are refused and unchanged. These tests send no requests."""

import json
import tracemalloc

import pytest

from xtk.importers.service_answers import AnswerFile, make_requests
from xtk.options.shared import ServiceOptions
from xtk.text.document import Document

URL = "http://127.0.0.1:9/v1"  # no server listens on this port
LOGPROBS = {"content": [{"token": "b", "logprob": -1.0, "top_logprobs": []}]}
RESPONSE = {"model": "m", "choices": [{"message": {"content": "b"}, "finish_reason": "stop", "logprobs": LOGPROBS}]}


def requests_of(model: str = "m", **options):
    documents = [Document.from_text(text) for text in ("a", "b", "c")]
    return make_requests(documents, f"{URL}#{model}", ServiceOptions(**options))


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"key": 3}\n', b'{"text": "a"}\n{"te'])
def test_foreign_output_file_is_refused_and_unchanged(run, tmp_path, content):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "notes").write_bytes(content)
    refused = run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "-o", tmp_path / "notes", code=1)
    assert "which is not a file of answers of xtk" in refused.stderr
    assert (tmp_path / "notes").read_bytes() == content
    run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "-o", tmp_path / "data.jsonl", code=1)
    assert (tmp_path / "data.jsonl").read_text() == '{"text": "a"}\n'
    run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "-o", tmp_path, code=1)


def test_answer_file_of_another_model_or_other_options_is_refused(run, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in "abc"))
    file = AnswerFile(tmp_path / "answers.jsonl", requests_of())
    for one in requests_of():
        file.add(one, RESPONSE)
    before = (tmp_path / "answers.jsonl").read_bytes()
    arguments = [tmp_path / "data.jsonl", "-o", tmp_path / "answers.jsonl"]
    assert run("query-teacher", f"{URL}#m", *arguments, "--json").returncode == 0  # all answers are there
    for changed in ([f"{URL}#n"], [f"{URL}#m", "--top-logprobs", 3], [f"{URL}#m", "--temperature", 0.5]):
        refused = run("query-teacher", *changed, *arguments, code=1)
        assert "answers to other requests" in refused.stderr
        assert (tmp_path / "answers.jsonl").read_bytes() == before
    refused = run("query-teacher", URL, *arguments, code=1)
    assert "name of a model" in refused.stderr


def test_incomplete_line_is_dropped_and_its_request_stays_open(tmp_path):
    requests, path = requests_of(), tmp_path / "answers.jsonl"
    file = AnswerFile(path, requests)
    for one in requests[:2]:
        file.add(one, RESPONSE)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = AnswerFile(path, requests)
        kept = whole[:size].count(b"\n")
        assert len(found.answers) == kept
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:kept])


def test_equal_requests_share_an_answer_and_the_sorted_file_has_the_data_order(tmp_path):
    documents = [Document.from_text(text) for text in ("a", "b", "a")]
    requests = make_requests(documents, f"{URL}#m", ServiceOptions())
    file = AnswerFile(tmp_path / "answers.jsonl", requests)
    for one in (requests[1], requests[0]):
        file.add(one, RESPONSE)
    file.sort()
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row["request"]["messages"][0]["content"] for row in rows] == ["a", "b", "a"]


def test_command_sorts_a_complete_answer_file(run, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in "abc"))
    file = AnswerFile(tmp_path / "answers.jsonl", requests_of())
    for one in reversed(requests_of()):
        file.add(one, RESPONSE)
    run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "-o", tmp_path / "answers.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert not (tmp_path / "answers.jsonl.1").exists()


def test_fewer_listed_tokens_than_requested_are_reported(run, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    chat = {"content": [{"token": "b", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -1.0}] * 5}]}
    text = {"tokens": ["b"], "token_logprobs": [-1.0], "top_logprobs": [{"b": -1.0, "c": -2.0}]}
    for mode, logprobs, count in (("chat", chat, 5), ("text", text, 2)):
        path = tmp_path / f"{mode}.jsonl"
        (request,) = make_requests([Document.from_text("a")], f"{URL}#m", ServiceOptions(mode=mode))
        choice = {**RESPONSE["choices"][0], "logprobs": logprobs}
        AnswerFile(path, [request]).add(request, {**RESPONSE, "choices": [choice]})
        stderr = run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "--mode", mode, "-o", path).stderr
        assert f"lists at most {count} tokens per position, of --top-logprobs 20" in " ".join(stderr.split())


@pytest.mark.parametrize(
    ("mode", "count", "limit"), [("chat", 20, 0), ("chat", 21, 20), ("echo", 6, 5), ("text", 5, 0)]
)
def test_estimate_reports_the_usual_limit_of_services(run, tmp_path, mode, count, limit):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    stderr = run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "--mode", mode, "--top-logprobs", count,
               "--estimate", "-o", tmp_path / "answers.jsonl").stderr  # fmt: skip
    assert ("many services list at most" in stderr) == bool(limit)
    assert not limit or f"at most {limit} tokens" in stderr


@pytest.mark.parametrize(
    ("mode", "row", "what"),
    [
        ("echo", {"prompt": "12 + 5 = ", "completion": "17"}, "a prompt, which is not trained"),
        (
            "echo",
            {
                "segments": [
                    {"role": "user", "text": "a", "train": False},
                    {"role": "assistant", "text": "b", "train": True},
                ]
            },
            "a prompt, which is not trained",
        ),
        ("chat", {"prompt": "12 + 5 = ", "teacher_prompt": "The sum is 17. 12 + 5 = "}, "has a teacher_prompt"),
    ],
)
def test_prompts_that_the_mode_does_not_support_are_refused(run, tmp_path, mode, row, what):
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    refused = run("query-teacher", f"{URL}#m", tmp_path / "data.jsonl", "--mode", mode, "--estimate",
                  "-o", tmp_path / "answers.jsonl", code=1)  # fmt: skip
    assert what in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_answers(tmp_path):
    """A file of 20 MB is opened, continued and sorted with less than 8 MB."""
    listed = [{"token": f"t{number}", "logprob": -1.0} for number in range(1000)]
    response = {**RESPONSE, "choices": [{**RESPONSE["choices"][0], "logprobs": {"content": [
        {"token": "b", "logprob": -1.0, "top_logprobs": listed}] * 10}}]}  # fmt: skip
    requests = make_requests([Document.from_text(f"{n}") for n in range(56)], f"{URL}#m", ServiceOptions())
    file = AnswerFile(tmp_path / "answers.jsonl", requests)
    for one in reversed(requests):
        file.add(one, response)
    assert (tmp_path / "answers.jsonl").stat().st_size > 19_000_000
    tracemalloc.start()
    AnswerFile(tmp_path / "answers.jsonl", requests).sort()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8_000_000
    with (tmp_path / "answers.jsonl").open() as stream:
        assert json.loads(stream.readline())["index"] == 0
