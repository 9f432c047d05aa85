"""A process group of one process, as `torchrun --nproc-per-node 1` makes it: gradients with FSDP and without.

    torchrun --nproc-per-node 1 tests/gpu/single_process_group.py STUDENT CACHE OUTPUT

Takes a step of six documents in each of the ways of `WAYS` and writes its gradients to OUTPUT/WAY.safetensors. With the
option `fsdp_offload`, true or false, the weights are sharded over the one process. Prints JSON: the backend of the
group that `distill` starts, and the gradient norms.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import recorded_training_steps
import torch
from recorded_training_steps import make_train_config, open_run_inputs, record_steps
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from xtk.models.resolver import ModelRef
from xtk.parallel.parallel_config import DIMENSIONS, ParallelConfig, parse_parallel
from xtk.training.distill import _start_accelerator
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

WAYS: dict[str, dict[str, bool]] = {"plain": {}, "fsdp": {"fsdp_offload": False}, "offload": {"fsdp_offload": True}}


class SingleShard(ParallelConfig):
    """FSDP over one process, which `--parallel` does not offer: all collectives run, with one member."""

    is_sharded = True

    def with_mesh(self, device: torch.device, timeout: timedelta | None = None) -> SingleShard:
        """Return the layout with a mesh."""
        mesh = init_device_mesh(device.type, (1,) * len(DIMENSIONS), mesh_dim_names=tuple(DIMENSIONS))
        mesh["fsdp", "cp"]._flatten("shards")
        return SingleShard(mesh=mesh)


def step_config(**options: Any) -> TrainConfig:
    """Return the configuration of the step."""
    return make_train_config(["ce", "byte-kl"], 6, mixed_precision="no", **options)


def main() -> None:
    """Take the steps."""
    student, cache, output = map(Path, sys.argv[1:])
    paths = RunPaths(ModelRef(student), (str(cache),), (), output)
    accelerator = _start_accelerator(paths, step_config(), LoggingConfig())
    norms = {}
    for name, options in WAYS.items():
        config = step_config(**options)
        recorded_training_steps.parse_parallel = (lambda *_: SingleShard()) if options else parse_parallel
        gradients, results = record_steps(
            accelerator, student, open_run_inputs(student, [cache], config), config, 6, steps=1
        )
        save_file({key: tensor.cpu().contiguous() for key, tensor in gradients.items()}, output / f"{name}.safetensors")
        norms[name] = results["norms"][0]
    group = torch.distributed.group.WORLD
    assert group is not None
    backend = group._get_backend(accelerator.device).name()
    sys.stdout.write(json.dumps({"backend": backend, "norms": norms}) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
