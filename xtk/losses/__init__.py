"""Floor 3: what a student is trained with. One file a loss, one line in the table.

A loss cuts what both models say into *cells*; the distance is a divergence between two true distributions over
cells and an explicit other cell. docs/explanation/losses.md derives it.
"""

from __future__ import annotations

from xtk.losses.loss_spec import AUTO_LOSS, LossSpec, parse_losses

LOSSES = {
    "ce": "xtk.losses.cross_entropy:CrossEntropy",
    "forward-kl": "xtk.losses.same_tokenizer_losses:ForwardKL",
    "reverse-kl": "xtk.losses.same_tokenizer_losses:ReverseKL",
    "jsd": "xtk.losses.same_tokenizer_losses:JSD",
    "skew-forward-kl": "xtk.losses.same_tokenizer_losses:SkewForwardKL",
    "skew-reverse-kl": "xtk.losses.same_tokenizer_losses:SkewReverseKL",
    "tvd": "xtk.losses.same_tokenizer_losses:TVD",
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
SURROGATE_LOSSES = ("policy-gradient",)

# What a loss compares on.
COMPARISON_SPACES = {
    "text": "the student alone",
    "tokens": "a teacher with the student's own tokenizer",
    "projection": "a teacher with another tokenizer, through a projection",
    "pairs": "a teacher with another tokenizer, through tokens of equal bytes",
    "spans": "a teacher with any tokenizer: spans of equal bytes",
    "bytes": "a teacher with any tokenizer: what both say about the next bytes",
}

# What a loss asks of a teacher; see `SUPPORTS` for what a cache holds.
TEACHER_REQUIREMENTS = {
    "nothing": "nothing",
    "observed": "log-probabilities of the tokens that stand there: any support, `none` too",
    "distribution": "a distribution: any support but `none`; what is not linear in it reads no draws, so not `sample`",
    "ranks": "the likeliest tokens, exactly: the supports `top-k`, `top-p`, and `top-k+sample` without its draws",
}

__all__ = [
    "AUTO_LOSS",
    "COMPARISON_SPACES",
    "LOSSES",
    "SURROGATE_LOSSES",
    "TEACHER_REQUIREMENTS",
    "LossSpec",
    "parse_losses",
]
