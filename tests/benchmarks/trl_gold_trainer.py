"""Train a student with TRL's GOLD trainer for the steps of `bench_objectives.py`, with an online teacher.

    python tests/benchmarks/trl_gold_trainer.py STUDENT TEACHER DATA OUTPUT --steps 800 --seed 0 [--ce 1]

Defaults of TRL, except: texts instead of generated completions (lmbda 0; the first token is the prompt), the hybrid
loss for two tokenizers (with `--uld`: ULD's own, without it), and the learning rate, warm-up, weight decay and batch
of the other students. The schedule is TRL's, a linear decay, unless `--schedule` sets that of the other students, a
cosine. `--ce` is the weight of cross-entropy (0 in TRL). TRL aligns ByteLevel tokenizers only; for others its
extended alignment is off, as TRL recommends, and tokens are compared by their positions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.utils import is_byte_level_tokenizer


def split(text: str, tokenizer: Any) -> dict[str, str]:
    """Return a text's first token as the prompt, which TRL requires, and the remaining text as its completion."""
    at = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][0][1]
    return {"prompt": text[:at], "completion": text[at:]}


def main() -> None:
    """Train, and save the student."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("student", "teacher", "data", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ce", type=float, default=0.0)
    parser.add_argument("--uld", action="store_true")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--schedule", default="linear")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.student)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    backends = [tokenizer.backend_tokenizer, AutoTokenizer.from_pretrained(args.teacher).backend_tokenizer]
    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").split("\n") if line]
    config = GOLDConfig(
        output_dir=str(args.output / "trainer"), max_steps=args.steps, per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=1, learning_rate=args.learning_rate, warmup_steps=args.steps // 10,
        weight_decay=args.weight_decay, lr_scheduler_type=args.schedule, seed=args.seed, lmbda=0.0,
        use_uld_loss=True, uld_use_hybrid_loss=not args.uld,
        use_extended_uld=all(map(is_byte_level_tokenizer, backends)),
        uld_crossentropy_weight=args.ce, teacher_tokenizer_name_or_path=str(args.teacher), use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", logging_steps=50, max_length=2048, gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GOLDTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32),
        args=config, train_dataset=Dataset.from_list([split(row["text"], tokenizer) for row in rows]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    trainer.model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.student).save_pretrained(args.output)


if __name__ == "__main__":
    main()
