"""Servers: what they say is what the model says, and what they fail to say is never in a cache."""

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
from http_server_processes import SPOIL, Served, answer_as_sglang, answer_as_vllm, get_in_the_way, served
from reference_logprobs import assert_is_the_truth, documents_of, said_plainly
from small_inputs import Pair

from xtk.engines.http_client_pool import RetryPolicy
from xtk.engines.server_responses import RetryableError
from xtk.errors import MismatchError, XtkError
from xtk.teachers import vllm_server_client
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.sglang_responses import parse_response
from xtk.teachers.vllm_server_client import ServerTeacher
from xtk.teachers.vllm_top_logprobs import num_tokens_to_read
from xtk.tokens.teacher_logprobs import StoredLogprobs, Support
from xtk.tokens.token_sequence import TokenSequence
from xtk.tokens.tokenizer import Tokenizer

HASTY = RetryPolicy(
    max_attempts=5, total_seconds=300, attempt_seconds=60, connect_seconds=20, initial_backoff=0.02, max_backoff=0.1
)
HEAD = Support("top-k", top_k=8)


def request_of(folder: Path, servers: list[str], support: Support = HEAD, **options: object) -> TeacherConfig:
    return TeacherConfig(
        folder,
        "teacher",
        Tokenizer(folder),
        support=support,
        options={"servers": servers, "patience": HASTY, **options},
    )


@pytest.fixture(scope="module")
def model(pair: Pair) -> Iterator[Served]:
    """A server that answers as vLLM does."""
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {}) as running:
        yield running


@pytest.fixture(scope="module")
def other(pair: Pair) -> Iterator[Served]:
    """Another one of the same model."""
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {}) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(model: Served) -> Iterator[Served]:
    with served(get_in_the_way, model.url) as running:
        yield running


@pytest.fixture(scope="module")
def documents(pair: Pair) -> list[TokenSequence]:
    return documents_of(pair.teacher, 256)


@pytest.fixture(scope="module")
def clean(pair: Pair, model: Served, documents: list[TokenSequence]) -> list[StoredLogprobs]:
    """What is said when nothing goes wrong."""
    return ServerTeacher(request_of(pair.teacher, [model.url])).score(documents)


def assert_same(found: list[StoredLogprobs], expected: list[StoredLogprobs]) -> None:
    for one, two in zip(found, expected, strict=True):
        for name in ("positions", "offsets", "ids", "logprobs", "remainder_mass", "observed_logprobs", "entropy"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize(
    "support",
    [HEAD, Support("top-k", top_k=1), Support("top-p", top_k=20, top_p=0.3), Support("none")],
    ids=lambda support: f"{support.kind}-{support.top_k}",
)
def test_a_server_says_what_the_model_says(pair, model, documents, support):
    teacher = ServerTeacher(request_of(pair.teacher, [model.url], support))
    assert (teacher.max_document_tokens, teacher.vocab_size, teacher.model) == (256, 496, "teacher")
    assert max(map(len, documents)) == 256, "a document as long as the context is among them"
    truth = said_plainly(pair.teacher, documents)
    for document, scores, expected in zip(documents, teacher.score(documents), truth, strict=True):
        assert_is_the_truth(scores, document, expected, support, tolerance=1e-5)


@pytest.mark.parametrize("support", [HEAD, Support("top-p", top_k=20, top_p=0.3), Support("none")])
@pytest.mark.parametrize("starts", [[], [0]])
def test_a_server_that_answers_as_sglang_says_what_the_model_says(pair, documents, support, starts, capsys):
    """Not SGLang itself, which needs a GPU."""
    with served(answer_as_sglang, str(pair.teacher), {"starts": starts}) as running:
        teacher = ServerTeacher(request_of(pair.teacher, [running.url], support))
        assert (teacher.max_document_tokens, teacher.model) == (255, "teacher")
        some = [document for document in documents if len(document) < 256]
        truth = said_plainly(pair.teacher, some)
        for document, scores, expected in zip(some, teacher.score(some), truth, strict=True):
            assert_is_the_truth(scores, document, expected, support, tolerance=1e-5)


def test_servers_of_two_kinds_are_refused(pair, model):
    with (
        served(answer_as_sglang, str(pair.teacher), {}) as running,
        pytest.raises(XtkError, match="some servers are of SGLang"),
    ):
        ServerTeacher(request_of(pair.teacher, [running.url, model.url]))


def short(own, top):
    own.pop()
    top.pop()


def other_token(own, top):
    own[3][1] += 1


def no_number(own, top):
    own[3][0] = None


def positive(own, top):
    top[3][0][0] = 0.5


def fewer(own, top):
    top[3].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (short, "tokens instead of"),
        (other_token, "other tokens than those in the request"),
        (no_number, "not a number"),
        (positive, "above 0"),
        (fewer, "does not have 8 log-probabilities"),
    ],
)
def test_broken_answers_of_sglang_are_refused(pair, documents, change, message):
    document = next(one for one in documents if 8 < len(one) < 200 and one.train_mask[3:6].all())
    size = num_tokens_to_read(document)
    own = [[None if at == 0 else -3.0, int(document.ids[at]), None] for at in range(size)]
    top = [None, *([[-3.5, 400 + one, None] for one in range(8)] for _ in range(size - 1))]
    parse_response({"meta_info": {"input_token_logprobs": own, "input_top_logprobs": top}}, document, 8)
    change(own, top)
    with pytest.raises(RetryableError, match=message):
        parse_response({"meta_info": {"input_token_logprobs": own, "input_top_logprobs": top}}, document, 8)


