"""A teacher on the simulated GPU: the log-probabilities of the CPU, and one wait of the host for each batch."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simulated_cuda import CUDA, EVENT, SimulatedCuda, to_device
from torch import Tensor

from xtk.cache.teacher_logprobs import StoredLogprobs, make_support
from xtk.models.output_head import OutputHead
from xtk.models.resolver import ModelRef
from xtk.teachers import transformers
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.token_sequence import TokenSequence

VOCABULARY, HIDDEN, LENGTH, DOCUMENTS = 300, 16, 24, 6
NEVER = 7  # an id with a logit of -inf
MAX_OPERATIONS = 100  # of a batch of one chunk


class LookUp:
    """A model whose hidden states are embeddings of the tokens."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        bias = torch.zeros(VOCABULARY)
        bias[NEVER] = -torch.inf
        self.model = SimpleNamespace(
            device=device, get_input_embeddings=lambda: SimpleNamespace(weight=torch.zeros(VOCABULARY, 1))
        )
        if device == CUDA:
            self._weight, bias = to_device(self._weight), to_device(bias)
        self.head = OutputHead(self._weight, bias)

    def __call__(self, ids: Tensor) -> Tensor:
        return self._weight[ids]


def documents() -> list[TokenSequence]:
    rng = np.random.default_rng(0)
    sequences = []
    for size in range(LENGTH, LENGTH - DOCUMENTS, -1):
        ids = rng.integers(8, VOCABULARY, size).astype(np.int32)
        runs, closers = np.array([[1, size, 0]], np.int32), np.full(1, -1, np.int32)
        sequences.append(TokenSequence(ids, np.arange(size, dtype=np.int32), np.arange(size) > 0, runs, closers))
    return sequences


def score(device: torch.device, support: dict[str, object]) -> tuple[list[StoredLogprobs], SimulatedCuda]:
    """Return the log-probabilities of some documents, in three batches, and what the device counted."""
    config = TeacherConfig(ModelRef(Path(), name="teacher"), None, batch_tokens=2 * LENGTH,
                           support=make_support(**support), options={"cut": LookUp(device)})  # fmt: skip
    teacher = TransformersTeacher(config)
    teacher.device = device
    candidates = [np.tile(np.array([NEVER, 9, -1, 20], np.int32), (len(one) - 1, 1)) for one in documents()]
    counted = SimulatedCuda()
    unwrapped = inspect.unwrap(TransformersTeacher.score)  # the simulated device does not know inference mode
    with counted if device == CUDA else contextlib.nullcontext(), torch.no_grad():
        scored = unwrapped(teacher, documents(), candidates if support["kind"] == "candidates" else None)
    return scored, counted


SUPPORTS = [
    {"kind": "top-k+sample", "top_k": 4, "num_samples": 3, "num_sample_sets": 2},
    {"kind": "top-k", "top_k": 5},
    {"kind": "top-p", "top_p": 0.8, "top_k": 20},
    {"kind": "sample", "num_samples": 8},
    {"kind": "candidates"},
    {"kind": "none"},
]


@pytest.mark.parametrize("support", SUPPORTS, ids=lambda support: support["kind"])
def test_scores_on_a_device_equal_the_cpus_and_the_host_waits_once_a_batch(support):
    expected, _ = score(torch.device("cpu"), support)
    scored, counted = score(CUDA, support)
    for one, other in zip(scored, expected, strict=True):
        for field in dataclasses.fields(StoredLogprobs):
            ours, theirs = getattr(one, field.name), getattr(other, field.name)
            if ours is None or theirs is None:
                assert ours is theirs, field.name
                continue
            if ours.dtype.kind == "f":
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
            else:
                np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
    assert counted.waits == {EVENT: DOCUMENTS // 2}, counted.wait_locations
    assert counted.operations.total() <= MAX_OPERATIONS * DOCUMENTS // 2
    assert all(np.isfinite(one.entropy).all() for one in scored)


def test_tokens_are_reported_batch_by_batch_and_the_next_batch_starts_before_the_last_is_read(monkeypatch):
    order: list[str] = []
    original = transformers.start_copy_to_host

    def start(values: Tensor) -> object:
        order.append("start")
        wait = original(values)
        return lambda: order.append("read") or wait()

    monkeypatch.setattr(transformers, "start_copy_to_host", start)
    score(CUDA, SUPPORTS[0])
    assert order == ["start", "start", "read", "start", "read", "read"]
