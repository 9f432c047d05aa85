"""While the first process works alone, the other ones may wait longer than --ddp-timeout."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from xtk.losses.spec import parse_losses
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig
from xtk.parallel import process_group
from xtk.rewards.reward_spec import parse_reward
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.teachers.online_teacher import OnlineTeacher, parse_online_teacher
from xtk.text.tokenizer import Tokenizer
from xtk.training.distill import distill
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

TIMEOUT_SECONDS, BUSY_SECONDS = 5, 13
WRITING = (transformers.LlamaForCausalLM, "save_pretrained")
WORK = {"rewards": None, "teacher": (OnlineTeacher, "score"), "files": WRITING, "merge": WRITING}
REWARD = f"""
import os, time

def score(completion, prompt, row):
    time.sleep({BUSY_SECONDS / 2} if os.environ["RANK"] == "0" else 0)
    return 1.0
"""


def delay(owner: type, name: str) -> None:
    """Let a method of a class take longer."""
    original: Callable[..., Any] = getattr(owner, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(BUSY_SECONDS)
        return original(*arguments, **options)

    setattr(owner, name, slow)


def train_on_policy(rank: int, port: int, work: str, student: Path, teacher: Path, folder: Path) -> None:
    """Run in a process of its own: one step in a group with a short time limit, where rank 0 works long alone."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": f"{port}"}  # fmt: skip
    process_group.init_process_group(timedelta(seconds=120))
    config = OnPolicyConfig(
        sampling=SamplingConfig(max_completion_length=4), num_generations=1,
        rewards=(parse_reward(f"{folder / 'reward.py'}:score"),) if work == "rewards" else (),
    )  # fmt: skip
    recipe = TrainConfig(
        losses=tuple(parse_losses(["byte-kl"])), max_steps=1, per_device_train_batch_size=2, on_policy=config,
        preparation=StudentModelConfig(lora_r=2 if work == "merge" else 0),
    )  # fmt: skip
    online = parse_online_teacher(f"{teacher}:top_k=8", long_documents="refuse", trust_remote_code=False)
    paths = RunPaths(ModelRef(student), (str(folder / "prompts.jsonl"),), (), folder / "out", online_teachers=(online,))
    inputs = open_inputs(paths, recipe, Tokenizer(student))
    process_group.barrier()
    group = torch.distributed.group.WORLD
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS), group)
    if WORK[work] and rank == 0:
        delay(*WORK[work])
    distill(paths, recipe, LoggingConfig(save_steps=0), inputs, force=False)
    os._exit(0)  # the result is the run, not how Python ends its threads


@pytest.mark.parametrize(
    "work",
    [pytest.param(one, marks=pytest.mark.slow if one in ("teacher", "merge") else pytest.mark.long) for one in WORK],
)
def test_other_processes_wait_for_the_first_one_longer_than_the_timeout(pair, tmp_path, work):
    rows = [{"prompt": f"Anna has {number} apples and"} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    arguments = port, work, pair.student, pair.teacher, tmp_path
    processes = [context.Process(target=train_on_policy, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "out" / "xtk.json").is_file()
