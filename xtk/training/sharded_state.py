"""Tensors that are cut over processes, written by each process in its own file and read back however they are cut.

A file says in its header of each piece whose it is, how large the whole is and where the piece begins, so that any
number of processes finds what it needs.
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
from torch import Tensor
from torch.distributed.tensor import DTensor

from xtk.artifacts.atomic_files import canonical_json, set_default_permissions
from xtk.errors import CorruptError, XtkError
from xtk.training import distributed

HEADER_KEY = "xtk"


@dataclass(frozen=True, order=True)
class TensorBlock:
    """A part of a tensor without gaps.

    Attributes:
        name: of the tensor.
        start: where it begins in the whole, one number a dimension.
        size: how much of each dimension it takes.
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]

    def slices_within(self, start: Sequence[int]) -> tuple[slice, ...]:
        """Return what it is of a tensor that begins at `start` of the whole."""
        return tuple(slice(at - of, at - of + n) for at, of, n in zip(self.start, start, self.size, strict=True))

    def overlap(self, other: TensorBlock) -> TensorBlock | None:
        """Return what both have; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return TensorBlock(self.name, start, size) if all(n > 0 for n in size) else None

    @property
    def num_elements(self) -> int:
        """How many."""
        return torch.Size(self.size).numel()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_sharding_of(reference: Tensor, local_values: Tensor) -> Tensor:
    """Return a tensor that is cut as `tensor` is, of which this process has `values`."""
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
    """Yield the boxes of a tensor that this process holds, and where each lies in what it holds."""
    for runs in itertools.product(*(_contiguous_runs(_local_indices(tensor, dim)) for dim in range(tensor.ndim))):
        box = TensorBlock(name, tuple(run[0] for run in runs), tuple(run[2] for run in runs))
        yield box, tuple(slice(at, at + n) for _, at, n in runs)


def _local_indices(tensor: Tensor, dim: int) -> Tensor:
    """Return which indices of a dimension this process holds, in the order in which it holds them."""
    index = torch.arange(tensor.shape[dim])
    if not isinstance(tensor, DTensor):
        return index
    # Placements cut one after the other, from left to right; those of FSDP over TP, which is cut first, are strided.
    index = index.view([-1 if other == dim else 1 for other in range(tensor.ndim)])
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise TypeError("a sum that is not yet added up over processes cannot be kept")
        if getattr(placement, "dim", None) == dim:
            parts, _ = placement._split_tensor(  # type: ignore[attr-defined]
                index, tensor.device_mesh.size(mesh_dim), with_padding=False, contiguous=False
            )
            index = parts[tensor.device_mesh.get_local_rank(mesh_dim)]
    return index.flatten()


def _contiguous_runs(index: Tensor) -> list[tuple[int, int, int]]:
    """Return (first index, where it lies, length) of the stretches in which indices follow each other."""
    if not len(index):
        return []
    begins = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    return [(int(index[at]), at, stop - at) for at, stop in itertools.pairwise(begins)]


class WriteAssignment:
    """Which boxes this process writes: of those that several hold, each is written by one of them, in turn.

    Every process has to make one.

    Args:
        tensors: by name; what is cut like one of them is kept under its name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        held = [box for name, tensor in tensors.items() for box, _ in local_blocks(name, tensor)]
        holders: dict[TensorBlock, list[int]] = {}
        for rank, of_rank in enumerate(distributed.all_gather_object(held)):
            for box in of_rank:
                holders.setdefault(box, []).append(rank)
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self._local_blocks = {
            box for at, (box, ranks) in enumerate(sorted(holders.items())) if ranks[at % len(ranks)] == here
        }

    def blocks_to_write(self, name: str, tensor: Tensor, stored_name: str) -> list[tuple[TensorBlock, Tensor]]:
        """Return what this process writes, under another name, of a tensor that is cut as the one of this name."""
        here = local_tensor(tensor).detach()
        mine = [(box, here[at]) for box, at in local_blocks(name, tensor) if box in self._local_blocks]
        return [(TensorBlock(stored_name, box.start, box.size), part) for box, part in mine]

    def writes_scalars(self, name: str, dimensions: int) -> bool:
        """Say whether this process writes what stands beside a tensor and is the same for all."""
        return any(box.name == name and box.start == (0,) * dimensions for box in self._local_blocks)


