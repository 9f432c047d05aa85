"""A generation engine beside the student: its memory, the place of its weights, the bound of its log-probabilities."""

from __future__ import annotations

import torch

from xtk.training.student_generator import engine_beside_student, max_difference_in_float32


def test_an_engine_on_the_device_of_the_student_leaves_memory_unless_the_user_chose():
    assert engine_beside_student({"max_model_len": 64}) == {"max_model_len": 64, "gpu_memory_utilization": 0.3}
    for chosen in ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 1 << 30}):
        assert engine_beside_student(chosen) == chosen


def test_the_bound_of_float32_log_probabilities_allows_for_tf32_on_a_gpu():
    assert max_difference_in_float32(torch.device("cpu")) == 0.001
    assert max_difference_in_float32(torch.device("cuda")) == 0.01
