"""Checkpoints that are written in one parallel layout and read in another one."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoint_processes
import pytest
import torch
from checkpoint_processes import IDS, TrainingSetup
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from xtk.errors import CorruptError, XtkError
from xtk.parallel import process_group

pytestmark = pytest.mark.slow

SCRIPT = Path(checkpoint_processes.__file__)
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            "--nproc-per-node"]  # fmt: skip


def run_actions(processes: int, folder: Path, *actions: str) -> None:
    """Run write and read actions in a number of processes; fail unless every action is done."""
    launcher = [*TORCHRUN, processes] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *map(str, [*launcher, SCRIPT, processes, folder, *actions])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"done {action}" for action in actions]


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory) -> Path:
    """A folder with checkpoints of two processes in two layouts, each read back in both layouts."""
    folder = tmp_path_factory.mktemp("written")
    checkpoint_processes.make_models(folder)
    reads = ("read:fsdp:fsdp-2", "read:tp:tp-2", "read:fsdp:tp-2", "read:tp:fsdp-2", "read:dp:tp-2")
    run_actions(2, folder, "write:fsdp", "write:tp", *reads)
    return folder


@pytest.mark.parametrize("name", ["fsdp-2", "tp-2"])
def test_one_process_reads_checkpoints_of_two_bit_for_bit(checkpoint_folder, name):
    checkpoint_processes.read(checkpoint_folder, name, "dp")


@pytest.mark.long
def test_three_processes_read_checkpoints_of_two_bit_for_bit(checkpoint_folder):
    run_actions(3, checkpoint_folder, "read:fsdp:tp-2", "read:dp:fsdp-2")


@pytest.mark.long
def test_checkpoints_of_four_processes_in_2d_layouts_are_read_bit_for_bit(checkpoint_folder):
    run_actions(4, checkpoint_folder, "write:fsdp-tp", "read:fsdp-tp:fsdp-tp-4", "read:dp-tp:fsdp-tp-4", "write:dp-tp")
    run_actions(3, checkpoint_folder, "read:fsdp:fsdp-tp-4", "read:fsdp:dp-tp-4")
    run_actions(1, checkpoint_folder, "read:dp:fsdp-tp-4", "read:dp:dp-tp-4")


@pytest.mark.parametrize("name", ["fsdp-2", "tp-2"])
def test_best_checkpoint_has_the_averaged_weights_that_were_evaluated(checkpoint_folder, name):
    expected = load_file(checkpoint_folder / f"{name}.safetensors")
    model = LlamaForCausalLM.from_pretrained(checkpoint_folder / name / "best-3", dtype=torch.float32)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"ema.{key}"])
        assert not torch.equal(parameter, expected[f"weight.{key}"])
    with torch.no_grad():
        loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(expected["averaged"], loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fsdp-2", "tp-2"])
def test_each_process_writes_its_shard_and_no_value_is_written_twice(checkpoint_folder, name):
    checkpoint = checkpoint_folder / name / "checkpoint-3"
    shards_of_tensor: dict[str, list[tuple[int, list[int]]]] = {}
    for rank in range(2):
        with safe_open(checkpoint / "trainer" / f"rank-0000{rank}-of-00002.safetensors", "pt") as file:
            shards = json.loads(file.metadata()["xtk"])["sharded_state"]
            assert set(shards) == set(file.keys())
            assert sum(shard_name.startswith("exp_avg.") for shard_name in shards) > 5
            for key, shard in shards.items():
                shards_of_tensor.setdefault(shard["tensor"], []).append(
                    (math.prod(file.get_slice(key).get_shape()), shard["shape"])
                )
    for sizes_and_shapes in shards_of_tensor.values():
        assert sum(size for size, _ in sizes_and_shapes) == math.prod(sizes_and_shapes[0][1])
    assert json.loads((checkpoint / "xtk.json").read_text())["num_processes"] == 2
    assert LlamaForCausalLM.from_pretrained(checkpoint).config.vocab_size == 51


def test_corrupt_incomplete_or_mismatched_checkpoint_is_refused(checkpoint_folder, tmp_path):
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(checkpoint_folder / "fsdp-2" / "checkpoint-3", copy)
    run = TrainingSetup(copy, "dp")
    trainer_file = copy / "trainer" / "rank-00001-of-00002.safetensors"
    content = trainer_file.read_bytes()
    trainer_file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptError, match="cannot be read"):
        run.saver.load(copy, 0)
    trainer_file.unlink()
    with pytest.raises(CorruptError, match="the checkpoint has no trainer files of 1 of 2 processes"):
        run.saver.load(copy, 0)
    shutil.copyfile(copy / "trainer" / "rank-00000-of-00002.safetensors", trainer_file)
    with pytest.raises(CorruptError, match=r"do not have each value of the tensor .* once"):
        run.saver.load(copy, 0)
    trainer_file.write_bytes(content)
    with pytest.raises(
        CorruptError, match=r"from another model: the student also trains the parameter lm_head\.weight"
    ):
        TrainingSetup(checkpoint_folder / "untied", "dp").saver.load(copy, 0)
    (copy / "xtk.json").write_text('{"kind": "checkpoint", "step": 3}')
    with pytest.raises(XtkError, match="has version unknown") as raised:
        run.saver.load(copy, 0)
    assert "--force" in str(raised.value)


def test_checkpoint_of_a_cpu_is_read_by_a_process_with_a_gpu(tmp_path, monkeypatch):
    """It has no state of a GPU's generator, which is reseeded."""
    checkpoint_processes.make_models(tmp_path)
    checkpoint_processes.write(tmp_path, "alone", "dp")
    stored = torch.get_rng_state()
    monkeypatch.setattr(process_group, "random_states", lambda: {"cpu": stored, "cuda": stored})
    restored: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(process_group, "set_random_states", restored.update)
    run = TrainingSetup(tmp_path / "alone" / "checkpoint-3", "dp")
    assert run.saver.load(tmp_path / "alone" / "checkpoint-3", 0)["step"] == 3
    assert restored.keys() == {"cpu"}


def test_weights_for_an_engine_are_written_in_its_dtype(tmp_path):
    checkpoint_processes.make_models(tmp_path)
    run = TrainingSetup(tmp_path / "untied", "dp")
    run.saver.write_student(tmp_path / "weights", dtype=torch.bfloat16)
    written = load_file(tmp_path / "weights" / "model.safetensors")
    for name, weight in run.parameters.items():
        expected = weight.detach().to(torch.bfloat16 if weight.ndim > 1 else torch.float32)
        assert written[name].dtype == expected.dtype
        assert torch.equal(written[name], expected)