def write_sharded_state(
    path: Path,
    blocks: Sequence[tuple[TensorBlock, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    header: dict[str, Any],
) -> None:
    """Write a process's pieces.

    Args:
        path: a safetensors file.
        blocks: each with its box.
        shapes: of the whole tensors, by name.
        header: what else is told of the file.
    """
    tensors, told = {}, {}
    for box, tensor in blocks:
        key = box.name if box.name not in tensors else f"{box.name}@{','.join(map(str, box.start))}"
        tensors[key] = tensor.cpu().contiguous().clone()
        told[key] = {"tensor": box.name, "shape": list(shapes[box.name]), "start": list(box.start),
                     "dtype": str(tensor.dtype).removeprefix("torch.")}  # fmt: skip
    save_file(tensors, path, metadata={HEADER_KEY: canonical_json({**header, "sharded_state": told})})
    set_default_permissions(path)


@dataclass(frozen=True)
class _Stored:
    path: Path
    key: str
    box: TensorBlock
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardedStateReader:
    """The pieces in some files.

    Args:
        paths: of all processes' files.

    Raises:
        Damaged: a file is cut short, or has no header of xtk.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.headers: list[dict[str, Any]] = []
        self._of: dict[str, list[_Stored]] = {}
        self._files: dict[Path, Any] = {}
        for path in paths:
            with as_corrupt_error(path):
                file: Any = safe_open(path, "pt")
                self._files[path] = file
                header = json.loads(file.metadata()[HEADER_KEY])
                for key, told in header.pop("sharded_state").items():
                    box = TensorBlock(told["tensor"], tuple(told["start"]), tuple(file.get_slice(key).get_shape()))
                    stored = _Stored(path, key, box, tuple(told["shape"]), getattr(torch, told["dtype"]))
                    self._of.setdefault(box.name, []).append(stored)
                self.headers.append(header)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._of)

    def is_scalar(self, name: str) -> bool:
        """Say whether a tensor is a single number, without dimensions."""
        return self._of[name][0].shape == ()

    def read(self, name: str, sharded_like: Tensor) -> Tensor:
        """Return a tensor that is cut as another one is, on the device of that one.

        Raises:
            Damaged: something of it is missing, or it is of another shape.
        """
        stored = self._of.get(name, [])
        if not stored or stored[0].shape != tuple(sharded_like.shape):
            where = str(next(iter(self._files)).parent)
            found = f"{name} is {list(stored[0].shape)} there" if stored else f"there is no {name}"
            raise CorruptError(f"this checkpoint is of another model: {found}", where=where)
        here = local_tensor(sharded_like)
        values = torch.empty(here.shape, dtype=stored[0].dtype, device=here.device)
        missing = values.numel()
        for wanted, at in local_blocks(name, sharded_like):
            part = values[at]
            for one in stored:
                common = wanted.overlap(one.box)
                if common is not None:
                    part[common.slices_within(wanted.start)] = self._read(one, common).to(here.device)
                    missing -= common.num_elements
        if missing:
            raise CorruptError(f"{missing:,} numbers of {name} are missing", where=str(stored[0].path.parent))
        return with_sharding_of(sharded_like, values)

    def read_unsharded(self, name: str) -> Tensor:
        """Return a tensor that is not cut."""
        (stored,) = self._of[name]
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
    """Raise `CorruptError`, about a file or a folder, of whatever goes wrong while its content is used."""
    try:
        yield
    except XtkError:
        raise
    except Exception as wrong:
        raise CorruptError(
            f"this checkpoint cannot be read: {wrong}",
            where=str(path),
            hint="move this checkpoint to another folder: the one before it is taken",
        ) from None
