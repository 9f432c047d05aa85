"""Floor 6: what will go wrong with a pair, its data and its machine, and what a run will cost, before it begins.

`CHECKS` is the list: each is a function of a `Case` that yields findings, and none loads weights.
"""

from __future__ import annotations

CHECKS = (
    "xtk.doctor.vocabularies:rows",
    "xtk.doctor.vocabularies:special_tokens",
    "xtk.doctor.templates:starts",
    "xtk.doctor.templates:contents",
    "xtk.doctor.weights:tensors",
    "xtk.doctor.weights:attention",
    "xtk.doctor.weights:dtypes",
    "xtk.doctor.data:lengths",
    "xtk.doctor.data:spelled_tokens",
    "xtk.doctor.data:compression",
    "xtk.doctor.data:conversations",
    "xtk.doctor.losses:caches",
    "xtk.doctor.losses:projection",
    "xtk.doctor.losses:chosen",
    "xtk.doctor.costs:memory",
    "xtk.doctor.costs:disk",
    "xtk.doctor.machine:versions",
)
