"""How long it takes to find the 64 largest of each row of logits, beside what torch has for it.

    python tests/benchmarks/bench_top_k.py [ROWS]

V = 128,256, fp32, one thread; milliseconds of the processor, a row. The mask leaves a fifth of the tokens.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from measurement import processor_seconds, report

from xtk.losses.chunked_softmax_numba import largest_columns

V, K = 128_256, 64


def main() -> None:
    """Print a line a way."""
    torch.set_num_threads(1)
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(0)) * 3
    rows, offsets = np.arange(n), np.arange(n + 1) * K
    every, some = np.ones(V, np.bool_), np.random.default_rng(0).random(V) < 0.2
    whole = np.arange(3) * V
    ways = {
        "logits.sort()": lambda: logits.sort(dim=1, descending=True),
        "logits.topk(64)": lambda: logits.topk(K, dim=1),
        "a heap, all tokens": lambda: largest_columns(logits.numpy(), rows, offsets, every),
        "a heap, a fifth of the tokens": lambda: largest_columns(logits.numpy(), rows, offsets, some),
        "exponentials of the row": lambda: logits.exp(),
    }
    told = [(name, f"{1e3 * processor_seconds(way, 3) / n:.2f} ms", "") for name, way in ways.items()]
    seconds = processor_seconds(lambda: largest_columns(logits.numpy(), rows[:2], whole, every), 3)
    told.append(("a heap, all tokens, all ranks", f"{1e3 * seconds / 2:.2f} ms", ""))
    report(__file__, told)


if __name__ == "__main__":
    main()
