"""The time limit of --ddp-timeout holds in every group of processes, also in those of a device mesh."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from xtk.parallel.parallel_config import parse_parallel

ASKED = timedelta(seconds=7200)


def report_timeouts(rank: int, store: str, results: Any) -> None:
    """Run in a process of its own: put the time limit of each group of a 2 x 2 layout into a queue."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=ASKED)
    cpu = torch.device("cpu")
    mesh: Any = parse_parallel("fsdp=2,tp=2", 4).with_mesh(cpu, ASKED).mesh
    limits = {
        name: mesh[name].get_group()._get_backend(cpu).options._timeout for name in ("fsdp", "tp", "data", "copies")
    }
    results.put(limits)
    torch.distributed.barrier()


@pytest.mark.slow
def test_time_limit_reaches_the_groups_of_a_mesh(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=report_timeouts, args=(rank, str(tmp_path / "store"), results)) for rank in range(4)
    ]
    for process in processes:
        process.start()
    limits = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert limits == [dict.fromkeys(("fsdp", "tp", "data", "copies"), ASKED)] * 4
