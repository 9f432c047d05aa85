"""The process group of a run computes on devices and on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from xtk.parallel import process_group
from xtk.training.student_with_losses import GradientClipping

TIMEOUT = timedelta(seconds=77)


def reduce_on_the_cpu(rank: int, port: int, results: Any) -> None:
    """Run in a process of its own: put results of collectives of tensors on the CPU into a queue.

    The group is that of a run on GPUs, with gloo in place of NCCL for their tensors.
    """
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": f"{port}"}  # fmt: skip
    process_group.BACKENDS["cpu"] = process_group.BACKENDS["cuda"].replace("nccl", "gloo")
    process_group.init_process_group(TIMEOUT)
    offloaded = torch.nn.Parameter(torch.zeros(4))
    offloaded = torch.nn.Parameter(distribute_tensor(offloaded.data, init_device_mesh("cpu", (2,)), [Shard(0)]))
    offloaded.grad = distribute_tensor(torch.tensor([1.0, 2.0, 2.0, 4.0]), offloaded.device_mesh, [Shard(0)])
    [norm] = GradientClipping([offloaded]).norms
    group = torch.distributed.group.WORLD
    limits = {group._get_backend(torch.device(kind)).options._timeout for kind in ("cpu", "cuda")}
    results.put((process_group.all_reduce_max(rank), float(norm), limits))
    process_group.barrier()


@pytest.mark.slow
def test_the_group_of_a_gpu_run_reduces_integers_and_offloaded_gradients_on_the_cpu():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=reduce_on_the_cpu, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [(1, 5.0, {TIMEOUT})] * 2
    for process in processes:
        process.join(60)
