"""A teacher at the real Qwen vocabulary whose distributions look like a language model's, trained once and kept.

The bytes and the losses of a cache depend on the shape of the distributions in it: on how many tokens share the mass
and on how the rest falls off. A model with random weights has no such shape, so the benchmarks of caches read this
one: a Qwen3 of some million weights, trained from nothing on GSM8K, WikiText-2 (valid) and HumanEval, and calibrated,
that is, as surprised by text that it has not seen as it expects to be.

    python tests/benchmarks/calibrated_teacher.py [quick|long] [FOLDER]

trains it unless it is there, writes distributions at held-out text to FOLDER, and prints what to state beside a byte
count. From a module: `language_model()` gives the folder of the model, `measured(...)` the statistics.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import gsm8k, model_folder, real_data
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from xtk.artifacts.atomic_files import canonical_json, sha256
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, silence_transformers
from xtk.tokens.document import Document
from xtk.tokens.token_sequence import TokenSequence as TokenSequence
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer
from xtk.writable_cache_folders import user_cache_folder

WIDTH = 151936  # columns of Qwen's models; its tokenizer names 151,646 tokens, the last three of them special
ORDINARY = 151643
BLOCK = 64  # a divisor of the width
PART = 2000  # characters of WikiText in a document: about 500 tokens
KEPT, DRAWS = 512, 16
MUON_ITERATIONS = 5
VERSION = 1


@dataclass(frozen=True)
class Settings:
    """The model, and how it is trained; the same settings give the same model on the same machine.

    Attributes:
        candidates: tokens that a step's softmax is estimated from, on average.
        tokens_a_step: padded tokens of a batch.
        matrix_rate: of the matrices, which Muon trains.
        other_rate: of the embeddings and the norms, which Adam trains.
        weight_decay: of the matrices.
    """

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int
    steps: int
    candidates: int = 4000
    tokens_a_step: int = 1024
    matrix_rate: float = 0.02
    other_rate: float = 0.02
    weight_decay: float = 0.05
    seed: int = 0


QUICK = Settings(hidden=192, layers=3, heads=6, key_value_heads=2, head_dim=32, intermediate=512, steps=700)
LONG = Settings(hidden=256, layers=4, heads=8, key_value_heads=4, head_dim=32, intermediate=768, steps=2500)
PRESETS = {"quick": QUICK, "long": LONG}


# ---------------------------------------------------------------------------------------------------------- the texts


def wikitext(part: str) -> list[str]:
    """Return WikiText-2's "valid" or "test" in documents of some paragraphs, none of two articles."""
    documents, held = [], ""
    for line in (real_data() / "corpora" / f"wikitext2-{part}.txt").read_text(encoding="utf-8").splitlines():
        article = line.startswith(" = ") and not line.startswith(" = =")
        if held.strip() and (article or len(held) + len(line) > PART):
            documents.append(held)
            held = ""
        held += line + "\n"
    return [*documents, held]


