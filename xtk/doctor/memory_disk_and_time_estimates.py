"""Estimates of memory, disk space and time of `cache-teacher` and `distill`.

The formulas are in `docs/how-to/doctor.md`.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xtk.cache.manifest import cache_totals
from xtk.cache.teacher_logprobs import DEFAULT_TOP_K, make_support
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding, RunPlan, max_document_tokens
from xtk.doctor.fake_tensor_memory import UnsupportedModel, measure_footprint
from xtk.doctor.library_memory import library_bytes
from xtk.doctor.weight_checks import transformers_class
from xtk.models.output_head import chunk_rows
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.transformers import CHUNK_PASSES
from xtk.terminal import format_duration

GIB = 2**30
# Cache bytes per position on disk, measured (docs/explanation/scale.md): with default options; for --top-k, the size
# with --support none and the size of each id.
BYTES_PER_POSITION = 43.3
BASE_BYTES_PER_POSITION = 6.3
BYTES_PER_ID = 0.85
# CPU memory of a run in addition to libraries, tokenizers and tensors: compiled kernels, prefetched batches, threads.
# Fitted to five runs on one machine (numbers.md, doctor).
WORKING_BYTES = 150 << 20
TOKENIZER_BYTES_PER_TOKEN = 800  # per vocabulary token; Llama 3 and Qwen in the same runs
SHARDS_IN_MEMORY = 2  # cache shards in memory: one is scored, one is written
MEMORY_BYTES_PER_POSITION = 64  # offsets, masses, log-probabilities; each entry takes 8 bytes more
PACKING_BYTES_PER_ENTRY = 64  # of the shard that is being compressed; fitted to one run with 256 entries
# Fragmentation of glibc's heap, as a fraction of gradients and activations: plain; with adapters or gradient
# checkpointing. Fitted to 19 runs (numbers.md, doctor).
HEAP_MARGIN, HEAP_MARGIN_RECOMPUTED = 0.2, 1.0
MALLOC_MMAP_THRESHOLD = 1 << 20  # with this variable of glibc, freed tensors are returned to the system
DEFAULT_DOCUMENT_TOKENS = 1024  # tokens per document, if there is no data


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process in bytes, by purpose.

    Attributes:
        bytes_by_purpose: {purpose: bytes}; the sum is the peak.
        device: "cuda" or "cpu".
    """

    bytes_by_purpose: Mapping[str, int]
    device: str

    @property
    def total(self) -> int:
        """Peak in bytes."""
        return sum(self.bytes_by_purpose.values())


