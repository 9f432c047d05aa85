"""Losses on a simulated GPU: the values and gradients of the CPU, and no synchronization with the device.

`tests/gpu/test_device.py` uses `loss_and_gradients` on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from reference_losses import random_case
from simulated_cuda import CUDA, SimulatedCuda, to_host
from test_loss_contract import DISTRIBUTIONS, LOSS_INSTANCES, cells_of
from torch import Tensor

from xtk.losses import LOSSES
from xtk.losses.head import fused_loss
from xtk.models.output_head import HeadAdapter, OutputHead, compute_token_logprobs
from xtk.parallel.host_to_device import to_device
from xtk.projection.vocabulary_array import VocabularyArray
from xtk.training.student_with_losses import StudentWithLoss

CPU = torch.device("cpu")


def loss_and_gradients(
    name: str, chunk: int, device: torch.device, *, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return total, term sums and gradients of a loss and of alm, for a head with bias, soft cap and LoRA."""
    case = random_case(3, K=6, one_tokenizer=LOSS_INSTANCES[name].comparison_space == "tokens", bias=True)
    terms = [cells_of(one, case).to(device, scale) for one, scale in ((name, 0.5), ("alm", 2.0))]
    generator = torch.Generator().manual_seed(0)
    lora = [torch.randn(shape, generator=generator) for shape in ((2, case.weight.shape[1]), (len(case.weight), 2))]
    leaves = [
        to_device(tensor.to(dtype), device).detach().requires_grad_()
        for tensor in (case.states, case.weight, case.bias, *lora)
    ]
    states, weight, bias, *lora_leaves = leaves
    head = OutputHead(weight, bias, softcap=3.0, adapters=[HeadAdapter(*lora_leaves, 0.5)])
    total, sums = fused_loss(states, head, terms, chunk)
    total.backward()
    return [to_host(one.detach()) for one in (total, sums, *(leaf.grad for leaf in leaves))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), [*((name, 7) for name in LOSSES), ("byte-kl", 64), ("byte-kl", 1)])
def test_losses_on_a_device_match_the_cpu_and_never_wait(name, chunk):
    expected = loss_and_gradients(name, chunk, CPU)
    with SimulatedCuda() as cuda:
        found = loss_and_gradients(name, chunk, CUDA)
    assert not cuda.waits, cuda.wait_locations
    for found_tensor, expected_tensor in zip(found, expected, strict=True):
        torch.testing.assert_close(found_tensor, expected_tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["ce", "byte-kl"])
def test_products_of_bf16_matrices_are_not_rounded_on_a_gpu(name, monkeypatch):
    case = random_case(3, K=6)
    states, weight = (tensor.bfloat16().float() for tensor in (case.states, case.weight))

    def value_and_gradients(device: torch.device, dtype: torch.dtype, compute: torch.dtype) -> list[Tensor]:
        monkeypatch.setattr("xtk.losses.head.compute_dtype", lambda states, weight: compute)
        leaves = [to_device(tensor.to(dtype), device).detach().requires_grad_() for tensor in (states, weight)]
        total, _ = fused_loss(leaves[0], OutputHead(leaves[1]), [cells_of(name, case).to(device, 0.5)], 7,
                              has_unit_gradient=True)  # fmt: skip
        total.backward()
        return [to_host(tensor.detach()).double() for tensor in (total, *(leaf.grad for leaf in leaves))]

    exact, *exact_gradients = value_and_gradients(CPU, torch.float64, torch.float64)
    rounded, *_ = value_and_gradients(CPU, torch.float32, torch.bfloat16)
    with SimulatedCuda() as cuda:
        value, *gradients = value_and_gradients(CUDA, torch.float32, torch.bfloat16)
    assert abs(value - exact) < 1e-5 * exact < abs(rounded - exact)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert (gradient - exact_gradient).norm() < 0.01 * exact_gradient.norm()
    assert cuda.operations["aten.addmm.dtype_out"] == 2 * cuda.operations["aten.mm.dtype_out"] > 0
    assert not cuda.operations["aten.mm.default"]


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_total_that_a_trainer_multiplies_has_multiplied_gradients(device):
    """As transformers' trainer on several processes, and a gradient scaler, do."""
    case = random_case(3, K=6)

    class Split:
        def __init__(self) -> None:
            self.states, self.weight = (
                to_device(one.float(), device).detach().requires_grad_() for one in (case.states[None], case.weight)
            )
            self.head = OutputHead(self.weight)

        def __call__(self, input_ids, packed):
            return self.states

    def gradients(factor: float) -> list[Tensor]:
        split, positions = Split(), np.arange(len(case.states))
        total, _ = StudentWithLoss(split)(None, positions, [cells_of("ce", case).to(device, 1.0)])
        (factor * total).backward()
        return [to_host(leaf.grad) for leaf in (split.states, split.weight)]

    with SimulatedCuda() if device == CUDA else contextlib.nullcontext():
        for once, tripled in zip(gradients(1.0), gradients(3.0), strict=True):
            assert once.norm() > 0
            torch.testing.assert_close(tripled, 3 * once)


