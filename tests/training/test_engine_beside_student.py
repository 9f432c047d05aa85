"""A generation engine beside the student: its memory, the place of its weights, the bound of its log-probabilities."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from xtk.engines.backend import SHARED_DEVICE_PART, BackendConfig, engine_beside_student
from xtk.models.causal_lm import load_model_config
from xtk.models.resolver import ModelRef
from xtk.rollouts.prompts import tokenize_prompts
from xtk.rollouts.rollout_record import Prompt
from xtk.text.document import Document, Segment
from xtk.text.tokenizer import Tokenizer
from xtk.training import student_generator
from xtk.training.on_policy_config import OnPolicyConfig
from xtk.training.student_generator import StudentGenerator, max_difference_in_float32


def test_an_engine_on_the_device_of_the_student_leaves_memory_unless_the_user_chose():
    assert engine_beside_student({"max_model_len": 64}) == {"max_model_len": 64, "gpu_memory_utilization": 0.3}
    for chosen in ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 1 << 30}):
        assert engine_beside_student(chosen) == chosen


def generator_of(backend, pair, device, prompts=()):
    model = SimpleNamespace(device=torch.device("cpu"), parameters=lambda: [torch.zeros(3)])
    config = BackendConfig(ModelRef(pair.student), None, 64, {})
    return StudentGenerator(OnPolicyConfig(backend=backend), Tokenizer(pair.student), SimpleNamespace(model=model),
                            device, config, lambda *_: None, Path("nowhere"), prompts, mixed_precision="bf16",
                            seed=0)  # fmt: skip


def test_generation_with_the_training_model_on_a_gpu_names_the_faster_engine(monkeypatch, pair):
    monkeypatch.setattr(student_generator.process_group, "barrier", lambda: None)
    described = {
        device: generator_of("transformers", pair, torch.device(device)).describe(1) for device in ("cpu", "cuda")
    }
    assert "vllm" not in described["cpu"]
    assert "--rollout-backend vllm is faster" in described["cuda"]


def test_the_engine_of_a_student_with_offloaded_weights_is_on_the_device_that_trains(monkeypatch, pair):
    """FSDP with --fsdp-offload keeps the weights in CPU memory."""
    opened = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(student_generator, "SubprocessGenerator", lambda *given: opened.append(given))
    monkeypatch.setattr(student_generator.process_group, "world_size", lambda: 8)
    monkeypatch.setattr(student_generator.process_group, "barrier", lambda: None)
    generator_of("vllm", pair, torch.device("cuda", 5))
    ((given, name, devices),) = opened
    assert name == "vllm"
    assert devices == {"CUDA_VISIBLE_DEVICES": "5"}
    assert given.options["engine"]["gpu_memory_utilization"] == SHARED_DEVICE_PART


def test_an_engine_reserves_memory_for_the_longest_prompt_and_its_completion_only(monkeypatch, pair):
    opened = []
    monkeypatch.setattr(student_generator, "SubprocessGenerator", lambda *given: opened.append(given[0]))
    monkeypatch.setattr(student_generator.process_group, "barrier", lambda: None)
    tokenizer = Tokenizer(pair.student)
    texts = ["one two", "one two three four five"]
    prompts = [Prompt(number, Document((Segment("prompt", text, train=False),))) for number, text in enumerate(texts)]
    generator_of("vllm", pair, torch.device("cpu"), prompts)
    lengths = [len(tokens) for tokens in tokenize_prompts(tokenizer, [prompt.document for prompt in prompts], {})]
    longest = max(lengths) + OnPolicyConfig().sampling.max_completion_length
    context = load_model_config(ModelRef(pair.student)).max_position_embeddings
    assert opened[0].options["engine"]["max_model_len"] == min(longest, context)


def test_the_bound_of_float32_log_probabilities_allows_for_tf32_on_a_gpu():
    assert max_difference_in_float32(torch.device("cpu")) == 0.001
    assert max_difference_in_float32(torch.device("cuda")) == 0.01
