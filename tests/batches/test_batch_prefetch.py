"""Batches of other processes: those of a thread, received in a thread, without arrays that were sent before."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import small_inputs
import torch
from recorded_training_steps import make_train_config, open_run_inputs

from xtk.batches.batch_prefetch import StepBatchBuilder, _receive_in_thread, converted, prefetch
from xtk.errors import XtkError
from xtk.projection import vocabulary_array
from xtk.projection.vocabulary_array import VocabularyArray
from xtk.training.kinds.run_inputs import RunInputs

LOSSES = ["ce", "byte-kl", "escd"]
STEPS, WORKERS = range(2, 8), 2


@pytest.fixture(scope="module")
def build_step(run, pair, tmp_path_factory) -> StepBatchBuilder:
    folder = tmp_path_factory.mktemp("prefetch")
    small_inputs.write_jsonl(folder / "data.jsonl", small_inputs.sentences(20, seed=3))
    run("cache-teacher", pair.teacher, "data.jsonl", "-o", "cache", cwd=folder)
    recipe = make_train_config(LOSSES, batch=4)
    inputs: RunInputs = open_run_inputs(pair.student, [Path(folder / "cache")], recipe)
    documents, sizes = inputs.training_documents(recipe, None)
    sampler = inputs.sampler(recipe, documents, sizes, 4)
    return StepBatchBuilder(inputs.batch_builder(None, 0, recipe.regions), sampler, 2, 0, 0, 1, pins=True)


@pytest.mark.slow
def test_processes_build_the_batches_of_a_thread_and_another_thread_receives_them(build_step, monkeypatch):
    pinned, received = list[str](), list[tuple[str, str]]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    def receive(values, digest):
        received.append((threading.current_thread().name, digest))
        return original(values, digest)

    original = vocabulary_array._received_array
    monkeypatch.setattr(vocabulary_array, "_received_array", receive)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    found = [found for batches in prefetch(build_step, STEPS, WORKERS) for found in batches]
    assert set(pinned) == {"xtk-batches"}
    # byte-kl has two arrays, and escd one of them: each worker sends both in its first message only.
    assert {name for name, _ in received} == {"xtk-batches"}
    assert len(received) == 2 * WORKERS
    assert len({digest for _, digest in received}) == 2
    expected = [batch for step in STEPS for batch in build_step(step)]
    assert len(found) == len(expected) == 2 * len(STEPS)
    arrays = [[] for _ in range(2)]
    for batch, expected_batch in zip(found, expected, strict=True):
        assert (batch.input_ids == expected_batch.input_ids).all()
        for cells, expected_cells in zip(batch.terms, expected_batch.terms, strict=True):
            assert type(cells) is type(expected_cells)
            for field in dataclasses.fields(cells):
                value, expected_value = (getattr(one, field.name) for one in (cells, expected_cells))
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, expected_value), field.name
        converted(batch.terms, VocabularyArray, arrays[0].append)
        converted(expected_batch.terms, VocabularyArray, arrays[1].append)
    assert [one.values.tolist() for one in arrays[0]] == [one.values.tolist() for one in arrays[1]]
    assert len(set(map(id, arrays[0]))) == 2  # one object each, whose copy on a device is kept


def test_messages_are_received_in_order_one_ahead_until_an_error_or_the_end():
    received = list[int]()

    def convert(message: int) -> int:
        received.append(message)
        if message == 4:
            raise XtkError("a damaged shard")
        return 10 * message

    batches = _receive_in_thread(iter(range(9)), convert, 9)
    assert [next(batches) for _ in range(4)] == [0, 10, 20, 30]
    (thread,) = [one for one in threading.enumerate() if one.name == "xtk-batches"]
    with pytest.raises(XtkError, match="a damaged shard"):
        next(batches)
    assert received == list(range(5))
    assert not thread.is_alive()
    batches = _receive_in_thread(iter(range(3)), convert, 3)
    assert next(batches) == 0
    batches.close()  # a consumer that stops early
    assert not [one for one in threading.enumerate() if one.name == "xtk-batches"]
    assert list(_receive_in_thread(iter(range(3)), convert, 3)) == [0, 10, 20]
