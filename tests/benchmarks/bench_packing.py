"""Packed documents without padding compared with padded batches: GSM8K, the same documents, forward and backward.

    python tests/benchmarks/bench_packing.py [--documents 32] [--rounds 3]

A Llama of 8 layers, H = 512, V = 4,096, trained with cross-entropy; Llama 3's tokens, modulo V. Padded: batches of
documents in their original order, as a collator pads them; and the same documents sorted by length, split into passes
of 8, as with `distill --no-packing`. Runs alternate; medians of the ratios of single repetitions; on a CPU, CPU time
with one thread; on a GPU in bf16 (`--mixed-precision bf16`). Also one layer's attention, forward and backward, with
documents as splits and as slices of the row.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from measurement import gsm8k, real_data, report
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from xtk.batches.data_sources import TextDocuments
from xtk.batches.micro_batches import BatchBuilder, MicroBatch
from xtk.losses import LOSSES
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import PackedSequence, packed_attention
from xtk.name_registry import load_registered
from xtk.text.document import Document
from xtk.text.tokenizer import Tokenizer
from xtk.training.student_generator import autocast
from xtk.training.student_with_losses import StudentWithLoss

V = 4096
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED_PRECISION = "bf16" if DEVICE.type == "cuda" else "no"


def clock() -> float:
    """Return seconds: CPU time on a CPU, wall time on a GPU."""
    if DEVICE.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def step_of(student: StudentWithLoss, batches: list[MicroBatch]) -> Callable[[], None]:
    """Return a function that runs forward and backward passes of micro-batches."""

    def step() -> None:
        student.zero_grad(set_to_none=True)
        for batch in batches:
            terms = [
                dataclasses.replace(term.to(DEVICE, 1 / term.num_items), tokens=(term.tokens % V).to(DEVICE))
                for term in batch.terms
            ]
            packed = None if batch.document_lengths is None else PackedSequence(batch.document_lengths)
            ids = torch.from_numpy(batch.input_ids % V).to(DEVICE)
            with autocast(MIXED_PRECISION, DEVICE):
                total, _ = student(ids, batch.loss_positions, terms, packed)
            total.backward()

    return step


def split_over_slices(count: int, length: int, rounds: int) -> float:
    """Return the ratio of the time of a layer's attention with documents as slices of the row to that with splits."""
    dtype = torch.bfloat16 if MIXED_PRECISION == "bf16" else torch.float32
    shape = (1, 9, count * length, 64)
    query, key, value = (torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    row = PackedSequence((length,) * count)
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]

    def split() -> None:
        packed_attention(layer, query, key, value, None, packed=row)[0].sum().backward()

    def sliced() -> None:
        slices = [slice(at, at + length) for at in range(0, count * length, length)]
        outputs = [
            scaled_dot_product_attention(
                *(tensor[:, :, document_slice] for tensor in (query, key, value)), is_causal=True
            )
            for document_slice in slices
        ]
        torch.cat(outputs, dim=2).transpose(1, 2).contiguous().sum().backward()

    ratios = []
    for _ in range(2 * rounds):
        started = clock()
        split()
        middle = clock()
        sliced()
        ratios.append((clock() - middle) / (middle - started))
    return statistics.median(ratios[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = Tokenizer(real_data() / "tokenizers" / "llama3")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, **heads)
    )
    backbone = BackboneWithHead(model.to(DEVICE))
    assert backbone.enable_packing()
    student = StudentWithLoss(backbone)
    loss = load_registered(LOSSES, "ce", "loss")()
    term = LossTerm(loss, parse_losses(["ce"])[0].make_divergence(), None, "ce")
    rows = [
        (f"a layer's attention, {count} documents of {length} tokens: slices over splits",
         f"{split_over_slices(count, length, args.rounds):.1f} x the time", "")
        for count, length in ((4, 150), (40, 100), (100, 40))
    ]  # fmt: skip
    for count in args.documents:
        source = TextDocuments([Document.from_text(text) for text in gsm8k(count)])
        numbers = list(range(count))
        longest_first = sorted(numbers, key=lambda number: -len(source.document(number).text.encode()))
        packed, padded = (BatchBuilder(source, tokenizer, [term], None, packing_multiple=packing) for packing in (1, 0))
        batches_by_way = {
            "packed": [packed.build(numbers)],
            "padded": [padded.build(numbers)],
            "in passes of 8": [padded.build(longest_first[at : at + 8]) for at in range(0, count, 8)],
        }
        tokens = {sum(batch.tokens for batch in batches) for batches in batches_by_way.values()}
        assert len(tokens) == 1
        seconds: dict[str, list[float]] = {name: [] for name in batches_by_way}
        for number in range(args.rounds + 1):
            for name, batches in batches_by_way.items():
                started = clock()
                step_of(student, batches)()
                if number:
                    seconds[name].append(clock() - started)
        for name, target in (("padded", "1.8 x"), ("in passes of 8", "")):
            ratios = [
                other_seconds / packed_seconds
                for packed_seconds, other_seconds in zip(seconds["packed"], seconds[name], strict=True)
            ]
            positions_per_token = sum(batch.input_ids.size for batch in batches_by_way[name]) / tokens.copy().pop()
            result = f"{statistics.median(ratios):.2f} x tokens/s ({positions_per_token:.2f} positions a token)"
            rows.append((f"{count} documents in a row over {name}", result, target))
    rate = statistics.median(seconds["packed"])
    rows.append(("packed", f"{tokens.pop() / rate:,.0f} tokens/s", ""))
    report(__file__, [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", ""), *rows])


if __name__ == "__main__":
    main()
