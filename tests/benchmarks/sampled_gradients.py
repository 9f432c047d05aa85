"""Error of gradients and values from sampled tokens, with and without their log-probabilities, by distance.

    python tests/benchmarks/sampled_gradients.py MODEL FOLDER

The teacher is MODEL, a folder of a pretrained causal language model; the student is the same model after a few steps on
Python code, and its logits moved toward the teacher's. FOLDER keeps the log-probabilities of both at positions of
held-out code, `[positions, vocabulary]`, for a second run. Caches have the default precision. The gradient is that of
the logits; its error is the root mean square over sample sets and positions, divided by that of the exact gradient.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measurement import report
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk
from xtk.cache.codec.packed_shard_codec import PackedCodec
from xtk.cache.teacher_logprobs import TeacherLogprobs
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.losses.head import fused_loss
from xtk.losses.interface import ComparisonSpace, LossInputs
from xtk.losses.spec import parse_losses
from xtk.losses.term import LossTerm
from xtk.models.output_head import OutputHead
from xtk.projection.disk_cache import cached_next_bytes
from xtk.projection.projection import SparseProjection
from xtk.teachers.logprobs_to_cache_arrays import LogprobArrays, arrays_to_stored
from xtk.teachers.transformers import systematic_sample
from xtk.text.token_sequence import TokenSequence
from xtk.text.tokenizer import Tokenizer

NUM_POSITIONS, NUM_SETS, STEPS, LEARNING_RATE = 40, 8, 4, 3e-4
CONTEXT, FIRST_POSITION, STRIDE = 128, 32, 4
HELD_OUT = slice(7, None, 50)  # of the package's files
SUPPORTS = ((16, 16), (4, 4), (0, 16))  # most likely tokens, samples
DISTANCES = (1.0, 0.4, 0.17, 0.0)  # part of the way from the teacher's logits to the student's
LOSSES = ("forward-kl", "byte-kl", "reverse-kl", "jsd", "skew-forward-kl", "skew-reverse-kl", "tvd")


def texts() -> list[str]:
    """Return the files of the package."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(xtk.__file__).parent.rglob("*.py"))]


def log_probs(model: torch.nn.Module, windows: list[Tensor]) -> Tensor:
    """Return [P, V], float32."""
    with torch.no_grad():
        rows = [model(ids).logits[0, FIRST_POSITION::STRIDE] for ids in windows]
    return torch.log_softmax(torch.cat(rows).float(), 1)


def prepare(model_folder: str, folder: Path) -> None:
    """Write teacher.npy and student.npy, [P, V], and observed.npy, [P]."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def window(text: str) -> Tensor:
        ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :CONTEXT]
        return ids

    held_out = [window(text[2000:4000]) for text in texts()[HELD_OUT] if len(text) > 4000][:5]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "teacher.npy", log_probs(model, held_out).numpy())
    observed = [torch.cat([ids[0], ids[0, -1:]])[FIRST_POSITION + 1 :: STRIDE] for ids in held_out]
    np.save(folder / "observed.npy", torch.cat(observed).numpy())
    training = [text for number, text in enumerate(texts()) if number % 50 != 7 and len(text) > 3000]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        ids = window(training[step * 37 % len(training)][1000:1700])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    np.save(folder / "student.npy", log_probs(model, held_out).numpy())


def cached(logprobs: Tensor, observed: np.ndarray, top_k: int, num_samples: int) -> list[TeacherLogprobs]:
    """Return the log-probabilities of each sample set, as a cache returns them; last those without samples."""
    values, ids = logprobs.topk(max(top_k, 1), 1)
    tail = logprobs.exp().scatter(1, torch.cat([ids[:, :top_k], torch.from_numpy(observed)[:, None]], 1), 0.0)
    uniforms = torch.from_numpy(np.random.default_rng(0).random((len(logprobs), NUM_SETS)))
    sampled, mass = systematic_sample(tail, uniforms, num_samples)
    own = logprobs.gather(1, sampled.clamp_min(0).flatten(1)).view(sampled.shape)
    arrays = LogprobArrays(
        ids[:, :top_k].int().numpy(),
        values[:, :top_k].numpy(),
        logprobs[torch.arange(len(observed)), torch.from_numpy(observed)].numpy(),
        -(logprobs.exp() * logprobs).sum(1).numpy(),
        sampled.int().numpy(),
        mass.float().numpy(),
        own.numpy(),
    )
    tokens = np.append(0, observed).astype(np.int32)
    ends = np.arange(len(tokens), dtype=np.int32)
    sequence = TokenSequence(tokens, ends, ends > 0, np.zeros((0, 3), np.int32), np.zeros(0, np.int32))
    order = VocabularyOrder.from_counts(np.zeros(logprobs.shape[1], np.int64), np.ones(logprobs.shape[1], np.int32))
    options = {
        "precision": "standard", "num_sample_sets": NUM_SETS, "num_samples": num_samples, "sample_logprobs": True,
    }  # fmt: skip
    rows = [(sequence, arrays_to_stored([sequence], arrays)[0])]
    tables, _, (packed,) = PackedCodec.pack(rows, options, order)
    codec = PackedCodec(options, tables, order)
    return [
        codec.unpack_teacher_logprobs(memoryview(packed), tokens, rows[0][1].positions, number)
        for number in (*range(NUM_SETS), None)
    ]


def gradient_and_values(term: LossTerm, teacher: TeacherLogprobs, observed: np.ndarray, student: Tensor) -> Tensor:
    """Return the gradient of each position's logits and its value, [P, V + 1]."""
    count = len(observed)
    positions, tokens = np.arange(1, count + 1, dtype=np.int32), np.append(0, observed).astype(np.int32)
    spans = np.column_stack([positions, positions + 1] * 2)
    cells = term.build_cells(LossInputs(tokens, np.arange(count, dtype=np.int64), spans, tokens, teacher))
    logits = student.clone().requires_grad_()
    values = []
    for at in range(count):
        total, _ = fused_loss(
            logits[at : at + 1], OutputHead(None), [cells.select_rows(at, at + 1, at).to(logits.device, 1.0)]
        )
        total.backward()
        values.append(total.detach())
    assert logits.grad is not None
    return torch.cat([logits.grad, torch.stack(values)[:, None]], 1)


