"""What `cache-teacher` and `distill` will take: memory, disk and hours.

`docs/how-to/doctor.md` has the formulas.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xtk.artifacts.teacher_cache import totals
from xtk.doctor.case import Case, Finding, Plan, limit_of
from xtk.errors import XtkError
from xtk.terminal import duration

GIB = 2**30
# Of the default cache, measured: docs/explanation/scale.md.
BYTES_PER_POSITION = 43.3
# What distill holds on a CPU beside libraries and tensors: compiled kernels, threads, what malloc keeps. Ours, of one
# machine: a model of 0.01 GiB held 0.745, and libraries alone 0.56.
WORKING = 190 << 20
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
    for command, forecast in (("cache-teacher", of_caching), ("distill", of_training)):
        if command == "cache-teacher" and case.cache is not None:
            continue
        side = case.teacher if command == "cache-teacher" else case.student
        if not side.configuration:
            continue
        try:
            found = forecast(case)
        except XtkError as wrong:
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
    if command == "cache-teacher":
        hint = "--batch-tokens, --dtype bfloat16, --engine tp_size=N"
    level = "error" if found.total > there else "warning" if found.total > 0.9 * there else "ok"
    return Finding("memory", level, what, hint=hint if level != "ok" else "", figures=figures)


def of_training(case: Case) -> Forecast:
    """Forecast `distill`: weights, gradients and AdamW's two moments, the pass, the logits of a chunk.

    The pass holds most either where the body's forward pass has ended, with the head's gradient and logits of a chunk
    and of its gradient beside what was kept; or somewhere in the backward pass, with the gradients made so far.

    Raises:
        XtkError: the model cannot be run without weights.
    """
    from xtk.doctor.footprint import footprint

    plan, layout = case.plan, case.plan.layout
    tokens = max(1, -(-pass_tokens(case) // layout.cp))
    found = footprint(
        case.student.folder,
        tokens,
        dtype=plan.dtype,
        mixed_precision=plan.mixed_precision,
        gradient_checkpointing=plan.gradient_checkpointing,
        attn_implementation=plan.attn_implementation,
    )
    shards = layout.fsdp * layout.cp * layout.tp if layout.sharded else 1
    weights = found.weights // shards
    at_head = found.kept + found.head // layout.tp + 2 * logits(tokens, found.width // layout.tp)
    # Gradients of a block are shared out as soon as they are there.
    in_backward = found.backward - (found.weights - weights) + found.head // shards
    # Gradients of the micro-batches before are there already.
    before = weights if plan.gradient_accumulation_steps > 1 else 0
    peak = max(at_head + before, in_backward, weights)
    replicas = layout.copies > 1 and not layout.sharded
    parts = {
        "weights": weights,
        "AdamW": 2 * weights,
        "gradients and activations": peak,
        "gathered weights": 2 * found.largest if layout.fsdp * layout.cp > 1 and layout.sharded else 0,
        "buckets of DDP": weights if replicas else 0,
        "average": 4 * found.weights // {"float32": 4}.get(plan.dtype, 2) // shards if plan.ema_decay else 0,
    }
    return _with_libraries(parts, WORKING)


def of_caching(case: Case) -> Forecast:
    """Forecast `cache-teacher`: weights, the forward pass, and logits of a chunk.

    Raises:
        XtkError: the model cannot be run without weights.
    """
    from xtk.doctor.footprint import footprint

    plan = case.plan
    longest = case.read.longest[1][0][0] if case.read.numbers else USUAL_TOKENS
    limit = limit_of(case.teacher, plan)
    longest = min(longest, limit) if limit else longest
    rows = max(1, plan.batch_tokens // longest)
    rows = min(rows, case.read.numbers) if case.read.numbers else rows
    found = footprint(case.teacher.folder, longest, rows=rows, dtype=plan.teacher_dtype, backward=False)
    work = max(found.forward, found.kept + 2 * logits(rows * longest, found.width))
    return _with_libraries({"weights": found.weights, "activations": work})


def logits(tokens: int, width: int) -> int:
    """Return the bytes of the logits of a chunk of rows, in fp32."""
    from xtk.models.head import rows_in_a_chunk

    return 4 * width * min(tokens, rows_in_a_chunk(width))


def pass_tokens(case: Case) -> int:
    """Return the most tokens that a process reads in a forward pass of training: the longest documents together."""
    plan, limit = case.plan, limit_of(case.student, case.plan)
    longest = [size for size, _ in case.read.longest[0]] or [min(limit or USUAL_TOKENS, USUAL_TOKENS)]
    longest = [min(size, limit) if limit else size for size in longest]
    size = plan.per_device_train_batch_size
    together = sum(longest[:size]) if len(longest) >= min(size, 64) else longest[0] * size
    if case.read.numbers and size > len(longest):
        together = longest[-1] * (size - len(longest)) + sum(longest)
    return max(longest[0], min(together, plan.max_batch_tokens)) if plan.max_batch_tokens else together


def _with_libraries(parts: dict[str, int], working: int = 0) -> Forecast:
    """Add what libraries take on a CPU: as much as they take in this process, which has imported them too."""
    import torch

    if torch.cuda.is_available():
        return Forecast(parts, "cuda")
    import accelerate  # noqa: F401  # what distill imports
    import pyarrow  # noqa: F401

    return Forecast({"libraries": _resident() + working, **parts}, "cpu")


def _resident() -> int:
    """Return the bytes of memory that this process has now."""
    from xtk.training.metrics import highest_memory

    path = Path("/proc/self/statm")
    if path.is_file():
        import resource

        return int(path.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    import torch

    return highest_memory(torch.device("cpu"))


def _there(device: str) -> int:
    """Return the memory of a device, or of this machine as far as this process may have it."""
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    import os

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
        size = round(BYTES_PER_POSITION * reading.positions[1])
        more = "" if reading.whole else " of the documents that were read; xtk cache-teacher --plan tells the whole"
        what = (
            f"the cache: about {_amount(size)}, {reading.positions[1]:,} positions of {BYTES_PER_POSITION} bytes{more}"
        )
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
