"""Generation of rollouts by a student: GENERATORS maps each backend to its class; see docs/explanation/on-policy.md."""

from __future__ import annotations

GENERATORS = {
    "transformers": "xtk.rollouts.transformers_generator:TransformersGenerator",
    "vllm": "xtk.rollouts.vllm_generator:VllmGenerator",
    "server": "xtk.rollouts.server_generator:ServerGenerator",
}
