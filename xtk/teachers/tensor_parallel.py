"""Tensor-parallel teachers: one process per device, with the tensor parallelism of transformers.

The first process writes the cache and broadcasts its inputs; the others run the same forward passes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from xtk import terminal
from xtk.engines.worker_process import WorkerProcess, stop_workers
from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, load_model_config
from xtk.models.resolver import ModelRef
from xtk.teachers.worker_pool import TEACHER_WORKER

EXIT_POLL_SECONDS = 1.0  # wait for the exit of another process after a collective call failed
ERROR_GRACE_SECONDS = 10.0  # time for the first process to raise its own error after another process has ended
FOLLOWER = replace(TEACHER_WORKER, main="xtk.teachers.tensor_parallel:run_follower")


class TensorParallelModel:
    """The model shard of the first process, and the other processes of the tensor-parallel group.

    Args:
        num_processes: processes, including this one.
        options: further arguments of `from_pretrained`.
    """

    def __init__(self, num_processes: int, ref: ModelRef, options: Mapping[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.device_count() < num_processes:
            devices = torch.cuda.device_count()
            raise XtkError(
                f"--engine tp_size is {num_processes}; this machine has only {devices} devices",
                hint=f"use --engine tp_size={devices} or less",
            )
        _check_divisible(ref, num_processes)
        os.environ |= _process_environment(0, num_processes)
        self._followers: list[WorkerProcess] = []
        for rank in range(1, num_processes):
            environment = {**os.environ, **_process_environment(rank, num_processes)}
            name = f"tensor-parallel process {rank} of {num_processes} of the teacher"
            self._followers.append(WorkerProcess(FOLLOWER, name, environment))
        for follower in self._followers:
            follower.send((num_processes, ref, dict(options)))
        weakref.finalize(self, _stop_followers, self._followers)
        threading.Thread(
            target=_exit_with_followers, args=(weakref.ref(self), list(self._followers)), daemon=True
        ).start()
        self.local_model = _load_local_model(num_processes, ref, options)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return the same hidden states or logits as `BackboneWithHead`.

        Args:
            input_ids: [B, T].
        """
        try:
            torch.distributed.broadcast(torch.tensor(input_ids.shape, device=input_ids.device), 0)
            torch.distributed.broadcast(input_ids, 0)
            logits: Tensor = self.local_model(input_ids)
        except RuntimeError as failure:
            time.sleep(EXIT_POLL_SECONDS)
            for follower in self._followers:
                if follower.process.poll() is not None:
                    raise follower.exit_error() from failure
            raise
        return logits


def run_follower(pipe: Connection) -> None:
    """Run another process: receive the arguments of loading, then repeat the first process's forward passes."""
    cut = _load_local_model(*pipe.recv())
    device = cut.model.device
    with torch.inference_mode():
        while True:
            shape = torch.zeros(2, dtype=torch.int64, device=device)
            torch.distributed.broadcast(shape, 0)
            input_ids = torch.zeros(*shape.tolist(), dtype=torch.int64, device=device)
            torch.distributed.broadcast(input_ids, 0)
            cut(input_ids)


def _check_divisible(ref: ModelRef, count: int) -> None:
    configuration = load_model_config(ref).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(configuration, name, None)
        if isinstance(heads, int) and heads % count:
            raise XtkError(
                f"{name} of this teacher is {heads}, which is not divisible by tp_size={count}",
                where=str(ref.folder),
                hint="use another --engine tp_size, or --engine device_map=auto, which places whole layers on devices",
            )


def _process_environment(rank: int, count: int) -> dict[str, str]:
    """Return the environment variables of torch.distributed."""
    port = os.environ.get("MASTER_PORT") if rank else None
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port or str(_free_port()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _load_local_model(count: int, ref: ModelRef, options: Mapping[str, Any]) -> BackboneWithHead:
    from transformers.distributed import DistributedConfig

    model = load_causal_lm(ref, options={**options, "distributed_config": DistributedConfig(tp_size=count)})
    return BackboneWithHead(model.eval().requires_grad_(False))


def _exit_with_followers(model: weakref.ref[TensorParallelModel], followers: list[WorkerProcess]) -> None:
    """Exit this process after another one has ended: a collective call that waits for it cannot be interrupted."""
    while model() is not None:
        for follower in followers:
            if follower.process.poll() is not None:
                time.sleep(ERROR_GRACE_SECONDS)  # this process may report the same error itself
                if model() is not None:
                    terminal.error(follower.exit_error())
                    os._exit(1)
                return
        time.sleep(0.2)


def _stop_followers(followers: list[WorkerProcess]) -> None:
    stop_workers(followers, 0.0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in _process_environment(0, 1):
        os.environ.pop(name, None)
