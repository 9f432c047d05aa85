"""A teacher with the real Qwen vocabulary and language-model-like distributions, trained once and stored.

The bytes and the losses of a cache depend on the shape of its distributions: on how many tokens share the mass and how
the remainder decays. A model with random weights has no such shape, so the benchmarks of caches use this one: a Qwen3
of some million weights, trained from scratch on GSM8K, WikiText-2 (valid) and HumanEval, and calibrated, that is, with
a cross-entropy on held-out text near its entropy.

    python tests/benchmarks/calibrated_teacher.py [quick|long] [FOLDER]

trains it unless it exists, writes distributions on held-out text to FOLDER, and prints the statistics to publish with
a byte count. From a module: `language_model()` returns the model's folder, `held_out_statistics(...)` the statistics.
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

from xtk.files.atomic_files import canonical_json, sha256
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm, silence_transformers
from xtk.models.resolver import ModelRef
from xtk.text.document import Document
from xtk.text.token_sequence import TokenSequence as TokenSequence
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer
from xtk.writable_cache_folders import user_cache_folder

VOCAB_SIZE = 151936  # columns of Qwen's models; its tokenizer has 151,646 tokens, the last three of them special
NUM_ORDINARY_TOKENS = 151643
BLOCK = 64  # a divisor of the vocabulary size
DOCUMENT_CHARACTERS = 2000  # characters of WikiText in a document: about 500 tokens
NUM_TOP, NUM_SAMPLES = 512, 16
MUON_ITERATIONS = 5
VERSION = 1


@dataclass(frozen=True)
class Settings:
    """The model and its training; the same settings give the same model on the same machine.

    Attributes:
        candidates: mean number of tokens from which a step estimates the softmax.
        tokens_a_step: padded tokens of a batch.
        matrix_rate: learning rate of the matrices, which Muon trains.
        other_rate: learning rate of the embeddings and norms, which Adam trains.
        weight_decay: weight decay of the matrices.
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


def wikitext(split: str) -> list[str]:
    """Return WikiText-2's "valid" or "test" split as documents of some paragraphs, each within one article."""
    documents, current = [], ""
    for line in (real_data() / "corpora" / f"wikitext2-{split}.txt").read_text(encoding="utf-8").splitlines():
        starts_article = line.startswith(" = ") and not line.startswith(" = =")
        if current.strip() and (starts_article or len(current) + len(line) > DOCUMENT_CHARACTERS):
            documents.append(current)
            current = ""
        current += line + "\n"
    return [*documents, current]