def human_eval() -> list[str]:
    """Return HumanEval's problems with their solutions and tests."""
    with gzip.open(real_data() / "corpora" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [row["prompt"] + row["canonical_solution"] + row["test"] for row in map(json.loads, lines)]


def held_out(corpus: str, positions: int, tokenizer: Tokenizer | None = None) -> list[TokenSequence]:
    """Return documents of "gsm8k", "wikitext" or "humaneval" that the model has not seen, of about so many positions.

    Their tokenizer is that of the benchmark's teacher, if none is given.
    """
    texts = human_eval() if corpus == "humaneval" else gsm8k(part="test") if corpus == "gsm8k" else wikitext("test")
    found: list[TokenSequence] = []
    count = 0
    for tokens in tokenised(texts, tokenizer):
        if count >= positions:
            break
        found.append(tokens)
        count += int(tokens.train_mask.sum())
    return found


def tokenised(texts: list[str], tokenizer: Tokenizer | None = None) -> list[TokenSequence]:
    """Return texts as the cache reads them: between a start token and an end token."""
    tokenizer = tokenizer or Tokenizer(real_data() / "tokenizers" / "qwen")
    return tokenize_documents(tokenizer, [Document.from_text(text) for text in texts])


# --------------------------------------------------------------------------------------------------------- the model


def language_model(settings: Settings = LONG) -> Path:
    """Return the folder of the model and its tokenizer; it is trained where it has not been."""
    key = sha256(canonical_json([VERSION, dataclasses.asdict(settings)])).removeprefix("sha256:")[:16]
    folder = user_cache_folder() / "benchmarks" / f"language-model-{key}"
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
        try:
            model_folder(temporary, "qwen", train(settings))
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def train(settings: Settings) -> Qwen3ForCausalLM:
    """Train the model on all that it may see."""
    torch.manual_seed(settings.seed)
    random = np.random.default_rng(settings.seed)
    documents = tokenised([*gsm8k(), *wikitext("valid"), *human_eval()])
    counts = np.bincount(np.concatenate([document.ids for document in documents]), minlength=WIDTH)
    texts = Texts([document.ids for document in documents], counts, settings.tokens_a_step, random)
    candidates = Candidates(counts, settings.candidates, random)
    model = new_model(settings)
    matrices = Muon(
        [weight for weight in model.model.layers.parameters() if weight.ndim == 2],
        settings.matrix_rate,
        settings.weight_decay,
    )
    embeddings = Embeddings(model.get_input_embeddings().weight.data, counts)
    few = [embeddings.shared, *(weight for weight in model.parameters() if weight.ndim == 1)]
    adam = torch.optim.Adam(few, betas=(0.9, 0.98))
    model.get_input_embeddings().weight.requires_grad_(False)
    started, average = time.monotonic(), 0.0
    for step, ids in zip(range(settings.steps), texts, strict=False):
        rate = schedule(step, settings.steps)
        drawn, corrections = candidates.draw()
        rows, (inputs, targets, columns) = embeddings.rows(ids[:, :-1], ids[:, 1:], drawn)
        states = model.model(inputs_embeds=rows[inputs.clamp_min(0)], use_cache=False).last_hidden_state
        loss = SampledSoftmax.apply(states[targets >= 0], rows, targets[targets >= 0], columns, corrections)
        loss.backward()
        matrices.step(rate)
        adam.param_groups[0]["lr"] = rate * settings.other_rate
        adam.step()
        adam.zero_grad()
        embeddings.step(rate * settings.other_rate)
        model.zero_grad()
        average += (loss.item() - average) * max(0.02, 1 / (step + 1))
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - started
            sys.stderr.write(f"step {step + 1} of {settings.steps}, {average:.3f} nats, {seconds:.0f} s\n")
    embeddings.finish()
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def new_model(settings: Settings) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WIDTH,
            hidden_size=settings.hidden,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.key_value_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=151645,
        )
    )


def schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate: up over a twentieth of the steps, then straight down to 0."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, (steps - step) / (steps - warm))


class SampledSoftmax(torch.autograd.Function):
    """The mean cross-entropy of N targets over the whole vocabulary, its normaliser estimated from candidates.

    Each candidate is divided by the probability with which it is one, so that the sum is right on average; the target
    is always in, once, as it is. The gradient is made on the way, in the memory of the logits: they are the largest
    thing in a step.

    Args (of `apply`):
        states: [N, H].
        rows: [R, H], embeddings.
        targets: [N], of `rows`.
        columns: [C], the candidates, of `rows`.
        corrections: [C], the logarithms of their probabilities of being drawn.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, targets: Tensor, columns: Tensor, corrections: Tensor
    ) -> Tensor:
        candidates = rows[columns]
        logits = torch.addmm(-corrections, states, candidates.T)
        actual = torch.einsum("nh,nh->n", states, rows[targets])
        places = torch.full((len(rows),), -1).index_put_((columns,), torch.arange(len(columns)))[targets]
        inside = places >= 0
        logits[inside.nonzero()[:, 0], places[inside]] = actual[inside]
        normaliser = torch.logaddexp(logits.logsumexp(1), actual.masked_fill(inside, -math.inf))
        # Of a target that is no candidate, the probability has no column: its part of the gradient is added apart.
        alone = torch.exp(actual - normaliser).masked_fill_(inside, 0)
        probs = logits.sub_(normaliser[:, None]).exp_()
        at_target = (alone - 1)[:, None] / len(states)
        probs /= len(states)
        of_states = (probs @ candidates).addcmul_(at_target, rows[targets])
        of_rows = torch.zeros_like(rows).index_add_(0, columns, probs.T @ states)
        ctx.save_for_backward(of_states, of_rows.index_add_(0, targets, at_target * states))
        return (normaliser - actual).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_states, of_rows = ctx.saved_tensors
        return gradient * of_states, gradient * of_rows, None, None, None


class Candidates:
    """Draws the tokens that stand for the vocabulary in a step: each by itself, the frequent ones always."""

    def __init__(self, counts: NDArray[np.int64], size: int, random: np.random.Generator) -> None:
        self.random = random
        # The square root makes the estimate's noise small: rare tokens are many, and each holds little.
        weights = np.sqrt(counts + rarities(counts) * (counts == 1).sum())
        scale = size / weights.sum()
        for _ in range(50):
            scale *= size / np.minimum(1, scale * weights).sum()
        self.rates = np.minimum(1, scale * weights)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return ids [C], and the logarithms of their rates [C]."""
        drawn = np.flatnonzero(self.random.random(len(self.rates)) < self.rates)
        return torch.from_numpy(drawn), torch.from_numpy(np.log(self.rates[drawn]).astype(np.float32))


