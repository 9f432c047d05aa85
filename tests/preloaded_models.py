"""Imports the modules that commands import late and the model classes of the tests, once for all forks."""

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
# Few tests need these, and they import many modules.
EXCLUDED = ("xtk.__main__", "xtk.integrations.transformers")

for module in pkgutil.walk_packages(xtk.__path__, "xtk."):
    if module.name not in EXCLUDED:
        importlib.import_module(module.name)
# Fill two caches that each process would fill at first use; each takes a quarter of a second.
numba.core.registry.cpu_target.target_context.refresh()
conversion_mapping.get_checkpoint_conversion_mapping("llama")
