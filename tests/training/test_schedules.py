"""Learning rates: values computed by hand, those of transformers, and no step with a rate of 0."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from xtk.errors import XtkError
from xtk.losses.spec import LossSpec
from xtk.training.train_config import SCHEDULES, TrainConfig


def train_config(**options: object) -> TrainConfig:
    return TrainConfig(losses=(LossSpec("ce"),), **{"learning_rate": 2.0, **options})


def test_the_learning_rate_rises_during_warmup_and_then_decays_as_a_cosine():
    rates = [train_config(warmup_ratio=0.1).learning_rate_at(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[40] == pytest.approx(1 + math.cos(math.pi / 3))
    assert rates[99] == pytest.approx(1 + math.cos(math.pi * 89 / 90))


def test_the_linear_schedule_decays_linearly_and_the_constant_one_does_not():
    linear = [train_config(warmup_ratio=0.0, lr_scheduler_type="linear").learning_rate_at(step, 4) for step in range(4)]
    assert linear == pytest.approx([2.0, 1.5, 1.0, 0.5])
    constant = [
        train_config(warmup_ratio=0.5, lr_scheduler_type="constant").learning_rate_at(step, 4) for step in range(4)
    ]
    assert constant == pytest.approx([1.0, 2.0, 2.0, 2.0])


def rates(steps: int, **options: object) -> list[float]:
    config = train_config(**options)
    return [config.learning_rate_at(step, steps) for step in range(steps)]


def test_cosine_with_min_lr_decays_toward_its_minimum():
    found = rates(4, warmup_ratio=0.0, lr_scheduler_type="cosine_with_min_lr", min_lr_rate=0.1)
    assert found == pytest.approx([2.0, 1.7363961, 1.1, 0.4636039])


def test_inverse_sqrt_is_half_at_four_times_its_warmup():
    found = rates(20, warmup_steps=4, lr_scheduler_type="inverse_sqrt")
    assert found[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert (found[8], found[16]) == pytest.approx((math.sqrt(2), 1.0))


def test_warmup_stable_decay_decays_only_in_its_last_steps():
    found = rates(20, warmup_ratio=0.1, lr_scheduler_type="warmup_stable_decay", decay_ratio=0.2)
    assert found == pytest.approx([1.0, *[2.0] * 16, 1.7071068, 1.0, 0.2928932])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 7])
def test_after_the_warmup_rates_equal_those_of_transformers(name, warmup):
    options = {
        "cosine_with_min_lr": {"min_lr_rate": 0.3},
        "warmup_stable_decay": {"num_decay_steps": 10},
    }.get(name, {})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)
    reference = get_scheduler(
        name.replace("constant", "constant_with_warmup"), optimizer, warmup, 40, options
    ).lr_lambdas[0]
    found = rates(40, warmup_steps=warmup, warmup_ratio=0.0, lr_scheduler_type=name, min_lr_rate=0.3, decay_ratio=0.25)
    assert found[warmup:] == pytest.approx([2.0 * reference(step) for step in range(warmup, 40)])


@given(
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    warmup_steps=st.integers(0, 400),
    schedule=st.sampled_from(SCHEDULES),
    decay=st.floats(0, 1),
)
def test_no_step_has_a_learning_rate_of_0(steps, warmup, warmup_steps, schedule, decay):
    options = {"warmup_ratio": warmup, "warmup_steps": warmup_steps, "decay_ratio": decay}
    assert all(0 < rate <= 2.0 for rate in rates(steps, lr_scheduler_type=schedule, **options))


@pytest.mark.parametrize(
    "options", [{"ema_decay": 1.0}, {"ema_decay": math.nan}, {"decay_ratio": 1.5}, {"min_lr_rate": -0.1}]
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(XtkError, match="--" + next(iter(options)).replace("_", "-")):
        train_config(**options)
