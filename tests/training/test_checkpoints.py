"""A checkpoint holds a run as it is, however it is cut over processes, and is read however that one is cut."""

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
from checkpoint_processes import IDS, Trained
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from xtk.errors import CorruptError, XtkError

pytestmark = pytest.mark.slow

SCRIPT = Path(checkpoint_processes.__file__)
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            "--nproc-per-node"]  # fmt: skip


def act(processes: int, folder: Path, *actions: str) -> None:
    """Let processes write and read; each action is done by all of them, or the test fails."""
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
def written(tmp_path_factory) -> Path:
    """Checkpoints of two processes, cut in two ways, each read back as the other."""
    folder = tmp_path_factory.mktemp("written")
    checkpoint_processes.make_models(folder)
    reads = ("read:fsdp:fsdp-2", "read:tp:tp-2", "read:fsdp:tp-2", "read:tp:fsdp-2", "read:dp:tp-2")
    act(2, folder, "write:fsdp", "write:tp", *reads)
    return folder


@pytest.mark.parametrize("name", ["fsdp-2", "tp-2"])
def test_one_process_reads_what_two_wrote_to_the_bit(written, name):
    checkpoint_processes.read(written, name, "dp")


@pytest.mark.long
def test_three_processes_read_what_two_wrote_to_the_bit(written):
    act(3, written, "read:fsdp:tp-2", "read:dp:fsdp-2")


@pytest.mark.long
def test_so_it_is_with_four_that_cut_in_two_directions(written):
    act(4, written, "write:fsdp-tp", "read:fsdp-tp:fsdp-tp-4", "read:dp-tp:fsdp-tp-4", "write:dp-tp")
    act(3, written, "read:fsdp:fsdp-tp-4", "read:fsdp:dp-tp-4")
    act(1, written, "read:dp:fsdp-tp-4", "read:dp:dp-tp-4")


@pytest.mark.parametrize("name", ["fsdp-2", "tp-2"])
def test_the_average_is_what_is_evaluated_and_kept_as_the_best(written, name):
    expected = load_file(written / f"{name}.safetensors")
    model = LlamaForCausalLM.from_pretrained(written / name / "best-3", dtype=torch.float32)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"ema.{key}"])
        assert not torch.equal(parameter, expected[f"weight.{key}"])
    with torch.no_grad():
        loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(expected["averaged"], loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["fsdp-2", "tp-2"])
def test_each_process_writes_its_own_part_and_nothing_is_written_twice(written, name):
    checkpoint = written / name / "checkpoint-3"
    held: dict[str, list[tuple[int, list[int]]]] = {}
    for rank in range(2):
        with safe_open(checkpoint / "trainer" / f"rank-0000{rank}-of-00002.safetensors", "pt") as file:
            pieces = json.loads(file.metadata()["xtk"])["sharded_state"]
            assert set(pieces) == set(file.keys())
            assert sum(of.startswith("exp_avg.") for of in pieces) > 5
            for key, piece in pieces.items():
                held.setdefault(piece["tensor"], []).append(
                    (math.prod(file.get_slice(key).get_shape()), piece["shape"])
                )
    for stored in held.values():
        assert sum(numbers for numbers, _ in stored) == math.prod(stored[0][1])
    assert json.loads((checkpoint / "xtk.json").read_text())["num_processes"] == 2
    assert LlamaForCausalLM.from_pretrained(checkpoint).config.vocab_size == 51


def test_what_is_missing_or_of_another_model_is_told(written, tmp_path):
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(written / "fsdp-2" / "checkpoint-3", copy)
    run = Trained(copy, "dp")
    lost = copy / "trainer" / "rank-00001-of-00002.safetensors"
    kept = lost.read_bytes()
    lost.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CorruptError, match="cannot be read"):
        run.saver.load(copy, 0)
    lost.unlink()
    with pytest.raises(CorruptError, match="the checkpoint has no trainer files of 1 of 2 processes"):
        run.saver.load(copy, 0)
    shutil.copyfile(copy / "trainer" / "rank-00000-of-00002.safetensors", lost)
    with pytest.raises(CorruptError, match=r"do not have each value of the tensor .* once"):
        run.saver.load(copy, 0)
    lost.write_bytes(kept)
    with pytest.raises(
        CorruptError, match=r"from another model: the student also trains the parameter lm_head\.weight"
    ):
        Trained(written / "untied", "dp").saver.load(copy, 0)
    (copy / "xtk.json").write_text('{"kind": "checkpoint", "step": 3}')
    with pytest.raises(XtkError, match="has version 1") as refused:
        run.saver.load(copy, 0)
    assert "--force" in str(refused.value)