@pytest.mark.parametrize("kind", ["500", "503", "429", "408", "cut", "close", "html", *SPOIL])
def test_what_fails_now_and_then_leaves_no_trace(pair, proxy, documents, clean, kind):
    teacher = ServerTeacher(request_of(pair.teacher, [proxy.url]))
    some = [document for document in documents if 1 < len(document) < 256]
    for times, after in ((1, 0), (2, 3)):
        proxy.trouble(kind, times, after)
        found = teacher.score(some)
        assert proxy.seen()["requests"] > len([one for one in some if one.train_mask.any()])
        assert_same(found, [one for one, document in zip(clean, documents, strict=True) if document in some])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["500", "cut", "close", "html", "hang", "drip", *SPOIL])
def test_what_always_fails_ends_in_an_error_that_names_server_and_document(pair, proxy, documents, kind):
    answer = 3 if kind in ("hang", "drip") else 60
    patience = RetryPolicy(
        max_attempts=3, total_seconds=60, attempt_seconds=answer, initial_backoff=0.01, max_backoff=0.05
    )
    teacher = ServerTeacher(request_of(pair.teacher, [proxy.url], patience=patience))
    proxy.trouble(kind, -1)
    started = time.monotonic()
    with pytest.raises(XtkError) as caught:
        teacher.score([document for document in documents if len(document) > 3][:3])
    assert time.monotonic() - started < 60
    assert proxy.url in str(caught.value)
    assert "a document of" in str(caught.value)
    assert "that begins '" in str(caught.value)


@pytest.mark.parametrize("kind", ["500", "hang", "close", "nan"])
def test_another_server_takes_over(pair, proxy, other, documents, clean, kind):
    patience = RetryPolicy(
        max_attempts=8,
        total_seconds=300,
        attempt_seconds=4 if kind == "hang" else 60,
        initial_backoff=0.02,
        max_backoff=0.1,
    )
    teacher = ServerTeacher(request_of(pair.teacher, [proxy.url, other.url], patience=patience))
    proxy.trouble(kind, -1, after=2)
    some = documents[:12]
    assert_same(teacher.score(some), clean[:12])
    assert proxy.seen()["requests"] > 2


def test_a_server_that_dies_is_missed_by_nobody(pair, model, documents, clean):
    with served(get_in_the_way, model.url) as dying:
        teacher = ServerTeacher(request_of(pair.teacher, [dying.url, model.url]))
        dying.kill()
        assert_same(teacher.score(documents), clean)


def test_when_all_servers_die_that_is_told(pair, model, documents):
    with served(get_in_the_way, model.url) as dying:
        teacher = ServerTeacher(request_of(pair.teacher, [dying.url]))
        dying.kill()
        with pytest.raises(XtkError, match="no server gave a valid response in 5 attempts") as caught:
            teacher.score(documents)
        assert dying.url in str(caught.value)
        assert "run the same command again" in str(caught.value)


