"""A draft that xtk makes for a target: a small Llama with another tokenizer, transplanted, then trained on answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_inputs
from vllm_on_cpu import make_llama

PROMPTS = [text[:24] for text in small_inputs.sentences(6)]


def make_draft(run: Callable[..., Any], target: Path, folder: Path, *, length: int = 24, steps: int = 40) -> Path:
    """Return a draft that was trained on the target's greedy answers to `PROMPTS`, in `folder`."""
    other = make_llama(folder / "other", context=128, seed=4)
    small_inputs.make_student_tokenizer(other, 480)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    run("transplant", other, target, "-o", folder / "start")
    run("rollout", target, prompts, "--temperature", 0, "--max-completion-length", length,
        "-o", folder / "answers.jsonl", timeout=600)  # fmt: skip
    run("cache-teacher", target, folder / "answers.jsonl", "-o", folder / "cache", timeout=600)
    run("distill", folder / "start", folder / "cache", "--loss", "forward-kl", "--max-steps", steps,
        "--per-device-train-batch-size", len(PROMPTS), "--learning-rate", 1e-2, "--save-steps", 0,
        "-o", folder / "draft", timeout=600)  # fmt: skip
    return folder / "draft"
