"""Distill a student with the Trainer of transformers, from a teacher cache.

python examples/trainer.py STUDENT CACHE OUTPUT [--steps 8] [--loss "ce:weight=0.3" byte-kl]
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import xtk
from xtk.integrations.transformers import DistillationTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("student", help="folder of the student")
parser.add_argument("cache", help="output of xtk cache-teacher")
parser.add_argument("output", help="folder for checkpoints and the trained student")
parser.add_argument("--loss", nargs="+", default=["auto"], help="losses as in xtk distill --loss")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
parser.add_argument("--learning-rate", type=float, default=3e-3)
arguments = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(arguments.student)
model = AutoModelForCausalLM.from_pretrained(arguments.student, dtype=torch.float32)
cache = xtk.TeacherCache(arguments.cache)
collator = xtk.DistillationCollator(
    tokenizer, cache, xtk.DistillationLoss(*arguments.loss), max_length=model.config.max_position_embeddings
)
trainer = DistillationTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulation,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, arguments.steps // 10),
        weight_decay=0.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    data_collator=collator,
    train_dataset=cache,
)
trainer.train()
trainer.save_model()
