"""Does a student that trains on a kept part of the teacher's distributions learn as from all of them?

Teacher and student share a tokenizer of 2,048 tokens, trained on GSM8K. The teacher trains on all of GSM8K's problems;
the students, from the same start and on the same batches, on its distributions at 300 of them, by forward KL alone. A
support is drawn once a position (or once a set, the sets used in turn over the epochs), as a cache keeps it. What is
measured is KL(teacher || student) over the whole vocabulary, on problems that neither has seen.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from calibrated_teacher import Muon, schedule
from measurement import gsm8k, report
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from xtk.models.causal_lm import silence_transformers

WIDTH = 2048
TEACHER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
STUDENT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3}
TEACHER_EPOCHS, EPOCHS = 1, 4
DOCUMENTS, HELD_OUT = 300, 120
ROWS = 8  # documents of a student's batch
SEEDS = (0, 1, 2)
IDS = 12  # distinct ids of `sample`, on average
SETS = (1, 4)
REACH = 0.02
PART = 8192  # positions at a time where draws are made


# ------------------------------------------------------------------------------------------------------- the supports


@dataclass(frozen=True)
class Targets:
    """What a cache keeps of P distributions, as ragged arrays: a student needs nothing else.

    Attributes:
        offsets: int64 [P + 1]: the entries of position p are `[offsets[p], offsets[p + 1])`.
        ids: int64 [E].
        probs: float32 [E]; of a drawn id the unbiased estimate.
        tail: float32 [P], the mass of which no entry tells; 0 where draws tell of it.
    """

    offsets: Tensor
    ids: Tensor
    probs: Tensor
    tail: Tensor

    def ids_a_position(self) -> float:
        """Return the mean count of entries."""
        return len(self.ids) / len(self.tail)

    def loss(self, logprobs: Tensor, positions: Tensor) -> Tensor:
        """Return the mean cross-entropy of the cells at some positions, whose gradient is the forward KL's.

        Args:
            logprobs: [N, V], the student's.
            positions: [N], which of the P they predict.
        """
        sizes = self.offsets[positions + 1] - self.offsets[positions]
        rows = torch.repeat_interleave(torch.arange(len(positions)), sizes)
        starts = self.offsets[positions] - (sizes.cumsum(0) - sizes)
        entries = torch.arange(len(rows)) + starts.repeat_interleave(sizes)
        found = logprobs[rows, self.ids[entries]]
        total = -(self.probs[entries] * found).sum()
        tail = self.tail[positions]
        if tail.any():
            kept = torch.zeros(len(positions)).index_add(0, rows, found.exp())
            total = total - (tail * torch.log1p(-kept.clamp_max(1 - 1e-6))).sum()
        return total / len(positions)


def of_mask(probs: Tensor, mask: Tensor) -> Targets:
    """Keep what a mask [P, V] says exactly, and a sum of the rest."""
    kept = probs * mask
    return ragged(mask, kept, (1 - kept.sum(1)).clamp_min(0))


def ragged(mask: Tensor, values: Tensor, tail: Tensor) -> Targets:
    """Return the entries [P, V] under a mask as ragged arrays."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    return Targets(offsets, mask.nonzero()[:, 1], values[mask], tail)


def top_k(probs: Tensor, realised: Tensor, count: int) -> Tensor:
    """Return the mask [P, V] of the likeliest ids and the one that stands there."""
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(count).indices, value=True)
    return mask.scatter(1, realised[:, None], value=True)


def top_p(probs: Tensor, realised: Tensor, mass: float, most: int) -> Tensor:
    """Return the mask of as many of the likeliest ids as carry a mass, and the one that stands there."""
    values, ids = probs.topk(most)
    wanted = values.cumsum(1) - values < mass
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter(1, ids, wanted)
    return mask.scatter(1, realised[:, None], value=True)


def with_draws(probs: Tensor, exact: Tensor, count: int, random: torch.Generator, *, systematic: bool) -> Targets:
    """Keep what a mask says exactly, and draws from the rest: each a share of the rest's mass.

    Args:
        probs: [P, V].
        exact: [P, V].
        count: draws a position.
        random: of the draws.
        systematic: draws at equal distances along the distribution, from one random start; else each by itself.
    """
    masks, values = [], []
    for some, known in zip(probs.split(PART), exact.split(PART), strict=True):
        rest = some.double().masked_fill(known, 0)
        sums = rest.cumsum(1)
        uniform = torch.rand(len(some), 1 if systematic else count, generator=random, dtype=torch.float64)
        if systematic:
            uniform = (uniform + torch.arange(count)) / count
        ids = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp_max(some.shape[1] - 1)
        counts = torch.zeros_like(some).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))
        counts.masked_fill_(known, 0)  # where nothing is left, nothing can be drawn
        share = counts / counts.sum(1, keepdim=True).clamp_min(1)
        masks.append(known | (counts > 0))
        values.append(torch.where(known, some, share * rest.sum(1, keepdim=True).float()))
    return ragged(torch.cat(masks), torch.cat(values), torch.zeros(len(probs)))