def exact(term: LossTerm, teacher: Tensor, student: Tensor) -> Tensor:
    """Return the same from all probabilities."""
    logits = student.clone().requires_grad_()
    student_logprobs = torch.log_softmax(logits, 1)
    values = term.divergence.cell_values(teacher.exp(), student_logprobs).sum(1)
    values.sum().backward()
    assert logits.grad is not None
    return torch.cat([logits.grad, values.detach()[:, None]], 1)


def many_samples(logprobs: Tensor, of_cache: TeacherLogprobs) -> TeacherLogprobs:
    """Return the limit of a cache's log-probabilities for infinitely many samples: the same exact tokens, then all."""
    count, vocab_size = logprobs.shape
    assert of_cache.exact_counts is not None
    exact = [of_cache.ids[start:][:size] for start, size in zip(of_cache.offsets, of_cache.exact_counts, strict=False)]
    ids = np.stack([np.append(own, np.setdiff1d(np.arange(vocab_size, dtype=np.int32), own)) for own in exact])
    return replace(
        of_cache,
        offsets=np.arange(count + 1, dtype=np.int64) * vocab_size,
        ids=ids.ravel(),
        logprobs=logprobs.gather(1, torch.from_numpy(ids).long()).flatten().numpy(),
        token_logprobs=None,
    )


def errors(found: list[Tensor], expected: Tensor, scale: float) -> tuple[float, float, float]:
    """Return the relative error of the gradient, and root mean square and mean of the error of a position's value."""
    differences = torch.stack(found) - expected
    gradient = float(differences[..., :-1].square().sum(-1).mean().sqrt()) / scale
    return gradient, float(differences[..., -1].square().mean().sqrt()), float(differences[..., -1].mean())


def measure(model: str, folder: Path, losses: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the report."""
    names = ("teacher", "student", "observed")
    teacher, student, observed = (np.load(folder / f"{name}.npy")[::3][:NUM_POSITIONS] for name in names)
    teacher, student = torch.from_numpy(teacher), torch.from_numpy(student)
    for top_k, num_samples in SUPPORTS:
        *sets, without = cached(teacher, observed, top_k, num_samples)
        for distance in DISTANCES:
            logits = torch.log_softmax(teacher + distance * (student - teacher), 1)
            kl = float((teacher.exp() * (teacher - logits)).sum(1).mean())
            for name in losses:
                (spec,) = parse_losses([name])
                space: ComparisonSpace = SparseProjection.identity(teacher.shape[1]).columns
                if name == "byte-kl":
                    space = cached_next_bytes(*[Tokenizer(Path(model))] * 2)
                term = LossTerm(spec.make_loss(), spec.make_divergence(), space, has_sample_logprobs=True)
                expected = (
                    gradient_and_values(term, many_samples(teacher, sets[0]), observed, logits)
                    if name == "byte-kl"  # whose alternatives are the exact tokens
                    else exact(term, teacher, logits)
                )
                scale = float(expected[:, :-1].square().sum(1).mean().sqrt()) if distance else 1.0
                today = sets if term.divergence.is_linear_in_teacher else [without]
                before, after = (
                    errors([gradient_and_values(term, one, observed, logits) for one in some], expected, scale)
                    for some in ([replace(one, token_logprobs=None) for one in today], sets)
                )
                yield (
                    f"{top_k} + {num_samples}, KL {kl:.4f}, {name}",
                    f"gradient {before[0]:.3f} -> {after[0]:.3f} ({before[0] / max(after[0], 1e-9):.1f} times less); "
                    f"value {before[1]:.2g} (mean {before[2]:+.1g}) -> {after[1]:.2g} (mean {after[2]:+.1g})",
                    "2.5 times within 0.05, 5 within 0.01" if name == "forward-kl" else "",
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES))
    options = parser.parse_args()
    if not (options.folder / "student.npy").exists():
        prepare(options.model, options.folder)
    rows = []
    for row in measure(options.model, options.folder, options.losses):
        sys.stderr.write(" | ".join(row) + "\n")
        rows.append(row)
    report(__file__, rows)


if __name__ == "__main__":
    main()
