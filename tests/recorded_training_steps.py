"""Optimisation steps of which loss and gradient are looked at, and nothing is moved."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from xtk.losses.loss_spec import parse_losses
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.student_model_setup import StudentModelConfig, StudentSource, load_student
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.micro_batches import BatchSampler
from xtk.training.parallel_config import parse_parallel
from xtk.training.runs.open_inputs import open_inputs
from xtk.training.runs.run_inputs import RunInputs
from xtk.training.student_with_losses import parallelize
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig
from xtk.training.training_loop import TrainingRun, _optimizer, _step, _step_batch_builder


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


def recipe_of(losses: list[str], batch: int = 64, **options: Any) -> TrainConfig:
    """Return a recipe that clips nothing; options are those of a recipe or of a preparation."""
    names = {field.name for field in fields(StudentModelConfig)} & options.keys()
    preparation = StudentModelConfig(**{name: options.pop(name) for name in names})
    return TrainConfig(
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
    recipe: TrainConfig,
    projections: tuple[Path, ...] = (),
    held_out: tuple[Path, ...] = (),
) -> RunInputs:
    """Open what a recipe reads."""
    places = RunPaths(
        student, tuple(map(str, caches)), projections, Path("nowhere"), eval_caches=tuple(map(str, held_out))
    )
    return open_inputs(places, recipe, Tokenizer(student))


def prepared(student: Path, recipe: TrainConfig, inputs: RunInputs) -> Any:
    """Load a model as `distill` does; adapters begin with numbers instead of zeros, so that all of them matter."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = load_student(
            StudentSource(student), recipe.preparation, inputs.tokenizer, device=torch.device("cpu"), quiet=True
        )
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def take_steps(
    accelerator: Accelerator,
    student: Path,
    inputs: RunInputs,
    recipe: TrainConfig,
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
    cut = BackboneWithHead(model)
    layout = parse_parallel(recipe.parallel, accelerator.num_processes).with_mesh(accelerator.device)
    packed = recipe.packing and cut.enable_packing()
    wrapped, parameters = parallelize(cut, accelerator, layout, packing=packed, offload=recipe.fsdp_offload)
    packing = layout.length_multiple if packed else 0
    ask: Any = dict
    if inputs.held_out is not None:
        ask = HeldOutEvaluator(inputs.held_out, wrapped, inputs.tokenizer, context, packing, layout, accelerator.device)
    run = TrainingRun(
        accelerator=accelerator,
        parallel=layout,
        student=cut,
        wrapped_student=wrapped,
        parameters=parameters,
        tokenizer=inputs.tokenizer,
        batch_builder=inputs.batch_builder(256, packing),
        sampler=BatchSampler(np.arange(len(inputs.source)), inputs.source.text_bytes(), documents, recipe.seed),
        recipe=recipe,
        logging_config=LoggingConfig(),
        identity={},
        steps=steps,
        output=Path("nowhere"),
        tokenizer_folder=student,
    )
    recorder = Recorder(model)
    wrapped.train()
    made = [_step_batch_builder(run)(step) for step in range(steps)]
    held_out = [ask()]
    results = []
    for micro_batches in made:
        results.append(_step(run, recorder, micro_batches))
        held_out.append(ask())
    optimizer = _optimizer(cut, recipe)
    for step in range(moved):
        _step(run, optimizer, _step_batch_builder(run)(step))
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
