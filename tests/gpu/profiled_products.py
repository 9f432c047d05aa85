"""Matrix products of a profiled function: floating-point operations by dtype, and the time of GPU kernels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}  # their operands
FLOAT32, BFLOAT16 = "float", "c10::BFloat16"  # as the profiler names them
# Kernels of cuBLAS and CUTLASS that multiply float32, with or without TF32.
FLOAT32_KERNELS = ("sgemm", "simt", "f32f32_f32f32", "tf32")
# A few float32 products of a bf16 step are small: rotary positions, and the sum over a row of a chunk of logits.
MAX_FLOAT32_FRACTION = 0.01


@dataclass(frozen=True)
class Profile:
    """What a function computed.

    Attributes:
        product_flops: floating-point operations of matrix products, by the dtype of the operands.
        kernel_seconds: time of each GPU kernel by name, in all its launches; empty on a CPU.
        kernel_spans: start and end of each launch in seconds, in order.
    """

    product_flops: Counter[str]
    kernel_seconds: Counter[str]
    kernel_spans: list[tuple[float, float]]

    @classmethod
    def of(cls, function: Callable[[], object]) -> Profile:
        """Call a function and return what it computed, in backward passes too."""
        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, record_shapes=True) as profiler:
            function()
            if on_gpu:
                torch.cuda.synchronize()
        assert profiler.profiler is not None
        flops, seconds, spans = Counter[str](), Counter[str](), []
        for event in profiler.profiler.kineto_results.events():
            if event.name() in PRODUCTS:
                left, right = PRODUCTS[event.name()]
                shapes = event.shapes()
                flops[event.dtypes()[left]] += 2 * math.prod(shapes[left]) * shapes[right][-1]
            elif event.device_type() == DeviceType.CUDA:
                seconds[event.name()] += event.duration_ns() / 1e9
                spans.append((event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9))
        return cls(flops, seconds, sorted(spans))

    def float32_fraction(self) -> float:
        """Return the fraction of the products' operations that are of float32 operands."""
        return self.product_flops[FLOAT32] / self.product_flops.total()

    def float32_kernel_fraction(self) -> float:
        """Return the fraction of the kernels' time in float32 products; 0 on a CPU."""
        names = [name for name in self.kernel_seconds if any(part in name for part in FLOAT32_KERNELS)]
        return sum(self.kernel_seconds[name] for name in names) / (self.kernel_seconds.total() or 1)
