"""Memory of `cache-teacher` and `distill`, and disk space of cache and checkpoints.

The formula and how far it was from measured runs are in `docs/how-to/doctor.md`.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from xtk.cache.teacher_logprobs import make_support
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding, max_document_tokens
from xtk.models.causal_lm import auto_model_class, default_device, load_model_config
from xtk.models.output_head import chunk_rows
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import CacheRequest
from xtk.terminal import format_bytes

GIB = 2**30
LIBRARY_BYTES = 7 * GIB // 10  # of a process on a CPU: imports (0.61 GiB on one machine), compiled kernels, tokenizers
BYTES_PER_POSITION = 58.2  # of a cache on disk with default options, measured (docs/explanation/scale.md): SmolLM2
# Of the shards that are scored, compressed and written, in memory: per stored log-probability, two entries besides.
MEMORY_BYTES_PER_ENTRY = 80
DEFAULT_DOCUMENT_TOKENS = 1024  # tokens per document, if there is no data


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model."""

    num_weights: int
    num_adapter_weights: int  # of LoRA of rank 1 on all matrices
    vocab_size: int  # V
    hidden_size: int  # H
    num_layers: int
    mlp_size: int  # I, values between the matrices of an MLP per token, in all its active experts

    @classmethod
    def read(cls, folder: Path) -> ModelSizes | None:
        """Return the sizes of the model in a folder; None: transformers cannot build it, or has other names for them.

        The model is built without weights.
        """
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                whole = load_model_config(ModelRef(folder))
                shapes = [tuple(weight.shape) for weight in auto_model_class(whole).from_config(whole).parameters()]
            config = whole.get_text_config()
            experts = getattr(config, "num_experts_per_tok", None) or 1
            mlp = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
            mlp = mlp or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
            num_weights, adapters = sum(map(math.prod, shapes)), sum(sum(shape) for shape in shapes if len(shape) == 2)
            sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers, mlp * experts
        except Exception:  # models fail in many ways
            return None
        return cls(num_weights, adapters, *sizes)


