"""How the processes of a run share the work: replicas, shards of weights, pieces of a row, pieces of a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from xtk.errors import XtkError
from xtk.registry import unknown_name_error

# From the slowest to the fastest: processes that share a matrix talk most, and stand side by side.
DIMENSIONS = {"dp": "replicas", "fsdp": "shards of the weights", "cp": "pieces of each row", "tp": "pieces of matrices"}


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes there are in each direction.

    Attributes:
        dp: replicas, each with documents of its own.
        fsdp: processes that share the weights, each with documents of its own.
        cp: processes that share each row of tokens.
        tp: processes that share each matrix, and the vocabulary of the head.
        mesh: torch's device mesh of these dimensions; None for one process, and before the processes are there.
    """

    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    mesh: Any = None

    @property
    def num_processes(self) -> int:
        """How many there are in all."""
        return self.dp * self.fsdp * self.cp * self.tp

    @property
    def num_data_shards(self) -> int:
        """How many shares the documents of a step are dealt into."""
        return self.dp * self.fsdp

    @property
    def num_gradient_replicas(self) -> int:
        """Over how many processes a gradient is averaged: those whose losses are of other rows."""
        return self.num_data_shards * self.cp

    @property
    def length_multiple(self) -> int:
        """Tokens that a row is a multiple of: two pieces for each process that shares it."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def is_sharded(self) -> bool:
        """Whether no process has all weights, so that torch's DistributedDataParallel cannot be what averages."""
        return self.fsdp > 1 or self.tp > 1

    def rank(self, dimension: str) -> int:
        """Return where this process is in a direction."""
        return 0 if self.mesh is None else int(self.mesh.get_local_rank(dimension))

    @property
    def data_shard(self) -> int:
        """Which share of the documents is this process's."""
        return self.rank("dp") * self.fsdp + self.rank("fsdp")

    @property
    def gradient_replica(self) -> int:
        """Which of the `copies` this process is: those with the same one draw the same random numbers."""
        return self.data_shard * self.cp + self.rank("cp")

    def group(self, dimension: str) -> Any:
        """Return torch's process group of a direction: a dimension, or "data" or "copies"."""
        return self.mesh.get_group(dimension)

    def all_reduce_sum(self, values: Tensor, group_name: str) -> Tensor:
        """Sum values, in place, over "data" (who has other documents) or "copies" (who has other rows)."""
        if (
            self.mesh is not None
            and {"data": self.num_data_shards, "copies": self.num_gradient_replicas}[group_name] > 1
        ):
            torch.distributed.all_reduce(values, group=self.group(group_name))
        return values

    def all_reduce_max(self, value: int, device: torch.device) -> int:
        """Return the largest of a number over all processes."""
        if self.mesh is None:
            return value
        values = torch.tensor(value, device=device)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        return int(values)

    def with_mesh(self, device: torch.device) -> ParallelConfig:
        """Return the same with its mesh; every process of the run has to call it.

        Raises:
            XtkError: there are other processes than it needs.
        """
        if self.num_processes == 1:
            return self
        names = tuple(DIMENSIONS)
        mesh = init_device_mesh(device.type, tuple(getattr(self, name) for name in names), mesh_dim_names=names)
        mesh["dp", "fsdp"]._flatten("data")
        mesh["dp", "fsdp", "cp"]._flatten("copies")
        mesh["fsdp", "cp"]._flatten("shards")
        return ParallelConfig(self.dp, self.fsdp, self.cp, self.tp, mesh)

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        return ",".join(parts) or "dp=1"

    def describe(self) -> str:
        """Say what it means, a line."""
        parts = [f"{getattr(self, name)} {what}" for name, what in DIMENSIONS.items() if getattr(self, name) > 1]
        return f"{self.num_processes} processes: {' x '.join(parts)}" if parts else "1 process"


def parse_parallel(text: str, num_processes: int) -> ParallelConfig:
    """Read `fsdp=2,tp=2`; what is not named is 1, and `dp` is what is left of the processes.

    Args:
        text: of `--parallel`; "": replicas alone.
        num_processes: that there are.

    Raises:
        XtkError: a dimension is unknown, no number, or the product is not the number of processes.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else []:
        name, _, value = part.strip().partition("=")
        if name not in DIMENSIONS:
            raise unknown_name_error("way to share the work", name, list(DIMENSIONS))
        if not value.isdecimal() or int(value) < 1 or name in sizes:
            raise XtkError(
                f"--parallel {text}: {part.strip()!r} is not NAME=NUMBER, each name once", hint="fsdp=2,tp=2"
            )
        sizes[name] = int(value)
    named = math.prod(sizes.values())
    if "dp" not in sizes and num_processes % named == 0:
        sizes["dp"] = num_processes // named
    layout = ParallelConfig(**sizes)
    if layout.num_processes != num_processes:
        raise XtkError(
            f"--parallel {text} needs {layout.num_processes if 'dp' in sizes else f'a multiple of {named}'} processes, "
            f"and there are {num_processes}",
            hint=f"--num-processes {layout.num_processes}, or other sizes",
        )
    return layout


DEVICE_ROLES = {"rollout": "who writes for the student", "teacher": "who scores"}


def parse_devices(text: str) -> dict[str, tuple[int, ...]]:
    """Read `rollout=2+3,teacher=1`: the devices of each of `ROLES`; none of one that shares those of the student.

    Raises:
        XtkError: a role is unknown, a device no number, or two roles have the same.
    """
    devices: dict[str, tuple[int, ...]] = dict.fromkeys(DEVICE_ROLES, ())
    for part in filter(None, text.split(",")):
        role, _, value = part.strip().partition("=")
        if role not in DEVICE_ROLES:
            raise unknown_name_error("role", role, list(DEVICE_ROLES))
        numbers = value.split("+")
        if not all(number.isdecimal() for number in numbers) or devices[role]:
            raise XtkError(
                f"--devices {text}: {part.strip()!r} is not ROLE=N+N, each role once", hint="rollout=2+3,teacher=1"
            )
        devices[role] = tuple(map(int, numbers))
    taken = [number for numbers in devices.values() for number in numbers]
    there = max(torch.cuda.device_count(), 1)  # a machine without GPUs has one device, the CPU
    if len(set(taken)) < len(taken):
        raise XtkError(f"--devices {text}: a device has two roles", hint="roles that are not named take turns")
    if max(taken, default=0) >= there:
        raise XtkError(
            f"--devices {text}: there is no device {max(taken)}; this machine has {there} "
            f"({'a GPU each' if torch.cuda.is_available() else 'the CPU'}), counted from 0"
        )
    return devices
