"""Caches that vLLM fills hold what those of transformers hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xtk.artifacts.corpus import Corpus
from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError
from xtk.teachers.caching import cache_teacher
from xtk.teachers.request import CacheRequest
from xtk.tokens.signal import Support

from .conftest import ENGINE, SURROUNDINGS

SCRIPT = Path(__file__).parent / "make_cache.py"


def request_of(teacher: Path, backend: str, **options: object) -> CacheRequest:
    support = Support("top-k", top_k=8)
    return CacheRequest(teacher, "teacher", support, backend=backend, shard_tokens=400, backend_options=options)


@pytest.fixture(scope="module")
def plain(teacher: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "cache"
    cache_teacher(request_of(teacher, "transformers"), Corpus([str(corpus)], {}), folder)
    return folder


def assert_holds_the_same(folder: Path, plain: Path) -> None:
    ours, theirs = TeacherCache(folder), TeacherCache(plain)
    assert len(ours) == len(theirs) == 40
    for one, two in zip(ours, theirs, strict=True):
        assert np.array_equal(one.tokens.ids, two.tokens.ids)
        assert np.array_equal(one.scores.ids, two.scores.ids)
        for name in ("logprobs", "tail_mass", "realised_logprobs"):
            np.testing.assert_allclose(getattr(one.scores, name), getattr(two.scores, name), atol=1e-4, rtol=0)
        assert (one.scores.entropy <= two.scores.entropy + 1e-4).all()


def test_a_cache_of_a_server_holds_what_one_of_transformers_holds(teacher, corpus, server, plain, tmp_path):
    request = request_of(teacher, "server", servers=[server.url])
    cache_teacher(request, Corpus([str(corpus)], {}), tmp_path / "cache")
    assert_holds_the_same(tmp_path / "cache", plain)


def test_a_cache_of_an_engine_that_was_killed_and_goes_on_holds_the_same(teacher, corpus, plain, tmp_path):
    out = tmp_path / "cache"
    command = [sys.executable, str(SCRIPT), str(teacher), str(corpus), str(out), *ENGINE]
    first = subprocess.Popen(command, env=SURROUNDINGS, stderr=subprocess.DEVNULL)
    while first.poll() is None and not list(out.glob("*.arrow")):
        time.sleep(0.01)
    if first.poll() is None:
        os.kill(first.pid, 9)
        first.wait()
        with pytest.raises(XtkError):
            TeacherCache(out)
    done = subprocess.run(command, env=SURROUNDINGS, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert_holds_the_same(out, plain)
