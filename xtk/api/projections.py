"""Projections as objects: built, loaded, saved, and as sparse tensors of torch."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from xtk.api.tokenizer_argument import to_tokenizer
from xtk.files.output import Output
from xtk.projection import build
from xtk.projection.file import PROJECTION, read_projection, write_projection
from xtk.projection.projection import SparseProjection
from xtk.projection.prune import prune_projection

if TYPE_CHECKING:
    import torch


class Projection(SparseProjection):
    """Sparse matrix W [V, U]: row v maps the probability of student token v to teacher tokens.

    Attributes:
        row_offsets: int64 [V+1].
        teacher_ids: int32 [nnz], ascending within a row.
        weights: float32 [nnz], in (0, 1]; a row sums to at most 1. The difference to 1 is mass without a counterpart
            in the teacher's vocabulary.
        student_cells: int32 [V], the cell of each student token in the partition of both vocabularies; -1: none.
        teacher_cells: int32 [U], likewise.
        header: method, options, audit, and identity of both tokenizers.
    """

    @classmethod
    def from_matrix(cls, matrix: SparseProjection) -> Self:
        """Return the same projection as an object of this class."""
        return cls(**{field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a projection file of `xtk build-projection`, `xtk prune-projection` or `save`.

        Raises:
            XtkError: there is no projection, it is corrupt, or it has another version.
        """
        return cls.from_matrix(read_projection(Path(path)))

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write a projection file; equal projections give equal bytes.

        Args:
            path: output path, used exactly as given.
            force: replace another projection at this path.

        Raises:
            XtkError: the path has another file, or another projection and `force` is false.
        """
        Output(Path(path), PROJECTION, force=force).find_finished(dict(self.header))
        write_projection(self, Path(path))

    def prune(
        self, *, top_k: int | None = None, min_weight: float = 0.0, mass: float = 1.0, renormalize: bool = False
    ) -> Self:
        """Return the projection with fewer entries per row.

        Args:
            top_k: keep the K largest weights of each row; None: all.
            min_weight: keep weights of at least this.
            mass: keep the largest weights up to this fraction of a row's sum.
            renormalize: scale each row to its sum before pruning.

        Raises:
            XtkError: a value is out of range.
        """
        return self.from_matrix(
            prune_projection(self, top_k=top_k, min_weight=min_weight, mass=mass, renormalize=renormalize)
        )

    def to_torch_sparse(self, device: Any = None) -> torch.Tensor:
        """Return W as a sparse CSR tensor, float32 [V, U]: `probs @ W` has the teacher's vocabulary.

        Args:
            device: device of the tensor; None: the CPU.
        """
        import torch

        shape = (self.student_width, self.teacher_width)
        rows, columns = torch.from_numpy(self.row_offsets), torch.from_numpy(self.teacher_ids.astype(np.int64))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its sparse CSR tensors are in beta state
            return torch.sparse_csr_tensor(rows, columns, torch.from_numpy(self.weights), size=shape, device=device)


def build_projection(
    student_tokenizer: Any, teacher_tokenizer: Any, method: str = "multitoken", **options: Any
) -> Projection:
    """Build a projection of two tokenizers in memory.

    Args:
        student_tokenizer: a folder, a hub id, or a fast tokenizer of transformers. Its tokens are the rows.
        teacher_tokenizer: likewise. Its tokens are the columns.
        method: `exact`, `first-token`, `multitoken` or `partition`, as in `xtk build-projection --method`.
        options: options of the method, and `special_tokens`.

    Returns:
        The projection W [V, U].

    Raises:
        XtkError: unknown method or option, or the vocabularies share no token.
    """
    student, teacher = to_tokenizer(student_tokenizer), to_tokenizer(teacher_tokenizer)
    return Projection.from_matrix(build.build_projection(student, teacher, method, **options))
