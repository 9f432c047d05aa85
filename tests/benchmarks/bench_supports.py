"""KL to the teacher of students that train on supports of its distributions, relative to whole distributions.

Teacher and student share a tokenizer of 2,048 tokens, trained on GSM8K. The teacher trains on all of GSM8K's problems;
the students, from the same initialization and on the same batches, on its distributions at 300 of them, by forward KL
alone. A support is sampled once per position (or once per set; the epochs use the sets in turn), as in a cache.
Measured is KL(teacher || student) over the whole vocabulary, on problems that neither model was trained on.
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

VOCAB_SIZE = 2048
TEACHER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
STUDENT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3}
TEACHER_EPOCHS, EPOCHS = 1, 4
DOCUMENTS, HELD_OUT = 300, 120
ROWS = 8  # documents of a student's batch
SEEDS = (0, 1, 2)
DISTINCT_IDS = 12  # distinct ids of `sample`, on average
SETS = (1, 4)
TARGET = 0.02
CHUNK_POSITIONS = 8192  # positions that are sampled at a time


# ------------------------------------------------------------------------------------------------------- the supports


@dataclass(frozen=True)
class Targets:
    """The targets that a cache keeps of P distributions, as ragged arrays; a student needs nothing else.

    Attributes:
        offsets: int64 [P + 1]: the entries of position p are `[offsets[p], offsets[p + 1])`.
        ids: int64 [E].
        probs: float32 [E]; of a sampled id the unbiased estimate.
        remainder: float32 [P], the mass without entries; 0 if samples represent it.
    """

    offsets: Tensor
    ids: Tensor
    probs: Tensor
    remainder: Tensor

    def ids_per_position(self) -> float:
        """Return the mean number of entries per position."""
        return len(self.ids) / len(self.remainder)

    def loss(self, logprobs: Tensor, positions: Tensor) -> Tensor:
        """Return the mean cross-entropy of the cells at some positions; its gradient is that of the forward KL.

        Args:
            logprobs: [N, V], the student's.
            positions: [N], the predicted ones of the P positions.
        """
        sizes = self.offsets[positions + 1] - self.offsets[positions]
        rows = torch.repeat_interleave(torch.arange(len(positions)), sizes)
        starts = self.offsets[positions] - (sizes.cumsum(0) - sizes)
        entries = torch.arange(len(rows)) + starts.repeat_interleave(sizes)
        entry_logprobs = logprobs[rows, self.ids[entries]]
        total = -(self.probs[entries] * entry_logprobs).sum()
        remainder = self.remainder[positions]
        if remainder.any():
            kept_mass = torch.zeros(len(positions)).index_add(0, rows, entry_logprobs.exp())
            total = total - (remainder * torch.log1p(-kept_mass.clamp_max(1 - 1e-6))).sum()
        return total / len(positions)


def masked_targets(probs: Tensor, mask: Tensor) -> Targets:
    """Return the probabilities under a mask [P, V], and the sum of all others as the remainder."""
    kept = probs * mask
    return ragged_targets(mask, kept, (1 - kept.sum(1)).clamp_min(0))


def ragged_targets(mask: Tensor, values: Tensor, remainder: Tensor) -> Targets:
    """Return the entries [P, V] under a mask as ragged arrays."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])
    return Targets(offsets, mask.nonzero()[:, 1], values[mask], remainder)


def top_k(probs: Tensor, observed: Tensor, count: int) -> Tensor:
    """Return the mask [P, V] of the most likely ids and the observed one."""
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter(1, probs.topk(count).indices, value=True)
    return mask.scatter(1, observed[:, None], value=True)


def top_p(probs: Tensor, observed: Tensor, mass: float, max_ids: int) -> Tensor:
    """Return the mask [P, V] of the most likely ids up to a mass, at most `max_ids`, and the observed one."""
    values, ids = probs.topk(max_ids)
    kept = values.cumsum(1) - values < mass
    mask = torch.zeros_like(probs, dtype=torch.bool).scatter(1, ids, kept)
    return mask.scatter(1, observed[:, None], value=True)


