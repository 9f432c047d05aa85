"""Time to find the 64 largest logits of each row, compared with PyTorch's functions.

    python tests/benchmarks/bench_top_k.py [ROWS]

V = 128,256, fp32, one thread; milliseconds of CPU time per row. The mask keeps a fifth of the tokens.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from measurement import cpu_seconds, report

from xtk.losses.kernels.chunked_softmax_numba import largest_columns

V, K = 128_256, 64


def main() -> None:
    """Print a row for each function."""
    torch.set_num_threads(1)
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(0)) * 3
    rows, offsets = np.arange(n), np.arange(n + 1) * K
    all_tokens, fifth = np.ones(V, np.bool_), np.random.default_rng(0).random(V) < 0.2
    whole_row_offsets = np.arange(3) * V
    functions = {
        "logits.sort()": lambda: logits.sort(dim=1, descending=True),
        "logits.topk(64)": lambda: logits.topk(K, dim=1),
        "a heap, all tokens": lambda: largest_columns(logits.numpy(), rows, offsets, all_tokens),
        "a heap, a fifth of the tokens": lambda: largest_columns(logits.numpy(), rows, offsets, fifth),
        "exponentials of the row": lambda: logits.exp(),
    }
    table = [(name, f"{1e3 * cpu_seconds(function, 3) / n:.2f} ms", "") for name, function in functions.items()]
    seconds = cpu_seconds(lambda: largest_columns(logits.numpy(), rows[:2], whole_row_offsets, all_tokens), 3)
    table.append(("a heap, all tokens, all ranks", f"{1e3 * seconds / 2:.2f} ms", ""))
    report(__file__, table)


if __name__ == "__main__":
    main()
