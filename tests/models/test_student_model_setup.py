"""Setup of students: trained parameters, gradients, adapters, checkpoints, and the saved model."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import small_inputs
import torch
from full_logits_reference import assert_equals_full_logits, full_logits_gradients, fused_gradients
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import (
    StudentModelConfig,
    load_student,
    parameter_groups,
    save_final_student,
    save_trainable,
)
from xtk.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
HEADS = ("embed_tokens", "lm_head")
ADAPTERS = {
    "LoRA": {"lora_r": 4},
    "LoRA of two modules": {"lora_r": 4, "lora_alpha": 6, "lora_target_modules": ("q_proj", "mlp.down_proj")},
    "LoRA, embedding and head trained whole": {"lora_r": 4, "lora_modules_to_save": HEADS},
    "LoRA over bf16": {"lora_r": 4, "dtype": "bfloat16"},
    "DoRA": {"lora_r": 4, "use_dora": True},
    "QLoRA, 4 bits": {"lora_r": 4, "load_in_4bit": True},
    "QLoRA, 8 bits": {"lora_r": 4, "load_in_8bit": True},
}


def load_prepared_student(
    folder: Path, checkpoint: Path | None = None, adapter: Path | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    source, config = ModelRef(folder, adapter), StudentModelConfig(**options)
    return load_student(source, config, Tokenizer(folder), checkpoint=checkpoint, device=CPU).eval()


def perturb_trained_parameters(model: Any) -> Any:
    """Change all trainable parameters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@torch.no_grad()
def compute_logits(model: Any) -> Tensor:
    return model(input_ids=torch.arange(3, 40)[None]).logits[0].float()


def trainable_parameters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def equal_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]) for name, tensor in tensors.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("side", ["student", "teacher"])  # untied and tied embeddings
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapter_gradients_equal_the_reference_and_checkpoints_restore_the_adapter(pair, tmp_path, kind, side):
    folder, options = getattr(pair, side), ADAPTERS[kind]
    model = perturb_trained_parameters(load_prepared_student(folder, **options))
    gradients = assert_equals_full_logits(model, 2e-2 if options.get("dtype") else 2e-5)
    fully_trained = set(options.get("lora_modules_to_save", ()))
    assert all("lora_" in name or any(module in name for module in fully_trained) for name in gradients)
    assert gradients.keys() == trainable_parameters(model).keys()
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    save_trainable(model, tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").glob("model*"))
    restored = load_prepared_student(folder, tmp_path / "checkpoint", **options)
    assert equal_tensors(trainable_parameters(restored), trainable_parameters(model))
    assert torch.equal(compute_logits(restored), compute_logits(model))


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("kind", ["LoRA", "LoRA, embedding and head trained whole", "DoRA", "QLoRA, 4 bits"])
def test_final_student_has_the_logits_of_training_and_can_be_trained_further(pair, tmp_path, kind, side):
    folder, options = getattr(pair, side), ADAPTERS[kind]
    model = perturb_trained_parameters(load_prepared_student(folder, **options))
    expected_logits, expected_parameters = compute_logits(model), trainable_parameters(model)
    student = tmp_path / "student"
    save_final_student(model, student)
    if "load_in_4bit" in options:
        adapter = student
        assert not (student / "config.json").exists()
    else:
        adapter = student / "adapter"
        assert not (student / "adapter_config.json").exists()
        merged = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
        torch.testing.assert_close(compute_logits(merged), expected_logits, rtol=1e-4, atol=1e-4)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    quantization = {name: value for name, value in options.items() if name.startswith("load_")}
    restored = load_prepared_student(folder, adapter=adapter, **quantization)
    assert torch.equal(compute_logits(restored), expected_logits)
    assert equal_tensors(trainable_parameters(restored), expected_parameters)


def test_frozen_parameters_have_no_gradient_and_others_are_unchanged(pair):
    all_gradients = assert_equals_full_logits(load_prepared_student(pair.student), 2e-5)
    for patterns, num_frozen in (
        (("lm_head",), 1),
        ((r"layers\.0\.", "embed_tokens"), 10),
        (("norm",), 5),
        ((r"^(?!lm_head)",), len(all_gradients) - 1),
    ):
        gradients = assert_equals_full_logits(load_prepared_student(pair.student, freeze=patterns), 2e-5)
        assert len(gradients) == len(all_gradients) - num_frozen
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, all_gradients[name], rtol=1e-6, atol=1e-9)


