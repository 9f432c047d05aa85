"""Rollouts by vLLM through xtk compared with bare `LLM.generate`: the same requests, alternating, in one run.

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

PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS, REPEATS = 16, 4, 128, 64, 31


def main() -> None:
    """Print the table."""
    if importlib.util.find_spec("vllm") is None:
        sys.stdout.write("skipped: vLLM is not installed\n")
        return
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import numpy as np
    import torch
    from measurement import report
    from vllm_on_cpu import ENGINE, ENVIRONMENT, make_llama

    from xtk.engines.backend import BackendConfig
    from xtk.engines.vllm_engine import import_vllm
    from xtk.models.resolver import ModelRef
    from xtk.rollouts.engine_request_checks import seed_from_key
    from xtk.rollouts.generator_interface import GenerationRequest, SamplingConfig
    from xtk.rollouts.subprocess_generator import SubprocessGenerator
    from xtk.rollouts.vllm_generator import VllmGenerator
    from xtk.text.tokenizer import Tokenizer

    # On a CPU vLLM 0.32 cannot sample with seeds if a prompt is prefilled in two passes.
    one_pass_options = [*ENGINE, f"max_num_batched_tokens={2 * PROMPTS * SAMPLES * PROMPT_TOKENS}"]
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama(Path(folder) / "student", context=512)
        tokenizer = Tokenizer(model)
        config = BackendConfig(
            ModelRef(model, name="student"),
            tokenizer,
            options={"engine": [] if torch.cuda.is_available() else one_pass_options},
        )
        generator = VllmGenerator.open(config)
        subprocess_generator = SubprocessGenerator(
            config, "vllm", {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        )
        llm = generator._engine.llm
        sampling = SamplingConfig(max_completion_length=COMPLETION_TOKENS)
        parameters = import_vllm().SamplingParams

        def requests(repeat: int) -> list[GenerationRequest]:
            # New prompts in each repetition, so that no prefix cache contains them.
            prompts = np.random.default_rng(repeat).integers(5, 400, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
            return [GenerationRequest(prompts[at // SAMPLES], (repeat, at)) for at in range(PROMPTS * SAMPLES)]

        def generate_bare(repeat: int) -> int:
            sampling_params = [
                parameters(
                    temperature=1.0,
                    max_tokens=COMPLETION_TOKENS,
                    seed=seed_from_key(request.seed_key),
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    ignore_eos=True,
                    stop_token_ids=sorted(tokenizer.end_ids),
                    logit_bias=generator._padding_bias,
                )
                for request in requests(repeat)
            ]
            llm.reset_prefix_cache()
            values = llm.generate(
                [{"prompt_token_ids": request.input_ids.tolist()} for request in requests(repeat)],
                sampling_params,
                use_tqdm=False,
            )
            return sum(len(output.outputs[0].token_ids) for output in values)

        def generate_with(backend: VllmGenerator | SubprocessGenerator) -> Callable[[int], int]:
            def generate(repeat: int) -> int:
                llm.reset_prefix_cache()
                return sum(len(output.ids) for output in backend.generate(requests(repeat), sampling))

            return generate

        functions = {
            "bare": generate_bare,
            "here": generate_with(generator),
            "apart": generate_with(subprocess_generator),
        }
        rates: dict[str, list[float]] = {name: [] for name in functions}
        for repeat in range(REPEATS + 1):
            names = list(functions) if repeat % 2 else list(functions)[::-1]
            for name in names:
                started = time.perf_counter()
                tokens = functions[name](repeat)
                if repeat:  # the first repetition is a warm-up
                    rates[name].append(tokens / (time.perf_counter() - started))
        subprocess_generator.close()
        generator.close()
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratio = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates["bare"], strict=True)) for name in functions
    }
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
