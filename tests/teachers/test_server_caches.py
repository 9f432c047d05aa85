"""Caches from server teachers: equal to those from transformers, also after failures of a server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server_processes import run_server, serve_as_vllm, serve_faulty_proxy
from small_inputs import Pair

from xtk.cache.reader import TeacherCache
from xtk.cache.teacher_logprobs import Support
from xtk.data.corpus_reader import Corpus
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import XtkError
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import cache_teacher

FAST_RETRIES = RetryPolicy(max_attempts=3, total_seconds=300, attempt_seconds=60, initial_backoff=0.02, max_backoff=0.1)


def cache_request(pair: Pair, backend: str, *servers: str, **changed: Any) -> CacheRequest:
    options = {"servers": list(servers), "patience": FAST_RETRIES} if servers else {}
    fields = {"support": Support("top-k", top_k=8), "shard_tokens": 200, **changed}
    return CacheRequest(ModelRef(pair.teacher, name="teacher"), backend=backend, backend_options=options, **fields)


def file_hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


@pytest.mark.slow
def test_cache_from_a_server_equals_one_from_transformers(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {}) as server:
        cache_teacher(cache_request(pair, "server", server.url), texts, tmp_path / "server")
    cache_teacher(cache_request(pair, "transformers"), texts, tmp_path / "plain")
    from_server, from_transformers = TeacherCache(tmp_path / "server"), TeacherCache(tmp_path / "plain")
    assert len(from_server) == len(from_transformers) == 40
    assert (from_server.header["options"]["entropy"], from_transformers.header["options"]["entropy"]) == (
        "lower bound",
        "exact",
    )
    for one, two in zip(from_server, from_transformers, strict=True):
        assert np.array_equal(one.tokens.ids, two.tokens.ids)
        assert np.array_equal(one.stored_logprobs.ids, two.stored_logprobs.ids)
        for name in ("logprobs", "remainder_mass", "observed_logprobs"):
            np.testing.assert_allclose(
                getattr(one.stored_logprobs, name), getattr(two.stored_logprobs, name), atol=2e-5, rtol=0
            )
        assert (one.stored_logprobs.entropy <= two.stored_logprobs.entropy + 1e-5).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "nan", "short", "cut", "500"])
def test_cache_stopped_by_a_failing_server_continues_with_another_server(pair, corpus, tmp_path, kind):
    texts = Corpus([str(corpus)], {})
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {}) as server:
        cache_teacher(cache_request(pair, "server", server.url), texts, tmp_path / "undisturbed")
        with run_server(serve_faulty_proxy, server.url) as proxy:
            retry_policy = RetryPolicy(
                max_attempts=2, attempt_seconds=4 if kind == "hang" else 60, initial_backoff=0.01, max_backoff=0.05
            )
            request = cache_request(pair, "server", proxy.url)
            request.backend_options["patience"] = retry_policy
            proxy.inject_fault(kind, -1, after=15)
            with pytest.raises(XtkError) as raised:
                cache_teacher(request, texts, tmp_path / "ended")
            assert "a document of" in str(raised.value)
            assert proxy.url in str(raised.value)
        with pytest.raises(XtkError):
            TeacherCache(tmp_path / "ended")
        shards = len(list((tmp_path / "ended").glob("shard-*.arrow")))
        assert 0 < shards < len(list((tmp_path / "undisturbed").glob("shard-*.arrow"))), "some were there before"
        cache_teacher(cache_request(pair, "server", server.url), texts, tmp_path / "ended")
    assert file_hashes(tmp_path / "ended") == file_hashes(tmp_path / "undisturbed")


@pytest.mark.slow
def test_finished_cache_is_reused_without_its_server(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    with run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {}) as server:
        request = cache_request(pair, "server", server.url)
        totals = cache_teacher(request, texts, tmp_path / "cache")
    assert cache_teacher(request, texts, tmp_path / "cache") == totals


@pytest.mark.slow
def test_cache_of_another_server_model_is_refused(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    names = ["one=/one", "two=/two"]
    with run_server(serve_as_vllm, str(pair.teacher), names, {}) as server:
        cache_teacher(cache_request(pair, "server", server.url + "#one"), texts, tmp_path / "cache")
        with pytest.raises(XtkError, match="another"):
            cache_teacher(cache_request(pair, "server", server.url + "#two"), texts, tmp_path / "cache")


def test_documents_longer_than_the_server_context_are_refused_with_a_hint(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    with (
        run_server(serve_as_vllm, str(pair.teacher), ["teacher"], {"max_model_len": 20}) as short,
        pytest.raises(XtkError, match="runs with a context of 20") as raised,
    ):
        cache_teacher(cache_request(pair, "server", short.url), texts, tmp_path / "cache")
    assert "--max-length 20" in str(raised.value)
