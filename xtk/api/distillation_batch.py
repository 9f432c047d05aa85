"""Batches of the Python API: model inputs and labels, with the aligned teacher's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xtk.batches.batch_prefetch import converted
from xtk.batches.micro_batches import MicroBatch
from xtk.losses.cells.loss_cells import LossCells

IGNORE_INDEX = -100  # label of tokens without loss, as in PyTorch's cross-entropy
TEACHER_KEY = "teacher"  # key of the teacher's part in a batch
ENTRIES = ("input_ids", "labels", "position_ids", "attention_mask")


class TeacherBatch:
    """The teacher's part of a batch: what losses compare, aligned with the student's tokens.

    Attributes:
        cells: what each loss compares; on the device of the batch.
        loss_positions: int64 [N], on the CPU: indices into the flattened `input_ids` at which losses are computed.
        counts: float64 [n], on the CPU: trained tokens and denominators. Sums over the micro-batches of an optimizer
            step are `num_items_in_batch` of `DistillationLoss`.
        document_lengths: lengths of packed documents; None: documents are padded.
        losses: the losses that the batch is made for.
        vocab_size: number of tokens of the student's tokenizer.
        tokens: number of tokens, without padding.
    """

    def __init__(self, batch: MicroBatch, losses: tuple[str, ...], vocab_size: int) -> None:
        self.cells: tuple[LossCells, ...] = batch.terms
        self.loss_positions: NDArray[np.int64] = batch.loss_positions
        self.counts: NDArray[np.float64] = batch.counts
        self.document_lengths, self.tokens = batch.document_lengths, batch.tokens
        self.losses, self.vocab_size = losses, vocab_size

    def _with_cells(self, cells: Sequence[LossCells]) -> TeacherBatch:
        other = object.__new__(TeacherBatch)
        other.__dict__.update(self.__dict__, cells=tuple(cells))
        return other

    def to(self, device: Any, **_: Any) -> TeacherBatch:
        """Return a copy on a device, as of a tensor; other arguments of `Tensor.to` are ignored."""
        return self._with_cells([cells.to(torch.device(device), cells.scale) for cells in self.cells])

    def pin_memory(self, device: Any = None) -> TeacherBatch:
        """Return a copy in pinned memory, as a DataLoader with `pin_memory=True` makes it."""
        return self._with_cells([cells.pinned() for cells in self.cells])


class DistillationBatch(dict[str, Any]):
    """A batch: `input_ids`, `labels`, `position_ids`, `attention_mask` (not with packing), and `teacher`.

    Tensors are int64 [B, T]. `labels` are the ids of trained tokens, and -100 elsewhere; models shift them.
    `batch["teacher"]` is a `TeacherBatch`. `batch.model_inputs` are the entries for a model's forward pass.
    """

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The inputs of a causal language model of transformers, without labels.

        `use_cache=False` is one of them: with a cache, models of transformers do not separate packed documents.
        """
        inputs = {name: value for name, value in self.items() if name not in ("labels", TEACHER_KEY)}
        return {**inputs, "use_cache": False}

    def to(self, device: Any) -> DistillationBatch:
        """Return the batch on a device."""
        return DistillationBatch({name: value.to(device) for name, value in self.items()})

    def __reduce__(self) -> Any:
        """Send tensors to another process as arrays: a DataLoader worker opens a file for each tensor that it sends."""
        arrays = {name: _to_array(self[name]) for name in ENTRIES if name in self}
        others = {name: value for name, value in self.items() if name not in (*ENTRIES, TEACHER_KEY)}
        teacher: TeacherBatch | None = self.get(TEACHER_KEY)
        if teacher is not None:
            others[TEACHER_KEY] = teacher._with_cells(converted(teacher.cells, torch.Tensor, _to_array))
        return _read_batch, (arrays, others)


def _to_array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _read_batch(arrays: dict[str, Any], others: dict[str, Any]) -> DistillationBatch:
    """Return the batch that was sent."""
    if TEACHER_KEY in others:
        cells = converted(others[TEACHER_KEY].cells, np.ndarray, torch.from_numpy)
        others = {**others, TEACHER_KEY: others[TEACHER_KEY]._with_cells(cells)}
    return DistillationBatch({**converted(arrays, np.ndarray, torch.from_numpy), **others})


def make_batch(micro_batch: MicroBatch, losses: tuple[str, ...], vocab_size: int) -> DistillationBatch:
    """Return a micro-batch as tensors on the CPU, for some losses and the student's vocabulary size."""
    ids = torch.from_numpy(micro_batch.input_ids)
    labels = torch.full_like(ids, IGNORE_INDEX).flatten()
    predicted = torch.from_numpy(micro_batch.loss_positions + 1)
    labels[predicted] = ids.flatten()[predicted]
    tensors = {"input_ids": ids, "labels": labels.view_as(ids)}
    if micro_batch.document_lengths is None:
        lengths = torch.tensor(micro_batch.lengths or (1,))
        columns = torch.arange(ids.shape[1])
        tensors["position_ids"] = columns.expand_as(ids).contiguous()
        tensors["attention_mask"] = (columns < lengths[:, None]).long()
    else:
        parts = [torch.arange(length) for length in micro_batch.document_lengths]
        tensors["position_ids"] = torch.cat(parts)[None]
    return DistillationBatch(tensors, teacher=TeacherBatch(micro_batch, losses, vocab_size))
