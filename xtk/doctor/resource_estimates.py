"""What `cache-teacher` and `distill` will take: memory, disk and hours.

`docs/how-to/doctor.md` has the formulas.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xtk import __version__
from xtk.artifacts.atomic_files import atomic_write, canonical_json, sha256
from xtk.artifacts.projection_cache import user_cache_folder
from xtk.artifacts.teacher_cache import cache_totals
from xtk.doctor.inputs import DoctorInputs, DoctorModel, Finding, RunPlan, max_document_tokens
from xtk.doctor.weight_checks import transformers_class
from xtk.errors import XtkError
from xtk.terminal import format_duration
from xtk.tokens.teacher_logprobs import DEFAULT_TOP_K, make_support

GIB = 2**30
# Of a position of a cache on a disk, measured: docs/explanation/scale.md. The default; then of --top-k: what
# --support none takes, and what each of the 64 ids of --top-k 64 takes beside that.
BYTES_PER_POSITION = 43.3
BASE_BYTES_PER_POSITION = 6.3
BYTES_PER_ID = 0.85
# What a run holds on a CPU beside imported libraries, tokenizers and tensors: compiled kernels, batches made ahead,
# threads. Ours: fitted to five runs of one machine (numbers.md, doctor).
WORKING_BYTES = 150 << 20
TOKENIZER_BYTES_PER_TOKEN = 800  # bytes of a token of a vocabulary, ours: Llama 3 and Qwen, in the same runs
SHARDS_IN_MEMORY = 2  # of a cache that are in memory: one is scored, one is written
MEMORY_BYTES_PER_POSITION = 64  # of a position in a shard, beside 8 of each entry: offsets, masses, log-probabilities
PACKING_BYTES_PER_ENTRY = (
    64  # of an entry of the shard that is packed, while it is. Ours: fitted to one run with 256 entries
)
IMPORT_CODE = (
    "import accelerate, numba, pyarrow, xtk.training.distill, xtk.training.training_loop, "
    "xtk.training.held_out_evaluation; "
    "from xtk.doctor.resource_estimates import resident"
)
DEFAULT_DOCUMENT_TOKENS = 1024  # of a document, where there is no data


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process, by what they are for.

    Attributes:
        bytes_by_purpose: {what: bytes}; they add up to the most that is held at a time.
        device: "cuda" or "cpu".
    """

    bytes_by_purpose: Mapping[str, int]
    device: str

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.bytes_by_purpose.values())


def memory(inputs: DoctorInputs) -> Iterator[Finding]:
    """Forecast the memory of a process of each command, against what the machine has."""
    from xtk.doctor.memory_footprint import UnsupportedModel

    _ = inputs.data_sample  # what is wrong with the data is told once, by the first check that reads it
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
    there = _available_memory(found.device) // (processes if found.device == "cpu" else 1)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in found.bytes_by_purpose.items() if size)
    layout = f", each of {processes} processes ({plan.parallel})" if processes > 1 else ""
    what = f"{command}{layout}: {found.total / GIB:.2f} of {there / GIB:.1f} GiB ({parts})"
    figures = {"command": command, "device": found.device, "bytes": found.total, "available_bytes": there,
               **{name.replace(" ", "_"): size for name, size in found.bytes_by_purpose.items()}}  # fmt: skip
    hint = "--gradient-checkpointing, --max-batch-tokens, --parallel fsdp=N, --lora-r; docs/how-to/doctor.md"
    if found.bytes_by_purpose.get("heap fragmentation"):
        hint = f"MALLOC_MMAP_THRESHOLD_=1048576, which gives memory back; {hint}"
    if command == "cache-teacher":
        hint = "--batch-tokens, --dtype bfloat16, --engine tp_size=N"
    level = "error" if found.total > there else "warning" if found.total > 0.9 * there else "ok"
    return Finding("memory", level, what, hint=hint if level != "ok" else "", figures=figures)