def rarities(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how probable each token is where a text has one that is new: merges made early are of frequent words."""
    weights = np.where(counts <= 1, 1 / (np.arange(len(counts)) + 2000.0), 0)
    return weights / weights.sum()


class Texts:
    """Gives batches of whole documents of similar length, padded with -1, epoch after epoch, each in another order.

    A token that the corpora hold only once stands, as in Good and Turing's estimate, for those that they lack: each
    time it is read, another token of those is in its place. So the model learns where new words come, and leaves
    them the mass that held-out text will ask for.
    """

    def __init__(
        self, documents: list[NDArray[np.int32]], counts: NDArray[np.int64], tokens: int, random: np.random.Generator
    ) -> None:
        self.documents, self.tokens, self.random = documents, tokens, random
        self.once = counts == 1
        self.new = np.cumsum(rarities(counts)[:ORDINARY])

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            order = self.random.permutation(len(self.documents))
            # Sorted in parts, so that a batch holds like lengths and an epoch has another order than the one before.
            parts = [sorted(part, key=lambda at: -len(self.documents[at])) for part in np.array_split(order, 4)]
            batches = [batch for part in parts for batch in self.cut(part)]
            for at in self.random.permutation(len(batches)):
                yield self.padded([self.documents[number] for number in batches[at]])

    def cut(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield documents, longest first, as many as fit a step."""
        start = 0
        while start < len(order):
            size = max(1, self.tokens // len(self.documents[order[start]]))
            yield list(order[start : start + size])
            start += size

    def padded(self, documents: list[NDArray[np.int32]]) -> Tensor:
        """Return ids [B, T]."""
        ids = np.full((len(documents), max(map(len, documents))), -1, np.int64)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = document
        once = (ids >= 0) & self.once[ids]
        ids[once] = np.searchsorted(self.new, self.random.random(once.sum()) * self.new[-1], side="right")
        return torch.from_numpy(ids)


class Embeddings:
    """Trains the rows of a table that a step touches, by Adam; the others cost nothing.

    Tokens of like frequency share a part: what a step teaches the few rare ones in it reaches all of them, which
    single steps would take long to push down to what they deserve.

    Attributes:
        shared: [groups, H], trained by whoever asks for it.
    """

    def __init__(self, table: Tensor, counts: NDArray[np.int64]) -> None:
        self.table = table
        self.groups = torch.from_numpy(np.log2(counts + 1).astype(np.int64))
        self.shared = torch.zeros(int(self.groups.max()) + 1, table.shape[1], requires_grad=True)
        self.mean, self.square = torch.zeros_like(table), torch.zeros_like(table)
        self.times = torch.zeros(len(table), 1)
        self.ids, self.own = torch.empty(0, dtype=torch.int64), torch.empty(0)

    def rows(self, *ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the embeddings [R, H] of all these ids, and the ids as places among them; -1 stays -1."""
        flat = torch.cat([part.flatten() for part in ids])
        self.ids, places = torch.unique(flat.clamp_min(0), return_inverse=True)
        places = torch.where(flat < 0, -1, places).split([part.numel() for part in ids])
        self.own = self.table[self.ids].requires_grad_()
        rows = self.own + self.shared[self.groups[self.ids]]
        return rows, [place.view(part.shape) for place, part in zip(places, ids, strict=True)]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Follow the gradient of the rows of this step; each row counts its own steps."""
        gradient = self.own.grad
        assert gradient is not None
        times = self.times[self.ids] + 1
        mean = self.mean[self.ids].lerp_(gradient, 0.1)
        square = self.square[self.ids].lerp_(gradient * gradient, 0.02)
        self.times[self.ids], self.mean[self.ids], self.square[self.ids] = times, mean, square
        spread = (square / (1 - 0.98**times)).sqrt_().add_(1e-10)
        self.table[self.ids] = self.own - rate * (mean / (1 - 0.9**times)) / spread

    @torch.no_grad()
    def finish(self) -> None:
        """Put the shared parts into the table."""
        self.table += self.shared[self.groups]


class Muon:
    """Trains matrices by steps whose singular values are all about 1 (Jordan et al. 2024).

    In float32: where a processor has no bfloat16, torch's own is fifty times slower.
    """

    def __init__(self, weights: list[Tensor], rate: float, weight_decay: float) -> None:
        self.weights, self.rate, self.weight_decay = weights, rate, weight_decay
        self.momenta = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Follow the gradients, at a share of the rate."""
        rate = share * self.rate
        for weight, momentum in zip(self.weights, self.momenta, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 0.05)
            direction = orthogonal(weight.grad.lerp(momentum, 0.95))
            weight.mul_(1 - rate * self.weight_decay)
            weight.add_(direction, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix of the same singular vectors, its singular values near 1, by Newton-Schulz iterations."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = wide / wide.norm().add(1e-7)
    for _ in range(MUON_ITERATIONS):
        square = found @ found.T
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.T if matrix.shape[0] > matrix.shape[1] else found


# -------------------------------------------------------------------------------------------------- its distributions


@torch.inference_mode()
def distributions(folder: Path, documents: Sequence[TokenSequence], rows: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probabilities [n, U] at the trained tokens of some documents, `rows` at a time, and those tokens.

    The log-probabilities stand until the next ones are asked for.
    """
    cut = BackboneWithHead(load_causal_lm(folder).eval().requires_grad_(False))
    for document in documents:
        ids, trained = torch.from_numpy(document.ids.astype(np.int64)), torch.from_numpy(document.train_mask)
        states = cut(ids[None])[0, :-1][trained[1:]]
        for some, realised in zip(states.split(rows), ids[trained].split(rows), strict=True):
            yield torch.log_softmax(some @ cut.head.weight.T, 1), realised


@dataclass(frozen=True)
class Heads:
    """The heads of N distributions, and what tells of the rest.

    Attributes:
        ids: int32 [N, K], likeliest first.
        logprobs: float32 [N, K].
        realised_ids: int32 [N], the token that stands there.
        realised_logprobs: float32 [N].
        entropy: float32 [N], nats, of the whole distribution.
        mass: float32 [N], of the K ids.
        draws: int32 [N, DRAWS], independent draws from the whole distribution.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    realised_ids: NDArray[np.int32]
    realised_logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    mass: NDArray[np.float32]
    draws: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)


def heads(folder: Path, documents: Sequence[TokenSequence], kept: int = KEPT, seed: int = 0) -> Heads:
    """Return the heads of a model's distributions at the trained tokens of some documents."""
    random = torch.Generator().manual_seed(seed)
    parts: list[list[NDArray[np.generic]]] = []
    for logprobs, realised in distributions(folder, documents):
        probs = logprobs.exp()
        ids, values = likeliest(logprobs, kept)
        found = [
            ids.int(),
            values,
            realised.int(),
            logprobs.gather(1, realised[:, None])[:, 0],
            -torch.einsum("nv,nv->n", probs, logprobs),
            values.double().exp().sum(1).float(),
            drawn(probs, DRAWS, random).int(),
        ]
        parts.append([part.numpy() for part in found])
    return Heads(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [n, count] of the likeliest tokens, found in the blocks of largest maximum."""
    blocks = logprobs.unflatten(1, (-1, BLOCK))
    best = blocks.amax(2).topk(count, sorted=False).indices
    values, places = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(count)
    return best.gather(1, places // BLOCK) * BLOCK + places % BLOCK, values


def drawn(probs: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Return ids [n, count], independent draws from each row: first a block, then a token of it."""
    blocks = probs.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(2).double().cumsum(1)
    uniform = torch.rand(len(probs), count, generator=random, dtype=torch.float64) * sums[:, -1:]
    block = torch.searchsorted(sums, uniform, right=True).clamp_max(sums.shape[1] - 1)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).double().cumsum(2)
    again = torch.rand(len(probs), count, 1, generator=random, dtype=torch.float64) * within[:, :, -1:]
    return block * BLOCK + torch.searchsorted(within, again, right=True)[:, :, 0].clamp_max(BLOCK - 1)


@dataclass(frozen=True)
class Statistics:
    """What to state beside a byte count: means over positions.

    Attributes:
        entropy: nats.
        cross_entropy: nats, of the tokens that stand there; near the entropy where a model is calibrated.
        mass_of_64: of the 64 likeliest ids.
        ids_of_99: how many of the likeliest ids carry 0.99 of the mass, 64 at most.
        mass_of_99: what those carry.
        draws_for_12: so many draws from what the realised token leaves make, with it, 12 distinct ids.
    """

    positions: int
    entropy: float
    cross_entropy: float
    mass_of_64: float
    ids_of_99: float
    mass_of_99: float
    draws_for_12: float

    def __str__(self) -> str:
        return (
            f"{self.positions:,} positions, entropy {self.entropy:.3f} nats, cross-entropy {self.cross_entropy:.3f}; "
            f"the 64 likeliest hold {self.mass_of_64:.4f}; 0.99 of the mass (64 ids at most) takes "
            f"{self.ids_of_99:.2f} ids and holds {self.mass_of_99:.4f}; {self.draws_for_12:.1f} draws make 12 ids"
        )


def statistics(head: Heads) -> Statistics:
    """Return the means that describe some distributions."""
    sums = np.exp(head.logprobs[:, :64].astype(np.float64)).cumsum(1)
    sizes = np.minimum((sums < 0.99).sum(1) + 1, 64)
    return Statistics(
        len(head),
        float(head.entropy.mean()),
        float(-head.realised_logprobs.mean()),
        float(sums[:, -1].mean()),
        float(sizes.mean()),
        float(sums[np.arange(len(head)), sizes - 1].mean()),
        draws_for(12, head),
    )


def draws_for(ids: float, head: Heads) -> float:
    """Return how many draws from what the realised token leaves make, with it, so many distinct ids on average."""
    low, high = 0.0, 4096.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(middle, head) < ids else (low, middle)
    return low


def distinct(draws: float, head: Heads) -> float:
    """Return the expected count of distinct ids: the realised one, and those among draws from the rest."""
    rest = np.maximum(-np.expm1(head.realised_logprobs.astype(np.float64)), 1e-12)[:, None]
    others = head.ids != head.realised_ids[:, None]
    shares = np.minimum(np.exp(head.logprobs) * others / rest, 1 - 1e-12)
    seen = -np.expm1(draws * np.log1p(-shares)).sum(1)
    # What is outside of the head is hardly ever drawn twice.
    return float(1 + (seen + draws * np.maximum(0, 1 - shares.sum(1))).mean())


def measured(corpus: str, positions: int, settings: Settings = LONG) -> Statistics:
    """Return the statistics of the model on held-out text of "gsm8k" or "wikitext"."""
    return statistics(heads(language_model(settings), held_out(corpus, positions)))


def write(folder: Path, prefix: str, documents: Sequence[TokenSequence], head: Heads) -> None:
    """Write documents and the heads of the distributions at their trained tokens as two files of arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / f"{prefix}documents.npz",
        ids=np.concatenate([document.ids for document in documents]),
        offsets=np.cumsum([0, *map(len, documents)]),
        trained=np.concatenate([document.train_mask for document in documents]),
    )
    np.savez(
        folder / f"{prefix}top.npz", **{field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    )


def main() -> None:
    """Train, measure, print; write the distributions where a folder is named."""
    silence_transformers()
    settings = PRESETS[sys.argv[1] if len(sys.argv) > 1 else "long"]
    folder = language_model(settings)
    sys.stdout.write(f"{folder}\n")
    for corpus, positions, prefix in (("gsm8k", 30000, ""), ("wikitext", 5000, "wikitext-")):
        documents = held_out(corpus, positions)
        head = heads(folder, documents)
        sys.stdout.write(f"{corpus}: {statistics(head)}\n")
        if len(sys.argv) > 2:
            write(Path(sys.argv[2]), prefix, documents, head)


if __name__ == "__main__":
    main()
