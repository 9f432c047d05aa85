"""What losses across tokenizers cost beside the others: making cells in the loader, and the head, forward and backward.

    python tests/benchmarks/bench_losses.py [ROWS] [H]

GSM8K as the real tokenizers of Llama 3 (student) and Qwen (teacher) read it; supports of 64 tokens and a tail, half of
them tokens that begin like the one that stands there. One thread, H = 64, fp32. Times are of 1,000 student tokens, in
seconds of the processor.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from common import DATA, processor_seconds, report

from xtk.lookup import lookup
from xtk.losses import LOSSES
from xtk.losses.byte_kernels import beginning
from xtk.losses.cells import Cells, Example, Ground, join_examples
from xtk.losses.head import Term, fused_loss
from xtk.models.head import rows_in_a_chunk
from xtk.projection.build import build_projection
from xtk.projection.next_bytes import NextBytes, Side, next_bytes
from xtk.projection.projection import Projection
from xtk.tokens.alignment import align_sequences
from xtk.tokens.document import Document
from xtk.tokens.sequence import sequences
from xtk.tokens.signal import Signal
from xtk.tokens.tokenizer import Tokenizer

K = 64


def supports(draw: np.random.Generator, side: Side, ids: np.ndarray, frequent: np.ndarray) -> Signal:
    """A teacher who names 64 tokens at each position."""
    chosen = []
    for token in ids[1:].tolist():
        near = np.zeros(0, np.int32)
        if side.ranks[token] >= 0:
            low, _, high = beginning(side, token, min(2, int(np.diff(side.starts)[side.ranks[token]])))
            near = side.order[draw.integers(low, high, K // 2)]
        chosen.append(np.unique(np.concatenate([[token], near, draw.choice(frequent, K // 2)])).astype(np.int32))
    sizes = [len(some) for some in chosen]
    said = [np.log(draw.dirichlet(np.full(size, 0.3)) * 0.95 + 1e-9) for size in sizes]
    tail, written = np.full(len(sizes), 0.05, np.float32), np.full(len(sizes), np.log(0.05), np.float32)
    positions = np.arange(1, len(ids), dtype=np.int32)
    offsets = np.cumsum([0, *sizes])
    logprobs = np.concatenate(said).astype(np.float32)
    return Signal(positions, offsets, np.concatenate(chosen), logprobs, tail, written, tail)


def batch(student: Tokenizer, teacher: Tokenizer, ground: NextBytes, rows: int) -> Example:
    """Some documents, seen by both."""
    draw = np.random.default_rng(0)
    lines = (DATA / "corpora" / "gsm8k_train.jsonl").read_text().splitlines()[: 1 + rows // 150]
    documents = [Document.of_text(" ".join(map(str, json.loads(line).values()))) for line in lines]
    examples = []
    pairs = list(zip(sequences(student, documents), sequences(teacher, documents), strict=True))
    frequent = np.concatenate([theirs.ids for _, theirs in pairs])
    for ours, theirs in pairs:
        signal = supports(draw, ground.teacher, theirs.ids, frequent)
        places = np.flatnonzero(ours.trained).astype(np.int64) - 1
        examples.append(Example(ours.ids, places, align_sequences(ours, theirs), theirs.ids, signal))
    return join_examples(examples)


def main() -> None:
    """Print a line a loss."""
    torch.set_num_threads(1)
    rows = []
    student, teacher = (Tokenizer(DATA / "tokenizers" / name) for name in ("llama3", "qwen"))
    started = time.perf_counter()
    ground = next_bytes(student, teacher)
    rows.append(("cells of bytes, once a run", f"{time.perf_counter() - started:.1f} s", ""))
    wanted, hidden = (int(text) for text in [*sys.argv[1:], *("1000", "64")[len(sys.argv) - 1 :]])
    example = batch(student, teacher, ground, wanted)
    columns = build_projection(student, teacher, "multitoken").columns
    exact = build_projection(student, teacher, "exact").columns
    same = batch(teacher, teacher, ground, wanted)
    cases: dict[str, tuple[Example, Ground, int]] = {
        "ce": (example, None, student.width),
        "boundary-kl": (example, columns, student.width),
        "byte-kl": (example, ground, student.width),
        "alm": (example, None, student.width),
        "uld": (example, None, student.width),
        "gold": (example, exact, student.width),
        "h-kl": (example, columns, student.width),
        "forward-kl": (same, Projection.identity(teacher.width).columns, teacher.width),
    }
    for name, (what, on, width) in cases.items():
        rule = lookup(LOSSES, name, "loss")()
        made: list[Cells] = []
        loading = processor_seconds(lambda rule=rule, what=what, on=on, made=made: made.append(rule.cells(what, on)), 3)
        term = Term.of(made[-1]).to(torch.device("cpu"), 1.0)
        torch.manual_seed(0)
        states = torch.randn(len(what.rows), hidden, requires_grad=True)
        weight = (torch.randn(width, hidden) / 16).requires_grad_()
        chunk = rows_in_a_chunk(width, torch.device("cpu"))

        def step(
            states: torch.Tensor = states, weight: torch.Tensor = weight, term: Term = term, chunk: int = chunk
        ) -> None:
            states.grad = weight.grad = None
            fused_loss(states, weight, None, [term], chunk)[0].backward()

        kilo = len(what.rows) / 1000
        size = f"{made[-1].items} items, {len(made[-1].rows)} entries of {len(what.rows)} tokens"
        rows.append((f"{name}, loader", f"{1e3 * loading / kilo:.1f} ms ({size})", ""))
        rows.append((f"{name}, head", f"{1e3 * processor_seconds(step, 1) / kilo:.0f} ms", ""))
    report(__file__, rows)


if __name__ == "__main__":
    main()
