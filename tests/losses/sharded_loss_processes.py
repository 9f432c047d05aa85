"""Real processes that share one head, one text or one batch between them, and say how far they are from one process."""

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
from reference_losses import Case, draw_case
from torch import Tensor, distributed, multiprocessing

from xtk.losses import LOSSES
from xtk.losses.context_parallel_hidden_states import StateExchange
from xtk.losses.fused_head_and_loss import fused_loss
from xtk.losses.loss_cells import LossCells
from xtk.losses.loss_interface import join_inputs
from xtk.models.output_head import HeadAdapter, HeadShard, OutputHead
from xtk.name_registry import load_registered

PROCESSES = 4
DOCUMENTS, V, H, CHUNK = 8, 23, 5, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """How processes share the work.

    Attributes:
        data, context, tensor: processes in each direction; tensor counts fastest.
        zigzag: whether a process has a stretch of the text from its front and one from its back.
        micro_batches: into which the documents are cut.
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
class Question:
    """One loss on one layout.

    `head` is "plain", "bias", or "everything": a bias, a scale, a soft cap and an adapter. The rows of the head are cut
    evenly as far as that goes (23 rows never do), or "uneven", the first process has one of them.
    """

    loss: str
    layout: Layout
    dtype: str = "float64"
    head: str = "bias"
    uneven: bool = False

    def __str__(self) -> str:
        parts = dataclasses.asdict(self.layout)
        told = " ".join(f"{name}={value}" for name, value in parts.items() if value not in (1, False))
        return f"{self.loss} {self.dtype} {self.head}{' uneven' * self.uneven} {told}"


def ask(questions: Sequence[Question], folder: Path) -> list[dict[str, float]]:
    """Start the processes once, and return for each question the largest relative errors over all of them."""
    (folder / "questions.json").write_text(json.dumps([dataclasses.asdict(question) for question in questions]))
    multiprocessing.spawn(_work, (str(folder),), nprocs=PROCESSES)
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return [
        {name: max(answer.get(name, 0.0) for answer in of_one) for name in set().union(*of_one)}
        for of_one in zip(*answers, strict=True)
    ]


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", PROCESSES)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    questions = [
        Question(**{**asked, "layout": Layout(**asked["layout"])})
        for asked in json.loads(Path(folder, "questions.json").read_text())
    ]
    shapes = {(layout.data, layout.context, layout.tensor) for layout in (question.layout for question in questions)}
    groups = {shape: _groups(rank, *shape) for shape in sorted(shapes)}
    known: dict[tuple[str, str, str], dict[str, Tensor]] = {}
    answers = []
    for question in questions:
        layout = question.layout
        key = (question.loss, question.dtype, question.head)
        if key not in known:
            known[key] = _of_one_process(question)
        own = groups[layout.data, layout.context, layout.tensor]
        answers.append(_errors(question, rank, own, known[key]) if rank < layout.processes else {})
    Path(folder, f"{rank}.json").write_text(json.dumps(answers))
    distributed.destroy_process_group()


def _groups(rank: int, data: int, context: int, tensor: int) -> dict[str, Any]:
    """The groups of a process: with whom it shares a head, a text, and all that have the same rows of the head."""
    ranks = np.arange(data * context * tensor).reshape(data, context, tensor)
    kinds = {
        "tensor": ranks.reshape(-1, tensor),
        "context": ranks.transpose(0, 2, 1).reshape(-1, context),
        "replicas": ranks.transpose(2, 0, 1).reshape(tensor, -1),
    }
    found = {}
    for name, members in kinds.items():
        for some in members.tolist():
            group = distributed.new_group(some)
            if rank in some:
                found[name] = group
    return found


def _documents(loss: str) -> list[Case]:
    one_tokenizer = load_registered(LOSSES, loss, "loss").comparison_space == "tokens"
    # The second is a single span: all rows of some losses are one item there, which two processes hold.
    sizes = [6, 1, 9, 3, 12, 2, 5, 4]
    cases = [draw_case(seed, K=4, spans=size, one_tokenizer=one_tokenizer) for seed, size in enumerate(sizes)]
    return [dataclasses.replace(case, projection=cases[0].projection) for case in cases]


def _term(loss: str, cases: Sequence[Case]) -> LossCells:
    rule = load_registered(LOSSES, loss, "loss")()
    grounds: dict[str, Callable[[Case], Any]] = {"text": lambda case: None, "bytes": lambda case: case.next_bytes}
    ground = grounds.get(rule.comparison_space, lambda case: case.projection.columns)(cases[0])
    return rule.build_cells(join_inputs([case.example for case in cases]), ground)


def _head(kind: str, dtype: torch.dtype) -> OutputHead:
    draw = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) / 2).to(dtype).requires_grad_()

    weight, bias, down, up = some(V, H), some(V), some(2, H), some(V, 2)
    if kind == "everything":
        return OutputHead(weight, bias, scale=1.5, softcap=2.0, adapters=[HeadAdapter(down, up, 0.7)])
    return OutputHead(weight, bias if kind == "bias" else None)


def _piece(head: OutputHead, rows: slice, shard: HeadShard | None) -> OutputHead:
    """Rows of a head, with leaves of their own."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    return dataclasses.replace(
        head,
        weight=leaf(head.weight[rows]),
        bias=None if head.bias is None else leaf(head.bias[rows]),
        adapters=[HeadAdapter(leaf(one.lora_a), leaf(one.lora_b[rows]), one.scaling) for one in head.adapters],
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


