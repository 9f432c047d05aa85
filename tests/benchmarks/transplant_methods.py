"""Print bits per byte before healing, by method of `xtk transplant`, for the tokenizers of GPT-2 and Qwen.

    python tests/benchmarks/transplant_methods.py MODEL [--methods fvt subword ...] [--tokenizers gpt2 qwen]

MODEL is a folder or a GGUF file; XTK_DATA contains `tokenizers/NAME` and `corpora`. The documents are the first 20
problems of GSM8K's test file, as `question\\nanswer`, and the first 10 kB of WikiText-2's test file. Not part of
`nox -s bench`, because it needs a pretrained model.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from xtk import terminal
from xtk.data.corpus_reader import Corpus
from xtk.evaluation.bits_per_byte import evaluate_bits_per_byte
from xtk.models.backbone_with_head import BackboneWithHead
from xtk.models.causal_lm import load_causal_lm
from xtk.models.resolver import ModelRef, resolve_model_folder
from xtk.text.tokenizer import Tokenizer
from xtk.transplant.model_transplant import TransplantConfig, transplant_model

DATA = Path(os.environ["XTK_DATA"])
METHODS = ("fvt", "subword", "projection", "mean", "random")


def corpora(folder: Path, problems: int, wiki_bytes: int) -> dict[str, Corpus]:
    lines = (DATA / "corpora" / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:problems]
    texts = [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]
    gsm8k = folder / "gsm8k.jsonl"
    gsm8k.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    wiki = folder / "wiki.txt"
    wiki.write_text((DATA / "corpora" / "wikitext2-test.txt").read_text(encoding="utf-8")[:wiki_bytes])
    return {"GSM8K": Corpus([str(gsm8k)]), "WikiText-2": Corpus([str(wiki)])}


def row(label: str, folder: Path, data: dict[str, Corpus], seconds: float) -> None:
    model = BackboneWithHead(load_causal_lm(ModelRef(folder)))
    cells = []
    for corpus in data.values():
        result = evaluate_bits_per_byte(model, Tokenizer(folder), corpus, by_category=True)
        cells += [f"{result.bits_per_byte:.3f}", f"{result.per_category['digits'].value:.2f}"]
    print(f"| {label} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--tokenizers", nargs="+", default=("gpt2", "qwen"))
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--wiki-bytes", type=int, default=10_000)
    args = parser.parse_args()
    terminal.set_quiet(True)
    base = resolve_model_folder(args.model, with_weights=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = corpora(folder, args.problems, args.wiki_bytes)
        headings = [f"{corpus}{suffix}" for corpus in data for suffix in ("", ", digits")]
        print(f"| tokenizer, method | {' | '.join(headings)} | seconds |\n| --- |{' --- |' * (len(headings) + 1)}")
        row("original", base, data, 0)
        for tokenizer in args.tokenizers:
            for method in args.methods:
                target = Tokenizer(DATA / "tokenizers" / tokenizer)
                started = time.monotonic()
                transplant_model(
                    TransplantConfig(base, None, Tokenizer(base), target, method), folder / "new", force=True
                )
                row(f"{tokenizer}, {method}", folder / "new", data, time.monotonic() - started)
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()
