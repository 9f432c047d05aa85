"""Optimisation steps of which loss and gradient are looked at, and nothing is moved."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from xtk.losses import parse_losses
from xtk.models.causal_lm import Cut
from xtk.models.preparation import Origin, Preparation, load_student
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.batches import Order
from xtk.training.distill import Inputs, open_inputs
from xtk.training.held_out import Evaluation
from xtk.training.layout import read_layout
from xtk.training.loop import Run, _maker, _optimizer, _step
from xtk.training.recipe import Places, Recipe, Reporting
from xtk.training.student import shared


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, which processes may share."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Recorder(torch.optim.SGD):
    """Keeps the gradient of each step, and moves nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        super().__init__([parameter for _, parameter in named], lr=0.0)
        self.names = [name for name, _ in named]
        self.gradients: dict[str, torch.Tensor] = {}
        self.steps = 0

    def step(self, closure: object = None) -> None:
        """Take note."""
        for name, parameter in zip(self.names, self.param_groups[0]["params"], strict=True):
            gradient = parameter.grad
            self.gradients[f"{self.steps}.{name}"] = whole(gradient).clone()
        self.steps += 1


def recipe_of(losses: list[str], batch: int = 64, **options: Any) -> Recipe:
    """Return a recipe that clips nothing; options are those of a recipe or of a preparation."""
    names = {field.name for field in fields(Preparation)} & options.keys()
    preparation = Preparation(**{name: options.pop(name) for name in names})
    return Recipe(
        losses=tuple(parse_losses(losses)),
        per_device_train_batch_size=batch,
        max_steps=2,
        max_grad_norm=1e9,
        preparation=preparation,
        **options,
    )


def inputs_of(
    student: Path,
    caches: list[Path],
    recipe: Recipe,
    projections: tuple[Path, ...] = (),
    held_out: tuple[Path, ...] = (),
) -> Inputs:
    """Open what a recipe reads."""
    places = Places(
        student, tuple(map(str, caches)), projections, Path("nowhere"), eval_caches=tuple(map(str, held_out))
    )
    return open_inputs(places, recipe, Tokenizer(student))


def prepared(student: Path, recipe: Recipe, inputs: Inputs) -> Any:
    """Load a model as `distill` does; adapters begin with numbers instead of zeros, so that all of them matter."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = load_student(
            Origin(student), recipe.preparation, inputs.tokenizer, device=torch.device("cpu"), quiet=True
        )
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def take_steps(
    accelerator: Accelerator,
    student: Path,
    inputs: Inputs,
    recipe: Recipe,
    documents: int,
    steps: int = 2,
    context: int = 256,
    moved: int = 0,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Take steps of so many documents; return the gradients by step and parameter, and what was told.

    Held-out documents, if there are some, are evaluated in a context before, between and after the steps. After so many
    more steps, `moved`, with the loop's own optimizer, the weights stand among the gradients, as of step "weights".
    """
    model = prepared(student, recipe, inputs)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    cut = Cut(model)
    layout = read_layout(recipe.parallel, accelerator.num_processes).on(accelerator.device)
    packed = recipe.packing and cut.pack()
    wrapped, parameters = shared(cut, accelerator, layout, packed=packed, offload=recipe.fsdp_offload)
    packing = layout.multiple if packed else 0
    ask: Any = dict
    if inputs.held_out is not None:
        ask = Evaluation(inputs.held_out, wrapped, inputs.tokenizer, context, packing, layout, accelerator.device)
    run = Run(
        accelerator=accelerator,
        layout=layout,
        cut=cut,
        model=wrapped,
        parameters=parameters,
        tokenizer=inputs.tokenizer,
        maker=inputs.maker(256, packing),
        order=Order(np.arange(len(inputs.source)), inputs.source.text_bytes(), documents, recipe.seed),
        recipe=recipe,
        reporting=Reporting(),
        steps=steps,
        output=Path("nowhere"),
        tokenizer_folder=student,
    )
    recorder = Recorder(model)
    wrapped.train()
    made = [_maker(run)(step) for step in range(steps)]
    held_out = [ask()]
    results = []
    for micro_batches in made:
        results.append(_step(run, recorder, micro_batches))
        held_out.append(ask())
    optimizer = _optimizer(cut, recipe)
    for step in range(moved):
        _step(run, optimizer, _maker(run)(step))
    if moved:
        recorder.gradients |= {
            f"weights.{name}": whole(one.detach()).clone()
            for name, one in zip(recorder.names, recorder.param_groups[0]["params"], strict=True)
        }
    empty = torch.tensor(sum(batch.tokens == 0 for step in made for batch in step))
    return recorder.gradients, {
        "losses": [loss for loss, _ in results],
        "norms": [norm for _, norm in results],
        "processes": accelerator.num_processes,
        "packed": packed,
        "passes": len(made[0]),
        "held_out": held_out,
        "empty": int(accelerator.reduce(empty, "sum")),
    }