def memory(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the estimated memory of each command with the available memory."""
    _ = inputs.data_sample  # an error in the data is reported once, by the first check that reads it
    for command, forecast in (("cache-teacher", estimate_caching_memory), ("distill", estimate_training_memory)):
        if command == "cache-teacher" and inputs.cache is not None:
            continue
        side = inputs.teacher if command == "cache-teacher" else inputs.student
        if not side.config:
            continue
        try:
            found = forecast(inputs)
        except UnsupportedModel as wrong:
            yield Finding("memory", "note", f"{command}: {wrong.what}", side.name)
            continue
        yield _memory_finding(command, found, inputs.plan)


def _memory_finding(command: str, found: MemoryEstimate, plan: RunPlan) -> Finding:
    processes = plan.parallel.num_processes if command == "distill" else 1
    available = _available_memory(found.device) // (processes if found.device == "cpu" else 1)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in found.bytes_by_purpose.items() if size)
    layout = f", per process ({plan.parallel})" if processes > 1 else ""
    what = f"{command}{layout}: {found.total / GIB:.2f} of {available / GIB:.1f} GiB ({parts})"
    figures = {"command": command, "device": found.device, "bytes": found.total, "available_bytes": available,
               **{name.replace(" ", "_"): size for name, size in found.bytes_by_purpose.items()}}  # fmt: skip
    hint = "use --gradient-checkpointing, --max-batch-tokens, --parallel fsdp=N or --lora-r; see docs/how-to/doctor.md"
    if found.bytes_by_purpose.get("heap fragmentation"):
        hint = f"set MALLOC_MMAP_THRESHOLD_=1048576 to reduce heap fragmentation; or {hint}"
    if command == "cache-teacher":
        hint = "use a smaller --batch-tokens, --dtype bfloat16, or --engine tp_size=N"
    level = "error" if found.total > available else "warning" if found.total > 0.9 * available else "ok"
    return Finding("memory", level, what, hint=hint if level != "ok" else "", figures=figures)


def estimate_training_memory(inputs: DoctorInputs) -> MemoryEstimate:
    """Return the estimated memory of `distill`: weights, gradients, AdamW states, activations and logits of a chunk.

    The peak is either at the output head (kept activations, the head's gradient and the logits of a chunk) or in the
    backward pass of the backbone (with the gradients so far). With several passes per step, later passes also hold the
    gradients of earlier ones.

    Raises:
        UnsupportedModel: the memory of this model cannot be estimated.
    """
    plan, layout = inputs.plan, inputs.plan.parallel
    tokens = max(1, -(-max_pass_tokens(inputs) // layout.cp))
    several = plan.gradient_accumulation_steps > 1 or max_pass_tokens(inputs, entire_step=True) > max_pass_tokens(
        inputs
    )
    found = measure_footprint(
        inputs.student.folder,
        tokens,
        dtype=plan.dtype,
        mixed_precision=plan.mixed_precision,
        gradient_checkpointing=plan.gradient_checkpointing,
        num_passes=1 + several,
        attn_implementation=plan.attn_implementation,
        lora_r=plan.lora_r,
        lora_target_modules=plan.lora_target_modules,
    )
    shards = layout.fsdp * layout.cp * layout.tp if layout.is_sharded else 1
    trained, weights = found.trained_weights // shards, found.weights // shards
    narrow = plan.mixed_precision == "bf16" or plan.dtype == "bfloat16"
    # Gradients of the backbone are sharded as soon as they are computed.
    sharded_away = found.trained_weights - trained
    head = found.head_bytes // layout.tp if found.head_is_trained else 0
    # The head's gradient from earlier passes; if it is tied to the embedding, the backbone's gradients include it.
    before = found.head_bytes // shards if several and found.head_is_trained and not found.head_is_tied else 0
    # Hidden states at loss positions are copied, and have a gradient of the same size.
    at_head = (
        found.kept_activations
        + 2 * found.hidden_states
        + head
        + logits_bytes(tokens, found.vocab_size // layout.tp, half_precision=narrow)
    )
    if narrow and plan.dtype == "float32":
        at_head += found.head_bytes // layout.tp // 2  # the head's weights, cast to the autocast dtype
    peak = max(at_head + before - sharded_away * several, found.backward_peak + head + before - sharded_away, trained)
    fragmentation = _heap_fragmentation(peak, plan)
    replicas = layout.num_gradient_replicas > 1 and not layout.is_sharded
    parts = {
        "weights": weights,
        "AdamW": 2 * trained,
        "gradients and activations": peak,
        "gathered weights": 2 * found.largest_block if layout.fsdp * layout.cp > 1 and layout.is_sharded else 0,
        "DDP buckets": trained if replicas else 0,
        "heap fragmentation": fragmentation,
        "adapter merging": _merge_bytes(found.weights, peak, fragmentation) if plan.lora_r and not _on_cuda() else 0,
        "EMA": 4 * found.trained_weights // {"float32": 4}.get(plan.dtype, 2) // shards if plan.ema_decay else 0,
    }
    tokens = len(inputs.student.tokenizer) + len(inputs.teacher.tokenizer)
    return _add_library_memory(parts, inputs.student, tokens, "peft" if plan.lora_r else "")


def _merge_bytes(weights: int, peak: int, fragmentation: int) -> int:
    """Return the additional memory to load the model again at the end and merge the adapter."""
    # In a fragmented heap, new weights do not fit where activations were.
    return weights if fragmentation else max(0, weights - peak)


def _heap_fragmentation(peak: int, plan: RunPlan) -> int:
    """Return a margin for what the heap keeps in addition to live tensors; 0 on a GPU, or if it returns freed memory.

    Args:
        peak: bytes of gradients and activations.
        plan: adapters and gradient checkpointing allocate and free more tensors during a pass.
    """
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    if _on_cuda() or (threshold.isdecimal() and int(threshold) <= MALLOC_MMAP_THRESHOLD):
        return 0
    return int(peak * (HEAP_MARGIN_RECOMPUTED if plan.lora_r or plan.gradient_checkpointing else HEAP_MARGIN))


def estimate_caching_memory(inputs: DoctorInputs) -> MemoryEstimate:
    """Return the estimated memory of `cache-teacher`: weights, activations, logits of a chunk, and two shards.

    Raises:
        UnsupportedModel: the memory of this model cannot be estimated.
    """
    plan = inputs.plan
    longest = inputs.data_sample.longest[1][0][0] if inputs.data_sample.num_documents else DEFAULT_DOCUMENT_TOKENS
    limit = max_document_tokens(inputs.teacher, plan)
    longest = min(longest, limit) if limit else longest
    longest = max(1, longest)  # documents may have no tokens
    rows = max(1, plan.batch_tokens // longest)
    rows = min(rows, inputs.data_sample.num_documents) if inputs.data_sample.num_documents else rows
    found = measure_footprint(inputs.teacher.folder, longest, batch_size=rows, dtype=plan.teacher_dtype, train=False)
    narrow = plan.teacher_dtype != "float32"
    chunk = logits_bytes(rows * longest, found.vocab_size)
    at_head = (
        found.kept_activations
        + found.hidden_states
        + logits_bytes(rows * longest, found.vocab_size, half_precision=narrow)
        + chunk // CHUNK_PASSES
    )
    support = make_support("", top_k=plan.top_k or None)
    entries = 1 + support.top_k + support.num_sample_sets * support.num_samples
    positions = min(
        CacheRequest.shard_tokens,
        inputs.data_sample.num_trained_tokens[1] if inputs.data_sample.num_documents else DEFAULT_DOCUMENT_TOKENS,
    )
    parts = {
        "weights": found.weights,
        # Weights in another dtype are converted while their file is memory-mapped.
        "activations": max(found.forward_peak, at_head, _other_dtype_bytes(inputs.teacher, plan.teacher_dtype)),
        "shards": positions
        * (SHARDS_IN_MEMORY * (8 * entries + MEMORY_BYTES_PER_POSITION) + PACKING_BYTES_PER_ENTRY * entries),
    }
    return _add_library_memory(parts, inputs.teacher, len(inputs.teacher.tokenizer))


def _other_dtype_bytes(side: DoctorModel, dtype: str) -> int:
    """Return the bytes of the tensors that are stored in another dtype than `dtype`."""
    own = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    return sum(math.prod(shape) * sizes.get(kind, 1) for kind, shape in side.tensor_headers.values() if kind != own)


def logits_bytes(num_tokens: int, vocab_size: int, *, half_precision: bool = False) -> int:
    """Return the bytes of the logits of a chunk in fp32; with `half_precision`, plus their 16-bit original."""
    return (6 if half_precision else 4) * vocab_size * min(num_tokens, chunk_rows(vocab_size))


def max_pass_tokens(inputs: DoctorInputs, *, entire_step: bool = False) -> int:
    """Return the maximum tokens of a training forward pass: a batch of the longest documents.

    With `entire_step`, the tokens of all passes of a step under `--max-batch-tokens`.
    """
    plan, limit = inputs.plan, max_document_tokens(inputs.student, inputs.plan)
    longest = [size for size, _ in inputs.data_sample.longest[0]] or [
        min(limit or DEFAULT_DOCUMENT_TOKENS, DEFAULT_DOCUMENT_TOKENS)
    ]
    longest = [min(size, limit) if limit else size for size in longest]
    size = plan.per_device_train_batch_size
    together = sum(longest[:size]) if len(longest) >= min(size, 64) else longest[0] * size
    if inputs.data_sample.num_documents and size > len(longest):
        together = longest[-1] * (size - len(longest)) + sum(longest)
    if not plan.max_batch_tokens:
        return together
    together *= plan.gradient_accumulation_steps
    return together if entire_step else max(longest[0], min(together, plan.max_batch_tokens))


def _add_library_memory(parts: dict[str, int], side: DoctorModel, tokens: int, more: str = "") -> MemoryEstimate:
    """Return the estimate plus, on a CPU, the memory of libraries (also the module `more`) and tokenizers."""
    if _on_cuda():
        return MemoryEstimate(parts, "cuda")
    known = transformers_class(side)
    libraries = library_bytes("" if known is None else known.__name__, more)
    base = {"libraries": libraries + WORKING_BYTES, "tokenizers": tokens * TOKENIZER_BYTES_PER_TOKEN}
    return MemoryEstimate(base | parts, "cpu")


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _available_memory(device: str) -> int:
    """Return the memory of the GPU, or of this machine within the cgroup limit of this process."""
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (text := path.read_text(encoding="ascii").strip()).isdecimal():
            limit = min(limit, int(text))
    return limit


def disk(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the estimated size of cache and checkpoints with the free space; estimate the teacher's time."""
    plan, reading = inputs.plan, inputs.data_sample
    size = 0
    if inputs.cache is not None:
        found = cache_totals(inputs.cache.manifest)
        per_position = found["bytes"] / max(found["positions"], 1)
        what = f"the cache has {found['bytes']:,} bytes, {per_position:.1f} bytes per position"
        yield Finding("disk", "ok", what, figures=dict(found))
    elif reading.num_documents:
        each = _bytes_per_position(inputs)
        size = round(each * reading.num_trained_tokens[1])
        basis = f", extrapolated from caches with {DEFAULT_TOP_K['top-k']} ids" if plan.top_k else ""
        more = "" if reading.is_complete else " (only the documents read; run xtk cache-teacher --estimate for all)"
        positions = f"{reading.num_trained_tokens[1]:,} positions of {each:.1f} bytes"
        what = f"cache size: about {_format_bytes(size)}, {positions}{basis}{more}"
        figures = {
            "bytes": size,
            "positions": reading.num_trained_tokens[1],
            "tokens": reading.num_tokens[1],
            "is_complete": reading.is_complete,
        }
        yield Finding("disk", "ok", what, figures=figures)
        yield _scoring_time_finding(inputs)
    weights = sum(math.prod(shape) for _, shape in inputs.student.tensor_headers.values())
    width = 2 if plan.dtype == "bfloat16" else 4
    # Each checkpoint has the trained weights and two AdamW moments; the final student has weights only. Adapters are
    # smaller than the matrices whose rows and columns they have.
    shapes = [shape for _, shape in inputs.student.tensor_headers.values() if len(shape) == 2]
    trained = sum(plan.lora_r * sum(shape) for shape in shapes) if plan.lora_r else weights
    kept = width * (3 * trained * (plan.save_total_limit + 1) + weights) + 4 * trained * (plan.ema_decay > 0)
    folder = next(path for path in (plan.output.resolve(), *plan.output.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    level = "error" if size + kept > free else "ok"
    total = _format_bytes(size + kept)
    what = f"checkpoints: at most {_format_bytes(kept)}; with the cache: {total} of {_format_bytes(free)} free"
    hint = "use another -o, or --save-total-limit 1" if level == "error" else ""
    free_figures = {"checkpoint_bytes": kept, "cache_bytes": size, "free_bytes": free}
    yield Finding("disk", level, what, str(folder), hint, free_figures)


def _bytes_per_position(inputs: DoctorInputs) -> float:
    """Return the estimated bytes per position of the cache."""
    if not inputs.plan.top_k:
        return BYTES_PER_POSITION
    return BASE_BYTES_PER_POSITION + BYTES_PER_ID * min(inputs.plan.top_k, inputs.teacher.tokenizer.embedding_rows)


def _scoring_time_finding(inputs: DoctorInputs) -> Finding:
    reading, rate = inputs.data_sample, inputs.plan.tokens_per_second
    if not rate:
        what = "the teacher's time is not estimated, because its throughput is unknown"
        return Finding("disk", "note", what, hint="give --tokens-per-second; xtk cache-teacher --estimate measures it")
    seconds = reading.num_tokens[1] / rate
    more = "" if reading.is_complete else " (only the documents read)"
    what = f"teacher time: {format_duration(seconds)} at {rate:,.0f} tokens per second{more}"
    return Finding("disk", "ok", what, figures={"teacher_seconds": round(seconds, 3), "tokens_per_second": rate})


def _format_bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
