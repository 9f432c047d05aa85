"""Training steps on a simulated GPU: how often the host waits for the device, and gradients equal to the CPU's."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_training_steps import GradientRecorder, load_student_for_steps, make_train_config, open_run_inputs
from simulated_cuda import CUDA, READ, SHAPE, UPLOAD, SimulatedCuda, SimulatedTensor, move_to_device, to_host

from xtk.batches.batch_prefetch import _wait_for
from xtk.batches.micro_batches import BatchSampler
from xtk.losses.cells.clipped_surrogate import ClippedSurrogateCells
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.resolver import ModelRef
from xtk.parallel.parallel_config import ParallelConfig
from xtk.training.student_with_losses import StudentWithLoss
from xtk.training.train_config import LoggingConfig
from xtk.training.training_loop import TrainingRun, _step, step_batch_builder

DOCUMENTS, STEPS = 6, 2
CROSS_TOKENIZER_LOSSES = ["ce", "p-kl", "boundary-kl", "byte-kl", "alm", "uld", "gold", "h-kl"]
FEW_LOSSES = ["ce", "byte-kl", "gold"]
CHUNK_ROWS = 48  # rows; a pass has several chunks


def take_steps(
    pair,
    cache,
    projection,
    losses: list[str],
    *,
    batch: int,
    simulated: bool,
    max_norm: float = 1e9,
    parallel: ParallelConfig | None = None,
    **options: Any,
) -> Any:
    """Take steps on the CPU or on the simulated device; return metrics, gradients and the waits of each step."""
    recipe = dataclasses.replace(make_train_config(losses, batch, **options), max_grad_norm=max_norm)
    inputs = open_run_inputs(pair.student, [cache], recipe, (projection,))
    model = load_student_for_steps(pair.student, recipe, inputs)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    student = BackboneWithHead(model)
    packed = recipe.packing and student.enable_packing()
    wrapped = StudentWithLoss(student, has_unit_gradient=True).train()
    device = CUDA if simulated else torch.device("cpu")
    if simulated:
        with SimulatedCuda():
            move_to_device(model)
    run = TrainingRun(
        accelerator=SimpleNamespace(device=device, no_sync=lambda model: contextlib.nullcontext()),
        parallel=parallel or ParallelConfig(),
        student=student,
        wrapped_student=wrapped,
        parameters=[one for one in wrapped.parameters() if one.requires_grad],
        tokenizer=inputs.tokenizer,
        batch_builder=inputs.batch_builder(256, 1 if packed else 0),
        sampler=BatchSampler(np.arange(len(inputs.source)), inputs.source.text_bytes(), DOCUMENTS, recipe.seed),
        recipe=recipe,
        logging_config=LoggingConfig(),
        identity={},
        steps=STEPS,
        output=Path("nowhere"),
        initial_student=ModelRef(pair.student),
    )
    recorder, waits, metrics = GradientRecorder(model), [], []
    for step in range(STEPS):
        with (
            SimulatedCuda()
            if simulated
            else contextlib.nullcontext(SimpleNamespace(waits={}, wait_locations={})) as counter
        ):
            metrics.append(_step(run, recorder, step_batch_builder(run)(step)))
        waits.append(counter)
    return metrics, {name: to_host(one) for name, one in recorder.gradients.items()}, waits


SLOW_CASES = {"items of several chunks"}  # chunks of one row are slow on the simulated device
# Losses, options, rows per chunk, and device-to-host reads.
DIVERGENCES = ["ce", "byte-kl:divergence=jsd,beta=0.3", "p-kl:divergence=reverse-kl,temperature=2"]
CASES = {
    "one pass": (FEW_LOSSES, {"batch": DOCUMENTS}, CHUNK_ROWS, 1),
    "three passes": (CROSS_TOKENIZER_LOSSES, {"batch": 2}, CHUNK_ROWS, 1),
    "one chunk": (CROSS_TOKENIZER_LOSSES, {"batch": 2}, 1000, 1),
    "items of several chunks": (CROSS_TOKENIZER_LOSSES, {"batch": 2}, 1, 1),
    "divergences": (DIVERGENCES, {"batch": 3}, CHUNK_ROWS, 1),
    "clipped": (["ce", "alm"], {"batch": 2, "max_norm": 0.01}, CHUNK_ROWS, 1),
    "gradient checkpointing": (["ce", "byte-kl"], {"batch": 2, "gradient_checkpointing": True}, CHUNK_ROWS, 1),
    # The losses of the first passes, which determine the scale, are read before the second passes.
    "scaled": (["ce", "byte-kl"], {"batch": 2, "scale_kd_to": "ce"}, CHUNK_ROWS, 2),
    # Without packing, transformers itself reads once per forward pass to detect packed documents.
    "padded": (FEW_LOSSES, {"batch": 2, "packing": False}, CHUNK_ROWS, 1 + DOCUMENTS // 2),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW_CASES)) for name in CASES]
)
def test_step_reads_the_device_once_for_any_number_of_passes(pair, cache, projection, monkeypatch, case):
    losses, options, rows, reads = CASES[case]
    monkeypatch.setattr("xtk.losses.head.chunk_rows_of", lambda head, states: rows)
    expected_metrics, expected_gradients, _ = take_steps(pair, cache, projection, losses, simulated=False, **options)
    metrics, gradients, waits = take_steps(pair, cache, projection, losses, simulated=True, **options)
    for counter in waits:
        read_locations = "\n".join(f"{count} {location}" for location, count in counter.wait_locations.most_common())
        assert counter.waits[READ] == reads, read_locations
        assert counter.waits[SHAPE] == counter.waits[UPLOAD] == 0, read_locations
    for (found_losses, found_norm), (expected_losses, expected_norm) in zip(metrics, expected_metrics, strict=True):
        assert found_losses == pytest.approx(expected_losses, rel=1e-5)
        assert found_norm == pytest.approx(expected_norm, rel=1e-4)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


class OneOfTwoProcesses:
    """The device mesh of process 0 of two that have equal values, so that a sum is twice the process's own value."""

    def get_local_rank(self, dimension: str) -> int:
        return 0

    def get_group(self, name: str) -> None:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(("options", "reads"), [({}, 2), ({"scale_kd_to": "ce"}, 3)], ids=["default", "scaled"])
