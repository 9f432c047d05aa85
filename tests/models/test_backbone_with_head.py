"""Backbone and separate output head: losses, gradients and logits equal those of the full model."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import small_inputs
import torch
from full_logits_reference import assert_equals_full_logits, full_logits_loss, make_cells
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    PhiConfig,
)

from xtk.errors import XtkError
from xtk.losses.head import fused_loss
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import check_embedding_rows
from xtk.models.output_head import ChunkedLogits
from xtk.text.tokenizer import Tokenizer
from xtk.training.student_with_losses import StudentWithLoss

V, T = 61, 12
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
CONFIGURATIONS = {
    "Llama": lambda: LlamaConfig(**SIZES),
    "tied embeddings": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "a bias (Phi)": lambda: PhiConfig(**SIZES),
    "a soft cap (Gemma 2)": lambda: Gemma2Config(**SIZES, final_logit_softcapping=2.0),
    "a scale (Cohere)": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "a scale (Cohere 2)": lambda: Cohere2Config(**SIZES, logit_scale=0.25),
    "a divisor (Granite)": lambda: GraniteConfig(**SIZES, logits_scaling=8.0),
    "a scale (HyperCLOVA X)": lambda: HyperCLOVAXConfig(**SIZES, logits_scaling=3.0),
    "a scale (Falcon-H1)": lambda: FalconH1Config(
        **SIZES, lm_head_multiplier=0.3, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=8
    ),
}
LORA = {
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA, not on the head": {"target_modules": ["q_proj"]},
    "LoRA, the head trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def make_model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    base = "Llama" if kind in LORA else kind
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[base](), dtype=dtype)
    if kind in LORA:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft uses an API that transformers calls deprecated
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **LORA[kind]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as after training
                parameter.data.normal_(0, 0.3)
        model = model.to(dtype)
    return model.eval()


@pytest.mark.parametrize("kind", [*CONFIGURATIONS, *LORA])
def test_losses_and_gradients_equal_the_full_logits_reference(kind):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = make_model(kind, dtype)
        assert BackboneWithHead(model).head.weight is not None
        assert_equals_full_logits(model, tolerance)


@pytest.mark.parametrize("kind", [*CONFIGURATIONS, *LORA])
def test_chunked_logits_equal_those_of_the_model(kind):
    model = make_model(kind)
    backbone, ids = BackboneWithHead(model), torch.arange(3, 3 + T)[None]
    with torch.no_grad():
        states = backbone(ids)[0]
        assert states.shape == (T, 16)
        compute_logits = ChunkedLogits(backbone.head, states, 5)
        found = torch.cat([compute_logits(states[start : start + 5]).clone() for start in range(0, T, 5)])
        torch.testing.assert_close(found, model(input_ids=ids).logits[0])


def test_only_trainable_parameters_have_a_gradient():
    model = make_model("LoRA on the head")
    head = BackboneWithHead(model).head
    states = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    fused_loss(states, head, [make_cells(4, V).to(torch.device("cpu"), 1.0)], 2)[0].backward()
    assert head.weight.grad is None
    assert head.adapters[0].lora_b.grad.abs().sum() > 0
    assert head.adapters[0].lora_a.grad.abs().sum() > 0
    assert states.grad.abs().sum() > 0


def test_head_of_a_frozen_model_can_be_trained_alone():
    model = make_model("Llama")
    model.requires_grad_(False)
    head = model.get_output_embeddings().weight.requires_grad_()
    ids, positions = torch.arange(3, 9)[None], torch.arange(5)
    terms = [make_cells(5, V).to(torch.device("cpu"), 1.0)]
    StudentWithLoss(BackboneWithHead(model))(ids, positions.numpy(), terms)[0].backward()
    gradient, head.grad = head.grad, None
    full_logits_loss(make_cells(5, V), model(input_ids=ids).logits[0, :5]).backward()
    torch.testing.assert_close(gradient, head.grad)


def test_disabled_or_merged_adapter_is_not_applied_again():
    model = make_model("LoRA on the head")
    backbone, ids = BackboneWithHead(model), torch.arange(3, 9)[None]

    def compute_logits() -> Tensor:
        with torch.no_grad():
            states = backbone(ids)[0]
            return ChunkedLogits(backbone.head, states, len(states))(states)

    with_adapter, head = compute_logits(), backbone.head
    assert head.adapters
    with model.disable_adapter():
        torch.testing.assert_close(compute_logits(), model(input_ids=ids).logits[0].detach())
        assert not backbone.head.adapters
    model.merge_adapter()
    assert not backbone.head.adapters
    torch.testing.assert_close(compute_logits(), with_adapter)


def test_unused_logit_scale_and_softcap_of_the_config_are_ignored():
    model = make_model("Llama")
    model.config.logit_scale, model.config.final_logit_softcapping = 0.5, 3.0
    head = BackboneWithHead(model).head
    assert (head.scale, head.softcap) == (1.0, None)


def test_unknown_logit_transform_is_left_to_the_model():
    class CustomLogits(type(make_model("Llama"))):
        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            output = super().forward(*arguments, **keywords)
            output.logits = output.logits + output.logits.sin()
            return output

    model = CustomLogits(CONFIGURATIONS["Llama"]()).double().eval()
    backbone, ids = BackboneWithHead(model), torch.arange(3, 9)[None]
    assert backbone.head.weight is None
    torch.testing.assert_close(backbone(ids), model(input_ids=ids).logits)


def test_softcap_far_above_the_logits_is_detected():
    model = AutoModelForCausalLM.from_config(dataclasses.replace(CONFIGURATIONS["a soft cap (Gemma 2)"]()))
    model.config.final_logit_softcapping = 40.0
    for parameter in model.parameters():
        parameter.data.mul_(0.01)  # logits near 0, where a softcap has no visible effect
    assert BackboneWithHead(model).head.softcap == 40.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_softcap_is_detected_in_the_dtype_of_the_model(dtype, cap):
    configuration = dataclasses.replace(CONFIGURATIONS["a soft cap (Gemma 2)"](), final_logit_softcapping=cap)
    head = BackboneWithHead(AutoModelForCausalLM.from_config(configuration, dtype=dtype)).head
    assert head.weight is not None
    assert head.softcap == cap


@pytest.mark.parametrize("missing", [-7, 0, 1])
def test_head_with_fewer_rows_than_tokens_is_refused_and_padding_is_accepted(tmp_path, missing):
    tokenizer = Tokenizer(small_inputs.make_student_tokenizer(tmp_path))
    rows = len(tokenizer) - missing
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": rows}))
    if missing <= 0:
        check_embedding_rows(model, tokenizer)
        return
    with pytest.raises(XtkError, match=f"only {rows:,} rows for the {len(tokenizer):,} tokens of its tokenizer"):
        check_embedding_rows(model, tokenizer)
