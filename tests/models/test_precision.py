"""What `auto` stands for: bf16 and the checkpoint's own dtype on a GPU that has bf16, float32 on a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from xtk_processes import run_xtk

from xtk import terminal
from xtk.commands.cache_teacher import CacheTeacherOptions, _cache_request
from xtk.commands.distill import read_configs, with_resolved_defaults
from xtk.commands.distill_options import DistillOptions, OnPolicyDistillOptions
from xtk.commands.recorded_run_options import recipe_options
from xtk.losses.spec import parse_losses
from xtk.models import precision
from xtk.models.precision import describe_device, resolve_dtype
from xtk.models.student_model_setup import StudentModelConfig
from xtk.teachers.online_teacher import parse_online_teacher
from xtk.training.train_config import TrainConfig


@pytest.fixture
def gpu(monkeypatch) -> None:
    """A machine that seems to have a GPU with bf16, where decisions are made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


def with_dtype(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Return a copy of a model with its weights in another dtype."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: one.to(dtype) for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"),
                                             (torch.float32, "float32")])  # fmt: skip
def test_a_model_on_a_gpu_has_the_dtype_of_its_checkpoint(pair, tmp_path, gpu, dtype, name):
    model = with_dtype(pair.teacher, tmp_path / "model", dtype)
    assert resolve_dtype("auto", model) == name
    assert resolve_dtype("float16", model) == "float16"
    assert resolve_dtype("auto", None) == "float32"  # on a server
    (tmp_path / "without weights").mkdir()
    assert resolve_dtype("auto", tmp_path / "without weights") == "bfloat16"
    options = CacheTeacherOptions(teacher=str(model), output="cache", data=("corpus.jsonl",))
    assert _cache_request(options, model, None).teacher.dtype == name
    online = parse_online_teacher(str(model), long_documents="refuse", trust_remote_code=False)
    assert online.request.teacher.dtype == name
    online = parse_online_teacher(f"{model}:dtype=float32", long_documents="refuse", trust_remote_code=False)
    assert online.request.teacher.dtype == "float32"


def test_a_model_on_a_cpu_is_computed_in_float32(pair, tmp_path):
    model = with_dtype(pair.teacher, tmp_path / "model", torch.bfloat16)
    assert resolve_dtype("auto", model) == "float32"
    options = CacheTeacherOptions(teacher=str(model), output="cache", data=("corpus.jsonl",))
    assert _cache_request(options, model, None).teacher.dtype == "float32"


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", ""])
def test_a_large_model_on_a_processor_with_bf16_has_a_note(pair, capability, monkeypatch, capsys):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    monkeypatch.setattr(terminal._terminal, "noted", set())
    assert resolve_dtype("auto", pair.teacher) == "float32"
    assert "bf16" not in capsys.readouterr().err  # it is small
    monkeypatch.setattr(precision, "NOTED_PARAMETERS", 1)
    assert resolve_dtype("auto", pair.teacher) == "float32"
    assert ("--dtype bfloat16" in capsys.readouterr().err) == bool(capability)


def test_a_student_trains_in_bf16_with_a_token_budget_on_a_gpu(gpu):
    losses = tuple(parse_losses(["ce"]))
    config = TrainConfig(losses=losses)
    assert (config.mixed_precision, config.max_batch_tokens) == ("bf16", 16384)
    config = TrainConfig(losses=losses, mixed_precision="no", max_batch_tokens=0)
    assert (config.mixed_precision, config.max_batch_tokens) == ("no", 0)
    config = TrainConfig(losses=losses, preparation=StudentModelConfig(lora_r=4, dtype="bfloat16"))
    assert config.mixed_precision == "bf16"


def test_the_precision_of_accelerate_launch_is_used_unless_the_command_has_one(monkeypatch):
    losses = tuple(parse_losses(["ce"]))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert TrainConfig(losses=losses).mixed_precision == "bf16"
    assert TrainConfig(losses=losses, mixed_precision="no").mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert TrainConfig(losses=losses).mixed_precision == "no"


def test_a_gpu_without_bf16_trains_in_float32(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    config = TrainConfig(losses=tuple(parse_losses(["ce"])))
    assert (config.mixed_precision, config.max_batch_tokens) == ("no", 16384)


def test_the_recipe_has_what_auto_stood_for(pair, corpus, gpu):
    common = {"student": str(pair.student), "cache": (str(corpus),), "output": "out", "teacher": (str(pair.teacher),)}
    options = OnPolicyDistillOptions(**common)
    _, *configs = read_configs(options)
    assert recipe_options(with_resolved_defaults(options, *configs))["rollout_dtype"] == "auto"  # only vLLM has one
    options = OnPolicyDistillOptions(**common, rollout_backend="vllm")
    _, *configs = read_configs(options)
    kept = recipe_options(with_resolved_defaults(options, *configs))
    assert (kept["mixed_precision"], kept["max_batch_tokens"], kept["rollout_dtype"]) == ("bf16", 16384, "bfloat16")
    options = DistillOptions(**common, mixed_precision="no")
    _, *configs = read_configs(options)
    assert recipe_options(with_resolved_defaults(options, *configs))["mixed_precision"] == "no"


@pytest.mark.parametrize(("cores", "processes", "workers"), [(16, 1, 4), (16, 4, 2), (5, 1, 3), (2, 1, 0), (8, 8, 0)])
def test_a_run_on_a_gpu_has_loader_processes_as_the_cores_allow(corpus, pair, gpu, monkeypatch, cores, processes,
                                                                workers):  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    common = {"student": str(pair.student), "cache": (str(corpus),), "output": "out", "num_processes": processes}

    def resolved(**others):
        options = DistillOptions(**common, **others)
        _, *configs = read_configs(options)
        kept = recipe_options(with_resolved_defaults(options, *configs))["dataloader_num_workers"]
        assert kept == configs[1].dataloader_num_workers
        assert "dataloader_num_workers" not in configs[0].identity(1)  # a run resumes on a machine with other cores
        return kept

    assert resolved() == workers
    assert resolved(dataloader_num_workers=1) == 1
    assert resolved(teacher=(str(pair.teacher),)) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved() == 0


def test_a_run_on_a_cpu_states_float32_in_its_recipe(pair, corpus, tmp_path):
    done = run_xtk("distill", pair.student, corpus, "--loss", "ce", "--max-steps", 1, "-o", tmp_path / "out")
    assert "1 process on cpu" in done.stderr
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert recipe["mixed_precision"] == recipe["identity"]["mixed_precision"] == "no"
    assert recipe["max_batch_tokens"] == recipe["dataloader_num_workers"] == 0


def test_the_first_line_names_the_gpu_and_the_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    device = torch.device("cuda", 0)
    assert describe_device(device, "bf16", "float32") == "cuda:0 (NVIDIA H100), bf16"
    assert describe_device(device, "no", "float32") == "cuda:0 (NVIDIA H100), float32"
    assert describe_device(torch.device("cpu"), "no", "float32") == "cpu"
