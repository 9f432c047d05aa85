"""Parallel layout of a run (data, FSDP, context and tensor parallel), and devices of teachers and rollout engines."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from xtk.errors import XtkError
from xtk.options.declaration import Option
from xtk.options.spec_parsing import parse_number, parse_pairs
from xtk.parallel import process_group
from xtk.parallel.host_to_device import to_device

# From the outermost to the innermost dimension: tensor parallel communicates most, so its ranks are adjacent.
DIMENSIONS = {"dp": "data parallel", "fsdp": "FSDP", "cp": "context parallel", "tp": "tensor parallel"}


@dataclass(frozen=True)
class ParallelConfig:
    """Number of processes in each parallel dimension."""

    dp: int = 1  # data parallel: replicas, each with different documents
    fsdp: int = 1  # fully sharded data parallel: processes that shard the weights, each with different documents
    cp: int = 1  # context parallel: processes that split each sequence
    tp: int = 1  # tensor parallel: processes that split each weight matrix and the output head's vocabulary
    mesh: Any = None  # torch's device mesh of these dimensions; None for one process, and before `with_mesh`

    @property
    def num_processes(self) -> int:
        """Number of processes in total."""
        return self.dp * self.fsdp * self.cp * self.tp

    @property
    def num_data_shards(self) -> int:
        """Number of processes with different documents."""
        return self.dp * self.fsdp

    @property
    def num_gradient_replicas(self) -> int:
        """Number of processes over which gradients are averaged: those with different documents or positions."""
        return self.num_data_shards * self.cp

    @property
    def length_multiple(self) -> int:
        """Required multiple of the sequence length: context parallel splits it into two chunks per process."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded, so that DistributedDataParallel cannot be used."""
        return self.fsdp > 1 or self.tp > 1

    def rank(self, dimension: str) -> int:
        """Return the rank of this process in a dimension."""
        return 0 if self.mesh is None else int(self.mesh.get_local_rank(dimension))

    @property
    def data_shard(self) -> int:
        """Index of this process's documents."""
        return self.rank("dp") * self.fsdp + self.rank("fsdp")

    @property
    def gradient_replica(self) -> int:
        """Index of this process among gradient replicas; processes with equal indices use the same random numbers."""
        return self.data_shard * self.cp + self.rank("cp")

    def group(self, dimension: str) -> Any:
        """Return torch's process group of a dimension, or of "data" or "copies"."""
        return self.mesh.get_group(dimension)

    def all_reduce_sum(self, values: Tensor, group_name: str) -> Tensor:
        """Sum values in place, over "data" (different documents) or "copies" (different documents or positions)."""
        if self._is_reduced(group_name):
            torch.distributed.all_reduce(values, group=self.group(group_name))
        return values

    def _is_reduced(self, group_name: str) -> bool:
        sizes = {"data": self.num_data_shards, "copies": self.num_gradient_replicas}
        return self.mesh is not None and sizes[group_name] > 1

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of an integer over all processes (collective)."""
        return value if self.mesh is None else process_group.all_reduce_max(value)

    def all_reduce_sum_of_host(self, values: NDArray[np.float64], group_name: str, device: torch.device) -> list[float]:
        """Return the sums of values of the host over a group, as in `all_reduce_sum`; one process uses no device."""
        here = torch.from_numpy(values)
        there = self.all_reduce_sum(to_device(here, device), group_name) if self._is_reduced(group_name) else here
        return there.tolist()

    def with_mesh(self, device: torch.device, timeout: timedelta | None = None) -> ParallelConfig:
        """Return the same layout with a device mesh (collective); `timeout` of its collectives, None: torch's."""
        if self.num_processes == 1:
            return self
        names = tuple(DIMENSIONS)
        mesh = init_device_mesh(device.type, tuple(getattr(self, name) for name in names), mesh_dim_names=names)
        mesh["dp", "fsdp"]._flatten("data")
        mesh["dp", "fsdp", "cp"]._flatten("copies")
        mesh["fsdp", "cp"]._flatten("shards")
        if timeout is not None:
            for name in (*names, "data", "copies", "shards"):
                _set_pg_timeout(timeout, mesh[name].get_group())  # torch gives groups of a mesh its own default
        return ParallelConfig(self.dp, self.fsdp, self.cp, self.tp, mesh)

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        return ",".join(parts) or "dp=1"

    def describe(self) -> str:
        """Return the layout in words."""
        parts = [f"{getattr(self, name)}-way {what}" for name, what in DIMENSIONS.items() if getattr(self, name) > 1]
        return f"{self.num_processes} processes: {' x '.join(parts)}" if parts else "1 process"


_SIZE = Option("number of processes", min=1)


def parse_parallel(text: str, num_processes: int) -> ParallelConfig:
    """Return the layout of a --parallel value such as `fsdp=2,tp=2`; other dimensions are 1, `dp` takes the rest."""
    where = f"--parallel {text}"
    sizes = {
        name: parse_number(value, int, f"{name} of {where}", f"for example {name}=2", _SIZE)
        for name, value in parse_pairs(text, where, DIMENSIONS, noun="parallel dimension")
    }
    named = math.prod(sizes.values())
    if "dp" not in sizes and num_processes % named == 0:
        sizes["dp"] = num_processes // named
    layout = ParallelConfig(**sizes)
    if layout.num_processes != num_processes:
        raise XtkError(
            f"--parallel {text} needs {layout.num_processes if 'dp' in sizes else f'a multiple of {named}'} processes, "
            f"but the run has {num_processes}",
            hint=f"use --num-processes {layout.num_processes}, or other sizes in --parallel",
        )
    return layout


_DEVICE = Option("index of a device", min=0)
DEVICE_ROLES = {"rollout": "the rollout engine", "teacher": "the online teachers"}


def num_training_gpus(num_processes: int) -> int:
    """Return the number of this machine's GPUs on which the processes of a run train, one each, from GPU 0."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)) if torch.cuda.is_available() else 0


def parse_devices(text: str, num_own: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each role in a --devices value such as `rollout=2+3,teacher=1`; (): those of the student."""
    devices: dict[str, tuple[int, ...]] = dict.fromkeys(DEVICE_ROLES, ())
    where = f"--devices {text}"
    for role, value in parse_pairs(text, where, DEVICE_ROLES, noun="role of --devices"):
        example = f"for example {role}=2+3"
        devices[role] = tuple(
            parse_number(number, int, f"a device of {where}", example, _DEVICE) for number in value.split("+")
        )
    taken = [number for numbers in devices.values() for number in numbers]
    available = max(torch.cuda.device_count(), 1)  # a machine without GPUs has one device, the CPU
    if len(set(taken)) < len(taken):
        raise XtkError(
            f"--devices {text}: a device is listed twice",
            hint="list each device once; a role that is omitted shares the student's GPUs",
        )
    if max(taken, default=0) >= available:
        raise XtkError(
            f"--devices {text}: this machine has no device {max(taken)}",
            hint=f"use indices from 0 to {available - 1}; this machine has {available} device(s)",
        )
    if min(taken, default=num_own) < num_own:
        raise XtkError(
            f"--devices {text}: the student trains on device {min(taken)}",
            hint=f"use indices from {num_own}, or omit the role, which then takes turns with the student",
        )
    return devices
