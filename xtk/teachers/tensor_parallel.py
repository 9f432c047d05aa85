"""A teacher that is cut over several processes, a device each: tensor parallelism of transformers.

The first process is the one that caches; the others follow it: what it reads they read, and nothing else is said.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from xtk import terminal
from xtk.errors import XtkError
from xtk.models.causal_lm import BackboneWithHead, load_causal_lm, load_model_config
from xtk.subprocesses import block_sigint, die_with_parent
from xtk.teachers.worker_pool import WorkerProcess

EXIT_POLL_SECONDS = 1.0  # that another process has ended
ERROR_GRACE_SECONDS = 10.0  # of the first process, once another has ended


class TensorParallelModel:
    """The model of the first process, and the processes that follow it.

    Args:
        count: processes, the first among them.
        loading: arguments of `load_causal_lm`, `options` among them.

    Raises:
        XtkError: there are fewer devices, or the model cannot be loaded or cut.
    """

    def __init__(self, num_processes: int, load_arguments: Mapping[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.device_count() < num_processes:
            raise XtkError(f"tp_size is {num_processes}; this machine has {torch.cuda.device_count()} devices")
        _check_divisible(load_arguments["folder"], num_processes, trust_remote_code=load_arguments["trust_remote_code"])
        os.environ |= _process_environment(0, num_processes)
        self._followers: list[WorkerProcess] = []
        with block_sigint():
            for rank in range(1, num_processes):
                environment = {**os.environ, **_process_environment(rank, num_processes)}
                name = f"process {rank} of a teacher cut in {num_processes}"
                self._followers.append(WorkerProcess(name, environment, [], __name__))
                self._followers[-1].send(sys.path)
        for follower in self._followers:
            follower.send(os.getpid())
            follower.send((num_processes, dict(load_arguments)))
        weakref.finalize(self, _stop_followers, self._followers)
        threading.Thread(
            target=_exit_with_followers, args=(weakref.ref(self), list(self._followers)), daemon=True
        ).start()
        self.local_model = _load_local_model(num_processes, load_arguments)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return hidden states, or logits, as `BackboneWithHead` does.

        Args:
            input_ids: [B, T].

        Raises:
            XtkError: another process has ended.
        """
        try:
            torch.distributed.broadcast(torch.tensor(input_ids.shape, device=input_ids.device), 0)
            torch.distributed.broadcast(input_ids, 0)
            found: Tensor = self.local_model(input_ids)
        except RuntimeError as wrong:
            time.sleep(EXIT_POLL_SECONDS)
            for follower in self._followers:
                if follower.process.poll() is not None:
                    raise follower.exit_error() from wrong
            raise
        return found


def main(pipe: Connection) -> None:
    """Follow: receive who started it and what is loaded, then read what the first process reads, until it ends."""
    try:
        die_with_parent(pipe.recv(), signal.SIGKILL)
        count, loading = pipe.recv()
    except EOFError:  # the first one has gone
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the first one
    terminal.set_quiet(True)
    cut = _load_local_model(count, loading)
    device = cut.model.device
    with torch.inference_mode():
        while True:
            shape = torch.zeros(2, dtype=torch.int64, device=device)
            torch.distributed.broadcast(shape, 0)
            input_ids = torch.zeros(*shape.tolist(), dtype=torch.int64, device=device)
            torch.distributed.broadcast(input_ids, 0)
            cut(input_ids)


def _check_divisible(folder: Path, count: int, *, trust_remote_code: bool) -> None:
    configuration = load_model_config(folder, trust_remote_code=trust_remote_code).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(configuration, name, None)
        if isinstance(heads, int) and heads % count:
            raise XtkError(
                f"{name} of this teacher is {heads}: they cannot be dealt to tp_size={count}",
                where=str(folder),
                hint="another tp_size; or device_map=auto, which puts whole layers on each device",
            )


def _process_environment(rank: int, count: int) -> dict[str, str]:
    """Return what torch.distributed wants to know."""
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


def _load_local_model(count: int, loading: Mapping[str, Any]) -> BackboneWithHead:
    from transformers.distributed import DistributedConfig

    options = {**loading["options"], "distributed_config": DistributedConfig(tp_size=count)}
    model = load_causal_lm(**{**loading, "options": options})
    return BackboneWithHead(model.eval().requires_grad_(False))


def _exit_with_followers(model: weakref.ref[TensorParallelModel], followers: list[WorkerProcess]) -> None:
    """End this process when another one has ended: what waits for it in a collective call cannot be woken."""
    while model() is not None:
        for follower in followers:
            if follower.process.poll() is not None:
                time.sleep(ERROR_GRACE_SECONDS)  # it may be told already, where both met the same mistake
                if model() is not None:
                    terminal.error(follower.exit_error())
                    os._exit(1)
                return
        time.sleep(0.2)


def _stop_followers(followers: list[WorkerProcess]) -> None:
    for follower in followers:
        follower.process.kill()
        follower.process.wait()
        follower.pipe.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in _process_environment(0, 1):
        os.environ.pop(name, None)
