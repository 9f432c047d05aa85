"""Floor 4: what a student writes. One backend a file, one line in the table; docs/explanation/on-policy.md."""

from __future__ import annotations

GENERATORS = {
    "transformers": "xtk.rollouts.transformers_generator:TransformersGenerator",
    "vllm": "xtk.rollouts.vllm_generator:VllmGenerator",
    "server": "xtk.rollouts.server_generator:ServerGenerator",
}
