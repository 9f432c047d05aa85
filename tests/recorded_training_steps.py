"""Training steps that record losses and gradients and leave the weights unchanged."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from xtk.batches.micro_batches import BatchSampler
from xtk.losses.spec import parse_losses
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.resolver import ModelRef
from xtk.models.student_model_setup import StudentModelConfig, load_student
from xtk.parallel.parallel_config import parse_parallel
from xtk.text.tokenizer import Tokenizer
from xtk.training.held_out_evaluation import HeldOutEvaluator
from xtk.training.kinds.open_inputs import open_inputs
from xtk.training.kinds.run_inputs import RunInputs
from xtk.training.student_with_losses import parallelize
from xtk.training.train_config import LoggingConfig, RunPaths, TrainConfig
from xtk.training.training_loop import TrainingRun, _optimizer, _step, step_batch_builder


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, gathered if it is sharded over processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class GradientRecorder(torch.optim.SGD):
    """An optimizer that records the gradients of each step and changes no weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        super().__init__([parameter for _, parameter in named], lr=0.0)
        self.names = [name for name, _ in named]
        self.gradients: dict[str, torch.Tensor] = {}
        self.steps = 0

    def step(self, closure: object = None) -> None:
        """Record the gradients."""
        for name, parameter in zip(self.names, self.param_groups[0]["params"], strict=True):
            gradient = parameter.grad
            self.gradients[f"{self.steps}.{name}"] = unsharded(gradient).clone()
        self.steps += 1


def make_train_config(losses: list[str], batch: int = 64, **options: Any) -> TrainConfig:
    """Return a training configuration without gradient clipping; options are its fields or those of its student."""
    student_options = {field.name for field in fields(StudentModelConfig)} & options.keys()
    preparation = StudentModelConfig(**{name: options.pop(name) for name in student_options})
    return TrainConfig(
        losses=tuple(parse_losses(losses)),
        per_device_train_batch_size=batch,
        max_steps=2,
        max_grad_norm=1e9,
        preparation=preparation,
        **options,
    )


def open_run_inputs(
    student: Path,
    caches: list[Path],
    recipe: TrainConfig,
    projections: tuple[Path, ...] = (),
    held_out: tuple[Path, ...] = (),
) -> RunInputs:
    """Open the inputs of a training configuration."""
    paths = RunPaths(
        ModelRef(student), tuple(map(str, caches)), projections, Path("nowhere"), eval_caches=tuple(map(str, held_out))
    )
    return open_inputs(paths, recipe, Tokenizer(student))


def load_student_for_steps(student: Path, recipe: TrainConfig, inputs: RunInputs) -> Any:
    """Load a student as `distill` does; LoRA B matrices are random instead of zero, so that all matrices matter."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = load_student(
            ModelRef(student),
            recipe.preparation,
            inputs.tokenizer,
            quiet=True,
            device=torch.device("meta" if "fsdp" in recipe.parallel or "tp" in recipe.parallel else "cpu"),
        )
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def record_steps(
    accelerator: Accelerator,
    student: Path,
    inputs: RunInputs,
    recipe: TrainConfig,
    documents: int,
    steps: int = 2,
    context: int = 256,
    num_updates: int = 0,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Run steps of `documents` documents; return the gradients as {"STEP.PARAMETER": tensor}, and losses and counts.

    Held-out documents, if the inputs have some, are evaluated with at most `context` tokens before, between and after
    the steps. If `num_updates` is not 0, that number of steps with the training loop's own optimizer follows, and their
    final weights are added to the gradients as step "weights".
    """
    model = load_student_for_steps(student, recipe, inputs)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    backbone = BackboneWithHead(model)
    parallel_config = parse_parallel(recipe.parallel, accelerator.num_processes).with_mesh(accelerator.device)
    packed = recipe.packing and backbone.enable_packing()
    wrapped, parameters = parallelize(
        backbone, accelerator, parallel_config, packing=packed, offload=recipe.fsdp_offload, weights=student
    )
    packing = parallel_config.length_multiple if packed else 0
    evaluate: Any = dict
    if inputs.held_out is not None:
        evaluate = HeldOutEvaluator(
            inputs.held_out, wrapped, inputs.tokenizer, context, packing, parallel_config, accelerator.device
        )
    run = TrainingRun(
        accelerator=accelerator,
        parallel=parallel_config,
        student=backbone,
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
        initial_student=ModelRef(student),
    )
    recorder = GradientRecorder(model)
    wrapped.train()
    step_batches = [step_batch_builder(run)(step) for step in range(steps)]
    held_out = [evaluate()]
    results = []
    for micro_batches in step_batches:
        results.append(_step(run, recorder, micro_batches))
        held_out.append(evaluate())
    optimizer = _optimizer(backbone, recipe)
    for step in range(num_updates):
        _step(run, optimizer, step_batch_builder(run)(step))
    if num_updates:
        recorder.gradients |= {
            f"weights.{name}": unsharded(one.detach()).clone()
            for name, one in zip(recorder.names, recorder.param_groups[0]["params"], strict=True)
        }
    num_empty_batches = torch.tensor(sum(batch.tokens == 0 for step in step_batches for batch in step))
    return recorder.gradients, {
        "losses": [loss for loss, _ in results],
        "norms": [norm for _, norm in results],
        "processes": accelerator.num_processes,
        "packed": packed,
        "passes": len(step_batches[0]),
        "held_out": held_out,
        "empty": int(accelerator.reduce(num_empty_batches, "sum")),
    }
