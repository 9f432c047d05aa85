"""Floor 3: what a student is trained with. One file a loss, one line in the table.

A loss cuts what both models say into *cells*; the distance is always a Kullback-Leibler divergence
between two true distributions over cells and an explicit other cell. docs/explanation/losses.md derives it.
"""

from __future__ import annotations

from xtk.losses.specification import LossSpecification, parse_losses

LOSSES = {
    "ce": "xtk.losses.ce:CrossEntropy",
    "forward-kl": "xtk.losses.forward_kl:ForwardKL",
    "boundary-kl": "xtk.losses.boundary_kl:BoundaryKL",
    "p-kl": "xtk.losses.p_kl:PKL",
}

__all__ = ["LOSSES", "LossSpecification", "parse_losses"]
