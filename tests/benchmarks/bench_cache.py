"""`cache-teacher` compared with the bare forward passes of the same batches.

The teacher: a Qwen3 of 12 layers, H = 1,024, U = 151,936, fp32 (on a GPU 28 layers, bf16), with random weights, which
do not affect the time.
Forward passes alone return logits [B, S, U]; the cache adds the top 64, remainder, observed token and entropy of every
position, and writes the shard. Runs alternate, median of 3.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measurement import gsm8k, model_folder, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from xtk.artifacts.cache_writer import ShardedCacheWriter
from xtk.artifacts.shard_writing import ScoredDocument
from xtk.artifacts.storage_folders import LocalFolder
from xtk.models.causal_lm import silence_transformers
from xtk.teachers.backend_interface import TeacherConfig
from xtk.teachers.transformers import TransformersTeacher, batches_by_length
from xtk.tokens.document import Document
from xtk.tokens.teacher_logprobs import Support
from xtk.tokens.token_sequence import tokenize_documents
from xtk.tokens.tokenizer import Tokenizer

TOP_K, REPEATS = 64, 3
CUDA = torch.cuda.is_available()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=256 if CUDA else 8)
    parser.add_argument("--batch-tokens", type=int, default=16384 if CUDA else 1024)
    parser.add_argument("--dtype", default="bfloat16" if CUDA else "float32")
    parser.add_argument("--layers", type=int, default=28 if CUDA else 12)
    args = parser.parse_args()
    silence_transformers()
    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    shape["num_hidden_layers"] = args.layers
    model_config = Qwen3Config(**shape, vocab_size=151936, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name) / "teacher", "qwen", Qwen3ForCausalLM(model_config))
        documents = [Document.from_text(text) for text in gsm8k(args.documents)]
        tokens = tokenize_documents(Tokenizer(folder), documents)
        support = Support("top-k", top_k=TOP_K)
        teacher_config = TeacherConfig(folder, name, Tokenizer(folder), args.dtype, args.batch_tokens, support=support)
        teacher = TransformersTeacher(teacher_config)
        header = {"codec": {"name": "raw", "num_samples": 0, "num_sample_sets": 0}}
        writer = ShardedCacheWriter(LocalFolder(Path(name) / "cache"), header, [len(documents)])
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
            scores = teacher.score(tokens)
            writer.write_shard(0, [ScoredDocument(*row) for row in zip(documents, tokens, scores, strict=True)])

        seconds: dict[str, list[float]] = {"bare": [], "cache": []}
        for _ in range(REPEATS + 1):
            for label, function in (("bare", bare), ("cache", cache)):
                started = time.perf_counter()
                function()
                seconds[label].append(time.perf_counter() - started)
    count = sum(map(len, tokens))
    rates = {label: count / statistics.median(times[1:]) for label, times in seconds.items()}
    result = f"{rates['cache'] / rates['bare']:.0%} ({rates['cache']:.0f} of {rates['bare']:.0f} tokens/s)"
    device = ("device", f"{'cuda' if CUDA else 'cpu'}, {torch.get_num_threads()} threads", "")
    report(__file__, [device, ("`cache-teacher`, tokens/s of the bare forward passes", result, "95 %")])


if __name__ == "__main__":
    main()
