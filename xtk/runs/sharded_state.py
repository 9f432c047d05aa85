"""Sharded tensors in safetensors files, one file per process, readable with any other sharding.

The header of a file lists the tensor, full shape and offset of each block, so that any number of processes finds the
values that it needs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xtk.errors import CorruptError, XtkError
from xtk.files.atomic_files import canonical_json, set_default_permissions
from xtk.models.safetensors_headers import read_file_header, weight_files
from xtk.models.weight_validation import check_weights_finite
from xtk.parallel import process_group

HEADER_KEY = "xtk"
SKIP_HINT = "move this checkpoint out of the run folder to resume from an earlier one"


@dataclass(frozen=True, order=True)
class TensorBlock:
    """A rectangular block of a tensor."""

    name: str
    start: tuple[int, ...]  # offset in the full tensor, one number per dimension
    size: tuple[int, ...]  # size, one number per dimension

    def slices_within(self, start: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of this block within a block of the same tensor that begins at `start`."""
        return tuple(slice(at - base, at - base + n) for at, base, n in zip(self.start, start, self.size, strict=True))

    def overlap(self, other: TensorBlock) -> TensorBlock | None:
        """Return the intersection; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return TensorBlock(self.name, start, size) if all(n > 0 for n in size) else None

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.size).numel()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, which shares its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_sharding_of(reference: Tensor, local_values: Tensor) -> Tensor:
    """Return a tensor sharded like `reference`, whose local shard is `local_values`."""
    if not isinstance(reference, DTensor):
        return local_values
    return DTensor.from_local(
        local_values,
        reference.device_mesh,
        reference.placements,
        run_check=False,
        shape=reference.shape,
        stride=reference.stride(),
    )


def local_blocks(name: str, tensor: Tensor) -> Iterator[tuple[TensorBlock, tuple[slice, ...]]]:
    """Yield the blocks of a tensor that this process has, and the slices of each in the local shard."""
    for runs in itertools.product(*(_contiguous_runs(_local_indices(tensor, dim)) for dim in range(tensor.ndim))):
        box = TensorBlock(name, tuple(run[0] for run in runs), tuple(run[2] for run in runs))
        yield box, tuple(slice(at, at + n) for _, at, n in runs)


def _local_indices(tensor: Tensor, dim: int) -> Tensor:
    """Return the indices of a dimension that the local shard has, in its order."""
    index = torch.arange(tensor.shape[dim])
    if not isinstance(tensor, DTensor):
        return index
    # Placements split one after the other, from left to right; those of FSDP over TP, which splits first, are strided.
    index = index.view([-1 if other == dim else 1 for other in range(tensor.ndim)])
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise TypeError("a tensor with a partial placement (not yet reduced over processes) cannot be saved")
        if getattr(placement, "dim", None) == dim:
            parts, _ = placement._split_tensor(  # type: ignore[attr-defined]
                index, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
            )
            index = parts[tensor.device_mesh.get_local_rank(mesh_dim)]
    return index.flatten()


def _contiguous_runs(index: Tensor) -> list[tuple[int, int, int]]:
    """Return (first index, position, length) of each run of consecutive indices."""
    if not len(index):
        return []
    begins = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    return [(int(index[at]), at, stop - at) for at, stop in itertools.pairwise(begins)]


@torch.no_grad()
def read_model_shards(
    module: nn.Module,  # the module that is sharded, which contains the model
    model: Any,  # a model that was loaded on the meta device from `folder`
    folder: Path,
    device: torch.device,  # of the weights; offloaded ones are on the CPU
    buffer_device: torch.device,  # where the model computes; FSDP does not move buffers later
) -> None:
    """Allocate the tensors of a sharded model that has none, and read this process's shards (collective)."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=buffer_device)
    apply: Any = module._apply
    apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    files = {name: path for path in weight_files(folder) for name in read_file_header(path)}
    for name, tensor in model.state_dict().items():
        if name not in files:  # another name of a tied tensor, which has the same memory
            continue
        # Opened for each tensor, because what is read stays in the memory of a process while the file is open.
        with safe_open(files[name], "pt") as file:
            stored, shard = file.get_slice(name), local_tensor(tensor)
            for box, at in local_blocks(name, tensor):
                origin = (0,) * tensor.ndim
                shard[at] = (stored[box.slices_within(origin)] if box.size else file.get_tensor(name)).to(shard.device)
    check_weights_finite(model, folder)


