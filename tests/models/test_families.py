"""Students of many model families: losses and gradients equal those of the full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_logits_reference import assert_equals_full_logits
from transformers import AutoConfig, AutoModelForCausalLM

from xtk.models.backbone_with_head import BackboneWithHead

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "n_shared_experts": 1, "shared_expert_intermediate_size": 8,
}  # fmt: skip
GROUPS = {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **GROUPS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
LAYER_TYPES = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR = {
    **LAYER_TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
PER_LAYER = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4}
# Model types of transformers with configuration values in addition to SIZES; None: the value is left out.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {}, "qwen3": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {}, "mistral": {}, "ministral3": {}, "phi3": {},
    "gpt2": {}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]}, "gpt_neox": {}, "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {}, "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16}, "bloom": {}, "falcon": {"head_dim": None},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2}, "olmo": {}, "olmo2": {}, "olmo3": {}, "glm4": {},
    "stablelm": {}, "starcoder2": {}, "nemotron": {}, "smollm3": {}, "helium": {}, "bitnet": {}, "exaone4": {},
    "ernie4_5": {}, "seed_oss": {}, "apertus": {}, "lfm2": {}, "llama4_text": {**EXPERTS, "intermediate_size_mlp": 32},
    "gemma4_text": {**PER_LAYER, "global_head_dim": 8, "num_global_key_value_heads": 2},
    "mamba": {"state_size": 4}, "falcon_mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 4, "n_groups": 1, "expand": 2},
    "recurrent_gemma": {"lru_width": 16, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "jamba": {
        **EXPERTS, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "qwen3_next": {**EXPERTS, **LINEAR}, "qwen3_5_text": LINEAR,
    "granitemoe": EXPERTS, "mixtral": EXPERTS, "qwen2_moe": EXPERTS, "qwen3_moe": EXPERTS, "gpt_oss": EXPERTS,
    "olmoe": EXPERTS, "phimoe": EXPERTS, "glm4_moe": GROUPS, "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "head_dim": 4},
}  # fmt: skip
# The decoder's head has additional layers before its matrix: the backbone returns logits instead of hidden states.
WITH_LOGITS = {"modernbert-decoder": {}}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_LOGITS])
def test_gradients_of_every_family_equal_the_full_logits_reference(family):
    options = {**SIZES, **(FAMILIES | WITH_LOGITS)[family]}
    configuration = AutoConfig.for_model(family, **{key: value for key, value in options.items() if value is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32).eval()
    assert (BackboneWithHead(model).head.weight is None) == (family in WITH_LOGITS)
    gradients = assert_equals_full_logits(model, 1e-5)
    # A parameter without gradient would have no optimizer state, and the run could not be resumed.
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
