"""Students that are prepared: what of them is trained, with which gradient, and what is kept of them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import small_inputs
import torch
from full_logits_reference import assert_as_the_whole_model, gradients_of_cut, gradients_of_whole
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
)

from xtk.errors import XtkError
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.student_model_setup import (
    StudentModelConfig,
    StudentSource,
    load_student,
    parameter_groups,
    save_final_student,
    save_trainable,
)
from xtk.tokens.tokenizer import Tokenizer

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


def prepared(folder: Path, checkpoint: Path | None = None, adapter: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    origin = StudentSource(folder, adapter, checkpoint)
    return load_student(origin, StudentModelConfig(**options), Tokenizer(folder), device=CPU).eval()


def as_if_trained(model: Any) -> Any:
    """Move all that is trained."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(input_ids=torch.arange(3, 40)[None]).logits[0].float()


def trained_numbers(model: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        one.dtype == expected[name].dtype and torch.equal(one, expected[name]) for name, one in found.items()
    )


@pytest.mark.parametrize("side", ["student", "teacher"])  # untied and tied embeddings
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapted_student_learns_as_its_whole_logits_say_and_comes_back_from_a_checkpoint(pair, tmp_path, kind, side):
    folder, options = getattr(pair, side), ADAPTERS[kind]
    model = as_if_trained(prepared(folder, **options))
    gradients = assert_as_the_whole_model(model, 2e-2 if options.get("dtype") else 2e-5)
    whole = set(options.get("lora_modules_to_save", ()))
    assert all("lora_" in name or any(part in name for part in whole) for name in gradients)
    assert gradients.keys() == trained_numbers(model).keys()
    assert {one.dtype for one in gradients.values()} == {torch.float32}
    save_trainable(model, tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").glob("model*"))
    again = prepared(folder, tmp_path / "checkpoint", **options)
    assert same(trained_numbers(again), trained_numbers(model))
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("kind", ["LoRA", "LoRA, embedding and head trained whole", "DoRA", "QLoRA, 4 bits"])
def test_a_finished_student_says_what_it_said_in_training_and_can_be_trained_on(pair, tmp_path, kind, side):
    folder, options = getattr(pair, side), ADAPTERS[kind]
    model = as_if_trained(prepared(folder, **options))
    said, numbers = logits_of(model), trained_numbers(model)
    student = tmp_path / "student"
    save_final_student(model, student)
    if "load_in_4bit" in options:
        adapter = student
        assert not (student / "config.json").exists()
    else:
        adapter = student / "adapter"
        assert not (student / "adapter_config.json").exists()
        merged = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
        torch.testing.assert_close(logits_of(merged), said, rtol=1e-4, atol=1e-4)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    packed = {name: value for name, value in options.items() if name.startswith("load_")}
    again = prepared(folder, adapter=adapter, **packed)
    assert torch.equal(logits_of(again), said)
    assert same(trained_numbers(again), numbers)


def test_frozen_parts_have_no_gradient_and_all_others_the_one_they_had(pair):
    whole = assert_as_the_whole_model(prepared(pair.student), 2e-5)
    for patterns, frozen in (
        (("lm_head",), 1),
        ((r"layers\.0\.", "embed_tokens"), 10),
        (("norm",), 5),
        ((r"^(?!lm_head)",), len(whole) - 1),
    ):
        gradients = assert_as_the_whole_model(prepared(pair.student, freeze=patterns), 2e-5)
        assert len(gradients) == len(whole) - frozen
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-6, atol=1e-9)


def test_a_tied_matrix_is_frozen_by_either_name(pair):
    for name in HEADS:
        model = prepared(pair.teacher, freeze=(name,))
        assert not model.get_input_embeddings().weight.requires_grad
        assert not model.get_output_embeddings().weight.requires_grad


