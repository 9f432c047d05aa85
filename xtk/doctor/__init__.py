"""Checks of a student, a teacher, data and machine before a run, and estimates of its memory, disk and time.

`CHECKS` lists the checks: functions that take `DoctorInputs` and yield findings. Only `start_tokens` loads weights.
"""

from __future__ import annotations

CHECKS = (
    "xtk.doctor.model_checks:embedding_rows",
    "xtk.doctor.model_checks:special_tokens",
    "xtk.doctor.conversation_checks:template_content",
    "xtk.doctor.conversation_checks:reasoning_and_tools",
    "xtk.doctor.conversation_checks:regions",
    "xtk.doctor.model_checks:weight_tensors",
    "xtk.doctor.model_checks:attention",
    "xtk.doctor.model_checks:dtypes",
    "xtk.doctor.data_checks:document_lengths",
    "xtk.doctor.data_checks:special_tokens_in_text",
    "xtk.doctor.data_checks:compression",
    "xtk.doctor.start_token_checks:start_tokens",
    "xtk.doctor.data_checks:conversations",
    "xtk.doctor.cache_and_loss_checks:cache_identity",
    "xtk.doctor.cache_and_loss_checks:projection",
    "xtk.doctor.cache_and_loss_checks:auto_loss",
    "xtk.doctor.memory_and_disk_estimates:memory",
    "xtk.doctor.memory_and_disk_estimates:disk",
    "xtk.doctor.environment_checks:library_versions",
)
