"""Gradients of `xtk distill` on the documents of a cache in order, and Trainer arguments for the same steps."""

from __future__ import annotations

import pytest
import recorded_training_steps
from accelerate import Accelerator
from recorded_training_steps import make_train_config, open_run_inputs, record_steps
from transformers import TrainingArguments

from xtk.batches.micro_batches import BatchSampler

LOSSES = ["ce:weight=0.3", "byte-kl"]
BATCH = 4


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, max_steps=2, learning_rate=1e-3, max_grad_norm=0,
        report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no",
        train_sampling_strategy="sequential", dataloader_pin_memory=False, **options,
    )  # fmt: skip


def command_gradients(pair, cache, accumulation):
    """Return the gradients of two steps of `xtk distill` on the documents of a cache in order."""
    recipe = make_train_config(LOSSES, batch=BATCH)
    inputs = open_run_inputs(pair.student, [cache], recipe)
    size = BATCH * accumulation

    class SequentialSampler(BatchSampler):
        def documents_of_step(self, step):
            return list(range(step * size, (step + 1) * size))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorded_training_steps, "BatchSampler", SequentialSampler)
        return record_steps(Accelerator(cpu=True), pair.student, inputs, recipe, size)


def largest_difference(found, expected):
    return max(float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)
