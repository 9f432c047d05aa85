"""Defaults that depend on the device: precision, batches and loader processes, decided before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from xtk import terminal
from xtk.models.safetensors_headers import read_weight_headers
from xtk.writable_cache_folders import shared_memory_is_writable

AUTO = "auto"
GPU_BATCH_TOKENS = 16_384  # tokens of a forward pass that keep a GPU busy
MAX_LOADER_WORKERS = 4
NOTED_PARAMETERS = 100_000_000  # from here on, the time of a forward pass on a CPU is worth a note
_DTYPE_NAMES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


def has_bf16_gpu() -> bool:
    """Return whether this machine has a GPU that computes in bf16 without emulation."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def has_bf16_processor() -> bool:
    """Return whether the processor has instructions for products of bf16 numbers."""
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def resolve_dtype(dtype: str, folder: Path | None) -> str:
    """Return a value of `--dtype`: for "auto", the checkpoint's own dtype on a GPU with bf16, else "float32".

    The checkpoint's own dtype is that of most of its weights; "bfloat16" if they are quantized or not on this machine.
    `folder`: the model; None: servers run it, in their own dtype.
    """
    if dtype != AUTO:
        return dtype
    if folder is None:
        return "float32"
    sizes: dict[str, int] = {}
    for kind, shape in read_weight_headers(folder, allow_missing=True).values():
        sizes[kind] = sizes.get(kind, 0) + int(torch.Size(shape).numel())
    if not has_bf16_gpu():
        count = sum(sizes.values())
        if count >= NOTED_PARAMETERS and not torch.cuda.is_available() and has_bf16_processor():
            terminal.note_once(
                f"{folder.name}: {count / 1e6:,.0f} million parameters in float32; this processor is about "
                "twice as fast in bf16: --dtype bfloat16, for a --teacher :dtype=bfloat16"
            )
        return "float32"
    return _DTYPE_NAMES.get(max(sizes, key=lambda kind: sizes[kind], default="BF16"), "bfloat16")


def resolve_mixed_precision(mixed_precision: str) -> str:
    """Return a value of `--mixed-precision`: for "auto", "bf16" on a GPU with bf16 or if Accelerate asks for it."""
    if mixed_precision != AUTO:
        return mixed_precision
    # `accelerate launch` sets the variable, to "no" if its user chose nothing.
    return "bf16" if has_bf16_gpu() or os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16" else "no"


def resolve_compute_dtype(dtype: str, mixed_precision: str, student_dtype: str) -> str:
    """Return a value of `--rollout-dtype`: for "auto", the dtype that the student computes in during training."""
    if dtype != AUTO:
        return dtype
    is_bf16 = resolve_mixed_precision(mixed_precision) == "bf16" or student_dtype == "bfloat16"
    return "bfloat16" if is_bf16 else "float32"


def resolve_batch_tokens(max_batch_tokens: int | None) -> int:
    """Return a value of `--max-batch-tokens`: without one, `GPU_BATCH_TOKENS` on a GPU and 0 (no limit) on a CPU."""
    if max_batch_tokens is not None:
        return max_batch_tokens
    return GPU_BATCH_TOKENS if torch.cuda.is_available() else 0


def resolve_loader_workers(num_workers: int | None, processes: int, *, needs_thread: bool) -> int:
    """Return a value of `--dataloader-num-workers`: without one, on a GPU up to `MAX_LOADER_WORKERS`, and 0 on a CPU.

    Two cores are left for the threads of each of the processes of the run on this machine. `needs_thread`: the run
    builds batches in a thread, with online teachers and on-policy.
    """
    if num_workers is not None:
        return num_workers
    if needs_thread or not torch.cuda.is_available() or not shared_memory_is_writable():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(MAX_LOADER_WORKERS, cores // processes - 2))


def describe_device(device: torch.device, mixed_precision: str, dtype: str) -> str:
    """Return device and precision in words: "cuda:0 (NVIDIA H100), bf16"."""
    precision = "bf16" if mixed_precision == "bf16" or dtype == "bfloat16" else dtype
    return f"{device} ({torch.cuda.get_device_name(device)}), {precision}" if device.type == "cuda" else f"{device}"