def test_tied_embeddings_are_frozen_by_either_name(pair):
    for name in HEADS:
        model = load_prepared_student(pair.teacher, freeze=(name,))
        assert not model.get_input_embeddings().weight.requires_grad
        assert not model.get_output_embeddings().weight.requires_grad


@pytest.mark.long
# Code generated by inductor has to be compiled, which takes a minute.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_backbone_has_the_same_gradients_and_parameter_names(pair, tmp_path, backend):
    plain_student = load_prepared_student(pair.student)
    compiled = load_prepared_student(pair.student)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the new name of this option does not exist in all versions
        compiled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    backbone = BackboneWithHead(compiled)
    compiled.train()
    stats = torch._dynamo.utils.counters["stats"]
    graphs_before = stats["unique_graphs"]
    backbone.compile_backbone(backend)
    for length in (12, 23, 31):
        loss, gradients = full_logits_gradients(plain_student, length)
        compiled_loss, compiled_gradients = fused_gradients(backbone, length)
        torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-5)
        assert compiled_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                compiled_gradients[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
            )
    graphs = stats["unique_graphs"]
    assert graphs > graphs_before
    fused_gradients(backbone, 17)
    assert stats["unique_graphs"] == graphs  # one graph for rows of any length
    save_final_student(compiled, tmp_path / "student")
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float32)
    assert equal_tensors(trainable_parameters(restored), trainable_parameters(plain_student))


