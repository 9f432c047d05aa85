"""TRL's SFTTrainer, unchanged and with the mixin: same gradients as `xtk distill`."""

from __future__ import annotations

import datasets
import pytest
from recorded_training_steps import GradientRecorder
from small_inputs import sentences, write_jsonl
from trainer_gradients import BATCH, LOSSES, command_gradients, largest_difference
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk
from xtk.integrations.transformers import DistillationTrainerMixin, loss_func_and_collator

trl = pytest.importorskip("trl", reason="TRL is not installed")


class DistillationSFTTrainer(DistillationTrainerMixin, trl.SFTTrainer):
    """As in examples/trl_sft.py."""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL prefers subclasses to compute_loss_func
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("integration", ["compute_loss_func", "mixin"])
def test_sft_trainer_has_the_gradients_of_the_command(run, pair, tmp_path, integration):
    data = write_jsonl(tmp_path / "data.jsonl", sentences(BATCH * 2, seed=7))
    run("cache-teacher", pair.teacher, data, "-o", tmp_path / "cache")
    expected, _ = command_gradients(pair, tmp_path / "cache", 1)
    tokenizer = AutoTokenizer.from_pretrained(pair.student)
    cache = xtk.TeacherCache(tmp_path / "cache")
    collator = xtk.DistillationCollator(tokenizer, cache, xtk.DistillationLoss(*LOSSES))
    model = AutoModelForCausalLM.from_pretrained(pair.student)
    recorder = GradientRecorder(model)
    options = {
        "model": model,
        "args": trl.SFTConfig(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=BATCH, max_steps=2, max_grad_norm=0,
            report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no", bf16=False,
            train_sampling_strategy="sequential", dataloader_pin_memory=False, max_length=None,
            gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
        ),
        "train_dataset": datasets.Dataset.from_dict({"document": list(range(len(cache)))}),
        "processing_class": tokenizer,
        "optimizers": (recorder, None),
    }  # fmt: skip

    if integration == "mixin":
        trainer = DistillationSFTTrainer(**options, data_collator=collator)
    else:
        loss_func, labels_collator = loss_func_and_collator(collator)
        trainer = trl.SFTTrainer(**options, data_collator=labels_collator, compute_loss_func=loss_func)
    trainer.train()
    assert largest_difference(recorder.gradients, expected) < 1e-5