def draws_for(ids: float, probs: Tensor, realised: Tensor, *, systematic: bool) -> int:
    """Return the count of draws that makes, with the realised token, so many distinct ids on average."""
    rest = probs.double().scatter(1, realised[:, None], 0)
    rest /= rest.sum(1, keepdim=True).clamp_min(1e-12)
    for count in range(1, 1000):
        drawn = (rest * count).clamp_max(1) if systematic else 1 - (1 - rest) ** count
        if 1 + drawn.sum(1).mean() >= ids:
            return count
    return 1000


Make = Callable[[torch.Generator], Targets]


def supports(probs: Tensor, realised: Tensor) -> dict[str, tuple[int, Make]]:
    """Return for each support its sets, and what makes one of them from a generator."""
    alone = torch.zeros_like(probs, dtype=torch.bool).scatter(1, realised[:, None], value=True)
    nothing = torch.zeros(len(probs))
    found: dict[str, tuple[int, Make]] = {
        "cross-entropy: the realised token alone": (1, lambda _: ragged(alone, alone.float(), nothing)),
        "top-k 64, realised, tail": (1, lambda _: of_mask(probs, top_k(probs, realised, 64))),
        "top-p 0.99 (64 at most), realised, tail": (1, lambda _: of_mask(probs, top_p(probs, realised, 0.99, 64))),
    }
    for kind in ("independent", "systematic"):
        count = draws_for(IDS, probs[:PART], realised[:PART], systematic=kind == "systematic")
        for sets in SETS:
            name = f"{kind} draws, {sets} set" + "s" * (sets > 1)
            found[f"sample: realised, {count} {name}"] = (sets, drawing(probs, alone, count, kind))
        for size in (16, 8, 4) if kind == "systematic" else (16,):
            name = f"top-k+sample: {size}, realised, {size} {kind} draws, 1 set"
            found[name] = (1, drawing(probs, top_k(probs, realised, size), size, kind))
    return found


def drawing(probs: Tensor, exact: Tensor, count: int, kind: str) -> Make:
    """Return what makes a set of draws from a generator."""
    return lambda random: with_draws(probs, exact, count, random, systematic=kind == "systematic")


# ------------------------------------------------------------------------------------------- the models and the texts


