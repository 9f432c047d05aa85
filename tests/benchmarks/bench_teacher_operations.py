"""Operations on the device and waits of the host of `cache-teacher` for 8,192 tokens at a vocabulary of 151,936.

Counted on the simulated device of the tests, for the default support: an operation is a launch of at least one kernel.
The layers of a model are left out.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from measurement import report
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from simulated_cuda import CUDA, SimulatedCuda, move_to_device

from xtk.cache.teacher_logprobs import make_support
from xtk.models.output_head import OutputHead
from xtk.models.resolver import ModelRef
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.token_sequence import TokenSequence

VOCABULARY, HIDDEN, DOCUMENTS, LENGTH = 151_936, 16, 16, 512


def random_document(rng: np.random.Generator) -> TokenSequence:
    """Return a document of random tokens, all but the first of them trained."""
    ids = rng.integers(0, VOCABULARY, LENGTH).astype(np.int32)
    ends = np.arange(LENGTH, dtype=np.int32)
    runs, closers = np.array([[1, LENGTH, 0]], np.int32), np.full(1, -1, np.int32)
    return TokenSequence(ids, ends, np.arange(LENGTH) > 0, runs, closers)


class LookUp:
    """A model of one operation: the hidden state of a token is its embedding, which is the output matrix, too."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        linear = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self._weight = linear.weight
        self.model = SimpleNamespace(
            device=torch.device("cpu"), get_input_embeddings=lambda: SimpleNamespace(weight=self._weight)
        )
        with SimulatedCuda():
            move_to_device(linear)
            self._weight = linear.weight.detach()
        self.head = OutputHead(self._weight)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the hidden states [B, T, H]."""
        return self._weight[ids]


def count_operations(num_batches: int) -> SimulatedCuda:
    """Return the counts of some batches."""
    documents = [random_document(np.random.default_rng(seed)) for seed in range(DOCUMENTS * num_batches)]
    config = TeacherConfig(ModelRef(Path(), name="teacher"), cast(Any, None), batch_tokens=DOCUMENTS * LENGTH,
                           support=make_support(""), options={"cut": LookUp()})  # fmt: skip
    teacher = TransformersTeacher(config)
    teacher.device = CUDA
    with SimulatedCuda() as counted, torch.no_grad():
        unwrapped = inspect.unwrap(TransformersTeacher.score)  # the simulated device does not know inference mode
        unwrapped(teacher, documents)
    for location, count in counted.wait_locations.most_common():
        print(f"{count} {location}", file=sys.stderr)
    return counted


def main() -> None:
    """Count and print."""
    one, three = count_operations(1), count_operations(3)
    operations, waits = (
        (three_batches.total() - one_batch.total()) / 2
        for three_batches, one_batch in ((three.operations, one.operations), (three.waits, one.waits))
    )
    report(
        __file__,
        [
            ("launches of `cache-teacher` for 8,192 tokens at V = 151,936, without the model's layers",
             f"{operations:,.0f}", "1,500"),
            ("waits of the host for 8,192 tokens", f"{waits:.0f}", "2"),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
