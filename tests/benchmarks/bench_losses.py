"""Cost of the losses: data loader, memory of the fused head, time relative to cross-entropy, a dense W, and TRL.

    python tests/benchmarks/bench_losses.py [cells] [memory] [time] [dense] [trl] [--rows N] [--hidden H] [--rounds R]
        [--losses NAME ...] [--memory-rows N ...] [--dtype float32|bfloat16|mixed]

GSM8K, tokenized by the real tokenizers of Llama 3 (student, V = 128,256) and Qwen (teacher); supports of 64 tokens and
a remainder, half of them tokens with the same first bytes as the observed one. On CUDA if it is available: then
N = 8,192, `--dtype mixed` (fp32 weights and gradients, products in bf16, as with `distill --mixed-precision bf16`),
Liger's cross-entropy and `max_memory_allocated`. On a CPU N = 256 and fp32: few CPUs multiply bf16 in hardware. Times
are medians, and ratios are of one repetition each, since all functions alternate. On a CPU they are CPU seconds of one
thread, which other load on the machine hardly affects.

Memory is that of a bf16 head, or with `--dtype mixed` of an fp32 head, beyond inputs and their gradients. On a CPU it
is the allocator's trace (every block that torch allocates or frees). Arithmetic on whole chunks is skipped during the
trace: it does not change which blocks are allocated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measurement import DATA, cpu_seconds, real_data, report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtk.batches.losses_per_teacher import PAIR_PROJECTION_METHOD
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.losses import LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.head import fused_loss
from xtk.losses.interface import ComparisonSpace, LossInputs, join_inputs
from xtk.losses.kernels.token_boundaries_numba import prefix_range
from xtk.models.output_head import MAX_CHUNK_BYTES, OutputHead, chunk_rows
from xtk.name_registry import load_registered
from xtk.projection.build import build_projection
from xtk.projection.projection import SparseProjection
from xtk.projection.vocabulary_byte_partition import SortedVocabulary, build_byte_partition
from xtk.text.alignment import align_sequences
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SORTED = ("uld", "gold", "h-kl")
COMPARED = ("byte-kl", "bpm", "escd", "simct", "strict")  # compared with the mean of the others
Row = tuple[str, str, str]

K = 64


def random_supports(
    rng: np.random.Generator, side: SortedVocabulary, ids: np.ndarray, frequent: np.ndarray
) -> TeacherLogprobs:
    """Return random teacher log-probabilities of 64 tokens per position."""
    support_ids = []
    for token in ids[1:].tolist():
        similar = np.zeros(0, np.int32)
        if side.sorted_indices[token] >= 0:
            low, _, high = prefix_range(
                side, token, min(2, int(np.diff(side.byte_offsets)[side.sorted_indices[token]]))
            )
            similar = side.token_ids[rng.integers(low, high, K // 2)]
        support_ids.append(np.unique(np.concatenate([[token], similar, rng.choice(frequent, K // 2)])).astype(np.int32))
    sizes = [len(ids_of_position) for ids_of_position in support_ids]
    logprobs = [np.log(rng.dirichlet(np.full(size, 0.3)) * 0.95 + 1e-9) for size in sizes]
    remainders = np.full(len(sizes), 0.05, np.float32)
    positions = np.arange(1, len(ids), dtype=np.int32)
    offsets = np.cumsum([0, *sizes])
    return TeacherLogprobs(
        positions, offsets, np.concatenate(support_ids), np.concatenate(logprobs).astype(np.float32), *[remainders] * 3
    )


def loss_inputs(student: Tokenizer, teacher: Tokenizer, side: SortedVocabulary, rows: int) -> LossInputs:
    """Return the loss inputs of some documents, with tokens of both tokenizers."""
    rng = np.random.default_rng(0)
    lines = (DATA / "corpora" / "gsm8k_train.jsonl").read_text().splitlines()
    texts = (" ".join(map(str, json.loads(line).values())) for line in lines)
    documents, tokens = list[Document](), 0
    while tokens < rows:  # the last document may exceed the number of rows
        documents.append(Document.from_text(next(texts)))
        tokens += len(tokenize_documents(student, documents[-1:])[0])
    examples = []
    pairs = list(zip(tokenize_documents(student, documents), tokenize_documents(teacher, documents), strict=True))
    frequent = np.concatenate([teacher_tokens.ids for _, teacher_tokens in pairs])
    for student_tokens, teacher_tokens in pairs:
        teacher_logprobs = random_supports(rng, side, teacher_tokens.ids, frequent)
        positions = np.flatnonzero(student_tokens.train_mask).astype(np.int64) - 1
        sampling_logprobs = np.full(len(positions), -2, np.float32)
        examples.append(
            LossInputs(
                student_tokens.ids,
                positions,
                align_sequences(student_tokens, teacher_tokens),
                teacher_tokens.ids,
                teacher_logprobs,
                sampling_logprobs,
            )
        )
    return join_inputs(examples)


class LossBenchmark:
    """Loss inputs of at least a number of rows, and the comparison spaces of the losses."""

    def __init__(self, rows: int) -> None:
        folder = real_data() / "tokenizers"
        self.student, self.teacher = (Tokenizer(folder / name) for name in ("llama3", "qwen"))
        self.bytes = build_byte_partition(self.student, self.teacher)
        self.columns, self.pairs = (
            build_projection(self.student, self.teacher, method).columns
            for method in ("multitoken", PAIR_PROJECTION_METHOD)
        )
        self.cross_tokenizer = loss_inputs(self.student, self.teacher, self.bytes.teacher, rows)
        self.same_tokenizer = loss_inputs(self.student, self.student, self.bytes.student, rows)
        self.width, self.rows = self.student.embedding_rows, len(self.cross_tokenizer.positions)

    def cells(self, name: str) -> LossCells:
        """Return the cells of a loss."""
        loss = load_registered(LOSSES, name, "loss")()
        comparison_spaces: dict[str, ComparisonSpace] = {
            "bytes": self.bytes,
            "projection": self.columns,
            "pairs": self.pairs,
        }
        if loss.comparison_space == "tokens":
            return loss.build_cells(self.same_tokenizer, SparseProjection.identity(self.width).columns)
        return loss.build_cells(self.cross_tokenizer, comparison_spaces.get(loss.comparison_space))

    def term(self, name: str) -> LossCells:
        """Return the cells of a loss on the device, scaled to the mean over its items."""
        term = self.cells(name)
        return term.to(DEVICE, 1 / max(1, term.num_items))


def random_head(rows: int, hidden: int, width: int, dtype_name: str) -> tuple[Tensor, Tensor]:
    """Return hidden states and the matrix of an output head, both trainable; "mixed": both fp32."""
    torch.manual_seed(0)
    dtype = torch.float32 if dtype_name == "mixed" else getattr(torch, dtype_name)
    states = torch.randn(rows, hidden, dtype=dtype, device=DEVICE)
    weight = torch.randn(width, hidden, dtype=dtype, device=DEVICE).mul_(hidden**-0.5)
    return states.requires_grad_(), weight.requires_grad_()


def autocast(dtype_name: str) -> torch.autocast:
    """Return the context in which a step of this dtype runs."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype_name == "mixed")


