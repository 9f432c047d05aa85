"""Caches from vLLM teachers equal those from transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from vllm_on_cpu import ENGINE, ENVIRONMENT

from xtk.cache.reader import TeacherCache
from xtk.errors import XtkError

OPTIONS = ["--top-k", "8", "--shard-tokens", "400"]


def command_of(teacher: Path, corpus: Path, out: Path, *backend: str) -> list[str]:
    return [
        sys.executable, "-m", "xtk", "cache-teacher", str(teacher), str(corpus), *OPTIONS, *backend, "-o", str(out),
    ]  # fmt: skip


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == command[-1] + "\n", "stdout carries results only"
    return result


@pytest.fixture(scope="module")
def transformers_cache(teacher: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "cache"
    run_command(command_of(teacher, corpus, folder))
    return folder


def assert_same_cache(folder: Path, transformers_cache: Path) -> None:
    found, expected = TeacherCache(folder), TeacherCache(transformers_cache)
    assert len(found) == len(expected) == 40
    for one, two in zip(found, expected, strict=True):
        assert np.array_equal(one.tokens.ids, two.tokens.ids)
        assert np.array_equal(one.stored_logprobs.ids, two.stored_logprobs.ids)
        for name in ("logprobs", "remainder_mass", "observed_logprobs"):
            np.testing.assert_allclose(
                getattr(one.stored_logprobs, name), getattr(two.stored_logprobs, name), atol=1e-4, rtol=0
            )
        assert (one.stored_logprobs.entropy <= two.stored_logprobs.entropy + 1e-4).all()


def test_cache_from_a_vllm_server_equals_one_from_transformers(teacher, corpus, server, transformers_cache, tmp_path):
    run_command(command_of(teacher, corpus, tmp_path / "cache", "--backend", "server", "--server", server.url))
    assert_same_cache(tmp_path / "cache", transformers_cache)


def test_cache_resumed_after_a_killed_engine_equals_one_from_transformers(
    teacher, corpus, transformers_cache, tmp_path
):
    out = tmp_path / "cache"
    options = [word for option in ENGINE for word in ("--engine", option)]
    command = command_of(teacher, corpus, out, "--backend", "vllm", *options)
    first = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and not list(out.glob("shard-*.arrow")):
        time.sleep(0.01)
    if first.poll() is None:
        os.kill(first.pid, 9)
        first.wait()
        with pytest.raises(XtkError):
            TeacherCache(out)
    run_command(command)
    assert_same_cache(out, transformers_cache)
