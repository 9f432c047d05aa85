"""Imports the architectures that the tests use, so that forks need not."""

import transformers
from safetensors import numpy, torch  # noqa: F401

MODELS = (transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM, transformers.AutoModelForCausalLM)
