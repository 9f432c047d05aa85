"""The processes of a run: who this one is, waiting for the others, random numbers, what is told when one is gone."""

from __future__ import annotations

import contextlib
import os
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

# How gloo and NCCL call it when another process has ended, or does not answer in time.
PROCESS_LOST_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
    "broken pipe",
    "remote process exited",
)
TIMEOUT_MESSAGES = ("timed out", "timeout")


def rank() -> int:
    """Return which of the processes this is."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Return how many processes there are."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def is_main_process() -> bool:
    """Say whether this is the process that writes what all have in common."""
    return rank() == 0


def barrier() -> None:
    """Return when all processes have called it."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def all_reduce_max(value: int, device: torch.device) -> int:
    """Return the largest of all processes' values, which each of them gives."""
    if world_size() == 1:
        return value
    values = torch.tensor(value, device=device)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return int(values)


def all_gather_object(value: T) -> list[T]:
    """Return what each process gives, by rank; every process has to call it."""
    if world_size() == 1:
        return [value]
    told: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(told, value)
    return told


def init_process_group_after_restart(timeout: timedelta) -> None:
    """Meet the other processes in a place of this start's own.

    torch's agent starts processes again with the store of those that ended, whose addresses are still in it
    (docs/explanation/decisions.md). Of a first start nothing is done here: Accelerate does it.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or torch.distributed.is_initialized():
        return
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and here == 0,
        timeout=timeout,
    )
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(f"start-{attempt}", store),
        rank=here,
        world_size=ranks,
        timeout=timeout,
    )


@contextlib.contextmanager
def report_lost_processes() -> Iterator[None]:
    """Tell in xtk's form that another process has ended, or does not answer: it, not this one, knows why.

    Raises:
        XtkError: so it is.
    """
    try:
        yield
    except RuntimeError as wrong:
        text = str(wrong).lower()
        if world_size() == 1 or not any(words in text for words in PROCESS_LOST_MESSAGES):
            raise
        silent = any(words in text for words in TIMEOUT_MESSAGES)
        raise XtkError(
            "another process did not answer in time" if silent else "another process has ended",
            where=str(wrong).splitlines()[0][:200],
            hint="its own message tells more; run the same command again, it goes on from the last checkpoint"
            + ("; a longer --ddp-timeout, if it was only slow" if silent else ""),
        ) from None


def random_states() -> dict[str, Tensor]:
    """Return the state of torch's generators of this process."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Put them back."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def reseed(seed: int, step: int, stream: int) -> None:
    """Begin random numbers anew, with others than any other stream's or step's."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, stream]).generate_state(1, np.uint64)[0]))
