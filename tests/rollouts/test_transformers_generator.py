"""A student writes by transformers: what it draws is a function of the key, and log-probabilities are the model's."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional

from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.packed_attention import ATTENTION_NAME
from xtk.rollouts.generator_interface import Completion, GenerationRequest, SamplingConfig
from xtk.rollouts.stop_strings import StopStringDetector
from xtk.rollouts.token_sampling import gumbel_noise, mask_unlikely, position_seeds, sample_tokens
from xtk.rollouts.transformers_generator import TransformersGenerator
from xtk.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(pair):
    return Tokenizer(pair.student)


@pytest.fixture(scope="module")
def model(pair):
    loaded = load_causal_lm(pair.student)
    with torch.no_grad():
        loaded.lm_head.weight.mul_(40)  # neither all alike nor all one
    return loaded


def asks_of(tokenizer: Tokenizer, count: int) -> list[GenerationRequest]:
    """Asks of several lengths, some with a limit of their own."""
    texts = ["Anna has", "", "Bert has 12 apples and gives 3 to Clara. Now", "The"]
    found = []
    for number in range(count):
        (encoded,) = tokenizer.encode([texts[number % 4]])
        ids = np.concatenate([[tokenizer.start_id], encoded.ids]).astype(np.int32)
        found.append(GenerationRequest(ids, (7, number, number // 3, 0), max_length=None if number % 3 else 5 + number))
    return found


@torch.no_grad()
def slowly(model, tokenizer: Tokenizer, ask: GenerationRequest, sampling: SamplingConfig) -> Completion:
    """Write one completion, the whole text read anew for each token."""
    ids, logprobs, top_ids, text = ask.input_ids.tolist(), [], [], b""
    length = min(sampling.max_completion_length, 10**6 if ask.max_length is None else ask.max_length)
    for seed in torch.from_numpy(position_seeds(ask.seed_key, length)):
        logits = model(torch.tensor([ids])).logits[0, -1]
        known = logits[: len(tokenizer)]
        if sampling.temperature == 0:
            token = int(known.argmax())
        else:
            noise = gumbel_noise(seed[None], len(tokenizer))[0]
            token = int((mask_unlikely(known[None].double() / sampling.temperature, sampling)[0] + noise).argmax())
        ids.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
        top_ids.append(known.topk(sampling.top_logprobs).indices.tolist() if sampling.top_logprobs else [])
        text = b"" if tokenizer.vocabulary.special_mask[token] else text + tokenizer.vocabulary.bytes_of(token)
        finish = "length"
        if token in tokenizer.end_ids:
            finish = "stop"
        elif any(stop.encode() in text for stop in sampling.stop):
            finish = "stop-string"
        if finish != "length":
            break
    drawn = np.array(ids[len(ask.input_ids) :], np.int32)
    return Completion(drawn, np.array(logprobs, np.float32), finish, np.array(top_ids, np.int32))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_completion_length=24, stop=("a", "12", "s t"), top_logprobs=3),
        SamplingConfig(temperature=0.7, top_k=40, top_p=0.9, max_completion_length=16),
        SamplingConfig(temperature=0, max_completion_length=12),
    ],
)
def test_it_writes_what_the_slow_twin_writes_whatever_the_batch(model, tokenizer, sampling):
    asks = asks_of(tokenizer, 12)
    expected = [slowly(model, tokenizer, ask, sampling) for ask in asks]
    for batch_tokens, order in ((10_000, list(range(12))), (100, list(range(11, -1, -1)))):
        written = TransformersGenerator(model, tokenizer, batch_tokens).generate([asks[at] for at in order], sampling)
        for found, at in zip(written, order, strict=True):
            assert found.ids.tolist() == expected[at].ids.tolist()
            assert found.finish_reason == expected[at].finish_reason
            np.testing.assert_allclose(found.logprobs, expected[at].logprobs, atol=1e-4)
            if sampling.top_logprobs:
                assert found.top_ids.tolist() == expected[at].top_ids.tolist()
    assert len({tuple(one.ids.tolist()) for one in expected}) > 3
    if sampling.stop:
        assert {one.finish_reason for one in expected} == {"stop-string", "length"}


def test_an_end_token_ends_a_completion_and_rows_of_padding_are_never_drawn(model, tokenizer):
    likely = copy.deepcopy(model)
    with torch.no_grad():
        likely.lm_head.weight.zero_()
    writer = TransformersGenerator(likely, tokenizer)
    asks = [GenerationRequest(np.array([0], np.int32), (number,)) for number in range(60)]
    written = writer.generate(asks, SamplingConfig(max_completion_length=200))
    drawn = np.concatenate([one.ids for one in written])
    assert drawn.max() < len(tokenizer) < likely.lm_head.weight.shape[0]
    np.testing.assert_allclose(np.concatenate([one.logprobs for one in written]), -np.log(656), atol=1e-5)
    assert {one.finish_reason for one in written} == {"stop", "length"}
    for one in written:
        ends = np.isin(one.ids, list(tokenizer.end_ids))
        assert not ends[:-1].any()
        assert ends[-1] == (one.finish_reason == "stop")
        assert one.finish_reason == "stop" or len(one.ids) == 200


def test_frequencies_are_those_of_the_distribution_that_was_cut():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.0001, -4.0])
    count = 20_000
    seeds = torch.from_numpy(position_seeds((5, 1), count))
    for sampling, kept in (
        (SamplingConfig(), [0, 1, 2, 3, 4, 5]),
        (SamplingConfig(temperature=0.5), [0, 1, 2, 3, 4, 5]),
        (SamplingConfig(top_k=2), [2, 4]),
        (SamplingConfig(top_p=0.6), [2, 4]),  # of 0.55, 0.20, 0.20, ...: two of them are enough
        (SamplingConfig(top_k=3, top_p=0.75), [2, 4]),  # of 0.58, 0.21, 0.21, once three are left
        (SamplingConfig(top_p=1e-9), [2]),
    ):
        drawn = Counter(sample_tokens(logits.expand(count, -1), seeds, sampling).tolist())
        assert drawn.keys() <= set(kept)
        probs = functional.softmax(logits[kept].double() / sampling.temperature, -1)
        for token, share in zip(kept, probs.tolist(), strict=True):
            assert abs(drawn[token] / count - share) < 4 * (share * (1 - share) / count) ** 0.5 + 1e-12


def test_noise_of_keys_places_and_tokens_is_independent():
    keys = [(1, 2), (1, 2, 0), (1, 2, 1), (0, 1, 2), (12,), (-1,)]
    noise = torch.stack([gumbel_noise(torch.from_numpy(position_seeds(key, 30)), 400) for key in keys])
    assert len(set(noise.flatten().tolist())) == noise.numel()
    uniform = (-(-noise).exp()).exp()
    assert abs(float(uniform.mean()) - 0.5) < 4 * (1 / 12 / noise.numel()) ** 0.5
    for axis in range(3):
        one, other = (uniform.narrow(axis, start, uniform.shape[axis] - 1) - 0.5 for start in (0, 1))
        assert abs(float((one * other).mean())) < 4 / 12 / one.numel() ** 0.5


def test_a_model_in_training_is_left_as_it_was_and_writes_as_if_it_were_not(model, tokenizer):
    asks, sampling = asks_of(tokenizer, 5), SamplingConfig(max_completion_length=10)
    expected = TransformersGenerator(model.eval(), tokenizer).generate(asks, sampling)
    trained = copy.deepcopy(model)
    trained.config.attention_dropout = 0.5
    for layer in trained.model.layers:
        layer.self_attn.attention_dropout = 0.5
    trained.config.use_cache = False
    trained.generation_config.repetition_penalty = 3.0
    trained.generation_config.eos_token_id = 300
    options = trained.generation_config
    assert BackboneWithHead(trained).enable_packing()
    trained.train()
    trained.model.embed_tokens.eval()
    modes = [module.training for module in trained.modules()]
    before = torch.get_rng_state()
    written = TransformersGenerator(trained, tokenizer).generate(asks, sampling)
    assert [one.ids.tolist() for one in written] == [one.ids.tolist() for one in expected]
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in trained.modules()] == modes
    assert trained.config._attn_implementation == ATTENTION_NAME
    assert trained.generation_config is options
    assert all(weight.requires_grad and weight.grad is None for weight in trained.parameters())
    trained(torch.tensor([[1, 2, 3]])).logits.sum().backward()


def test_new_weights_are_written_with_and_wrong_ones_refused(model, tokenizer, pair, tmp_path):
    asks, sampling = asks_of(tokenizer, 3), SamplingConfig(max_completion_length=8)
    old, new = load_causal_lm(pair.student), copy.deepcopy(model)
    expected = TransformersGenerator(new, tokenizer).generate(asks, sampling)
    new.save_pretrained(tmp_path)
    for weights in (tmp_path, new.state_dict().items()):
        writer = TransformersGenerator(copy.deepcopy(old), tokenizer)
        assert [one.ids.tolist() for one in writer.generate(asks, sampling)] != [one.ids.tolist() for one in expected]
        writer.update_weights(weights)
        assert [one.ids.tolist() for one in writer.generate(asks, sampling)] == [one.ids.tolist() for one in expected]
    with pytest.raises(XtkError, match="but the model has no such weight"):
        writer.update_weights([("head", torch.zeros(2))])
    with pytest.raises(XtkError, match=r"but the model has shape \[656, 32\] there"):
        writer.update_weights([("lm_head.weight", torch.zeros(1))])


def test_the_context_is_a_limit(model, tokenizer):
    writer = TransformersGenerator(model, tokenizer)
    (one,) = writer.generate(
        [GenerationRequest(np.ones(253, np.int32) * 40, (0,))], SamplingConfig(max_completion_length=50)
    )
    assert len(one.ids) <= writer.context_length - 253 == 3
    for ids in (np.ones(256, np.int32), np.zeros(0, np.int32)):
        with pytest.raises(XtkError, match="prompt"):
            writer.generate([GenerationRequest(ids, (0,))], SamplingConfig())


def test_a_text_that_ends_is_found_as_soon_as_it_is_written(tokenizer):
    stops = ["12", "s and", "é", " g"]
    (encoded,) = tokenizer.encode(["Anna has cups and gives é 12"])
    for stop in stops:
        watch, text = StopStringDetector(tokenizer, (stop,)), b""
        for token in encoded.ids.tolist():
            text += tokenizer.vocabulary.bytes_of(token)
            assert watch.add_token(token) == (stop.encode() in text)
            if stop.encode() in text:
                break
        else:
            raise AssertionError(stop)
    one, other = (tokenizer.vocabulary.token_of_bytes[byte] for byte in (b"1", b"2"))
    watch = StopStringDetector(tokenizer, ("12",))
    assert [watch.add_token(token) for token in (one, 2, other, one, other)] == [False, False, False, False, True]
