"""Caches that vLLM fills hold what those of transformers hold."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from vllm_on_cpu import ENGINE, SURROUNDINGS

from xtk.artifacts.teacher_cache import TeacherCache
from xtk.errors import XtkError

ASKED = ["--top-k", "8", "--shard-tokens", "400"]


def command_of(teacher: Path, corpus: Path, out: Path, *backend: str) -> list[str]:
    return [
        sys.executable, "-m", "xtk", "cache-teacher", str(teacher), str(corpus), *ASKED, *backend, "-o", str(out),
    ]  # fmt: skip


def made(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=SURROUNDINGS, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == command[-1] + "\n", "stdout carries results only"
    return done


@pytest.fixture(scope="module")
def plain(teacher: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "cache"
    made(command_of(teacher, corpus, folder))
    return folder


def assert_holds_the_same(folder: Path, plain: Path) -> None:
    ours, theirs = TeacherCache(folder), TeacherCache(plain)
    assert len(ours) == len(theirs) == 40
    for one, two in zip(ours, theirs, strict=True):
        assert np.array_equal(one.tokens.ids, two.tokens.ids)
        assert np.array_equal(one.stored_logprobs.ids, two.stored_logprobs.ids)
        for name in ("logprobs", "remainder_mass", "observed_logprobs"):
            np.testing.assert_allclose(
                getattr(one.stored_logprobs, name), getattr(two.stored_logprobs, name), atol=1e-4, rtol=0
            )
        assert (one.stored_logprobs.entropy <= two.stored_logprobs.entropy + 1e-4).all()


def test_a_cache_of_a_server_holds_what_one_of_transformers_holds(teacher, corpus, server, plain, tmp_path):
    made(command_of(teacher, corpus, tmp_path / "cache", "--backend", "server", "--server", server.url))
    assert_holds_the_same(tmp_path / "cache", plain)


def test_a_cache_of_an_engine_that_was_killed_and_goes_on_holds_the_same(teacher, corpus, plain, tmp_path):
    out = tmp_path / "cache"
    options = [word for option in ENGINE for word in ("--engine", option)]
    command = command_of(teacher, corpus, out, "--backend", "vllm", *options)
    first = subprocess.Popen(command, env=SURROUNDINGS, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and not list(out.glob("shard-*.arrow")):
        time.sleep(0.01)
    if first.poll() is None:
        os.kill(first.pid, 9)
        first.wait()
        with pytest.raises(XtkError):
            TeacherCache(out)
    made(command)
    assert_holds_the_same(out, plain)