def test_a_server_that_is_not_there_is_told_at_once(pair, model):
    with served(get_in_the_way, model.url) as gone:
        pass
    with pytest.raises(XtkError, match="no valid response from the server: ConnectError") as caught:
        ServerTeacher(request_of(pair.teacher, [model.url, gone.url]))
    assert caught.value.where == gone.url


def test_requests_are_many_and_not_too_many_and_share_connections(pair, proxy, documents):
    teacher = ServerTeacher(request_of(pair.teacher, [proxy.url], concurrency=4))
    proxy.trouble()
    teacher.score(documents * 3)
    seen = proxy.seen()
    assert seen["requests"] > 30
    assert 1 < seen["most"] <= 4
    assert seen["connections"] <= 4 + 1, "the last one asked what was seen"


def test_answers_that_are_large_together_are_asked_for_one_by_one(pair, proxy, documents, monkeypatch):
    monkeypatch.setattr(vllm_server_client, "MAX_BYTES_IN_FLIGHT", 256 * 9 * vllm_server_client.BYTES_PER_ENTRY)
    teacher = ServerTeacher(request_of(pair.teacher, [proxy.url]))
    long = [document for document in documents if len(document) == 256]
    proxy.trouble()
    teacher.score(long * 4)
    assert proxy.seen()["most"] == 1


def test_a_hundred_documents_come_back_in_their_order(pair, model):
    texts = small_inputs.sentences(100, seed=11)
    documents = documents_of(pair.teacher, 256, texts)
    for document, scores in zip(
        documents, ServerTeacher(request_of(pair.teacher, [model.url])).score(documents), strict=True
    ):
        rows = np.repeat(np.arange(len(scores)), np.diff(scores.offsets))
        own = scores.ids == document.ids[scores.positions][rows]
        assert np.array_equal(scores.logprobs[own], scores.observed_logprobs)
        assert own.sum() == len(scores)


def test_it_works_inside_a_running_loop(pair, model, documents, clean):
    async def notebook() -> list[StoredLogprobs]:
        return ServerTeacher(request_of(pair.teacher, [model.url])).score(documents[:3])

    assert_same(asyncio.run(notebook()), clean[:3])


@pytest.mark.parametrize(
    "text", ["localhost:8000", "ftp://localhost/v1", "http://", "http://host:99999999/v1", "http://host/v1?x=1", ""]
)
def test_what_is_no_address_is_refused(pair, text):
    with pytest.raises(XtkError, match="is not an http or https URL"):
        ServerTeacher(request_of(pair.teacher, [text]))


def test_no_address_is_refused(pair):
    with pytest.raises(XtkError, match="needs --server"):
        ServerTeacher(request_of(pair.teacher, []))


def test_an_address_without_a_path_is_completed(pair, model):
    assert ServerTeacher(request_of(pair.teacher, [model.host + "/"])).model == "teacher"


@pytest.mark.parametrize(
    ("support", "said"),
    [
        (Support("sample", num_samples=4, num_sample_sets=1), "whole distribution"),
        (Support("top-k+sample", top_k=4, num_samples=4, num_sample_sets=1), "whole distribution"),
        (Support("candidates"), "the candidate ids in the data"),
    ],
)
def test_a_support_that_needs_more_than_the_head_is_refused(pair, model, support, said):
    with pytest.raises(XtkError, match=said) as caught:
        ServerTeacher(request_of(pair.teacher, [model.url], support))
    assert "--backend transformers" in str(caught.value)


def test_more_ids_than_the_server_gives_are_refused_before_the_work_begins(pair, model):
    with pytest.raises(XtkError, match="greater than max allowed: 20") as caught:
        ServerTeacher(request_of(pair.teacher, [model.url], Support("top-k", top_k=21)))
    assert "--max-logprobs 21" in str(caught.value)


def test_a_server_with_a_shorter_context_than_a_document_is_told(pair, documents):
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {"says": None}) as silent:
        teacher = ServerTeacher(request_of(pair.teacher, [silent.url]))
        assert teacher.max_document_tokens is None
        with pytest.raises(XtkError, match="max_tokens must be at least 1") as caught:
            teacher.score(documents)
        assert "--max-model-len" in str(caught.value)


def test_a_server_of_another_model_is_refused_by_its_token_ids(pair):
    with (
        served(answer_as_vllm, str(pair.student), ["teacher"], {}) as wrong,
        pytest.raises(MismatchError, match="the server's tokenizer differs") as caught,
    ):
        ServerTeacher(request_of(pair.teacher, [wrong.url]))
    assert wrong.url in str(caught.value)


