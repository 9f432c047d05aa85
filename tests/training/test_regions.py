"""What a student learns from each region of conversations, from a teacher with other markers."""

import json

import pytest
import torch
from chat_families import write_family
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

CITIES = {"Paris": "get_weather", "Berlin": "get_time"}
MARKS = ["</think>", "<tool_call>", "<|im_end|>"]


def write_model(folder, *, seed: int):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def conversation(city: str) -> list[dict]:
    call = {"type": "function", "function": {"name": CITIES[city], "arguments": {"city": city}}}
    return [
        {"role": "user", "content": f"Now in {city}?"},
        {"role": "assistant", "reasoning_content": f"I call {city}.", "content": "", "tool_calls": [call]},
    ]


@pytest.fixture(scope="module")
def taught(run, tmp_path_factory):
    """A student with `<think>` and `<tool_call>`, and a cache of a teacher that was trained to answer with its own."""
    folder = tmp_path_factory.mktemp("regions")
    teacher = write_model(write_family("mistral", folder), seed=1)
    student = write_model(write_family("smollm3", folder), seed=2)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": conversation(city)}) + "\n" for city in CITIES))
    run("distill", teacher, data, "--loss", "ce", *TRAINING, "-o", folder / "teacher")
    run("cache-teacher", folder / "teacher", data, "-o", folder / "cache")
    return student, folder


TRAINING = ["--max-steps", "150", "--learning-rate", "3e-3", "--max-grad-norm", "1", "--save-steps", "0"]


def answers(student) -> dict[str, str]:
    tokenizer = AutoTokenizer.from_pretrained(student)
    model = AutoModelForCausalLM.from_pretrained(student).eval()
    found = {}
    for city in CITIES:
        prompt = tokenizer.apply_chat_template(
            conversation(city)[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, max_new_tokens=120, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        found[city] = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    return found


def test_it_learns_to_reason_to_call_a_tool_and_to_stop_from_a_teacher_with_other_markers(run, taught, tmp_path):
    student, folder = taught
    run("distill", student, folder / "cache", *TRAINING, "--logging-steps", "50", "-o", tmp_path / "run")
    for city, answer in answers(tmp_path / "run").items():
        call = json.dumps({"name": CITIES[city], "arguments": {"city": city}})
        assert answer == f"<think>\nI call {city}.\n</think>\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "region_tokens/answer" in line or "region_tokens/tool-call" in line]
    first, last = logged[0], logged[-1]
    for region in ("reasoning", "reasoning-end", "tool-call", "end-of-turn"):
        assert first[f"region_loss/{region}"] > last[f"region_loss/{region}"] > 0
        assert first[f"region_tokens/{region}"] > 0
    assert "region_tokens/markup" not in first


def test_without_the_end_of_turn_it_does_not_learn_to_stop(run, taught, tmp_path):
    student, folder = taught
    regions = ["--train-on", "answer,reasoning,reasoning-end,tool-call"]
    run("distill", student, folder / "cache", *TRAINING, *regions, "-o", tmp_path / "run")
    for answer in answers(tmp_path / "run").values():
        assert "</think>\n<tool_call>" in answer
        assert "<|im_end|>" not in answer