def memory(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the estimated memory of each command with the available memory."""
    _ = inputs.data_sample  # an error in the data is reported once, by the first check that reads it
    for command, estimate in (("cache-teacher", estimate_caching_memory), ("distill", estimate_training_memory)):
        side = inputs.teacher if command == "cache-teacher" else inputs.student
        if not side.config or (command == "cache-teacher" and inputs.cache is not None):
            continue
        if (bytes_by_purpose := estimate(inputs)) is not None:
            yield _memory_finding(command, bytes_by_purpose, inputs)
        else:
            what = f"{command}: the memory that the model needs cannot be estimated"
            yield Finding("note", what, side.name, "measure it in a short run: xtk distill --max-steps 3")


def _memory_finding(command: str, bytes_by_purpose: dict[str, int], inputs: DoctorInputs) -> Finding:
    on_cpu, layout = not torch.cuda.is_available(), inputs.plan.parallel
    processes = layout.num_processes if command == "distill" else 1
    available, total = _available_memory() // (processes if on_cpu else 1), sum(bytes_by_purpose.values())
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in bytes_by_purpose.items() if size)
    named = f"{command}, per process ({layout})" if processes > 1 else command
    what = f"{named}: about {total / GIB:.1f} of {available / GIB:.1f} GiB ({parts})"
    figures = {"command": command, "device": "cpu" if on_cpu else "cuda", "bytes": total, "available_bytes": available,
               **{name.replace(" ", "_"): size for name, size in bytes_by_purpose.items()}}  # fmt: skip
    hint = "use --gradient-checkpointing, --max-batch-tokens, --parallel fsdp=N or --lora-r; see docs/how-to/doctor.md"
    if command == "cache-teacher":
        hint = "use a smaller --batch-tokens, --dtype bfloat16, or --engine device_map=auto"
    level = "error" if total > available else "warning" if total > 0.9 * available else "ok"
    return Finding(level, what, hint=hint if level != "ok" else "", figures=figures)


def estimate_training_memory(inputs: DoctorInputs) -> dict[str, int] | None:
    """Return the memory of a process of `distill` by purpose; None: the model is not known."""
    plan, layout = inputs.plan, inputs.plan.parallel
    sizes = ModelSizes.read(inputs.student.folder)
    if sizes is None:
        return None
    tokens = _pass_tokens(inputs) // layout.cp
    width = 2 if plan.dtype == "bfloat16" else 4  # of a weight
    is_narrow = plan.mixed_precision == "bf16" or width == 2
    shards = layout.fsdp * layout.cp * layout.tp if layout.is_sharded else 1
    weights = width * sizes.num_weights // shards
    trained = width * plan.lora_r * sizes.num_adapter_weights // shards if plan.lora_r else weights
    # Of the width H: the inputs, normalized and scaled values of both norms, queries, output of the attention, and at
    # most as much for keys and values; I: gate, its activation, the other factor and their product.
    layer = tokens * (10 * sizes.hidden_size + 4 * sizes.mlp_size) * (2 if is_narrow else 4)
    hidden = tokens * sizes.hidden_size * (2 if is_narrow else 4)
    activations = sizes.num_layers * hidden + layer if plan.gradient_checkpointing else sizes.num_layers * layer
    activations += 3 * hidden + _logits_bytes(tokens, sizes.vocab_size // layout.tp, is_narrow)
    activations += weights // 2 if is_narrow and width == 4 else 0  # weights in the autocast dtype
    return _libraries() | {
        "weights": weights,
        "gradients and AdamW": 3 * trained,
        "activations": activations,
        # At the end, the model is loaded again, whole and on the CPU, to merge adapters.
        "merging of adapters": max(0, width * sizes.num_weights - activations)
        if plan.lora_r and not torch.cuda.is_available()
        else 0,
        "gathered weights": 2 * width * sizes.vocab_size * sizes.hidden_size if shards > layout.tp else 0,
    }


def estimate_caching_memory(inputs: DoctorInputs) -> dict[str, int] | None:
    """Return the memory of `cache-teacher` by purpose; None: the model is not known."""
    plan, sample = inputs.plan, inputs.data_sample
    sizes = ModelSizes.read(inputs.teacher.folder)
    if sizes is None:
        return None
    longest = _longest_document(inputs, inputs.teacher)
    rows = max(1, plan.batch_tokens // longest)
    tokens = longest * (min(rows, sample.num_documents) if sample.num_documents else rows)
    width = 4 if plan.teacher_dtype == "float32" else 2
    # The MLP of a layer, where the gate, its activation and the other factor exist together.
    layer = tokens * 3 * (sizes.hidden_size + sizes.mlp_size) * width
    logits = tokens * sizes.hidden_size * width + _logits_bytes(tokens, sizes.vocab_size, width == 2)
    support = make_support("")
    entries = 1 + support.top_k + support.num_sample_sets * support.num_samples
    positions = sample.num_trained_tokens[1] if sample.num_documents else DEFAULT_DOCUMENT_TOKENS
    return _libraries() | {
        "weights": width * sizes.num_weights,
        "activations": max(layer, logits),
        "shards": min(CacheRequest.shard_tokens, positions) * MEMORY_BYTES_PER_ENTRY * (entries + 2),
    }


def _libraries() -> dict[str, int]:
    return {} if torch.cuda.is_available() else {"libraries": LIBRARY_BYTES}


def _logits_bytes(num_tokens: int, vocab_size: int, is_narrow: bool) -> int:
    """Return the bytes of the logits of a chunk in fp32, with `is_narrow` plus their 16-bit original."""
    return (6 if is_narrow else 4) * vocab_size * min(num_tokens, chunk_rows(vocab_size, default_device()))


def _longest_document(inputs: DoctorInputs, side: DoctorModel) -> int:
    """Return the largest number of tokens of a document in a pass of a model."""
    sample = inputs.data_sample
    longest = sample.longest[inputs.models.index(side)][0] if sample.num_documents else DEFAULT_DOCUMENT_TOKENS
    return max(1, min(longest, max_document_tokens(side, inputs.plan) or longest))  # documents may have no tokens


def _pass_tokens(inputs: DoctorInputs) -> int:
    """Return the maximum tokens of a training forward pass: documents as long as the longest."""
    plan, longest = inputs.plan, _longest_document(inputs, inputs.student)
    together = longest * min(plan.per_device_train_batch_size, inputs.data_sample.num_documents or 2**31)
    return max(longest, min(together, plan.max_batch_tokens or together))


def _available_memory() -> int:
    """Return the memory of the GPU, or of this machine within the cgroup limit of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (text := path.read_text(encoding="ascii").strip()).isdecimal():
            limit = min(limit, int(text))
    return limit


def disk(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the estimated size of cache and checkpoints with the free space."""
    plan, reading = inputs.plan, inputs.data_sample
    size = 0
    if inputs.cache is None and reading.num_documents:
        positions = reading.num_trained_tokens[1]
        size = round(BYTES_PER_POSITION * positions)
        more = "" if reading.is_complete else " (only the documents read; run xtk cache-teacher --estimate for all)"
        what = f"cache size: about {format_bytes(size)}, {positions:,} positions of {BYTES_PER_POSITION} bytes{more}"
        figures = {"bytes": size, "positions": positions, "is_complete": reading.is_complete}
        yield Finding("ok", what, figures=figures)
    shapes = [shape for _, shape in inputs.student.tensor_headers.values()]
    weights = sum(map(math.prod, shapes))
    # Each checkpoint has the trained weights and two AdamW moments; the final student has weights only. Adapters are
    # smaller than the matrices whose rows and columns they have.
    trained = sum(plan.lora_r * sum(shape) for shape in shapes if len(shape) == 2) if plan.lora_r else weights
    kept = (2 if plan.dtype == "bfloat16" else 4) * (3 * trained * (plan.save_total_limit + 1) + weights)
    folder = next(path for path in (plan.output.resolve(), *plan.output.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    checkpoints, total, left = map(format_bytes, (kept, size + kept, free))
    what = f"checkpoints: at most {checkpoints}; with the cache: {total} of {left} free"
    figures = {"checkpoint_bytes": kept, "cache_bytes": size, "free_bytes": free}
    level, hint = ("error", "use another -o, or --save-total-limit 1") if size + kept > free else ("ok", "")
    yield Finding(level, what, str(folder), hint, figures)
