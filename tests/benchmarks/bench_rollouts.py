"""Rollouts: vLLM through xtk against bare `LLM.generate`, the same requests, in turns, in one run.

Needs vLLM: run it in the environment of `nox -s vllm`, with OMP_NUM_THREADS=1 and TORCHDYNAMO_DISABLE=1 on a CPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PROMPTS, SAMPLES, PROMPT, COMPLETION, TURNS = 16, 4, 128, 64, 31


def main() -> None:
    """Print the table."""
    if importlib.util.find_spec("vllm") is None:
        sys.stdout.write("skipped: vLLM is not installed\n")
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import numpy as np
    import torch
    from measurement import report
    from vllm_on_cpu import ENGINE, SURROUNDINGS, make_llama

    from xtk.engines.backend import BackendConfig
    from xtk.engines.vllm_engine import import_vllm
    from xtk.rollouts.engine_request_checks import seed_from_key
    from xtk.rollouts.generator_interface import GenerationRequest, SamplingConfig
    from xtk.rollouts.subprocess_generator import SubprocessGenerator
    from xtk.rollouts.vllm_generator import VllmGenerator
    from xtk.tokens.tokenizer import Tokenizer

    # On a CPU vLLM 0.32 cannot draw with seeds where a prompt is read in two passes.
    whole = [*ENGINE, f"max_num_batched_tokens={2 * PROMPTS * SAMPLES * PROMPT}"]
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(Path(folder) / "student", context=512)
        tokenizer = Tokenizer(model)
        request = BackendConfig(
            model, "student", tokenizer, options={"engine": [] if torch.cuda.is_available() else whole}
        )
        writer = VllmGenerator.open(request)
        apart = SubprocessGenerator(request, "vllm", {**SURROUNDINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        bare = writer._engine.llm
        sampling = SamplingConfig(max_completion_length=COMPLETION)
        parameters = import_vllm().SamplingParams

        def asks(turn: int) -> list[GenerationRequest]:
            # Other prompts in each turn: nobody has read them before.
            prompts = np.random.default_rng(turn).integers(5, 400, (PROMPTS, PROMPT)).astype(np.int32)
            return [GenerationRequest(prompts[at // SAMPLES], (turn, at)) for at in range(PROMPTS * SAMPLES)]

        def plainly(turn: int) -> int:
            wanted = [
                parameters(
                    temperature=1.0,
                    max_tokens=COMPLETION,
                    seed=seed_from_key(ask.seed_key),
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    ignore_eos=True,
                    stop_token_ids=sorted(tokenizer.end_ids),
                    logit_bias=writer._padding_bias,
                )
                for ask in asks(turn)
            ]
            bare.reset_prefix_cache()
            found = bare.generate(
                [{"prompt_token_ids": ask.input_ids.tolist()} for ask in asks(turn)], wanted, use_tqdm=False
            )
            return sum(len(one.outputs[0].token_ids) for one in found)

        def through(which: VllmGenerator | SubprocessGenerator) -> Callable[[int], int]:
            def write(turn: int) -> int:
                bare.reset_prefix_cache()
                return sum(len(one.ids) for one in which.generate(asks(turn), sampling))

            return write

        ways = {"bare": plainly, "here": through(writer), "apart": through(apart)}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TURNS + 1):
            names = list(ways) if turn % 2 else list(ways)[::-1]
            for name in names:
                started = time.perf_counter()
                tokens = ways[name](turn)
                if turn:  # the first one warms up
                    rates[name].append(tokens / (time.perf_counter() - started))
        apart.close()
        writer.close()
    median = {name: statistics.median(found) for name, found in rates.items()}
    ratio = {name: statistics.median(a / b for a, b in zip(rates[name], rates["bare"], strict=True)) for name in ways}
    report(
        __file__,
        [
            ("bare `LLM.generate`, tokens/s", f"{median['bare']:,.0f}", ""),
            ("`VllmWriter`, of that", f"{ratio['here']:.1%} ({median['here']:,.0f} tokens/s)", "97 %"),
            ("`Apart`, of that", f"{ratio['apart']:.1%} ({median['apart']:,.0f} tokens/s)", ""),
        ],
    )


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
