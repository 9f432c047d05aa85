"""Losses and gradients with tensor, context and data parallelism are those of a single process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sharded_loss_processes import Layout, ShardedRun, all_runs, measure_errors
from torch import distributed

from xtk.errors import XtkError
from xtk.losses import LOSSES
from xtk.losses.context_parallel_hidden_states import StateExchange
from xtk.models.output_head import HeadShard

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}

LAYOUTS = [
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(context=2),
    Layout(context=3, zigzag=True),
    Layout(context=2, tensor=2, zigzag=True, micro_batches=3),
    Layout(data=2, tensor=2, micro_batches=8),
]


def assert_matches_one_process(runs, folder):
    results = measure_errors(runs, folder)
    assert len(results) == len(runs)
    too_large = {}
    for run, errors in zip(runs, results, strict=True):
        assert errors.keys() >= {"total", "d_states", "d_weight"}
        if not max(errors.values()) <= TOLERANCES[run.dtype]:
            too_large[str(run)] = errors
    assert not too_large


@pytest.mark.slow
def test_sharded_losses_and_gradients_match_one_process(tmp_path):
    runs = all_runs(list(LOSSES), LAYOUTS)
    runs += all_runs(list(LOSSES), [LAYOUTS[-2]], dtype="float32")
    runs += all_runs(["ce", "byte-kl", "p-kl"], [Layout(tensor=3), LAYOUTS[-2]], head="everything")
    runs += all_runs(["p-kl", "byte-kl"], [Layout(tensor=4)], head="plain", uneven=True)
    assert_matches_one_process(runs, tmp_path)


@pytest.mark.long
def test_all_combinations_of_layouts_match_one_process(tmp_path):
    shapes = [shape for shape in itertools.product((1, 2), (1, 2, 3), (1, 2, 4)) if np.prod(shape) <= 4]
    layouts = [
        Layout(*shape, zigzag=zigzag, micro_batches=count)
        for shape in shapes
        for zigzag in ((False, True) if shape[1] > 1 else (False,))
        for count in (1, 2, 3, 5, 8)
    ]
    runs = [
        ShardedRun(loss, layout, dtype, head)
        for loss in LOSSES
        for layout in layouts
        for dtype, head in (("float64", "everything"), ("float32", "bias"))
    ]
    assert_matches_one_process(runs, tmp_path)


@pytest.fixture
def single_process_group(tmp_path):
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_process_without_head_rows_is_refused(single_process_group):
    assert HeadShard.from_group(7, single_process_group).vocab_size == 7
    with pytest.raises(XtkError, match="a process without rows of the output head"):
        HeadShard.from_group(0, single_process_group)


@pytest.mark.parametrize("held_rows", [[[0, 1, 1]], [[0, 2]], [[1, 2, 3]]])
def test_rows_held_twice_or_by_no_process_are_refused(single_process_group, held_rows):
    with pytest.raises(XtkError, match="hidden states of other positions than the processes"):
        StateExchange.make_plan([np.array(rows) for rows in held_rows], [], single_process_group)


def test_exchanged_rows_are_in_order_and_gradients_return_to_their_rows(single_process_group):
    states = torch.arange(8.0).reshape(4, 2).requires_grad_()
    plan = StateExchange.make_plan([np.array([2, 0, 3, 1])], [], single_process_group)
    rows = plan.exchange(states)
    assert rows.tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]
    (rows * torch.arange(4.0)[:, None]).sum().backward()
    assert states.grad.tolist() == [[2, 2], [0, 0], [3, 3], [1, 1]]
