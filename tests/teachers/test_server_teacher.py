"""Server teachers: log-probabilities equal those of the model, and failed responses never change a result."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_inputs
from http_server_processes import (
    CORRUPTIONS,
    ServerProcess,
    run_server,
    serve_as_sglang,
    serve_as_vllm,
    serve_faulty_proxy,
)
from reference_logprobs import assert_logprobs_match, compute_full_logprobs, make_documents
from small_inputs import Pair

from xtk.cache.teacher_logprobs import StoredLogprobs, Support
from xtk.engines.http_client_pool import RetryPolicy
from xtk.engines.server_responses import RetryableError
from xtk.errors import MismatchError, XtkError
from xtk.models.resolver import ModelRef
from xtk.teachers import vllm_server_client
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.cache_build_config import CacheRequest, check_cache_request
from xtk.teachers.vllm_server_client import ServerTeacher, parse_sglang_response
from xtk.teachers.vllm_top_logprobs import num_tokens_to_read
from xtk.text.token_sequence import TokenSequence
from xtk.text.tokenizer import Tokenizer

FAST_RETRIES = RetryPolicy(
    max_attempts=5, total_seconds=300, attempt_seconds=60, connect_seconds=20, initial_backoff=0.02, max_backoff=0.1
)
TOP_8 = Support("top-k", top_k=8)


def teacher_config(folder: Path, servers: list[str], support: Support = TOP_8, **options: object) -> TeacherConfig:
    return TeacherConfig(
        ModelRef(folder, name="teacher"),
        Tokenizer(folder),
        support=support,
        options={"servers": servers, "patience": FAST_RETRIES, **options},
    )


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[ServerProcess]:
    """Start a server that responds like vLLM."""
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {}) as running:
        yield running


@pytest.fixture(scope="module")
def second_server(pair: Pair) -> Iterator[ServerProcess]:
    """Start another server of the same model."""
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {}) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server: ServerProcess) -> Iterator[ServerProcess]:
    with run_server(serve_faulty_proxy, server.url) as running:
        yield running


@pytest.fixture(scope="module")
def documents(pair: Pair) -> list[TokenSequence]:
    return make_documents(pair.teacher, 256)


@pytest.fixture(scope="module")
def expected_scores(pair: Pair, server: ServerProcess, documents: list[TokenSequence]) -> list[StoredLogprobs]:
    """Return the log-probabilities from a server without failures."""
    return ServerTeacher(teacher_config(pair.teacher, [server.url])).score(documents)


def assert_same(found: list[StoredLogprobs], expected: list[StoredLogprobs]) -> None:
    for one, two in zip(found, expected, strict=True):
        for name in ("positions", "offsets", "ids", "logprobs", "remainder_mass", "observed_logprobs", "entropy"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "support",
    [TOP_8, Support("top-k", top_k=1), Support("top-p", top_k=20, top_p=0.3), Support("none")],
    ids=lambda support: f"{support.kind}-{support.top_k}",
)
def test_server_returns_the_log_probabilities_of_the_model(pair, server, documents, support):
    teacher = ServerTeacher(teacher_config(pair.teacher, [server.url], support))
    assert (teacher.max_document_tokens, teacher.vocab_size, teacher.model) == (256, 496, "teacher")
    assert max(map(len, documents)) == 256, "a document as long as the context is among them"
    full_logprobs = compute_full_logprobs(pair.teacher, documents)
    for document, scores, expected in zip(documents, teacher.score(documents), full_logprobs, strict=True):
        assert_logprobs_match(scores, document, expected, support, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("support", [TOP_8, Support("top-p", top_k=20, top_p=0.3), Support("none")])
@pytest.mark.parametrize("starts", [[], [0]])
def test_sglang_server_returns_the_log_probabilities_of_the_model(pair, documents, support, starts):
    """The server imitates SGLang, which itself needs a GPU."""
    with run_server(serve_as_sglang, str(pair.teacher), {"prefix_ids": starts}) as running:
        teacher = ServerTeacher(teacher_config(pair.teacher, [running.url], support))
        assert (teacher.max_document_tokens, teacher.model) == (255, "teacher")
        short_documents = [document for document in documents if len(document) < 256]
        full_logprobs = compute_full_logprobs(pair.teacher, short_documents)
        for document, scores, expected in zip(
            short_documents, teacher.score(short_documents), full_logprobs, strict=True
        ):
            assert_logprobs_match(scores, document, expected, support, tolerance=1e-5)


@pytest.mark.slow
def test_mixed_vllm_and_sglang_servers_are_refused(pair, server):
    with (
        run_server(serve_as_sglang, str(pair.teacher), {}) as running,
        pytest.raises(XtkError, match="some servers are of SGLang"),
    ):
        ServerTeacher(teacher_config(pair.teacher, [running.url, server.url]))


def remove_last_token(token_logprobs, top_logprobs):
    token_logprobs.pop()
    top_logprobs.pop()


def change_token(token_logprobs, top_logprobs):
    token_logprobs[3][1] += 1


def remove_logprob(token_logprobs, top_logprobs):
    token_logprobs[3][0] = None


def make_logprob_positive(token_logprobs, top_logprobs):
    top_logprobs[3][0][0] = 0.5


def remove_top_entry(token_logprobs, top_logprobs):
    top_logprobs[3].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_last_token, "tokens instead of"),
        (change_token, "other tokens than those in the request"),
        (remove_logprob, "not a number"),
        (make_logprob_positive, "above 0"),
        (remove_top_entry, "does not have 8 log-probabilities"),
    ],
)
def test_invalid_sglang_responses_are_refused(pair, documents, change, message):
    document = next(one for one in documents if 8 < len(one) < 200 and one.train_mask[3:6].all())
    size = num_tokens_to_read(document)
    token_logprobs = [[None if at == 0 else -3.0, int(document.ids[at]), None] for at in range(size)]
    top_logprobs = [None, *([[-3.5, 400 + one, None] for one in range(8)] for _ in range(size - 1))]
    parse_sglang_response(
        {"meta_info": {"input_token_logprobs": token_logprobs, "input_top_logprobs": top_logprobs}}, document, 8
    )
    change(token_logprobs, top_logprobs)
    with pytest.raises(RetryableError, match=message):
        parse_sglang_response(
            {"meta_info": {"input_token_logprobs": token_logprobs, "input_top_logprobs": top_logprobs}}, document, 8
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["500", "503", "429", "408", "cut", "close", "html", *CORRUPTIONS])
def test_occasional_failures_do_not_change_the_result(pair, proxy, documents, expected_scores, kind):
    teacher = ServerTeacher(teacher_config(pair.teacher, [proxy.url]))
    short_documents = [document for document in documents if 1 < len(document) < 256]
    for times, after in ((1, 0), (2, 3)):
        proxy.inject_fault(kind, times, after)
        found = teacher.score(short_documents)
        assert proxy.request_counts()["requests"] > len([one for one in short_documents if one.train_mask.any()])
        assert_same(
            found,
            [one for one, document in zip(expected_scores, documents, strict=True) if document in short_documents],
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["500", "cut", "close", "html", "hang", "drip", *CORRUPTIONS])
def test_permanent_failure_is_reported_with_server_and_document(pair, proxy, documents, kind):
    attempt_seconds = 3 if kind in ("hang", "drip") else 60
    retry_policy = RetryPolicy(
        max_attempts=3, total_seconds=60, attempt_seconds=attempt_seconds, initial_backoff=0.01, max_backoff=0.05
    )
    teacher = ServerTeacher(teacher_config(pair.teacher, [proxy.url], patience=retry_policy))
    proxy.inject_fault(kind, -1)
    started = time.monotonic()
    with pytest.raises(XtkError) as raised:
        teacher.score([document for document in documents if len(document) > 3][:3])
    assert time.monotonic() - started < 60
    assert proxy.url in str(raised.value)
    assert "a document of" in str(raised.value)
    assert "that begins '" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["500", "hang", "close", "nan"])
def test_second_server_takes_over_from_a_failing_one(pair, proxy, second_server, documents, expected_scores, kind):
    retry_policy = RetryPolicy(
        max_attempts=8,
        total_seconds=300,
        attempt_seconds=4 if kind == "hang" else 60,
        initial_backoff=0.02,
        max_backoff=0.1,
    )
    teacher = ServerTeacher(teacher_config(pair.teacher, [proxy.url, second_server.url], patience=retry_policy))
    proxy.inject_fault(kind, -1, after=2)
    first_documents = documents[:12]
    assert_same(teacher.score(first_documents), expected_scores[:12])
    assert proxy.request_counts()["requests"] > 2


def test_second_server_takes_over_from_a_killed_one(pair, server, documents, expected_scores):
    with run_server(serve_faulty_proxy, server.url) as dying:
        teacher = ServerTeacher(teacher_config(pair.teacher, [dying.url, server.url]))
        dying.kill()
        assert_same(teacher.score(documents), expected_scores)


def test_failure_of_all_servers_is_reported(pair, server, documents):
    with run_server(serve_faulty_proxy, server.url) as dying:
        teacher = ServerTeacher(teacher_config(pair.teacher, [dying.url]))
        dying.kill()
        with pytest.raises(XtkError, match="no server gave a valid response in 5 attempts") as raised:
            teacher.score(documents)
        assert dying.url in str(raised.value)
        assert "run the same command again" in str(raised.value)


def test_unreachable_server_is_refused_at_the_start(pair, server):
    with run_server(serve_faulty_proxy, server.url) as gone:
        pass
    with pytest.raises(XtkError, match="no valid response from the server: ConnectError") as raised:
        ServerTeacher(teacher_config(pair.teacher, [server.url, gone.url]))
    assert raised.value.where == gone.url


def test_requests_run_concurrently_within_the_limit_and_share_connections(pair, proxy, documents):
    teacher = ServerTeacher(teacher_config(pair.teacher, [proxy.url], concurrency=4))
    proxy.inject_fault()
    teacher.score(documents * 3)
    counts = proxy.request_counts()
    assert counts["requests"] > 30
    assert 1 < counts["max_running"] <= 4
    assert counts["connections"] <= 4 + 1, "the last request read the counters"


def test_large_responses_are_requested_one_at_a_time(pair, proxy, documents, monkeypatch):
    monkeypatch.setattr(vllm_server_client, "MAX_BYTES_IN_FLIGHT", 256 * 9 * vllm_server_client.BYTES_PER_ENTRY)
    teacher = ServerTeacher(teacher_config(pair.teacher, [proxy.url]))
    long = [document for document in documents if len(document) == 256]
    proxy.inject_fault()
    teacher.score(long * 4)
    assert proxy.request_counts()["max_running"] == 1


def test_results_of_a_hundred_documents_are_in_order(pair, server):
    texts = small_inputs.sentences(100, seed=11)
    documents = make_documents(pair.teacher, 256, texts)
    for document, scores in zip(
        documents, ServerTeacher(teacher_config(pair.teacher, [server.url])).score(documents), strict=True
    ):
        rows = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
        own = scores.ids == document.ids[scores.positions][rows]
        assert np.array_equal(scores.logprobs[own], scores.observed_logprobs)
        assert own.sum() == len(scores)


def test_scoring_works_inside_a_running_event_loop(pair, server, documents, expected_scores):
    async def notebook() -> list[StoredLogprobs]:
        return ServerTeacher(teacher_config(pair.teacher, [server.url])).score(documents[:3])

    assert_same(asyncio.run(notebook()), expected_scores[:3])


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://localhost/v1", "http://", "http://host:99999999/v1", "http://host/v1?x=1", ""]
)
def test_invalid_server_url_is_refused(pair, url):
    with pytest.raises(XtkError, match="is not an http or https URL"):
        ServerTeacher(teacher_config(pair.teacher, [url]))


def test_missing_server_url_is_refused(pair):
    with pytest.raises(XtkError, match="needs --server"):
        ServerTeacher(teacher_config(pair.teacher, []))


def test_server_url_without_a_path_is_completed(pair, server):
    assert ServerTeacher(teacher_config(pair.teacher, [server.host + "/"])).model == "teacher"


@pytest.mark.parametrize("backend", ["server", "vllm"])
@pytest.mark.parametrize(
    "support",
    [
        Support("sample", num_samples=4, num_sample_sets=1),
        Support("top-k+sample", top_k=4, num_samples=4, num_sample_sets=1),
        Support("candidates"),
    ],
)
def test_support_that_needs_more_than_the_top_tokens_is_refused(pair, support, backend):
    request = CacheRequest(ModelRef(pair.teacher, name="teacher"), support, backend=backend)
    with pytest.raises(XtkError, match=f"--backend {backend} does not support") as raised:
        check_cache_request(request)
    assert "--backend transformers" in str(raised.value)


def test_top_k_above_the_server_limit_is_refused_at_the_start(pair, server):
    with pytest.raises(XtkError, match="greater than max allowed: 20") as raised:
        ServerTeacher(teacher_config(pair.teacher, [server.url], Support("top-k", top_k=21)))
    assert "--max-logprobs 21" in str(raised.value)


def test_document_longer_than_the_server_context_is_refused(pair, documents):
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {"max_model_len": None}) as silent:
        teacher = ServerTeacher(teacher_config(pair.teacher, [silent.url]))
        assert teacher.max_document_tokens is None
        with pytest.raises(XtkError, match="max_tokens must be at least 1") as raised:
            teacher.score(documents)
        assert "--max-model-len" in str(raised.value)


def test_server_with_another_tokenizer_is_refused(pair):
    with (
        run_server(serve_as_vllm, str(pair.student), ["teacher"], {}) as wrong,
        pytest.raises(MismatchError, match="the server's tokenizer differs") as raised,
    ):
        ServerTeacher(teacher_config(pair.teacher, [wrong.url]))
    assert wrong.url in str(raised.value)


def test_server_with_another_pre_tokenizer_is_accepted_with_a_warning(
    pair, tmp_path, documents, expected_scores, capsys
):
    folder = shutil.copytree(pair.teacher, tmp_path / "teacher")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}| ?[^\s\p{L}]+|\s+"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with run_server(serve_as_vllm, str(folder), ["teacher"], {}) as running:
        teacher = ServerTeacher(teacher_config(pair.teacher, [running.url]))
        assert "but splits text differently" in capsys.readouterr().err
        assert_same(teacher.score(documents), expected_scores)


def test_server_that_returns_no_token_ids_causes_a_warning(pair, capsys):
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {"no_ids": True}) as silent:
        ServerTeacher(teacher_config(pair.teacher, [silent.url]))
    assert "its tokenizer cannot be checked" in capsys.readouterr().err


def test_servers_with_different_weights_are_refused(pair, server, tmp_path):
    folder = small_inputs.make_teacher(tmp_path / "teacher", seed=7)
    with (
        run_server(serve_as_vllm, str(folder), ["teacher"], {}) as wrong,
        pytest.raises(MismatchError, match="do not have the same model") as raised,
    ):
        ServerTeacher(teacher_config(pair.teacher, [server.url, wrong.url]))
    assert server.url in str(raised.value)
    assert wrong.url in str(raised.value)


def test_server_with_several_models_needs_a_model_name(pair, documents, expected_scores):
    names = ["base=/models/base", "tuned=/models/tuned", "alias=/models/tuned"]
    with run_server(serve_as_vllm, str(pair.teacher), names, {}) as several:
        with pytest.raises(XtkError, match="several models: base, tuned, alias") as raised:
            ServerTeacher(teacher_config(pair.teacher, [several.url]))
        assert f"{several.url}#base" in str(raised.value)
        with pytest.raises(XtkError, match="no model 'other'"):
            ServerTeacher(teacher_config(pair.teacher, [several.url + "#other"]))
        teacher = ServerTeacher(teacher_config(pair.teacher, [several.url + "#tuned"]))
        assert teacher.model == "tuned"
        assert_same(teacher.score(documents[:2]), expected_scores[:2])


def test_server_model_with_the_name_of_the_teacher_is_selected(pair):
    names = ["other=/models/other", "teacher=/models/teacher"]
    with run_server(serve_as_vllm, str(pair.teacher), names, {}) as several:
        assert ServerTeacher(teacher_config(pair.teacher, [several.url])).model == "teacher"


def test_api_key_is_read_from_the_environment_and_never_printed(pair, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("XTK_API_KEY", raising=False)
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {"key": "sesame"}) as locked:
        with pytest.raises(XtkError, match="401") as raised:
            ServerTeacher(teacher_config(pair.teacher, [locked.url]))
        assert "XTK_API_KEY" in str(raised.value)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        with pytest.raises(XtkError, match="401") as raised:
            ServerTeacher(teacher_config(pair.teacher, [locked.url]))
        assert "wrong" not in str(raised.value)
        monkeypatch.setenv("XTK_API_KEY", "sesame")
        assert ServerTeacher(teacher_config(pair.teacher, [locked.url])).model == "teacher"


def test_password_in_a_server_url_is_not_printed(pair, server):
    with run_server(serve_faulty_proxy, server.url) as gone:
        pass
    with pytest.raises(XtkError) as raised:
        ServerTeacher(teacher_config(pair.teacher, [gone.url.replace("//", "//me:secret@")]))
    assert "secret" not in str(raised.value)


def test_server_without_prompt_logprobs_is_refused(pair):
    with (
        run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {"no_prompt_logprobs": True}) as plain,
        pytest.raises(XtkError, match="only servers of vLLM and SGLang"),
    ):
        ServerTeacher(teacher_config(pair.teacher, [plain.url]))


def test_server_with_processed_logprobs_is_refused(pair, documents):
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {"processed": True}) as processed:
        teacher = ServerTeacher(teacher_config(pair.teacher, [processed.url]))
        teacher.score([document for document in documents if len(document) < 256])
        with pytest.raises(XtkError, match="after sampling restrictions") as raised:
            teacher.score([document for document in documents if len(document) == 256])
        assert "--logprobs-mode raw_logprobs" in str(raised.value)
