"""What writers are asked in these tests, and the truth about what they wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xtk.engines.backend import BackendConfig
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.tokens.tokenizer import Tokenizer

CONTEXT, PADDING = 512, 40
LONG = 330  # tokens; vLLM keeps whole blocks of 128 of what it read
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.97, top_k=200, max_completion_length=24, top_logprobs=3)
GREEDY = SamplingConfig(temperature=0, max_completion_length=9, stop=("s", "an"))


def asks_of() -> list[GenerationRequest]:
    """Four prompts of two completions each, three of the prompts long."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(5, 400, size).astype(np.int32) for size in (LONG, LONG + 40, 7, LONG + 90)]
    for prompt in prompts:  # letters: behind half a character vLLM takes text of a prompt for text that was written
        prompt[-4:] = (66, 70, 71, 74)
    return [GenerationRequest(prompts[at // 2], (9, at // 2, at % 2), 11 if at == 3 else None) for at in range(8)]


def request_of(folder: Path, **options: object) -> BackendConfig:
    return BackendConfig(folder, "student", Tokenizer(folder), options=options)


def error_of(folder: Path, completions: list[Completion]) -> float:
    """The greatest difference to the log-softmax of transformers, in nats; ids that are none are an error too."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = len(Tokenizer(folder))
    worst = 0.0
    for ask, one in zip(asks_of(), completions, strict=True):
        assert len(one.ids) == len(one.logprobs) > 0
        assert one.ids.max() < known < model.config.vocab_size
        ids = torch.from_numpy(np.concatenate([ask.input_ids, one.ids]).astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, len(ask.input_ids) - 1 : -1].double().log_softmax(-1)
        own = logprobs.gather(1, ids[len(ask.input_ids) :, None])[:, 0].numpy()
        error = float(np.abs(own - one.logprobs).max())
        worst = max(worst, error)
        if one.top_ids is not None and error < 1e-3:  # of other weights there are other ids
            assert one.top_ids.tolist() == logprobs[:, :known].topk(one.top_ids.shape[1]).indices.tolist()
    return worst


def greedily(folder: Path) -> list[Completion]:
    """What transformers writes at temperature 0."""
    return TransformersGenerator.open(request_of(folder)).generate(asks_of(), GREEDY)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.ids.tolist(), one.finish_reason) == (other.ids.tolist(), other.finish_reason)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
