"""Memory of loading a sharded student: a process has its shard, never the whole model."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import small_inputs
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig, load_student
from xtk.parallel.parallel_config import parse_parallel
from xtk.text.tokenizer import Tokenizer
from xtk.training.student_with_losses import parallelize

pytestmark = pytest.mark.slow

PROCESSES, GB = 4, 10**9


def memory(kind: str) -> int:
    """Return bytes of this process: VmRSS, or VmHWM, the largest VmRSS so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def load_shard(rank: int, folder: Path, results: Any) -> None:
    """Run in a process of its own: put the bytes of model and shard, and the peak above imports, into a queue."""
    from accelerate import Accelerator

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=PROCESSES, timeout=timedelta(minutes=5)
    )
    accelerator = Accelerator(cpu=True)
    parallel = parse_parallel(f"fsdp={PROCESSES}", PROCESSES).with_mesh(accelerator.device)
    tokenizer, before = Tokenizer(folder), memory("VmRSS")
    model = load_student(ModelRef(folder), StudentModelConfig(), tokenizer, device=torch.device("meta"), quiet=True)
    student = BackboneWithHead(model)
    packing = student.enable_packing()
    _, parameters = parallelize(student, accelerator, parallel, packing=packing, weights=folder)
    peak = memory("VmHWM") - before
    shard = sum(parameter.to_local().nbytes for parameter in parameters)
    results.put((sum(parameter.nbytes for parameter in parameters), shard, peak))
    torch.distributed.barrier()


def test_a_process_that_loads_its_shard_never_has_the_whole_model(tmp_path):
    small_inputs.make_student_tokenizer(tmp_path)
    silence_transformers()
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14, "vocab_size": 8192}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **sizes))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    model.save_pretrained(tmp_path)
    del model
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=load_shard, args=(rank, tmp_path, queue)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(60)
    for model_bytes, shard_bytes, peak in results:
        assert model_bytes > GB
        assert shard_bytes < 0.26 * GB
        assert peak < 0.5 * GB
