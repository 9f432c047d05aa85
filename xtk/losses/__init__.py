"""Training losses: the table of names, and what each loss compares and requires of a teacher.

A loss maps both models' distributions to *cells*. Its value is a divergence between two proper distributions over the
cells and a remainder, the probability outside of them. docs/explanation/losses.md derives it.
"""

LOSSES = {
    "ce": "xtk.losses.cross_entropy:CrossEntropy",
    "forward-kl": "xtk.losses.same_tokenizer_losses:ForwardKL",
    "reverse-kl": "xtk.losses.same_tokenizer_losses:ReverseKL",
    "jsd": "xtk.losses.same_tokenizer_losses:JSD",
    "skew-forward-kl": "xtk.losses.same_tokenizer_losses:SkewForwardKL",
    "skew-reverse-kl": "xtk.losses.same_tokenizer_losses:SkewReverseKL",
    "tvd": "xtk.losses.same_tokenizer_losses:TVD",
    "boundary-kl": "xtk.losses.boundary_kl:BoundaryKL",
    "p-kl": "xtk.losses.projected_kl:PKL",
    "byte-kl": "xtk.losses.byte_kl:ByteKL",
    "bpm": "xtk.losses.byte_prefix_marginalization:BPM",
    "escd": "xtk.losses.event_set_completion:ESCD",
    "simct": "xtk.losses.simct:SimCT",
    "strict": "xtk.losses.strict_shared_vocabulary:Strict",
    "alm": "xtk.losses.alm:ALM",
    "uld": "xtk.losses.uld:ULD",
    "gold": "xtk.losses.gold:GOLD",
    "h-kl": "xtk.losses.gold_with_projection:HKL",
    "policy-gradient": "xtk.losses.policy_gradient:PolicyGradient",
}

AUTO_LOSS = "auto"  # chooses a loss that fits the two tokenizers and the cache

# Losses that train only on completions sampled from the student. Their values are not distances.
SURROGATE_LOSSES = ("policy-gradient",)

# What a loss compares, and for which teachers.
COMPARISON_SPACES = {
    "text": "the student's own tokens; needs no teacher",
    "tokens": "a teacher with the student's own tokenizer",
    "projection": "a teacher with another tokenizer, through a projection",
    "pairs": "a teacher with another tokenizer, through tokens of equal bytes",
    "spans": "a teacher with any tokenizer: spans of equal bytes",
    "bytes": "a teacher with any tokenizer: the distributions of both over the next bytes",
}

# What a loss requires of a teacher; `SUPPORTS` lists what a cache can contain.
TEACHER_REQUIREMENTS = {
    "nothing": "nothing",
    "observed": "log-probabilities of the observed tokens: any support, including `none`",
    "distribution": "a distribution: any support but `none`; not `sample` where a divergence cannot use sampled tokens",
    "ranks": "the exact most likely tokens: support `top-k`, `top-p`, or `top-k+sample` without its samples",
    "exact": "exact probabilities: any support but `none` and `sample`; sampled tokens are ignored",
    "candidates": "exact probabilities of the student's most likely tokens: support `candidates`, or the whole "
    "vocabulary; with `divergence=forward-kl` any but `none` and `sample`; sampled tokens are ignored",
}

# Of these only exact probabilities are used.
EXACT_REQUIREMENTS = ("ranks", "exact", "candidates")
