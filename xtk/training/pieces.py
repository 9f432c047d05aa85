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

from xtk.artifacts.files import canonical_json, share
from xtk.errors import Damaged, XtkError
from xtk.training import processes

HEADER = "xtk"


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor without gaps.

    Attributes:
        name: of the tensor.
        start: where it begins in the whole, one number a dimension.
        size: how much of each dimension it takes.
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]

    def slices(self, start: Sequence[int]) -> tuple[slice, ...]:
        """Return what it is of a tensor that begins at `start` of the whole."""
        return tuple(slice(at - of, at - of + n) for at, of, n in zip(self.start, start, self.size, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return what both have; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Box(self.name, start, size) if all(n > 0 for n in size) else None

    @property
    def numbers(self) -> int:
        """How many."""
        return torch.Size(self.size).numel()


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a tensor that is cut as `tensor` is, of which this process has `values`."""
    if not isinstance(tensor, DTensor):
        return values
    return DTensor.from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def boxes(name: str, tensor: Tensor) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Yield the boxes of a tensor that this process holds, and where each lies in what it holds."""
    for runs in itertools.product(*(_runs(_held(tensor, dim)) for dim in range(tensor.ndim))):
        box = Box(name, tuple(run[0] for run in runs), tuple(run[2] for run in runs))
        yield box, tuple(slice(at, at + n) for _, at, n in runs)


def _held(tensor: Tensor, dim: int) -> Tensor:
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


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    """Return (first index, where it lies, length) of the stretches in which indices follow each other."""
    if not len(index):
        return []
    begins = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    return [(int(index[at]), at, stop - at) for at, stop in itertools.pairwise(begins)]


class Share:
    """Which boxes this process writes: of those that several hold, each is written by one of them, in turn.

    Every process has to make one.

    Args:
        tensors: by name; what is cut like one of them is kept under its name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        held = [box for name, tensor in tensors.items() for box, _ in boxes(name, tensor)]
        holders: dict[Box, list[int]] = {}
        for rank, of_rank in enumerate(processes.told_by_all(held)):
            for box in of_rank:
                holders.setdefault(box, []).append(rank)
        here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self._mine = {box for at, (box, ranks) in enumerate(sorted(holders.items())) if ranks[at % len(ranks)] == here}

    def of(self, name: str, tensor: Tensor, kept_as: str) -> list[tuple[Box, Tensor]]:
        """Return what this process writes, under another name, of a tensor that is cut as the one of this name."""
        here = local(tensor).detach()
        mine = [(box, here[at]) for box, at in boxes(name, tensor) if box in self._mine]
        return [(Box(kept_as, box.start, box.size), part) for box, part in mine]

    def first(self, name: str, dimensions: int) -> bool:
        """Say whether this process writes what stands beside a tensor and is the same for all."""
        return any(box.name == name and box.start == (0,) * dimensions for box in self._mine)


def write_pieces(
    path: Path, pieces: Sequence[tuple[Box, Tensor]], shapes: Mapping[str, Sequence[int]], header: dict[str, Any]
) -> None:
    """Write a process's pieces.

    Args:
        path: a safetensors file.
        pieces: each with its box.
        shapes: of the whole tensors, by name.
        header: what else is told of the file.
    """
    tensors, told = {}, {}
    for box, tensor in pieces:
        key = box.name if box.name not in tensors else f"{box.name}@{','.join(map(str, box.start))}"
        tensors[key] = tensor.cpu().contiguous().clone()
        told[key] = {"of": box.name, "shape": list(shapes[box.name]), "start": list(box.start),
                     "dtype": str(tensor.dtype).removeprefix("torch.")}  # fmt: skip
    save_file(tensors, path, metadata={HEADER: canonical_json({**header, "sharded_state": told})})
    share(path)


@dataclass(frozen=True)
class _Stored:
    path: Path
    key: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


class Pieces:
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
            with damage(path):
                file: Any = safe_open(path, "pt")
                self._files[path] = file
                header = json.loads(file.metadata()[HEADER])
                for key, told in header.pop("sharded_state").items():
                    box = Box(told["of"], tuple(told["start"]), tuple(file.get_slice(key).get_shape()))
                    stored = _Stored(path, key, box, tuple(told["shape"]), getattr(torch, told["dtype"]))
                    self._of.setdefault(box.name, []).append(stored)
                self.headers.append(header)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._of)

    def is_number(self, name: str) -> bool:
        """Say whether a tensor is a single number, without dimensions."""
        return self._of[name][0].shape == ()

    def read(self, name: str, cut_like: Tensor) -> Tensor:
        """Return a tensor that is cut as another one is, on the device of that one.

        Raises:
            Damaged: something of it is missing, or it is of another shape.
        """
        stored = self._of.get(name, [])
        if not stored or stored[0].shape != tuple(cut_like.shape):
            where = str(next(iter(self._files)).parent)
            found = f"{name} is {list(stored[0].shape)} there" if stored else f"there is no {name}"
            raise Damaged(f"this checkpoint is of another model: {found}", where=where)
        here = local(cut_like)
        values = torch.empty(here.shape, dtype=stored[0].dtype, device=here.device)
        missing = values.numel()
        for wanted, at in boxes(name, cut_like):
            part = values[at]
            for one in stored:
                common = wanted.overlap(one.box)
                if common is not None:
                    part[common.slices(wanted.start)] = self._read(one, common).to(here.device)
                    missing -= common.numbers
        if missing:
            raise Damaged(f"{missing:,} numbers of {name} are missing", where=str(stored[0].path.parent))
        return like(cut_like, values)

    def alone(self, name: str) -> Tensor:
        """Return a tensor that is not cut."""
        (stored,) = self._of[name]
        with damage(stored.path):
            tensor: Tensor = self._files[stored.path].get_tensor(stored.key)
            return tensor

    def _read(self, stored: _Stored, part: Box) -> Tensor:
        if not part.size:
            return self.alone(stored.box.name)
        with damage(stored.path):
            values: Tensor = self._files[stored.path].get_slice(stored.key)[part.slices(stored.box.start)]
            return values


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Raise `Damaged`, about a file or a folder, of whatever goes wrong while its content is used."""
    try:
        yield
    except XtkError:
        raise
    except Exception as wrong:
        raise Damaged(
            f"this checkpoint cannot be read: {wrong}",
            where=str(path),
            hint="move this checkpoint to another folder: the one before it is taken",
        ) from None
