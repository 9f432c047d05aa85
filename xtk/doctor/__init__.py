"""Floor 6: what will go wrong with a pair, its data and its machine, and what a run will cost, before it begins.

`CHECKS` is the list: each is a function of a `DoctorInputs` that yields findings, and none loads weights.
"""

from __future__ import annotations

CHECKS = (
    "xtk.doctor.vocabulary_checks:embedding_rows",
    "xtk.doctor.vocabulary_checks:special_tokens",
    "xtk.doctor.chat_template_checks:duplicate_start_token",
    "xtk.doctor.chat_template_checks:template_content",
    "xtk.doctor.weight_checks:weight_tensors",
    "xtk.doctor.weight_checks:attention",
    "xtk.doctor.weight_checks:dtypes",
    "xtk.doctor.data_checks:document_lengths",
    "xtk.doctor.data_checks:special_tokens_in_text",
    "xtk.doctor.data_checks:compression",
    "xtk.doctor.data_checks:conversations",
    "xtk.doctor.loss_checks:cache_identity",
    "xtk.doctor.loss_checks:projection",
    "xtk.doctor.loss_checks:auto_loss",
    "xtk.doctor.resource_estimates:memory",
    "xtk.doctor.resource_estimates:disk",
    "xtk.doctor.environment_checks:library_versions",
)
