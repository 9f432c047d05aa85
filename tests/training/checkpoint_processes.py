"""Processes that write and read checkpoints of a small model, cut in several ways.

    torchrun --nproc-per-node N checkpoint_processes.py PROCESSES FOLDER ACTION...

An action is `write:LAYOUT` (three steps of AdamW with a moving average, `FOLDER/LAYOUT-PROCESSES`, and what is in it as
whole tensors beside it, `.safetensors`) or `read:LAYOUT:NAME`, which fails unless the checkpoint NAME gives the same to
the bit. LAYOUT is `dp`, `fsdp`, `tp`, `fsdp-tp` or `dp-tp`, of which the last two are of two by two processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.utils import logging

from xtk.training import process_group
from xtk.training.checkpoint import CheckpointSaver
from xtk.training.sharded_state import local_tensor
from xtk.training.weight_ema import ExponentialMovingAverage

IDS = torch.arange(24).view(2, 12) % 16
STEP, SEED = 3, 5


def make_models(folder: Path) -> None:
    """Write tiny Llamas `tied` and `untied`, whose sizes two and three processes cut unevenly."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "vocab_size": 51}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    for name in ("tied", "untied"):
        configuration = LlamaConfig(**sizes, **heads, tie_word_embeddings=name == "tied")
        LlamaForCausalLM(configuration).save_pretrained(folder / name)


class Wrapped(nn.Module):
    """What is around a model while it is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


class Trained:
    """A model on its way, cut as a layout says."""

    def __init__(self, folder: Path, layout: str) -> None:
        two = DistributedConfig(tp_size=2)
        options = {"distributed_config": two} if layout == "tp" else {}
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        self.wrapped = Wrapped(self.model)
        mesh = None
        if layout.endswith("-tp"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
            apply_tensor_parallelism(self.model, mesh["tp"], self.model._resolve_parallel_plans(two)[0])
        if layout == "tp" and self.model.config.tie_word_embeddings:  # cutting it undoes the tie
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        if layout.startswith("fsdp"):
            shards = mesh["data"] if mesh else init_device_mesh("cpu", (process_group.world_size(),))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=shards)
            fully_shard(self.wrapped, mesh=shards)
        # Taken once: after a forward pass FSDP shows others, which are whole, in their place.
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.01, foreach=False)
        self.average = ExponentialMovingAverage(self.model, 0.5)
        self.saver = CheckpointSaver(
            self.model, self.optimizer, folder, averages=self.average.averages, parallel=layout
        )

    def step(self) -> None:
        self.wrapped(IDS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update()

    def whole(self) -> dict[str, Tensor]:
        """Return everything that a checkpoint holds, gathered by torch."""
        found = {}
        for name, parameter in self.parameters.items():
            found[f"weight.{name}"] = parameter
            found[f"ema.{name}"] = self.average.averages[name]
            found |= {f"{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
        gathered = {name: one.detach() for name, one in found.items()}
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in gathered.items()}


def write(folder: Path, name: str, layout: str) -> None:
    run = Trained(folder / ("untied" if layout.endswith("-tp") else "tied"), layout)
    torch.manual_seed(100 + process_group.rank())
    for _ in range(STEP):
        run.step()
    if process_group.is_main_process():
        (folder / name).mkdir()
    process_group.barrier()
    run.saver.write_checkpoint(folder / name, STEP, {"tokens": 72})
    with torch.no_grad():
        before = run.wrapped(IDS)
        with run.average.swapped_in(run.wrapped):
            averaged = run.wrapped(IDS)
            run.saver.write_best(folder / name, STEP)
        assert torch.equal(before, run.wrapped(IDS)), "the weights came back"
    whole = run.whole() | {"averaged": averaged.detach(), "random": torch.rand(4)}
    if process_group.is_main_process():
        save_file({key: value.contiguous().clone() for key, value in whole.items()}, folder / f"{name}.safetensors")
    process_group.barrier()


def read(folder: Path, name: str, layout: str) -> None:
    checkpoint = folder / name / f"checkpoint-{STEP}"
    run = Trained(checkpoint, layout)
    content = run.saver.load(checkpoint, SEED)
    assert content["step"] == STEP
    assert content["tokens"] == 72
    expected = load_file(folder / f"{name}.safetensors")
    found = run.whole()
    assert expected.keys() - found.keys() == {"averaged", "random"}
    assert found.keys() <= expected.keys(), found.keys() - expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), f"{key} of {name}, read as {layout}"
    cut = sum(local_tensor(one).numel() < one.numel() for one in run.parameters.values())
    assert (cut > 0) == (layout != "dp" and process_group.world_size() > 1), "the model is cut"
    if process_group.is_main_process():
        drawn = torch.rand(4)
        torch.manual_seed(0)
        same = name == f"{layout}-{process_group.world_size()}"
        assert torch.equal(drawn, expected["random"]) == same, "random numbers go on, or begin anew"
    run.step()  # what was read is good to go on with


def main() -> None:
    wanted, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if wanted > 1:
        torch.distributed.init_process_group("gloo")
    assert process_group.world_size() == wanted
    for action in sys.argv[3:]:
        kind, layout, *name = action.split(":")
        if kind == "write":
            write(folder, f"{layout}-{wanted}", layout)
        else:
            read(folder, *name, layout)
        if process_group.is_main_process():
            print(f"done {action}", flush=True)
    if wanted > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
