"""The packed codec on a real teacher's scores: bytes a position by support and precision, divergence, speed.

    python tests/benchmarks/bench_codec.py [alternatives|whole] [--model MODEL]

The teacher is the one of `calibrated_teacher.py`, trained once on this machine, or MODEL, a folder or a GGUF file.
Documents are held-out GSM8K and WikiText-2 (of MODEL also HumanEval), ranks are of those documents, and a
shard holds them all. Speed: from the bytes of rows to a student's arrays, one thread, best of some rounds, compiled
before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from calibrated_teacher import held_out, language_model
from codec_alternatives import alternatives
from measurement import gsm8k, machine, report

from xtk.artifacts.codec.packed_shard_codec import PackedCodec
from xtk.artifacts.model_resolver import resolve_model_folder
from xtk.artifacts.shard_codec_registry import to_teacher_logprobs
from xtk.artifacts.token_ids_by_frequency import VocabularyOrder
from xtk.models.causal_lm import silence_transformers
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.tokens.teacher_logprobs import StoredLogprobs, Support, kl_on_stored_ids
from xtk.tokens.token_sequence import TokenSequence as TokenSequence
from xtk.tokens.tokenizer import Tokenizer

Rows = list[tuple[TokenSequence, StoredLogprobs]]

CORPORA = {"gsm8k": 4000, "wikitext": 8000}
MODEL_CORPORA = CORPORA | {"humaneval": 4000}
DRAWS = {
    "gsm8k": 26,
    "wikitext": 14,
    "humaneval": 26,
}  # that make 12 distinct ids on average, the token that stands there among them
SUPPORTS = {
    "top-p 0.99, 64 at most": (Support("top-p", top_k=64, top_p=0.99), ("fine", "standard", "coarse"), "40"),
    "top-k 64": (Support("top-k", top_k=64), ("fine", "standard", "coarse"), "130"),
    "sample, 12 ids": (Support("sample", num_sample_sets=1), ("standard",), "24"),
    "top-k 16 and 12 draws": (Support("top-k+sample", top_k=16, num_samples=12, num_sample_sets=1), ("standard",), ""),
    "top-k 8 and 8 draws": (Support("top-k+sample", top_k=8, num_samples=8, num_sample_sets=1), ("standard",), ""),
    "none": (Support("none"), ("standard",), "2"),
}
ROUNDS = 25
WHOLE = 150  # documents
WAYS = ("", "--top-k 64", "--top-p 0.99", "--support sample", "--support none", "--top-k 64 --precision float32")


def teacher_scores(folder: Path, corpus: str, support: Support) -> Rows:
    """Return documents of a corpus and what a teacher says of them."""
    documents = held_out(corpus, MODEL_CORPORA[corpus], Tokenizer(folder))
    request = TeacherConfig(folder, "teacher", Tokenizer(folder), "float32", 2048, support=support)
    return list(zip(documents, TransformersTeacher(request).score(documents), strict=True))


def ranks_of(rows: Rows, width: int, lengths: np.ndarray) -> VocabularyOrder:
    """Return the ranks of a cache of some documents."""
    return VocabularyOrder.from_counts(
        np.bincount(np.concatenate([row.ids for row, _ in rows]), minlength=width), lengths
    )


def seconds(codec: PackedCodec, rows: Rows, tokens: list[bytes], signals: list[bytes]) -> tuple[float, float]:
    """Return how long all tokens, and all signals, take to read."""
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        for (row, _), packed in zip(rows, tokens, strict=True):
            codec.unpack_tokens(memoryview(packed), len(row))
        between = time.thread_time()
        for (row, scores), packed in zip(rows, signals, strict=True):
            codec.unpack_teacher_logprobs(memoryview(packed), row.ids, scores.positions, 0)
        found.append((between - started, time.thread_time() - between))
    return min(part for part, _ in found), min(part for _, part in found)


def measure(
    label: str, rows: Rows, ranks: VocabularyOrder, support: Support, precision: str, reach: str
) -> tuple[str, str, str]:
    """Return a line of the report."""
    options = {"precision": precision, "num_sample_sets": support.num_sample_sets, "num_samples": support.num_samples}
    PackedCodec.pack(rows[:2], options, ranks)
    started = time.thread_time()
    tables, tokens, signals = PackedCodec.pack(rows, options, ranks)
    packing = time.thread_time() - started
    codec = PackedCodec(options, tables, ranks)
    of_tokens, of_signals = seconds(codec, rows, tokens, signals)
    back = [
        codec.unpack_stored_logprobs(packed, row.ids, scores.positions)
        for (row, scores), packed in zip(rows, signals, strict=True)
    ]
    positions = sum(len(scores) for _, scores in rows)
    length = sum(len(row) for row, _ in rows)
    added = sum(kl_on_stored_ids(scores, held).sum() for (_, scores), held in zip(rows, back, strict=True))
    entries = sum(len(to_teacher_logprobs(scores, 0).ids) for scores in back)
    entropy = sum(float(scores.entropy.sum()) for _, scores in rows) / positions
    mass = 1 - sum(float(scores.remainder_mass.sum()) for _, scores in rows) / positions
    size, of_tables = sum(map(len, signals)), len(tables) / positions
    told = (
        f"{size / positions + of_tables:.1f} bytes/position (tables {of_tables:.2f}), tokens "
        f"{sum(map(len, tokens)) / length:.2f}; {entries / positions:.1f} ids, exact mass {mass:.4f}, "
        f"KL {added / positions / entropy:.1e} of the entropy; read {positions / of_signals / 1e6:.2f} M "
        f"positions/s ({of_signals / entries * 1e9:.1f} ns an id), {length / of_tokens / 1e6:.0f} M tokens/s; "
        f"packed {positions / packing / 1e3:.0f} k positions/s"
    )
    return f"{label}, {precision}", told, f"{reach} bytes" if reach and precision == "standard" else ""


def compare(rows: Rows, ranks: VocabularyOrder) -> str:
    """Return the table of other ways, for exact ids and their log-probabilities."""
    lines = ["| way | ids | log-probabilities | together |", "| --- | --- | --- | --- |"]
    for way, ids, logprobs in alternatives(rows, ranks):
        lines.append(f"| {way} | {ids:.1f} | {logprobs:.1f} | {ids + logprobs:.1f} |")
    return "\n".join(lines) + "\n"


def whole_caches(folder: Path, model: Path) -> None:
    """Print the bytes of whole caches, text and tokens included, as the commands make and `inspect` tells them."""
    texts = gsm8k(WHOLE, part="test")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = []
    for number, options in enumerate(WAYS):
        cache = str(folder / f"cache-{number}")
        command = ["cache-teacher", str(model), str(folder / "texts.jsonl"), *options.split(), "-o", cache]
        for words in (command, ["inspect", cache, "--json"]):
            done = subprocess.run([sys.executable, "-m", "xtk", *words], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)["statistics"]
        parts = {name: round(size / found["positions"], 1) for name, size in found["bytes_by_section"].items()}
        told = (
            f"{found['bytes_per_position']} bytes/position ({parts}), KL {found['quantization_kl_fraction_of_entropy']}"
        )
        lines.append((options or "(default)", f"{told} of the entropy, {found['mean_entropy_nats']:.2f} nats", ""))
    report(__file__, lines)


def main() -> None:
    """Measure and print; `alternatives` compares other ways too, `whole` makes caches instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("alternatives", "whole"))
    parser.add_argument("--model", help="a folder or a GGUF file, instead of the benchmark's teacher")
    parser.add_argument("--supports", nargs="+", choices=list(SUPPORTS), default=list(SUPPORTS))
    given = parser.parse_args()
    silence_transformers()
    model = resolve_model_folder(given.model, with_weights=True) if given.model else language_model()
    if given.what == "whole":
        with tempfile.TemporaryDirectory() as name:
            whole_caches(Path(name), model)
        return
    tokenizer = Tokenizer(model)
    for corpus in MODEL_CORPORA if given.model else CORPORA:
        lines = []
        for label in given.supports:
            usual, precisions, reach = SUPPORTS[label]
            support = replace(usual, num_samples=DRAWS[corpus]) if usual.kind == "sample" else usual
            rows = teacher_scores(model, corpus, support)
            ranks = ranks_of(rows, tokenizer.embedding_rows, tokenizer.vocabulary.byte_lengths)
            lines += [measure(label, rows, ranks, support, precision, reach) for precision in precisions]
            if given.what == "alternatives" and support.kind in ("top-k", "top-p"):
                sys.stdout.write(f"\n{corpus}, {label}, on {machine()}\n\n{compare(rows, ranks)}")
        positions = sum(len(scores) for _, scores in rows)
        entropy = sum(float(scores.entropy.sum()) for _, scores in rows) / positions
        sys.stdout.write(f"\n{corpus}: {positions:,} positions, entropy {entropy:.2f} nats\n")
        report(__file__, lines)


if __name__ == "__main__":
    main()
