"""`cache-teacher` compared with the bare forward passes of the same batches.

The teacher: a Qwen3 of 12 layers, H = 1,024, U = 151,936, fp32 (on a GPU 28 layers, bf16), with random weights, which
do not affect the time. Forward passes alone return logits [B, S, U]; the cache is that of `cache-teacher` with its
default options, without the plan that comes first: documents are read and tokenized, 16 tokens and 16 samples per
position are scored, and the shards are quantized and written. Runs alternate, median of 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measurement import gsm8k, model_folder, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from xtk.cache.teacher_logprobs import make_support
from xtk.cache.writer import mark_cache_unfinished
from xtk.data.corpus_reader import Corpus
from xtk.files.storage_folders import open_folder
from xtk.models.causal_lm import silence_transformers
from xtk.models.resolver import ModelRef
from xtk.teachers.cache_build_config import (
    CacheRequest,
    make_cache_header,
    make_vocabulary_order,
    open_teacher,
    sharding_options,
)
from xtk.teachers.cache_building import CacheJob
from xtk.teachers.cache_shard_planning import make_shard_plan
from xtk.teachers.transformers import TransformersTeacher, batches_by_length
from xtk.text.document import Document
from xtk.text.token_sequence import tokenize_documents
from xtk.text.tokenizer import Tokenizer

REPEATS = 3
CUDA = torch.cuda.is_available()


def make_job(folder: Path, texts: list[str], dtype: str, batch_tokens: int) -> CacheJob:
    """Return the job of a cache with the default support and precision."""
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = Corpus((str(folder / "data.jsonl"),))
    teacher = folder / "teacher"
    request = CacheRequest(ModelRef(teacher, dtype=dtype, name="teacher"), make_support(""), batch_tokens=batch_tokens)
    tokenizer, sharding = Tokenizer(teacher), sharding_options(request)
    plan = make_shard_plan(sharding, corpus, tokenizer)
    order = make_vocabulary_order(request.precision, tokenizer, plan)
    header = make_cache_header(request, tokenizer, plan, order)
    return CacheJob(request, header, corpus, folder / "cache", sharding, plan, order)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1152 if CUDA else 8)
    parser.add_argument("--batch-tokens", type=int, default=8192 if CUDA else 1024)
    parser.add_argument("--dtype", default="bfloat16" if CUDA else "float32")
    parser.add_argument("--layers", type=int, default=28 if CUDA else 12)
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    silence_transformers()
    torch.manual_seed(0)
    shape = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_attention_heads": 16}
    shape["num_hidden_layers"] = args.layers
    model_config = Qwen3Config(**shape, vocab_size=151936, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name) / "teacher", "qwen", Qwen3ForCausalLM(model_config))
        texts, numbers = gsm8k(args.documents), itertools.count()
        job = make_job(Path(name), texts, args.dtype, args.batch_tokens)
        tokenizer = Tokenizer(folder)
        teacher = open_teacher(job.request, tokenizer)
        assert isinstance(teacher, TransformersTeacher)
        tokens = tokenize_documents(tokenizer, [Document.from_text(text) for text in texts])
        batches = []
        for batch in batches_by_length([len(document) for document in tokens], args.batch_tokens):
            ids = torch.zeros(len(batch), max(len(tokens[at]) for at in batch), dtype=torch.int64)
            for row, at in enumerate(batch):
                ids[row, : len(tokens[at])] = torch.from_numpy(tokens[at].ids)
            batches.append(ids.to(teacher.model.device))

        def bare() -> None:
            with torch.inference_mode():
                for ids in batches:
                    teacher.model(input_ids=ids, use_cache=False)
            if CUDA:
                torch.cuda.synchronize()

        def cache() -> None:
            output = Path(name) / f"cache-{next(numbers)}"
            mark_cache_unfinished(open_folder(output))
            shards = list(range(len(job.plan.shards)))
            assert len(list(dataclasses.replace(job, location=output).run(teacher, tokenizer, shards))) > 0

        seconds: dict[str, list[float]] = {"bare": [], "cache": []}
        for _ in range(REPEATS + 1):
            for label, function in (("bare", bare), ("cache", cache)):
                started = time.perf_counter()
                function()
                seconds[label].append(time.perf_counter() - started)
    count = sum(map(len, tokens))
    rates = {label: count / statistics.median(times[1:]) for label, times in seconds.items()}
    result = f"{rates['cache'] / rates['bare']:.0%} ({rates['cache']:.0f} of {rates['bare']:.0f} tokens/s)"
    device = ("device", f"{'cuda' if CUDA else 'cpu'}, {torch.get_num_threads()} threads, {args.dtype}", "")
    size = f"{count:,} tokens in {len(job.plan.shards)} shards"
    report(__file__, [device, (f"`cache-teacher`, {size}, tokens/s of the bare forward passes", result, "95 %")])


if __name__ == "__main__":
    main()
