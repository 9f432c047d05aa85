"""The gradient of each objective, compared with that of cross-entropy on the teacher's sampled continuations.

    python tests/benchmarks/objective_gradients.py FOLDER [--setting quickstart] [--documents 60] [--cuts 8]

FOLDER is that of `bench_objectives.py`, after its losses `ce`. The reference is the gradient of cross-entropy on
continuations that the teacher samples after prefixes of held-out documents: an unbiased estimate of the gradient of the
divergence of the two models' texts, for any tokenizers, without a cache. An objective gets the same documents through
the default cache (16 most likely ids, 16 samples), and through a cache of all probabilities. The weights are those of
the student trained with `ce`. Two halves of the continuations bound the cosine that can be measured.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_objectives import SETTINGS, prepare, run
from measurement import report
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtk

OBJECTIVES = ("ce", "byte-kl", "bpm", "escd", "boundary-kl", "p-kl", "gold", "h-kl", "alm", "simct",
              "strict:divergence=forward-kl")  # fmt: skip
COMPLETION_TOKENS, BATCH = 24, 4


def continuations(folder: Path, teacher: Path, documents: int, cuts: int) -> list[tuple[str, str]]:
    """Return prefixes of documents that end before a space, and their continuations, sampled from the teacher."""
    texts = [json.loads(line)["text"] for line in (folder / "test.jsonl").read_text().splitlines()[:documents]]
    rng, rows = random.Random(0), []
    for text in texts:
        spaces = [at for at, character in enumerate(text) if character == " " and at > 20]
        rows += [{"prompt": text[:at]} for at in sorted(rng.sample(spaces, min(cuts, len(spaces))))]
    data, output = folder / "prefixes.jsonl", folder / "continuations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("rollout", teacher, data, "--temperature", 1, "--max-completion-length", COMPLETION_TOKENS, "--seed", 0,
        "--force", "-o", output)  # fmt: skip
    completions = [json.loads(line) for line in output.read_text().splitlines()]
    return [(row["prompt"], row["completion"]) for row in completions if row["completion"].strip()]


def reference_gradient(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """Return the gradient of cross-entropy on completions, per byte."""
    model.zero_grad()
    num_bytes = sum(len(completion.encode()) for _, completion in pairs)
    for prompt, completion in pairs:
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + completion)["input_ids"]])
        if ids.shape[1] > start:
            logits = model(ids).logits[0, start - 1 : -1]
            (torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum") / num_bytes).backward()
    return flat_gradient(model)


def objective_gradient(model: Any, tokenizer: Any, cache: Any, name: str, projection: Path) -> torch.Tensor:
    """Return the gradient of an objective over all documents of a cache."""
    loss = xtk.DistillationLoss(name)
    collator = xtk.DistillationCollator(tokenizer, cache, loss, projection=str(projection))
    batches = [collator([cache[number] for number in numbers]) for numbers in chunks(len(cache))]
    num_items = loss.num_items(batches)
    model.zero_grad()
    for batch in batches:
        hidden_states = model.model(**batch.model_inputs).last_hidden_state
        loss(hidden_states, model.lm_head, batch, num_items_in_batch=num_items).backward()
    return flat_gradient(model)


def chunks(size: int) -> Iterator[range]:
    for start in range(0, size, BATCH):
        yield range(start, min(start + BATCH, size))


def flat_gradient(model: Any) -> torch.Tensor:
    return torch.cat(
        [parameter.grad.flatten().double() for parameter in model.parameters() if parameter.grad is not None]
    )


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--setting", default="quickstart", choices=list(SETTINGS))
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--cuts", type=int, default=8)
    args = parser.parse_args()
    setting, folder = SETTINGS[args.setting], args.folder / args.setting
    teacher = prepare(folder, setting, 1)
    student = folder / "runs" / "ce-0"
    data = folder / "some.jsonl"
    data.write_text("\n".join((folder / "test.jsonl").read_text().splitlines()[: args.documents]) + "\n")
    cache_paths = {"default": folder / "some-default", "all": folder / "some-all"}
    run("cache-teacher", teacher, data, "-o", cache_paths["default"])
    run("cache-teacher", teacher, data, "--support", "top-k", "--top-k", "all", "--precision", "float32", "-o",
        cache_paths["all"])  # fmt: skip
    projection = folder / "projection"
    if not projection.exists():
        run("build-projection", student, teacher, "-o", projection)
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(student)
    pairs = continuations(folder, teacher, args.documents, args.cuts)
    halves = [reference_gradient(model, tokenizer, pairs[first::2]) for first in (0, 1)]
    reference = (halves[0] + halves[1]) / 2
    agreement = cosine(*halves)
    ceiling = (2 * agreement / (1 + agreement)) ** 0.5  # cosine of the mean of both halves with the exact gradient
    rows = []
    caches = {name: xtk.TeacherCache(path) for name, path in cache_paths.items()}
    scale = 0.0
    for name in OBJECTIVES:
        dense = objective_gradient(model, tokenizer, caches["all"], name, projection)
        sparse = objective_gradient(model, tokenizer, caches["default"], name, projection)
        scale = scale or float(dense.norm())
        spec = f"{name},where=common" if ":" in name else f"{name}:where=common"
        shared_boundaries = (
            objective_gradient(model, tokenizer, caches["all"], spec, projection) if name != "ce" else dense
        )
        rows.append(
            (
                name,
                f"{cosine(dense, reference) / ceiling:.3f}",
                f"{cosine(shared_boundaries, reference) / ceiling:.3f}" if name != "ce" else "",
                f"{cosine(sparse, dense):.3f}",
                f"{float(dense.norm()) / scale:.2f}",
            )
        )
    columns = (
        "objective",
        "cosine with the continuations'",
        "at common boundaries only",
        "sparse cache, with all probabilities",
        "norm, of ce's",
    )
    report(__file__, rows, columns)
    print(f"\n{len(pairs)} continuations; cosine of their halves {agreement:.3f}, divided out: {ceiling:.3f}")


if __name__ == "__main__":
    main()
