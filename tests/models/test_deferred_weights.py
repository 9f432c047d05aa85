"""Sharded models whose processes read only their shards equal those that were loaded whole and then sharded."""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import FAMILIES, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from xtk.errors import CorruptError
from xtk.models.causal_lm import load_causal_lm, silence_transformers
from xtk.models.deferred_weights import load_without_weights
from xtk.models.resolver import ModelRef
from xtk.parallel.fsdp_and_tensor_parallel import apply_fsdp, apply_tensor_parallel
from xtk.parallel.parallel_config import ParallelConfig, parse_parallel
from xtk.runs.sharded_state import local_tensor, read_model_shards

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# transformers renames or joins tensors of their files.
CONVERTED = {
    "gpt_neox", "jamba", "qwen3_next", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "glm4_moe",
    "deepseek_v2", "deepseek_v3",
}  # fmt: skip
# FSDP refuses them, however they are loaded: a module that is never split contains another one.
NESTED = {"mamba", "falcon_mamba"}
LAYOUTS = [
    *((family, "fsdp=2", "float32") for family in FAMILIES if family not in NESTED),
    *((family, "tp=2", "float32") for family in ("qwen3", "tied", "gemma2", "phi3", "gpt_oss")),
    *((family, "fsdp=2", "bfloat16") for family in ("tied", "gpt_oss", "gemma3_text")),
    ("both", "fsdp=2", "float32"),
]


def make_models(folder: Path) -> None:
    """Write a model of each family; `tied` and `both` have tied embeddings, which the files of `both` have twice."""
    families = FAMILIES | {name: {"tie_word_embeddings": True} for name in ("tied", "both")}
    for name, values in families.items():
        options = {key: value for key, value in {**SIZES, **values}.items() if value is not None}
        configuration = AutoConfig.for_model(name if name in FAMILIES else "qwen3", **options)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(configuration).save_pretrained(folder / name)
    weights = load_file(folder / "both" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "both" / "model.safetensors", metadata={"format": "pt"})


def shard(model: Any, parallel: ParallelConfig) -> None:
    if parallel.tp > 1:
        apply_tensor_parallel(model, parallel.mesh["tp"])
    apply_fsdp(model, model, parallel.mesh["fsdp"], bf16=False, cpu_offload=False)


def all_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: local_tensor(tensor) for name, tensor in (*model.state_dict().items(), *model.named_buffers())}


def ties(model: Any) -> list[int]:
    """Return, for each name of a parameter, the index of the first name of the same parameter."""
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return [parameters.index(parameter) for parameter in parameters]


def compare(ref: ModelRef, parallel: ParallelConfig) -> str:
    """Load and shard a model in both ways."""
    model = load_without_weights(ref, {})
    if model is None:
        return "loaded whole"
    shard(model, parallel)
    read_model_shards(model, model, ref.folder, CPU, CPU)
    expected = load_causal_lm(ref)
    shard(expected, parallel)
    tensors, expected_tensors = all_tensors(model), all_tensors(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
    assert ties(model) == ties(expected)
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.config.to_dict() == expected.config.to_dict()
    assert (model.training, model.name_or_path) == (expected.training, expected.name_or_path)
    if parallel.tp == 1:  # xtk computes the logits of a split head itself
        ids = torch.arange(3, 11)[None]
        assert torch.equal(*(of(input_ids=ids, use_cache=False).logits for of in (model, expected)))
    return "equal"


def refuse_nan_in_the_last_rows(folder: Path, parallel: ParallelConfig) -> str:
    """Read a model whose NaN is in the shard of one process; return the error."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 0] = float("nan")
    if torch.distributed.get_rank() == 0:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.distributed.barrier()
    model = load_without_weights(ModelRef(folder), {})
    shard(model, parallel)
    with pytest.raises(CorruptError) as raised:
        read_model_shards(model, model, folder, CPU, CPU)
    return str(raised.value)


def compare_all(rank: int, folder: Path, results: Any) -> None:
    """Run in a process of its own: put the result of each case into a queue."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    silence_transformers()
    meshes = {layout: parse_parallel(layout, 2).with_mesh(CPU) for layout in ("fsdp=2", "tp=2")}
    found: dict[Any, str] = {}
    for family, layout, dtype in LAYOUTS:
        try:
            found[family, layout, dtype] = compare(ModelRef(folder / family, dtype=dtype), meshes[layout])
        except Exception:
            found[family, layout, dtype] = traceback.format_exc()
    found["nan"] = refuse_nan_in_the_last_rows(folder / "qwen3", meshes["fsdp=2"])
    results.put(found)
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[Any, str]]:
    """The results of two processes."""
    folder = tmp_path_factory.mktemp("families")
    silence_transformers()
    make_models(folder)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=compare_all, args=(rank, folder, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    gathered = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
    return gathered


@pytest.mark.parametrize(("family", "layout", "dtype"), LAYOUTS)
def test_reading_shards_equals_sharding_a_loaded_model(results, family, layout, dtype):
    """Tensors of files that are converted, or of which one could be ignored, are read by transformers."""
    expected = "loaded whole" if family in CONVERTED | {"both"} else "equal"
    assert [of_process[family, layout, dtype] for of_process in results] == [expected] * 2


def test_every_process_reports_a_shard_that_is_not_finite(results):
    for of_process in results:
        assert "weights that are NaN or infinite in float32: 1 (model.embed_tokens.weight)" in of_process["nan"]