def estimate_training_memory(inputs: DoctorInputs) -> MemoryEstimate:
    """Forecast `distill`: weights, gradients and AdamW's two moments, the pass, the logits of a chunk.

    The pass holds most either where the body's forward pass has ended, with the head's gradient and logits of a chunk
    beside what was kept; or somewhere in the backward pass, with the gradients made so far. Where a step has several
    passes, it is one of the later ones, with the gradients of those before.

    Raises:
        Unforeseen: the model cannot be run without weights.
    """
    from xtk.doctor.memory_footprint import measure_footprint

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
    # What gradients of a body take is shared out as soon as they are there.
    shared_out = found.trained_weights - trained
    head = found.head_bytes // layout.tp if found.head_is_trained else 0
    # The head's own gradient of the passes before; where it is the embedding, it is among those of the body.
    before = found.head_bytes // shards if several and found.head_is_trained and not found.head_is_tied else 0
    # Rows that are compared are picked from the hidden states, and have a gradient as large.
    at_head = (
        found.kept_activations
        + 2 * found.hidden_states
        + head
        + logits_bytes(tokens, found.vocab_size // layout.tp, half_precision=narrow)
    )
    if narrow and plan.dtype == "float32":
        at_head += found.head_bytes // layout.tp // 2  # the head, in the dtype of the product
    peak = max(at_head + before - shared_out * several, found.backward_peak + head + before - shared_out, trained)
    replicas = layout.num_gradient_replicas > 1 and not layout.is_sharded
    parts = {
        "weights": weights,
        "AdamW": 2 * trained,
        "gradients and activations": peak,
        "gathered weights": 2 * found.largest_block if layout.fsdp * layout.cp > 1 and layout.is_sharded else 0,
        "buckets of DDP": trained if replicas else 0,
        "heap fragmentation": found.heap_fragmentation,
        "merging": _merge_bytes(found.weights, peak, found.heap_fragmentation) if plan.lora_r and not _on_cuda() else 0,
        "average": 4 * found.trained_weights // {"float32": 4}.get(plan.dtype, 2) // shards if plan.ema_decay else 0,
    }
    tokens = len(inputs.student.tokenizer) + len(inputs.teacher.tokenizer)
    return _add_library_memory(parts, inputs.student, tokens, "peft" if plan.lora_r else "")


def _merge_bytes(weights: int, peak: int, holes: int) -> int:
    """Return what it takes beside a pass to load the model once more, in the end, and to add the adapters to it."""
    given_back = holes < peak // 50  # else new weights do not fit where activations were
    return max(0, weights - peak) if given_back else weights


def estimate_caching_memory(inputs: DoctorInputs) -> MemoryEstimate:
    """Forecast `cache-teacher`: weights, the forward pass, logits of a chunk, and what was said of two shards.

    Raises:
        Unforeseen: the model cannot be run without weights.
    """
    from xtk.doctor.memory_footprint import measure_footprint
    from xtk.teachers.cache_request import CacheRequest
    from xtk.teachers.transformers import CHUNK_PASSES

    plan = inputs.plan
    longest = inputs.data_sample.longest[1][0][0] if inputs.data_sample.num_documents else DEFAULT_DOCUMENT_TOKENS
    limit = max_document_tokens(inputs.teacher, plan)
    longest = min(longest, limit) if limit else longest
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
        # Weights in another dtype are read from their file, which stays mapped meanwhile.
        "activations": max(found.forward_peak, at_head, _other_dtype_bytes(inputs.teacher, plan.teacher_dtype)),
        "shards": positions
        * (SHARDS_IN_MEMORY * (8 * entries + MEMORY_BYTES_PER_POSITION) + PACKING_BYTES_PER_ENTRY * entries),
    }
    return _add_library_memory(parts, inputs.teacher, len(inputs.teacher.tokenizer))


def _other_dtype_bytes(side: DoctorModel, dtype: str) -> int:
    """Return the bytes of the tensors that are stored in another dtype."""
    own = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    return sum(math.prod(shape) * sizes.get(kind, 1) for kind, shape in side.tensor_headers.values() if kind != own)


def logits_bytes(num_tokens: int, vocab_size: int, *, half_precision: bool = False) -> int:
    """Return the bytes of the logits of a chunk of rows, in fp32; of a product in 16 bits beside them if `narrow`."""
    from xtk.models.output_head import chunk_rows

    return (6 if half_precision else 4) * vocab_size * min(num_tokens, chunk_rows(vocab_size))


