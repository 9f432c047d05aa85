"""Worker processes of teachers on this machine.

Those of a `WorkerPool` each open the teacher; they write shards of a cache, or score documents. Those of a
`TensorParallelModel` share one teacher, with the tensor parallelism of transformers: the first process broadcasts its
inputs, and the others run the same forward passes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from xtk import terminal
from xtk.engines.worker_process import WorkerKind, WorkerProcess, stop_workers
from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, load_model_config
from xtk.models.resolver import ModelRef
from xtk.subprocesses import cuda_visible_devices, environment_without_launcher_variables
from xtk.teachers.backend_interface import TeacherBackend
from xtk.teachers.cache_build_config import CacheRequest, open_teacher
from xtk.text.tokenizer import Tokenizer

EXIT_SECONDS = 30.0  # wait for a worker that has finished
EXIT_POLL_SECONDS = 1.0  # wait for the exit of another process after a collective call failed
ERROR_GRACE_SECONDS = 10.0  # time for the first process to raise its own error after another process has ended
RESUME_HINT = "run the same command again; finished parts are kept"
TEACHER_WORKER = WorkerKind(
    main=f"{__name__}:serve_teacher",
    process="a worker process of the teacher",
    exit_hint="see the messages of this process above",
    signal_hint=RESUME_HINT,
    memory_hint=f"if memory ran out, use a smaller --num-processes or --batch-tokens; {RESUME_HINT}",
)
FOLLOWER = replace(TEACHER_WORKER, main=f"{__name__}:run_follower")


@dataclass(frozen=True)
class TeacherJob(ABC):
    """Work for a teacher, in this process or in worker processes."""

    request: CacheRequest  # teacher and options
    header: dict[str, Any]  # of the cache; it states the teacher's weights

    def inherited_descriptors(self) -> list[int]:
        """Return the open files that a worker process needs."""
        return []

    @abstractmethod
    def run(self, teacher: TeacherBackend, tokenizer: Tokenizer, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of each task."""


class WorkerPool:
    """Worker processes that each open the teacher and run some of the tasks of a job.

    Args:
        num_processes: number of processes; several have separate devices, if this machine has devices.
        devices: devices that all processes see; (): as above.
    """

    def __init__(self, num_processes: int, job: TeacherJob, devices: Sequence[int] = ()) -> None:
        self._job = job
        self._environments = _worker_environments(num_processes)
        if devices:
            for environment in self._environments:
                environment |= cuda_visible_devices(devices)
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        try:
            inherited = self._job.inherited_descriptors()
            for number, environment in enumerate(self._environments):
                name = f"process {number} of {len(self._environments)}"
                self._workers.append(WorkerProcess(TEACHER_WORKER, name, environment, inherited))
            for worker in self._workers:
                worker.send(self._job)
            for _ in self._messages():  # until each teacher is open
                pass
        except BaseException:
            stop_workers(self._workers, 0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_workers(self._workers, EXIT_SECONDS if kind is None else 0.0)

    def run(self, tasks: list[Any], report_tokens: Callable[[int], None] = lambda count: None) -> Iterator[Any]:
        """Distribute tasks over the processes and yield their results; may be called once.

        Args:
            report_tokens: is called with the number of tokens of each batch that is scored.
        """
        for at, worker in enumerate(self._workers):
            worker.send(tasks[at :: len(self._workers)])
        for message in self._messages():
            if isinstance(message, int):
                report_tokens(message)
            else:
                yield message

    def _messages(self) -> Iterator[Any]:
        """Yield the messages of all workers until each has sent None."""
        left: dict[Any, WorkerProcess] = {worker.pipe: worker for worker in self._workers}
        while left:
            for pipe in wait(list(left)):
                message = left[pipe].receive()
                if message is None:
                    del left[pipe]
                else:
                    yield message


def _worker_environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each process, with its device or its number of CPU threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = environment_without_launcher_variables()
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    if count == 1 or not torch.cuda.is_available():
        return [dict(common) for _ in range(count)]
    devices = torch.cuda.device_count()
    if count > devices:
        raise XtkError(
            f"--num-processes is {count}; this machine has only {devices} devices",
            hint=f"use --num-processes {devices} or less",
        )
    return [common | cuda_visible_devices([number]) for number in range(count)]


def serve_teacher(pipe: Connection) -> None:
    """Run in a worker process: receive a job, send None when its teacher is open, receive tasks, send their results.

    In between, the number of tokens of each batch is sent. At the end, None.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        job: TeacherJob = pipe.recv()
        tokenizer = job.request.teacher_tokenizer()
        teacher = open_teacher(job.request, tokenizer, job.header["teacher"]["weights"])
        pipe.send(None)
        teacher.report_tokens = pipe.send  # an int
        for result in job.run(teacher, tokenizer, pipe.recv()):
            pipe.send(result)
        pipe.send(None)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # do not interrupt cleanup of libraries


class TensorParallelModel:
    """The model shard of the first process, and the other processes of the tensor-parallel group."""

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
        """Return the same hidden states or logits as `BackboneWithHead`."""
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
