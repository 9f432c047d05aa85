"""xtk.enable_packing: packed batches equal separate documents, and all other inputs are unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from small_inputs import sentences, write_jsonl
from transformers import AutoModelForCausalLM, MixtralConfig

import xtk


@pytest.fixture(scope="module")
def cache(run, pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("caches")
    data = write_jsonl(folder / "data.jsonl", sentences(6, seed=3))
    run("cache-teacher", pair.teacher, data, "-o", folder / "cache")
    return xtk.TeacherCache(folder / "cache")


@pytest.fixture(params=["student", "teacher"])  # Llama and Qwen3
def folder(request, pair):
    return getattr(pair, request.param)


def losses_and_gradients(model, batch, loss):
    model.zero_grad(set_to_none=True)
    total = loss(model.model(**batch.model_inputs).last_hidden_state, model.lm_head, batch)
    total.backward()
    return float(total.detach()), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_packed_documents_have_the_loss_and_gradient_of_padded_ones(pair, cache):
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    loss = xtk.DistillationLoss("ce", "byte-kl")
    padded, packed = (
        xtk.DistillationCollator(pair.student, cache, loss, packing=packing)(range(6)) for packing in (False, True)
    )
    expected_loss, gradients = losses_and_gradients(model, padded, loss)
    xtk.enable_packing(model)
    assert model.config._attn_implementation == "xtk_general"
    for batch in (packed, padded):
        packed_loss, packed_gradients = losses_and_gradients(model, batch, loss)
        assert packed_loss == pytest.approx(expected_loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-6, rtol=1e-4)


def test_padded_batches_and_generation_equal_the_unpacked_model(folder):
    plain_model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = copy.deepcopy(plain_model)
    xtk.enable_packing(model)
    ids = torch.tensor([[0, 0, 0, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24, 25, 26, 27]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])  # padded on the left, as for generation
    with torch.no_grad():
        found, expected = (network(input_ids=ids, attention_mask=mask).logits for network in (model, plain_model))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"num_beams": 2}):
        generated = [
            network.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **options)
            for network in (model, plain_model)
        ]
        assert torch.equal(*generated), options


def test_packed_mixture_of_experts_equals_separate_documents():
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).eval()
    documents = [torch.arange(5)[None], torch.arange(20, 27)[None]]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=ids).logits for ids in documents], dim=1)
        xtk.enable_packing(model)
        packed = model(input_ids=torch.cat(documents, dim=1), position_ids=positions).logits
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