def with_samples(probs: Tensor, exact: Tensor, count: int, generator: torch.Generator, *, systematic: bool) -> Targets:
    """Return the probabilities under a mask, and samples of the remainder, each with an equal share of its mass.

    Args:
        probs: [P, V].
        exact: [P, V].
        count: samples per position.
        generator: of the samples.
        systematic: samples at equal distances along the distribution, from one random start; else independent ones.
    """
    masks, values = [], []
    for chunk, exact_chunk in zip(probs.split(CHUNK_POSITIONS), exact.split(CHUNK_POSITIONS), strict=True):
        remainder = chunk.double().masked_fill(exact_chunk, 0)
        cumulative = remainder.cumsum(1)
        uniform = torch.rand(len(chunk), 1 if systematic else count, generator=generator, dtype=torch.float64)
        if systematic:
            uniform = (uniform + torch.arange(count)) / count
        ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_max(chunk.shape[1] - 1)
        counts = torch.zeros_like(chunk).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))
        counts.masked_fill_(exact_chunk, 0)  # without remaining probability there is nothing to sample
        sample_fractions = counts / counts.sum(1, keepdim=True).clamp_min(1)
        masks.append(exact_chunk | (counts > 0))
        values.append(torch.where(exact_chunk, chunk, sample_fractions * remainder.sum(1, keepdim=True).float()))
    return ragged_targets(torch.cat(masks), torch.cat(values), torch.zeros(len(probs)))


def samples_for(ids: float, probs: Tensor, observed: Tensor, *, systematic: bool) -> int:
    """Return the number of samples that give, with the observed token, `ids` distinct ids on average."""
    remainder = probs.double().scatter(1, observed[:, None], 0)
    remainder /= remainder.sum(1, keepdim=True).clamp_min(1e-12)
    for count in range(1, 1000):
        inclusion_probs = (remainder * count).clamp_max(1) if systematic else 1 - (1 - remainder) ** count
        if 1 + inclusion_probs.sum(1).mean() >= ids:
            return count
    return 1000


MakeTargets = Callable[[torch.Generator], Targets]


def supports(probs: Tensor, observed: Tensor) -> dict[str, tuple[int, MakeTargets]]:
    """Return for each support its number of sets, and a function that creates one set from a generator."""
    observed_mask = torch.zeros_like(probs, dtype=torch.bool).scatter(1, observed[:, None], value=True)
    no_remainder = torch.zeros(len(probs))
    makers: dict[str, tuple[int, MakeTargets]] = {
        "cross-entropy: the observed token alone": (
            1,
            lambda _: ragged_targets(observed_mask, observed_mask.float(), no_remainder),
        ),
        "top-k 64, observed, remainder": (1, lambda _: masked_targets(probs, top_k(probs, observed, 64))),
        "top-p 0.99 (64 at most), observed, remainder": (
            1,
            lambda _: masked_targets(probs, top_p(probs, observed, 0.99, 64)),
        ),
    }
    for kind in ("independent", "systematic"):
        num_samples = samples_for(
            DISTINCT_IDS, probs[:CHUNK_POSITIONS], observed[:CHUNK_POSITIONS], systematic=kind == "systematic"
        )
        for sets in SETS:
            name = f"{kind} samples, {sets} set" + "s" * (sets > 1)
            makers[f"sample: observed, {num_samples} {name}"] = (
                sets,
                sampled_support(probs, observed_mask, num_samples, kind),
            )
        for size in (16, 8, 4) if kind == "systematic" else (16,):
            name = f"top-k+sample: {size}, observed, {size} {kind} samples, 1 set"
            makers[name] = (1, sampled_support(probs, top_k(probs, observed, size), size, kind))
    return makers


