"""Process of a DistillationTrainer run: STUDENT CACHE OUTPUT BATCH; writes the weights after two steps."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, TrainingArguments

import xtk
from xtk.integrations.transformers import DistillationTrainer

student, cache, output, batch = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(student)
loss = xtk.DistillationLoss("ce:weight=0.3", "byte-kl")
trainer = DistillationTrainer(
    model,
    TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0,
        optim="sgd",
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
    ),
    data_collator=xtk.DistillationCollator(student, cache, loss),
    train_dataset=xtk.TeacherCache(cache),
)
trainer.train()
trainer.save_model()
