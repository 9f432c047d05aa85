"""Caches that servers fill: the same as those of transformers, and never a bad row in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server_processes import answer_as_vllm, get_in_the_way, served
from small_inputs import Pair

from xtk.artifacts.corpus_reader import Corpus
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.engines.http_client_pool import RetryPolicy
from xtk.errors import XtkError
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.cache_building import cache_teacher
from xtk.tokens.teacher_logprobs import Support

HASTY = RetryPolicy(max_attempts=3, total_seconds=300, attempt_seconds=60, initial_backoff=0.02, max_backoff=0.1)


def request_of(pair: Pair, backend: str, *servers: str, **changed: Any) -> CacheRequest:
    options = {"servers": list(servers), "patience": HASTY} if servers else {}
    fields = {"support": Support("top-k", top_k=8), "shard_tokens": 200, **changed}
    return CacheRequest(pair.teacher, "teacher", backend=backend, backend_options=options, **fields)


def bytes_of(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def test_a_cache_of_servers_holds_what_one_of_transformers_holds(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {}) as model:
        cache_teacher(request_of(pair, "server", model.url), texts, tmp_path / "server")
    cache_teacher(request_of(pair, "transformers"), texts, tmp_path / "plain")
    ours, theirs = TeacherCache(tmp_path / "server"), TeacherCache(tmp_path / "plain")
    assert len(ours) == len(theirs) == 40
    assert (ours.header["options"]["entropy"], theirs.header["options"]["entropy"]) == ("lower bound", "exact")
    for one, two in zip(ours, theirs, strict=True):
        assert np.array_equal(one.tokens.ids, two.tokens.ids)
        assert np.array_equal(one.stored_logprobs.ids, two.stored_logprobs.ids)
        for name in ("logprobs", "remainder_mass", "observed_logprobs"):
            np.testing.assert_allclose(
                getattr(one.stored_logprobs, name), getattr(two.stored_logprobs, name), atol=2e-5, rtol=0
            )
        assert (one.stored_logprobs.entropy <= two.stored_logprobs.entropy + 1e-5).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hang", "nan", "short", "cut", "500"])
def test_a_run_that_a_server_ends_goes_on_with_another_one(pair, corpus, tmp_path, kind):
    texts = Corpus([str(corpus)], {})
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {}) as model:
        cache_teacher(request_of(pair, "server", model.url), texts, tmp_path / "undisturbed")
        with served(get_in_the_way, model.url) as proxy:
            patience = RetryPolicy(
                max_attempts=2, attempt_seconds=4 if kind == "hang" else 60, initial_backoff=0.01, max_backoff=0.05
            )
            request = request_of(pair, "server", proxy.url)
            request.backend_options["patience"] = patience
            proxy.trouble(kind, -1, after=15)
            with pytest.raises(XtkError) as caught:
                cache_teacher(request, texts, tmp_path / "ended")
            assert "a document of" in str(caught.value)
            assert proxy.url in str(caught.value)
        with pytest.raises(XtkError):
            TeacherCache(tmp_path / "ended")
        shards = len(list((tmp_path / "ended").glob("shard-*.arrow")))
        assert 0 < shards < len(list((tmp_path / "undisturbed").glob("shard-*.arrow"))), "some were there before"
        cache_teacher(request_of(pair, "server", model.url), texts, tmp_path / "ended")
    assert bytes_of(tmp_path / "ended") == bytes_of(tmp_path / "undisturbed")


def test_a_finished_cache_is_found_while_its_server_is_off(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    with served(answer_as_vllm, str(pair.teacher), ["teacher"], {}) as model:
        request = request_of(pair, "server", model.url)
        made = cache_teacher(request, texts, tmp_path / "cache")
    assert cache_teacher(request, texts, tmp_path / "cache") == made


def test_caches_of_servers_whose_models_were_named_apart_are_apart(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    names = ["one=/one", "two=/two"]
    with served(answer_as_vllm, str(pair.teacher), names, {}) as model:
        cache_teacher(request_of(pair, "server", model.url + "#one"), texts, tmp_path / "cache")
        with pytest.raises(XtkError, match="another"):
            cache_teacher(request_of(pair, "server", model.url + "#two"), texts, tmp_path / "cache")


def test_documents_longer_than_the_servers_context_are_told_with_the_way_out(pair, corpus, tmp_path):
    texts = Corpus([str(corpus)], {})
    with (
        served(answer_as_vllm, str(pair.teacher), ["teacher"], {"says": 20}) as short,
        pytest.raises(XtkError, match="runs with a context of 20") as caught,
    ):
        cache_teacher(request_of(pair, "server", short.url), texts, tmp_path / "cache")
    assert "--max-length 20" in str(caught.value)
