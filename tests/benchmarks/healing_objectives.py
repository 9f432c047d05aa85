"""Quality of a transplanted model after healing with each objective, relative to its original, over three seeds.

    python tests/benchmarks/healing_objectives.py FOLDER [--tokenizers gpt2 qwen] [--seeds 3] [--steps 40] [--lines ...]

SmolLM2-135M-Instruct gets the tokenizer of GPT-2 (up to three digits per token) or Qwen (one, like its own tokenizer),
and learns from its original's cache: two documents of GSM8K and WikiText-2 per step, learning rate 1e-4. It is
evaluated on held-out documents of both kinds, and of two kinds that it was not trained on, Python's documentation and
code (HumanEval): bits per byte, and the divergence of its next-byte distributions from the original's (`evaluate` of a
cache of the original's 128 most likely tokens).

`--long`: instead one run per tokenizer with the default objective, 0.5 million tokens of GSM8K, WikiText-2,
documentation and Python functions. Results are stored in FOLDER/healing.jsonl; a second run continues, also within
the long run. Not part of `nox -s bench`, because it needs a pretrained model.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_objectives import RECOMMENDED, differences, documents, file_name_part, run, write_texts
from installed_smollm2 import find_smollm2
from measurement import gsm8k, real_data, report

from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import resolve_model_folder

LINES = (RECOMMENDED, "ce", "ce+p-kl:weight=2", "alm", "gold", "p-kl")
KINDS = ("maths", "Wikipedia", "documentation", "code")
HELD_OUT = 10  # documents of each kind
TRAINING = "--per-device-train-batch-size 2 --learning-rate 1e-4 --warmup-ratio 0.1"
LONG_STEPS = 1500  # steps of two documents: 0.5 million tokens


def articles(name: str) -> list[str]:
    lines = (real_data() / "corpora" / f"wikitext2-{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if 400 < len(line) < 1200]


def human_eval() -> list[str]:
    with gzip.open(real_data() / "corpora" / "HumanEval.jsonl.gz", "rt") as file:
        return [row["prompt"] + row["canonical_solution"] for row in map(json.loads, file)]


def alternating(*kinds: list[str]) -> list[str]:
    """Return the documents of several kinds in turns, until one kind is exhausted."""
    return [text for group in zip(*kinds, strict=False) for text in group]


def prepare(folder: Path, original: Path, texts: list[str]) -> None:
    """Write data, and score it with the original, unless that was done before."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = (gsm8k(part="test"), articles("test"), documents("docs")[1], human_eval())
    for name, group_texts in [
        ("train", texts),
        *((kind, group_texts[:HELD_OUT]) for kind, group_texts in zip(KINDS, held_out, strict=True)),
    ]:
        if not (folder / f"{name}.jsonl").is_file():
            write_texts(folder / f"{name}.jsonl", group_texts)
    run("cache-teacher", original, folder / "train.jsonl", "-o", folder / "cache")
    for kind in KINDS:
        options = ("--support", "top-k", "--top-k", 128, "--precision", "fine")
        run("cache-teacher", original, folder / f"{kind}.jsonl", *options, "-o", folder / f"cache-{kind}")


def measure(model: Path, folder: Path) -> dict[str, float]:
    """Return bits per byte of each kind of held-out text and of its digits, and the divergence from the original."""
    figures = {}
    for kind in KINDS:
        result = json.loads(run("evaluate", model, folder / f"cache-{kind}", "--by-category", "--json"))
        figures[kind] = result["bits_per_byte"]
        figures[f"{kind}, divergence"] = result.get("byte-kl", 0.0)
        if "digits" in result["categories"]:
            figures[f"{kind}, digits"] = result["categories"]["digits"]["bits_per_byte"]
    return figures


