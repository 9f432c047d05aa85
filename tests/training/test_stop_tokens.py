"""A base student of a chat teacher keeps its own stop token (arXiv 2609.20511), off-policy and on-policy."""

from __future__ import annotations

import json

import pytest
import small_inputs
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from xtk.losses.cells.stop_classes import StopClasses
from xtk.losses.spec import parse_losses
from xtk.models.resolver import ModelRef
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.text.tokenizer import Tokenizer
from xtk.training.distill import distill
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig

SPECIALS = ["<|begin_of_text|>", "<|endoftext|>", "<|im_end|>"]
BASE_STOP, CHAT_STOP, MAX_LENGTH = 1, 2, 20
TEXTS = [f"{name} has {number} {thing}." for name, number, thing in zip(
    small_inputs.NAMES, range(3, 13), small_inputs.THINGS, strict=True)]  # fmt: skip


def make_model(folder, stops: list[int], split: str = small_inputs.STUDENT_SPLIT):
    """Write a small model that has learned to continue the texts, and to stop with the first of its stop tokens."""
    backend = small_inputs.byte_level_tokenizer(split, 300, SPECIALS, TEXTS)
    small_inputs.save_tokenizer(backend, folder, bos_token=SPECIALS[0], eos_token=SPECIALS[BASE_STOP])
    torch.manual_seed(stops[0])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=304, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=BASE_STOP,
    ))  # fmt: skip
    tokenizer = Tokenizer(folder)
    rows = [torch.tensor([0, *tokens.ids.tolist(), stops[0]]) for tokens in tokenizer.encode(TEXTS)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids.clamp_min(0), labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    chat = [CHAT_STOP, BASE_STOP]
    return {
        "student": make_model(folder / "base", [BASE_STOP]),
        "one tokenizer": make_model(folder / "chat", chat),
        "two tokenizers": make_model(folder / "other", chat, small_inputs.TEACHER_SPLIT),
    }


def stop_probability_and_length(folder) -> tuple[float, float]:
    """Return the native stop token's mean probability after the texts, and the mean length of what is generated."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), Tokenizer(folder)
    probabilities, lengths = [], []
    for tokens in tokenizer.encode(TEXTS):
        ids = torch.tensor([[0, *tokens.ids.tolist()]])
        with torch.no_grad():
            probabilities.append(float(model(input_ids=ids).logits[0, -1].softmax(-1)[BASE_STOP]))
            torch.manual_seed(0)
            made = model.generate(
                ids[:, :4], attention_mask=torch.ones_like(ids[:, :4]), do_sample=True, top_k=0,
                eos_token_id=BASE_STOP, pad_token_id=BASE_STOP, max_new_tokens=MAX_LENGTH,
            )  # fmt: skip
        lengths.append(made.shape[1] - 4)
    return sum(probabilities) / len(TEXTS), sum(lengths) / len(TEXTS)


def train(student, teacher, folder, loss: str, is_on_policy: bool):
    data = folder / "data.jsonl"
    rows = [{"prompt": " ".join(text.split()[:2])} if is_on_policy else {"text": text} for text in TEXTS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    online_teacher = parse_online_teacher(f"{teacher}:top_k=16", long_documents="refuse", trust_remote_code=False)
    sampling = SamplingConfig(max_completion_length=MAX_LENGTH)
    recipe = TrainConfig(
        losses=tuple(parse_losses([loss])), max_steps=15, per_device_train_batch_size=10, learning_rate=6e-3,
        on_policy=OnPolicyConfig(sampling=sampling) if is_on_policy else None,
    )  # fmt: skip
    paths = RunPaths(ModelRef(student), (str(data),), (), folder / "out", online_teachers=(online_teacher,))
    distill(paths, recipe, LoggingConfig(), open_inputs(paths, recipe, Tokenizer(student)), force=False)
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "is_on_policy", "teacher"), [
    ("forward-kl", False, "one tokenizer"), ("byte-kl", True, "one tokenizer"),
    ("byte-kl", False, "two tokenizers"), ("bpm", True, "two tokenizers"),
])  # fmt: skip
def test_a_base_student_of_a_chat_teacher_still_stops(models, tmp_path, monkeypatch, loss, is_on_policy, teacher):
    student, teacher = models["student"], models[teacher]
    assert (Tokenizer(student).fingerprint == Tokenizer(teacher).fingerprint) == (teacher == models["one tokenizer"])
    probability, length = stop_probability_and_length(student)
    assert probability > 0.8
    for folder in (tmp_path / "classes", tmp_path / "single"):
        folder.mkdir()
    after, length_after = stop_probability_and_length(train(student, teacher, tmp_path / "classes", loss, is_on_policy))
    monkeypatch.setattr(StopClasses, "from_tokenizers", lambda *_: None)
    alone, length_alone = stop_probability_and_length(train(student, teacher, tmp_path / "single", loss, is_on_policy))
    print(f"{loss}: {probability:.2f}, {length} tokens; {after:.2f}, {length_after}; alone {alone:.2f}, {length_alone}")
    assert after > 0.8
    assert length_after < length + 2
    assert alone < 0.2  # token by token, the student unlearns its stop token
    assert length_alone > length_after + 3