def human_eval() -> list[str]:
    """Return HumanEval's problems with their solutions and tests."""
    with gzip.open(real_data() / "corpora" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [row["prompt"] + row["canonical_solution"] + row["test"] for row in map(json.loads, lines)]


def held_out(corpus: str, positions: int, tokenizer: Tokenizer | None = None) -> list[TokenSequence]:
    """Return documents that the model was not trained on, with about `positions` trained tokens in all.

    Args:
        corpus: "gsm8k", "wikitext" or "humaneval".
        positions: trained tokens.
        tokenizer: default: that of the benchmark's teacher.
    """
    texts = human_eval() if corpus == "humaneval" else gsm8k(part="test") if corpus == "gsm8k" else wikitext("test")
    selected: list[TokenSequence] = []
    num_positions = 0
    for tokens in tokenized(texts, tokenizer):
        if num_positions >= positions:
            break
        selected.append(tokens)
        num_positions += int(tokens.train_mask.sum())
    return selected


def tokenized(texts: list[str], tokenizer: Tokenizer | None = None) -> list[TokenSequence]:
    """Tokenize texts as a cache does: with the start and end tokens."""
    tokenizer = tokenizer or Tokenizer(real_data() / "tokenizers" / "qwen")
    return tokenize_documents(tokenizer, [Document.from_text(text) for text in texts])


# --------------------------------------------------------------------------------------------------------- the model


def language_model(settings: Settings = LONG) -> Path:
    """Return the folder of the model and its tokenizer; train the model if it does not exist."""
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
    """Train the model on all of its training corpora."""
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    documents = tokenized([*gsm8k(), *wikitext("valid"), *human_eval()])
    counts = np.bincount(np.concatenate([document.ids for document in documents]), minlength=VOCAB_SIZE)
    batches = DocumentBatches([document.ids for document in documents], counts, settings.tokens_a_step, rng)
    candidates = CandidateSampler(counts, settings.candidates, rng)
    model = new_model(settings)
    muon = Muon(
        [weight for weight in model.model.layers.parameters() if weight.ndim == 2],
        settings.matrix_rate,
        settings.weight_decay,
    )
    embeddings = Embeddings(model.get_input_embeddings().weight.data, counts)
    adam_parameters = [embeddings.group_rows, *(weight for weight in model.parameters() if weight.ndim == 1)]
    adam = torch.optim.Adam(adam_parameters, betas=(0.9, 0.98))
    model.get_input_embeddings().weight.requires_grad_(False)
    started, average = time.monotonic(), 0.0
    for step, ids in zip(range(settings.steps), batches, strict=False):
        lr_factor = schedule(step, settings.steps)
        sampled, log_rates = candidates.sample()
        rows, (inputs, targets, candidate_columns) = embeddings.rows(ids[:, :-1], ids[:, 1:], sampled)
        states = model.model(inputs_embeds=rows[inputs.clamp_min(0)], use_cache=False).last_hidden_state
        loss = SampledSoftmax.apply(states[targets >= 0], rows, targets[targets >= 0], candidate_columns, log_rates)
        loss.backward()
        muon.step(lr_factor)
        adam.param_groups[0]["lr"] = lr_factor * settings.other_rate
        adam.step()
        adam.zero_grad()
        embeddings.step(lr_factor * settings.other_rate)
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
            vocab_size=VOCAB_SIZE,
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
    """Return the factor of the learning rate: linear warm-up over a twentieth of the steps, then linear decay to 0."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, (steps - step) / (steps - warmup))


class SampledSoftmax(torch.autograd.Function):
    """The mean cross-entropy of N targets over the whole vocabulary, with a normalizer estimated from candidates.

    Each candidate is divided by its inclusion probability, so that the sum is unbiased; the target is always included,
    once, with its own logit. The forward pass also computes the gradient, in the memory of the logits, which are the
    largest tensor of a step.

    Args (of `apply`):
        states: [N, H].
        rows: [R, H], embeddings.
        targets: [N], indices into `rows`.
        columns: [C], the candidates, indices into `rows`.
        log_rates: [C], the logarithms of their inclusion probabilities.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, targets: Tensor, columns: Tensor, log_rates: Tensor) -> Tensor:
        candidates = rows[columns]
        logits = torch.addmm(-log_rates, states, candidates.T)
        target_logits = torch.einsum("nh,nh->n", states, rows[targets])
        target_columns = torch.full((len(rows),), -1).index_put_((columns,), torch.arange(len(columns)))[targets]
        is_candidate = target_columns >= 0
        logits[is_candidate.nonzero()[:, 0], target_columns[is_candidate]] = target_logits[is_candidate]
        normalizer = torch.logaddexp(logits.logsumexp(1), target_logits.masked_fill(is_candidate, -math.inf))
        # The probability of a target that is not a candidate has no column; its gradient is added separately.
        target_probs = torch.exp(target_logits - normalizer).masked_fill_(is_candidate, 0)
        probs = logits.sub_(normalizer[:, None]).exp_()
        target_gradient = (target_probs - 1)[:, None] / len(states)
        probs /= len(states)
        states_gradient = (probs @ candidates).addcmul_(target_gradient, rows[targets])
        rows_gradient = torch.zeros_like(rows).index_add_(0, columns, probs.T @ states)
        ctx.save_for_backward(states_gradient, rows_gradient.index_add_(0, targets, target_gradient * states))
        return (normalizer - target_logits).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states_gradient, rows_gradient = ctx.saved_tensors
        return gradient * states_gradient, gradient * rows_gradient, None, None, None


class CandidateSampler:
    """Samples the candidate tokens of a step, each independently; the most frequent tokens are always included."""

    def __init__(self, counts: NDArray[np.int64], size: int, rng: np.random.Generator) -> None:
        self.rng = rng
        # The square root reduces the variance of the estimate: there are many rare tokens, each of little probability.
        weights = np.sqrt(counts + new_token_probs(counts) * (counts == 1).sum())
        scale = size / weights.sum()
        for _ in range(50):
            scale *= size / np.minimum(1, scale * weights).sum()
        self.rates = np.minimum(1, scale * weights)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return ids [C], and the logarithms of their inclusion probabilities [C]."""
        sampled = np.flatnonzero(self.rng.random(len(self.rates)) < self.rates)
        return torch.from_numpy(sampled), torch.from_numpy(np.log(self.rates[sampled]).astype(np.float32))


def new_token_probs(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the probability of each token id as a new token; merges learned earlier are more frequent in text."""
    weights = np.where(counts <= 1, 1 / (np.arange(len(counts)) + 2000.0), 0)
    return weights / weights.sum()


