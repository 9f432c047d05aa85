"""The process groups of a run."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import distributed

from xtk.parallel import process_group


@pytest.fixture
def process_group_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_timeout", None)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    process_group._host_group.cache_clear()
    distributed.destroy_process_group()


def test_the_host_group_of_a_gpu_run_has_the_timeout_of_the_run(process_group_of_one):
    process_group.set_timeout(timedelta(seconds=77))
    group = process_group._host_group(torch.device("cuda", 0))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    assert process_group._host_group(torch.device("cpu")) is None
