"""The packed codec on a real teacher's scores: bytes per position by support and precision, divergence, speed.

    python tests/benchmarks/bench_codec.py [alternatives|whole] [--model MODEL]

The teacher is that of `calibrated_teacher.py`, trained once on this machine, or MODEL, a folder or a GGUF file.
Documents are held-out GSM8K and WikiText-2 (with MODEL also HumanEval), the vocabulary order is that of those
documents, and one shard contains them all. Speed: from the bytes of documents to a student's arrays, one thread, best
of several repetitions, without compilation.
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
from codec_alternatives import alternative_encodings
from measurement import gsm8k, machine, report

from xtk.cache.codec.packed_shard_codec import PackedCodec
from xtk.cache.teacher_logprobs import StoredLogprobs, Support, kl_on_stored_ids
from xtk.cache.token_ids_by_frequency import VocabularyOrder
from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import ModelRef, resolve_model_folder
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher
from xtk.text.token_sequence import TokenSequence as TokenSequence
from xtk.text.tokenizer import Tokenizer

Rows = list[tuple[TokenSequence, StoredLogprobs]]

CORPORA = {"gsm8k": 4000, "wikitext": 8000}
MODEL_CORPORA = CORPORA | {"humaneval": 4000}
NUM_SAMPLES = {
    "gsm8k": 26,
    "wikitext": 14,
    "humaneval": 26,
}  # that give 12 distinct ids on average, including the observed token
SUPPORTS = {
    "top-p 0.99, 64 at most": (Support("top-p", top_k=64, top_p=0.99), ("fine", "standard", "coarse"), "40"),
    "top-k 64": (Support("top-k", top_k=64), ("fine", "standard", "coarse"), "130"),
    "sample, 12 ids": (Support("sample", num_sample_sets=1), ("standard",), "24"),
    "top-k 16 and 12 samples": (
        Support("top-k+sample", top_k=16, num_samples=12, num_sample_sets=1),
        ("standard",),
        "",
    ),
    "top-k 8 and 8 samples": (Support("top-k+sample", top_k=8, num_samples=8, num_sample_sets=1), ("standard",), ""),
    "none": (Support("none"), ("standard",), "2"),
}
REPEATS = 25
WHOLE_CACHE_DOCUMENTS = 150  # documents
WHOLE_CACHE_OPTIONS = ("", "--top-k 64", "--top-p 0.99", "--support sample", "--support none",
                       "--top-k 64 --precision float32")  # fmt: skip


def teacher_scores(folder: Path, corpus: str, support: Support) -> Rows:
    """Return documents of a corpus with a teacher's scores of them."""
    documents = held_out(corpus, MODEL_CORPORA[corpus], Tokenizer(folder))
    request = TeacherConfig(ModelRef(folder, name="teacher"), Tokenizer(folder), batch_tokens=2048, support=support)
    return list(zip(documents, TransformersTeacher(request).score(documents), strict=True))


def vocabulary_order_of(rows: Rows, width: int, lengths: np.ndarray) -> VocabularyOrder:
    """Return the vocabulary order of a cache of some documents."""
    return VocabularyOrder.from_counts(
        np.bincount(np.concatenate([row.ids for row, _ in rows]), minlength=width), lengths
    )


def unpack_seconds(codec: PackedCodec, rows: Rows, tokens: list[bytes], logprobs: list[bytes]) -> tuple[float, float]:
    """Return the seconds that unpacking all tokens, and all log-probabilities, takes."""
    times: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        started = time.thread_time()
        for (row, _), packed in zip(rows, tokens, strict=True):
            codec.unpack_tokens(memoryview(packed), len(row))
        middle = time.thread_time()
        for (row, scores), packed in zip(rows, logprobs, strict=True):
            codec.unpack_teacher_logprobs(memoryview(packed), row.ids, scores.positions, 0)
        times.append((middle - started, time.thread_time() - middle))
    return min(value for value, _ in times), min(value for _, value in times)