class DocumentBatches:
    """Iterates over batches of whole documents of similar length, padded with -1; each epoch has another order.

    As in the Good-Turing estimate, a token that occurs only once in the corpora stands for the tokens that do not occur
    in them: each time that it is read, a random new token replaces it. So the model learns where new words occur, and
    keeps the probability for them that held-out text requires.
    """

    def __init__(
        self, documents: list[NDArray[np.int32]], counts: NDArray[np.int64], tokens: int, rng: np.random.Generator
    ) -> None:
        self.documents, self.tokens, self.rng = documents, tokens, rng
        self.occurs_once = counts == 1
        self.new_token_cdf = np.cumsum(new_token_probs(counts)[:NUM_ORDINARY_TOKENS])

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            order = self.rng.permutation(len(self.documents))
            # Sorted within groups: a batch has documents of similar length, and the order differs between epochs.
            groups = [sorted(group, key=lambda at: -len(self.documents[at])) for group in np.array_split(order, 4)]
            batches = [batch for group in groups for batch in self.split(group)]
            for at in self.rng.permutation(len(batches)):
                yield self.pad([self.documents[number] for number in batches[at]])

    def split(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield batches of documents, longest first, each with as many as fit into a step."""
        start = 0
        while start < len(order):
            size = max(1, self.tokens // len(self.documents[order[start]]))
            yield list(order[start : start + size])
            start += size

    def pad(self, documents: list[NDArray[np.int32]]) -> Tensor:
        """Return padded ids [B, T], in which random new tokens replace the tokens that occur once."""
        ids = np.full((len(documents), max(map(len, documents))), -1, np.int64)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = document
        replaced = (ids >= 0) & self.occurs_once[ids]
        ids[replaced] = np.searchsorted(
            self.new_token_cdf, self.rng.random(replaced.sum()) * self.new_token_cdf[-1], side="right"
        )
        return torch.from_numpy(ids)


class Embeddings:
    """Trains the rows of an embedding table that a step uses with Adam; the other rows cost no time.

    Tokens of similar frequency share a group row: what a step learns from the few rare tokens in it applies to the
    whole group, whose rows would take many single steps to reach low probabilities.

    Attributes:
        group_rows: [groups, H], trained by the caller.
    """

    def __init__(self, table: Tensor, counts: NDArray[np.int64]) -> None:
        self.table = table
        self.groups = torch.from_numpy(np.log2(counts + 1).astype(np.int64))
        self.group_rows = torch.zeros(int(self.groups.max()) + 1, table.shape[1], requires_grad=True)
        self.mean, self.square = torch.zeros_like(table), torch.zeros_like(table)
        self.num_steps = torch.zeros(len(table), 1)
        self.ids, self.step_rows = torch.empty(0, dtype=torch.int64), torch.empty(0)

    def rows(self, *ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the embeddings [R, H] of all these ids, and the ids as indices into them; -1 stays -1."""
        flat = torch.cat([tensor.flatten() for tensor in ids])
        self.ids, positions = torch.unique(flat.clamp_min(0), return_inverse=True)
        positions = torch.where(flat < 0, -1, positions).split([tensor.numel() for tensor in ids])
        self.step_rows = self.table[self.ids].requires_grad_()
        rows = self.step_rows + self.group_rows[self.groups[self.ids]]
        return rows, [position.view(tensor.shape) for position, tensor in zip(positions, ids, strict=True)]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the rows of this step with their gradient; Adam's step count is per row."""
        gradient = self.step_rows.grad
        assert gradient is not None
        num_steps = self.num_steps[self.ids] + 1
        mean = self.mean[self.ids].lerp_(gradient, 0.1)
        square = self.square[self.ids].lerp_(gradient * gradient, 0.02)
        self.num_steps[self.ids], self.mean[self.ids], self.square[self.ids] = num_steps, mean, square
        denominator = (square / (1 - 0.98**num_steps)).sqrt_().add_(1e-10)
        self.table[self.ids] = self.step_rows - rate * (mean / (1 - 0.9**num_steps)) / denominator

    @torch.no_grad()
    def finish(self) -> None:
        """Add the group rows to the table."""
        self.table += self.group_rows[self.groups]


class Muon:
    """Optimizer of matrices whose updates have singular values of about 1 (Jordan et al. 2024).

    In float32: on a processor without bfloat16 instructions, `torch.optim.Muon` is fifty times slower.
    """

    def __init__(self, weights: list[Tensor], rate: float, weight_decay: float) -> None:
        self.weights, self.rate, self.weight_decay = weights, rate, weight_decay
        self.momenta = [torch.zeros_like(weight) for weight in weights]

    @torch.no_grad()
    def step(self, lr_factor: float) -> None:
        """Update the weights, with the learning rate times a factor."""
        rate = lr_factor * self.rate
        for weight, momentum in zip(self.weights, self.momenta, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 0.05)
            direction = orthogonal(weight.grad.lerp(momentum, 0.95))
            weight.mul_(1 - rate * self.weight_decay)
            weight.add_(direction, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, by Newton-Schulz iterations."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    found = wide / wide.norm().add(1e-7)
    for _ in range(MUON_ITERATIONS):
        square = found @ found.T
        found = 3.4445 * found + (-4.7750 * square + 2.0315 * square @ square) @ found
    return found.T if matrix.shape[0] > matrix.shape[1] else found


# -------------------------------------------------------------------------------------------------- its distributions


@torch.inference_mode()
def distributions(
    folder: Path, documents: Sequence[TokenSequence], chunk_size: int = 32
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probabilities [n, U] at the trained tokens of documents, `chunk_size` at a time, and those tokens.

    The log-probabilities are valid until the next ones are requested.
    """
    model = BackboneWithHead(load_causal_lm(ModelRef(folder)).eval().requires_grad_(False))
    for document in documents:
        ids, trained = torch.from_numpy(document.ids.astype(np.int64)), torch.from_numpy(document.train_mask)
        states = model(ids[None])[0, :-1][trained[1:]]
        for chunk, observed_ids in zip(states.split(chunk_size), ids[trained].split(chunk_size), strict=True):
            yield torch.log_softmax(chunk @ model.head.weight.T, 1), observed_ids


@dataclass(frozen=True)
class TopLogprobs:
    """The top log-probabilities of N distributions, and summaries of the whole distributions.

    Attributes:
        ids: int32 [N, K], most likely first.
        logprobs: float32 [N, K].
        observed_ids: int32 [N], the observed tokens.
        observed_logprobs: float32 [N].
        entropy: float32 [N], nats, of the whole distribution.
        mass: float32 [N], total probability of the K ids.
        draws: int32 [N, NUM_SAMPLES], independent samples from the whole distribution.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    observed_ids: NDArray[np.int32]
    observed_logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32]
    mass: NDArray[np.float32]
    draws: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)


def heads(folder: Path, documents: Sequence[TokenSequence], count: int = NUM_TOP, seed: int = 0) -> TopLogprobs:
    """Return the top log-probabilities of a model at the trained tokens of documents."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[NDArray[np.generic]]] = []
    for logprobs, observed_ids in distributions(folder, documents):
        probs = logprobs.exp()
        ids, values = top_tokens(logprobs, count)
        columns = [
            ids.int(),
            values,
            observed_ids.int(),
            logprobs.gather(1, observed_ids[:, None])[:, 0],
            -torch.einsum("nv,nv->n", probs, logprobs),
            values.double().exp().sum(1).float(),
            sampled(probs, NUM_SAMPLES, generator).int(),
        ]
        parts.append([part.numpy() for part in columns])
    return TopLogprobs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def top_tokens(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [n, count] of the most likely tokens, from the blocks of largest maximum."""
    blocks = logprobs.unflatten(1, (-1, BLOCK))
    top_blocks = blocks.amax(2).topk(count, sorted=False).indices
    values, positions = blocks.gather(1, top_blocks[:, :, None].expand(-1, -1, BLOCK)).flatten(1).topk(count)
    return top_blocks.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK, values


def sampled(probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return ids [n, count], independent samples from each row: first a block, then a token of it."""
    blocks = probs.unflatten(1, (-1, BLOCK))
    block_sums = blocks.sum(2).double().cumsum(1)
    uniform = torch.rand(len(probs), count, generator=generator, dtype=torch.float64) * block_sums[:, -1:]
    block = torch.searchsorted(block_sums, uniform, right=True).clamp_max(block_sums.shape[1] - 1)
    cumulative = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).double().cumsum(2)
    uniform_within = torch.rand(len(probs), count, 1, generator=generator, dtype=torch.float64) * cumulative[:, :, -1:]
    return block * BLOCK + torch.searchsorted(cumulative, uniform_within, right=True)[:, :, 0].clamp_max(BLOCK - 1)


@dataclass(frozen=True)
class Statistics:
    """Statistics to publish with a byte count: means over positions.

    Attributes:
        entropy: nats.
        cross_entropy: nats, of the observed tokens; near the entropy if a model is calibrated.
        mass_of_64: total probability of the 64 most likely ids.
        ids_of_99: number of the most likely ids that have 0.99 of the mass, at most 64.
        mass_of_99: total probability of those.
        samples_for_12: number of samples from the distribution without the observed token that give, with it, 12
            distinct ids.
    """

    positions: int
    entropy: float
    cross_entropy: float
    mass_of_64: float
    ids_of_99: float
    mass_of_99: float
    samples_for_12: float

    def __str__(self) -> str:
        return (
            f"{self.positions:,} positions, entropy {self.entropy:.3f} nats, cross-entropy {self.cross_entropy:.3f}; "
            f"the 64 most likely hold {self.mass_of_64:.4f}; 0.99 of the mass (64 ids at most) takes "
            f"{self.ids_of_99:.2f} ids and holds {self.mass_of_99:.4f}; {self.samples_for_12:.1f} samples have 12 ids"
        )


def statistics(top: TopLogprobs) -> Statistics:
    """Return the means that describe distributions."""
    sums = np.exp(top.logprobs[:, :64].astype(np.float64)).cumsum(1)
    sizes = np.minimum((sums < 0.99).sum(1) + 1, 64)
    return Statistics(
        len(top),
        float(top.entropy.mean()),
        float(-top.observed_logprobs.mean()),
        float(sums[:, -1].mean()),
        float(sizes.mean()),
        float(sums[np.arange(len(top)), sizes - 1].mean()),
        samples_for(12, top),
    )


def samples_for(ids: float, top: TopLogprobs) -> float:
    """Return the number of samples that give, with the observed token, `ids` distinct ids on average.

    The samples are from the distribution without the observed token.
    """
    low, high = 0.0, 4096.0
    while high - low > 0.01:
        num_samples = (low + high) / 2
        low, high = (num_samples, high) if expected_distinct_ids(num_samples, top) < ids else (low, num_samples)
    return low


def expected_distinct_ids(num_samples: float, top: TopLogprobs) -> float:
    """Return the expected number of distinct ids: the observed one, and those among samples from the remainder."""
    remainder = np.maximum(-np.expm1(top.observed_logprobs.astype(np.float64)), 1e-12)[:, None]
    others = top.ids != top.observed_ids[:, None]
    probs = np.minimum(np.exp(top.logprobs) * others / remainder, 1 - 1e-12)
    distinct = -np.expm1(num_samples * np.log1p(-probs)).sum(1)
    # A token outside of the stored ones is hardly ever sampled twice.
    return float(1 + (distinct + num_samples * np.maximum(0, 1 - probs.sum(1))).mean())


def held_out_statistics(corpus: str, positions: int, settings: Settings = LONG) -> Statistics:
    """Return the statistics of the model on held-out text of "gsm8k" or "wikitext"."""
    return statistics(heads(language_model(settings), held_out(corpus, positions)))


def write_distributions(folder: Path, prefix: str, documents: Sequence[TokenSequence], top: TopLogprobs) -> None:
    """Write documents, and the top log-probabilities at their trained tokens, as two files of arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / f"{prefix}documents.npz",
        ids=np.concatenate([document.ids for document in documents]),
        offsets=np.cumsum([0, *map(len, documents)]),
        trained=np.concatenate([document.train_mask for document in documents]),
    )
    np.savez(folder / f"{prefix}top.npz", **{field.name: getattr(top, field.name) for field in dataclasses.fields(top)})


def main() -> None:
    """Train, measure and print; write the distributions if a folder is given."""
    silence_transformers()
    settings = PRESETS[sys.argv[1] if len(sys.argv) > 1 else "long"]
    folder = language_model(settings)
    sys.stdout.write(f"{folder}\n")
    for corpus, positions, prefix in (("gsm8k", 30000, ""), ("wikitext", 5000, "wikitext-")):
        documents = held_out(corpus, positions)
        top = heads(folder, documents)
        sys.stdout.write(f"{corpus}: {statistics(top)}\n")
        if len(sys.argv) > 2:
            write_distributions(Path(sys.argv[2]), prefix, documents, top)


if __name__ == "__main__":
    main()
