"""Checks of installed libraries and devices."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

from xtk.doctor.doctor_inputs import DoctorInputs, Finding

LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "pyarrow", "numpy", "numba")
OPTIONAL_LIBRARIES = ("vllm", "peft", "bitsandbytes", "flash-attn", "math-verify", "lm-eval")


def library_versions(inputs: DoctorInputs) -> Iterator[Finding]:
    """Report the versions of libraries, and the devices."""
    import torch

    installed = {name: version for name in (*LIBRARIES, *OPTIONAL_LIBRARIES) if (version := _version(name))}
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    yield Finding("ok", f"Python {platform.python_version()}, {versions}", figures=installed)
    if not torch.cuda.is_available():
        yield Finding("note", f"no GPU was found: everything runs on {os.cpu_count()} CPU cores")
        return
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    yield Finding("ok", "; ".join(f"{device.name}, {device.total_memory / 2**30:.0f} GiB" for device in devices))
    if (processes := inputs.plan.parallel.num_processes) > len(devices):
        what = f"the run has {processes} processes, and this machine has {len(devices)} GPUs"
        yield Finding("note", what, hint="for several machines, start distill with torchrun")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