def step_of(term: LossCells, states: Tensor, weight: Tensor, dtype_name: str = "") -> Callable[[], None]:
    """Return a function that runs one forward and backward pass of a loss."""

    def step() -> None:
        states.grad = weight.grad = None
        with autocast(dtype_name):
            total, _ = fused_loss(states, OutputHead(weight), [term], chunk_rows(len(weight)))
        total.backward()

    return step


def chunked_ce(targets: Tensor, states: Tensor, weight: Tensor, dtype_name: str) -> Callable[[], None]:
    """Return a minimal cross-entropy step: three matrix products per chunk and a softmax in place."""
    chunk = chunk_rows(len(weight))
    compute = torch.bfloat16 if dtype_name == "mixed" else states.dtype
    memory = torch.empty(min(chunk, len(states)), len(weight), dtype=compute, device=DEVICE)

    @torch.no_grad()
    def step() -> None:
        states.grad, weight.grad = torch.empty_like(states), torch.zeros_like(weight)
        total, matrix = torch.zeros((), device=DEVICE), weight.to(compute)
        for start in range(0, len(states), chunk):
            rows, chunk_targets = states[start : start + chunk].to(compute), targets[start : start + chunk, None]
            logits = torch.mm(rows, matrix.T, out=memory[: len(rows)])
            target_logits = logits.gather(1, chunk_targets)
            maxima = logits.amax(1, keepdim=True)
            sums = logits.sub_(maxima).exp_().sum(1, keepdim=True)
            total += (sums.log() + maxima - target_logits).sum()
            logits.div_(sums).scatter_add_(1, chunk_targets, torch.full_like(target_logits, -1))
            if compute == states.dtype:
                torch.mm(logits, matrix, out=states.grad[start : start + chunk])
                weight.grad.addmm_(logits.T, rows)
            else:
                states.grad[start : start + chunk] = logits @ matrix
                weight.grad.add_(logits.T @ rows)

    return step


