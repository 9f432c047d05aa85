"""Generation with transformers: seeded sampling per key, log-probabilities, stop strings, and weight updates."""

from __future__ import annotations

import copy
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.packed_attention import ATTENTION_NAME
from xtk.models.resolver import ModelRef
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.token_sampling import StopStringDetector, gumbel_noise, mask_unlikely, position_seeds, sample_tokens
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(pair):
    return Tokenizer(pair.student)


@pytest.fixture(scope="module")
def model(pair):
    loaded = load_causal_lm(ModelRef(pair.student))
    with torch.no_grad():
        loaded.lm_head.weight.mul_(40)  # distributions neither uniform nor one-hot
    return loaded


def generation_requests(tokenizer: Tokenizer, count: int) -> list[GenerationRequest]:
    """Return requests with prompts of several lengths, some with their own `max_length`."""
    texts = ["Anna has", "", "Bert has 12 apples and gives 3 to Clara. Now", "The"]
    requests = []
    for number in range(count):
        (encoded,) = tokenizer.encode([texts[number % 4]])
        ids = np.concatenate([[tokenizer.start_ids[0]], encoded.ids]).astype(np.int32)
        requests.append(
            GenerationRequest(ids, (7, number, number // 3, 0), max_length=None if number % 3 else 5 + number)
        )
    return requests


@torch.no_grad()
def reference_completion(
    model, tokenizer: Tokenizer, request: GenerationRequest, sampling: SamplingConfig
) -> Completion:
    """Return one completion, computed without a KV cache: the whole sequence is read again for every token."""
    ids, logprobs, top_ids, text = request.input_ids.tolist(), [], [], b""
    length = min(sampling.max_completion_length, 10**6 if request.max_length is None else request.max_length)
    for seed in torch.from_numpy(position_seeds(request.seed_key, length)):
        logits = model(torch.tensor([ids])).logits[0, -1]
        vocabulary_logits = logits[: len(tokenizer)]
        if sampling.temperature == 0:
            token = int(vocabulary_logits.argmax())
        else:
            noise = gumbel_noise(seed[None], len(tokenizer))[0]
            token = int(
                (mask_unlikely(vocabulary_logits[None].double() / sampling.temperature, sampling)[0] + noise).argmax()
            )
        ids.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
        top_ids.append(vocabulary_logits.topk(sampling.top_logprobs).indices.tolist() if sampling.top_logprobs else [])
        text = b"" if tokenizer.vocabulary.special_mask[token] else text + tokenizer.vocabulary.bytes_of(token)
        finish = "length"
        if token in tokenizer.end_ids:
            finish = "stop"
        elif any(stop.encode() in text for stop in sampling.stop):
            finish = "stop-string"
        if finish != "length":
            break
    sampled = np.array(ids[len(request.input_ids) :], np.int32)
    return Completion(sampled, np.array(logprobs, np.float32), finish, np.array(top_ids, np.int32))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_completion_length=24, stop=("a", "12", "s t"), top_logprobs=3),
        SamplingConfig(temperature=0.7, top_k=40, top_p=0.9, max_completion_length=16),
        SamplingConfig(temperature=0, max_completion_length=12),
    ],
)
def test_completions_equal_the_reference_implementation_for_any_batch(model, tokenizer, sampling):
    requests = generation_requests(tokenizer, 12)
    expected = [reference_completion(model, tokenizer, request, sampling) for request in requests]
    for batch_tokens, order in ((10_000, list(range(12))), (100, list(range(11, -1, -1)))):
        generator = TransformersGenerator(model, tokenizer, batch_tokens)
        completions = generator.generate([requests[i] for i in order], sampling)
        assert generator.num_sampled == sum(len(found.ids) for found in completions)
        for found, i in zip(completions, order, strict=True):
            assert found.ids.tolist() == expected[i].ids.tolist()
            assert found.finish_reason == expected[i].finish_reason
            np.testing.assert_allclose(found.logprobs, expected[i].logprobs, atol=1e-4)
            if sampling.top_logprobs:
                assert found.top_ids.tolist() == expected[i].top_ids.tolist()
    assert len({tuple(one.ids.tolist()) for one in expected}) > 3
    if sampling.stop:
        assert {one.finish_reason for one in expected} == {"stop-string", "length"}


