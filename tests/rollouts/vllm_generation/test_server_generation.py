"""A vLLM server generates the same completions as transformers, with the weights of the last update."""

from __future__ import annotations

import json
from urllib.request import Request, urlopen

import pytest
from http_server_processes import run_server, serve_faulty_proxy
from vllm_on_cpu import Server

from xtk.engines.backend import BackendConfig
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import MismatchError, XtkError
from xtk.models.resolver import ModelRef
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.rollouts.server_generator import ServerGenerator
from xtk.text.tokenizer import Tokenizer

from .generation_requests import (
    CONTEXT,
    GREEDY,
    SAMPLED,
    assert_equal_completions,
    backend_config,
    greedy_completions,
    make_requests,
    max_logprob_error,
)

RETRY_POLICY = RetryPolicy(
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


def server_generator(students, *servers: str) -> ServerGenerator:
    return ServerGenerator.open(backend_config(students[0], servers=list(servers), patience=RETRY_POLICY))


def test_server_completions_equal_those_of_transformers_after_each_weight_update(server, students):
    old, new = students
    generator = server_generator(students, server.url)
    assert generator.context_length == CONTEXT
    assert generator.generate([], SAMPLED) == []
    assert_equal_completions(generator.generate(make_requests(), GREEDY), greedy_completions(old))
    sampled = generator.generate(make_requests(), SAMPLED)
    assert max_logprob_error(old, sampled) < 1e-4
    repeated = generator.generate(make_requests(), SAMPLED)
    assert [one.ids.tolist() for one in repeated] == [one.ids.tolist() for one in sampled]
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    body = json.dumps(reload).encode()
    urlopen(Request(server.host + "/collective_rpc", body, {"Content-Type": "application/json"})).close()
    assert max_logprob_error(new, generator.generate(make_requests(), SAMPLED)) > 0.1, (
        "the test would notice what is stale"
    )
    generator.update_weights(new)
    assert max_logprob_error(new, generator.generate(make_requests(), SAMPLED)) < 1e-4
    generator.update_weights(old)
    assert_equal_completions(generator.generate(make_requests(), GREEDY), greedy_completions(old))


def test_unsupported_requests_are_refused_and_failed_ones_are_retried(server, students, pair):
    generator = server_generator(students, server.url)
    with pytest.raises(XtkError, match="max-logprobs"):
        generator.generate(make_requests(), SamplingConfig(top_logprobs=30))
    with pytest.raises(MismatchError, match="tokenizer differs"):
        ServerGenerator(
            BackendConfig(
                ModelRef(pair.student, name="student"), Tokenizer(pair.student), options={"servers": [server.url]}
            )
        )
    with run_server(serve_faulty_proxy, server.url) as proxy:
        proxied = server_generator(students, proxy.url)
        for kind in ("500", "cut", "close", "empty", "no-choices"):
            proxy.inject_fault(kind, 2, 1)
            assert_equal_completions(proxied.generate(make_requests(), GREEDY), greedy_completions(students[0]))
        proxy.inject_fault("404", 1)
        with pytest.raises(XtkError, match="does not accept weight updates") as raised:
            proxied.update_weights(students[0])
        assert "VLLM_SERVER_DEV_MODE=1" in str(raised.value.hint)
        proxy.kill()
        with pytest.raises(XtkError, match="no valid response"):
            proxied.generate(make_requests(), GREEDY)
