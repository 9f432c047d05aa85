"""Floor 3: what a student is trained with. One file a loss, one line in the table.

A loss cuts what both models say into *cells*; the distance is a divergence between two true distributions over
cells and an explicit other cell. docs/explanation/losses.md derives it.
"""

from __future__ import annotations

from xtk.losses.specification import AUTO, LossSpecification, parse_losses

LOSSES = {
    "ce": "xtk.losses.ce:CrossEntropy",
    "forward-kl": "xtk.losses.same_tokenizer:ForwardKL",
    "reverse-kl": "xtk.losses.same_tokenizer:ReverseKL",
    "jsd": "xtk.losses.same_tokenizer:JSD",
    "skew-forward-kl": "xtk.losses.same_tokenizer:SkewForwardKL",
    "skew-reverse-kl": "xtk.losses.same_tokenizer:SkewReverseKL",
    "tvd": "xtk.losses.same_tokenizer:TVD",
    "boundary-kl": "xtk.losses.boundary_kl:BoundaryKL",
    "p-kl": "xtk.losses.p_kl:PKL",
    "byte-kl": "xtk.losses.byte_kl:ByteKL",
    "alm": "xtk.losses.alm:ALM",
    "uld": "xtk.losses.uld:ULD",
    "gold": "xtk.losses.gold:GOLD",
    "h-kl": "xtk.losses.h_kl:HKL",
    "policy-gradient": "xtk.losses.policy_gradient:PolicyGradient",
}

# What learns from documents that the student drew, and has no part in others. Their values are no distances.
SURROGATES = ("policy-gradient",)

# What a loss compares on.
GROUNDS = {
    "text": "the student alone",
    "tokens": "a teacher with the student's own tokenizer",
    "projection": "a teacher with another tokenizer, through a projection",
    "pairs": "a teacher with another tokenizer, through tokens of equal bytes",
    "spans": "a teacher with any tokenizer: spans of equal bytes",
    "bytes": "a teacher with any tokenizer: what both say about the next bytes",
}

# What a loss asks of a teacher; see `SUPPORTS` for what a cache holds.
ASKS = {
    "nothing": "nothing",
    "realised": "log-probabilities of the tokens that stand there: any support, `none` too",
    "distribution": "a distribution: any support but `none`; what is not linear in it reads no draws, so not `sample`",
    "ranks": "the likeliest tokens, exactly: the supports `top-k`, `top-p`, and `top-k+sample` without its draws",
}

__all__ = ["ASKS", "AUTO", "GROUNDS", "LOSSES", "SURROGATES", "LossSpecification", "parse_losses"]
