"""TRL's SFTTrainer with the mixin: same gradients as `xtk distill`."""

from __future__ import annotations

import datasets
import pytest
from recorded_training_steps import GradientRecorder
from small_inputs import sentences, write_jsonl
from trainer_gradients import BATCH, LOSSES, command_gradients, largest_difference
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk
from xtk.integrations.transformers import DistillationTrainerMixin

trl = pytest.importorskip("trl", reason="TRL is not installed")


class DistillationSFTTrainer(DistillationTrainerMixin, trl.SFTTrainer):
    """As in examples/trl_sft.py."""


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # the option gradient_checkpointing has another name in transformers 5
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sft_trainer_has_the_gradients_of_the_command(run, pair, tmp_path):
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

    DistillationSFTTrainer(**options, data_collator=collator).train()
    assert largest_difference(recorder.gradients, expected) < 1e-5