def sampled_support(probs: Tensor, exact: Tensor, count: int, kind: str) -> MakeTargets:
    """Return a function that samples a set of targets from a generator."""
    return lambda generator: with_samples(probs, exact, count, generator, systematic=kind == "systematic")


# ------------------------------------------------------------------------------------------- the models and the texts


class TokenizedTexts:
    """Documents in ids, with one position per token except the first.

    Attributes:
        documents: each between two end tokens.
        first: the first position of each document.
        observed: the token ids at all positions.
    """

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = [torch.tensor(document) for document in documents]
        self.first = np.cumsum([0] + [len(document) - 1 for document in documents])
        self.observed = torch.cat([document[1:] for document in self.documents])

    def batches(self, size: int, order: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids [B, T] padded with 0, and the positions [B, T - 1] that they predict; -1 for padding."""
        for start in range(0, len(order), size):
            selected = order[start : start + size].tolist()
            longest = max(len(self.documents[at]) for at in selected)
            ids, positions = (
                torch.zeros(len(selected), longest, dtype=torch.int64),
                torch.full((len(selected), longest - 1), -1),
            )
            for row, at in enumerate(selected):
                length = len(self.documents[at])
                ids[row, :length] = self.documents[at]
                positions[row, : length - 1] = torch.arange(length - 1) + int(self.first[at])
            yield ids, positions


def tokenized_texts() -> tuple[TokenizedTexts, TokenizedTexts, TokenizedTexts]:
    """Return the teacher's training texts, the students' training texts, and held-out texts."""
    training, held_out = gsm8k(), gsm8k(HELD_OUT, part="test")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(training, trainer)

    def encode(group: list[str]) -> TokenizedTexts:
        return TokenizedTexts([[0, *encoding.ids, 0] for encoding in tokenizer.encode_batch(group)])

    return encode(training), encode(training[:DOCUMENTS]), encode(held_out)


def new_model(shape: dict[str, int], seed: int) -> Qwen3ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(seed)
    heads = {"num_key_value_heads": shape["num_attention_heads"], "head_dim": 32}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCAB_SIZE, **shape, **heads, tie_word_embeddings=True, initializer_range=0.05)
    )


def logprobs_of(model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the log-probabilities [N, V] at the positions that are not padding."""
    states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[positions >= 0]
    return torch.log_softmax(model.lm_head(states), 1)


LossFunction = Callable[[Tensor, Tensor, int], Tensor]


def train(
    model: Qwen3ForCausalLM,
    data: TokenizedTexts,
    epochs: int,
    rows: int,
    seed: int,
    loss: LossFunction,
) -> Qwen3ForCausalLM:
    """Train a model in place and return it.

    Args:
        model: the model.
        data: the texts.
        epochs: number of epochs.
        rows: documents per batch.
        seed: of the order.
        loss: function of log-probabilities [N, V], positions [N], and the number of the epoch.
    """
    rng = np.random.default_rng(seed)
    muon = Muon([weight for weight in model.model.layers.parameters() if weight.ndim == 2], 0.02, 0.0)
    adam_parameters = [weight for name, weight in model.named_parameters() if weight.ndim == 1 or "embed" in name]
    adam = torch.optim.Adam(adam_parameters, betas=(0.9, 0.98))
    steps, step = epochs * -(-len(data.documents) // rows), 0
    for epoch in range(epochs):
        for ids, positions in data.batches(rows, rng.permutation(len(data.documents))):
            lr_factor = schedule(step, steps)
            adam.param_groups[0]["lr"] = 0.004 * lr_factor
            loss(logprobs_of(model, ids, positions), positions[positions >= 0], epoch).backward()
            muon.step(lr_factor)
            adam.step()
            model.zero_grad()
            step += 1
    return model


@torch.inference_mode()
def distributions(model: Qwen3ForCausalLM, data: TokenizedTexts) -> Tensor:
    """Return log-probabilities [P, V] at all positions."""
    order = np.arange(len(data.documents))
    return torch.cat([logprobs_of(model, ids, positions) for ids, positions in data.batches(32, order)])


# ------------------------------------------------------------------------------------------------------ the experiment


@dataclass(frozen=True)
class SupportResult:
    """The result of a support: KL(teacher || student) on held-out text, one per seed."""

    ids: float
    divergences: list[float]


def train_student(
    seed: int, data: TokenizedTexts, loss: LossFunction, held_out: TokenizedTexts, expected: Tensor
) -> float:
    """Train a student; return KL(teacher || student) in nats on held-out text."""
    model = train(new_model(STUDENT, seed), data, EPOCHS, ROWS, seed, loss)
    logprobs = distributions(model, held_out)
    return float((expected.exp() * (expected - logprobs)).sum(1).mean())


def main() -> None:
    """Train, measure and print."""
    silence_transformers()
    started = time.monotonic()
    teacher_data, data, held_out = tokenized_texts()
    observed = teacher_data.observed

    def cross_entropy_loss(logprobs: Tensor, positions: Tensor, epoch: int) -> Tensor:
        return -logprobs.gather(1, observed[positions][:, None]).mean()

    teacher = train(new_model(TEACHER, 100), teacher_data, TEACHER_EPOCHS, 16, 100, cross_entropy_loss)
    expected, probs = distributions(teacher, held_out), distributions(teacher, data).exp()
    report_line(f"teacher: {time.monotonic() - started:.0f} s")
    full_divergences = [
        train_student(seed, data, lambda logprobs, at, _: -(probs[at] * logprobs).sum(1).mean(), held_out, expected)
        for seed in SEEDS
    ]
    results = {"full": SupportResult(VOCAB_SIZE, full_divergences)}
    for name, (sets, make_targets) in supports(probs, data.observed).items():
        results[name] = train_on_support(make_targets, sets, data, held_out, expected)
        report_line(f"{name}: {results[name]} ({time.monotonic() - started:.0f} s)")
    entropy = float(-(expected.exp() * expected).sum(1).mean())
    cross_entropy = float(-expected.gather(1, held_out.observed[:, None]).mean())
    table = [
        ("the teacher on held-out text", f"entropy {entropy:.3f} nats, cross-entropy {cross_entropy:.3f}", "(none)")
    ]
    report(__file__, table + [row(name, result, full_divergences) for name, result in results.items()])


def train_on_support(
    make_targets: MakeTargets, sets: int, data: TokenizedTexts, held_out: TokenizedTexts, expected: Tensor
) -> SupportResult:
    """Train a student per seed on what a cache with a support would contain."""
    divergences, sizes = [], []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(1000 + seed)
        target_sets = [make_targets(generator) for _ in range(sets)]
        sizes.append(target_sets[0].ids_per_position())

        def loss(logprobs: Tensor, positions: Tensor, epoch: int, target_sets: list[Targets] = target_sets) -> Tensor:
            return target_sets[epoch % len(target_sets)].loss(logprobs, positions)

        divergences.append(train_student(seed, data, loss, held_out, expected))
    return SupportResult(statistics.mean(sizes), divergences)


def row(name: str, result: SupportResult, full_divergences: list[float]) -> tuple[str, str, str]:
    """Return a row of the table: the mean over seeds, and its difference from students of full distributions."""
    ratios = [
        divergence / full_divergence - 1
        for divergence, full_divergence in zip(result.divergences, full_divergences, strict=True)
    ]
    report_line = f"{statistics.mean(result.divergences):.4f} nats"
    if name != "full":
        report_line += (
            f", {statistics.mean(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%}), {result.ids:.1f} ids"
        )
    return (
        f"KL(teacher, student): {name}",
        report_line,
        f"{TARGET:.0%} of full" if name.startswith("sample") else "(none)",
    )


def report_line(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