def liger_ce(targets: Tensor, states: Tensor, weight: Tensor, dtype_name: str) -> Callable[[], None] | None:
    """Return a step of Liger's fused linear cross-entropy, or None if it is not installed."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    loss = LigerFusedLinearCrossEntropyLoss()

    def step() -> None:
        states.grad = weight.grad = None
        with autocast(dtype_name):
            total = loss(weight, states, targets)
        total.backward()

    return step


def in_turns(functions: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each function; they alternate, after one warm-up call each."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(rounds + 1):
        for name, function in functions.items():
            started = _clock()
            function()
            if repeat:
                seconds[name].append(_clock() - started)
    return seconds


def _clock() -> float:
    if DEVICE.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class NoArithmetic(TorchDispatchMode):
    """Matrix products, and in-place operations on whole chunks, allocate their memory and compute nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        aten = torch.ops.aten
        in_place = (aten.sub_.Tensor, aten.exp_.default, aten.mul_.Tensor, aten.copy_.default)
        if function is aten.addmm_.default or (function in in_place and arguments[0].numel() > MAX_CHUNK_BYTES // 64):
            return arguments[0]
        if function is aten.mm.out:
            return keywords["out"]
        if function is aten.mm.default:
            return arguments[0].new_zeros(len(arguments[0]), arguments[1].shape[1])
        return function(*arguments, **(keywords or {}))


def peak_bytes(function: Callable[[], None]) -> int:
    """Return the peak of allocated bytes, beyond those at the start."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(allocated.max(initial=0))


def measure_cells(options: argparse.Namespace) -> list[Row]:
    """Return rows with the time of the data loader."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    build_byte_partition(*(Tokenizer(DATA / "tokenizers" / name) for name in ("llama3", "qwen")))
    rows = [("cells of bytes, once a run", f"{time.perf_counter() - started:.1f} s", "")]
    bench, loader_seconds = LossBenchmark(1000), {}
    for name in options.losses:
        cells: list[LossCells] = []
        seconds = cpu_seconds(lambda name=name, cells=cells: cells.append(bench.cells(name)), 9)
        size = f"{cells[-1].num_items} items, {int(cells[-1].entry_offsets[-1])} entries"
        loader_seconds[name] = seconds
        rows.append((f"{name}, loader, 1,000 student tokens", f"{1e3 * seconds:.1f} ms ({size})", ""))
    others = [name for name in options.losses if name not in (*SORTED, *COMPARED, "ce")]
    for name in [one for one in COMPARED if one in loader_seconds and others]:
        ratio = loader_seconds[name] / statistics.mean(loader_seconds[other] for other in others)
        rows.append((f"{name}, loader, over the mean of {', '.join(others)}", f"{ratio:.2f} x", "1.3 x"))
    return rows


def measure_memory(options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows with the memory of the fused head beyond inputs and their gradients."""
    for count in options.memory_rows:
        bench = LossBenchmark(count)
        for name in options.losses:
            dtype_name = "mixed" if options.dtype == "mixed" else "bfloat16"
            states, weight = random_head(bench.rows, options.hidden, bench.width, dtype_name)
            step = step_of(bench.term(name), states, weight, dtype_name)
            if DEVICE.type == "cuda":
                peak = peak_bytes(step)
            else:
                with NoArithmetic():
                    peak = peak_bytes(step)
            extra = peak - sum(tensor.numel() * tensor.element_size() for tensor in (states, weight))
            yield f"{name}, extra memory, N = {bench.rows:,}", f"{extra / 1e9:.3f} GB", "0.5 GB"


def measure_time(options: argparse.Namespace) -> list[Row]:
    """Return rows with the time of forward and backward of each loss, relative to cross-entropy."""
    torch.set_num_threads(1)
    bench = LossBenchmark(options.rows)
    states, weight = random_head(bench.rows, options.hidden, bench.width, options.dtype)
    targets = torch.from_numpy(bench.cross_tokenizer.student_ids[bench.cross_tokenizer.positions + 1].astype(np.int64))
    targets = targets.to(DEVICE)
    functions = {"own chunked cross-entropy": chunked_ce(targets, states, weight, options.dtype)}
    liger = liger_ce(targets, states, weight, options.dtype) if DEVICE.type == "cuda" else None
    if liger is not None:
        functions = {"Liger's cross-entropy": liger}
    (baseline,) = functions
    functions |= {name: step_of(bench.term(name), states, weight, options.dtype) for name in options.losses}
    seconds = in_turns(functions, options.rounds)
    shape = f"N = {bench.rows:,}, H = {options.hidden:,}, {options.dtype}"
    kilo = 1e3 / bench.rows
    rows = [(f"{baseline}, {shape}", f"{statistics.median(seconds[baseline]) * kilo:.2f} s for 1,000 tokens", "")]
    for name in options.losses:
        ratio = statistics.median([one / other for one, other in zip(seconds[name], seconds[baseline], strict=True)])
        rows.append((f"{name}, time over it", f"{ratio:.3f} x", f"{1.6 if name in SORTED else 1.15} x"))
    others = [name for name in options.losses if name not in (*SORTED, *COMPARED, "ce")]
    for name in [one for one in COMPARED if one in seconds and others]:
        means = [statistics.mean(seconds[other][at] for other in others) for at in range(options.rounds)]
        ratio = statistics.median([one / other for one, other in zip(seconds[name], means, strict=True)])
        rows.append((f"{name}, time over the mean of {', '.join(others)}", f"{ratio:.3f} x", "1.3 x"))
    return rows


def measure_dense(options: argparse.Namespace) -> list[Row]:
    """Return rows that compare p-kl with a product with W as a dense matrix.

    Sizes are an eighth of the real ones, because W is [V, U].
    """
    torch.set_num_threads(1)
    width, hidden, count = 16_032, options.hidden // 8, options.rows
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 4, width)
    projection = SparseProjection(
        row_offsets=np.concatenate([[0], np.cumsum(sizes)]),
        teacher_ids=np.concatenate([np.sort(rng.choice(width, size, replace=False)) for size in sizes]).astype(
            np.int32
        ),
        weights=np.repeat(1 / sizes, sizes).astype(np.float32),
        student_cells=np.full(width, -1, np.int32),
        teacher_cells=np.full(width, -1, np.int32),
    )
    teacher_ids = np.unique(projection.teacher_ids)
    ids = np.sort(np.stack([rng.choice(teacher_ids, K, replace=False) for _ in range(count)]), 1).astype(np.int32)
    probs = (rng.dirichlet(np.full(K, 0.3), count) * 0.95).astype(np.float32) + 1e-9
    positions = np.arange(1, count + 1, dtype=np.int32)
    teacher_logprobs = TeacherLogprobs(
        positions, np.arange(0, count * K + 1, K), ids.ravel(), np.log(probs).ravel(), *[probs[:, 0]] * 3
    )
    spans = np.stack([positions, positions + 1, positions, positions + 1], 1)
    tokens = np.zeros(count + 1, np.int32)
    example = LossInputs(tokens, np.arange(count), spans, tokens, teacher_logprobs)
    cells = load_registered(LOSSES, "p-kl", "loss")().build_cells(example, projection.columns)
    states, weight = random_head(count, hidden, width, "float32")
    sparse = step_of(cells.to(DEVICE, 1.0), states, weight)
    targets, columns = torch.from_numpy(probs).to(DEVICE), torch.from_numpy(ids.astype(np.int64)).to(DEVICE)
    matrix = torch.zeros(width, width, device=DEVICE)
    matrix[projection.entry_rows, torch.from_numpy(projection.teacher_ids.astype(np.int64))] = torch.from_numpy(
        projection.weights
    ).to(DEVICE)

    def dense() -> None:
        states.grad = weight.grad = None
        y = (torch.softmax(states @ weight.T, 1) @ matrix).gather(1, columns)
        t, y = (torch.cat([entries, 1 - entries.sum(1, keepdim=True)], 1) for entries in (targets, y))
        (t * (t / y.clamp_min(1e-9)).log()).sum().backward()

    seconds = in_turns({"sparse": sparse, "dense": dense}, options.rounds)
    dense_gradient = weight.grad  # of the last function that ran: the dense one
    assert dense_gradient is not None
    expected = dense_gradient.clone()
    sparse()
    assert weight.grad is not None
    distance = float((weight.grad - expected).norm() / expected.norm())
    speedup = statistics.median([one / other for one, other in zip(seconds["dense"], seconds["sparse"], strict=True)])
    peaks = []
    for function in (sparse, dense):
        states.grad = weight.grad = None  # memory that is freed during the trace would count as negative
        peaks.append(peak_bytes(function))
    extra_bytes = [peak - 4 * (states.numel() + weight.numel()) for peak in peaks]
    total_bytes = [extra_bytes[0] + 8 * len(projection.weights), extra_bytes[1] + 4 * width**2]
    shape = f"V = U = {width:,}, H = {hidden}, N = {count}"
    return [
        (f"p-kl over a dense product with W, {shape}", f"{speedup:.1f} x faster", "5 x"),
        (
            "the same, memory beyond gradients, with W",
            f"{total_bytes[0] / 1e9:.3f} of {total_bytes[1] / 1e9:.3f} GB",
            "a tenth",
        ),
        ("the same, distance of the gradients", f"{distance:.1e}", ""),
    ]


def measure_trl(options: argparse.Namespace) -> list[Row]:
    """Return rows with TRL's losses on the same states and head; the teacher's full logits cost TRL nothing here."""
    try:
        from bench_trl import FOLDER, VERSION

        if importlib.util.find_spec("trl") is None and not (FOLDER / "trl").is_dir():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER)]
            subprocess.run([*command, f"trl=={VERSION}"], check=True, capture_output=True)
        sys.path.append(str(FOLDER))  # an installed version comes first
        from trl.experimental.gold.gold_trainer import GOLDTrainer, ULDLoss
    except (ImportError, subprocess.CalledProcessError, OSError, RuntimeError) as error:
        return [("TRL", f"is not there: {error}", "")]
    torch.set_num_threads(1)
    bench = LossBenchmark(options.rows)
    count = bench.rows
    states, weight = random_head(count, options.hidden, bench.width, options.dtype)
    teacher = torch.randn(1, count, bench.width, dtype=states.dtype, device=DEVICE)
    ids = torch.from_numpy(bench.cross_tokenizer.student_ids[bench.cross_tokenizer.positions].astype(np.int64))[
        None
    ].to(DEVICE)
    names = {f"{number}": number for number in range(bench.width)}
    partly_shared = {(name if number % 5 else f"other {name}"): number for name, number in names.items()}
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_student_temperature=1.0,
        uld_teacher_temperature=1.0, uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_extended_uld=False,
        uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=True, uld_hybrid_matched_weight=None,
        uld_hybrid_unmatched_weight=None, beta=0.5,
    )  # fmt: skip
    tokenizers = [
        SimpleNamespace(get_vocab=lambda table=table: table, vocab_size=len(table)) for table in (names, partly_shared)
    ]
    gold = ULDLoss(config, *tokenizers, device=DEVICE)

    def step_with(loss: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            states.grad = weight.grad = None
            with autocast(options.dtype):
                total = loss((states @ weight.T)[None]).sum()
            total.backward()

        return step

    functions = {
        "jsd": step_of(bench.term("jsd"), states, weight, options.dtype),
        "byte-kl": step_of(bench.term("byte-kl"), states, weight, options.dtype),
        "TRL's JSD": step_with(lambda logits: GOLDTrainer.generalized_jsd_loss(logits, teacher)),
        "TRL's GOLD": step_with(lambda logits: gold(logits, teacher, ids, ids, ids, ids)),
    }
    if "gold" in LOSSES:
        functions["gold"] = step_of(bench.term("gold"), states, weight, options.dtype)
    seconds, rows = in_turns(functions, options.rounds), list[Row]()
    for name, function in functions.items():
        states.grad = weight.grad = None
        extra = peak_bytes(function) - sum(tensor.numel() * tensor.element_size() for tensor in (states, weight))
        result = f"{statistics.median(seconds[name]):.2f} s, {extra / 1e9:.2f} GB beyond gradients"
        rows.append((f"{name}, N = {count:,}, H = {options.hidden:,}, {options.dtype}", result, ""))
    return rows


MEASURES = {
    "cells": measure_cells,
    "memory": measure_memory,
    "time": measure_time,
    "dense": measure_dense,
    "trl": measure_trl,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    cuda = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(MEASURES), help=", ".join(MEASURES))
    parser.add_argument("--rows", type=int, default=8192 if cuda else 256)
    parser.add_argument("--memory-rows", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "mixed"), default="mixed" if cuda else "float32")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES))
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for what in options.what:
        for row in MEASURES[what](options):
            sys.stderr.write(f"{row[0]}: {row[1]}\n")
            rows.append(row)
    report(__file__, [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", ""), *rows])


if __name__ == "__main__":
    main()
