"""A process of a run, or one of several: writes loss and gradient of a few ways to take the same step.

    python dump_gradients.py STUDENT CACHE PROJECTION OUTPUT LOSSES DOCUMENTS:BATCH...

Each DOCUMENTS:BATCH takes two steps of so many documents, over all processes, in forward passes of so many.
The first process writes OUTPUT/DOCUMENTS-BATCH.safetensors and OUTPUT/losses.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from xtk.losses import parse_losses
from xtk.models.causal_lm import Cut, load_causal_lm
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batches import BatchMaker, Order
from xtk.training.distill import open_inputs
from xtk.training.loop import Run, Student, _micro_batches, _step
from xtk.training.recipe import Places, Recipe, Reporting


class Recorder(torch.optim.SGD):
    """Keeps the gradient of each step, and moves nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.names = [name for name, _ in model.named_parameters()]
        self.gradients: dict[str, torch.Tensor] = {}
        self.steps = 0

    def step(self, closure: object = None) -> None:
        """Take note."""
        for name, parameter in zip(self.names, self.param_groups[0]["params"], strict=True):
            self.gradients[f"{self.steps}.{name}"] = parameter.grad.clone()
        self.steps += 1


def main() -> None:
    *paths, losses = sys.argv[1:6]
    student, cache, projection, output = map(Path, paths)
    accelerator = Accelerator(cpu=True)
    told = {}
    for way in sys.argv[6:]:
        documents, batch = map(int, way.split(":"))
        recipe = Recipe(
            losses=tuple(parse_losses(losses.split(" "))),
            max_steps=2,
            per_device_train_batch_size=batch,
            max_grad_norm=1e9,
        )
        inputs = open_inputs(Places(student, str(cache), projection, output), recipe, Tokenizer(student))
        model = load_causal_lm(student)
        cut = Cut(model)
        run = Run(
            accelerator=accelerator,
            cut=cut,
            tokenizer=inputs.tokenizer,
            maker=BatchMaker(inputs.source, inputs.tokenizer, inputs.objectives, 256),
            order=Order(np.arange(len(inputs.source)), inputs.source.text_bytes(), documents, recipe.seed),
            recipe=recipe,
            reporting=Reporting(),
            steps=2,
            output=output,
            tokenizer_folder=student,
        )
        recorder = Recorder(model)
        wrapped = accelerator.prepare_model(Student(cut))
        wrapped.train()
        made = [_micro_batches(run, step) for step in range(2)]
        results = [_step(run, wrapped, recorder, micro_batches) for micro_batches in made]
        empty = torch.tensor(sum(batch.tokens == 0 for step in made for batch in step))
        told[way] = {
            "losses": [loss for loss, _ in results],
            "norms": [norm for _, norm in results],
            "processes": accelerator.num_processes,
            "passes": len(made[0]),
            "empty": int(accelerator.reduce(empty, "sum")),
        }
        if accelerator.is_main_process:
            save_file(recorder.gradients, output / f"{documents}-{batch}.safetensors")
    if accelerator.is_main_process:
        (output / "losses.json").write_text(json.dumps(told))
    accelerator.end_training()


if __name__ == "__main__":
    main()