class Texts:
    """Documents in ids, one position a token but the first.

    Attributes:
        documents: each between two end tokens.
        first: the position of each document's first.
    """

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = [torch.tensor(document) for document in documents]
        self.first = np.cumsum([0] + [len(document) - 1 for document in documents])
        self.realised = torch.cat([document[1:] for document in self.documents])

    def batches(self, size: int, order: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids [B, T] padded with 0, and the positions [B, T - 1] that they predict; -1 for padding."""
        for start in range(0, len(order), size):
            chosen = order[start : start + size].tolist()
            longest = max(len(self.documents[at]) for at in chosen)
            ids, positions = (
                torch.zeros(len(chosen), longest, dtype=torch.int64),
                torch.full((len(chosen), longest - 1), -1),
            )
            for row, at in enumerate(chosen):
                length = len(self.documents[at])
                ids[row, :length] = self.documents[at]
                positions[row, : length - 1] = torch.arange(length - 1) + int(self.first[at])
            yield ids, positions


def texts() -> tuple[Texts, Texts, Texts]:
    """Return what the teacher trains on, what the students train on, and what neither sees."""
    problems, unseen = gsm8k(), gsm8k(HELD_OUT, part="test")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WIDTH, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(problems, trainer)

    def encoded(some: list[str]) -> Texts:
        return Texts([[0, *encoding.ids, 0] for encoding in tokenizer.encode_batch(some)])

    return encoded(problems), encoded(problems[:DOCUMENTS]), encoded(unseen)


def new_model(shape: dict[str, int], seed: int) -> Qwen3ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(seed)
    heads = {"num_key_value_heads": shape["num_attention_heads"], "head_dim": 32}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=WIDTH, **shape, **heads, tie_word_embeddings=True, initializer_range=0.05)
    )


def logprobs_of(model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the log-probabilities [N, V] at the positions that are none of padding."""
    states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[positions >= 0]
    return torch.log_softmax(model.lm_head(states), 1)


Loss = Callable[[Tensor, Tensor, int], Tensor]


def train(
    model: Qwen3ForCausalLM,
    data: Texts,
    epochs: int,
    rows: int,
    seed: int,
    loss: Loss,
) -> Qwen3ForCausalLM:
    """Train a model.

    Args:
        model: it, in place.
        data: the texts.
        epochs: times that it reads them.
        rows: documents of a batch.
        seed: of the order.
        loss: of log-probabilities [N, V], positions [N], and the number of the epoch.
    """
    random = np.random.default_rng(seed)
    matrices = Muon([weight for weight in model.model.layers.parameters() if weight.ndim == 2], 0.02, 0.0)
    others = [weight for name, weight in model.named_parameters() if weight.ndim == 1 or "embed" in name]
    adam = torch.optim.Adam(others, betas=(0.9, 0.98))
    steps, step = epochs * -(-len(data.documents) // rows), 0
    for epoch in range(epochs):
        for ids, positions in data.batches(rows, random.permutation(len(data.documents))):
            share = schedule(step, steps)
            adam.param_groups[0]["lr"] = 0.004 * share
            loss(logprobs_of(model, ids, positions), positions[positions >= 0], epoch).backward()
            matrices.step(share)
            adam.step()
            model.zero_grad()
            step += 1
    return model


@torch.inference_mode()
def distributions(model: Qwen3ForCausalLM, data: Texts) -> Tensor:
    """Return log-probabilities [P, V] at all positions."""
    order = np.arange(len(data.documents))
    return torch.cat([logprobs_of(model, ids, positions) for ids, positions in data.batches(32, order)])


# ------------------------------------------------------------------------------------------------------ the experiment


@dataclass(frozen=True)
class Found:
    """What a student of a support reached, a seed each: KL(teacher || student) on held-out text."""

    ids: float
    divergences: list[float]


def student(seed: int, data: Texts, loss: Loss, unseen: Texts, expected: Tensor) -> float:
    """Train a student; return KL(teacher || student) in nats on held-out text."""
    model = train(new_model(STUDENT, seed), data, EPOCHS, ROWS, seed, loss)
    found = distributions(model, unseen)
    return float((expected.exp() * (expected - found)).sum(1).mean())


def main() -> None:
    """Train, measure, print."""
    silence_transformers()
    started = time.monotonic()
    everything, data, unseen = texts()
    realised = everything.realised

    def surprise(logprobs: Tensor, positions: Tensor, epoch: int) -> Tensor:
        return -logprobs.gather(1, realised[positions][:, None]).mean()

    teacher = train(new_model(TEACHER, 100), everything, TEACHER_EPOCHS, 16, 100, surprise)
    expected, probs = distributions(teacher, unseen), distributions(teacher, data).exp()
    told(f"teacher: {time.monotonic() - started:.0f} s")
    full = [
        student(seed, data, lambda logprobs, at, _: -(probs[at] * logprobs).sum(1).mean(), unseen, expected)
        for seed in SEEDS
    ]
    found = {"full": Found(WIDTH, full)}
    for name, (sets, make) in supports(probs, data.realised).items():
        found[name] = of_support(make, sets, data, unseen, expected)
        told(f"{name}: {found[name]} ({time.monotonic() - started:.0f} s)")
    entropy = float(-(expected.exp() * expected).sum(1).mean())
    surprised = float(-expected.gather(1, unseen.realised[:, None]).mean())
    table = [("the teacher on held-out text", f"entropy {entropy:.3f} nats, cross-entropy {surprised:.3f}", "(none)")]
    report(__file__, table + [row(name, one, full) for name, one in found.items()])


def of_support(make: Make, sets: int, data: Texts, unseen: Texts, expected: Tensor) -> Found:
    """Train a student a seed from what a cache of a support would hold."""
    divergences, sizes = [], []
    for seed in SEEDS:
        random = torch.Generator().manual_seed(1000 + seed)
        kept = [make(random) for _ in range(sets)]
        sizes.append(kept[0].ids_a_position())

        def loss(logprobs: Tensor, positions: Tensor, epoch: int, kept: list[Targets] = kept) -> Tensor:
            return kept[epoch % len(kept)].loss(logprobs, positions)

        divergences.append(student(seed, data, loss, unseen, expected))
    return Found(statistics.mean(sizes), divergences)


def row(name: str, found: Found, full: list[float]) -> tuple[str, str, str]:
    """Return a row of the table: the mean over seeds, and how far it is from a student of full distributions."""
    ratios = [one / other - 1 for one, other in zip(found.divergences, full, strict=True)]
    told = f"{statistics.mean(found.divergences):.4f} nats"
    if name != "full":
        told += f", {statistics.mean(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%}), {found.ids:.1f} ids"
    return (f"KL(teacher, student): {name}", told, f"{REACH:.0%} of full" if name.startswith("sample") else "(none)")


def told(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
