"""Distill a student with TRL's SFTTrainer, from a teacher cache: as it is, or with the mixin (fewer forward passes).

    python examples/trl_sft.py STUDENT CACHE OUTPUT [--mixin] [--steps 8] [--loss "ce:weight=0.3" byte-kl]

Needs TRL (`pip install trl`).
"""

import argparse
import warnings

import datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import xtk
from xtk.integrations.transformers import DistillationTrainerMixin, loss_func_and_collator

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("student", help="folder of the student")
parser.add_argument("cache", help="output of xtk cache-teacher")
parser.add_argument("output", help="folder for checkpoints and the trained student")
parser.add_argument("--mixin", action="store_true", help="derive from SFTTrainer instead of using compute_loss_func")
parser.add_argument("--loss", nargs="+", default=["auto"], help="losses as in xtk distill --loss")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
parser.add_argument("--learning-rate", type=float, default=3e-3)
arguments = parser.parse_args()


class DistillationSFTTrainer(DistillationTrainerMixin, SFTTrainer):
    """SFTTrainer with the losses of xtk, computed from hidden states."""


tokenizer = AutoTokenizer.from_pretrained(arguments.student)
model = AutoModelForCausalLM.from_pretrained(arguments.student)
cache = xtk.TeacherCache(arguments.cache)
collator = xtk.DistillationCollator(
    tokenizer, cache, xtk.DistillationLoss(*arguments.loss), max_length=model.config.max_position_embeddings
)
options = {
    "model": model,
    "args": SFTConfig(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulation,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, arguments.steps // 10),
        weight_decay=0.0,
        max_length=None,
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    # Each row is the index of a document in the cache; the collator tokenizes and aligns it.
    "train_dataset": datasets.Dataset.from_dict({"document": list(range(len(cache)))}),
    "processing_class": tokenizer,
}
if arguments.mixin:
    trainer = DistillationSFTTrainer(**options, data_collator=collator)
else:
    compute_loss_func, labels_collator = loss_func_and_collator(collator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL prefers subclasses, such as the one above
        trainer = SFTTrainer(**options, data_collator=labels_collator, compute_loss_func=compute_loss_func)
trainer.train()
trainer.save_model()
