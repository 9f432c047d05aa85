"""Sharding of weights over processes: tensor parallelism and FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from xtk.errors import XtkError


def to_local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, differentiable; other tensors are returned as they are."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def apply_tensor_parallel(model: Any, mesh: Any) -> None:
    """Shard a model's matrices over the processes of a mesh, by transformers' tensor parallel plan.

    The model is equal in every process. The head is sharded by vocabulary, and its logits are not gathered. A head tied
    to the embedding stays tied.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model, "peft_config", None) or getattr(model, "quantization_method", None):
        raise XtkError(
            "--parallel tp does not support LoRA adapters or quantized weights",
            hint="use --parallel fsdp instead of tp",
        )
    configuration = model.config.get_text_config()
    heads = [getattr(configuration, name, None) or 0 for name in ("num_attention_heads", "num_key_value_heads")]
    if any(count % mesh.size() for count in heads):
        raise XtkError(
            f"--parallel tp={mesh.size()} does not divide the model's {heads[0]} attention heads and {heads[1]} "
            "key-value heads",
            where=str(getattr(model, "name_or_path", "") or type(model).__name__),
            hint="use a smaller tp, or --parallel fsdp",
        )
    name = next((name for name, module in model.named_modules() if module is head), "")
    tied = head is not None and head.weight is embedding.weight
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rules = None if tied else {name: "colwise"}
            plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size(), tp_plan=rules))
            if tied:
                plan = {key: style for key, style in plan.items() if key.removesuffix(".weight") != name}
            apply_tensor_parallelism(model, mesh, plan)
    except (ValueError, KeyError, RuntimeError, NotImplementedError, AttributeError) as failure:
        raise XtkError(
            f"transformers cannot apply tensor parallelism to the model: {' '.join(str(failure).split())[:200]}",
            where=f"{getattr(model, 'name_or_path', '') or type(model).__name__}, --parallel tp={mesh.size()}",
            hint="use --parallel fsdp instead of tp",
        ) from None
    if tied:
        head.weight = embedding.weight


def decoder_layers(model: Any) -> Iterator[nn.Module]:
    """Yield the decoder layers of a model: the modules that transformers never splits over devices."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(inner, "_no_split_modules", None) or ())
    for module in inner.modules():
        if type(module).__name__ in names:
            yield module


def apply_fsdp(student: nn.Module, model: Any, mesh: Any, *, bf16: bool, cpu_offload: bool) -> None:
    """Shard the weights of a model over processes, layer by layer (FSDP2); gradients are averaged in fp32.

    `student`: the module whose forward pass is called; its parameters outside of layers form one FSDP unit. `bf16`:
    compute in bf16; the sharded weights stay in fp32.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    settings: dict[str, Any] = {
        "mesh": mesh,
        # Otherwise torch would also cast inputs inside of dataclasses, such as the teacher's probabilities.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        if bf16
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        fully_shard(layer, **settings)
    fully_shard(student, **settings)
