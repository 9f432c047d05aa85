"""Requests of the vLLM generation tests, and checks of completions against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xtk.engines.backend import BackendConfig
from xtk.models.resolver import ModelRef
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.text.tokenizer import Tokenizer

CONTEXT, PADDING = 512, 40
LONG = 330  # tokens; vLLM's prefix cache keeps whole blocks of 128 tokens
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.97, top_k=200, max_completion_length=24, top_logprobs=3)
GREEDY = SamplingConfig(temperature=0, max_completion_length=9, stop=("s", "an"))


def make_requests() -> list[GenerationRequest]:
    """Return requests for four prompts with two completions each; three of the prompts are long."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(5, 400, size).astype(np.int32) for size in (LONG, LONG + 40, 7, LONG + 90)]
    for prompt in prompts:  # letters: after half a character vLLM counts text of the prompt as generated text
        prompt[-4:] = (66, 70, 71, 74)
    return [GenerationRequest(prompts[i // 2], (9, i // 2, i % 2), 11 if i == 3 else None) for i in range(8)]


def backend_config(folder: Path, **options: object) -> BackendConfig:
    return BackendConfig(ModelRef(folder, name="student"), Tokenizer(folder), options=options)


def max_logprob_error(folder: Path, completions: list[Completion]) -> float:
    """Return the largest difference to transformers' log-softmax, in nats; assert that all ids are valid."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocabulary_size = len(Tokenizer(folder))
    max_error = 0.0
    for request, completion in zip(make_requests(), completions, strict=True):
        assert len(completion.ids) == len(completion.logprobs) > 0
        assert completion.ids.max() < vocabulary_size < model.config.vocab_size
        ids = torch.from_numpy(np.concatenate([request.input_ids, completion.ids]).astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, len(request.input_ids) - 1 : -1].double().log_softmax(-1)
        expected = logprobs.gather(1, ids[len(request.input_ids) :, None])[:, 0].numpy()
        error = float(np.abs(expected - completion.logprobs).max())
        max_error = max(max_error, error)
        if completion.top_ids is not None and error < 1e-3:  # with other weights the top ids differ
            assert (
                completion.top_ids.tolist()
                == logprobs[:, :vocabulary_size].topk(completion.top_ids.shape[1]).indices.tolist()
            )
    return max_error


def greedy_completions(folder: Path) -> list[Completion]:
    """Return the completions of transformers at temperature 0."""
    return TransformersGenerator.open(backend_config(folder)).generate(make_requests(), GREEDY)


def assert_equal_completions(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.ids.tolist(), one.finish_reason) == (other.ids.tolist(), other.finish_reason)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
