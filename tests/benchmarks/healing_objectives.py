"""What a transplanted model keeps of its original with each objective of healing, three seeds, and over steps.

    python tests/benchmarks/healing_objectives.py FOLDER [--tokenizers gpt2 qwen] [--seeds 3] [--steps 40] [--lines ...]

SmolLM2-135M-Instruct gets the tokenizer of GPT-2 (up to three digits per token) or Qwen (one, like its own), and learns
from its original's cache: two documents of GSM8K and WikiText-2 per step, learning rate 1e-4. It is judged on held-out
documents of both kinds, and of two that it was not trained on, Python's documentation and code (HumanEval): bits per
byte, and the divergence of its distributions of the next byte from those of the original (`evaluate` of a cache of its
128 most likely tokens).

`--long`: instead one run per tokenizer with the default objective, 0.5 million tokens of GSM8K, WikiText-2,
documentation and Python functions. Results are kept in FOLDER/healing.jsonl; a second run continues, also within
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

from bench_objectives import RECOMMENDED, differences, documents, letters, run, write_texts
from measurement import gsm8k, real_data, report

from xtk.artifacts.model_resolver import resolve_model_folder
from xtk.models.causal_lm import silence_transformers
from xtk.quickstart.demo_pipeline import find_pretrained_teacher

LINES = (RECOMMENDED, "ce", "ce+p-kl:weight=2", "alm", "gold", "p-kl")
KINDS = ("maths", "Wikipedia", "documentation", "code")
HELD_OUT = 10  # documents of each kind
TRAINING = "--per-device-train-batch-size 2 --learning-rate 1e-4 --warmup-ratio 0.1"
LONG_STEPS = 1500  # of two documents: 0.5 million tokens


def articles(name: str) -> list[str]:
    lines = (real_data() / "corpora" / f"wikitext2-{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if 400 < len(line) < 1200]


def human_eval() -> list[str]:
    with gzip.open(real_data() / "corpora" / "HumanEval.jsonl.gz", "rt") as file:
        return [row["prompt"] + row["canonical_solution"] for row in map(json.loads, file)]


def alternating(*kinds: list[str]) -> list[str]:
    """Return the documents of some kinds in turns, until one kind has no more."""
    return [text for some in zip(*kinds, strict=False) for text in some]


def prepare(folder: Path, original: Path, texts: list[str]) -> None:
    """Write data, and score it with the original, where that was not done."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = (gsm8k(part="test"), articles("test"), documents("docs")[1], human_eval())
    for name, some in [
        ("train", texts),
        *((kind, some[:HELD_OUT]) for kind, some in zip(KINDS, held_out, strict=True)),
    ]:
        if not (folder / f"{name}.jsonl").is_file():
            write_texts(folder / f"{name}.jsonl", some)
    run("cache-teacher", original, folder / "train.jsonl", "-o", folder / "cache")
    for kind in KINDS:
        options = ("--support", "top-k", "--top-k", 128, "--precision", "fine")
        run("cache-teacher", original, folder / f"{kind}.jsonl", *options, "-o", folder / f"cache-{kind}")


def measure(model: Path, folder: Path) -> dict[str, float]:
    """Return bits per byte of each kind of held-out text, of its digits, and the divergence from the original."""
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
        """Measure a model."""
        figures = self.figures[tokenizer, line, seed] = measure(model, folder)
        with self._path.open("a") as file:
            file.write(json.dumps({"tokenizer": tokenizer, "line": line, "seed": seed, "figures": figures}) + "\n")


def heal(folder: Path, tokenizer: str, line: str, seed: int, steps: int) -> Path:
    """Train a transplanted model; return its folder."""
    words = [word for name in line.split("+") for word in ("--loss", name)]
    output = folder / "runs" / f"{tokenizer}-{letters(line)}-{steps}-{seed}"
    saving = ["--save-steps", 100 if steps == LONG_STEPS else 0, "--save-total-limit", 1]
    options = [*TRAINING.split(), "--max-steps", steps, "--seed", seed, *saving]
    run("distill", folder / tokenizer, folder / "cache", *words, *options, "-o", output)
    return output


def table(tokenizer: str, results: HealingResults, lines: Sequence[str], seeds: int) -> None:
    """Print the means of all lines of a tokenizer, and their paired differences from the default."""

    def values(line: str, column: str) -> list[float]:
        rows = (results.figures.get((tokenizer, line, seed), {}) for seed in range(seeds))
        return [row[column] for row in rows if column in row]

    columns = [f"{kind}{what}" for what in ("", ", divergence") for kind in KINDS] + ["maths, digits"]
    rows = []
    for line in ("original", "not healed", *lines):
        cells = []
        for column in columns:
            own, default = values(line, column), values(RECOMMENDED, column)
            text = f"{statistics.mean(own):.3f}" if own else ""
            if line in lines and line != RECOMMENDED and len(own) == len(default) > 1:
                text += f" ({differences(own, default)})"
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
    given = parser.parse_args()
    silence_transformers()
    original = resolve_model_folder(str(find_pretrained_teacher()), with_weights=True)
    maths, wiki = gsm8k(LONG_STEPS), articles("valid")
    folder, texts = given.folder, alternating(maths, wiki)[: 6 * given.steps]  # seeds see other documents
    if given.long:
        folder, given.lines, given.seeds, given.steps = folder / "long", [RECOMMENDED], 1, LONG_STEPS
        kinds = (maths, itertools.cycle(wiki), documents("docs")[0], documents("code")[0])
        texts = alternating(*kinds)[: 2 * LONG_STEPS]
    prepare(folder, original, texts)
    results = HealingResults(folder / "healing.jsonl")
    for tokenizer in given.tokenizers:
        if not (folder / tokenizer).is_dir():
            target = real_data() / "tokenizers" / tokenizer
            run("transplant", original, target, "--method", "subword", "-o", folder / tokenizer)
        for line, model in (("original", original), ("not healed", folder / tokenizer)):
            if (tokenizer, line, 0) not in results.figures:
                results.add(tokenizer, line, 0, model, folder)
    for seed, tokenizer, line in itertools.product(range(given.seeds), given.tokenizers, given.lines):
        if (tokenizer, line, seed) not in results.figures:
            results.add(tokenizer, line, seed, heal(folder, tokenizer, line, seed, given.steps), folder)
    for tokenizer in given.tokenizers:
        table(tokenizer, results, given.lines, given.seeds)


if __name__ == "__main__":
    main()