@pytest.mark.parametrize(("names", "most"), [(("ce",), 33), (("ce", "byte-kl"), 131), (("gold",), 177)])
def test_a_chunk_has_few_operations(names, most):
    case, counts = random_case(3, K=6), []
    num_rows = len(case.states)
    for size in (num_rows, -(-num_rows // 2)):
        with SimulatedCuda() as cuda:
            terms = [cells_of(name, case).to(CUDA, 1.0) for name in names]
            states, weight = (
                to_device(one.float(), CUDA).detach().requires_grad_() for one in (case.states, case.weight)
            )
            overlap = max(term.ROWS_BEFORE for term in terms)
            cuda.operations.clear()
            fused_loss(states, OutputHead(weight), terms, size + overlap, has_unit_gradient=True)[0].backward()
        counts.append(cuda.operations.total())
    one_chunk, two_chunks = counts
    assert two_chunks - one_chunk <= most


def test_log_probabilities_under_autocast_have_the_products_of_training_on_a_gpu(monkeypatch):
    case = random_case(3, K=6)
    states, weight = (tensor.bfloat16().float() for tensor in (case.states, case.weight))
    targets = torch.arange(len(states)) % len(weight)
    exact, _ = compute_token_logprobs(states.double(), OutputHead(weight.double()), targets)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    for device in (CUDA, CPU):
        with SimulatedCuda() as cuda:
            head = OutputHead(to_device(weight, device))
            found, _ = compute_token_logprobs(to_device(states, device), head, to_device(targets, device))
            found = to_host(found)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
        assert bool(cuda.operations["aten.mm.dtype_out"]) == (device == CUDA)
        assert not cuda.operations["aten.mm.default"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["byte-kl", "escd", "gold", "strict"])
def test_arrays_of_the_vocabularies_are_copied_to_a_device_once(name):
    case = random_case(3, K=6)
    (states, weight), copies = (case.states.float(), case.weight.float()), []
    with SimulatedCuda() as cuda:
        inputs = to_device(states, CUDA), OutputHead(to_device(weight, CUDA))
        for _ in range(3):  # micro-batches
            cells = cells_of(name, case)
            arrays = [one for field in dataclasses.fields(cells)
                      if isinstance(one := getattr(cells, field.name), VocabularyArray)]  # fmt: skip
            cuda.pinned.clear()
            fused_loss(*inputs, [cells.to(CUDA, 1.0)], 7)
            kept = [copy for one in arrays for copy in one.copies.values()]
            sizes = {(one.numel(), one.element_size()) for one in kept}
            copies.append([(one.numel(), one.element_size()) for one in cuda.pinned.values()])
            assert {one.device for one in kept} == {CUDA}
            assert all(one.copies for one in arrays)
    assert len(copies[0]) - len(copies[1]) == len(arrays)
    assert copies[1] == copies[2]
    assert sizes <= set(copies[0])


def test_all_classes_of_cells_are_tested():
    assert {type(cells_of(name, random_case(3, K=6,
                                            one_tokenizer=LOSS_INSTANCES[name].comparison_space == "tokens"))).__name__
            for name in DISTRIBUTIONS} >= {"LossCells", "NextByteCells", "SpanProductCells", "SortedProbCells",
                                           "ClippedSurrogateCells"}  # fmt: skip
