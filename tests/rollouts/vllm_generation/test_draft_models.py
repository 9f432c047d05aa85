"""vLLM generates with a draft that xtk made: the target's greedy text, and the blocks of xtk's own decoder."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
from small_drafts import PROMPTS, make_draft
from transformers import AutoModelForCausalLM
from vllm_on_cpu import ENVIRONMENT, make_llama

from xtk.evaluation.speculative_decoding import CachedModel, SpeculativeDecoder
from xtk.rollouts.generator_interface import SamplingConfig
from xtk.text.tokenizer import Tokenizer

K, LENGTH = 3, 24
SCRIPT = """
import json, pathlib, sys
from vllm import LLM, SamplingParams
target, draft, prompts, k, length, output = sys.argv[1:]
config = {"method": "draft_model", "model": draft, "num_speculative_tokens": int(k)}
options = {"speculative_config": config} if draft else {}
engine = LLM(target, dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=128 << 20,
             disable_log_stats=False, **options)
requests = [{"prompt_token_ids": ids} for ids in json.loads(prompts)]
written = engine.generate(requests, SamplingParams(temperature=0, max_tokens=int(length)))
metrics = {one.name: getattr(one, "value", getattr(one, "values", None)) for one in engine.get_metrics()}
counts = {name: value for name, value in metrics.items() if "spec_decode" in name}
pathlib.Path(output).write_text(json.dumps([[list(one.outputs[0].token_ids) for one in written], counts]))
"""


def test_a_draft_of_another_family_generates_in_vllm(run, tmp_path):
    rows = len(Tokenizer(make_llama(tmp_path / "tokenizer", context=128)))  # vLLM also samples rows without a token
    target = make_llama(tmp_path / "target", context=128, vocab_size=rows)
    draft = make_draft(run, target, tmp_path, length=LENGTH)
    tokenizer = Tokenizer(target)
    prompts = [[*tokenizer.start_ids, *one.ids.tolist()] for one in tokenizer.encode(PROMPTS)]
    results = []
    for model in ("", str(draft)):
        output = tmp_path / "output.json"
        arguments = [str(target), model, json.dumps(prompts), str(K), str(LENGTH), str(output)]
        environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=900,
            check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-3000:]
        results.append(json.loads(output.read_text()))
    (alone, _), (with_draft, counts) = results
    assert with_draft == alone

    # vLLM's first token comes with the prompt; the blocks after it are those of xtk.
    models = [CachedModel(AutoModelForCausalLM.from_pretrained(one).eval(), len(tokenizer)) for one in (target, draft)]
    decoder = SpeculativeDecoder(*models, SamplingConfig(temperature=0.0), tokenizer.stop_ids)
    expected, blocks = np.zeros(K, int), 0
    for prompt, ids in zip(prompts, alone, strict=True):
        if len(ids) > 1:
            completion = decoder.generate(np.array([*prompt, ids[0]], np.int32), K, len(ids) - 1, seed=0)
            assert completion.ids[: len(ids) - 1].tolist() == ids[1:]
            expected += completion.proposal_counts(K)[1]
            blocks += completion.num_blocks
    accepted = counts["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert 0.2 < sum(expected) / (K * blocks) < 0.95
    assert (accepted, counts["vllm:spec_decode_num_drafts"]) == (expected.tolist(), blocks)
