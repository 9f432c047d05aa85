"""The process group of a run: rank, collectives, random states, and errors about lost processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from xtk.errors import XtkError

T = TypeVar("T")

# Parts of the messages of gloo and NCCL when another process has ended or timed out.
PROCESS_LOST_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
    "broken pipe",
    "remote process exited",
)
TIMEOUT_MESSAGES = ("timed out", "timeout")

MAX_WAIT_SECONDS = 24 * 3600  # for the first process while it works alone
_waits = itertools.count()

# Backends of the groups of a run, by the type of its devices: NCCL has no tensors on the CPU, where gradients of
# offloaded weights and integers of the host are.
BACKENDS = {"cuda": "cuda:nccl,cpu:gloo", "cpu": "gloo"}


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def is_main_process() -> bool:
    """Return whether this is rank 0, which writes the common files."""
    return rank() == 0


def wait_for_main_process() -> None:
    """Wait up to `MAX_WAIT_SECONDS` until rank 0 calls this function, which it leaves at once (collective).

    While rank 0 generates, writes or starts an engine alone, the others must not wait in a collective of torch, which
    ends the run after `--ddp-timeout`. They read the store again and again instead: a wait would lock it.
    """
    if world_size() == 1:
        return
    store, key = torch.distributed.distributed_c10d._get_default_store(), f"xtk-main-process-{next(_waits)}"
    if is_main_process():
        store.set(key, "")
        return
    started = time.monotonic()
    while not store.check([key]):
        if (waited := time.monotonic() - started) > MAX_WAIT_SECONDS:
            raise XtkError(f"the first process of this run has not responded for {MAX_WAIT_SECONDS // 3600} hours")
        time.sleep(min(1.0, 0.001 + waited / 10))


def barrier() -> None:
    """Wait until all processes have called this function; only the wait for rank 0 may exceed the timeout."""
    wait_for_main_process()
    all_reduce_max(0)


def all_reduce_max(value: int) -> int:
    """Return the maximum of an integer over all processes (collective); it does not wait for work on a GPU."""
    if world_size() == 1:
        return value
    values = torch.tensor(value)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return int(values)


def all_gather_object(value: T) -> list[T]:
    """Return the values of all processes, by rank (collective); only the wait for rank 0 may exceed the timeout."""
    if world_size() == 1:
        return [value]
    wait_for_main_process()
    gathered: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def init_process_group(timeout: timedelta) -> None:
    """Create the process group of a process that torchrun or Accelerate started; other processes get none.

    Accelerate, which would create it with NCCL alone on a GPU, uses an existing group. torch's agent restarts processes
    with the old store, which still has the addresses of the ended processes (docs/explanation/decisions.md): each start
    has its own prefix.
    """
    if "LOCAL_RANK" not in os.environ or torch.distributed.is_initialized():
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and here == 0,
        timeout=timeout,
    )
    torch.distributed.init_process_group(
        BACKENDS["cuda" if torch.cuda.is_available() else "cpu"],
        store=PrefixStore(f"start-{attempt}", store),
        rank=here,
        world_size=ranks,
        timeout=timeout,
    )


@contextlib.contextmanager
def report_lost_processes() -> Iterator[None]:
    """Turn torch's error about a lost process into an `XtkError`."""
    try:
        yield
    except RuntimeError as failure:
        text = str(failure).lower()
        if world_size() == 1 or not any(words in text for words in PROCESS_LOST_MESSAGES):
            raise
        silent = any(words in text for words in TIMEOUT_MESSAGES)
        raise XtkError(
            "a process of this run did not respond within --ddp-timeout"
            if silent
            else "a process of this run has ended",
            where=str(failure).splitlines()[0][:200],
            hint="see the error of that process; run the same command again to resume from the last checkpoint"
            + ("; if it was only slow, use a longer --ddp-timeout" if silent else ""),
        ) from None


def random_states() -> dict[str, Tensor]:
    """Return the states of torch's global generators of this process, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restore the states of `random_states`."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def reseed(seed: int, step: int, stream: int) -> None:
    """Seed torch's global generators with a value that is different for every stream and step."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, stream]).generate_state(1, np.uint64)[0]))