def max_pass_tokens(inputs: DoctorInputs, *, entire_step: bool = False) -> int:
    """Return the most tokens that a process reads in a forward pass of training: the longest documents together.

    With `whole` in all passes of a step that `--max-batch-tokens` makes of them.
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
    """Add what libraries, `more` among them, and tokenizers take on a CPU."""
    if _on_cuda():
        return MemoryEstimate(parts, "cuda")
    known = transformers_class(side)
    libraries = _library_bytes("" if known is None else known.__name__, more)
    base = {"libraries": libraries + WORKING_BYTES, "tokenizers": tokens * TOKENIZER_BYTES_PER_TOKEN}
    return MemoryEstimate(base | parts, "cpu")


@functools.lru_cache
def _library_bytes(model: str, more: str) -> int:
    """Return the bytes of a process that has imported what both commands import, and transformers' class of a model.

    A process of its own tells, which takes seconds; so the number is kept in the user's cache folder, for as long as
    the same packages are installed.
    """
    named = [f"from transformers import {model}"] if model else []
    named += [f"import {more}"] if more else []
    code = "; ".join([IMPORT_CODE, *named, "print(resident())"])
    path = None
    # Nobody knows a home, a folder of packages cannot be read, or a variable is no UTF-8.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = (
            user_cache_folder()
            / "libraries"
            / sha256(canonical_json([code, *_import_environment()])).removeprefix("sha256:")
        )
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text(encoding="ascii"))
    found = _resident_memory_after(code)
    if path is not None:
        with contextlib.suppress(OSError, XtkError), atomic_write(path) as temporary:
            temporary.write_text(f"{found}\n", encoding="ascii")
    return found


def _import_environment() -> tuple[str, list[str], dict[str, str]]:
    """Return what the size of imports depends on: Python, machine, packages, words to the linker and the heap."""
    packages = {found.name for place in filter(None, sys.path) for found in Path(place).glob("*.dist-info")}
    told = {name: value for name, value in os.environ.items() if name.startswith(("GLIBC_", "LD_", "MALLOC_", "OMP_"))}
    machine = f"{platform.node()} {platform.machine()} {os.sysconf('SC_PAGE_SIZE')}"  # folders may be shared
    return f"{sys.version} {__version__} {machine}", sorted(packages), told


def _resident_memory_after(code: str) -> int:
    """Return what a process prints that runs this code."""
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        last = (done.stderr.strip() or f"the process ended with {how}").splitlines()[-1]
        raise XtkError("the libraries of a run cannot be imported", where=last)
    return int(done.stdout.split()[-1])


def resident() -> int:
    """Return the bytes of memory that this process has now.

    What the kernel says of the most that it had (ru_maxrss) begins, in a child, with what its parent had.
    """
    path = Path("/proc/self/statm")
    if path.is_file():
        import resource

        return int(path.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    import torch

    from xtk.training.metrics_file import peak_memory_bytes

    return peak_memory_bytes(torch.device("cpu"))


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _available_memory(device: str) -> int:
    """Return the memory of a device, or of this machine as far as this process may have it."""
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.is_file() and (told := path.read_text(encoding="ascii").strip()).isdecimal():
            whole = min(whole, int(told))
    return whole


def disk(inputs: DoctorInputs) -> Iterator[Finding]:
    """Forecast the bytes of the cache and of checkpoints, against what is free, and the hours of the teacher."""
    plan, reading = inputs.plan, inputs.data_sample
    size = 0
    if inputs.cache is not None:
        found = cache_totals(inputs.cache.manifest)
        what = f"the cache has {found['bytes']:,} bytes, {found['bytes'] / max(found['positions'], 1):.1f} a position"
        yield Finding("disk", "ok", what, figures=dict(found))
    elif reading.num_documents:
        each = _bytes_per_position(inputs)
        size = round(each * reading.num_trained_tokens[1])
        told = f", estimated from caches of {DEFAULT_TOP_K['top-k']} ids" if plan.top_k else ""
        more = (
            ""
            if reading.is_complete
            else " of the documents that were read; xtk cache-teacher --estimate tells the whole"
        )
        positions = f"{reading.num_trained_tokens[1]:,} positions of {each:.1f} bytes"
        what = f"the cache: about {_format_bytes(size)}, {positions}{told}{more}"
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
    # Each has weights and two moments; the student in the end has weights alone.
    kept = weights * width * (3 * (plan.save_total_limit + 1) + 1) + 4 * weights * (plan.ema_decay > 0)
    place = next(path for path in (plan.output.resolve(), *plan.output.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    level = "error" if size + kept > free else "ok"
    whole = _format_bytes(size + kept)
    what = f"checkpoints take {_format_bytes(kept)} at most, with the cache {whole} of {_format_bytes(free)} free"
    hint = "another -o, or --save-total-limit 1" if level == "error" else ""
    free_figures = {"checkpoint_bytes": kept, "cache_bytes": size, "free_bytes": free}
    yield Finding("disk", level, what, str(place), hint, free_figures)


def _bytes_per_position(case: DoctorInputs) -> float:
    """Return about how many bytes a position takes in the cache that would be made."""
    if not case.plan.top_k:
        return BYTES_PER_POSITION
    return BASE_BYTES_PER_POSITION + BYTES_PER_ID * min(case.plan.top_k, case.teacher.tokenizer.embedding_rows)


def _scoring_time_finding(case: DoctorInputs) -> Finding:
    reading, rate = case.data_sample, case.plan.tokens_per_second
    if not rate:
        what = "nobody said how many tokens a second the teacher reads"
        return Finding("disk", "note", what, hint="--tokens-per-second, as xtk cache-teacher --estimate measures it")
    seconds = reading.num_tokens[1] / rate
    more = "" if reading.is_complete else ", the documents that were read alone"
    what = f"the teacher reads for {format_duration(seconds)} at {rate:,.0f} tokens a second{more}"
    return Finding("disk", "ok", what, figures={"teacher_seconds": round(seconds, 3), "tokens_per_second": rate})


def _format_bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
