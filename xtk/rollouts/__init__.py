"""Floor 4: what a student writes. One backend a file, one line in the table; docs/explanation/on-policy.md."""

from __future__ import annotations

WRITERS = {
    "transformers": "xtk.rollouts.transformers:TransformersWriter",
    "vllm": "xtk.rollouts.vllm:VllmWriter",
    "server": "xtk.rollouts.server:ServerWriter",
}
