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
from xtk.artifacts.files import canonical_json, sha256, written_whole
from xtk.artifacts.projection_store import cache_folder
from xtk.artifacts.teacher_cache import totals
from xtk.doctor.case import Case, Finding, Plan, Side, limit_of
from xtk.doctor.weights import class_of
from xtk.errors import XtkError
from xtk.terminal import duration
from xtk.tokens.signal import USUAL_TOP_K, support_of

GIB = 2**30
# Of a position of a cache on a disk, measured: docs/explanation/scale.md. The default; then of --top-k: what
# --support none takes, and what each of the 64 ids of --top-k 64 takes beside that.
BYTES_PER_POSITION = 43.3
BYTES_WITHOUT_IDS = 6.3
BYTES_PER_ID = 0.85
# What a run holds on a CPU beside imported libraries, tokenizers and tensors: compiled kernels, batches made ahead,
# threads. Ours: fitted to five runs of one machine (numbers.md, doctor).
WORKING = 150 << 20
TOKENIZER = 800  # bytes of a token of a vocabulary, ours: Llama 3 and Qwen, in the same runs
SHARDS = 2  # of a cache that are in memory: one is scored, one is written
BYTES_BESIDE = 64  # of a position in a shard, beside 8 of each entry: offsets, masses, log-probabilities
PACKING = 64  # of an entry of the shard that is packed, while it is. Ours: fitted to one run with 256 entries
IMPORTS = (
    "import accelerate, numba, pyarrow, xtk.training.distill, xtk.training.loop, xtk.training.held_out; "
    "from xtk.doctor.costs import resident"
)
USUAL_TOKENS = 1024  # of a document, where there is no data


@dataclass(frozen=True)
class Forecast:
    """Bytes of one process, by what they are for.

    Attributes:
        parts: {what: bytes}; they add up to the most that is held at a time.
        device: "cuda" or "cpu".
    """

    parts: Mapping[str, int]
    device: str

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


def memory(case: Case) -> Iterator[Finding]:
    """Forecast the memory of a process of each command, against what the machine has."""
    from xtk.doctor.footprint import Unforeseen

    _ = case.read  # what is wrong with the data is told once, by the first check that reads it
    for command, forecast in (("cache-teacher", of_caching), ("distill", of_training)):
        if command == "cache-teacher" and case.cache is not None:
            continue
        side = case.teacher if command == "cache-teacher" else case.student
        if not side.configuration:
            continue
        try:
            found = forecast(case)
        except Unforeseen as wrong:
            yield Finding("memory", "note", f"{command}: {wrong.what}", side.name)
            continue
        yield _told(command, found, case.plan)


def _told(command: str, found: Forecast, plan: Plan) -> Finding:
    processes = plan.layout.processes if command == "distill" else 1
    there = _there(found.device) // (processes if found.device == "cpu" else 1)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in found.parts.items() if size)
    layout = f", each of {processes} processes ({plan.layout})" if processes > 1 else ""
    what = f"{command}{layout}: {found.total / GIB:.2f} of {there / GIB:.1f} GiB ({parts})"
    figures = {"command": command, "device": found.device, "bytes": found.total, "there": there,
               **{name.replace(" ", "_"): size for name, size in found.parts.items()}}  # fmt: skip
    hint = "--gradient-checkpointing, --max-batch-tokens, --parallel fsdp=N, --lora-r; docs/how-to/doctor.md"
    if found.parts.get("holes in the heap"):
        hint = f"MALLOC_MMAP_THRESHOLD_=1048576, which gives memory back; {hint}"
    if command == "cache-teacher":
        hint = "--batch-tokens, --dtype bfloat16, --engine tp_size=N"
    level = "error" if found.total > there else "warning" if found.total > 0.9 * there else "ok"
    return Finding("memory", level, what, hint=hint if level != "ok" else "", figures=figures)


