"""Imports what commands import when they need it, and the architectures that the tests use, so that forks need not."""

import importlib
import pkgutil

import accelerate
import numba.core.registry
import pandas  # noqa: F401
import pydantic.fields  # noqa: F401
import transformers
from safetensors import numpy, torch  # noqa: F401
from transformers import conversion_mapping
from typer import _adapters  # noqa: F401

import xtk

MODELS = (transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM, transformers.AutoModelForCausalLM)
ACCELERATOR = accelerate.Accelerator
# Few tests need these, and they import much.
LEFT_OUT = ("xtk.__main__", "xtk.integrations.transformers")

for module in pkgutil.walk_packages(xtk.__path__, "xtk."):
    if module.name not in LEFT_OUT:
        importlib.import_module(module.name)
# What these two make once in each process, they make here once for all: a quarter of a second each.
numba.core.registry.cpu_target.target_context.refresh()
conversion_mapping.get_checkpoint_conversion_mapping("llama")