def test_step_of_several_processes_also_reads_their_summed_counts(pair, cache, projection, monkeypatch, options, reads):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(2))
    options = {**options, "batch": 2, "parallel": ParallelConfig(dp=2, mesh=OneOfTwoProcesses())}
    expected_metrics, expected_gradients, _ = take_steps(
        pair, cache, projection, FEW_LOSSES[:2], simulated=False, **options
    )
    metrics, gradients, waits = take_steps(pair, cache, projection, FEW_LOSSES[:2], simulated=True, **options)
    for counter in waits:
        read_locations = "\n".join(f"{count} {location}" for location, count in counter.wait_locations.most_common())
        assert counter.waits[READ] == reads, read_locations
        assert counter.waits[SHAPE] == counter.waits[UPLOAD] == 0, read_locations
    for (losses, norm), (expected_losses, expected_norm) in zip(metrics, expected_metrics, strict=True):
        assert (losses, norm) == (pytest.approx(expected_losses, rel=1e-5), pytest.approx(expected_norm, rel=1e-4))
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def test_all_memory_of_the_copy_stream_is_kept_until_the_step_has_used_it():
    """`ratio_statistics` is not copied, but allocated while the copy stream is the current one."""
    span = np.zeros(1, np.int32)
    cells = ClippedSurrogateCells.from_numpy(
        cell_offsets=np.arange(2), entry_offsets=np.arange(2), teacher_probs=np.ones(1, np.float32), rows=span,
        tokens=span, log_weights=np.zeros(1, np.float32), sampling_logprobs=np.zeros(1), advantages=np.ones(1),
        num_prefix_tokens=np.zeros(1, np.int64), min_ratio=0.8, max_ratio=1.2,
    )  # fmt: skip
    with SimulatedCuda():
        moved_cells = cells.to(CUDA, 1.0)
        _wait_for(None, [moved_cells], CUDA)
    device_tensors = {name: value for name, value in vars(moved_cells).items() if isinstance(value, SimulatedTensor)}
    assert "ratio_statistics" in device_tensors
    assert [name for name, value in device_tensors.items() if not value.is_recorded] == []


def test_simulated_device_counts_each_kind_of_wait():
    with SimulatedCuda() as counter:
        numbers = torch.arange(6, device=CUDA)
        float(numbers[0]), numbers.tolist(), numbers.cpu()
        numbers[numbers > 2], numbers.nonzero(), numbers.repeat_interleave(numbers)
        torch.tensor([1], device=CUDA), torch.ones(1).to(CUDA), torch.ones(1).pin_memory().to(CUDA)
        numbers[torch.tensor([1])]
        torch.ones(1).pin_memory().to(CUDA, non_blocking=True), numbers.repeat_interleave(numbers, output_size=15)
        with pytest.raises(RuntimeError, match="two devices"):
            numbers + torch.ones(6)
    assert counter.waits == {READ: 3, SHAPE: 3, UPLOAD: 4}