def of_training(case: Case) -> Forecast:
    """Forecast `distill`: weights, gradients and AdamW's two moments, the pass, the logits of a chunk.

    The pass holds most either where the body's forward pass has ended, with the head's gradient and logits of a chunk
    beside what was kept; or somewhere in the backward pass, with the gradients made so far. Where a step has several
    passes, it is one of the later ones, with the gradients of those before.

    Raises:
        Unforeseen: the model cannot be run without weights.
    """
    from xtk.doctor.footprint import footprint

    plan, layout = case.plan, case.plan.layout
    tokens = max(1, -(-pass_tokens(case) // layout.cp))
    several = plan.gradient_accumulation_steps > 1 or pass_tokens(case, whole=True) > pass_tokens(case)
    found = footprint(
        case.student.folder,
        tokens,
        dtype=plan.dtype,
        mixed_precision=plan.mixed_precision,
        gradient_checkpointing=plan.gradient_checkpointing,
        passes=1 + several,
        attn_implementation=plan.attn_implementation,
        lora_r=plan.lora_r,
        lora_target_modules=plan.lora_target_modules,
    )
    shards = layout.fsdp * layout.cp * layout.tp if layout.sharded else 1
    trained, weights = found.trained // shards, found.weights // shards
    narrow = plan.mixed_precision == "bf16" or plan.dtype == "bfloat16"
    # What gradients of a body take is shared out as soon as they are there.
    shared_out = found.trained - trained
    head = found.head // layout.tp if found.learns else 0
    # The head's own gradient of the passes before; where it is the embedding, it is among those of the body.
    before = found.head // shards if several and found.learns and not found.tied else 0
    # Rows that are compared are picked from the hidden states, and have a gradient as large.
    at_head = found.kept + 2 * found.states + head + logits(tokens, found.width // layout.tp, narrow=narrow)
    if narrow and plan.dtype == "float32":
        at_head += found.head // layout.tp // 2  # the head, in the dtype of the product
    peak = max(at_head + before - shared_out * several, found.backward + head + before - shared_out, trained)
    replicas = layout.copies > 1 and not layout.sharded
    parts = {
        "weights": weights,
        "AdamW": 2 * trained,
        "gradients and activations": peak,
        "gathered weights": 2 * found.largest if layout.fsdp * layout.cp > 1 and layout.sharded else 0,
        "buckets of DDP": trained if replicas else 0,
        "holes in the heap": found.holes,
        "merging": _merging(found.weights, peak, found.holes) if plan.lora_r and not _on_cuda() else 0,
        "average": 4 * found.trained // {"float32": 4}.get(plan.dtype, 2) // shards if plan.ema_decay else 0,
    }
    tokens = len(case.student.tokenizer) + len(case.teacher.tokenizer)
    return _with_libraries(parts, case.student, tokens, "peft" if plan.lora_r else "")


def _merging(weights: int, peak: int, holes: int) -> int:
    """Return what it takes beside a pass to load the model once more, in the end, and to add the adapters to it."""
    given_back = holes < peak // 50  # else new weights do not fit where activations were
    return max(0, weights - peak) if given_back else weights


def of_caching(case: Case) -> Forecast:
    """Forecast `cache-teacher`: weights, the forward pass, logits of a chunk, and what was said of two shards.

    Raises:
        Unforeseen: the model cannot be run without weights.
    """
    from xtk.doctor.footprint import footprint
    from xtk.teachers.request import CacheRequest
    from xtk.teachers.transformers import PASSES

    plan = case.plan
    longest = case.read.longest[1][0][0] if case.read.numbers else USUAL_TOKENS
    limit = limit_of(case.teacher, plan)
    longest = min(longest, limit) if limit else longest
    rows = max(1, plan.batch_tokens // longest)
    rows = min(rows, case.read.numbers) if case.read.numbers else rows
    found = footprint(case.teacher.folder, longest, rows=rows, dtype=plan.teacher_dtype, backward=False)
    narrow = plan.teacher_dtype != "float32"
    chunk = logits(rows * longest, found.width)
    at_head = found.kept + found.states + logits(rows * longest, found.width, narrow=narrow) + chunk // PASSES
    support = support_of("", top_k=plan.top_k or None)
    entries = 1 + support.top_k + support.sets * support.draws
    positions = min(CacheRequest.shard_tokens, case.read.positions[1] if case.read.numbers else USUAL_TOKENS)
    parts = {
        "weights": found.weights,
        # Weights in another dtype are read from their file, which stays mapped meanwhile.
        "activations": max(found.forward, at_head, _bytes_of_files(case.teacher, plan.teacher_dtype)),
        "shards": positions * (SHARDS * (8 * entries + BYTES_BESIDE) + PACKING * entries),
    }
    return _with_libraries(parts, case.teacher, len(case.teacher.tokenizer))


def _bytes_of_files(side: Side, dtype: str) -> int:
    """Return the bytes of the tensors that are stored in another dtype."""
    own = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    return sum(math.prod(shape) * sizes.get(kind, 1) for kind, shape in side.tensors.values() if kind != own)


def logits(tokens: int, width: int, *, narrow: bool = False) -> int:
    """Return the bytes of the logits of a chunk of rows, in fp32; of a product in 16 bits beside them if `narrow`."""
    from xtk.models.head import rows_in_a_chunk

    return (6 if narrow else 4) * width * min(tokens, rows_in_a_chunk(width))


def pass_tokens(case: Case, *, whole: bool = False) -> int:
    """Return the most tokens that a process reads in a forward pass of training: the longest documents together.

    With `whole` in all passes of a step that `--max-batch-tokens` makes of them.
    """
    plan, limit = case.plan, limit_of(case.student, case.plan)
    longest = [size for size, _ in case.read.longest[0]] or [min(limit or USUAL_TOKENS, USUAL_TOKENS)]
    longest = [min(size, limit) if limit else size for size in longest]
    size = plan.per_device_train_batch_size
    together = sum(longest[:size]) if len(longest) >= min(size, 64) else longest[0] * size
    if case.read.numbers and size > len(longest):
        together = longest[-1] * (size - len(longest)) + sum(longest)
    if not plan.max_batch_tokens:
        return together
    together *= plan.gradient_accumulation_steps
    return together if whole else max(longest[0], min(together, plan.max_batch_tokens))


def _with_libraries(parts: dict[str, int], side: Side, tokens: int, more: str = "") -> Forecast:
    """Add what libraries, `more` among them, and tokenizers take on a CPU."""
    if _on_cuda():
        return Forecast(parts, "cuda")
    known = class_of(side)
    libraries = _libraries("" if known is None else known.__name__, more)
    base = {"libraries": libraries + WORKING, "tokenizers": tokens * TOKENIZER}
    return Forecast(base | parts, "cpu")


@functools.lru_cache
def _libraries(model: str, more: str) -> int:
    """Return the bytes of a process that has imported what both commands import, and transformers' class of a model.

    A process of its own tells, which takes seconds; so the number is kept in the user's cache folder, for as long as
    the same packages are installed.
    """
    named = [f"from transformers import {model}"] if model else []
    named += [f"import {more}"] if more else []
    code = "; ".join([IMPORTS, *named, "print(resident())"])
    path = None
    # Nobody knows a home, a folder of packages cannot be read, or a variable is no UTF-8.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        path = cache_folder() / "libraries" / sha256(canonical_json([code, *_installed()])).removeprefix("sha256:")
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text(encoding="ascii"))
    found = _resident_after(code)
    if path is not None:
        with contextlib.suppress(OSError, XtkError), written_whole(path) as temporary:
            temporary.write_text(f"{found}\n", encoding="ascii")
    return found


def _installed() -> tuple[str, list[str], dict[str, str]]:
    """Return what the size of imports depends on: Python, machine, packages, words to the linker and the heap."""
    packages = {found.name for place in filter(None, sys.path) for found in Path(place).glob("*.dist-info")}
    told = {name: value for name, value in os.environ.items() if name.startswith(("GLIBC_", "LD_", "MALLOC_", "OMP_"))}
    machine = f"{platform.node()} {platform.machine()} {os.sysconf('SC_PAGE_SIZE')}"  # folders may be shared
    return f"{sys.version} {__version__} {machine}", sorted(packages), told


def _resident_after(code: str) -> int:
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

    from xtk.training.metrics import highest_memory

    return highest_memory(torch.device("cpu"))


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _there(device: str) -> int:
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


def disk(case: Case) -> Iterator[Finding]:
    """Forecast the bytes of the cache and of checkpoints, against what is free, and the hours of the teacher."""
    plan, reading = case.plan, case.read
    size = 0
    if case.cache is not None:
        found = totals(case.cache.manifest)
        what = f"the cache has {found['bytes']:,} bytes, {found['bytes'] / max(found['positions'], 1):.1f} a position"
        yield Finding("disk", "ok", what, figures=dict(found))
    elif reading.numbers:
        each = _bytes_per_position(case)
        size = round(each * reading.positions[1])
        told = f", estimated from caches of {USUAL_TOP_K['top-k']} ids" if plan.top_k else ""
        more = "" if reading.whole else " of the documents that were read; xtk cache-teacher --plan tells the whole"
        what = f"the cache: about {_amount(size)}, {reading.positions[1]:,} positions of {each:.1f} bytes{told}{more}"
        figures = {
            "bytes": size,
            "positions": reading.positions[1],
            "tokens": reading.tokens[1],
            "whole": reading.whole,
        }
        yield Finding("disk", "ok", what, figures=figures)
        yield _time(case)
    weights = sum(math.prod(shape) for _, shape in case.student.tensors.values())
    width = 2 if plan.dtype == "bfloat16" else 4
    # Each has weights and two moments; the student in the end has weights alone.
    kept = weights * width * (3 * (plan.save_total_limit + 1) + 1) + 4 * weights * (plan.ema_decay > 0)
    place = next(path for path in (plan.output.resolve(), *plan.output.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    level = "error" if size + kept > free else "ok"
    what = f"checkpoints take {_amount(kept)} at most, with the cache {_amount(size + kept)} of {_amount(free)} free"
    hint = "another -o, or --save-total-limit 1" if level == "error" else ""
    free_figures = {"checkpoints": kept, "cache": size, "free": free}
    yield Finding("disk", level, what, str(place), hint, free_figures)


def _bytes_per_position(case: Case) -> float:
    """Return about how many bytes a position takes in the cache that would be made."""
    if not case.plan.top_k:
        return BYTES_PER_POSITION
    return BYTES_WITHOUT_IDS + BYTES_PER_ID * min(case.plan.top_k, case.teacher.tokenizer.width)


def _time(case: Case) -> Finding:
    reading, rate = case.read, case.plan.rate
    if not rate:
        what = "nobody said how many tokens a second the teacher reads"
        return Finding("disk", "note", what, hint="--tokens-per-second, as xtk cache-teacher --plan measures it")
    seconds = reading.tokens[1] / rate
    more = "" if reading.whole else ", the documents that were read alone"
    what = f"the teacher reads for {duration(seconds)} at {rate:,.0f} tokens a second{more}"
    return Finding("disk", "ok", what, figures={"seconds": round(seconds, 3), "tokens_per_second": rate})


def _amount(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
