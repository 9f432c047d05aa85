"""Operations on the device and waits of the host of `cache-teacher` for 8,192 tokens at a vocabulary of 151,936.

Counted on the simulated device of the tests, for the default support: an operation is a launch of at least one kernel.
The layers of a model are left out. `--time`: measure on this machine's device instead, with hidden states of width
4,096 in bf16 (on a CPU 64, float32).
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from measurement import median_seconds, report
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from simulated_cuda import CUDA, SimulatedCuda, SimulatedTensor, move_to_device

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
    """A model of one operation: the hidden state of a token is its embedding, which is the output matrix, too.

    Args:
        linear: the output matrix, on the model's device.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = linear.weight.detach()
        device = torch.device("cpu") if isinstance(self._weight, SimulatedTensor) else self._weight.device
        self.model = SimpleNamespace(device=device, get_input_embeddings=lambda: SimpleNamespace(weight=self._weight))
        self.head = OutputHead(self._weight)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the hidden states [B, T, H]."""
        return self._weight[ids]


def make_teacher(linear: nn.Linear) -> TransformersTeacher:
    """Return a teacher with this output matrix and the default support."""
    config = TeacherConfig(ModelRef(Path(), name="teacher"), cast(Any, None), batch_tokens=DOCUMENTS * LENGTH,
                           support=make_support(""), options={"cut": LookUp(linear)})  # fmt: skip
    return TransformersTeacher(config)


def random_documents(num_batches: int) -> list[TokenSequence]:
    """Return the documents of some batches."""
    return [random_document(np.random.default_rng(seed)) for seed in range(DOCUMENTS * num_batches)]


def time_row(num_batches: int) -> tuple[str, str, str]:
    """Return the rate of this machine's device as a row of the table."""
    on_gpu = torch.cuda.is_available()
    hidden = 4096 if on_gpu else 64
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        teacher = make_teacher(nn.Linear(hidden, VOCABULARY, False, dtype=torch.bfloat16 if on_gpu else torch.float32))
    documents = random_documents(num_batches) if num_batches else random_documents(1)[:1]
    seconds = median_seconds(lambda: teacher.score(documents), 3)
    tokens = len(documents) * LENGTH
    result = f"{1e3 * seconds * DOCUMENTS * LENGTH / tokens:,.0f} ms for 8,192 tokens, {tokens / seconds:,.0f} tokens/s"
    return f"scores of `cache-teacher` without the model's layers, V = {VOCABULARY:,}, H = {hidden:,}", result, ""


def count_operations(num_batches: int) -> SimulatedCuda:
    """Return the counts of some batches."""
    torch.manual_seed(0)
    linear, documents = nn.Linear(HIDDEN, VOCABULARY, bias=False), random_documents(num_batches)
    with SimulatedCuda():
        move_to_device(linear)
        teacher = make_teacher(linear)
    teacher.device = CUDA
    with SimulatedCuda() as counted, torch.no_grad():
        unwrapped = inspect.unwrap(TransformersTeacher.score)  # the simulated device does not know inference mode
        unwrapped(teacher, documents)
    for location, count in counted.wait_locations.most_common():
        print(f"{count} {location}", file=sys.stderr)
    return counted


def main() -> None:
    """Count, or measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=int, metavar="BATCHES", help="measure with so many batches; 0: one document")
    options = parser.parse_args()
    if options.time is not None:
        device = ("device", f"{'cuda' if torch.cuda.is_available() else 'cpu'}, {torch.get_num_threads()} threads", "")
        report(__file__, [device, time_row(options.time)])
        return
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