def test_the_first_token_after_a_batch_of_prompts_in_bf16_costs_about_as_much_as_the_next_ones(tokenizer):
    # With torch 2.13 on a CPU with bf16 instructions, the head's product took 300 times as long at first.
    configuration = LlamaConfig(vocab_size=len(tokenizer) + 30_000, hidden_size=512, intermediate_size=64,
                                num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1)  # fmt: skip
    model = LlamaForCausalLM(configuration).to(torch.bfloat16).eval().requires_grad_(False)
    generator, requests = TransformersGenerator(model, tokenizer), generation_requests(tokenizer, 12)

    def seconds(length: int) -> float:
        sampling = SamplingConfig(temperature=0, max_completion_length=length)
        began = time.perf_counter()
        generator.generate(requests, sampling)
        return time.perf_counter() - began

    seconds(1)
    first, eight = (min(seconds(length) for _ in range(3)) for length in (1, 8))
    assert first < 20 * (eight - first) / 7, (first, eight)


def test_end_tokens_end_a_completion_and_padding_rows_are_never_sampled(model, tokenizer):
    uniform = copy.deepcopy(model)
    with torch.no_grad():
        uniform.lm_head.weight.zero_()
    generator = TransformersGenerator(uniform, tokenizer)
    requests = [GenerationRequest(np.array([0], np.int32), (number,)) for number in range(60)]
    completions = generator.generate(requests, SamplingConfig(max_completion_length=200))
    sampled = np.concatenate([one.ids for one in completions])
    assert sampled.max() < len(tokenizer) < uniform.lm_head.weight.shape[0]
    np.testing.assert_allclose(np.concatenate([one.logprobs for one in completions]), -np.log(656), atol=1e-5)
    assert {one.finish_reason for one in completions} == {"stop", "length"}
    for one in completions:
        is_end = np.isin(one.ids, list(tokenizer.end_ids))
        assert not is_end[:-1].any()
        assert is_end[-1] == (one.finish_reason == "stop")
        assert one.finish_reason == "stop" or len(one.ids) == 200


def test_sampling_frequencies_match_the_truncated_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.0001, -4.0])
    count = 20_000
    seeds = torch.from_numpy(position_seeds((5, 1), count))
    for sampling, kept in (
        (SamplingConfig(), [0, 1, 2, 3, 4, 5]),
        (SamplingConfig(temperature=0.5), [0, 1, 2, 3, 4, 5]),
        (SamplingConfig(top_k=2), [2, 4]),
        (SamplingConfig(top_p=0.6), [2, 4]),  # probabilities 0.55, 0.20, 0.20, ...: the first two reach 0.6
        (SamplingConfig(top_k=3, top_p=0.75), [2, 4]),  # probabilities 0.58, 0.21, 0.21 after top-k
        (SamplingConfig(top_p=1e-9), [2]),
    ):
        sampled = Counter(sample_tokens(logits.expand(count, -1), seeds, sampling).tolist())
        assert sampled.keys() <= set(kept)
        probs = functional.softmax(logits[kept].double() / sampling.temperature, -1)
        for token, prob in zip(kept, probs.tolist(), strict=True):
            assert abs(sampled[token] / count - prob) < 4 * (prob * (1 - prob) / count) ** 0.5 + 1e-12