def measure(
    label: str, rows: Rows, order: VocabularyOrder, support: Support, precision: str, target: str
) -> tuple[str, str, str]:
    """Return a row of the report."""
    options = {
        "precision": precision, "num_sample_sets": support.num_sample_sets, "num_samples": support.num_samples,
        "sample_logprobs": support.num_sample_sets > 0,
    }  # fmt: skip
    PackedCodec.pack(rows[:2], options, order)
    started = time.thread_time()
    tables, tokens, logprobs = PackedCodec.pack(rows, options, order)
    pack_time = time.thread_time() - started
    codec = PackedCodec(options, tables, order)
    token_time, logprob_time = unpack_seconds(codec, rows, tokens, logprobs)
    unpacked = [
        codec.unpack_stored_logprobs(packed, row.ids, scores.positions)
        for (row, scores), packed in zip(rows, logprobs, strict=True)
    ]
    positions = sum(len(scores) for _, scores in rows)
    length = sum(len(row) for row, _ in rows)
    total_kl = sum(
        kl_on_stored_ids(scores, unpacked_scores).sum()
        for (_, scores), unpacked_scores in zip(rows, unpacked, strict=True)
    )
    entries = sum(len(StoredLogprobs.to_teacher_logprobs(scores, 0).ids) for scores in unpacked)
    entropy = sum(float(scores.entropy.sum()) for _, scores in rows) / positions
    mass = 1 - sum(float(scores.remainder_mass.sum()) for _, scores in rows) / positions
    size, table_bytes = sum(map(len, logprobs)), len(tables) / positions
    result = (
        f"{size / positions + table_bytes:.1f} bytes/position (tables {table_bytes:.2f}), tokens "
        f"{sum(map(len, tokens)) / length:.2f}; {entries / positions:.1f} ids, exact mass {mass:.4f}, "
        f"KL {total_kl / positions / entropy:.1e} of the entropy; read {positions / logprob_time / 1e6:.2f} M "
        f"positions/s ({logprob_time / entries * 1e9:.1f} ns an id), {length / token_time / 1e6:.0f} M tokens/s; "
        f"packed {positions / pack_time / 1e3:.0f} k positions/s"
    )
    return f"{label}, {precision}", result, f"{target} bytes" if target and precision == "standard" else ""


def alternatives_table(rows: Rows, order: VocabularyOrder) -> str:
    """Return the table of other encodings, for exact ids and their log-probabilities."""
    lines = ["| way | ids | log-probabilities | together |", "| --- | --- | --- | --- |"]
    for encoding, ids, logprobs in alternative_encodings(rows, order):
        lines.append(f"| {encoding} | {ids:.1f} | {logprobs:.1f} | {ids + logprobs:.1f} |")
    return "\n".join(lines) + "\n"


def whole_caches(folder: Path, model: Path) -> None:
    """Print the bytes of whole caches that the command writes, with text and tokens, as `inspect` reports them."""
    texts = gsm8k(WHOLE_CACHE_DOCUMENTS, part="test")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = []
    for index, options in enumerate(WHOLE_CACHE_OPTIONS):
        cache = str(folder / f"cache-{index}")
        command = ["cache-teacher", str(model), str(folder / "texts.jsonl"), *options.split(), "-o", cache]
        for words in (command, ["inspect", cache, "--json"]):
            done = subprocess.run([sys.executable, "-m", "xtk", *words], check=True, capture_output=True, text=True)
        data = json.loads(done.stdout)["statistics"]
        parts = {name: round(size / data["positions"], 1) for name, size in data["bytes_by_section"].items()}
        result = (
            f"{data['bytes_per_position']} bytes/position ({parts}), KL {data['quantization_kl_fraction_of_entropy']}"
        )
        lines.append((options or "(default)", f"{result} of the entropy, {data['mean_entropy_nats']:.2f} nats", ""))
    report(__file__, lines)


def main() -> None:
    """Measure and print; `alternatives` also compares other encodings, `whole` writes whole caches instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("alternatives", "whole"))
    parser.add_argument("--model", help="a folder or a GGUF file, instead of the benchmark's teacher")
    parser.add_argument("--supports", nargs="+", choices=list(SUPPORTS), default=list(SUPPORTS))
    args = parser.parse_args()
    silence_transformers()
    model = resolve_model_folder(args.model, with_weights=True) if args.model else language_model()
    if args.what == "whole":
        with tempfile.TemporaryDirectory() as name:
            whole_caches(Path(name), model)
        return
    tokenizer = Tokenizer(model)
    for corpus in MODEL_CORPORA if args.model else CORPORA:
        lines = []
        for label in args.supports:
            base, precisions, target = SUPPORTS[label]
            support = replace(base, num_samples=NUM_SAMPLES[corpus]) if base.kind == "sample" else base
            rows = teacher_scores(model, corpus, support)
            order = vocabulary_order_of(rows, tokenizer.embedding_rows, tokenizer.vocabulary.byte_lengths)
            lines += [measure(label, rows, order, support, precision, target) for precision in precisions]
            if args.what == "alternatives" and support.kind in ("top-k", "top-p"):
                sys.stdout.write(f"\n{corpus}, {label}, on {machine()}\n\n{alternatives_table(rows, order)}")
        positions = sum(len(scores) for _, scores in rows)
        entropy = sum(float(scores.entropy.sum()) for _, scores in rows) / positions
        sys.stdout.write(f"\n{corpus}: {positions:,} positions, entropy {entropy:.2f} nats\n")
        report(__file__, lines)


if __name__ == "__main__":
    main()