@pytest.mark.long
# What inductor writes has to be translated by a compiler, which takes a minute.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_body_gives_the_same_gradients_and_names(pair, tmp_path, backend):
    expected = prepared(pair.student)
    compiled = prepared(pair.student)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its new name is not in all versions
        compiled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    cut = BackboneWithHead(compiled)
    compiled.train()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    cut.compile_backbone(backend)
    for length in (12, 23, 31):
        loss, gradients = gradients_of_whole(expected, length)
        found, ours = gradients_of_cut(cut, length)
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
        assert ours.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
    graphs = stats["unique_graphs"]
    assert graphs > before
    gradients_of_cut(cut, 17)
    assert stats["unique_graphs"] == graphs  # one program for rows of any length
    save_final_student(compiled, tmp_path / "student")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float32)
    assert same(trained_numbers(again), trained_numbers(expected))


def test_attention_is_computed_as_asked_for(pair):
    said = {}
    for name in ("eager", "sdpa"):
        model = prepared(pair.student, attn_implementation=name)
        assert model.config._attn_implementation == name
        said[name] = logits_of(model)
    torch.testing.assert_close(said["eager"], said["sdpa"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_9"])
def test_an_attention_that_is_not_here_is_told(pair, name):
    with pytest.raises(XtkError) as raised:
        prepared(pair.student, attn_implementation=name)
    assert name in (raised.value.where or "")
    assert "sdpa" in (raised.value.hint or "")


@pytest.fixture(scope="module")
def narrow(pair, tmp_path_factory) -> dict[str, Path]:
    """Both models with fewer rows than tokens, so that their last tokens have none."""
    folders = {}
    for side in ("student", "teacher"):
        folder = Path(shutil.copytree(getattr(pair, side), tmp_path_factory.mktemp("narrow") / side))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.resize_token_embeddings(len(Tokenizer(folder)) - 9)
        model.save_pretrained(folder)
        folders[side] = folder
    return folders


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_resized_vocabulary_has_rows_near_the_mean_and_the_old_ones_say_what_they_said(narrow, side, tmp_path):
    folder = narrow[side]
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(XtkError, match="embedding has only") as raised:
        prepared(folder)
    assert "--resize-vocabulary" in (raised.value.hint or "")
    model, rows, tokens = prepared(folder, resize_vocabulary=True), old.config.vocab_size, len(Tokenizer(folder))
    assert tokens <= model.config.vocab_size < tokens + 64
    assert model.config.vocab_size % 64 == 0
    torch.testing.assert_close(logits_of(model)[:, :rows], logits_of(old), rtol=1e-5, atol=1e-6)
    for found, before in (
        (model.get_input_embeddings().weight, old.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, old.get_output_embeddings().weight),
    ):
        assert torch.equal(found[:rows], before)
        spread = before.std(0).max()
        assert (found[rows:] - before.mean(0)).abs().max() < 0.01 * spread
    assert_as_the_whole_model(model, 2e-5)
    save_trainable(as_if_trained(model), tmp_path / "checkpoint")
    again = prepared(folder, tmp_path / "checkpoint", resize_vocabulary=True)
    assert same(trained_numbers(again), trained_numbers(model))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").config.vocab_size == model.config.vocab_size


def test_new_rows_are_trained_whole_beside_adapters(narrow, tmp_path):
    with pytest.raises(XtkError, match="untrained") as raised:
        prepared(narrow["student"], resize_vocabulary=True, lora_r=4)
    assert "add --lora-modules-to-save embed_tokens,lm_head" in (raised.value.hint or "")
    options = {"resize_vocabulary": True, "lora_r": 4, "lora_modules_to_save": HEADS}
    model = as_if_trained(prepared(narrow["student"], **options))
    save_trainable(model, tmp_path / "checkpoint")
    again = prepared(narrow["student"], tmp_path / "checkpoint", **options)
    assert torch.equal(logits_of(again), logits_of(model))
    said = logits_of(model)
    save_final_student(model, tmp_path / "student")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), said, rtol=1e-4, atol=1e-4)


