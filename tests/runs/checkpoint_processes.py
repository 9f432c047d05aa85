"""Processes that write and read checkpoints of a small model in several parallel layouts.

    torchrun --nproc-per-node N checkpoint_processes.py PROCESSES FOLDER ACTION...

An action is `write:LAYOUT` or `read:LAYOUT:NAME`. `write` takes three steps of AdamW with a moving average of the
weights, and writes the checkpoint `FOLDER/LAYOUT-PROCESSES` and its content as unsharded tensors,
`FOLDER/LAYOUT-PROCESSES.safetensors`. `read` fails unless the checkpoint NAME has bit for bit the same content. LAYOUT
is `dp`, `fsdp`, `tp`, `fsdp-tp` or `dp-tp`; the last two have two by two processes.
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

from xtk.parallel import process_group
from xtk.runs.checkpoint import CheckpointSaver
from xtk.runs.sharded_state import local_tensor
from xtk.training.ema_and_cpu_offload import ExponentialMovingAverage

IDS = torch.arange(24).view(2, 12) % 16
STEP, SEED = 3, 5


def make_models(folder: Path) -> None:
    """Write tiny Llamas `tied` and `untied`, whose sizes do not divide evenly over two and three processes."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "vocab_size": 51}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    for name in ("tied", "untied"):
        configuration = LlamaConfig(**sizes, **heads, tie_word_embeddings=name == "tied")
        LlamaForCausalLM(configuration).save_pretrained(folder / name)


class ModelWithLoss(nn.Module):
    """A module that wraps the model and returns its loss, as during training."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


class TrainingSetup:
    """A model, its optimizer and the average of its weights, sharded as the layout requires."""

    def __init__(self, folder: Path, layout: str) -> None:
        tp_config = DistributedConfig(tp_size=2)
        options = {"distributed_config": tp_config} if layout == "tp" else {}
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        self.wrapped = ModelWithLoss(self.model)
        mesh = None
        if layout.endswith("-tp"):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
            apply_tensor_parallelism(self.model, mesh["tp"], self.model._resolve_parallel_plans(tp_config)[0])
        if layout == "tp" and self.model.config.tie_word_embeddings:  # tensor parallelism unties the weights
            self.model.lm_head.weight = self.model.model.embed_tokens.weight
        if layout.startswith("fsdp"):
            shard_mesh = mesh["data"] if mesh else init_device_mesh("cpu", (process_group.world_size(),))
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=shard_mesh)
            fully_shard(self.wrapped, mesh=shard_mesh)
        # Collected once: after a forward pass, FSDP replaces the parameters with unsharded ones.
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

    def full_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint, gathered from all processes by torch."""
        tensors = {}
        for name, parameter in self.parameters.items():
            tensors[f"weight.{name}"] = parameter
            tensors[f"ema.{name}"] = self.average.averages[name]
            tensors |= {f"{key}.{name}": value for key, value in self.optimizer.state[parameter].items()}
        detached = {name: one.detach() for name, one in tensors.items()}
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in detached.items()}


def write(folder: Path, name: str, layout: str) -> None:
    run = TrainingSetup(folder / ("untied" if layout.endswith("-tp") else "tied"), layout)
    torch.manual_seed(100 + process_group.rank())
    for _ in range(STEP):
        run.step()
    if process_group.is_main_process():
        (folder / name).mkdir()
    process_group.barrier()
    run.saver.write_checkpoint(folder / name, STEP, {"tokens": 72})
    with torch.no_grad():
        loss_before = run.wrapped(IDS)
        with run.average.swapped_in(run.wrapped):
            averaged_loss = run.wrapped(IDS)
            run.saver.write_best(folder / name, STEP)
        assert torch.equal(loss_before, run.wrapped(IDS)), "the weights came back"
    tensors = run.full_tensors() | {"averaged": averaged_loss.detach(), "random": torch.rand(4)}
    if process_group.is_main_process():
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    process_group.barrier()


def read(folder: Path, name: str, layout: str) -> None:
    checkpoint = folder / name / f"checkpoint-{STEP}"
    run = TrainingSetup(checkpoint, layout)
    content = run.saver.load(checkpoint, SEED)
    assert content["step"] == STEP
    assert content["tokens"] == 72
    expected = load_file(folder / f"{name}.safetensors")
    found = run.full_tensors()
    assert expected.keys() - found.keys() == {"averaged", "random"}
    assert found.keys() <= expected.keys(), found.keys() - expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), f"{key} of {name}, read as {layout}"
    num_sharded = sum(local_tensor(one).numel() < one.numel() for one in run.parameters.values())
    assert (num_sharded > 0) == (layout != "dp" and process_group.world_size() > 1), "the model is cut"
    if process_group.is_main_process():
        random_numbers = torch.rand(4)
        torch.manual_seed(0)
        is_same_layout = name == f"{layout}-{process_group.world_size()}"
        assert torch.equal(random_numbers, expected["random"]) == is_same_layout, (
            "random numbers continue, or start again"
        )
    run.step()  # training can continue from what was read


def main() -> None:
    num_processes, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if num_processes > 1:
        torch.distributed.init_process_group("gloo")
    assert process_group.world_size() == num_processes
    for action in sys.argv[3:]:
        kind, layout, *name = action.split(":")
        if kind == "write":
            write(folder, f"{layout}-{num_processes}", layout)
        else:
            read(folder, *name, layout)
        if process_group.is_main_process():
            print(f"done {action}", flush=True)
    if num_processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
