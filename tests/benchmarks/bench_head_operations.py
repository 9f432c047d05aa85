"""Operations on the device for each chunk of the fused head and losses, counted on the simulated device of the tests.

An operation is a launch of at least one kernel. The counts depend on the losses, not on the sizes.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from measurement import report

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "losses"))
from reference_losses import random_case
from simulated_cuda import CUDA, SimulatedCuda
from test_loss_contract import cells_of

from xtk.losses import head as fused_head
from xtk.losses.head import chunk_starts, fused_loss
from xtk.models.output_head import OutputHead
from xtk.parallel.host_to_device import to_device

OBJECTIVES = (("ce",), ("byte-kl",), ("ce", "byte-kl"), ("ce", "bpm"), ("p-kl",), ("gold",))
HALF = {("ce",): 41, ("ce", "byte-kl"): 142, ("gold",): 201}  # of the counts on 2026-11-28


def operations_per_chunk(names: tuple[str, ...]) -> Counter[str]:
    """Return the operations of a chunk by name, with fp32 weights and products in bf16."""
    case = random_case(3, K=6)
    counts, chunks = [], []
    for rows in (1000, 7):
        with SimulatedCuda() as counted:
            terms = [cells_of(name, case).to(CUDA, 1.0) for name in names]
            leaves = [to_device(one.float(), CUDA).detach().requires_grad_() for one in (case.states, case.weight)]
            counted.operations.clear()
            fused_loss(leaves[0], OutputHead(leaves[1]), terms, rows, has_unit_gradient=True)[0].backward()
        overlap = max(term.ROWS_BEFORE for term in terms)
        several = sum(bool(term.has_remainder.any()) for term in terms) > 1  # as in `_forward_backward`
        chunks.append(len(chunk_starts(len(leaves[0]), max(1, rows // (1 + several) - overlap), terms)) - 1)
        counts.append(counted.operations)
    few, many = counts
    return Counter({name: round((many[name] - few[name]) / (chunks[1] - chunks[0])) for name in many})


def main() -> None:
    """Count and print; with `--names`, the operations of each objective."""
    fused_head.compute_dtype = lambda states, weight: torch.bfloat16
    rows = []
    for names in OBJECTIVES:
        counts = operations_per_chunk(names)
        rows.append((" and ".join(names), f"{counts.total()} operations", str(HALF.get(names, ""))))
        if "--names" in sys.argv:
            print(names, counts.most_common(), file=sys.stderr)
    report(__file__, rows)


if __name__ == "__main__":
    main()
