"""Triton kernels give the values and gradients of PyTorch's operations: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from reference_losses import Case
from test_loss_contract import CPU, LOSS_INSTANCES, case_for_loss, cells_of

from xtk.errors import XtkError
from xtk.losses import LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.kernels import chunked_softmax
from xtk.models.output_head import OutputHead

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda") if ON_GPU else CPU
INTERPRETED = {} if ON_GPU else {"TRITON_INTERPRET": "1"}

# Triton reads TRITON_INTERPRET at import and when kernels are defined; processes of other tests must not inherit it.
with pytest.MonkeyPatch.context() as patch:
    for key, value in INTERPRETED.items():
        patch.setenv(key, value)
    pytest.importorskip("triton", reason="Triton is not installed; it comes with vLLM and with CUDA builds of torch")
    from xtk.losses.kernels import chunked_softmax_triton as kernels


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for key, value in INTERPRETED.items():
        monkeypatch.setenv(key, value)


SIZES = [(3, 1), (2, 7), (4, 4096), (3, 9001), (1, 128_256)]


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_exponentials_and_sums_match_float64(rows, width):
    torch.manual_seed(width)
    logits = (10 * torch.randn(rows, width)).to(DEVICE)
    logits[0, 0] = -torch.inf if width > 1 else 0.0
    highest = logits.amax(1)
    expected = (logits.double() - highest[:, None].double()).exp()
    sums = kernels.subtract_exp_and_sum_(logits, highest)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(sums.double(), expected.sum(1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_scaled_values_with_increments_are_rounded_once(rows, width, dtype):
    torch.manual_seed(width)
    values, factors = torch.rand(rows, width).to(DEVICE), torch.randn(rows).to(DEVICE)
    # Some repeat, as 0 does for entries outside of a window.
    indices = torch.cat([torch.zeros(3, dtype=torch.int64), torch.randint(rows * width, (20,))]).to(DEVICE)
    increments = torch.randn(23).to(DEVICE)
    increments[0] = -0.0
    exact = values.double() * factors[:, None].double()
    exact.view(-1).scatter_add_(0, indices, increments.double())
    out = torch.full((rows, width), torch.nan, dtype=dtype, device=DEVICE)
    assert kernels.scale_add_and_cast(values, factors, indices, increments, out) is out
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=rounding * 1e-2)


class CallCounter:
    """The Triton kernels, with a count of the calls of each."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str):
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(kernels, name)


def values_and_gradients(case: Case, cells: list[LossCells], chunk: int, dtype: torch.dtype) -> list[torch.Tensor]:
    states, weight = (tensor.to(DEVICE, dtype).requires_grad_() for tensor in (case.states, case.weight))
    total, sums = fused_loss(states, OutputHead(weight), [term_cells.to(DEVICE, 0.5) for term_cells in cells], chunk)
    total.backward()
    return [total.detach(), sums, states.grad, weight.grad]


@pytest.mark.parametrize(("chunk", "dtype"), [(64, torch.float32), (5, torch.float32), (64, torch.bfloat16)])
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_with_triton_match_torch_operations(name, chunk, dtype, monkeypatch):
    case, counter = case_for_loss(name, chunk, K=6), CallCounter()
    # A second loss with a remainder; losses of one tokenizer have other documents.
    names = [name] if LOSS_INSTANCES[name].comparison_space == "tokens" or chunk > 5 else [name, "byte-kl"]
    cells = [cells_of(one, case) for one in names]
    monkeypatch.setattr(chunked_softmax, "TRITON", None)
    expected = values_and_gradients(case, cells, chunk, dtype)
    monkeypatch.setattr(chunked_softmax, "TRITON", counter)
    found = values_and_gradients(case, cells, chunk, dtype)
    assert counter.calls["subtract_exp_and_sum_"] > 0
    if dtype == torch.float32:
        assert "scale_add_and_cast" not in counter.calls
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, expected, strict=True):
        scale = max(float(other.abs().max()), 0.1)  # fp32 has the logarithm of a probability near 1 to within 1e-7
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * scale)


def test_a_bf16_gradient_uses_the_fused_kernel(monkeypatch):
    case, counter = case_for_loss("p-kl", 0, K=6), CallCounter()
    monkeypatch.setattr(chunked_softmax, "TRITON", counter)
    values_and_gradients(case, [cells_of("p-kl", case)], 64, torch.bfloat16)
    assert counter.calls["scale_add_and_cast"] == counter.calls["subtract_exp_and_sum_"]


def test_xtk_triton_without_triton_is_refused(monkeypatch):
    monkeypatch.setenv("XTK_TRITON", "1")
    monkeypatch.setitem(sys.modules, "xtk.losses.kernels.chunked_softmax_triton", None)
    with pytest.raises(XtkError, match="not installed"):
        chunked_softmax._load_triton_kernels()
