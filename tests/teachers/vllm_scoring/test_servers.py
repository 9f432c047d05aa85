"""vLLM's server matches transformers, and the stand-in server of the other tests responds like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from http_server_processes import CORRUPTIONS, run_server, serve_as_vllm, serve_faulty_proxy
from reference_logprobs import assert_logprobs_match, compute_full_logprobs, make_documents
from vllm_on_cpu import MAX_LOGPROBS

from xtk.cache.teacher_logprobs import Support
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import XtkError
from xtk.models.resolver import ModelRef
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.vllm_server_client import ServerTeacher
from xtk.text.tokenizer import Tokenizer

from .conftest import CONTEXT

FAST_RETRIES = RetryPolicy(
    max_attempts=5, total_seconds=600, attempt_seconds=120, connect_seconds=20, initial_backoff=0.02, max_backoff=0.1
)


def teacher_config(folder: Path, servers: list[str], support: Support, **options: object) -> TeacherConfig:
    return TeacherConfig(
        ModelRef(folder, name="teacher"),
        Tokenizer(folder),
        support=support,
        options={"servers": servers, "patience": FAST_RETRIES, **options},
    )


@pytest.mark.parametrize(
    "support",
    [
        Support("top-k", top_k=MAX_LOGPROBS),
        Support("top-k", top_k=1),
        Support("top-p", top_k=20, top_p=0.5),
        Support("none"),
    ],
    ids=lambda support: f"{support.kind}-{support.top_k}",
)
def test_vllm_server_matches_transformers(teacher, server, support):
    server_teacher = ServerTeacher(teacher_config(teacher, [server.url], support))
    assert (server_teacher.max_document_tokens, server_teacher.vocab_size, server_teacher.model) == (
        CONTEXT,
        496,
        "teacher",
    )
    documents = make_documents(teacher, CONTEXT)
    assert max(map(len, documents)) == CONTEXT, "a document as long as the context is among them"
    full_logprobs = compute_full_logprobs(teacher, documents)
    for document, scores, expected in zip(documents, server_teacher.score(documents), full_logprobs, strict=True):
        assert_logprobs_match(scores, document, expected, support, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["500", "cut", "close", *CORRUPTIONS])
def test_failures_between_client_and_server_do_not_change_the_result(teacher, server, kind):
    support = Support("top-k", top_k=4)
    documents = make_documents(teacher, CONTEXT)[:5]
    expected = ServerTeacher(teacher_config(teacher, [server.url], support)).score(documents)
    with run_server(serve_faulty_proxy, server.url) as proxy:
        server_teacher = ServerTeacher(teacher_config(teacher, [proxy.url], support))
        proxy.inject_fault(kind, 2, 1)
        for one, two in zip(server_teacher.score(documents), expected, strict=True):
            assert np.array_equal(one.ids, two.ids)
            # The same prompt in another batch is summed in another order.
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4, rtol=0)
        assert proxy.request_counts()["requests"] > len(documents)


def test_killed_server_is_reported(teacher, server):
    with run_server(serve_faulty_proxy, server.url) as proxy:
        server_teacher = ServerTeacher(teacher_config(teacher, [proxy.url], Support("top-k", top_k=4)))
        proxy.kill()
        with pytest.raises(XtkError, match="no server gave a valid response in 5 attempts"):
            server_teacher.score(make_documents(teacher, CONTEXT))


def test_top_k_above_the_server_limit_is_refused(teacher, server):
    with pytest.raises(XtkError, match="the server refused the request: HTTP 400") as raised:
        ServerTeacher(teacher_config(teacher, [server.url], Support("top-k", top_k=MAX_LOGPROBS + 1)))
    assert f"--max-logprobs {MAX_LOGPROBS + 1}" in str(raised.value)


def test_server_with_another_tokenizer_is_refused(pair, server):
    with pytest.raises(XtkError, match="tokenizer differs from the tokenizer"):
        ServerTeacher(teacher_config(pair.student, [server.url], Support("top-k", top_k=4)))


def post_completion(url: str, payload: dict[str, Any]) -> tuple[int, Any]:
    body = json.dumps({"model": "teacher", "max_tokens": 1, "temperature": 0, **payload}).encode()
    try:
        with urlopen(Request(url + "/completions", body, {"Content-Type": "application/json"})) as response:
            return 200, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def fields_that_xtk_reads(response: Any) -> Any:
    """Return the fields of a response that xtk reads."""
    (choice,) = response["choices"]
    prompt_logprobs = [
        None if entry is None else {token: value["logprob"] for token, value in entry.items()}
        for entry in choice["prompt_logprobs"]
    ]
    generated = choice["logprobs"] and {name: choice["logprobs"][name] for name in ("tokens", "top_logprobs")}
    return [prompt_logprobs, generated, choice.get("prompt_token_ids")]


def assert_approximately_equal(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(two)
        assert_approximately_equal(list(one.values()), list(two.values()))
    elif isinstance(one, list):
        assert isinstance(two, list)
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_approximately_equal(first, second)
    elif isinstance(one, float):
        assert one == pytest.approx(two, abs=1e-4)
    else:
        assert one == two


@pytest.mark.parametrize(
    "payload",
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
def test_stand_in_responds_like_vllm(teacher, server, payload):
    with run_server(serve_as_vllm, str(teacher), ["teacher"], {"max_logprobs": MAX_LOGPROBS}) as stand_in:
        (status, response), (stand_in_status, stand_in_response) = (
            post_completion(server.url, payload),
            post_completion(stand_in.url, payload),
        )
    assert status == stand_in_status == 200
    assert_approximately_equal(fields_that_xtk_reads(response), fields_that_xtk_reads(stand_in_response))


@pytest.mark.parametrize(
    "payload",
    [
        {"prompt": [1, 2], "prompt_logprobs": MAX_LOGPROBS + 1},
        {"prompt": [1] * CONTEXT, "prompt_logprobs": 1},
        {"prompt": [1] * (CONTEXT + 1), "prompt_logprobs": 1},
        {"prompt": [1, 2], "prompt_logprobs": 1, "model": "none"},
    ],
    ids=["too many ids", "no space", "too long", "no such model"],
)
def test_stand_in_refuses_like_vllm(teacher, server, payload):
    with run_server(serve_as_vllm, str(teacher), ["teacher"], {"max_logprobs": MAX_LOGPROBS}) as stand_in:
        (status, response), (stand_in_status, stand_in_response) = (
            post_completion(server.url, payload),
            post_completion(stand_in.url, payload),
        )
    assert status == stand_in_status >= 400
    assert stand_in_response["error"]["message"] in response["error"]["message"] or (
        stand_in_response["error"]["message"].partition(" tokens")[0] in response["error"]["message"]
    )


def test_stand_in_lists_models_like_vllm(teacher, server):
    with run_server(serve_as_vllm, str(teacher), ["teacher"], {}) as stand_in:
        found = []
        for url in (server.url, stand_in.url):
            with urlopen(url + "/models") as response:
                (model,) = json.load(response)["data"]
            found.append({name: model[name] for name in ("id", "root", "max_model_len")})
    assert found[0] == found[1]