def names_that_decay(model: Any) -> tuple[set[str], set[str]]:
    """The names of what decays, and of what does not."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {group["weight_decay"]: {names[one] for one in group["params"]} for group in parameter_groups(model, 0.1)}
    return groups.get(0.1, set()), groups.get(0.0, set())


def test_matrices_decay_and_biases_norms_and_what_is_frozen_do_not(pair):
    decay, free = names_that_decay(prepared(pair.teacher))
    assert "model.embed_tokens.weight" in decay
    assert "lm_head.weight" not in decay  # the same matrix, once
    assert all("norm" in name for name in free)
    assert len(free) == 2 * 4 + 1  # two norms a layer, two of queries and keys, the last
    model = prepared(pair.teacher, lora_r=2, use_dora=True)
    decay, free = names_that_decay(model)
    assert decay | free == trained_numbers(model).keys()
    assert all("lora_A" in name or "lora_B" in name for name in decay)
    assert all("magnitude" in name for name in free)
    torch.manual_seed(0)
    small = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    decay, free = names_that_decay(small)
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"} <= decay
    assert all(name.endswith(".bias") or "ln_" in name for name in free)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2, "head_dim": 4}
    decay, free = names_that_decay(
        GptOssForCausalLM(GptOssConfig(vocab_size=32, num_attention_heads=2, num_key_value_heads=1, **sizes))
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" in decay
    assert {"model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.experts.down_proj_bias"} <= free


REFUSED = [
    ({"freeze": ("embed_token$",)}, "no parameter of the student called 'embed_token$'; did you mean embed_tokens?"),
    ({"freeze": ("layers[",)}, "is not a valid regular expression"),
    ({"freeze": (".",)}, "nothing would be trained"),
    ({"dtype": "float16"}, "no training dtype called 'float16'"),
    ({"load_in_4bit": True, "load_in_8bit": True}, "exclude each other"),
    ({"load_in_4bit": True}, "weights are quantized and cannot be trained"),
    ({"load_in_4bit": True, "lora_r": 4, "resize_vocabulary": True}, "--resize-vocabulary does not work with"),
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


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_cannot_be_prepared_is_told(pair, options, words):
    with pytest.raises(XtkError) as raised:
        prepared(pair.teacher, **options)
    assert words in raised.value.what


def test_a_student_that_is_an_adapter_is_not_adapted_again(pair, tmp_path):
    save_trainable(prepared(pair.student, lora_r=2), tmp_path / "adapter")
    with pytest.raises(XtkError, match="is a LoRA adapter already"):
        prepared(pair.student, adapter=tmp_path / "adapter", lora_r=4)


def test_what_does_not_change_the_student_is_not_part_of_its_identity():
    assert StudentModelConfig().identity_options() == {}
    assert StudentModelConfig(torch_compile=True, attn_implementation="sdpa").identity_options() == {}
    told = StudentModelConfig(
        lora_r=4, lora_target_modules=("q_proj",), freeze=("norm",), dtype="bfloat16"
    ).identity_options()
    assert told == {"lora_r": 4, "lora_target_modules": ["q_proj"], "freeze": ["norm"], "dtype": "bfloat16"}
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("lora_r", [0, 2])
def test_what_reads_images_is_frozen(tmp_path, lora_r):
    """All trained parameters of Gemma 3 with images get a gradient from text, as data parallelism needs."""
    tokenizer = Tokenizer(small_inputs.make_student_tokenizer(tmp_path))
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 64}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    configuration = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(configuration).save_pretrained(tmp_path)
    model = load_student(
        StudentSource(tmp_path), StudentModelConfig(lora_r=lora_r), tokenizer, device=torch.device("cpu")
    )
    BackboneWithHead(model)(torch.arange(3, 9)[None]).sum().backward()
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    unused = [name for name, one in trained if one.grad is None and "lm_head" not in name]
    assert trained
    assert unused == []
