"""vLLM's own server says what transformers says, and the stand-in of the other tests answers as it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from http_server_processes import SPOIL, answer_as_vllm, get_in_the_way, served
from reference_logprobs import assert_is_the_truth, documents_of, said_plainly
from vllm_on_cpu import MOST

from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import XtkError
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.vllm_server_client import ServerTeacher
from xtk.tokens.teacher_logprobs import Support
from xtk.tokens.tokenizer import Tokenizer

from .conftest import CONTEXT

HASTY = RetryPolicy(
    max_attempts=5, total_seconds=600, attempt_seconds=120, connect_seconds=20, initial_backoff=0.02, max_backoff=0.1
)


def request_of(folder: Path, servers: list[str], support: Support, **options: object) -> TeacherConfig:
    return TeacherConfig(
        folder,
        "teacher",
        Tokenizer(folder),
        support=support,
        options={"servers": servers, "patience": HASTY, **options},
    )


@pytest.mark.parametrize(
    "support",
    [Support("top-k", top_k=MOST), Support("top-k", top_k=1), Support("top-p", top_k=20, top_p=0.5), Support("none")],
    ids=lambda support: f"{support.kind}-{support.top_k}",
)
def test_the_server_says_what_transformers_says(teacher, server, support):
    found = ServerTeacher(request_of(teacher, [server.url], support))
    assert (found.max_document_tokens, found.vocab_size, found.model) == (CONTEXT, 496, "teacher")
    documents = documents_of(teacher, CONTEXT)
    assert max(map(len, documents)) == CONTEXT, "a document as long as the context is among them"
    truth = said_plainly(teacher, documents)
    for document, scores, expected in zip(documents, found.score(documents), truth, strict=True):
        assert_is_the_truth(scores, document, expected, support, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["500", "cut", "close", *SPOIL])
def test_failures_in_front_of_the_server_leave_no_trace(teacher, server, kind):
    support = Support("top-k", top_k=4)
    documents = documents_of(teacher, CONTEXT)[:5]
    clean = ServerTeacher(request_of(teacher, [server.url], support)).score(documents)
    with served(get_in_the_way, server.url) as proxy:
        found = ServerTeacher(request_of(teacher, [proxy.url], support))
        proxy.trouble(kind, 2, 1)
        for one, two in zip(found.score(documents), clean, strict=True):
            assert np.array_equal(one.ids, two.ids)
            # The same prompt in another batch is summed in another order.
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4, rtol=0)
        assert proxy.seen()["requests"] > len(documents)


def test_a_server_that_dies_between_documents_is_told(teacher, server):
    with served(get_in_the_way, server.url) as proxy:
        found = ServerTeacher(request_of(teacher, [proxy.url], Support("top-k", top_k=4)))
        proxy.kill()
        with pytest.raises(XtkError, match="no server gave a valid response in 5 attempts"):
            found.score(documents_of(teacher, CONTEXT))


def test_more_ids_than_the_server_gives_are_refused(teacher, server):
    with pytest.raises(XtkError, match="the server refused the request: HTTP 400") as caught:
        ServerTeacher(request_of(teacher, [server.url], Support("top-k", top_k=MOST + 1)))
    assert f"--max-logprobs {MOST + 1}" in str(caught.value)


def test_another_tokenizer_is_refused_by_its_ids(pair, server):
    with pytest.raises(XtkError, match="tokenizer differs from the tokenizer"):
        ServerTeacher(request_of(pair.student, [server.url], Support("top-k", top_k=4)))


def asked(url: str, question: dict[str, Any]) -> tuple[int, Any]:
    body = json.dumps({"model": "teacher", "max_tokens": 1, "temperature": 0, **question}).encode()
    try:
        with urlopen(Request(url + "/completions", body, {"Content-Type": "application/json"})) as answer:
            return 200, json.load(answer)
    except HTTPError as wrong:
        return wrong.code, json.load(wrong)


def parts_of(answer: Any) -> Any:
    """What xtk reads of an answer."""
    (choice,) = answer["choices"]
    told = [
        None if entry is None else {token: value["logprob"] for token, value in entry.items()}
        for entry in choice["prompt_logprobs"]
    ]
    generated = choice["logprobs"] and {name: choice["logprobs"][name] for name in ("tokens", "top_logprobs")}
    return [told, generated, choice.get("prompt_token_ids")]


def assert_alike(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(two)
        assert_alike(list(one.values()), list(two.values()))
    elif isinstance(one, list):
        assert isinstance(two, list)
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_alike(first, second)
    elif isinstance(one, float):
        assert one == pytest.approx(two, abs=1e-4)
    else:
        assert one == two


@pytest.mark.parametrize(
    "question",
    [
        {"prompt": [5, 9, 200, 7, 7], "prompt_logprobs": 6},
        {"prompt": [5, 9, 200, 7, 7], "prompt_logprobs": 0},
        {"prompt": [5], "prompt_logprobs": 3},
        {"prompt": "Anna has 12 apples.", "prompt_logprobs": 2, "add_special_tokens": False, "return_token_ids": True},
        {
            "prompt": [5, 9], "prompt_logprobs": 3, "logprobs": 3, "allowed_token_ids": [300],
            "return_tokens_as_token_ids": True,
        },
    ],
    ids=["ids", "no ids", "one token", "text", "a forced token"],
)  # fmt: skip
def test_the_stand_in_answers_as_vllm_does(teacher, server, question):
    with served(answer_as_vllm, str(teacher), ["teacher"], {"max_logprobs": MOST}) as stand_in:
        (status, real), (made, answer) = asked(server.url, question), asked(stand_in.url, question)
    assert status == made == 200
    assert_alike(parts_of(real), parts_of(answer))


@pytest.mark.parametrize(
    "question",
    [
        {"prompt": [1, 2], "prompt_logprobs": MOST + 1},
        {"prompt": [1] * CONTEXT, "prompt_logprobs": 1},
        {"prompt": [1] * (CONTEXT + 1), "prompt_logprobs": 1},
        {"prompt": [1, 2], "prompt_logprobs": 1, "model": "none"},
    ],
    ids=["too many ids", "no room", "too long", "no such model"],
)
def test_the_stand_in_refuses_as_vllm_does(teacher, server, question):
    with served(answer_as_vllm, str(teacher), ["teacher"], {"max_logprobs": MOST}) as stand_in:
        (status, real), (made, answer) = asked(server.url, question), asked(stand_in.url, question)
    assert status == made >= 400
    assert answer["error"]["message"] in real["error"]["message"] or (
        answer["error"]["message"].partition(" tokens")[0] in real["error"]["message"]
    )


def test_both_name_their_models_alike(teacher, server):
    with served(answer_as_vllm, str(teacher), ["teacher"], {}) as stand_in:
        found = []
        for url in (server.url, stand_in.url):
            with urlopen(url + "/models") as answer:
                (model,) = json.load(answer)["data"]
            found.append({name: model[name] for name in ("id", "root", "max_model_len")})
    assert found[0] == found[1]
