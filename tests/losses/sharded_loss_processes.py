"""Real processes that shard a head, a text or a batch, and measure the differences from a single process."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference_losses import Case, random_case
from torch import Tensor, distributed, multiprocessing

from xtk.losses import LOSSES
from xtk.losses.cells.loss_cells import LossCells
from xtk.losses.context_parallel_hidden_states import StateExchange
from xtk.losses.head import fused_loss
from xtk.losses.interface import join_inputs
from xtk.models.output_head import HeadAdapter, HeadShard, OutputHead
from xtk.name_registry import load_registered

NUM_PROCESSES = 4
NUM_DOCUMENTS, V, H, CHUNK = 8, 23, 5, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """How processes divide the work.

    Attributes:
        data, context, tensor: number of processes in each dimension; the tensor index varies fastest.
        zigzag: whether a process has one block of the text from its front and one from its back.
        micro_batches: number of micro-batches that the documents are split into.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    zigzag: bool = False
    micro_batches: int = 1

    @property
    def processes(self) -> int:
        return self.data * self.context * self.tensor


@dataclass(frozen=True)
class ShardedRun:
    """One loss on one layout.

    `head` is "plain", "bias", or "everything": a bias, a scale, a soft cap and an adapter. The rows of the head are
    divided as evenly as possible (23 rows never are); with `uneven`, all processes but the last have one row.
    """

    loss: str
    layout: Layout
    dtype: str = "float64"
    head: str = "bias"
    uneven: bool = False

    def __str__(self) -> str:
        fields = dataclasses.asdict(self.layout)
        layout_text = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (1, False))
        return f"{self.loss} {self.dtype} {self.head}{' uneven' * self.uneven} {layout_text}"


def measure_errors(runs: Sequence[ShardedRun], folder: Path) -> list[dict[str, float]]:
    """Start the processes once, and return for each run the largest relative errors over all processes."""
    (folder / "questions.json").write_text(json.dumps([dataclasses.asdict(run) for run in runs]))
    multiprocessing.spawn(_run_process, (str(folder),), nprocs=NUM_PROCESSES)
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]
    return [
        {name: max(result.get(name, 0.0) for result in run_results) for name in set().union(*run_results)}
        for run_results in zip(*results, strict=True)
    ]


def _run_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", NUM_PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=NUM_PROCESSES)
    runs = [
        ShardedRun(**{**fields, "layout": Layout(**fields["layout"])})
        for fields in json.loads(Path(folder, "questions.json").read_text())
    ]
    shapes = {(layout.data, layout.context, layout.tensor) for layout in (run.layout for run in runs)}
    groups = {shape: _groups(rank, *shape) for shape in sorted(shapes)}
    references: dict[tuple[str, str, str], dict[str, Tensor]] = {}
    results = []
    for run in runs:
        layout = run.layout
        key = (run.loss, run.dtype, run.head)
        if key not in references:
            references[key] = _single_process_result(run)
        own_groups = groups[layout.data, layout.context, layout.tensor]
        results.append(_errors(run, rank, own_groups, references[key]) if rank < layout.processes else {})
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def _groups(rank: int, data: int, context: int, tensor: int) -> dict[str, Any]:
    """Return a process's groups: for tensor parallel, for context parallel, and all with the same rows of the head."""
    ranks = np.arange(data * context * tensor).reshape(data, context, tensor)
    group_ranks = {
        "tensor": ranks.reshape(-1, tensor),
        "context": ranks.transpose(0, 2, 1).reshape(-1, context),
        "replicas": ranks.transpose(2, 0, 1).reshape(tensor, -1),
    }
    groups = {}
    for name, rank_lists in group_ranks.items():
        for member_ranks in rank_lists.tolist():
            group = distributed.new_group(member_ranks)
            if rank in member_ranks:
                groups[name] = group
    return groups


def _documents(loss: str) -> list[Case]:
    one_tokenizer = load_registered(LOSSES, loss, "loss").comparison_space == "tokens"
    # The second is a single span: for some losses all its rows are one item, which two processes hold.
    sizes = [6, 1, 9, 3, 12, 2, 5, 4]
    cases = [random_case(seed, K=4, spans=size, one_tokenizer=one_tokenizer) for seed, size in enumerate(sizes)]
    return [dataclasses.replace(case, projection=cases[0].projection) for case in cases]


def _term(loss: str, cases: Sequence[Case]) -> LossCells:
    loss_object = load_registered(LOSSES, loss, "loss")()
    spaces: dict[str, Callable[[Case], Any]] = {"text": lambda case: None, "bytes": lambda case: case.next_bytes}
    space = spaces.get(loss_object.comparison_space, lambda case: case.projection.columns)(cases[0])
    return loss_object.build_cells(join_inputs([case.example for case in cases]), space)