class WriteAssignment:
    """Assigns blocks to processes: a block that several processes have is written by one of them, in turn.

    Creating one is a collective operation.
    `tensors`: tensors by name; others with the same sharding (optimizer state, EMA) are assigned like them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        local = [box for name, tensor in tensors.items() for box, _ in local_blocks(name, tensor)]
        holders: dict[TensorBlock, list[int]] = {}
        for rank, of_rank in enumerate(process_group.all_gather_object(local)):
            for box in of_rank:
                holders.setdefault(box, []).append(rank)
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self._local_blocks = {
            box for at, (box, ranks) in enumerate(sorted(holders.items())) if ranks[at % len(ranks)] == here
        }

    def blocks_to_write(self, name: str, tensor: Tensor, stored_name: str) -> list[tuple[TensorBlock, Tensor]]:
        """Return the blocks to write, under `stored_name`, of a tensor that is sharded like the tensor `name`."""
        shard = local_tensor(tensor).detach()
        mine = [(box, shard[at]) for box, at in local_blocks(name, tensor) if box in self._local_blocks]
        return [(TensorBlock(stored_name, box.start, box.size), part) for box, part in mine]

    def writes_scalars(self, name: str, dimensions: int) -> bool:
        """Return whether this process writes the scalars that belong to a tensor, which are equal in all processes."""
        return any(box.name == name and box.start == (0,) * dimensions for box in self._local_blocks)


def write_sharded_state(
    path: Path,
    blocks: Sequence[tuple[TensorBlock, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    header: dict[str, Any],
) -> None:
    """Write the blocks of this process, and the full shape of each tensor."""
    tensors, entries = {}, {}
    for box, tensor in blocks:
        key = box.name if box.name not in tensors else f"{box.name}@{','.join(map(str, box.start))}"
        tensors[key] = tensor.cpu().contiguous().clone()
        entries[key] = {"tensor": box.name, "shape": list(shapes[box.name]), "start": list(box.start),
                     "dtype": str(tensor.dtype).removeprefix("torch.")}  # fmt: skip
    save_file(tensors, path, metadata={HEADER_KEY: canonical_json({**header, "sharded_state": entries})})
    set_default_permissions(path)


@dataclass(frozen=True)
class _Stored:
    path: Path
    key: str
    box: TensorBlock
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardedStateReader:
    """Reads tensors from the files of all processes."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.headers: list[dict[str, Any]] = []
        self._blocks: dict[str, list[_Stored]] = {}
        self._files: dict[Path, Any] = {}
        for path in paths:
            with as_corrupt_error(path):
                file: Any = safe_open(path, "pt")
                self._files[path] = file
                header = json.loads(file.metadata()[HEADER_KEY])
                for key, entry in header.pop("sharded_state").items():
                    box = TensorBlock(entry["tensor"], tuple(entry["start"]), tuple(file.get_slice(key).get_shape()))
                    stored = _Stored(path, key, box, tuple(entry["shape"]), getattr(torch, entry["dtype"]))
                    self._blocks.setdefault(box.name, []).append(stored)
                self.headers.append(header)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._blocks)

    def is_scalar(self, name: str) -> bool:
        """Return whether a tensor is a scalar."""
        return self._blocks[name][0].shape == ()

    def read(self, name: str, sharded_like: Tensor) -> Tensor:
        """Return a tensor, sharded like another one and on its device."""
        stored = self._blocks.get(name, [])
        if not stored or stored[0].shape != tuple(sharded_like.shape):
            where = str(next(iter(self._files)).parent)
            shapes = (
                f"has the shape {list(stored[0].shape)} instead of {list(sharded_like.shape)}"
                if stored
                else "is missing"
            )
            raise CorruptError(
                f"the checkpoint is from another model: its tensor {name} {shapes}",
                where=where,
                hint="use the student and options of this run, or another output path (-o)",
            )
        here = local_tensor(sharded_like)
        values = torch.empty(here.shape, dtype=stored[0].dtype, device=here.device)
        missing = values.numel()
        for wanted, at in local_blocks(name, sharded_like):
            part = values[at]
            for entry in stored:
                common = wanted.overlap(entry.box)
                if common is not None:
                    part[common.slices_within(wanted.start)] = self._read(entry, common).to(here.device)
                    missing -= common.num_elements
        if missing:
            where = str(stored[0].path.parent)
            raise CorruptError(
                f"the checkpoint's files do not have each value of the tensor {name} once", where=where, hint=SKIP_HINT
            )
        return with_sharding_of(sharded_like, values)

    def read_unsharded(self, name: str) -> Tensor:
        """Return a tensor that was stored as one block."""
        (stored,) = self._blocks[name]
        with as_corrupt_error(stored.path):
            tensor: Tensor = self._files[stored.path].get_tensor(stored.key)
            return tensor

    def _read(self, stored: _Stored, part: TensorBlock) -> Tensor:
        if not part.size:
            return self.read_unsharded(stored.box.name)
        with as_corrupt_error(stored.path):
            values: Tensor = self._files[stored.path].get_slice(stored.key)[part.slices_within(stored.box.start)]
            return values


@contextlib.contextmanager
def as_corrupt_error(path: Path) -> Iterator[None]:
    """Turn any exception into a `CorruptError` about a checkpoint or one of its files."""
    try:
        yield
    except XtkError:
        raise
    except Exception as failure:
        raise CorruptError(
            f"a file of the checkpoint cannot be read: {failure}",
            where=str(path),
            hint=SKIP_HINT,
        ) from None
