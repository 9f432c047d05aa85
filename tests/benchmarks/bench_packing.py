"""Rows of documents without padding against padded batches: GSM8K, the same documents, forward and backward.

    python tests/benchmarks/bench_packing.py [--documents 32] [--rounds 3]

A Llama of 8 layers, H = 512, V = 4,096, that learns cross-entropy; Llama 3's tokens, folded into so many. Batches of
documents as they come, as a collator pads them; and the same documents in order of their length, cut into passes of 8,
as `distill --no-packing` takes them. In turns, medians of ratios of one round each; on a CPU seconds of the processor,
one thread. And one layer's attention, forward and backward, with the documents as splits and as slices of the row.
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

from xtk.losses import LOSSES
from xtk.losses.loss_spec import parse_losses
from xtk.losses.loss_term import LossTerm
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.packed_attention import PackedSequence, packed_attention
from xtk.name_registry import load_registered
from xtk.tokens.document import Document
from xtk.tokens.tokenizer import Tokenizer
from xtk.training.data_sources import TextSource
from xtk.training.micro_batches import BatchBuilder, MicroBatch
from xtk.training.student_with_losses import StudentWithLoss

V = 4096
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def clock() -> float:
    """Return seconds."""
    if DEVICE.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def step_of(student: StudentWithLoss, batches: list[MicroBatch]) -> Callable[[], None]:
    """Return forward and backward passes of micro-batches."""

    def step() -> None:
        student.zero_grad(set_to_none=True)
        for batch in batches:
            terms = [
                dataclasses.replace(term.to(DEVICE, 1 / term.num_items), tokens=(term.tokens % V).to(DEVICE))
                for term in batch.terms
            ]
            row = None if batch.document_lengths is None else PackedSequence(batch.document_lengths)
            ids = torch.from_numpy(batch.input_ids % V).to(DEVICE)
            student(ids, batch.loss_positions, terms, row)[0].backward()

    return step


def split_over_slices(count: int, length: int) -> float:
    """Return how many times longer a layer's attention takes if documents are slices of the row."""
    query, key, value = (torch.randn(1, 9, count * length, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    row = PackedSequence((length,) * count)
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]

    def split() -> None:
        packed_attention(layer, query, key, value, None, packed=row)[0].sum().backward()

    def sliced() -> None:
        parts = [slice(at, at + length) for at in range(0, count * length, length)]
        each = [
            scaled_dot_product_attention(*(one[:, :, part] for one in (query, key, value)), is_causal=True)
            for part in parts
        ]
        torch.cat(each, dim=2).transpose(1, 2).contiguous().sum().backward()

    ratios = []
    for _ in range(6):
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
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = Tokenizer(real_data() / "tokenizers" / "llama3")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, **heads)
    )
    cut = BackboneWithHead(model.to(DEVICE))
    assert cut.enable_packing()
    student = StudentWithLoss(cut)
    rule = load_registered(LOSSES, "ce", "loss")()
    objective = LossTerm(rule, parse_losses(["ce"])[0].make_divergence(), None, "ce")
    rows = [
        (f"a layer's attention, {count} documents of {length} tokens: slices over splits",
         f"{split_over_slices(count, length):.1f} x the time", "")
        for count, length in ((4, 150), (40, 100), (100, 40))
    ]  # fmt: skip
    for count in chosen.documents:
        source = TextSource([Document.from_text(text) for text in gsm8k(count)])
        numbers = list(range(count))
        longest_first = sorted(numbers, key=lambda number: -len(source.document(number).text.encode()))
        packed, padded = (
            BatchBuilder(source, tokenizer, [objective], None, packing_multiple=packing) for packing in (1, 0)
        )
        works = {
            "packed": [packed.build(numbers)],
            "padded": [padded.build(numbers)],
            "in passes of 8": [padded.build(longest_first[at : at + 8]) for at in range(0, count, 8)],
        }
        tokens = {sum(batch.tokens for batch in batches) for batches in works.values()}
        assert len(tokens) == 1
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for number in range(chosen.rounds + 1):
            for name, batches in works.items():
                started = clock()
                step_of(student, batches)()
                if number:
                    seconds[name].append(clock() - started)
        for name, reach in (("padded", "1.8 x"), ("in passes of 8", "")):
            ratios = [other / one for one, other in zip(seconds["packed"], seconds[name], strict=True)]
            cells = sum(batch.input_ids.size for batch in works[name]) / tokens.copy().pop()
            told = f"{statistics.median(ratios):.2f} x tokens/s ({cells:.2f} positions a token)"
            rows.append((f"{count} documents in a row over {name}", told, reach))
    rate = statistics.median(seconds["packed"])
    rows.append(("packed", f"{tokens.pop() / rate:,.0f} tokens/s", ""))
    report(__file__, [("device", f"{DEVICE.type}, {torch.get_num_threads()} threads", ""), *rows])


if __name__ == "__main__":
    main()
