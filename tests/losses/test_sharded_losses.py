"""However heads, texts and batches are shared between processes: the loss and the gradients of one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sharded_loss_processes import Layout, Question, ask, product
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


def assert_as_one_process(questions, folder):
    answers = ask(questions, folder)
    assert len(answers) == len(questions)
    wrong = {}
    for question, errors in zip(questions, answers, strict=True):
        assert errors.keys() >= {"total", "d_states", "d_weight"}
        if not max(errors.values()) <= TOLERANCES[question.dtype]:
            wrong[str(question)] = errors
    assert not wrong


@pytest.mark.slow
def test_processes_that_share_the_work_agree_with_one(tmp_path):
    questions = product(list(LOSSES), LAYOUTS)
    questions += product(list(LOSSES), [LAYOUTS[-2]], dtype="float32")
    questions += product(["ce", "byte-kl", "p-kl"], [Layout(tensor=3), LAYOUTS[-2]], head="everything")
    questions += product(["p-kl", "byte-kl"], [Layout(tensor=4)], head="plain", uneven=True)
    assert_as_one_process(questions, tmp_path)


@pytest.mark.long
def test_every_product_of_layouts_agrees_with_one_process(tmp_path):
    shapes = [shape for shape in itertools.product((1, 2), (1, 2, 3), (1, 2, 4)) if np.prod(shape) <= 4]
    layouts = [
        Layout(*shape, zigzag=zigzag, micro_batches=count)
        for shape in shapes
        for zigzag in ((False, True) if shape[1] > 1 else (False,))
        for count in (1, 2, 3, 5, 8)
    ]
    questions = [
        Question(loss, layout, dtype, head)
        for loss in LOSSES
        for layout in layouts
        for dtype, head in (("float64", "everything"), ("float32", "bias"))
    ]
    assert_as_one_process(questions, tmp_path)


@pytest.fixture
def alone(tmp_path):
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_a_process_without_rows_of_the_head_is_told(alone):
    assert HeadShard.from_group(7, alone).vocab_size == 7
    with pytest.raises(XtkError, match="a process without rows of the output head"):
        HeadShard.from_group(0, alone)


@pytest.mark.parametrize("held", [[[0, 1, 1]], [[0, 2]], [[1, 2, 3]]])
def test_rows_that_are_held_twice_or_not_at_all_are_told(alone, held):
    with pytest.raises(XtkError, match="hidden states of other positions than the processes"):
        StateExchange.make_plan([np.array(rows) for rows in held], [], alone)


def test_rows_come_in_their_order_and_gradients_go_back_to_theirs(alone):
    states = torch.arange(8.0).reshape(4, 2).requires_grad_()
    plan = StateExchange.make_plan([np.array([2, 0, 3, 1])], [], alone)
    rows = plan.exchange(states)
    assert rows.tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]
    (rows * torch.arange(4.0)[:, None]).sum().backward()
    assert states.grad.tolist() == [[2, 2], [0, 0], [3, 3], [1, 1]]
