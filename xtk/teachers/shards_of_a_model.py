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
from xtk.children import die_with, without_interrupts
from xtk.errors import XtkError
from xtk.models.causal_lm import Cut, load_causal_lm, load_configuration
from xtk.teachers.processes import Worker

SECONDS_TO_SEE = 1.0  # that another process has ended
SECONDS_TO_TELL = 10.0  # of the first process, once another has ended


class ShardedCut:
    """The model of the first process, and the processes that follow it.

    Args:
        count: processes, the first among them.
        loading: arguments of `load_causal_lm`, `options` among them.

    Raises:
        XtkError: there are fewer devices, or the model cannot be loaded or cut.
    """

    def __init__(self, count: int, loading: Mapping[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.device_count() < count:
            raise XtkError(f"tp_size is {count}; this machine has {torch.cuda.device_count()} devices")
        _refuse_uneven(loading["folder"], count, trust_remote_code=loading["trust_remote_code"])
        os.environ |= _environment(0, count)
        self._followers: list[Worker] = []
        with without_interrupts():
            for rank in range(1, count):
                environment = {**os.environ, **_environment(rank, count)}
                name = f"process {rank} of a teacher cut in {count}"
                self._followers.append(Worker(name, environment, [], __name__))
                self._followers[-1].send(sys.path)
        for follower in self._followers:
            follower.send(os.getpid())
            follower.send((count, dict(loading)))
        weakref.finalize(self, _end, self._followers)
        threading.Thread(target=_watch, args=(weakref.ref(self), list(self._followers)), daemon=True).start()
        self.cut = _sharded(count, loading)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return hidden states, or logits, as `Cut` does.

        Args:
            input_ids: [B, T].

        Raises:
            XtkError: another process has ended.
        """
        try:
            torch.distributed.broadcast(torch.tensor(input_ids.shape, device=input_ids.device), 0)
            torch.distributed.broadcast(input_ids, 0)
            found: Tensor = self.cut(input_ids)
        except RuntimeError as wrong:
            time.sleep(SECONDS_TO_SEE)
            for follower in self._followers:
                if follower.process.poll() is not None:
                    raise follower.ended() from wrong
            raise
        return found


def main(pipe: Connection) -> None:
    """Follow: receive who started it and what is loaded, then read what the first process reads, until it ends."""
    try:
        die_with(pipe.recv(), signal.SIGKILL)
        count, loading = pipe.recv()
    except EOFError:  # the first one has gone
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the first one
    terminal.set_quiet(True)
    cut = _sharded(count, loading)
    device = cut.model.device
    with torch.inference_mode():
        while True:
            shape = torch.zeros(2, dtype=torch.int64, device=device)
            torch.distributed.broadcast(shape, 0)
            input_ids = torch.zeros(*shape.tolist(), dtype=torch.int64, device=device)
            torch.distributed.broadcast(input_ids, 0)
            cut(input_ids)


def _refuse_uneven(folder: Path, count: int, *, trust_remote_code: bool) -> None:
    configuration = load_configuration(folder, trust_remote_code=trust_remote_code).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(configuration, name, None)
        if isinstance(heads, int) and heads % count:
            raise XtkError(
                f"{name} of this teacher is {heads}: they cannot be dealt to tp_size={count}",
                where=str(folder),
                hint="another tp_size; or device_map=auto, which puts whole layers on each device",
            )


def _environment(rank: int, count: int) -> dict[str, str]:
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


def _sharded(count: int, loading: Mapping[str, Any]) -> Cut:
    from transformers.distributed import DistributedConfig

    options = {**loading["options"], "distributed_config": DistributedConfig(tp_size=count)}
    model = load_causal_lm(**{**loading, "options": options})
    return Cut(model.eval().requires_grad_(False))


def _watch(model: weakref.ref[ShardedCut], followers: list[Worker]) -> None:
    """End this process when another one has ended: what waits for it in a collective call cannot be woken."""
    while model() is not None:
        for follower in followers:
            if follower.process.poll() is not None:
                time.sleep(SECONDS_TO_TELL)  # it may be told already, where both met the same mistake
                if model() is not None:
                    terminal.error(follower.ended())
                    os._exit(1)
                return
        time.sleep(0.2)


def _end(followers: list[Worker]) -> None:
    for follower in followers:
        follower.process.kill()
        follower.process.wait()
        follower.pipe.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in _environment(0, 1):
        os.environ.pop(name, None)
