"""Option values out of range: more tokens than the vocabulary, devices that the machine does not have, seeds."""

from __future__ import annotations

import json

import pytest

from xtk.cache.teacher_logprobs import make_support
from xtk.errors import XtkError
from xtk.parallel.parallel_config import parse_devices


def test_top_k_is_limited_to_the_vocabulary_size_and_accepts_all(run, pair, corpus, tmp_path):
    command = ["cache-teacher", pair.teacher, corpus, "--support", "top-k", "-o", tmp_path / "cache", "--top-k"]
    stderr = run(*command, 99_999, code=1).stderr
    assert "--top-k is 99,999, but must be at most the teacher's vocabulary size 496" in stderr
    assert "--top-k all" in stderr
    assert not (tmp_path / "cache").exists()
    assert "'1_0' is neither a number of tokens nor 'all'" in run(*command, "1_0", code=2).stderr
    run(*command, "all")
    record = json.loads(run("inspect", tmp_path / "cache", "--json").stdout)
    assert record["header"]["options"]["top_k"] == 496


def test_missing_device_is_refused():
    assert parse_devices("teacher=0")["teacher"] == (0,)
    with pytest.raises(XtkError, match="this machine has no device 7"):
        parse_devices("teacher=7")


def test_a_device_on_which_the_student_trains_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert parse_devices("rollout=2+3", 2)["rollout"] == (2, 3)
    with pytest.raises(XtkError, match="the student trains on device 2"):
        parse_devices("rollout=2+3", 4)


@pytest.mark.parametrize("seed", [-1, 2**63, 10**20])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(XtkError, match=f"--seed is {seed}, but must be from 0 to 9223372036854775807"):
        make_support("top-k+sample", seed=seed)
