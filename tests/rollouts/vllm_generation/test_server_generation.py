"""vLLM's own server writes what transformers writes, with the weights that it was told last."""

from __future__ import annotations

import json
from urllib.request import Request, urlopen

import pytest
from http_server_processes import get_in_the_way, served
from vllm_on_cpu import Server

from xtk.engines.backend import BackendConfig
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import MismatchError, XtkError
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.server_generator import ServerGenerator
from xtk.tokens.tokenizer import Tokenizer

from .generation_requests import CONTEXT, GREEDY, SAMPLED, asks_of, assert_same, error_of, greedily, request_of

HASTY = RetryPolicy(
    max_attempts=5, total_seconds=600, attempt_seconds=120, connect_seconds=20, initial_backoff=0.02, max_backoff=0.1
)


@pytest.fixture(scope="module")
def server(students, tmp_path_factory):
    flags = ("--max-model-len", str(CONTEXT), "--served-model-name", "student")
    running = Server(students[0], tmp_path_factory.mktemp("log") / "server", *flags, VLLM_SERVER_DEV_MODE="1")
    try:
        running.wait(600)
        yield running
    finally:
        running.stop()


def writer_of(students, *servers: str) -> ServerGenerator:
    return ServerGenerator.open(request_of(students[0], servers=list(servers), patience=HASTY))


def test_the_server_writes_what_transformers_writes_and_takes_new_weights(server, students):
    old, new = students
    writer = writer_of(students, server.url)
    assert writer.context_length == CONTEXT
    assert writer.generate([], SAMPLED) == []
    assert_same(writer.generate(asks_of(), GREEDY), greedily(old))
    sampled = writer.generate(asks_of(), SAMPLED)
    assert error_of(old, sampled) < 1e-4
    again = writer.generate(asks_of(), SAMPLED)
    assert [one.ids.tolist() for one in again] == [one.ids.tolist() for one in sampled]
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    body = json.dumps(reload).encode()
    urlopen(Request(server.host + "/collective_rpc", body, {"Content-Type": "application/json"})).close()
    assert error_of(new, writer.generate(asks_of(), SAMPLED)) > 0.1, "the test would notice what is stale"
    writer.update_weights(new)
    assert error_of(new, writer.generate(asks_of(), SAMPLED)) < 1e-4
    writer.update_weights(old)
    assert_same(writer.generate(asks_of(), GREEDY), greedily(old))


def test_what_a_server_does_not_do_is_told_and_what_fails_is_asked_again(server, students, pair):
    writer = writer_of(students, server.url)
    with pytest.raises(XtkError, match="loads new weights only from a folder"):
        writer.update_weights([])
    with pytest.raises(XtkError, match="max-logprobs"):
        writer.generate(asks_of(), SamplingConfig(top_logprobs=30))
    with pytest.raises(MismatchError, match="another tokenizer"):
        ServerGenerator(
            BackendConfig(pair.student, "student", Tokenizer(pair.student), options={"servers": [server.url]})
        )
    with served(get_in_the_way, server.url) as proxy:
        far = writer_of(students, proxy.url)
        for kind in ("500", "cut", "close", "empty", "no-choices"):
            proxy.trouble(kind, 2, 1)
            assert_same(far.generate(asks_of(), GREEDY), greedily(students[0]))
        proxy.trouble("404", 1)
        with pytest.raises(XtkError, match="does not accept weight updates") as refused:
            far.update_weights(students[0])
        assert "VLLM_SERVER_DEV_MODE=1" in str(refused.value.hint)
        proxy.kill()
        with pytest.raises(XtkError, match="no valid response"):
            far.generate(asks_of(), GREEDY)