def test_a_server_that_cuts_texts_elsewhere_has_the_same_tokens(pair, tmp_path, documents, clean, capsys):
    folder = shutil.copytree(pair.teacher, tmp_path / "teacher")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}| ?[^\s\p{L}]+|\s+"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with served(answer_as_vllm, str(folder), ["teacher"], {}) as cutting:
        teacher = ServerTeacher(request_of(pair.teacher, [cutting.url]))
        assert "but splits text differently" in capsys.readouterr().err
        assert_same(teacher.score(documents), clean)


def test_a_server_that_does_not_tell_ids_is_noted(pair, capsys):
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {"no_ids": True}) as silent:
        ServerTeacher(request_of(pair.teacher, [silent.url]))
    assert "its tokenizer cannot be checked" in capsys.readouterr().err


def test_two_servers_of_different_weights_are_refused(pair, model, tmp_path):
    folder = small_inputs.make_teacher(tmp_path / "teacher", seed=7)
    with (
        served(answer_as_vllm, str(folder), ["teacher"], {}) as wrong,
        pytest.raises(MismatchError, match="do not have the same model") as caught,
    ):
        ServerTeacher(request_of(pair.teacher, [model.url, wrong.url]))
    assert model.url in str(caught.value)
    assert wrong.url in str(caught.value)


def test_one_of_several_models_has_to_be_named(pair, documents, clean):
    names = ["base=/models/base", "tuned=/models/tuned", "alias=/models/tuned"]
    with served(answer_as_vllm, str(pair.teacher), names, {}) as several:
        with pytest.raises(XtkError, match="several models: base, tuned, alias") as caught:
            ServerTeacher(request_of(pair.teacher, [several.url]))
        assert f"{several.url}#base" in str(caught.value)
        with pytest.raises(XtkError, match="no model 'other'"):
            ServerTeacher(request_of(pair.teacher, [several.url + "#other"]))
        teacher = ServerTeacher(request_of(pair.teacher, [several.url + "#tuned"]))
        assert teacher.model == "tuned"
        assert_same(teacher.score(documents[:2]), clean[:2])


def test_a_server_that_calls_the_model_as_the_user_does_needs_no_name(pair):
    names = ["other=/models/other", "teacher=/models/teacher"]
    with served(answer_as_vllm, str(pair.teacher), names, {}) as several:
        assert ServerTeacher(request_of(pair.teacher, [several.url])).model == "teacher"


def test_the_key_comes_from_the_environment_and_is_never_told(pair, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("XTK_API_KEY", raising=False)
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {"key": "sesame"}) as locked:
        with pytest.raises(XtkError, match="401") as caught:
            ServerTeacher(request_of(pair.teacher, [locked.url]))
        assert "XTK_API_KEY" in str(caught.value)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        with pytest.raises(XtkError, match="401") as caught:
            ServerTeacher(request_of(pair.teacher, [locked.url]))
        assert "wrong" not in str(caught.value)
        monkeypatch.setenv("XTK_API_KEY", "sesame")
        assert ServerTeacher(request_of(pair.teacher, [locked.url])).model == "teacher"


def test_a_password_in_an_address_is_not_told(pair, model):
    with served(get_in_the_way, model.url) as gone:
        pass
    with pytest.raises(XtkError) as caught:
        ServerTeacher(request_of(pair.teacher, [gone.url.replace("//", "//me:secret@")]))
    assert "secret" not in str(caught.value)


def test_a_server_that_tells_nothing_of_prompts_is_refused(pair):
    with (
        served(answer_as_vllm, str(pair.teacher), ["teacher"], {"plain": True}) as plain,
        pytest.raises(XtkError, match="only servers of vLLM and SGLang"),
    ):
        ServerTeacher(request_of(pair.teacher, [plain.url]))


def test_a_server_that_tells_what_it_may_generate_is_refused(pair, documents):
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {"processed": True}) as processed:
        teacher = ServerTeacher(request_of(pair.teacher, [processed.url]))
        teacher.score([document for document in documents if len(document) < 256])
        with pytest.raises(XtkError, match="after sampling restrictions") as caught:
            teacher.score([document for document in documents if len(document) == 256])
        assert "--logprobs-mode raw_logprobs" in str(caught.value)