class HealingResults:
    """Figures of models in a file of JSON lines, measured once.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[tuple[str, str, int], dict[str, float]] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            row = json.loads(line)
            self.figures[row["tokenizer"], row["line"], row["seed"]] = row["figures"]

    def add(self, tokenizer: str, line: str, seed: int, model: Path, folder: Path) -> None:
        """Measure a model and store its figures."""
        figures = self.figures[tokenizer, line, seed] = measure(model, folder)
        with self._path.open("a") as file:
            file.write(json.dumps({"tokenizer": tokenizer, "line": line, "seed": seed, "figures": figures}) + "\n")


def heal(folder: Path, tokenizer: str, line: str, seed: int, steps: int) -> Path:
    """Train a transplanted model; return its folder."""
    loss_options = [word for name in line.split("+") for word in ("--loss", name)]
    output = folder / "runs" / f"{tokenizer}-{file_name_part(line)}-{steps}-{seed}"
    checkpoint_options = ["--save-steps", 100 if steps == LONG_STEPS else 0, "--save-total-limit", 1]
    options = [*TRAINING.split(), "--max-steps", steps, "--seed", seed, *checkpoint_options]
    run("distill", folder / tokenizer, folder / "cache", *loss_options, *options, "-o", output)
    return output


def table(tokenizer: str, results: HealingResults, lines: Sequence[str], seeds: int) -> None:
    """Print the means of all losses for a tokenizer, and their paired differences from the default."""

    def values(line: str, column: str) -> list[float]:
        rows = (results.figures.get((tokenizer, line, seed), {}) for seed in range(seeds))
        return [row[column] for row in rows if column in row]

    columns = [f"{kind}{suffix}" for suffix in ("", ", divergence") for kind in KINDS] + ["maths, digits"]
    rows = []
    for line in ("original", "not healed", *lines):
        cells = []
        for column in columns:
            figures, default = values(line, column), values(RECOMMENDED, column)
            text = f"{statistics.mean(figures):.3f}" if figures else ""
            if line in lines and line != RECOMMENDED and len(figures) == len(default) > 1:
                text += f" ({differences(figures, default)})"
            cells.append(text)
        rows.append((line, *cells))
    sys.stdout.write(f"\n**{tokenizer}**\n\n")
    report(__file__, rows, ("", *columns))


def main() -> None:
    """Heal and measure, seed by seed, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizers", nargs="*", default=["gpt2", "qwen"])
    parser.add_argument("--lines", nargs="*", default=LINES, help="losses of a run, joined by +")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of two documents")
    parser.add_argument("--long", action="store_true", help="one run of 0.5 million tokens per tokenizer")
    args = parser.parse_args()
    silence_transformers()
    original = resolve_model_folder(str(find_smollm2()), with_weights=True)
    maths, wiki = gsm8k(LONG_STEPS), articles("valid")
    folder, texts = args.folder, alternating(maths, wiki)[: 6 * args.steps]  # seeds train on different documents
    if args.long:
        folder, args.lines, args.seeds, args.steps = folder / "long", [RECOMMENDED], 1, LONG_STEPS
        kinds = (maths, itertools.cycle(wiki), documents("docs")[0], documents("code")[0])
        texts = alternating(*kinds)[: 2 * LONG_STEPS]
    prepare(folder, original, texts)
    results = HealingResults(folder / "healing.jsonl")
    for tokenizer in args.tokenizers:
        if not (folder / tokenizer).is_dir():
            target = real_data() / "tokenizers" / tokenizer
            run("transplant", original, target, "--method", "subword", "-o", folder / tokenizer)
        for line, model in (("original", original), ("not healed", folder / tokenizer)):
            if (tokenizer, line, 0) not in results.figures:
                results.add(tokenizer, line, 0, model, folder)
    for seed, tokenizer, line in itertools.product(range(args.seeds), args.tokenizers, args.lines):
        if (tokenizer, line, seed) not in results.figures:
            results.add(tokenizer, line, seed, heal(folder, tokenizer, line, seed, args.steps), folder)
    for tokenizer in args.tokenizers:
        table(tokenizer, results, args.lines, args.seeds)


if __name__ == "__main__":
    main()
