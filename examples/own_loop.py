"""Distill a student in a training loop of your own, from a teacher cache.

    python examples/own_loop.py STUDENT CACHE OUTPUT [--steps 8] [--loss "ce:weight=0.3" byte-kl]
"""

import argparse
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("student", help="folder of the student")
parser.add_argument("cache", help="output of xtk cache-teacher")
parser.add_argument("output", help="folder for the trained student")
parser.add_argument("--loss", nargs="+", default=["auto"], help="losses as in xtk distill --loss")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
parser.add_argument("--learning-rate", type=float, default=3e-3)
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(arguments.student)
model = AutoModelForCausalLM.from_pretrained(arguments.student, dtype=torch.float32).to(device)
xtk.enable_packing(model)  # documents of a batch are one sequence, without padding

cache = xtk.TeacherCache(arguments.cache)
loss = xtk.DistillationLoss(*arguments.loss)
length = model.config.max_position_embeddings
collator = xtk.DistillationCollator(tokenizer, cache, loss, max_length=length, packing=True)
batch_size = min(arguments.batch_size, len(cache))
loader = torch.utils.data.DataLoader(cache, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collator)


def forever():
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


batches = forever()
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
warmup = max(1, arguments.steps // 10)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / arguments.steps))
)
for step in range(arguments.steps):
    micro_batches = [next(batches) for _ in range(arguments.accumulation)]
    num_items = loss.num_items(micro_batches)  # each loss is averaged over the items of the whole step
    for batch in micro_batches:
        batch = batch.to(device)
        hidden_states = model.model(**batch.model_inputs).last_hidden_state
        loss(hidden_states, model.lm_head, batch, num_items_in_batch=num_items).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 10 == 0 or step + 1 == arguments.steps:
        print(f"step {step + 1}", {name: round(value.item(), 4) for name, value in loss.metrics.items()})

model.save_pretrained(arguments.output)
tokenizer.save_pretrained(arguments.output)