def _head(kind: str, dtype: torch.dtype) -> OutputHead:
    generator = torch.Generator().manual_seed(1)

    def random_leaf(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 2).to(dtype).requires_grad_()

    weight, bias, down, up = random_leaf(V, H), random_leaf(V), random_leaf(2, H), random_leaf(V, 2)
    if kind == "everything":
        return OutputHead(weight, bias, scale=1.5, softcap=2.0, adapters=[HeadAdapter(down, up, 0.7)])
    return OutputHead(weight, bias if kind == "bias" else None)


def _shard_head(head: OutputHead, rows: slice, shard: HeadShard | None) -> OutputHead:
    """Return rows of a head as separate leaf tensors."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    return dataclasses.replace(
        head,
        weight=leaf(head.weight[rows]),
        bias=None if head.bias is None else leaf(head.bias[rows]),
        adapters=[
            HeadAdapter(leaf(adapter.lora_a), leaf(adapter.lora_b[rows]), adapter.scaling) for adapter in head.adapters
        ],
        shard=shard,
    )


def _gradients(head: OutputHead) -> dict[str, Tensor]:
    named = {"d_weight": head.weight, "d_bias": head.bias}
    for adapter in head.adapters:
        named |= {"d_up": adapter.lora_b, "d_down": adapter.lora_a}
    return {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in named.items()
        if tensor is not None
    }


def _single_process_result(run: ShardedRun) -> dict[str, Tensor]:
    dtype, cases = getattr(torch, run.dtype), _documents(run.loss)
    head = _shard_head(_head(run.head, dtype), slice(None), None)
    states = torch.cat([case.states for case in cases]).to(dtype).requires_grad_()
    term = _term(run.loss, cases)
    total, _ = fused_loss(states, head, [term.to(CPU, 1 / term.num_items)], 64)
    total.backward()
    return {"total": total.detach(), "d_states": states.grad, **_gradients(head)}


def _held_rows(rows: int, layout: Layout) -> list[np.ndarray]:
    blocks = np.array_split(np.arange(rows), (1 + layout.zigzag) * layout.context)
    if not layout.zigzag:
        return blocks
    return [np.concatenate([blocks[rank], blocks[-1 - rank]]) for rank in range(layout.context)]


def _errors(run: ShardedRun, rank: int, groups: dict[str, Any], reference: dict[str, Tensor]) -> dict[str, float]:
    layout, dtype, cases = run.layout, getattr(torch, run.dtype), _documents(run.loss)
    data_index, context_index = rank // layout.tensor // layout.context, rank // layout.tensor % layout.context
    row_edges = [V * number // layout.tensor for number in range(layout.tensor + 1)]
    if run.uneven:
        row_edges[1 : layout.tensor] = range(1, layout.tensor)
    rows = slice(*row_edges[rank % layout.tensor :][:2])
    shard = HeadShard.from_group(rows.stop - rows.start, groups["tensor"]) if layout.tensor > 1 else None
    head = _shard_head(_head(run.head, dtype), rows, shard)
    num_items = _term(run.loss, cases).num_items
    total = torch.zeros((), dtype=dtype)
    errors: dict[str, float] = {}
    first_rows = np.cumsum([0, *(len(case.states) for case in cases)])
    for batch in np.array_split(np.arange(NUM_DOCUMENTS), layout.micro_batches)[data_index :: layout.data]:
        batch_cases, first_row = [cases[number] for number in batch], first_rows[batch[0]]
        states = torch.cat([case.states for case in batch_cases]).to(dtype)
        held = _held_rows(len(states), layout)
        own_states = states[held[context_index]].requires_grad_()
        term = _term(run.loss, batch_cases)
        exchanged, terms = own_states, [term]
        if layout.context > 1:
            plan = StateExchange.make_plan(held, [term], groups["context"])
            exchanged, terms = plan.exchange(own_states), plan.local_terms([term])
        local_loss, _ = fused_loss(exchanged, head, [local_term.to(CPU, 1 / num_items) for local_term in terms], CHUNK)
        local_loss.backward()
        total += local_loss.detach()
        errors["d_states"] = max(
            errors.get("d_states", 0.0),
            _error(own_states.grad, reference["d_states"][first_row + held[context_index]], reference["d_states"]),
        )
    distributed.all_reduce(total, group=groups["replicas"])
    errors["total"] = _error(total, reference["total"], reference["total"])
    for name, gradient in _gradients(head).items():
        distributed.all_reduce(gradient, group=groups["replicas"])
        expected = reference[name] if name == "d_down" else reference[name][rows]
        errors[name] = _error(gradient, expected, reference[name])
    return errors


def _error(found: Tensor, expected: Tensor, whole: Tensor) -> float:
    """Return the largest difference, divided by the largest absolute value."""
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    return difference / max(float(whole.abs().max()), 1e-3) if difference == difference else float("inf")


def all_runs(losses: Sequence[str], layouts: Sequence[Layout], **options: Any) -> list[ShardedRun]:
    """Return a run for every loss on every layout."""
    return [ShardedRun(loss, layout, **options) for loss, layout in itertools.product(losses, layouts)]