def test_noise_is_independent_across_keys_positions_and_tokens():
    keys = [(1, 2), (1, 2, 0), (1, 2, 1), (0, 1, 2), (12,), (-1,)]
    noise = torch.stack([gumbel_noise(torch.from_numpy(position_seeds(key, 30)), 400) for key in keys])
    assert len(set(noise.flatten().tolist())) == noise.numel()
    uniform = (-(-noise).exp()).exp()
    assert abs(float(uniform.mean()) - 0.5) < 4 * (1 / 12 / noise.numel()) ** 0.5
    for axis in range(3):
        one, other = (uniform.narrow(axis, start, uniform.shape[axis] - 1) - 0.5 for start in (0, 1))
        assert abs(float((one * other).mean())) < 4 / 12 / one.numel() ** 0.5


def test_model_in_train_mode_is_restored_and_generates_as_in_eval_mode(model, tokenizer):
    requests, sampling = generation_requests(tokenizer, 5), SamplingConfig(max_completion_length=10)
    expected = TransformersGenerator(model.eval(), tokenizer).generate(requests, sampling)
    training_model = copy.deepcopy(model)
    training_model.config.attention_dropout = 0.5
    for layer in training_model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    training_model.config.use_cache = False
    training_model.generation_config.repetition_penalty = 3.0
    training_model.generation_config.eos_token_id = 300
    generation_config = training_model.generation_config
    assert BackboneWithHead(training_model).enable_packing()
    training_model.train()
    training_model.model.embed_tokens.eval()
    modes = [module.training for module in training_model.modules()]
    rng_state = torch.get_rng_state()
    completions = TransformersGenerator(training_model, tokenizer).generate(requests, sampling)
    assert [one.ids.tolist() for one in completions] == [one.ids.tolist() for one in expected]
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert [module.training for module in training_model.modules()] == modes
    assert training_model.config._attn_implementation == ATTENTION_NAME
    assert training_model.generation_config is generation_config
    assert all(weight.requires_grad and weight.grad is None for weight in training_model.parameters())
    training_model(torch.tensor([[1, 2, 3]])).logits.sum().backward()


def test_updated_weights_are_used(model, tokenizer, pair, tmp_path):
    requests, sampling = generation_requests(tokenizer, 3), SamplingConfig(max_completion_length=8)
    old, new = load_causal_lm(ModelRef(pair.student)), copy.deepcopy(model)
    expected = TransformersGenerator(new, tokenizer).generate(requests, sampling)
    new.save_pretrained(tmp_path)
    generator = TransformersGenerator(old, tokenizer)
    assert [one.ids.tolist() for one in generator.generate(requests, sampling)] != [
        one.ids.tolist() for one in expected
    ]
    generator.update_weights(tmp_path)
    assert [one.ids.tolist() for one in generator.generate(requests, sampling)] == [
        one.ids.tolist() for one in expected
    ]


def test_context_length_limits_completions_and_prompts(model, tokenizer):
    generator = TransformersGenerator(model, tokenizer)
    (one,) = generator.generate(
        [GenerationRequest(np.ones(253, np.int32) * 40, (0,))], SamplingConfig(max_completion_length=50)
    )
    assert len(one.ids) <= generator.context_length - 253 == 3
    for ids in (np.ones(256, np.int32), np.zeros(0, np.int32)):
        with pytest.raises(XtkError, match="prompt"):
            generator.generate([GenerationRequest(ids, (0,))], SamplingConfig())


def test_stop_strings_are_detected_at_the_token_that_completes_them(tokenizer):
    stops = ["12", "s and", "é", " g"]
    (encoded,) = tokenizer.encode(["Anna has cups and gives é 12"])
    for stop in stops:
        detector, text = StopStringDetector(tokenizer, (stop,)), b""
        for token in encoded.ids.tolist():
            text += tokenizer.vocabulary.bytes_of(token)
            assert detector.add_token(token) == (stop.encode() in text)
            if stop.encode() in text:
                break
        else:
            raise AssertionError(stop)
    one, other = (tokenizer.vocabulary.token_of_bytes[byte] for byte in (b"1", b"2"))
    detector = StopStringDetector(tokenizer, ("12",))
    assert [detector.add_token(token) for token in (one, 2, other, one, other)] == [False, False, False, False, True]
