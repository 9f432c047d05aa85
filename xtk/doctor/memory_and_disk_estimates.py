"""Memory of `cache-teacher` and `distill` by a formula, disk space of cache and checkpoints, and the teacher's time.

The formula and its bound are in `docs/how-to/doctor.md`.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xtk.cache.manifest import cache_totals
from xtk.cache.teacher_logprobs import DEFAULT_TOP_K, make_support
from xtk.doctor.doctor_inputs import DoctorInputs, DoctorModel, Finding, RunPlan, max_document_tokens
from xtk.errors import XtkError
from xtk.models.causal_lm import DTYPES, auto_model_class, default_device, load_model_config
from xtk.models.output_head import chunk_rows
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig, attach_trainable_adapter
from xtk.teachers.cache_build_config import CacheRequest
from xtk.teachers.transformers import CHUNK_PASSES
from xtk.terminal import format_duration

GIB = 2**30
LIBRARY_BYTES = 7 * GIB // 10  # of a process on a CPU: imports (0.61 GiB on one machine), compiled kernels, tokenizers
# Cache bytes per position on disk, measured (docs/explanation/scale.md): with default options, of SmolLM2; for --top-k,
# the size with --support none and the size of each id.
BYTES_PER_POSITION = 58.2
BASE_BYTES_PER_POSITION = 6.3
BYTES_PER_ID = 0.85
SHARDS_IN_MEMORY = 2  # cache shards in memory: one is scored, one is written
MEMORY_BYTES_PER_POSITION = 64  # offsets, masses, log-probabilities; each entry takes 8 bytes more
PACKING_BYTES_PER_ENTRY = 64  # of the shard that is being compressed
DEFAULT_DOCUMENT_TOKENS = 1024  # tokens per document, if there is no data


class UnsupportedModel(XtkError):
    """The memory of this model cannot be estimated; not a user error."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process."""

    bytes_by_purpose: Mapping[str, int]  # {purpose: bytes}; the sum is the peak
    device: str  # "cuda" or "cpu"

    @property
    def total(self) -> int:
        """Peak in bytes."""
        return sum(self.bytes_by_purpose.values())

    @classmethod
    def of(cls, **parts: int) -> MemoryEstimate:
        """Return an estimate on the device of a run; on a CPU with the memory of libraries."""
        named = {name.replace("_", " "): size for name, size in parts.items()}
        on_cpu = not torch.cuda.is_available()
        return cls({"libraries": LIBRARY_BYTES, **named} if on_cpu else named, "cpu" if on_cpu else "cuda")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, without its weights."""

    weights: int  # bytes of all parameters
    trained_weights: int  # bytes of the trainable parameters
    head_bytes: int  # of the output head
    head_is_trained: bool
    largest_block: int  # bytes of the largest layer, or of embedding and output head
    vocab_size: int  # V, rows of the output head
    hidden_size: int  # H
    num_layers: int  # L
    mlp_size: int  # I, values between the matrices of an MLP per token, in all its active experts
    key_size: int  # K, values of the keys of a token

    @property
    def kept_values(self) -> int:
        """Values per token that a layer keeps for the backward pass.

        Of the width H: the inputs, normalized and scaled values of both norms, queries and the output of the attention;
        K: keys and values; I: gate, its activation, the other factor and their product.
        """
        return 8 * self.hidden_size + 2 * self.key_size + 4 * self.mlp_size

    @classmethod
    def read(cls, folder: Path, dtype: str, plan: RunPlan | None = None) -> ModelSizes:
        """Return the sizes of a model in a folder; with a plan, as `distill` prepares it.

        Raises:
            UnsupportedModel: transformers does not support the model, or it has other names for its sizes.
        """
        requested = plan.attn_implementation if plan else ""
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                configuration = load_model_config(ModelRef(folder))
                attention = {"attn_implementation": requested} if requested else {}
                model = auto_model_class(configuration).from_config(configuration, dtype=DTYPES[dtype], **attention)
                prepared = model
                if plan and plan.lora_r:
                    targets = plan.lora_target_modules
                    adapter = StudentModelConfig(dtype=dtype, lora_r=plan.lora_r, lora_target_modules=targets)
                    prepared = attach_trainable_adapter(model, ModelRef(folder), adapter)
                return cls._of_model(prepared, model, configuration.get_text_config())
        except Exception as error:  # models fail in many ways
            if isinstance(error, XtkError) and plan and plan.lora_r:
                raise
            message = " ".join(str(error).split())[:200]
            if requested and isinstance(error, ValueError | ImportError) and "attn" in message:
                raise XtkError(
                    f"transformers cannot load the model: {message}",
                    where=f"--attn-implementation {requested}",
                    hint="use --attn-implementation sdpa or eager",
                ) from None
            raise UnsupportedModel(
                f"the memory that the model needs cannot be estimated: {message}",
                where=str(folder),
                hint="measure it in a short run: xtk distill --max-steps 3",
            ) from None

    @classmethod
    def _of_model(cls, prepared: Any, model: Any, configuration: Any) -> ModelSizes:
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        blocks = [block for some in model.modules() if isinstance(some, torch.nn.ModuleList) for block in some]
        hidden = configuration.hidden_size
        heads = configuration.num_attention_heads
        key_heads = getattr(configuration, "num_key_value_heads", None) or heads
        experts = getattr(configuration, "num_experts_per_tok", None) or 1
        mlp = getattr(configuration, "moe_intermediate_size", None) if experts > 1 else None
        mlp = mlp or getattr(configuration, "intermediate_size", None) or 4 * hidden
        tables = {id(embedding): embedding, id(head): head}.values()
        return cls(
            weights=_parameter_bytes(prepared.parameters()),
            trained_weights=_parameter_bytes(one for one in prepared.parameters() if one.requires_grad),
            head_bytes=_parameter_bytes([head]),
            head_is_trained=head.requires_grad,
            largest_block=max(map(_parameter_bytes, [tables, *(block.parameters() for block in blocks)])),
            vocab_size=len(head),
            hidden_size=hidden,
            num_layers=configuration.num_hidden_layers,
            mlp_size=mlp * experts,
            key_size=key_heads * (getattr(configuration, "head_dim", None) or hidden // heads),
        )


def _parameter_bytes(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def memory(inputs: DoctorInputs) -> Iterator[Finding]:
    """Compare the estimated memory of each command with the available memory."""
    _ = inputs.data_sample  # an error in the data is reported once, by the first check that reads it
    for command, estimate in (("cache-teacher", estimate_caching_memory), ("distill", estimate_training_memory)):
        side = inputs.teacher if command == "cache-teacher" else inputs.student
        if not side.config or (command == "cache-teacher" and inputs.cache is not None):
            continue
        try:
            yield _memory_finding(command, estimate(inputs), inputs.plan)
        except UnsupportedModel as error:
            yield Finding("note", f"{command}: {error.what}", side.name)


def _memory_finding(command: str, estimate: MemoryEstimate, plan: RunPlan) -> Finding:
    processes = plan.parallel.num_processes if command == "distill" else 1
    available = _available_memory(estimate.device) // (processes if estimate.device == "cpu" else 1)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in estimate.bytes_by_purpose.items() if size)
    layout = f", per process ({plan.parallel})" if processes > 1 else ""
    what = f"{command}{layout}: {estimate.total / GIB:.2f} of {available / GIB:.1f} GiB ({parts})"
    figures = {"command": command, "device": estimate.device, "bytes": estimate.total, "available_bytes": available,
               **{name.replace(" ", "_"): size for name, size in estimate.bytes_by_purpose.items()}}  # fmt: skip
    hint = "use --gradient-checkpointing, --max-batch-tokens, --parallel fsdp=N or --lora-r; see docs/how-to/doctor.md"
    if estimate.device == "cpu" and plan.lora_r:
        hint = f"set MALLOC_MMAP_THRESHOLD_=1048576 to reduce heap fragmentation; or {hint}"
    if command == "cache-teacher":
        hint = "use a smaller --batch-tokens, --dtype bfloat16, or --engine tp_size=N"
    level = "error" if estimate.total > available else "warning" if estimate.total > 0.9 * available else "ok"
    return Finding(level, what, hint=hint if level != "ok" else "", figures=figures)


def estimate_training_memory(inputs: DoctorInputs) -> MemoryEstimate:
    """Return the estimated memory of `distill`: weights, gradients, AdamW states, activations and logits of a chunk.

    The peak is either at the output head (all activations, the head's gradient and the logits of a chunk) or at the end
    of the backward pass (all gradients, and the activations of one layer). With several passes per step, later passes
    also hold the gradients of earlier ones.

    Raises:
        UnsupportedModel: the memory of this model cannot be estimated.
    """
    plan, layout = inputs.plan, inputs.plan.parallel
    pass_tokens = max_pass_tokens(inputs)
    tokens = max(1, -(-pass_tokens // layout.cp))
    several = plan.gradient_accumulation_steps > 1 or max_pass_tokens(inputs, entire_step=True) > pass_tokens
    sizes = ModelSizes.read(inputs.student.folder, plan.dtype, plan)
    shards = layout.fsdp * layout.cp * layout.tp if layout.is_sharded else 1
    trained = sizes.trained_weights // shards
    narrow = plan.mixed_precision == "bf16" or plan.dtype == "bfloat16"
    hidden = tokens * sizes.hidden_size * (2 if narrow else 4)
    layer = tokens * sizes.kept_values * (2 if narrow else 4)
    activations = sizes.num_layers * hidden + layer if plan.gradient_checkpointing else sizes.num_layers * layer
    cast = sizes.weights // shards // 2 if narrow and plan.dtype == "float32" else 0  # weights in the autocast dtype
    # Hidden states at loss positions are copied, and have a gradient of the same size.
    at_head = activations + 3 * hidden + sizes.head_is_trained * sizes.head_bytes // layout.tp
    at_head += logits_bytes(tokens, sizes.vocab_size // layout.tp, half_precision=narrow) + trained * several
    at_end = trained + layer + activations * several
    peak = cast + max(at_head, at_end)
    merges = plan.lora_r and not torch.cuda.is_available()
    return MemoryEstimate.of(
        weights=sizes.weights // shards,
        AdamW=2 * trained,
        gradients_and_activations=peak,
        gathered_weights=2 * sizes.largest_block if layout.fsdp * layout.cp > 1 and layout.is_sharded else 0,
        # The model is loaded again at the end, where a pass was.
        adapter_merging=max(0, sizes.weights - peak) if merges else 0,
        EMA=4 * sizes.trained_weights // {"float32": 4}.get(plan.dtype, 2) // shards if plan.ema_decay else 0,
    )


def estimate_caching_memory(inputs: DoctorInputs) -> MemoryEstimate:
    """Return the estimated memory of `cache-teacher`: weights, activations, logits of a chunk, and two shards.

    Raises:
        UnsupportedModel: the memory of this model cannot be estimated.
    """
    plan, sample = inputs.plan, inputs.data_sample
    longest = sample.longest[1][0][0] if sample.num_documents else DEFAULT_DOCUMENT_TOKENS
    limit = max_document_tokens(inputs.teacher, plan)
    longest = max(1, min(longest, limit) if limit else longest)  # documents may have no tokens
    rows = max(1, plan.batch_tokens // longest)
    tokens = longest * (min(rows, sample.num_documents) if sample.num_documents else rows)
    sizes = ModelSizes.read(inputs.teacher.folder, plan.teacher_dtype)
    narrow = plan.teacher_dtype != "float32"
    # The MLP of a layer, where the gate, its activation and the other factor exist together.
    layer = tokens * (3 * sizes.hidden_size + 3 * sizes.mlp_size) * (2 if narrow else 4)
    logits = logits_bytes(tokens, sizes.vocab_size, half_precision=narrow)
    passes = CHUNK_PASSES if default_device().type == "cpu" else 1
    logits += logits_bytes(tokens, sizes.vocab_size) // passes + tokens * sizes.hidden_size * (2 if narrow else 4)
    support = make_support("", top_k=plan.top_k or None)
    entries = 1 + support.top_k + support.num_sample_sets * support.num_samples
    positions = sample.num_trained_tokens[1] if sample.num_documents else DEFAULT_DOCUMENT_TOKENS
    shards = SHARDS_IN_MEMORY * (8 * entries + MEMORY_BYTES_PER_POSITION) + PACKING_BYTES_PER_ENTRY * entries
    return MemoryEstimate.of(
        weights=sizes.weights,
        # Weights in another dtype are converted while their file is memory-mapped.
        activations=max(layer, logits, _other_dtype_bytes(inputs.teacher, plan.teacher_dtype)),
        shards=min(CacheRequest.shard_tokens, positions) * shards,
    )


def _other_dtype_bytes(side: DoctorModel, dtype: str) -> int:
    """Return the bytes of the tensors that are stored in another dtype than `dtype`."""
    own = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    return sum(math.prod(shape) * sizes.get(kind, 1) for kind, shape in side.tensor_headers.values() if kind != own)


def logits_bytes(num_tokens: int, vocab_size: int, *, half_precision: bool = False) -> int:
    """Return the bytes of the logits of a chunk in fp32; with `half_precision`, plus their 16-bit original."""
    rows = chunk_rows(vocab_size, default_device())
    return (6 if half_precision else 4) * vocab_size * min(num_tokens, rows)


def max_pass_tokens(inputs: DoctorInputs, *, entire_step: bool = False) -> int:
    """Return the maximum tokens of a training forward pass: a batch of the longest documents.

    With `entire_step`, the tokens of all passes of a step under `--max-batch-tokens`.
    """
    plan, limit = inputs.plan, max_document_tokens(inputs.student, inputs.plan)
    longest = [size for size, _ in inputs.data_sample.longest[0]] or [DEFAULT_DOCUMENT_TOKENS]
    longest = [min(size, limit) if limit else size for size in longest]
    size = plan.per_device_train_batch_size
    together = sum(longest[:size]) if len(longest) >= min(size, 64) else longest[0] * size
    if inputs.data_sample.num_documents and size > len(longest):
        together = longest[-1] * (size - len(longest)) + sum(longest)
    if not plan.max_batch_tokens:
        return together
    together *= plan.gradient_accumulation_steps
    return together if entire_step else max(longest[0], min(together, plan.max_batch_tokens))


def _available_memory(device: str) -> int:
    """Return the memory of the GPU, or of this machine within the cgroup limit of this process."""
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
        totals = cache_totals(inputs.cache.manifest)
        per_position = totals["bytes"] / max(totals["positions"], 1)
        what = f"the cache has {totals['bytes']:,} bytes, {per_position:.1f} bytes per position"
        yield Finding("ok", what, figures=dict(totals))
    elif reading.num_documents:
        positions, each = reading.num_trained_tokens[1], BYTES_PER_POSITION
        if plan.top_k:
            each = BASE_BYTES_PER_POSITION + BYTES_PER_ID * min(plan.top_k, inputs.teacher.tokenizer.embedding_rows)
        size = round(each * positions)
        basis = f", extrapolated from caches with {DEFAULT_TOP_K['top-k']} ids" if plan.top_k else ""
        more = "" if reading.is_complete else " (only the documents read; run xtk cache-teacher --estimate for all)"
        what = f"cache size: about {_format_bytes(size)}, {positions:,} positions of {each:.1f} bytes{basis}{more}"
        figures = {"bytes": size, "positions": positions, "tokens": reading.num_tokens[1],
                   "is_complete": reading.is_complete}  # fmt: skip
        yield Finding("ok", what, figures=figures)
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
    checkpoints, total, left = map(_format_bytes, (kept, size + kept, free))
    what = f"checkpoints: at most {checkpoints}; with the cache: {total} of {left} free"
    figures = {"checkpoint_bytes": kept, "cache_bytes": size, "free_bytes": free}
    level, hint = ("error", "use another -o, or --save-total-limit 1") if size + kept > free else ("ok", "")
    yield Finding(level, what, str(folder), hint, figures)


def _scoring_time_finding(inputs: DoctorInputs) -> Finding:
    reading, rate = inputs.data_sample, inputs.plan.tokens_per_second
    if not rate:
        what = "the teacher's time is not estimated, because its throughput is unknown"
        return Finding("note", what, hint="give --tokens-per-second; xtk cache-teacher --estimate measures it")
    seconds = reading.num_tokens[1] / rate
    more = "" if reading.is_complete else " (only the documents read)"
    what = f"teacher time: {format_duration(seconds)} at {rate:,.0f} tokens per second{more}"
    return Finding("ok", what, figures={"teacher_seconds": round(seconds, 3), "tokens_per_second": rate})


def _format_bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