def test_requested_attention_implementation_is_used(pair):
    logits = {}
    for name in ("eager", "sdpa"):
        model = load_prepared_student(pair.student, attn_implementation=name)
        assert model.config._attn_implementation == name
        logits[name] = compute_logits(model)
    torch.testing.assert_close(logits["eager"], logits["sdpa"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_9"])
def test_unavailable_attention_implementation_is_refused(pair, name):
    with pytest.raises(XtkError) as raised:
        load_prepared_student(pair.student, attn_implementation=name)
    assert name in (raised.value.where or "")
    assert "sdpa" in (raised.value.hint or "")


@pytest.fixture(scope="module")
def models_with_missing_rows(pair, tmp_path_factory) -> dict[str, Path]:
    """Return both models with fewer embedding rows than tokens: the last tokens have no row."""
    folders = {}
    for side in ("student", "teacher"):
        folder = Path(shutil.copytree(getattr(pair, side), tmp_path_factory.mktemp("narrow") / side))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.resize_token_embeddings(len(Tokenizer(folder)) - 9)
        model.save_pretrained(folder)
        folders[side] = folder
    return folders


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_models_with_missing_embedding_rows_are_refused(models_with_missing_rows, side):
    with pytest.raises(XtkError, match="embedding has only") as raised:
        load_prepared_student(models_with_missing_rows[side])
    assert "resize_token_embeddings" in (raised.value.hint or "")


def decay_group_names(model: Any) -> tuple[set[str], set[str]]:
    """Return the names of parameters with and without weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {
        group["weight_decay"]: {names[weight] for weight in group["params"]} for group in parameter_groups(model, 0.1)
    }
    return groups.get(0.1, set()), groups.get(0.0, set())


def test_only_trainable_matrices_have_weight_decay(pair):
    decay, no_decay = decay_group_names(load_prepared_student(pair.teacher))
    assert "model.embed_tokens.weight" in decay
    assert "lm_head.weight" not in decay  # tied to the embedding, listed once
    assert all("norm" in name for name in no_decay)
    assert len(no_decay) == 2 * 4 + 1  # per layer two norms and the norms of queries and keys; one final norm
    model = load_prepared_student(pair.teacher, lora_r=2, use_dora=True)
    decay, no_decay = decay_group_names(model)
    assert decay | no_decay == trainable_parameters(model).keys()
    assert all("lora_A" in name or "lora_B" in name for name in decay)
    assert all("magnitude" in name for name in no_decay)
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    decay, no_decay = decay_group_names(gpt2)
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"} <= decay
    assert all(name.endswith(".bias") or "ln_" in name for name in no_decay)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2, "head_dim": 4}
    decay, no_decay = decay_group_names(
        GptOssForCausalLM(GptOssConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=1, **sizes))
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" in decay
    assert {"model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.experts.down_proj_bias"} <= no_decay


INVALID_OPTIONS = [
    ({"freeze": ("embed_token$",)}, "no parameter of the student called 'embed_token$'; did you mean embed_tokens?"),
    ({"freeze": ("layers[",)}, "is not a valid regular expression"),
    ({"freeze": (".",)}, "nothing would be trained"),
    ({"dtype": "float16"}, "no training dtype called 'float16'"),
    ({"load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
    ({"load_in_4bit": True}, "weights are quantized and cannot be trained"),
    ({"lora_alpha": 8}, "--lora-alpha needs LoRA adapters, but --lora-r is 0"),
    ({"lora_r": -1}, "--lora-r is -1, but must be at least 0"),
    ({"lora_r": 4, "lora_dropout": 1.0}, "--lora-dropout is 1.0, but must be at least 0 and below 1"),
    (
        {"lora_r": 4, "lora_target_modules": ("q_projj",)},
        "no module of the student called 'q_projj'; did you mean q_proj?",
    ),
    ({"lora_r": 4, "lora_target_modules": ("input_layernorm",)}, "peft cannot add LoRA adapters with these options"),
    ({"lora_r": 4, "lora_modules_to_save": ("head",)}, "no module of the student called 'head'"),
    ({"lora_r": 4, "lora_target_modules": ("lm_head",)}, "embedding and output head share one weight"),
]


@pytest.mark.parametrize(("options", "message"), INVALID_OPTIONS)
def test_invalid_student_options_are_refused(pair, options, message):
    with pytest.raises(XtkError) as raised:
        load_prepared_student(pair.teacher, **options)
    assert message in raised.value.what


def test_second_adapter_on_an_adapter_student_is_refused(pair, tmp_path):
    save_trainable(load_prepared_student(pair.student, lora_r=2), tmp_path / "adapter")
    with pytest.raises(XtkError, match="is a LoRA adapter already"):
        load_prepared_student(pair.student, adapter=tmp_path / "adapter", lora_r=4)


def test_identity_options_contain_only_what_changes_the_student():
    assert StudentModelConfig().identity_options() == {}
    assert StudentModelConfig(torch_compile=True, attn_implementation="sdpa").identity_options() == {}
    options = StudentModelConfig(
        lora_r=4, lora_target_modules=("q_proj",), freeze=("norm",), dtype="bfloat16"
    ).identity_options()
    assert options == {"lora_r": 4, "lora_target_modules": ["q_proj"], "freeze": ["norm"], "dtype": "bfloat16"}
    assert json.loads(json.dumps(options)) == options


def gemma_3_with_images(text: dict[str, Any]) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


def qwen_3_5_with_images(text: dict[str, Any]) -> Any:
    """Return a small Qwen 3.5; AutoModelForCausalLM of transformers drops its weights of images."""
    linear = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
              "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
              "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config={**text, **linear}, vision_config=vision))


def test_a_model_without_a_causal_class_is_refused_in_one_sentence(tmp_path):
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)).save_pretrained(
        tmp_path
    )
    with pytest.raises(XtkError, match=r"^transformers has no causal language model for .* \(Qwen2_5_VL\)") as raised:
        load_causal_lm(ModelRef(tmp_path))
    assert len(str(raised.value.what)) < 120


@pytest.mark.parametrize("make", [gemma_3_with_images, qwen_3_5_with_images])
@pytest.mark.parametrize("lora_r", [0, 2])
def test_image_parts_of_a_multimodal_student_are_frozen_and_kept(tmp_path, lora_r, make):
    """All trainable parameters get a gradient from text, as data parallelism requires; the others stay as they are."""
    tokenizer = Tokenizer(small_inputs.make_student_tokenizer(tmp_path))
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 64}  # fmt: skip
    original = make(text)
    original.save_pretrained(tmp_path)
    model = load_student(ModelRef(tmp_path), StudentModelConfig(lora_r=lora_r), tokenizer, device=torch.device("cpu"))
    BackboneWithHead(model)(torch.arange(3, 9)[None]).sum().backward()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = [name for name, parameter in trained if parameter.grad is None and "lm_head" not in name]
    assert trained
    assert unused == []
    save_final_student(model, tmp_path / "student")
    weights, saved = original.state_dict(), type(original).from_pretrained(tmp_path / "student").state_dict()
    assert saved.keys() == weights.keys()
    image_weights = [name for name in weights if "vis" in name]
    assert image_weights
    assert all(torch.equal(saved[name], weights[name]) for name in image_weights)