def _of_one_process(question: Question) -> dict[str, Tensor]:
    dtype, cases = getattr(torch, question.dtype), _documents(question.loss)
    head = _piece(_head(question.head, dtype), slice(None), None)
    states = torch.cat([case.states for case in cases]).to(dtype).requires_grad_()
    term = _term(question.loss, cases)
    total, _ = fused_loss(states, head, [term.to(CPU, 1 / term.num_items)], 64)
    total.backward()
    return {"total": total.detach(), "d_states": states.grad, **_gradients(head)}


def _held(rows: int, layout: Layout) -> list[np.ndarray]:
    pieces = np.array_split(np.arange(rows), (1 + layout.zigzag) * layout.context)
    if not layout.zigzag:
        return pieces
    return [np.concatenate([pieces[rank], pieces[-1 - rank]]) for rank in range(layout.context)]


def _errors(question: Question, rank: int, groups: dict[str, Any], known: dict[str, Tensor]) -> dict[str, float]:
    layout, dtype, cases = question.layout, getattr(torch, question.dtype), _documents(question.loss)
    across, along = rank // layout.tensor // layout.context, rank // layout.tensor % layout.context
    edges = [V * number // layout.tensor for number in range(layout.tensor + 1)]
    if question.uneven:
        edges[1 : layout.tensor] = range(1, layout.tensor)
    rows = slice(*edges[rank % layout.tensor :][:2])
    shard = HeadShard.from_group(rows.stop - rows.start, groups["tensor"]) if layout.tensor > 1 else None
    head = _piece(_head(question.head, dtype), rows, shard)
    items = _term(question.loss, cases).num_items
    total = torch.zeros((), dtype=dtype)
    errors: dict[str, float] = {}
    firsts = np.cumsum([0, *(len(case.states) for case in cases)])
    for batch in np.array_split(np.arange(DOCUMENTS), layout.micro_batches)[across :: layout.data]:
        some, first = [cases[number] for number in batch], firsts[batch[0]]
        states = torch.cat([case.states for case in some]).to(dtype)
        held = _held(len(states), layout)
        mine = states[held[along]].requires_grad_()
        term = _term(question.loss, some)
        sent, terms = mine, [term]
        if layout.context > 1:
            plan = StateExchange.make_plan(held, [term], groups["context"])
            sent, terms = plan.exchange(mine), plan.local_terms([term])
        part, _ = fused_loss(sent, head, [one.to(CPU, 1 / items) for one in terms], CHUNK)
        part.backward()
        total += part.detach()
        errors["d_states"] = max(
            errors.get("d_states", 0.0), _error(mine.grad, known["d_states"][first + held[along]], known["d_states"])
        )
    distributed.all_reduce(total, group=groups["replicas"])
    errors["total"] = _error(total, known["total"], known["total"])
    for name, gradient in _gradients(head).items():
        distributed.all_reduce(gradient, group=groups["replicas"])
        expected = known[name] if name == "d_down" else known[name][rows]
        errors[name] = _error(gradient, expected, known[name])
    return errors


def _error(found: Tensor, expected: Tensor, whole: Tensor) -> float:
    """The largest difference, over the largest number."""
    assert found.shape == expected.shape
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    return difference / max(float(whole.abs().max()), 1e-3) if difference == difference else float("inf")


def product(losses: Sequence[str], layouts: Sequence[Layout], **options: Any) -> list[Question]:
    """Every loss on every layout."""
    return [Question(loss, layout, **options) for loss, layout in itertools.product(losses, layouts)]
